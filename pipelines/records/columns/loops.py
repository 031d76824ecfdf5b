"""The compiled loops of columns that every format has: spans → buffers, a block at a time, without parsing.

    span i ─┬─ MISSING, NULL ──► bit `at` + i cleared in `valid`, which begins as all ones
            └─ PLAIN, ODD ─────► item `at` + i of the buffer

Promise, for any spans within `values`: nothing is read or written outside of the arrays. Buffers have `spans.size`
items from `at` on.
"""

from __future__ import annotations

from sluice.pipelines.records.columns.spans import NULL, get_kind, get_size, get_start
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    ENDS,
    I32,
    I64,
    INTEGER,
    U8,
    Array,
    byte,
    clear,
    compiled,
    copy,
    inner,
    int64,
    uint64,
    word,
)

# --- `state`: counts that a loop returns --------------------------------------------------------------------------

NULLS = 0
BADS = 1  # items that the type cannot hold
LATER = 2  # items that the loop leaves to its caller
SLOTS = 3

TWICE, OUT_OF_RANGE = 18, 30
"""Codes of items that no format's column holds: a map with a key twice, and a number or time that is too large."""
FIRST_DAY, LAST_DAY = -719162, 2932896
"""0001-01-01 and 9999-12-31 in days since the epoch."""


@compiled(BYTES, I64, INTEGER, U8, I32, U8, I64)
def copy_texts(values: Array, spans: Array, at: int, data: Array, ends: Array, valid: Array, state: Array) -> None:
    """Texts and binaries as they are. `data` has room for all that the spans say."""
    to = int64(ends[at])
    for i in range(spans.size):
        span = spans[i]
        if get_kind(span) > NULL:
            size = get_size(span)
            copy(data, to, values, get_start(span), size)
            to += size
        else:
            clear(valid, at + i)
            state[NULLS] += 1
        ends[at + i + 1] = to


@compiled(I64, INTEGER, U8, I64)
def mark_nulls(spans: Array, at: int, valid: Array, state: Array) -> None:
    """Structs: there or not."""
    for i in range(spans.size):
        if get_kind(spans[i]) <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1


@compiled(I64, INTEGER, I32, U8, I64)
def sum_lengths(spans: Array, at: int, ends: Array, valid: Array, state: Array) -> None:
    """Lists and maps: where the elements of each end."""
    to = int64(ends[at])
    for i in range(spans.size):
        if get_kind(spans[i]) <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
        else:
            to += get_size(spans[i])
        ends[at + i + 1] = to


@compiled(I64, results=1)
def measure(spans: Array) -> int:
    """Bytes that the texts of the spans take at most."""
    total = int64(0)
    for i in range(spans.size):
        if get_kind(spans[i]) > NULL:
            total += get_size(spans[i])
    return total


@compiled(ENDS, ENDS, BYTES, BYTES, I32)
def find_last(lists: Array, ends: Array, data: Array, text: Array, items: Array) -> None:
    """Each list's last item that is this text, −1 where none is. `ends` and `data` are the texts of all items."""
    size = text.size
    for row in range(items.size):
        items[row] = -1
        for i in range(int64(lists[row + 1]) - 1, int64(lists[row]) - 1, -1):
            if i < 0 or i + 1 >= ends.size:
                raise IndexError("items outside of their buffer")
            at = int64(ends[i])
            if int64(ends[i + 1]) - at != size:
                continue
            if at < 0 or at + size > data.size:
                raise IndexError("texts outside of their buffer")
            k = int64(0)
            while k < size and byte(data, at + k) == byte(text, k):
                k += 1
            if k == size:
                items[row] = i
                break


@inner
def _hash(data: Array, at: int, end: int, seed: int) -> int:
    """Keyed by a random seed, so that a producer cannot choose keys that collide."""
    h = uint64(seed) ^ uint64(end - at)
    while at < end:
        x = uint64(0)
        if at + 8 <= end:
            x = word(data, at)
        else:
            for i in range(at, end):
                x = (x << uint64(8)) | uint64(byte(data, i))
        h = (h ^ x) * uint64(0x9E3779B97F4A7C15)
        h ^= h >> uint64(29)
        h = h * (uint64(seed) | uint64(1))
        h ^= h >> uint64(32)
        at += 8
    return h


@inner
def _is_same(data: Array, ends: Array, a: int, b: int) -> bool:
    size = int64(ends[a + 1]) - ends[a]
    if int64(ends[b + 1]) - ends[b] != size:
        return False
    for i in range(size):  # noqa: SIM110 - compiled
        if byte(data, int64(ends[a]) + i) != byte(data, int64(ends[b]) + i):
            return False
    return True


@compiled(I32, INTEGER, INTEGER, I32, U8, I32, INTEGER, I32, results=1)
def find_repeated(
    lists: Array, first: int, last: int, ends: Array, data: Array, table: Array, seed: int, duplicates: Array
) -> int:
    """Find the maps from `first` to `last` (excluded) that have a key twice: returns how many, numbers in `duplicates`.

    `lists`: ends of the maps' entries; `ends` and `data`: their keys. `table`: −1, or entries of earlier maps; a power
    of two, at least twice the longest map, so a free slot is always found.
    """
    n = int64(0)
    mask = table.size - 1
    for m in range(first, last):
        begin, stop = int64(lists[m]), int64(lists[m + 1])
        twice = False
        if stop - begin <= 8:
            # Of few keys, each pair is compared: cheaper than to hash them.
            for a in range(begin, stop):
                for b in range(begin, a):
                    twice = twice or _is_same(data, ends, a, b)
        else:
            # Entries are numbered through all maps: what earlier maps left in the table is below `begin`.
            for a in range(begin, stop):
                slot = int64(_hash(data, int64(ends[a]), int64(ends[a + 1]), seed)) & mask
                while table[slot] >= begin and not _is_same(data, ends, a, int64(table[slot])):
                    slot = (slot + 1) & mask
                twice = twice or table[slot] >= begin
                table[slot] = a
        if twice:
            duplicates[n] = m
            n += 1
    return n
