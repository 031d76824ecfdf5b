"""The compiled loops: Arrow buffers → records of a batch of format v2, keys → Java's murmur2, columns → JSON objects.

    hash_keys   keys → murmur2, as Kafka's default partitioner
    group       partitions of rows → rows in order of partition
    append      rows → records behind those of an open batch
    weave       columns that are text already → one JSON object per row

    append, next row ─┬─ above LIMIT, not first ──► state[NEED] = 0; return: seal the batch
                      ├─ `out` is too short ──────► state[NEED] = bytes; return: enlarge it and call again
                      └─ otherwise ───────────────► record; next row
    Both returns leave the batch complete up to the row before, and name the row in `chosen`.

    weave, next row ─┬─ `out` may be too short ───► return the row: enlarge it and call again
                     └─ otherwise ────────────────► `{`, a member for each value that is not null, `}`

Promise: nothing is written past the end of `out`; `copy` checks Arrow's offsets. All entry points release the GIL and
create no Python object for a record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    I64,
    INTEGER,
    U8,
    Array,
    compiled,
    copy,
    inlined,
    inner,
    int64,
    prefetch,
    uint64,
)
from sluice.pipelines.records.compiled.loop import Arrays, Numbers

# --- `state` of an open batch, kept between calls -------------------------------------------------------------

COUNT = 0  # records in it
USED = 1  # bytes of them
BASE_TIME = 2  # the time of its first record
MAX_TIME = 3
LIMIT = 4  # bytes that it may hold; one record may be larger
NEED = 5  # bytes of the record that `out` has no room for
STATE = 6

_AHEAD = 8  # rows of one partition lie apart: values are prefetched this number of rows ahead
_PREFETCHED = 512  # bytes of a value
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF


class RowBuffers(NamedTuple):
    """The Arrow buffers of one chunk. Valid: a byte for each row, none at all where nothing is null."""

    keys: Array
    key_offsets: Array
    key_valid: Array
    values: Array
    value_offsets: Array
    value_valid: Array
    timestamps: Array
    header_lists: Array
    header_keys: Array
    header_key_offsets: Array
    header_values: Array
    header_value_offsets: Array
    header_values_valid: Array


_I32R = Numbers("int32", readonly=True)
_I64R = Numbers("int64", readonly=True)
_BINARY = [BYTES, _I32R, BYTES]
_ROWS = Arrays((*_BINARY, *_BINARY, _I64R, _I32R, BYTES, _I32R, *_BINARY), RowBuffers)


@inner
def _zigzag(value: int) -> int:
    return uint64((uint64(value) << uint64(1)) ^ uint64(value >> 63))


@inlined
def _size(value: int) -> int:
    """Bytes of a number as a zigzag varint."""
    rest = _zigzag(value)
    size = int64(1)
    while rest >= uint64(0x80):
        rest >>= uint64(7)
        size += 1
    return size


@inlined
def _put(out: Array, at: int, value: int) -> int:
    """Write a zigzag varint; the next byte."""
    rest = _zigzag(value)
    while rest >= uint64(0x80):
        out[at] = np.uint8((rest & uint64(0x7F)) | uint64(0x80))
        rest >>= uint64(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@inlined
def _length(offsets: Array, valid: Array, row: int) -> int:
    """Bytes of a row's value; −1: null."""
    if valid.size > 0 and valid[row] == 0:
        return int64(-1)
    return int64(offsets[row + 1]) - int64(offsets[row])


@inlined
def _put_bytes(out: Array, at: int, length: int, data: Array, start: int) -> int:
    """Write a length and that number of bytes; returns the next position."""
    at = _put(out, at, length)
    if length > 0:
        copy(out, at, data, start, length)
        at += length
    return at


@inlined
def _record_size(rows: RowBuffers, row: int, time_delta: int, offset_delta: int) -> int:
    """Bytes of a record after its length."""
    key = _length(rows.key_offsets, rows.key_valid, row)
    value = _length(rows.value_offsets, rows.value_valid, row)
    first, stop = int64(rows.header_lists[row]), int64(rows.header_lists[row + 1])
    size = 1 + _size(time_delta) + _size(offset_delta) + _size(key) + _size(value) + _size(stop - first)
    size += max(key, 0) + max(value, 0)
    for h in range(first, stop):
        name = int64(rows.header_key_offsets[h + 1]) - int64(rows.header_key_offsets[h])
        content = _length(rows.header_value_offsets, rows.header_values_valid, h)
        size += _size(name) + name + _size(content) + max(content, 0)
    return size


