"""The rule by which a feed's records are split into outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.schema.protection import HEADERS, extend_path


class Otherwise(StrEnum):
    """The treatment of a record that no output takes."""

    QUARANTINE = "quarantine"
    RAW = "raw"
    DROP = "drop"


class Tombstones(StrEnum):
    """The outputs of a record without a value that has no value which chooses one."""

    OTHERWISE = "otherwise"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a record's output is chosen: by the text of its last header of the name `header`, by the value at `path` in
    its JSON value, whose parts are names, or, with `by_message`, by the full name of its message. `outputs` has the
    names of outputs by value.
    """

    outputs: Mapping[str, str]
    header: str = ""
    path: tuple[str, ...] = ()
    otherwise: Otherwise = Otherwise.QUARANTINE
    by_message: bool = False
    tombstones: Tombstones = Tombstones.OTHERWISE

    @property
    def source_path(self) -> str:
        """The path by which rules of protection name the value."""
        return extend_path(HEADERS, self.header) if self.header else ".".join(self.path).lower()

    @property
    def source(self) -> str:
        """Where the value stands, for messages."""
        return "message" if self.by_message else f"header {self.header}" if self.header else ".".join(self.path)


OTHERWISE = "otherwise"
"""The output of raw records that no other output takes."""
