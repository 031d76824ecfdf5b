"""Copy the members of records that no field has a name for, with the objects and arrays around them.

Only records with unknown members inside of fields come here. `scan` has checked their JSON.

    at the byte ─┬─ ,               next element of the array at hand
                 ├─ } or ]          close it in the text if the text has opened it; one level up
                 ├─ known, nested   push a frame (node, name, element); nothing is written yet
                 ├─ known, other    skip its value
                 └─ unknown         write the openings that the text lacks, then name and value as they are

Promise: a text is never longer than its record, and nothing is read or written outside of the arrays.
"""

from __future__ import annotations

import numpy as np

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    I32,
    I64,
    U8,
    Array,
    byte,
    compiled,
    copy,
    inner,
    int64,
    types,
)
from sluice.pipelines.records.json.scan import (
    CHILD,
    LIST,
    MAP,
    MOST_DEPTH,
    SHAPE,
    STRUCT,
    TABLES,
    Tables,
    blank,
    colon,
    member,
    skip,
    string,
)

# --- a frame of `stack`: an object or array that the member at hand is in ----------------------------------------

NODE = 0
NAME = 1  # where its name begins and ends in the record; those of an element are one
NAME_END = 2
ELEMENT = 3  # an array's elements before the one at hand
WRITTEN = 4  # those that the text has
FRAME = 5


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
def _before(out: Array, to: int, t: Tables, stack: Array, frame: int) -> int:
    """Append the array's elements before the one at hand: those that the text does not have stand as empty ones."""
    opening = 0x5B if t.nodes[t.nodes[stack[frame + NODE], CHILD], SHAPE] == LIST else 0x7B
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
def _opened(out: Array, to: int, values: Array, t: Tables, stack: Array, opened: int, depth: int) -> int:
    """Begin the objects and arrays around the member at hand that the text does not have: the next byte of `out`."""
    for level in range(opened, depth):
        frame = FRAME * level
        node = stack[frame + NODE]
        if level > 0 and t.nodes[stack[frame - FRAME + NODE], SHAPE] == LIST:
            to = _before(out, to, t, stack, frame - FRAME)
        elif level > 0:
            to = _write_name(out, to, values, stack[frame + NAME], stack[frame + NAME_END], level == opened)
        out[to] = 0x5B if t.nodes[node, SHAPE] == LIST else 0x7B
        to += 1
        stack[frame + WRITTEN] = 0
    return to


@inner
def _text(out: Array, to: int, values: Array, at: int, end: int, t: Tables, stack: Array) -> int:
    """Append what one record has without a name: the next byte of `out`."""
    stack[NODE] = stack[ELEMENT] = 0
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
        node = stack[frame + NODE]
        shape = t.nodes[node, SHAPE]
        name, name_end, child = at, at, int64(-1)
        if shape == LIST:
            child = t.nodes[node, CHILD]
        else:
            stop, kind = string(values, at + 1, end)
            if stop < 0:
                break
            if shape == MAP:
                child = t.nodes[node, CHILD] + 1
            else:
                slot = member(values, at + 1, stop, kind, t, node)
                child = t.nodes[node, CHILD] + slot if slot >= 0 else int64(-1)
            name_end = stop + 1
            at, _ = colon(values, name_end, end)
            if at < 0 or at >= end:
                break
        b = byte(values, at)
        if child >= 0 and t.nodes[child, SHAPE] >= STRUCT and (b == 0x7B or b == 0x5B) and depth <= MOST_DEPTH:
            below = frame + FRAME
            stack[below + NODE], stack[below + NAME], stack[below + NAME_END] = child, name, name_end
            stack[below + ELEMENT] = 0
            depth += 1
            at += 1
            continue
        stop, _ = skip(values, at, end, int64(0), t.nest)
        if stop < 0:
            break
        if child < 0:
            to = _opened(out, to, values, t, stack, opened, depth)
            to = _write_name(out, to, values, name, name_end, opened == depth)
            copy(out, to, values, at, stop - at)
            to += stop - at
            opened = depth
        at = stop
    return to


@compiled(types.void(BYTES, I32, I32, TABLES, I64, U8, I32))
def unnamed(values: Array, value_ends: Array, rows: Array, t: Tables, stack: Array, out: Array, ends: Array) -> None:
    """The texts for these records of a chunk. `out` has room for all of them, and for 32 bytes more."""
    to = int64(0)
    for i in range(rows.size):
        at, end = int64(value_ends[rows[i]]), int64(value_ends[rows[i] + 1])
        if at < 0 or at > end or end > values.size or end - at > out.size - to:
            raise IndexError("values outside of their buffer, or no room for their texts")
        while at < end and byte(values, at) != 0x7B:  # white space, or a byte order mark
            at += 1
        to = _text(out, to, values, at, end, t, stack)
        ends[i + 1] = to
