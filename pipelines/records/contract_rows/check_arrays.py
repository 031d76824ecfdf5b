"""Arrow arrays for checks, made without pa.array() and pa.scalar(), whose first call imports pandas in each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.schema.arrays import as_mask, boolean_array, fixed_width, text_array, view_int32s
from sluice.pipelines.schema.schema import Kind, Type

_NAMED = {"float": Kind.FLOAT32, "double": Kind.FLOAT64, "date32[day]": Kind.DATE}
_KINDS = {str(k): k for k in Kind} | _NAMED
FLOATS = {Kind.FLOAT32: np.float32, Kind.FLOAT64: np.float64}


def type_of(arrow: pa.DataType) -> Type:
    """The schema type of landed values, as far as checks tell types apart."""
    if pa.types.is_dictionary(arrow):
        return type_of(arrow.value_type)
    if pa.types.is_decimal(arrow):
        return Type(Kind.DECIMAL, arrow.precision, arrow.scale)
    if pa.types.is_timestamp(arrow):
        return Type(Kind.TIMESTAMP, unit=arrow.unit)
    return Type(_KINDS.get(str(arrow), Kind.LIST))


def array_of(arrow: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """An array of values in the type's own units: decimals and times count their last digit or unit."""
    if pa.types.is_string(arrow):
        return text_array(values)
    if pa.types.is_boolean(arrow):
        return boolean_array(np.array(values, np.bool_))
    if pa.types.is_decimal(arrow):
        raw = b"".join(int(v).to_bytes(16, "little", signed=True) for v in values)
        return pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(raw)])
    return fixed_width(arrow, np.array(values, numpy_type(arrow)))


def numpy_type(arrow: pa.DataType) -> np.dtype[Any]:
    """The numpy type of the numbers that a column is made of."""
    kind = type_of(arrow).kind
    if kind in (Kind.FLOAT32, Kind.FLOAT64):
        return np.dtype(FLOATS[kind])
    if kind is Kind.TIMESTAMP:
        return np.dtype(np.int64)
    return np.dtype(np.int32) if kind is Kind.DATE else np.dtype(str(arrow))


def scalar(arrow: pa.DataType, value: Any) -> pa.Scalar:
    """One value, in the units that `array_of` takes."""
    return array_of(arrow, [value])[0]


def numbers(column: pa.Array) -> pa.Array:
    """Times and dates as whole numbers; other columns unchanged. Copies nothing."""
    if pa.types.is_timestamp(column.type):
        return column.view(pa.int64())
    return column.view(pa.int32()) if pa.types.is_date32(column.type) else column


def without_nan(column: pa.Array) -> pa.Array:
    """The column with NaN replaced by null. Copies it only if it holds NaN."""
    if not pa.types.is_floating(column.type):
        return column
    nan = pc.is_nan(column)
    if not nan.true_count:
        return column
    valid = np.packbits(~as_mask(pc.or_kleene(nan, pc.is_null(column))), bitorder="little")
    data = column.buffers()[1].slice(column.offset * (column.type.bit_width // 8))
    return pa.Array.from_buffers(column.type, len(column), [pa.py_buffer(valid), data])


def places_of(mask: pa.BooleanArray) -> Array:
    """The indices where the mask is true, in order."""
    positions = pc.indices_nonzero(mask)
    return np.frombuffer(positions.buffers()[1], np.uint64, len(positions), positions.offset * 8).astype(np.int64)


def int32s(column: pa.Array, absent: int) -> Array:
    """A column of 32-bit numbers, with `absent` in place of nulls."""
    values = view_int32s(column)
    return values if not column.null_count else np.where(as_mask(pc.is_valid(column)), values, np.int32(absent))


def text_buffers(column: pa.StringArray) -> tuple[Array, Array]:
    """The bytes of a column's texts, and where each ends, after where the first begins."""
    _, ends, data = column.buffers()
    n = len(column)
    return (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8),
        np.frombuffer(ends, np.int32, n + 1, 4 * column.offset) if n else np.zeros(1, np.int32),
    )


def is_ascii(column: pa.StringArray) -> bool:
    """Returns whether every character of the column is one byte."""
    if not len(column):
        return True
    ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
    first, last = int(ends[0]), int(ends[-1])
    return first == last or int(np.frombuffer(column.buffers()[2], np.uint8, last - first, first).max()) < 128
