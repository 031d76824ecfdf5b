"""Spans into Arrow arrays: for each node of the schema a column that grows block by block.

A column appends the results of `fill` for the spans of its node, reports items that its type cannot hold, and becomes
an Arrow array in the end. Promise: buffers hold the appended items, and do not change after they were handed out.

Reasons of the quarantine have a word each, and a sentence for each case (docs/formats.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import fill, scan
from sluice.pipelines.records.json.scan_tables import SchemaNode
from sluice.pipelines.schema.schema import Kind, Type, arrow_type

_SEED = secrets.randbits(62)
_INTEGERS = {
    kind: np.dtype(str(kind))
    for kind in (
        Kind.INT8, Kind.INT16, Kind.INT32, Kind.INT64, Kind.UINT8, Kind.UINT16, Kind.UINT32, Kind.UINT64,
    )
}  # fmt: skip
_DIGITS = {"ms": 3, "us": 6, "ns": 9}
_UNITS = {"s": 0} | _DIGITS


@dataclass(frozen=True, slots=True)
class Faults:
    """Items that their type cannot hold: their index in the column, the reason's code, and where their text begins."""

    items: Array
    codes: Array
    starts: Array


NO_FAULTS = Faults(np.empty(0, np.int64), np.empty(0, np.int8), np.empty(0, np.int64))


def allocate(n: int, kind: Any) -> Array:
    """Room for `n` items, from Arrow's pool. The pool reuses memory; fresh memory costs as much as filling it."""
    return np.frombuffer(pa.allocate_buffer(n * np.dtype(kind).itemsize), kind) if n else np.empty(0, kind)


def grow(old: Array, used: int, need: int) -> Array:
    """The first `used` items, in an array with room for at least `need`."""
    if need <= len(old):
        return old
    new = allocate(max(need, 2 * len(old)), old.dtype)
    new[:used] = old[:used]
    return new


class ColumnBuilder:
    """The base of all columns: a number of items, and a bitmap of those that are not null."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        self.node = node
        self.items, self._nulls = 0, 0
        self._valid = np.full((items + 7) // 8, 0xFF, np.uint8)
        self._state = np.zeros(fill.SLOTS, np.int64)

    @property
    def type(self) -> pa.DataType:
        return arrow_type(self.node.type)

    def append(self, values: Array, spans: Array) -> Faults:
        """Append the items of a block's spans. Returns those that the type cannot hold."""
        n = len(spans)
        self._reserve(n)
        self._state[:] = 0
        faults = self._fill(values, spans)
        self._nulls += int(self._state[fill.NULLS])
        self.items += n
        return faults

    def _reserve(self, n: int) -> None:
        size = (self.items + n + 7) // 8
        if size > len(self._valid):
            more = max(size, 2 * len(self._valid)) - len(self._valid)
            self._valid = np.concatenate([self._valid, np.full(more, 0xFF, np.uint8)])

    def _fill(self, values: Array, spans: Array) -> Faults:
        raise NotImplementedError

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        """All items as an Arrow array. `columns` are the columns of all nodes, for the children."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """About how many bytes the appended items take."""
        raise NotImplementedError

    @property
    def validity(self) -> pa.Buffer | None:
        return pa.py_buffer(self._valid) if self._nulls else None


class Numbers(ColumnBuilder):
    """A column with `width` 64-bit numbers per item. Subclasses fill and narrow them."""

    kind: Any = np.int64
    width = 1

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._out = allocate(items * self.width, self.kind)

    def _reserve(self, n: int) -> None:
        super()._reserve(n)
        self._out = grow(self._out, self.items * self.width, (self.items + n) * self.width)

    @property
    def nbytes(self) -> int:
        return 8 * self.items * self.width

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = self._narrow(self._out[: self.items * self.width])
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(data)])

    def _narrow(self, data: Array) -> Array:
        return data

    def _faults(self, spans: Array, items: Array, codes: Array) -> Faults:
        return make_faults(self._state, self.items, spans, items, codes)


def make_faults(state: Array, at: int, spans: Array, items: Array, codes: Array) -> Faults:
    """The faults that a loop noted, with their places in the values."""
    n = int(state[fill.BADS])
    if not n:
        return NO_FAULTS
    positions = items[:n].astype(np.int64)
    return Faults(positions, codes[:n].copy(), spans[positions - at] & scan.START_MASK)


class Integers(Numbers):
    """Signed and unsigned integers, and times that are written as one."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._kind = _INTEGERS.get(node.type.kind, np.dtype(np.int64))
        self._times = 1000 if node.type.unit == "s" else 1
        minimum, maximum = _get_bounds(node.type, self._kind)
        self._most: Any = np.uint64(maximum)
        self._least: Any = np.uint64(-minimum)

    def _fill(self, values: Array, spans: Array) -> Faults:
        items, codes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int8)
        fill.integers(
            *(values, spans, self.items, self._out, self._valid, self._state, items, codes),
            *(self._most, self._least, self._times),
        )
        return self._faults(spans, items, codes)

    def _narrow(self, data: Array) -> Array:
        return data if self._kind.itemsize == 8 else data.astype(self._kind)


def _get_bounds(t: Type, kind: Any) -> tuple[int, int]:
    """The smallest and the largest number that the type accepts."""
    info = np.iinfo(kind)
    if t.kind is not Kind.EPOCH:
        return int(info.min), int(info.max)
    units = 10 ** _UNITS[t.unit]
    first, end = fill.FIRST_DAY * 86400 * units, (fill.LAST_DAY + 1) * 86400 * units
    return max(first, int(info.min)), min(end - 1, int(info.max))


