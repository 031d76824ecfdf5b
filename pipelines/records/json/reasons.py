"""Why a record is in quarantine: a word for each reason, and a sentence for each case (docs/formats.md)."""

from __future__ import annotations

from enum import StrEnum

from sluice.pipelines.records.json import fill, scan
from sluice.pipelines.records.json.scan_tables import SchemaNode


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


UNKNOWN, WIDE_TEXT = 60, 61
"""The codes of a record with fields that the schema does not name, and of one in UTF-16 or UTF-32. The loops define the
other codes."""


_SAID = {
    scan.NO_VALUE: (Reason.NOT_JSON, "no JSON value begins here"),
    scan.NO_LITERAL: (Reason.NOT_JSON, "neither true, false nor null"),
    scan.NO_NUMBER: (Reason.NOT_JSON, "not a number as JSON writes them"),
    scan.NO_NAME: (Reason.NOT_JSON, "expected a name in double quotes"),
    scan.NO_COLON: (Reason.NOT_JSON, "expected a colon"),
    scan.NO_COMMA: (Reason.NOT_JSON, "expected a comma or the end of the object or array"),
    scan.CUT: (Reason.NOT_JSON, "it ends too early"),
    scan.CONTROL: (Reason.NOT_JSON, "a control character in a string"),
    scan.BAD_ESCAPE: (Reason.NOT_JSON, "no escape that JSON knows"),
    scan.MORE: (Reason.NOT_JSON, "more after the end of the value"),
    scan.BAD_UTF8: (Reason.INVALID_UTF8, "bytes that are not UTF-8"),
    scan.TOO_DEEP: (Reason.TOO_DEEP, f"more than {scan.MOST_DEPTH} objects and arrays inside one another"),
    scan.TOO_LARGE: (Reason.TOO_LARGE, "more elements than a record may have"),
    scan.NO_OBJECT: (Reason.WRONG_TYPE, "the value is JSON, but no object"),
    scan.WRONG_TYPE: (Reason.WRONG_TYPE, "should be {type}"),
    scan.IS_NULL: (Reason.MISSING, "is null, and should be {type}"),
    scan.IS_MISSING: (Reason.MISSING, "is missing, and should be {type}"),
    scan.TWICE: (Reason.DUPLICATE, "is there more than once"),
    scan.SURROGATE: (Reason.LONE_SURROGATE, "half of a surrogate pair, which is not a character"),
    fill.OUT_OF_RANGE: (Reason.OUT_OF_RANGE, "too large for {type}"),
    fill.INEXACT: (Reason.INEXACT, "has digits that {type} cannot hold"),
    fill.NO_TIME: (Reason.MALFORMED, "not {type} in ISO 8601"),
    fill.NO_BASE64: (Reason.MALFORMED, "not Base64"),
    UNKNOWN: (Reason.UNKNOWN_FIELD, "the schema does not name it"),
    WIDE_TEXT: (Reason.INVALID_UTF8, "it is in UTF-16 or UTF-32, and must be in UTF-8"),
}


class Stage(StrEnum):
    """The values of the column `stage`: which stage refused the record."""

    DECODE = "decode"
    SCHEMA = "schema"
    CONTRACT = "contract"


_OF_SCHEMA = {
    Reason.WRONG_TYPE,
    Reason.MISSING,
    Reason.OUT_OF_RANGE,
    Reason.INEXACT,
    Reason.MALFORMED,
    Reason.UNKNOWN_FIELD,
    Reason.INCOMPATIBLE,
}


def stage_of(reason: Reason) -> Stage:
    """The stage that refuses a record for this reason."""
    return Stage.SCHEMA if reason in _OF_SCHEMA else Stage.DECODE


def get_reason(code: int) -> Reason:
    """The reason that a code of the loops stands for."""
    return _SAID[code][0]


def get_detail(code: int, node: SchemaNode | None) -> str:
    """A sentence about the field, for a code of the loops. It never holds the field's value."""
    return _SAID[code][1].format(type=node.type if node else "")
