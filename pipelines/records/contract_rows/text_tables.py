"""Matches texts by tables: regular expressions of a fixed form (`^o-[0-9]{10}$`) and sets of short texts.

Contracts mostly have such expressions and sets, and tables take a fifth of the time of Arrow's automaton (RE2) and hash
table. Promise: the result for each text is Arrow's. A regular expression or set without that certainty has no table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    ENDS,
    I64,
    INTEGER,
    U8,
    UNSIGNED,
    Array,
    byte,
    compiled,
    int64,
    uint64,
    word,
)
from sluice.pipelines.records.compiled.loop import Numbers
from sluice.pipelines.records.contract_rows.check_arrays import text_buffers
from sluice.pipelines.schema.arrays import as_mask

LONGEST_FORM = 128
"""Bytes."""
_PIECE = re.compile(
    r"(?P<text>[\w ,;:/@#%&=~<>\"'!_-]|\\[^\w\s])|(?P<digit>\\d)|\[(?P<set>(?:\w-\w|[\w_.:/@#])+-?)\]", re.ASCII
)
_TIMES = re.compile(r"\{([0-9]{1,3})\}")
Which = Callable[[pa.Array], "pa.BooleanArray"]
"""Which values of a text column are so; null where these are."""


def fixed_form(regex: str) -> Which | None:
    """Matches texts with a regular expression that lists the allowed characters of each position."""
    table = _table(regex)
    if table is None:
        return None
    size = len(table)
    flat = np.ascontiguousarray(table).reshape(-1)
    return lambda column: _match_column(column, flat, size)


def _table(regex: str) -> Array | None:
    """Which byte may stand at each place; None for a regular expression of any other kind."""
    if not regex.isascii() or not regex.startswith("^") or not regex.endswith("$") or regex.endswith("\\$"):
        return None
    bitmaps: list[Array] = []
    at = 1
    while at < len(regex) - 1:
        piece = _PIECE.match(regex, at, len(regex) - 1)
        allowed = piece and _list_allowed(piece)
        if piece is None or allowed is None:
            return None
        at = piece.end()
        times = 1
        if repeated := _TIMES.match(regex, at):
            at, times = repeated.end(), int(repeated[1])
        if len(bitmaps) + times > LONGEST_FORM:
            return None
        bitmaps += [allowed] * times
    return np.stack(bitmaps) if bitmaps else None


def _list_allowed(piece: re.Match[str]) -> Array | None:
    allowed = np.zeros(256, np.uint8)
    if piece["text"]:
        allowed[ord(piece["text"][-1])] = 1
    elif piece["digit"]:
        allowed[ord("0") : ord("9") + 1] = 1
    else:
        for first, last in re.findall(r"(.)(?:-(.))?", piece["set"]):
            if first == "-":
                allowed[ord("-")] = 1
            elif last and last < first:
                return None
            else:
                allowed[ord(first) : ord(last or first) + 1] = 1
    return allowed


def _match_column(column: pa.Array, table: Array, size: int) -> pa.BooleanArray:
    n, out = len(column), np.zeros((len(column) + 7) // 8, np.uint8)
    _forms(*text_buffers(column), table, size, out)
    valid = None
    if column.null_count:
        valid = pa.py_buffer(np.packbits(as_mask(pc.is_valid(column)), bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), n, [valid, pa.py_buffer(out)])


@compiled(BYTES, ENDS, U8, INTEGER, U8)
def _forms(data: Array, ends: Array, table: Array, size: int, out: Array) -> None:
    for i in range(ends.size - 1):
        at, end = int64(ends[i]), int64(ends[i + 1])
        if at < 0 or end > data.size or end - at != size:
            continue
        fits = uint64(1)
        for k in range(size):
            fits &= uint64(table[256 * k + byte(data, at + k)])
        if fits:
            out[i >> 3] |= np.uint8(1 << (i & 7))


LONGEST = 8
"""Bytes of a text."""
_MOST = 64
"""Members of a set."""
_TRIES = 200
"""Multipliers that are tried, to find one by which no two members meet. Half of them do, in a table of that room."""
_SPREAD = 0x9E3779B97F4A7C15
_U64 = Numbers("uint64")
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(LONGEST + 1)], np.uint64)


def short_set(members: pa.Array) -> Which | None:
    """Returns a check whether texts are members; None if these are no short texts, or too many."""
    if not pa.types.is_string(members.type) or members.null_count or not 0 < len(members) <= _MOST:
        return None
    texts = [member.as_buffer().to_pybytes() for member in members]
    if max(map(len, texts)) > LONGEST:
        return None
    bits = max(2 * len(texts), len(texts) ** 2 // 2).bit_length()
    shift, numbers = 64 - bits, [int.from_bytes(text, "little") for text in texts]
    for i in range(_TRIES):
        multiplier = _SPREAD * (2 * i + 1) % (1 << 64)
        slots = [number * multiplier % (1 << 64) >> shift for number in numbers]
        if len(set(slots)) == len(slots):
            words, sizes = np.zeros(1 << bits, np.uint64), np.full(1 << bits, -1, np.int64)
            words[slots], sizes[slots] = np.array(numbers, np.uint64), [*map(len, texts)]
            return partial(_find_members, multiplier=multiplier, shift=shift, words=words, sizes=sizes)
    return None


def _find_members(column: pa.Array, multiplier: int, shift: int, words: Array, sizes: Array) -> pa.BooleanArray:
    """Null counts as absent, as it does in `is_in`."""
    out = np.zeros((len(column) + 7) // 8, np.uint8)
    _among(*text_buffers(column), uint64(multiplier), uint64(shift), words, sizes, _MASKS, out)
    if column.null_count:
        out &= np.packbits(as_mask(pc.is_valid(column)), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(column), [None, pa.py_buffer(out)])


@compiled(BYTES, ENDS, UNSIGNED, UNSIGNED, _U64, I64, _U64, U8)
def _among(
    data: Array, ends: Array, multiplier: int, shift: int, words: Array, sizes: Array, masks: Array, out: Array
) -> None:
    at = int64(ends[0])
    for i in range(ends.size - 1):
        end = int64(ends[i + 1])
        size = end - at
        if at >= 0 and 0 <= size <= LONGEST and end <= data.size:
            x = uint64(0)
            if at + 8 <= data.size:
                x = uint64(word(data, at)) & uint64(masks[size])
            else:
                for k in range(size):
                    x |= uint64(byte(data, at + k)) << uint64(8 * k)
            slot = (x * multiplier) >> shift
            if words[slot] == x and sizes[slot] == size:
                out[i >> 3] |= np.uint8(1 << (i & 7))
        at = end