@inlined
def _put_record(rows: RowBuffers, row: int, time_delta: int, offset_delta: int, size: int, out: Array, at: int) -> int:
    """Write a record of that size; returns the next byte. The caller has checked that `out` has room."""
    at = _put(out, at, size)
    out[at] = np.uint8(0)
    at = _put(out, at + 1, time_delta)
    at = _put(out, at, offset_delta)
    key = _length(rows.key_offsets, rows.key_valid, row)
    at = _put_bytes(out, at, key, rows.keys, int64(rows.key_offsets[row]))
    value = _length(rows.value_offsets, rows.value_valid, row)
    at = _put_bytes(out, at, value, rows.values, int64(rows.value_offsets[row]))
    first, stop = int64(rows.header_lists[row]), int64(rows.header_lists[row + 1])
    at = _put(out, at, stop - first)
    for h in range(first, stop):
        start = int64(rows.header_key_offsets[h])
        at = _put_bytes(out, at, int64(rows.header_key_offsets[h + 1]) - start, rows.header_keys, start)
        content = _length(rows.header_value_offsets, rows.header_values_valid, h)
        at = _put_bytes(out, at, content, rows.header_values, int64(rows.header_value_offsets[h]))
    return at


@compiled(_ROWS, I64, INTEGER, U8, I64, results=1)
def append(rows: RowBuffers, chosen: Array, first: int, out: Array, state: Array) -> int:
    """Append the rows `chosen[first:]` to the open batch in `out`; where in `chosen` it stopped.

    It stops before a record that would bring the batch above its limit, unless that is its first, and before one that
    `out` has no room for: then NEED is the size that `out` needs.
    """
    for i in range(first, chosen.size):
        # Rows of one partition lie scattered in the chunk: fetch the values of a later row while this one is copied.
        if i + _AHEAD < chosen.size:
            soon = chosen[i + _AHEAD]
            start, stop = int64(rows.value_offsets[soon]), int64(rows.value_offsets[soon + 1])
            for at in range(start, min(stop, start + _PREFETCHED), 64):
                prefetch(rows.values, at)
        row = chosen[i]
        time = rows.timestamps[row]
        if state[COUNT] == 0:
            state[BASE_TIME] = time
            state[MAX_TIME] = time
        time_delta = time - state[BASE_TIME]
        size = _record_size(rows, row, time_delta, state[COUNT])
        after = state[USED] + size + _size(size)
        state[NEED] = 0
        if state[COUNT] > 0 and after > state[LIMIT]:
            return i
        if after > out.size:
            state[NEED] = after
            return i
        state[USED] = _put_record(rows, row, time_delta, state[COUNT], size, out, state[USED])
        state[COUNT] += 1
        state[MAX_TIME] = max(state[MAX_TIME], time)
    return int64(chosen.size)


@compiled(I64, I64, I64)
def group(partitions: Array, ends: Array, order: Array) -> None:
    """The rows of each partition in their order, one partition behind the other. `ends`: where each ends in `order`, if
    all are there; where each begins, afterwards."""
    for row in range(partitions.size - 1, -1, -1):
        partition = partitions[row]
        if partition < 0 or partition >= ends.size or ends[partition] <= 0 or ends[partition] > order.size:
            raise IndexError("a row that has no place")
        ends[partition] -= 1
        order[ends[partition]] = row


@inner
def _murmur2(data: Array, at: int, length: int) -> int:
    """Java's `Utils.murmur2`, as an unsigned 32-bit number."""
    h = uint64(_SEED) ^ uint64(length)
    mask, m = uint64(_MASK), uint64(_MULTIPLIER)
    words = length >> 2
    for i in range(words):
        p = at + 4 * i
        k = uint64(data[p]) | uint64(data[p + 1]) << uint64(8)
        k |= uint64(data[p + 2]) << uint64(16) | uint64(data[p + 3]) << uint64(24)
        k = (k * m) & mask
        k ^= k >> uint64(24)
        k = (k * m) & mask
        h = ((h * m) & mask) ^ k
    p, rest = at + 4 * words, length & 3
    if rest == 3:
        h ^= uint64(data[p + 2]) << uint64(16)
    if rest >= 2:
        h ^= uint64(data[p + 1]) << uint64(8)
    if rest >= 1:
        h ^= uint64(data[p])
        h = (h * m) & mask
    h ^= h >> uint64(13)
    h = (h * m) & mask
    return int64(h ^ (h >> uint64(15)))


@compiled(BYTES, _I32R, BYTES, I64)
def hash_keys(keys: Array, offsets: Array, valid: Array, out: Array) -> None:
    """The hash of each key, made positive as Java's `Utils.toPositive` does; −1 for a key that is null."""
    for row in range(out.size):
        length = _length(offsets, valid, row)
        if length < 0:
            out[row] = -1
        else:
            if int64(offsets[row]) < 0 or int64(offsets[row]) + length > keys.size:
                raise IndexError("a key outside of its buffer")
            out[row] = _murmur2(keys, int64(offsets[row]), length) & 0x7FFFFFFF


