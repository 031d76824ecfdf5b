"""JSON's own columns, of texts, numbers and times that `fill` reads, and the reasons for which a record is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns import loops
from sluice.pipelines.records.columns.builders import (
    NO_FAULTS,
    UNIT_DIGITS,
    ColumnBuilder,
    Faults,
    Lists,
    Numbers,
    Structs,
    Texts,
    get_time_bounds,
)
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.reasons import Reason, Reasons
from sluice.pipelines.records.columns.spans import ODD, SIZE_BITS, START_MASK
from sluice.pipelines.records.compiled.jit import Array, uint64
from sluice.pipelines.records.json import fill, scan
from sluice.pipelines.schema.schema import Encoding, Kind, Type

_INTEGERS = {
    kind: np.dtype(str(kind))
    for kind in (
        Kind.INT8, Kind.INT16, Kind.INT32, Kind.INT64, Kind.UINT8, Kind.UINT16, Kind.UINT32, Kind.UINT64,
    )
}  # fmt: skip


class Integers(Numbers):
    """Signed and unsigned integers, and times and dates that are written as one."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._kind = (_INTEGERS | {Kind.DATE: np.dtype(np.int32)}).get(node.type.kind, np.dtype(np.int64))
        self._times = 1000 if node.type.unit == "s" else 1
        minimum, maximum = _get_bounds(node.type, self._kind)
        self._most: Any = np.uint64(maximum)
        self._least: Any = np.uint64(-minimum)

    def _fill(self, values: Array, spans: Array) -> Faults:
        return self._fill_by(fill.integers, values, spans, (self._out,), self._most, self._least, self._times)

    def _narrow(self, data: Array) -> Array:
        return data if self._kind.itemsize == 8 else data.astype(self._kind)


def _get_bounds(t: Type, kind: Any) -> tuple[int, int]:
    """The smallest and the largest number that the type accepts."""
    info = np.iinfo(kind)
    if t.kind not in (Kind.EPOCH, Kind.DATE):
        return int(info.min), int(info.max)
    first, last = get_time_bounds(t)
    return max(first, int(info.min)), min(last, int(info.max))


class Decimals(Numbers):
    """128-bit decimals."""

    width = 2

    def _fill(self, values: Array, spans: Array) -> Faults:
        return self._fill_by(fill.decimals, values, spans, (self._out,), self.node.type.precision, self.node.type.scale)


class Times(Numbers):
    """Dates and timestamps that are written as text."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._digits = UNIT_DIGITS.get(node.type.unit, -1)
        self._scratch = np.empty(fill.TIME_SCRATCH, np.uint8)

    def _fill(self, values: Array, spans: Array) -> Faults:
        return self._fill_by(fill.times, values, spans, (self._out,), self._scratch, self._digits)

    def _narrow(self, data: Array) -> Array:
        return data.astype(np.int32) if self._digits < 0 else data


class Floats(Numbers):
    """float32 and float64. Arrow's own parser, which rounds correctly, parses the rest of the fast path in bulk."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items, np.float64)
        self._single = node.type.kind is Kind.FLOAT32

    def _fill(self, values: Array, spans: Array) -> Faults:
        later = np.empty(len(spans), np.int32)
        fill.floats(values, spans, self.items, self._out, self._valid, self._state, later, int(self._single))
        n = int(self._state[loops.LATER])
        return self._parse(values, spans, later[:n]) if n else NO_FAULTS

    def _parse(self, values: Array, spans: Array, positions: Array) -> Faults:
        chosen = spans[positions]
        texts = Texts(SchemaNode(0, Type(Kind.STRING), "", 0, 0, ()), len(chosen))
        texts.append(values, chosen)
        parsed = texts.array(()).cast(self.type)
        numbers = np.frombuffer(parsed.buffers()[1], np.float32 if self._single else np.float64)[: len(parsed)]
        self._out[self.items + positions] = numbers
        wrong = np.isinf(numbers)
        if not wrong.any():
            return NO_FAULTS
        n = int(wrong.sum())
        codes = np.full(n, loops.OUT_OF_RANGE, np.int8)
        return Faults((self.items + positions[wrong]).astype(np.int64), codes, chosen[wrong] & START_MASK)

    def _narrow(self, data: Array) -> Array:
        return data.astype(np.float32) if self._single else data


class Truths(ColumnBuilder):
    """Booleans, a bit each."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._out = self._valid.copy()

    def _reserve(self, n: int) -> None:
        super()._reserve(n)
        if len(self._out) < len(self._valid):
            self._out = np.concatenate([self._out, np.full(len(self._valid) - len(self._out), 0xFF, np.uint8)])

    def _fill(self, values: Array, spans: Array) -> Faults:
        fill.truths(values, spans, self.items, self._out, self._valid, self._state)
        return NO_FAULTS

    @property
    def nbytes(self) -> int:
        return self.items // 8

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(self._out)])


class EscapedTexts(Texts):
    """Strings and JSON texts, escapes resolved."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        self._make_room(spans)
        fill.texts(values, spans, self.items, self.data, self.ends, self._valid, self._state)
        return NO_FAULTS


