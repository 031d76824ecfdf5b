"""Compiled loops over values that do not fit a schema. Only rows with unknown fields and refused rows come here.

    names       texts of `_extra`  → a row of `usage` per name: records, first row, kinds of its values
    spans_at    starts of values   → their spans
    digits_of   numbers            → digits before and after the point

Promise: whatever the bytes, nothing is read or written outside of the arrays, and the room for names is bounded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    I32,
    I64,
    U8,
    Array,
    byte,
    compiled,
    inlined,
    inner,
    int64,
    types,
    uint64,
)
from sluice.pipelines.records.json.scan import (
    CHILD,
    LIST,
    LONGEST_KEY,
    MAP,
    MOST_DEPTH,
    ODD,
    PLAIN,
    SHAPE,
    STRUCT,
    TABLES,
    Tables,
    find,
    number,
    pack,
    skip,
    string,
    unescape,
)

MOST_NAMES = 64
"""Names that are told apart; what comes for others is counted together, under the number MOST_NAMES."""
MOST_BYTES = 800
"""Bytes of a distinguished name."""
NULL, BOOL, INT, FLOAT, BIG, TEXT, NESTED = 1, 2, 4, 8, 16, 32, 64
"""The kind of a value, as bits: BIG is an integer beyond int64."""
COUNT, FIRST, LAST, KINDS, SIZE, HASH, NODE = 0, 1, 2, 3, 4, 5, 6
"""Columns of `told`: records that have the name, the first and the last of their rows, kinds of values, the name, and
the struct that it is in."""
_MOST_INT = uint64((1 << 63) - 1)


class Names(NamedTuple):
    """What the loop remembers of names, from one call to the next: `usage` has a row for each, the texts are in `text`,
    MOST_BYTES apart. `path` are the nodes that lead to the member at hand."""

    usage: Array
    text: Array
    nest: Array
    path: Array
    scratch: Array
    used: Array


def no_names() -> Names:
    usage = np.zeros((MOST_NAMES + 1, 7), np.int64)
    usage[:, LAST] = -1
    return Names(
        usage,
        text=np.zeros(MOST_NAMES * MOST_BYTES, np.uint8),
        nest=np.zeros(MOST_DEPTH, np.uint8),
        path=np.zeros(MOST_DEPTH + 1, np.int64),
        scratch=np.zeros(LONGEST_KEY, np.uint8),
        used=np.zeros(1, np.int64),
    )


_TOLD = types.Array(types.int64, 2, "C")
_NAMES = types.NamedTuple([_TOLD, U8, U8, I64, U8, I64], Names)


@inner
def _kind(buf: Array, at: int, end: int) -> int:
    """Returns the kind of the value at `at`, as a bit."""
    b = byte(buf, at)
    if b == 0x22:
        return TEXT
    if b == 0x7B or b == 0x5B:
        return NESTED
    if b == 0x74 or b == 0x66:
        return BOOL
    if b == 0x6E:
        return NULL
    stop, kind = number(buf, at, end)
    if kind == ODD:
        return FLOAT
    negative = b == 0x2D
    size = stop - at - negative
    if size < 19:
        return INT
    if size > 19:
        return BIG
    x = uint64(0)
    for i in range(at + negative, stop):
        x = x * uint64(10) + uint64(byte(buf, i) - 0x30)
    return INT if x <= _MOST_INT + uint64(negative) else BIG


@inlined
def _same(names: Names, slot: int, node: int, buf: Array, at: int, size: int) -> bool:
    if names.usage[slot, SIZE] != size or names.usage[slot, NODE] != node:
        return False
    begin = slot * MOST_BYTES
    for i in range(size):  # noqa: SIM110 - compiled
        if names.text[begin + i] != byte(buf, at + i):
            return False
    return True


@inlined
def _place(names: Names, node: int, buf: Array, at: int, size: int, guess: int) -> int:
    """The number of the name in this struct, a new one when it is new; MOST_NAMES: it cannot have one."""
    used = names.used[0]
    if guess < used and _same(names, guess, node, buf, at, size):
        return guess
    if size > MOST_BYTES:
        return int64(MOST_NAMES)
    hashed = uint64(0xCBF29CE484222325)
    for i in range(size):
        hashed = (hashed ^ uint64(byte(buf, at + i))) * uint64(0x100000001B3)
    key = int64(hashed)
    for slot in range(used):
        if names.usage[slot, HASH] == key and _same(names, slot, node, buf, at, size):
            return int64(slot)
    if used == MOST_NAMES:
        return int64(MOST_NAMES)
    for i in range(size):
        names.text[used * MOST_BYTES + i] = byte(buf, at + i)
    names.usage[used, SIZE] = size
    names.usage[used, HASH] = key
    names.usage[used, NODE] = node
    names.used[0] = used + 1
    return int64(used)


@inner
def _count(usage: Array, slot: int, row: int, kind: int) -> None:
    """Count a member of this row, once for all of its name."""
    if usage[slot, COUNT] == 0:
        usage[slot, FIRST] = row
    if usage[slot, LAST] != row or slot == MOST_NAMES:
        usage[slot, COUNT] += 1
        usage[slot, LAST] = row
    usage[slot, KINDS] |= kind


@compiled(types.void(BYTES, I32, TABLES, U8, _NAMES, I32))
def names(buf: Array, ends: Array, t: Tables, closed: Array, unknown: Names, firsts: Array) -> None:
    """Count the members that no field has a name for, at every depth: texts of `_extra` as `scan` writes them, empty
    where there are none.

    `firsts` becomes the number of each row's first name in a struct that is `closed` (one byte for each node), −1 where
    it has none.
    """
    nodes, path = t.nodes, unknown.path
    for row in range(ends.size - 1):
        firsts[row] = -1
        at, end = int64(ends[row]), int64(ends[row + 1])
        if at < 0 or end > buf.size:
            raise IndexError("texts outside of their buffer")
        guess = int64(0)
        depth = int64(0)  # `path[depth]` is the object or array at hand, which begins before `at`
        path[0] = 0
        at += 1
        while at < end and depth >= 0:
            b = byte(buf, at)
            if b == 0x2C or b == 0x7D or b == 0x5D:
                depth -= b != 0x2C
                at += 1
                continue
            node = path[depth]
            shape = nodes[node, SHAPE]
            begin, stop, kind, size = at, at, PLAIN, int64(0)
            child = int64(-1)
            if shape == LIST:
                child = nodes[node, CHILD]
            else:
                begin = at + 1
                stop, kind = string(buf, begin, end)
                at = stop + 2  # past a quote and a colon
                if stop < 0 or at >= end:
                    break
                if shape == MAP:
                    child = nodes[node, CHILD] + 1
                elif kind == PLAIN:
                    child = find(buf, begin, stop, t, node)
                elif kind == ODD and stop - begin <= LONGEST_KEY:
                    size = unescape(unknown.scratch, 0, buf, begin, stop)
                    child = find(unknown.scratch, 0, size, t, node)
                if shape == STRUCT and child >= 0:
                    child += nodes[node, CHILD]
            b = byte(buf, at)
            if child >= 0 and nodes[child, SHAPE] >= STRUCT and (b == 0x7B or b == 0x5B) and depth < MOST_DEPTH:
                depth += 1
                path[depth] = child
                at += 1
                continue
            if child < 0:
                if kind == PLAIN:
                    slot = _place(unknown, node, buf, begin, stop - begin, guess)
                elif kind == ODD and stop - begin <= LONGEST_KEY:
                    slot = _place(unknown, node, unknown.scratch, 0, size, guess)
                else:
                    slot = int64(MOST_NAMES)
                guess = slot + 1
                if firsts[row] < 0 and closed[node]:
                    firsts[row] = slot
                _count(unknown.usage, slot, row, _kind(buf, at, end))
            at, _ = skip(buf, at, end, int64(0), unknown.nest)
            if at < 0:
                break


@inner
def _in_number(b: int) -> bool:
    return 0x30 <= b <= 0x39 or b == 0x2D or b == 0x2B or b == 0x2E or (b | 0x20) == 0x65


@compiled(types.void(BYTES, I64, I64, types.boolean, I64))
def spans_at(buf: Array, starts: Array, ends: Array, texts: bool, spans: Array) -> None:
    """The spans of values that were scanned once: numbers that begin at `starts`, or texts, whose quote is before."""
    for i in range(starts.size):
        begin, end = starts[i], ends[i]
        if begin < 0 or begin > end or end > buf.size:
            raise IndexError("values outside of their buffer")
        at = begin
        kind = PLAIN
        while at < end:
            b = byte(buf, at)
            if texts:
                if b == 0x22:
                    break
                if b == 0x5C:
                    kind = ODD
                    at += 1
            else:
                if not _in_number(b):
                    break
                if b == 0x2E or (b | 0x20) == 0x65:
                    kind = ODD
            at += 1
        spans[i] = pack(begin, min(at, end), kind)


@compiled(types.void(BYTES, I64, I64, I64, I64))
def digits_of(buf: Array, starts: Array, ends: Array, integral: Array, scale: Array) -> None:
    """How many digits the numbers need before and after the point."""
    for i in range(starts.size):
        at, end = starts[i], ends[i]
        if at < 0 or at > end or end > buf.size:
            raise IndexError("values outside of their buffer")
        digits, point, first, last = int64(0), int64(-1), int64(-1), int64(-1)
        exponent, sign = int64(0), int64(1)
        while at < end and _in_number(byte(buf, at)):
            b = byte(buf, at)
            at += 1
            if b == 0x2E:
                point = digits
            elif (b | 0x20) == 0x65:
                while at < end and _in_number(byte(buf, at)):
                    b = byte(buf, at)
                    at += 1
                    if b == 0x2D:
                        sign = int64(-1)
                    elif b != 0x2B:
                        exponent = min(exponent * 10 + b - 0x30, 1 << 40)
            elif b != 0x2D:
                if b != 0x30:
                    first = digits if first < 0 else first
                    last = digits
                digits += 1
        if first < 0:
            integral[i] = scale[i] = 0
            continue
        point = (digits if point < 0 else point) + sign * exponent
        integral[i] = max(point - first, 0)
        scale[i] = max(last + 1 - point, 0)
