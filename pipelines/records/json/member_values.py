"""Find one value in each JSON record, and number the distinct ones, without reading what follows it.

    object ── other member ── skip ──► next member
       │└──── name of the path ──────► its value: an object, if the path goes on; else hashed and numbered
       └───── its end, or no JSON ───► NO_VALUE: the caller reads the record with `scan`

Of a name that stands twice, the first counts. Source: RFC 8259.

`_find_in_flat_record` looks for the name itself where no other object, array or escape stands before it. In JSON, the
name in quotes with a colon behind it is then a member of the record.

The *layout* of a record is the text around the values before the one at the path. Records of one producer have the
same, so `_find_by_layout` compares it with the last one's, 32 bytes at once, and passes over the values alone.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns.spans import PLAIN
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    ENDS,
    I32,
    I64,
    U8,
    Array,
    bit_of,
    byte,
    compiled,
    find_byte,
    find_differences,
    find_text_stops,
    inlined,
    inner,
    int64,
    keep_branch,
    trailing_zeros,
    uint64,
    word,
)
from sluice.pipelines.records.json.scan import (
    BEYOND,
    LONGEST_KEY,
    MOST_DEPTH,
    SURROGATE,
    blank,
    colon,
    scalar,
    skip,
    string,
    unescape,
)
from sluice.pipelines.schema.arrays import buffers_of

NO_VALUE = -1

# --- a layout: its number of values; for each the size and place of the text before it, and the last text's size --

STEPS, FIRST, SIZES = 0, 1, 3
MOST_STEPS = 64
NO_LAYOUT = -1
DEPTH = 8
"""Levels of `nest` that are not for the values, more than a path has."""


@inner
def _has_bytes(buf: Array, at: int, stop: int, names: Array, begin: int, end: int) -> bool:
    if stop - at != end - begin:
        return False
    for i in range(end - begin):  # noqa: SIM110 - compiled
        if byte(buf, at + i) != byte(names, begin + i):
            return False
    return True


@inner
def _find_in_flat_record(buf: Array, at: int, end: int, names: Array) -> int:
    """Where the value of the name begins, if the record has no brace, bracket or backslash before it; else −1."""
    size = int64(names.size)
    if size > BEYOND - 64 or at >= end or byte(buf, at) != 0x7B:
        return int64(-1)
    while end > buf.size - BEYOND and at + size + 3 < end:  # the same as below, byte by byte
        at += 1
        first = byte(buf, at)
        if first == 0x7B or first == 0x5B or first == 0x5C:
            return int64(-1)
        if (
            first == 0x22
            and byte(buf, at + size + 1) == 0x22
            and _has_bytes(buf, at + 1, at + 1 + size, names, int64(0), size)
        ):
            return blank(buf, at + size + 3, end) if byte(buf, at + size + 2) == 0x3A else int64(-1)
    if end > buf.size - BEYOND:
        return int64(-1)
    # Reads of 32 bytes need no check of their own: the buffer has BEYOND bytes behind `end`.
    first, last = byte(names, int64(0)), byte(names, size - 1)
    at += 1
    while at < end:
        doubts = find_byte(buf, at, int64(0x7B)) | find_byte(buf, at, int64(0x5B)) | find_byte(buf, at, int64(0x5C))
        quotes = find_byte(buf, at, int64(0x22)) & find_byte(buf, at + size + 1, int64(0x22))
        alike = quotes & find_byte(buf, at + 1, first) & find_byte(buf, at + size, last)
        if alike == uint64(0):
            if doubts:
                return int64(-1)
            at += 32
            continue
        name = trailing_zeros(alike)
        if doubts & ((uint64(1) << uint64(name)) - uint64(1)):
            return int64(-1)
        at += name + 1
        if _has_bytes(buf, at, at + size, names, int64(0), size):
            at += size + 1
            return blank(buf, at + 1, end) if at < end and byte(buf, at) == 0x3A else int64(-1)
    return int64(-1)


@inner
def _find_by_layout(buf: Array, at: int, end: int, layout: Array, nest: Array) -> int:
    """Where the value at the path begins, if the record has the layout; else −1."""
    # Reads of 32 bytes need no check of their own: the buffer has BEYOND bytes behind `end`.
    if end > buf.size - BEYOND:
        return int64(-1)
    last = layout[STEPS]
    for k in range(last + 1):
        step = FIRST + SIZES * k
        size, same = layout[step], layout[step + 1]
        if find_differences(buf, at, buf, same) & uint64((int64(1) << size) - 1):
            return int64(-1)
        at += size
        if at >= end or k == last:
            break
        if byte(buf, at) == 0x22:
            stops, expected = find_text_stops(buf, at + 1), layout[step + 2]
            if (
                stops & ((uint64(2) << uint64(expected)) - uint64(1)) == uint64(1) << uint64(expected)
                and byte(buf, at + 1 + expected) == 0x22
            ):
                # The place depends on no byte of the text, so that the processor need not wait for them.
                at = keep_branch(at + expected + 2)
            else:
                stop = at + 1 + trailing_zeros(stops | uint64(1 << 32))
                if byte(buf, stop) != 0x22:
                    stop, _ = string(buf, at + 1, end)
                    if stop < 0:
                        return int64(-1)
                layout[step + 2] = min(stop - at - 1, 31)
                at = stop + 1
        elif byte(buf, at) == 0x7B or byte(buf, at) == 0x5B:
            at, _ = skip(buf, at, end, DEPTH, nest)
        else:
            at, _ = scalar(buf, at, end)
        if at <= 0 or at >= end:
            return int64(-1)
    return at if at < end and byte(buf, at) > 0x20 else int64(-1)  # more white space than before


@inlined
def _find_value(
    buf: Array, at: int, end: int, names: Array, name_ends: Array, nest: Array, scratch: Array, layout: Array
) -> int:
    """Where the value at the path begins; −1 if it is missing or behind bad JSON. Notes the layout."""
    layout[STEPS] = NO_LAYOUT
    steps, text, fits = int64(0), at, end <= buf.size - BEYOND
    if end - at >= 3 and byte(buf, at) == 0xEF and byte(buf, at + 1) == 0xBB and byte(buf, at + 2) == 0xBF:
        at += 3
    at = blank(buf, at, end)
    for depth in range(name_ends.size - 1):
        if at >= end or byte(buf, at) != 0x7B:
            return int64(-1)
        while True:
            at = blank(buf, at + 1, end)  # behind a brace or a comma
            if at >= end or byte(buf, at) != 0x22:
                return int64(-1)
            stop, kind = string(buf, at + 1, end)
            if stop < 0:
                return int64(-1)
            name, name_end = int64(name_ends[depth]), int64(name_ends[depth + 1])
            if kind == PLAIN:
                is_next = _has_bytes(buf, at + 1, stop, names, name, name_end)
            elif kind == SURROGATE or stop - at > LONGEST_KEY:
                is_next = False
            else:
                size = unescape(scratch, int64(0), buf, at + 1, stop)
                is_next = _has_bytes(scratch, int64(0), size, names, name, name_end)
            at, _ = colon(buf, stop + 1, end)
            if at < 0:
                return int64(-1)
            if is_next:
                break
            fits = fits and steps < MOST_STEPS and at - text <= 32
            if fits:
                layout[FIRST + SIZES * steps], layout[FIRST + SIZES * steps + 1] = at - text, text
                steps += 1
            at, _ = skip(buf, at, end, int64(depth + 1), nest)
            if at < 0:
                return int64(-1)
            text = at
            at = blank(buf, at, end)
            if at >= end or byte(buf, at) != 0x2C:
                return int64(-1)
    if fits and at - text <= 32:
        layout[FIRST + SIZES * steps], layout[FIRST + SIZES * steps + 1], layout[STEPS] = at - text, text, steps
    return at


@compiled(BYTES, ENDS, BYTES, BYTES, ENDS, U8, U8, I64, I32, I32, I64, I64, I64, results=1)
def _number_values(
    values: Array,
    ends: Array,
    valid: Array,
    names: Array,
    name_ends: Array,
    nest: Array,
    scratch: Array,
    layout: Array,
    slots: Array,
    codes: Array,
    starts: Array,
    stops: Array,
    heads: Array,
) -> int:
    """Write the number of each record's value into `codes`, and where the distinct ones lie. Returns their count.

    `slots` is a hash table of numbers, −1 where there is none: a power of two, and more than there are records.
    """
    distinct, plain = int64(0), name_ends.size == 2 and names.size > 0
    for i in range(names.size):
        plain = plain and byte(names, i) >= 0x20 and byte(names, i) != 0x22 and byte(names, i) != 0x5C
    for row in range(codes.size):
        at, end = int64(ends[row]), int64(ends[row + 1])
        if at < 0 or at > end or end > values.size:
            raise IndexError("values outside of their buffer")
        codes[row] = NO_VALUE
        if valid.size and not bit_of(valid, row):
            continue
        start = _find_in_flat_record(values, at, end, names) if plain else int64(-1)
        if start < 0 and layout[STEPS] != NO_LAYOUT:
            start = _find_by_layout(values, at, end, layout, nest)
        if start < 0:
            start = _find_value(values, at, end, names, name_ends, nest, scratch, layout)
        if start < 0 or start >= end:
            continue
        if byte(values, start) == 0x22:
            stop, kind = string(values, start + 1, end)
            if stop < 0 or kind == SURROGATE:
                continue
            stop += 1
        else:
            stop, _ = skip(values, start, end, DEPTH, nest)
            if stop < 0:
                continue
        size = stop - start
        head = uint64(0)  # its first eight bytes
        if start + 8 <= values.size:
            head = word(values, start)
            if size < 8:
                head &= (uint64(1) << uint64(8 * size)) - uint64(1)
        else:
            for i in range(size):
                head |= uint64(byte(values, start + i)) << uint64(8 * i)
        hashed = (head ^ uint64(size)) * uint64(0x9E3779B97F4A7C15)
        for i in range(start + 8, stop):
            hashed = (hashed ^ uint64(byte(values, i))) * uint64(0x100000001B3)
        slot = int64(hashed ^ (hashed >> uint64(32))) & (slots.size - 1)
        while True:
            number = int64(slots[slot])
            if number < 0:
                slots[slot] = distinct
                starts[distinct], stops[distinct], heads[distinct] = start, stop, int64(head)
                codes[row] = distinct
                distinct += 1
                break
            same = heads[number] == int64(head) and stops[number] - starts[number] == size
            if same and (size <= 8 or _has_bytes(values, start, stop, values, starts[number], stops[number])):
                codes[row] = number
                break
            slot = (slot + 1) & (slots.size - 1)
    return distinct


def number_values(values: pa.Array, path: tuple[str, ...]) -> tuple[Array, list[str]]:
    """Returns the number of each record's value at the path, and the distinct values as JSON text.

    NO_VALUE stands for a null record, for one without such a member and for one that is no JSON up to it.
    """
    data, ends, valid = buffers_of(values)
    names = [name.encode() for name in path]
    codes, (starts, stops, heads) = np.empty(len(values), np.int32), np.empty((3, len(values)), np.int64)
    layout = np.zeros(FIRST + SIZES * (MOST_STEPS + 1), np.int64)
    layout[STEPS] = NO_LAYOUT
    slots = np.full(1 << len(values).bit_length(), -1, np.int32)
    count = _number_values(
        data,
        ends,
        valid,
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([0, *map(len, names)], dtype=np.int32),
        np.empty(MOST_DEPTH, np.uint8),
        np.empty(LONGEST_KEY, np.uint8),
        layout,
        slots,
        codes,
        starts,
        stops,
        heads,
    )
    spans = zip(starts[:count].tolist(), stops[:count].tolist(), strict=True)
    return codes, [data[start:stop].tobytes().decode() for start, stop in spans]
