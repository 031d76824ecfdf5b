"""Small helpers over Arrow arrays: from and to numpy without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


# Not pa.array() nor to_numpy(): their first call imports pandas, a second and 60 MB in each worker.
def fixed_width(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    """Numbers as an Arrow array of the same width, without nulls. Copies nothing."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)


def int64s(column: pa.Array) -> np.ndarray:
    """A column of 64-bit numbers without nulls, as a numpy array. Copies nothing."""
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def text_array(texts: Sequence[str]) -> pa.StringArray:
    """Texts as an Arrow string array."""
    data = [t.encode() for t in texts]
    ends = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(data), pa.py_buffer(ends), pa.py_buffer(b"".join(data)))


def buffers_of(values: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an array's data, ends and validity bitmap; the bitmap is empty if all values are valid."""
    if values.offset:
        raise ValueError("an array that begins within its buffers")
    bitmap, ends, data = values.buffers()
    valid = np.frombuffer(bitmap, np.uint8) if bitmap is not None and values.null_count else np.empty(0, np.uint8)
    bytes_ = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return bytes_, np.frombuffer(ends, np.int32)[: len(values) + 1], valid


def indices(rows: np.ndarray) -> pa.Array:
    """Returns numbers of rows as an Arrow array, for `take`."""
    return fixed_width(pa.int32(), rows)
