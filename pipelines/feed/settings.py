"""The base of all settings, and the kinds of value in them: sizes, counts, durations, names, paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

from sluice.pipelines.util.units import parse_duration, parse_size


def number(value: object) -> object:
    """The value, unless it is true or false, which pydantic would take for a number. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def printable(text: str) -> str:
    """The text, if every character can be printed. Raises ValueError."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def below_root(text: str, info: ValidationInfo) -> str:
    """The path, relative to the project's root if the validation context names one. Raises ValueError."""
    root = (info.context or {}).get("root")
    try:
        return str(root / Path(text).expanduser()) if root else text
    except RuntimeError:
        raise ValueError("starts with ~ and a user that is not known here") from None


_SIZE = {"type": ["integer", "string"], "exclusiveMinimum": 0, "pattern": "^ *[0-9]+ *([KMGT]i?B|B)? *$"}
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=1 << 62), WithJsonSchema(_SIZE)]
Count = Annotated[int, BeforeValidator(number), Field(ge=1, lt=1 << 62)]
_DURATION = {"type": "string", "pattern": "^ *[0-9]+ *(ms|s|m|h|d) *$"}
Duration = Annotated[int, BeforeValidator(parse_duration), Field(lt=1 << 40), WithJsonSchema(_DURATION)]
"""Milliseconds."""
Millis = Annotated[int, BeforeValidator(number), Field(ge=1, lt=1 << 31)]
Secret = Annotated[SecretStr, Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(printable)]
Description = Annotated[str, StringConstraints(min_length=1, max_length=500), AfterValidator(printable)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}\z")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=249), AfterValidator(printable)]
Owner = Annotated[
    str, StringConstraints(pattern=r"^(team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7})\z", max_length=200)
]
"""By Dagster's rules, like the following ones: an email address, or a team."""
TagKey = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}\z")]
TagValue = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{0,63}\z")]
AssetGroup = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+\z", max_length=200)]
LocalFile = Annotated[Text, AfterValidator(below_root)]


class Settings(BaseModel):
    """Settings are frozen, forbid unknown keys, and keep values out of errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
