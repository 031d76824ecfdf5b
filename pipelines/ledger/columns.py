"""Columns of numbers as text, a few bytes a number: what grows with a feed's age lies so in checkpoints and proofs."""

from __future__ import annotations

import base64
import operator
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

MOST = 1 << 28
"""The most bytes that a column has, unless a number of values was announced: more is no checkpoint."""


def packed(columns: Iterable[Iterable[int]]) -> list[str]:
    """Each column of 64-bit numbers as differences, in planes of bytes of one weight, which zlib packs well."""
    return [_pack(np.array(c if isinstance(c, array | np.ndarray) else [*c], np.int64)) for c in columns]


def _pack(column: Any) -> str:
    steps = np.diff(column.astype("<i8"), prepend=np.int64(0)).view(np.uint8).reshape(-1, 8)
    return base64.b64encode(zlib.compress(steps.T.tobytes(), 6)).decode()


def unpacked(texts: Sequence[str], count: int) -> list[Any]:
    """So many columns, as arrays of numpy."""
    if len(texts) != count:
        raise ValueError("not as many columns as there are")
    return [unpack(text) for text in texts]


def unpack(text: str, most: int = MOST) -> Any:
    planes = inflate(base64.b64decode(text), most)
    if len(planes) % 8:
        raise ValueError("not a column")
    steps = np.zeros(len(planes) // 8, np.uint64)
    for i, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(8, -1)):
        if plane.any():  # most steps are small: what stands in the upper planes is zero
            steps |= plane.astype(np.uint64) << np.uint64(8 * i)
    return np.cumsum(steps.view(np.int64))


def cut(column: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """The column, cut into pieces of these lengths. Raises ValueError where they do not make the whole."""
    ends = list(accumulate(map(operator.index, counts)))
    if (ends[-1] if ends else 0) != len(column) or any(n < 0 for n in counts):
        raise ValueError("not as many as announced")
    return (column[end - n : end] for end, n in zip(ends, counts, strict=True))


def inflate(data: bytes, most: int) -> bytes:
    """What is packed in the data. Raises ValueError where that is not all, or more than `most` bytes."""
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(data, most + 1)
    if len(found) > most or not unpacking.eof:
        raise ValueError("cut off, or larger than announced")
    return found
