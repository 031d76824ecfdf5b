"""Pieces of compiled loops over binary formats: what a block gives, a check of UTF-8, numbers of a fixed width."""

from __future__ import annotations

from typing import NamedTuple

from sluice.pipelines.records.compiled import I32, Array, byte, inner, int64, types, uint64, word

_TOPS = 0x8080808080808080


class Found(NamedTuple):
    """What a block gives besides slots: the record of each row, and refused records.

    One class for all loops: numba takes two of the same name and fields for one another.
    """

    source: Array
    bad_row: Array
    bad_code: Array
    bad_node: Array
    bad_at: Array


FOUND = types.NamedUniTuple(I32, 5, Found)


@inner
def _sequence(data: Array, at: int, end: int) -> int:
    """The byte after the UTF-8 sequence at `at`; −1 when it is none (RFC 3629)."""
    a = byte(data, at)
    if a < 0xE0:
        if a < 0xC2 or at + 2 > end or byte(data, at + 1) >> 6 != 2:
            return int64(-1)
        return at + 2
    if a < 0xF0:
        if at + 3 > end:
            return int64(-1)
        b = byte(data, at + 1)
        if b >> 6 != 2 or byte(data, at + 2) >> 6 != 2 or (a == 0xE0 and b < 0xA0) or (a == 0xED and b > 0x9F):
            return int64(-1)
        return at + 3
    if a > 0xF4 or at + 4 > end:
        return int64(-1)
    b = byte(data, at + 1)
    if b >> 6 != 2 or byte(data, at + 2) >> 6 != 2 or byte(data, at + 3) >> 6 != 2:
        return int64(-1)
    if (a == 0xF0 and b < 0x90) or (a == 0xF4 and b > 0x8F):
        return int64(-1)
    return at + 4


@inner
def not_utf8(data: Array, at: int, end: int) -> int:
    """The first byte that is not UTF-8; −1 when all are."""
    while at < end:
        while at + 8 <= end and word(data, at) & uint64(_TOPS) == uint64(0):
            at += 8
        while at < end and byte(data, at) < 0x80:
            at += 1
        while at < end and byte(data, at) > 0x7F:
            after = _sequence(data, at, end)
            if after < 0:
                return at
            at = after
    return int64(-1)


@inner
def bits(data: Array, at: int, size: int) -> int:
    """Four or eight bytes, little-endian; the caller has checked that they are there."""
    if size == 8:
        return int64(word(data, at))
    found: int = byte(data, at) | byte(data, at + 1) << 8 | byte(data, at + 2) << 16 | byte(data, at + 3) << 24
    return found
