"""Spans into Arrow arrays: for each node of the schema a column that grows block by block.

A column appends the results of compiled loops for the spans of its node, reports items that its type cannot hold, and
becomes an Arrow array in the end. Promise: buffers hold the appended items, and do not change after they were handed
out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns import loops
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.spans import START_MASK
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.schema.schema import Kind, Type, arrow_type

_SEED = secrets.randbits(62)
UNIT_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
"""Digits of a second's fraction in each unit of time."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Items that their type cannot hold: their index in the column, the reason's code, and where their text begins."""

    items: Array
    codes: Array
    starts: Array


def make_faults(items: Array, codes: Array | int) -> Faults:
    """Faults of items without a text. `codes` is one for all, or one for each."""
    n = len(items)
    return Faults(items.astype(np.int64), np.full(n, codes, np.int8), np.full(n, -1, np.int64))


NO_FAULTS = make_faults(np.empty(0, np.int64), 0)


def get_time_bounds(t: Type) -> tuple[int, int]:
    """The first and the last time of the years 1 to 9999, in the type's unit. They may exceed 64 bits."""
    units = 1 if t.kind is Kind.DATE else 86_400 * 10 ** UNIT_DIGITS[t.unit]
    return loops.FIRST_DAY * units, (loops.LAST_DAY + 1) * units - 1


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
        self._state = np.zeros(loops.SLOTS, np.int64)

    @property
    def type(self) -> pa.DataType:
        return arrow_type(self.node.type)

    def append(self, values: Array, spans: Array) -> Faults:
        """Append the items of a block's spans. Returns those that the type cannot hold."""
        n = len(spans)
        self._reserve(n)
        self._state[:] = 0
        faults = self._fill(values, spans)
        self._nulls += int(self._state[loops.NULLS])
        self.items += n
        return faults

    def _reserve(self, n: int) -> None:
        size = (self.items + n + 7) // 8
        if size > len(self._valid):
            more = max(size, 2 * len(self._valid)) - len(self._valid)
            self._valid = np.concatenate([self._valid, np.full(more, 0xFF, np.uint8)])

    def _fill(self, values: Array, spans: Array) -> Faults:
        raise NotImplementedError

    def _fill_by(self, loop: Any, values: Array, spans: Array, out: tuple[Array, ...], *more: Any) -> Faults:
        """Fill the buffers `out` by a loop, with arguments `more` of its own, that notes items which it cannot read."""
        items, codes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int8)
        loop(values, spans, self.items, *out, self._valid, self._state, items, codes, *more)
        n = int(self._state[loops.BADS])
        if not n:
            return NO_FAULTS
        positions = items[:n].astype(np.int64)
        return Faults(positions, codes[:n].copy(), spans[positions - self.items] & START_MASK)

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
    """A column with `width` numbers of `kind` per item."""

    width = 1

    def __init__(self, node: SchemaNode, items: int, kind: Any = np.int64) -> None:
        super().__init__(node, items)
        self._out = allocate(items * self.width, kind)

    def _reserve(self, n: int) -> None:
        super()._reserve(n)
        self._out = grow(self._out, self.items * self.width, (self.items + n) * self.width)

    @property
    def nbytes(self) -> int:
        return int(self._out.itemsize) * self.items * self.width

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = self._narrow(self._out[: self.items * self.width])
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(data)])

    def _narrow(self, data: Array) -> Array:
        """The numbers as the type stores them."""
        return data


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
    """Strings and binaries as they are in the record."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self.data = allocate(0, np.uint8)
        self._expected = items

    def _fill(self, values: Array, spans: Array) -> Faults:
        self._make_room(spans)
        loops.copy_texts(values, spans, self.items, self.data, self.ends, self._valid, self._state)
        return NO_FAULTS

    def _make_room(self, spans: Array) -> None:
        """Make room for the texts of these spans and, at that rate, for as many items as are expected."""
        used = int(self.ends[self.items])
        need = used + loops.measure(spans)
        if need > len(self.data):
            done = self.items + len(spans)
            self.data = grow(self.data, used, max(need, need * self._expected // max(done, 1) * 9 // 8))

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        n = self.items
        buffers = [self.validity, pa.py_buffer(self.ends[: n + 1]), pa.py_buffer(self.data[: self.ends[n]])]
        return pa.Array.from_buffers(self.type, n, buffers)


class Structs(ColumnBuilder):
    """Structs. The column only knows which are null; their members are in the columns of their children."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        loops.mark_nulls(spans, self.items, self._valid, self._state)
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
        loops.sum_lengths(spans, self.items, self.ends, self._valid, self._state)
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
        n = loops.find_repeated(self.ends, first, self.items, keys.ends, keys.data, table, _SEED, duplicates)
        return duplicates[:n]
