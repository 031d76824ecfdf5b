"""Columns of numbers as text, a few bytes a number: for data in checkpoints and audits that grows with a feed's age.

A column stores differences in planes of bytes of one weight, without empty upper planes: this compresses well and is
fast to read. The first byte is the number of planes, with the flag `_SIGNED` if a difference is negative. Formerly
there were always eight planes, and the first byte was zlib's.
"""

from __future__ import annotations

import base64
import operator
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

NONE = -(1 << 63)
"""Stands for None in a column."""
MOST = 1 << 28
"""The maximum size of a column in bytes, unless its number of values was announced."""
_SIGNED = 16
_ZLIB = b"x"


def packed(columns: Iterable[Iterable[int]]) -> list[str]:
    """Returns each column of 64-bit numbers as text."""
    return [_pack(np.array(c if isinstance(c, array | np.ndarray) else [*c], np.int64)) for c in columns]


def _pack(column: Any) -> str:
    steps = np.diff(column.astype("<i8"), prepend=np.int64(0))
    signed = bool((steps < 0).any())
    if signed:  # alternating: 0, -1, 1, -2, …
        steps = (steps << 1) ^ (steps >> 63)
    count = (int(steps.view("<u8").max(initial=0)).bit_length() + 7) // 8 or 1
    planes = steps.view(np.uint8).reshape(-1, 8)[:, :count].T.tobytes()
    return base64.b64encode(bytes([count | (_SIGNED if signed else 0)]) + zlib.compress(planes, 6)).decode()


def unpacked(texts: Sequence[str], count: int) -> list[Any]:
    """Returns `count` columns as numpy arrays."""
    if len(texts) != count:
        raise ValueError("not as many columns as there are")
    return [unpack(text) for text in texts]


def unpack(text: str, limit: int = MOST) -> Any:
    data = base64.b64decode(text)
    former = data[:1] == _ZLIB
    count, signed = (8, False) if former else (data[0] & ~_SIGNED, bool(data[0] & _SIGNED))
    planes = inflate(data if former else data[1:], limit)
    if not 0 < count <= 8 or len(planes) % count:
        raise ValueError("not a column")
    size = 4 if count <= 4 else 8
    steps = np.zeros(len(planes) // count, f"<u{size}")
    for i, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(count, -1)):
        if not former or plane.any():
            steps |= plane.astype(steps.dtype) << steps.dtype.type(8 * i)
    if signed:
        steps = (steps >> 1) ^ (~(steps & 1) + 1)
        return np.cumsum(steps.view(f"<i{size}"), dtype=np.int64)
    return np.cumsum(steps if size == 4 else steps.view(np.int64), dtype=np.int64)


def cut(column: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut the column into pieces of these lengths. Raises ValueError if they do not add up to its length."""
    ends = list(accumulate(map(operator.index, counts)))
    if (ends[-1] if ends else 0) != len(column) or any(n < 0 for n in counts):
        raise ValueError("not as many as announced")
    return (column[end - n : end] for end, n in zip(ends, counts, strict=True))


def inflate(data: bytes, limit: int) -> bytes:
    """Decompress the data. Raises ValueError if it is incomplete, or longer than `limit` bytes."""
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(data, limit + 1)
    if len(content) > limit or not unpacking.eof:
        raise ValueError("cut off, or larger than announced")
    return content
