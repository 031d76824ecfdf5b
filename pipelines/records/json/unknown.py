"""Compiled loops over members and values that the schema does not name or hold. `scan` has checked their JSON.

    copy_members    records with unknown members inside of fields → texts of `_extra`
    collect_names   texts of `_extra` → a row of `usage` per name: records, first row, kinds of its values
    spans_at        starts of refused values → their spans
    digits_of       refused numbers → digits before and after the point

    copy_members, at the byte ─┬─ ,               next element of the array at hand
                               ├─ } or ]          close it in the text if the text has opened it; one level up
                               ├─ known, nested   push a frame (node, name, element); nothing is written yet
                               ├─ known, other    skip its value
                               └─ unknown         write the openings that the text lacks, then the member as it is

Promises: a text is never longer than its record. For any bytes, nothing is read or written outside of the arrays, and
the room for names is bounded (MOST_NAMES).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.columns.spans import ODD, PLAIN, get_size, get_start, pack
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    FLAG,
    I32,
    I64,
    U8,
    Array,
    byte,
    cell,
    compiled,
    copy,
    inlined,
    inner,
    int64,
    item,
    uint64,
)
from sluice.pipelines.records.compiled.loop import Arrays, Numbers
from sluice.pipelines.records.json.scan import (
    BASE,
    CHILD,
    FOLLOW_AT,
    LEVEL,
    LIST,
    LONGEST_KEY,
    MAP,
    MOST_DEPTH,
    NAME_SIZE,
    OUT,
    SHAPE,
    STRUCT,
    TABLES,
    ScanTables,
    blank,
    colon,
    find,
    has_name,
    member,
    number,
    skip,
    string,
    unescape,
)

# --- a frame of `stack`: an object or array that the member at hand is in ----------------------------------------

FRAME_NODE = 0
NAME = 1  # where its name begins and ends in the record; those of an element are one
NAME_END = 2
ELEMENT = 3  # an array's elements before the one at hand
WRITTEN = 4  # elements that the text has
BEFORE = 5  # which member of the struct came last, counted from 1
FRAME = 6


def no_frames() -> Array:
    return np.zeros(FRAME * (MOST_DEPTH + 1), np.int64)


@inner
def _write_name(out: Array, to: int, values: Array, name: int, name_end: int, comma: bool) -> int:
    """Append `,"name":`, the name as it stands: the next byte of `out`."""
    if comma:
        out[to] = 0x2C
        to += 1
    copy(out, to, values, name, name_end - name)
    to += name_end - name
    out[to] = 0x3A
    return to + 1


@inner
def _write_elements(out: Array, to: int, t: ScanTables, stack: Array, frame: int) -> int:
    """Append the array's elements before the one at hand: those that the text does not have stand as empty ones."""
    opening = 0x5B if t.nodes[t.nodes[stack[frame + FRAME_NODE], CHILD], SHAPE] == LIST else 0x7B
    written = stack[frame + WRITTEN]
    while written <= stack[frame + ELEMENT]:
        if written > 0:
            out[to] = 0x2C
            to += 1
        if written < stack[frame + ELEMENT]:
            out[to] = opening
            out[to + 1] = opening + 2
            to += 2
        written += 1
    stack[frame + WRITTEN] = written
    return to


@inner
def _write_openings(out: Array, to: int, values: Array, t: ScanTables, stack: Array, opened: int, depth: int) -> int:
    """Begin the objects and arrays around the member at hand that the text does not have: the next byte of `out`."""
    for level in range(opened, depth):
        frame = FRAME * level
        node = stack[frame + FRAME_NODE]
        if level > 0 and t.nodes[stack[frame - FRAME + FRAME_NODE], SHAPE] == LIST:
            to = _write_elements(out, to, t, stack, frame - FRAME)
        elif level > 0:
            to = _write_name(out, to, values, stack[frame + NAME], stack[frame + NAME_END], level == opened)
        out[to] = 0x5B if t.nodes[node, SHAPE] == LIST else 0x7B
        to += 1
        stack[frame + WRITTEN] = 0
    return to


