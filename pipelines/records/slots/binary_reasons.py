"""Reasons of quarantined records that the binary formats share (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.pipelines.records.json import reasons
from sluice.pipelines.records.json.reasons import Reason
from sluice.pipelines.records.json.scan_tables import SchemaNode
from sluice.pipelines.records.rows import wire_format
from sluice.pipelines.records.rows.wire_format import Named
from sluice.pipelines.records.slots import binary_loops


@dataclass(frozen=True)
class Reasons:
    """A word and a sentence for each code of a format's loops. `unread`: the word for bytes that are not the format's;
    `own`: the codes that only the format has."""

    unread: Reason
    own: Mapping[int, tuple[Reason, str]]

    def _find_entry(self, code: int) -> tuple[Reason, str] | None:
        unread = {
            wire_format.NO_HEADER: wire_format.UNNAMED,
            wire_format.NOT_INFLATED: wire_format.UNZIPPED,
            binary_loops.CUT: "it ends too early",
        }
        return (self.unread, unread[code]) if code in unread else self.own.get(code) or _COMMON.get(code)

    def reason(self, code: int) -> Reason:
        """The reason that a code stands for."""
        entry = self._find_entry(code)
        return entry[0] if entry else reasons.reason_of(code)

    def detail(self, code: int, node: SchemaNode | None, schema: Named | None, why: str = "") -> str:
        """A sentence about the field, with the writer's schema (None: not known) and why that does not fit. It never
        holds the field's value."""
        entry = self._find_entry(code)
        text = entry[1].format(type=node.type if node else "null") if entry else reasons.detail_of(code, node)
        text = f"{text}: {why}" if why else text
        return text if schema is None else f"{text} (schema {schema})"


_COMMON = {
    binary_loops.NO_SCHEMA: (Reason.UNKNOWN_SCHEMA, "the registry has no schema of this number"),
    binary_loops.INCOMPATIBLE: (Reason.INCOMPATIBLE, "what its schema writes cannot be read as the feed's"),
    binary_loops.BAD_TEXT: (Reason.INVALID_UTF8, "bytes that are not UTF-8"),
    binary_loops.MANY: (Reason.TOO_LARGE, "more elements than a record may have"),
}
