"""Spans: the places of values in the bytes of records. The loops of formats note them, and columns are filled by them.

A span is one int64: 31 bits of start, 31 of length, 2 of kind. The span of a list or map has its first element and
their number. MISSING is 0, so that empty slots are spans of missing values.
"""

from __future__ import annotations

from sluice.pipelines.records.compiled.jit import Array, byte, inner, int64

MISSING, NULL, PLAIN, ODD = 0, 1, 2, 3  # ODD, of JSON alone: a text with escapes, a number with point or exponent
SIZE_BITS = 31
START_MASK = (1 << SIZE_BITS) - 1


@inner
def pack(start: int, stop: int, kind: int) -> int:
    return (kind << (2 * SIZE_BITS)) | ((stop - start) << SIZE_BITS) | start


@inner
def get_start(span: int) -> int:
    return span & START_MASK


@inner
def get_size(span: int) -> int:
    return (span >> SIZE_BITS) & START_MASK


@inner
def get_kind(span: int) -> int:
    return (span >> (2 * SIZE_BITS)) & 3


@inner
def skip_sequence(buf: Array, at: int, end: int) -> int:
    """The byte after the UTF-8 sequence at `at`; −1 when it is none (RFC 3629: no surrogates, nothing overlong)."""
    a = byte(buf, at)
    if a < 0xE0:
        if a < 0xC2 or at + 2 > end or byte(buf, at + 1) >> 6 != 2:
            return int64(-1)
        return at + 2
    if a < 0xF0:
        if at + 3 > end:
            return int64(-1)
        b = byte(buf, at + 1)
        if b >> 6 != 2 or byte(buf, at + 2) >> 6 != 2 or (a == 0xE0 and b < 0xA0) or (a == 0xED and b > 0x9F):
            return int64(-1)
        return at + 3
    if a > 0xF4 or at + 4 > end:
        return int64(-1)
    b = byte(buf, at + 1)
    if b >> 6 != 2 or byte(buf, at + 2) >> 6 != 2 or byte(buf, at + 3) >> 6 != 2:
        return int64(-1)
    if (a == 0xF0 and b < 0x90) or (a == 0xF4 and b > 0x8F):
        return int64(-1)
    return at + 4