@inner
def _copy_record(out: Array, to: int, values: Array, at: int, end: int, t: ScanTables, stack: Array, row: int) -> int:
    """Append members without a name of one record, whose spans are those of `row`: the next byte of `out`."""
    stack[FRAME_NODE] = stack[ELEMENT] = stack[BEFORE] = 0
    depth = int64(1)  # objects and arrays that the member at hand is in
    opened = int64(0)  # those of them that the text has; each has something in it
    at += 1
    while depth > 0:
        at = blank(values, at, end)
        if at >= end:
            break
        b = byte(values, at)
        frame = FRAME * (depth - 1)
        if b == 0x2C:
            stack[frame + ELEMENT] += 1
            at += 1
            continue
        if b == 0x7D or b == 0x5D:
            if opened == depth:
                out[to] = b
                to += 1
                opened -= 1
            depth -= 1
            at += 1
            continue
        node = stack[frame + FRAME_NODE]
        shape = cell(t.nodes, node, SHAPE)
        name, name_end, child = at, at, int64(-1)
        if shape == LIST:
            child = cell(t.nodes, node, CHILD)
        else:
            # Most members follow the one before as in other records (`scan` has learned it).
            guess = int64(-1)
            if shape == STRUCT:
                guess = int64(t.follow[cell(t.nodes, node, FOLLOW_AT) + stack[frame + BEFORE]])
            if guess >= 0 and has_name(values, at + 1, end, t, cell(t.nodes, node, CHILD) + guess):
                child = cell(t.nodes, node, CHILD) + guess
                stack[frame + BEFORE] = guess + 1
                name_end = at + 1 + cell(t.nodes, child, NAME_SIZE)
            else:
                stop, kind = string(values, at + 1, end)
                if stop < 0:
                    break
                if shape == MAP:
                    child = cell(t.nodes, node, CHILD) + 1
                else:
                    slot = member(values, at + 1, stop, kind, t, node)
                    if slot >= 0:
                        child = cell(t.nodes, node, CHILD) + slot
                        stack[frame + BEFORE] = slot + 1
                name_end = stop + 1
            at, _ = colon(values, name_end, end)
            if at < 0 or at >= end:
                break
        b = byte(values, at)
        if child >= 0 and cell(t.nodes, child, SHAPE) >= STRUCT and (b == 0x7B or b == 0x5B) and depth <= MOST_DEPTH:
            below = frame + FRAME  # depth ≤ MOST_DEPTH, and `stack` has MOST_DEPTH + 1 frames
            stack[below + FRAME_NODE], stack[below + NAME], stack[below + NAME_END] = child, name, name_end
            stack[below + ELEMENT] = stack[below + BEFORE] = 0
            depth += 1
            at += 1
            continue
        if child >= 0 and cell(t.nodes, child, LEVEL) == 0:
            span = item(t.spans, cell(t.nodes, child, BASE) + row)
            stop = 2 * get_start(span) - at + get_size(span)  # the span of a text is within its quotes
            if stop <= at or stop > end:
                break
        else:
            stop, _ = skip(values, at, end, int64(0), t.nest)
            if stop < 0:
                break
        if child < 0:
            to = _write_openings(out, to, values, t, stack, opened, depth)
            to = _write_name(out, to, values, name, name_end, opened == depth)
            copy(out, to, values, at, stop - at)
            to += stop - at
            opened = depth
        at = stop
    return to


@compiled(BYTES, I32, I32, I32, I32, TABLES, I64, U8, I32)
def copy_members(
    values: Array,
    starts: Array,
    stops: Array,
    rows: Array,
    slots: Array,
    t: ScanTables,
    stack: Array,
    out: Array,
    ends: Array,
) -> None:
    """The texts for these records of a chunk, which have these slots in the block of `t`. `out` has room for all of
    them, and for 32 bytes more."""
    to = int64(0)
    for i in range(rows.size):
        at, end = int64(starts[rows[i]]), int64(stops[rows[i]])
        if at < 0 or at > end or end > values.size or end - at > out.size - to:
            raise IndexError("values outside of their buffer, or no room for their texts")
        while at < end and byte(values, at) != 0x7B:  # white space, or a byte order mark
            at += 1
        if slots[i] < 0 or slots[i] >= t.state[OUT]:
            raise IndexError("a slot outside of the block")
        to = _copy_record(out, to, values, at, end, t, stack, slots[i])
        ends[i + 1] = to


MOST_NAMES = 64
"""Names with a count of their own. All others share the number MOST_NAMES."""
MOST_BYTES = 800
"""Bytes of a name: longer ones that begin alike count as one."""
NULL, BOOL, INT, FLOAT, BIG, TEXT, NESTED = 1, 2, 4, 8, 16, 32, 64
"""The kind of a value, as bits: BIG is an integer beyond int64."""
COUNT, FIRST, LAST, KINDS, SIZE, HASH, NODE = 0, 1, 2, 3, 4, 5, 6
"""Columns of `usage`: records with the name, their first and last row, kinds of values, size and hash of the name, and
the node of its struct."""
_MOST_INT = uint64((1 << 63) - 1)


class Names(NamedTuple):
    """Names, kept from one call to the next: `usage` has a row for each, and `text` their bytes, MOST_BYTES apart.

    `path` are the nodes above the member at hand.
    """

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


_USAGE = Numbers("int64", dims=2)
_NAMES = Arrays((_USAGE, U8, U8, I64, U8, I64), Names)


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
def _number_name(names: Names, node: int, buf: Array, at: int, size: int, guess: int) -> int:
    """The number of the name in this struct, a new one when it is new; MOST_NAMES: it cannot have one."""
    used, size = names.used[0], min(size, MOST_BYTES)
    if guess < used and _same(names, guess, node, buf, at, size):
        return guess
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


@compiled(BYTES, I32, TABLES, U8, _NAMES, I32)
def collect_names(buf: Array, ends: Array, t: ScanTables, closed: Array, unknown: Names, firsts: Array) -> None:
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
                at = stop + 2  # past a quote and a colon: `_extra` has no white space between name and value
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
                    slot = _number_name(unknown, node, buf, begin, stop - begin, guess)
                elif kind == ODD and stop - begin <= LONGEST_KEY:
                    slot = _number_name(unknown, node, unknown.scratch, 0, size, guess)
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


@compiled(BYTES, I64, I64, FLAG, I64)
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


@compiled(BYTES, I64, I64, I64, I64)
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
