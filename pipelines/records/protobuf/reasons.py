"""Why a Protobuf record is in quarantine: a word and a sentence for each code of the loops (docs/formats.md)."""

from __future__ import annotations

from sluice.pipelines.records import wire
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.typed import reasons
from sluice.pipelines.records.typed.reasons import Reason
from sluice.pipelines.records.typed.tables import SchemaNode
from sluice.pipelines.records.wire import Named

_SAID = {
    wire.NO_HEADER: (Reason.NOT_PROTOBUF, wire.UNNAMED),
    loops.NO_SCHEMA: (Reason.UNKNOWN_SCHEMA, "the registry has no schema of this number"),
    loops.INCOMPATIBLE: (Reason.INCOMPATIBLE, "what its schema writes cannot be read as the feed's"),
    loops.OTHER_MESSAGE: (Reason.INCOMPATIBLE, "it is of another message than the feed's"),
    loops.NO_MESSAGE: (Reason.NOT_PROTOBUF, "it names a message that its schema does not have"),
    loops.CUT: (Reason.NOT_PROTOBUF, "it ends too early"),
    loops.LONG_VARINT: (Reason.NOT_PROTOBUF, "a number of too many bytes"),
    loops.NO_FIELD: (Reason.NOT_PROTOBUF, "a field's number that no field can have"),
    loops.NO_WIRE: (Reason.NOT_PROTOBUF, "a wire type that there is not"),
    loops.NO_GROUP: (Reason.NOT_PROTOBUF, "the end of a group that has not begun"),
    loops.BAD_TEXT: (Reason.INVALID_UTF8, "bytes that are not UTF-8"),
    loops.DEEP: (Reason.TOO_DEEP, f"more than {loops.MOST_DEPTH} messages and groups inside one another"),
    loops.MANY: (Reason.TOO_LARGE, "more elements than a record may have"),
    loops.NEW_FIELD: (Reason.UNKNOWN_FIELD, "it has a field that the feed's message does not have"),
    loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a number that the enum of the feed's schema does not have"),
    loops.MISSING: (Reason.MISSING, "is missing, and is required"),
    loops.NO_DOCUMENT: (Reason.MALFORMED, "holds what JSON cannot say"),
}


def reason_of(code: int) -> Reason:
    """The reason that a code of the loops stands for."""
    return _SAID[code][0] if code in _SAID else reasons.reason_of(code)


def detail_of(code: int, node: SchemaNode | None, schema: Named | None) -> str:
    """A sentence about the field, with the writer's schema (None: not known). It never holds the field's value."""
    known = _SAID.get(code)
    said = known[1] if known else reasons.detail_of(code, node)
    return said if schema is None else f"{said} (schema {schema})"
