"""Why an Avro record is in quarantine: a word and a sentence for each code of the loops (docs/formats.md)."""

from __future__ import annotations

from sluice.pipelines.records import wire
from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.typed import reasons
from sluice.pipelines.records.typed.reasons import Reason
from sluice.pipelines.records.typed.tables import SchemaNode
from sluice.pipelines.records.wire import Named

_SAID = {
    wire.NO_HEADER: (Reason.NOT_AVRO, wire.UNNAMED),
    wire.NOT_INFLATED: (Reason.NOT_AVRO, wire.UNZIPPED),
    loops.NO_SCHEMA: (Reason.UNKNOWN_SCHEMA, "the registry has no schema of this number"),
    loops.INCOMPATIBLE: (Reason.INCOMPATIBLE, "what its schema writes cannot be read as the feed's"),
    loops.CUT: (Reason.NOT_AVRO, "it ends too early"),
    loops.LONG_VARINT: (Reason.NOT_AVRO, "a number of more than 64 bits"),
    loops.WIDE_INT: (Reason.NOT_AVRO, "an int of more than 32 bits"),
    loops.NO_TRUTH: (Reason.NOT_AVRO, "a boolean that is neither 0 nor 1"),
    loops.NO_BRANCH: (Reason.NOT_AVRO, "a branch that its union does not have"),
    loops.NO_SYMBOL: (Reason.NOT_AVRO, "a symbol that its enum does not have"),
    loops.BAD_SIZE: (Reason.NOT_AVRO, "a negative size"),
    loops.MORE: (Reason.NOT_AVRO, "more after the end of the record"),
    loops.BAD_TEXT: (Reason.INVALID_UTF8, "bytes that are not UTF-8"),
    loops.OTHER_BRANCH: (Reason.WRONG_TYPE, "a branch of the writer's union that is not {type}"),
    loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a symbol that the feed's schema does not have"),
    loops.MANY: (Reason.TOO_LARGE, "more elements than a record may have"),
    loops.NEW_FIELDS: (Reason.UNKNOWN_FIELD, "its schema has fields that the feed's does not have"),
    loops.WIDE_DECIMAL: (Reason.OUT_OF_RANGE, "too large for {type}"),
}


def reason_of(code: int) -> Reason:
    """The reason that a code of the loops stands for."""
    return _SAID[code][0] if code in _SAID else reasons.reason_of(code)


def detail_of(code: int, node: SchemaNode | None, schema: Named | None) -> str:
    """A sentence about the field, with the writer's schema (None: not known). It never holds the field's value."""
    known = _SAID.get(code)
    said = known[1].format(type=node.type if node else "null") if known else reasons.detail_of(code, node)
    return said if schema is None else f"{said} (schema {schema})"
