"""The reasons of the quarantine: a word each, and a sentence for each case (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.records.columns.loops import OUT_OF_RANGE, TWICE
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.rows import wire_format
from sluice.pipelines.records.rows.row_format import Stage
from sluice.pipelines.records.rows.wire_format import Named
from sluice.pipelines.schema.layout import HIDDEN


class Reason(StrEnum):
    """The values of the column `reason`."""

    NOT_JSON = "not_json"
    INVALID_UTF8 = "invalid_utf8"
    TOO_DEEP = "too_deep"
    TOO_LARGE = "too_large"
    WRONG_TYPE = "wrong_type"
    MISSING = "missing"
    DUPLICATE = "duplicate"
    LONE_SURROGATE = "lone_surrogate"
    OUT_OF_RANGE = "out_of_range"
    INEXACT = "inexact"
    MALFORMED = "malformed"
    UNKNOWN_FIELD = "unknown_field"
    NOT_AVRO = "not_avro"
    NOT_PROTOBUF = "not_protobuf"
    UNKNOWN_SCHEMA = "unknown_schema"
    INCOMPATIBLE = "incompatible"

    @property
    def stage(self) -> Stage:
        """The stage that refuses a record for this reason."""
        return Stage.SCHEMA if self in _OF_SCHEMA else Stage.DECODE


_OF_SCHEMA = {
    Reason.WRONG_TYPE,
    Reason.MISSING,
    Reason.OUT_OF_RANGE,
    Reason.INEXACT,
    Reason.MALFORMED,
    Reason.UNKNOWN_FIELD,
    Reason.INCOMPATIBLE,
}
Explained = tuple[Reason, str]
"""A reason, and a sentence in which `{type}` stands for the field's type."""

_COMMON = {
    TWICE: (Reason.DUPLICATE, "is there more than once"),
    OUT_OF_RANGE: (Reason.OUT_OF_RANGE, "too large for {type}"),
}


@dataclass(frozen=True)
class Reasons:
    """The reasons of one format, by the codes of its loops. `unread` is its word for bytes that are not the format's;
    `own` are the codes that not all formats have."""

    unread: Reason
    own: Mapping[int, Explained]

    def _find(self, code: int) -> Explained:
        unread = {wire_format.NO_HEADER: wire_format.UNNAMED, wire_format.NOT_INFLATED: wire_format.UNZIPPED}
        return (self.unread, unread[code]) if code in unread else self.own.get(code) or _COMMON[code]

    def get_reason(self, code: int) -> Reason:
        """The reason that a code stands for."""
        return self._find(code)[0]

    def describe(self, code: int, node: SchemaNode | None, schema: Named | None = None, why: str = "") -> str:
        """A sentence about the field, with the writer's schema (None: not known) and why that does not fit. It never
        holds the field's value."""
        kind = "null" if node is None else "an object" if node.path.startswith(HIDDEN) else node.type
        text = self._find(code)[1].format(type=kind)
        text = f"{text}: {why}" if why else text
        return text if schema is None else f"{text} (schema {schema})"