class Decimals(Numbers):
    """128-bit decimals."""

    width = 2

    def _fill(self, values: Array, spans: Array) -> Faults:
        items, codes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int8)
        fill.decimals(
            *(values, spans, self.items, self._out, self._valid, self._state, items, codes),
            *(self.node.type.precision, self.node.type.scale),
        )
        return self._faults(spans, items, codes)


class Times(Numbers):
    """Dates and timestamps that are written as text."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._digits = _DIGITS.get(node.type.unit, -1)
        self._scratch = np.empty(fill.TIME_SCRATCH, np.uint8)

    def _fill(self, values: Array, spans: Array) -> Faults:
        items, codes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int8)
        fill.times(
            *(values, spans, self.items, self._out, self._valid, self._state, items, codes),
            *(self._scratch, self._digits),
        )
        return self._faults(spans, items, codes)

    def _narrow(self, data: Array) -> Array:
        return data.astype(np.int32) if self._digits < 0 else data


class Floats(Numbers):
    """float32 and float64. Arrow's own parser, which rounds correctly, parses the rest of the fast path in bulk."""

    kind = np.float64

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._single = node.type.kind is Kind.FLOAT32

    def _fill(self, values: Array, spans: Array) -> Faults:
        later = np.empty(len(spans), np.int32)
        fill.floats(values, spans, self.items, self._out, self._valid, self._state, later, int(self._single))
        n = int(self._state[fill.LATER])
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
        codes = np.full(n, fill.OUT_OF_RANGE, np.int8)
        return Faults((self.items + positions[wrong]).astype(np.int64), codes, chosen[wrong] & scan.START_MASK)

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


class _Ends(ColumnBuilder):
    """Columns with an end per item: texts and lists."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self.ends = allocate(items + 1, np.int32)
        self.ends[0] = 0

    def _reserve(self, n: int) -> None:
        super()._reserve(n)
        self.ends = grow(self.ends, self.items + 1, self.items + n + 1)

    @property
    def nbytes(self) -> int:
        return 4 * self.items + int(self.ends[self.items])


class Texts(_Ends):
    """Strings, JSON texts and, from Base64, binaries."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self.data = allocate(0, np.uint8)
        self._expected = items
        self._binary = node.type.kind is Kind.BINARY

    def _fill(self, values: Array, spans: Array) -> Faults:
        used = int(self.ends[self.items])
        self._make_room(used, fill.measure(spans), len(spans))
        arguments = (values, spans, self.items, self.data, self.ends, self._valid, self._state)
        if not self._binary:
            fill.texts(*arguments)
            return NO_FAULTS
        items, codes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int8)
        fill.binaries(*arguments, items, codes)
        return make_faults(self._state, self.items, spans, items, codes)

    def _make_room(self, used: int, more: int, items: int) -> None:
        """Make room for `more` bytes now and, at that rate, for as many items as are expected."""
        need = used + more
        if need > len(self.data):
            done = self.items + items
            self.data = grow(self.data, used, max(need, need * self._expected // max(done, 1) * 9 // 8))

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        n = self.items
        buffers = [self.validity, pa.py_buffer(self.ends[: n + 1]), pa.py_buffer(self.data[: self.ends[n]])]
        return pa.Array.from_buffers(self.type, n, buffers)


class Structs(ColumnBuilder):
    """Structs. The column only knows which are null; their members are in the columns of their children."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        fill.presence(spans, self.items, self._valid, self._state)
        return NO_FAULTS

    @property
    def nbytes(self) -> int:
        return self.items // 8

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        children = [columns[c].array(columns) for c in self.node.children]
        return pa.Array.from_buffers(self.type, self.items, [self.validity], children=children)


class Lists(_Ends):
    """Lists, and maps as lists of key and value."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        fill.lengths(spans, self.items, self.ends, self._valid, self._state)
        return NO_FAULTS

    @property
    def nbytes(self) -> int:
        return 4 * self.items

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        buffers = [self.validity, pa.py_buffer(self.ends[: self.items + 1])]
        children = [columns[c].array(columns) for c in self.node.children]
        if self.node.type.kind is Kind.MAP:
            entries = pa.struct([self.type.key_field, self.type.item_field])
            children = [pa.Array.from_buffers(entries, len(children[0]), [None], children=children)]
        return pa.Array.from_buffers(self.type, self.items, buffers, children=children)

    def find_repeated(self, first: int, keys: Texts) -> Array:
        """The indices of maps, from `first` on, that have a key twice."""
        lists = self.ends[first : self.items + 1]
        longest = int(np.diff(lists).max(initial=0))
        if longest < 2:
            return np.empty(0, np.int32)
        table = np.full(1 << (2 * longest).bit_length(), -1, np.int32)
        duplicates = np.empty(self.items - first, np.int32)
        n = fill.find_repeated(self.ends, first, self.items, keys.ends, keys.data, table, _SEED, duplicates)
        return duplicates[:n]


_COLUMNS: dict[Kind, type[ColumnBuilder]] = {
    **dict.fromkeys(_INTEGERS, Integers),
    Kind.EPOCH: Integers,
    Kind.FLOAT32: Floats,
    Kind.FLOAT64: Floats,
    Kind.DECIMAL: Decimals,
    Kind.BOOL: Truths,
    Kind.STRING: Texts,
    Kind.JSON: Texts,
    Kind.BINARY: Texts,
    Kind.DATE: Times,
    Kind.TIMESTAMP: Times,
    Kind.STRUCT: Structs,
    Kind.LIST: Lists,
    Kind.MAP: Lists,
}


def make_column(node: SchemaNode, items: int) -> ColumnBuilder:
    """Returns an empty column for the node, with room for about this number of items."""
    return _COLUMNS[node.type.kind](node, items)


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
