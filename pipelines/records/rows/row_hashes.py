"""64-bit hashes of rows, to find equal ones among millions without holding their values.

The hashes are seeded for each process, so that records cannot be made to collide. Rows with equal values have equal
hashes in any order of their columns. An integer or float hashes the same in each width, and a missing column
like a column of nulls.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import BYTES, I64, Array, byte, compiled, inner, int64, uint64, word
from sluice.pipelines.schema.arrays import unpack_bits

_SEED = np.uint64(secrets.randbits(64))
_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_KEY = np.array([secrets.randbits(63), secrets.randbits(63)])
"""The key of the hashes of texts."""
_WORD = 8


def hash_rows(columns: Iterable[tuple[str, pa.Array]], rows: int) -> np.ndarray:
    """Returns a uint64 for each of the `rows` of these named columns. Nulls add nothing."""
    total = np.zeros(rows, np.uint64)
    for name, column in columns:
        hashes = mix(hash_values(column) ^ np.uint64(hash(name) & 0xFFFFFFFFFFFFFFFF))
        hashes[~is_valid(column)] = 0
        total += hashes
    return mix(total)


def combine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the hashes of pairs."""
    return mix(first * _GOLDEN + second)


def mix(hashes: np.ndarray) -> np.ndarray:
    """Returns the values mixed by the seed and the finalizer of SplitMix64, one to one."""
    x = hashes ^ _SEED
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return np.asarray(x ^ (x >> np.uint64(31)))


def is_valid(column: pa.Array) -> np.ndarray:
    """Returns a boolean for each value: False for nulls."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    bitmap = column.buffers()[0]
    if bitmap is None or not column.null_count:
        return np.ones(len(column), bool)
    return unpack_bits(bitmap, column.offset, len(column))


def hash_values(column: pa.Array) -> np.ndarray:
    """Returns a uint64 for each value. The hashes of nulls have no meaning."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return hash_values(column.dictionary_decode())
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.uint64)
    if pa.types.is_boolean(kind):
        return mix(unpack_bits(column.buffers()[1], column.offset, len(column)).astype(np.uint64))
    if pa.types.is_struct(kind):
        return hash_rows([(f.name, column.field(i)) for i, f in enumerate(kind)], len(column))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _hash_lists(column)
    tests = (pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string)
    if any(is_kind(kind) for is_kind in tests):
        return mix(_hash_bytes(column))
    return _hash_numbers(column)


def _hash_bytes(column: pa.Array) -> np.ndarray:
    """Returns SipHash-1-3 with a secret key, as of Python's own texts."""
    large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    width = np.int64 if large else np.int32
    _, ends, data = column.buffers()
    if not len(column):
        return np.empty(0, np.uint64)
    at = np.frombuffer(ends, width, len(column) + 1, column.offset * np.dtype(width).itemsize)
    hashes = np.empty(len(column), np.int64)
    hash_texts(np.frombuffer(data or b"", np.uint8), at.astype(np.int64), _KEY, hashes)
    return hashes.view(np.uint64)


@inner
def _rotate(x: int, bits: int) -> int:
    return (x << uint64(bits)) | (x >> uint64(64 - bits))


@inner
def _mix_round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a, c = a + b, c + d
    b, d = _rotate(b, 13) ^ a, _rotate(d, 16) ^ c
    a = _rotate(a, 32)
    a, c = a + d, c + b
    return a, _rotate(b, 17) ^ c, _rotate(c, 32), _rotate(d, 21) ^ a


@compiled(BYTES, I64, I64, I64)
def hash_texts(data: Array, ends: Array, key: Array, out: Array) -> None:
    """Write SipHash-1-3 of each text. `ends` has one more than there are texts: where the first begins, too.

    Source: Aumasson and Bernstein, SipHash (2012), with one round for each word and three at the end.
    """
    first, second = uint64(key[0]), uint64(key[1])
    for i in range(out.size):
        at, end = int64(ends[i]), int64(ends[i + 1])
        if at < 0 or at > end or end > data.size:
            raise IndexError("texts outside of their buffer")
        a, b = first ^ uint64(0x736F6D6570736575), second ^ uint64(0x646F72616E646F6D)
        c, d = first ^ uint64(0x6C7967656E657261), second ^ uint64(0x7465646279746573)
        rest = uint64(end - at) << uint64(56)
        while end - at >= 8:
            part = word(data, at)
            a, b, c, d = _mix_round(a, b, c, d ^ part)
            a, at = a ^ part, at + 8
        for k in range(end - at):
            rest |= uint64(byte(data, at + k)) << uint64(8 * k)
        a, b, c, d = _mix_round(a, b, c, d ^ rest)
        a, c = a ^ rest, c ^ uint64(0xFF)
        for _ in range(3):
            a, b, c, d = _mix_round(a, b, c, d)
        out[i] = int64(a ^ b ^ c ^ d)


def _hash_numbers(column: pa.Array) -> np.ndarray:
    """Returns hashes of values of fixed width: integers as 64 bits, floats as doubles, others by their bytes."""
    kind, count = column.type, len(column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
        width = kind.bit_width // 8
        values = np.frombuffer(column.buffers()[1], f"{letter}{width}", count, column.offset * width)
        wide = values.astype(np.float64 if letter == "f" else np.int64 if letter == "i" else np.uint64)
        return mix(wide.view(np.uint64))
    width = kind.byte_width
    raw = np.frombuffer(column.buffers()[1], np.uint8, count * width, column.offset * width).reshape(count, width)
    words = np.zeros((count, -(-width // _WORD) * _WORD), np.uint8)
    words[:, :width] = raw
    hashes = np.zeros(count, np.uint64)
    for part in words.view(np.uint64).T:
        hashes = combine(hashes, part)
    return hashes


def _hash_lists(column: pa.Array) -> np.ndarray:
    """Returns hashes of lists and maps: the sum over the elements, each mixed with its position."""
    kind = column.type
    ends = np.frombuffer(
        column.buffers()[1],
        np.int64 if pa.types.is_large_list(kind) else np.int32,
        len(column) + 1,
        column.offset * (8 if pa.types.is_large_list(kind) else 4),
    ).astype(np.int64)
    first, lengths = int(ends[0]), np.diff(ends)
    elements = column.values.slice(first, int(ends[-1]) - first)
    hashes = hash_values(elements)
    hashes[~is_valid(elements)] = 1
    positions = np.arange(len(elements)) - np.repeat(ends[:-1] - first, lengths)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(combine(hashes, positions.astype(np.uint64)))])
    return combine(sums[ends[1:] - first] - sums[ends[:-1] - first], lengths.astype(np.uint64))