class Binaries(Texts):
    """Binaries, from Base64."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        self._make_room(spans)
        return self._fill_by(fill.binaries, values, spans, (self.data, self.ends))


class _OfTexts(ColumnBuilder):
    """Columns of numbers that are written as texts."""

    def append(self, values: Array, spans: Array) -> Faults:
        """Append the numbers of a block's texts. Returns those that are none, and those that the type cannot hold."""
        begin, read, texts, numbers = self.items, values, spans, np.empty(len(spans), np.int64)
        if (spans >> (2 * SIZE_BITS) & 3 == ODD).any():
            plain = EscapedTexts(SchemaNode(0, Type(Kind.STRING), "", 0, 0, ()), len(spans))
            plain.append(values, spans)
            read, ends = plain.data, plain.ends[: len(spans) + 1].astype(np.int64)
            texts = np.where(spans < 0, _TEXT_BIT | np.diff(ends) << SIZE_BITS | ends[:-1], spans)
        fill.find_numbers(read, texts, numbers)
        others = np.flatnonzero((numbers == 0) & (spans < 0))
        faults = super().append(read, numbers)
        items = np.concatenate([faults.items, begin + others])
        codes = np.concatenate([faults.codes, np.full(len(others), fill.NO_NUMBER, np.int8)])
        return Faults(items, codes, spans[items - begin] & START_MASK) if len(items) else NO_FAULTS


_TEXT_BIT = np.int64(-1 << 63)
"""The span of a text or number has this bit, others do not."""


class TextIntegers(_OfTexts, Integers):
    """Integers and times, from texts."""


class TextDecimals(_OfTexts, Decimals):
    """Decimals, from texts."""


class UnscaledDecimals(Numbers):
    """128-bit decimals, from Base64 of their unscaled numbers."""

    width = 2

    def _fill(self, values: Array, spans: Array) -> Faults:
        numbers = Binaries(SchemaNode(0, Type(Kind.BINARY), "", 0, 0, ()), len(spans))
        faults, codes = numbers.append(values, spans), np.zeros(len(spans), np.int8)
        high, low = map(uint64, divmod(10**self.node.type.precision - 1, 1 << 64))
        fill.read_unscaled(numbers.data, numbers.ends[: len(spans) + 1], self.items, self._out, codes, high, low)
        codes[faults.items] = faults.codes
        there = spans < 0
        loops.mark_nulls(spans, self.items, self._valid, self._state)
        items = np.flatnonzero((codes != 0) & there)
        return Faults(self.items + items, codes[items], spans[items] & START_MASK) if len(items) else NO_FAULTS


class JsonKind(NamedTuple):
    """How JSON is read as a kind: the column, and the shape that values have."""

    column: type[ColumnBuilder]
    shape: int


KINDS: dict[Kind, JsonKind] = {
    **dict.fromkeys((*_INTEGERS, Kind.EPOCH), JsonKind(Integers, scan.NUMBER)),
    Kind.FLOAT32: JsonKind(Floats, scan.NUMBER),
    Kind.FLOAT64: JsonKind(Floats, scan.NUMBER),
    Kind.DECIMAL: JsonKind(Decimals, scan.NUMBER),
    Kind.BOOL: JsonKind(Truths, scan.TRUTH),
    Kind.STRING: JsonKind(EscapedTexts, scan.TEXT),
    Kind.JSON: JsonKind(EscapedTexts, scan.ANYTHING),
    Kind.BINARY: JsonKind(Binaries, scan.TEXT),
    Kind.DATE: JsonKind(Times, scan.TEXT),
    Kind.TIMESTAMP: JsonKind(Times, scan.TEXT),
    Kind.STRUCT: JsonKind(Structs, scan.STRUCT),
    Kind.LIST: JsonKind(Lists, scan.LIST),
    Kind.MAP: JsonKind(Lists, scan.MAP),
}


def get_json_kind(t: Type) -> JsonKind:
    """How JSON is read as a type."""
    match t.encoding:
        case Encoding.TEXT:
            return JsonKind(TextDecimals if t.kind is Kind.DECIMAL else TextIntegers, scan.TEXT)
        case Encoding.BASE64:
            return JsonKind(UnscaledDecimals, scan.TEXT)
        case Encoding.DAYS:
            return JsonKind(Integers, scan.NUMBER)
    return KINDS[t.kind]


def make_column(node: SchemaNode, items: int) -> ColumnBuilder:
    """Returns an empty column for the node, with room for about this number of items."""
    return get_json_kind(node.type).column(node, items)


UNKNOWN, WIDE_TEXT = 60, 61
"""The codes of a record with fields that the schema does not name, and of one in UTF-16 or UTF-32. The loops define the
other codes."""

REASONS = Reasons(
    Reason.NOT_JSON,
    {
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
        scan.SURROGATE: (Reason.LONE_SURROGATE, "half of a surrogate pair, which is not a character"),
        fill.INEXACT: (Reason.INEXACT, "has digits that {type} cannot hold"),
        fill.NO_TIME: (Reason.MALFORMED, "not {type} in ISO 8601"),
        fill.NO_BASE64: (Reason.MALFORMED, "not Base64"),
        fill.NO_NUMBER: (Reason.MALFORMED, "not {type}: no number"),
        UNKNOWN: (Reason.UNKNOWN_FIELD, "the schema does not name it"),
        WIDE_TEXT: (Reason.INVALID_UTF8, "it is in UTF-16 or UTF-32, and must be in UTF-8"),
    },
)