# --- JSON objects from columns of text ------------------------------------------------------------------------

BARE = 0  # as it is: numbers, booleans, JSON
QUOTED = 1  # in quotes: nothing in it needs an escape
TEXT = 2  # in quotes, with escapes
MEMBERS = 3  # a JSON object, of which the members are taken
_QUOTE, _SLASH, _COMMA = 0x22, 0x5C, 0x2C
_ESCAPED = 6  # bytes that one byte becomes, at most


class TextColumns(NamedTuple):
    """Columns of text, one behind the other in `data`. `offsets` has a row for each column, and so has `valid`, with a
    byte for each row; `members` has the prefixes of values (`"name":`), one behind the other."""

    members: Array
    member_ends: Array
    modes: Array
    data: Array
    offsets: Array
    valid: Array


_TEXTS = Arrays(
    (
        BYTES,
        _I64R,
        _I64R,
        BYTES,
        Numbers("int64", dims=2, readonly=True),
        Numbers("uint8", dims=2, readonly=True),
    ),
    TextColumns,
)


@inner
def _blank(b: int) -> bool:
    return b == 0x20 or b == 0x0A or b == 0x0D or b == 0x09


@inner
def _put_escaped(out: Array, at: int, data: Array, start: int, stop: int) -> int:
    """Write text as inside of a JSON string; the next byte."""
    for i in range(start, stop):
        b = int64(data[i])
        if b >= 0x20 and b != _QUOTE and b != _SLASH:
            out[at] = np.uint8(b)
            at += 1
            continue
        out[at] = np.uint8(_SLASH)
        short = int64(0)
        if b in (_QUOTE, _SLASH):
            short = b
        elif b == 0x0A:
            short = int64(0x6E)
        elif b == 0x0D:
            short = int64(0x72)
        elif b == 0x09:
            short = int64(0x74)
        if short:
            out[at + 1] = np.uint8(short)
            at += 2
            continue
        low = b & 15
        out[at + 1] = np.uint8(0x75)
        out[at + 2] = np.uint8(0x30)
        out[at + 3] = np.uint8(0x30)
        out[at + 4] = np.uint8(0x30 + (b >> 4))
        out[at + 5] = np.uint8(0x30 + low if low < 10 else 0x57 + low)
        at += 6
    return at


@compiled(_TEXTS, INTEGER, U8, Numbers("int32"), results=1)
def weave(t: TextColumns, first: int, out: Array, ends: Array) -> int:
    """Write a JSON object for each row from `first` on, `ends[row]` being where it begins; the row where it stopped.

    A row's members are the columns' values, without those that are null. It stops before a row that `out` may have no
    room for.
    """
    columns = t.modes.size
    at = int64(ends[first])
    for row in range(first, ends.size - 1):
        # The most that this row can take, each byte escaped: nothing is checked while it is written.
        table_size = int64(2)
        for c in range(columns):
            length = t.offsets[c, row + 1] - t.offsets[c, row]
            if t.offsets[c, row] < 0 or length < 0 or t.offsets[c, row + 1] > t.data.size:
                raise IndexError("a text outside of its buffer")
            table_size += t.member_ends[c + 1] - t.member_ends[c] + _ESCAPED * length + 3
        if at + table_size > out.size:
            return row
        out[at] = np.uint8(0x7B)
        at += 1
        begin = at
        for c in range(columns):
            if t.valid[c, row] == 0:
                continue
            start, stop, mode = t.offsets[c, row], t.offsets[c, row + 1], t.modes[c]
            if mode == MEMBERS:  # strip white space, the braces, and white space again
                while start < stop and _blank(int64(t.data[start])):
                    start += 1
                while stop > start and _blank(int64(t.data[stop - 1])):
                    stop -= 1
                start += 1
                stop -= 1
                while start < stop and _blank(int64(t.data[start])):
                    start += 1
                while stop > start and _blank(int64(t.data[stop - 1])):
                    stop -= 1
                if start >= stop:
                    continue
            if at > begin:
                out[at] = np.uint8(_COMMA)
                at += 1
            name = t.member_ends[c]
            size = t.member_ends[c + 1] - name
            copy(out, at, t.members, name, size)
            at += size
            if mode == TEXT:
                out[at] = np.uint8(_QUOTE)
                at = _put_escaped(out, at + 1, t.data, start, stop)
                out[at] = np.uint8(_QUOTE)
                at += 1
            else:
                if mode == QUOTED:
                    out[at] = np.uint8(_QUOTE)
                    at += 1
                copy(out, at, t.data, start, stop - start)
                at += stop - start
                if mode == QUOTED:
                    out[at] = np.uint8(_QUOTE)
                    at += 1
        out[at] = np.uint8(0x7D)
        at += 1
        ends[row + 1] = at
    return int64(ends.size - 1)
