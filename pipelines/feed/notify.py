"""The project's `notify.yaml`: where the findings of the sensor go. It may be missing (docs/operating.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from sluice.pipelines.feed.optional import load_optional
from sluice.pipelines.feed.settings import Settings, Text

NOTIFY = "notify.yaml"
"""The name of the file, in the project's folder."""


def _web_address(address: SecretStr) -> SecretStr:
    if not address.get_secret_value().startswith(("https://", "http://")):
        raise ValueError("is no http:// or https:// address")
    return address


class NotifySettings(Settings):
    """`webhook` gets `{"text": …}`, as Slack takes it; the address is a secret, since whoever has it may post there.
    `command` is a program and its arguments, and gets the lines on its stdin. Without either, nothing is sent."""

    webhook: Annotated[SecretStr, AfterValidator(_web_address)] | None = None
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None


def load_notify(folder: Path, environ: Mapping[str, str]) -> NotifySettings:
    """The settings in the folder's file, or those without one. Raises FeedError."""
    return load_optional(folder, NOTIFY, NotifySettings, environ)
