"""Builds Arrow arrays from numpy, and recasts rows of an earlier schema to a later one where that loses nothing.

The check reads no row. New columns are null. A type may become one that holds all of its values: a larger integer,
decimal or float, a finer unit of time, a struct with more members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


# Not pa.array(), pa.scalar() nor to_numpy(): their first call imports pandas, a second and 60 MB in each worker.
def fixed_width(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    """Numbers as an Arrow array of the same width, without nulls. Copies nothing."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)


def int64s(column: pa.Array) -> np.ndarray:
    """A column of 64-bit numbers without nulls, as a numpy array. Copies nothing."""
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def fill_int64s(column: pa.Array, value: int) -> np.ndarray:
    """A column of 64-bit numbers as a numpy array, with `value` for nulls."""
    return int64s(column.fill_null(fixed_width(pa.int64(), np.array([value]))[0]))


def view_int32s(column: pa.Array) -> np.ndarray:
    """A column of 32-bit numbers without nulls, as a numpy array. Copies nothing."""
    return np.frombuffer(column.buffers()[1], np.int32, len(column), column.offset * 4)


def unpack_bits(bitmap: pa.Buffer, offset: int, count: int) -> np.ndarray:
    """Returns `count` bits of a buffer from `offset` on, as one boolean each."""
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little", count=offset + count)
    return bits[offset:].view(np.bool_)


def boolean_array(truths: np.ndarray) -> pa.BooleanArray:
    """Booleans as an Arrow array, without nulls."""
    bits = np.packbits(truths, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(truths), [None, pa.py_buffer(bits)])


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


def find_spans(values: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the data of a binary array, the start and the stop of each value, and the validity bitmap.

    The bitmap is empty if all are valid. A dictionary array has values that are chosen from a larger array; none is
    copied.
    """
    if not pa.types.is_dictionary(values.type):
        data, ends, valid = buffers_of(values)
        return data, ends[:-1], ends[1:], valid
    data, ends, _ = buffers_of(values.dictionary)
    bitmap, chosen = values.indices.buffers()
    valid = np.frombuffer(bitmap, np.uint8) if bitmap is not None and values.null_count else np.empty(0, np.uint8)
    chosen = np.frombuffer(chosen, np.int32)[: len(values)]
    return data, ends[chosen], ends[1:][chosen], valid


def get_value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of values, which may be encoded by a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def indices(rows: np.ndarray) -> pa.Array:
    """Returns numbers of rows as an Arrow array, for `take`."""
    return fixed_width(pa.int32(), rows)


def find_equal(a: pa.Array | pa.ChunkedArray, b: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Returns a boolean for each item of two columns of one type: whether they are equal, as null and null or NaN and
    NaN are, at any depth."""
    import pyarrow.compute as pc  # late: it takes 40 ms

    if pa.types.is_nested(a.type):
        # Python has no time beyond the year 9999, nor one of a nanosecond.
        numbers = _with_numbers(a.type)
        a, b = a.cast(numbers), b.cast(numbers)
        return np.array([_compare_values(x, y) for x, y in zip(a.to_pylist(), b.to_pylist(), strict=True)], np.bool_)
    equal = pc.or_(pc.fill_null(pc.equal(a, b), False), pc.and_(a.is_null(), b.is_null()))
    if pa.types.is_floating(a.type):
        equal = pc.or_(equal, pc.fill_null(pc.and_(pc.is_nan(a), pc.is_nan(b)), False))
    return as_mask(equal)


def _with_numbers(kind: pa.DataType) -> pa.DataType:
    """The type with whole numbers for times and dates, at any depth."""
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_with_numbers(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_with_numbers(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_numbers(kind.value_type)))
    if pa.types.is_temporal(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    return kind


def as_mask(truths: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Returns booleans as a NumPy array; null is false."""
    if not len(truths):
        return np.empty(0, np.bool_)
    mask = truths.combine_chunks() if isinstance(truths, pa.ChunkedArray) else truths
    valid, bits = mask.buffers()
    values = unpack_bits(bits, mask.offset, len(mask))
    return values & unpack_bits(valid, mask.offset, len(mask)) if mask.null_count else values


def _compare_values(x: Any, y: Any) -> bool:
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_compare_values(v, y[k]) for k, v in x.items())
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(map(_compare_values, x, y))
    return bool(x == y or (x != x and y != y))  # NaN alone differs from itself


def has_floats(kind: pa.DataType) -> bool:
    """Returns whether values of the type are floats or contain any."""
    if pa.types.is_struct(kind):
        return any(has_floats(f.type) for f in kind)
    if pa.types.is_map(kind):
        return has_floats(kind.item_type)
    if pa.types.is_list(kind):
        return has_floats(kind.value_type)
    return bool(pa.types.is_floating(kind))


_EXACT = {16: 11, 32: 24, 64: 53}
"""For each width of a float, the widest integers that it holds exactly, in bits."""
_UNITS = ("s", "ms", "us", "ns")


def unfit(old: pa.Schema, new: pa.Schema) -> str:
    """Why rows of `old` cannot become rows of `new` without loss, naming a column; empty when they can."""
    for field in old:
        at = new.get_field_index(field.name)
        if at < 0:
            return f"column {field.name} is no longer in the schema"
        if not holds(field.type, new.field(at).type):
            return f"column {field.name} was {field.type}, and {new.field(at).type} does not hold all of it"
    missing = (f.name for f in new if not f.nullable and old.get_field_index(f.name) < 0)
    return next((f"column {name} is new and may not be null" for name in missing), "")


def holds(old: pa.DataType, new: pa.DataType) -> bool:
    """Returns whether `new` holds every value of `old`."""
    if pa.types.is_dictionary(new):
        return holds(old, new.value_type)
    if old.equals(new) or pa.types.is_null(old):
        return True
    if pa.types.is_nested(old):
        if pa.types.is_struct(old) and pa.types.is_struct(new):
            positions = [new.get_field_index(f.name) for f in old]
            is_held = all(at >= 0 and holds(f.type, new.field(at).type) for f, at in zip(old, positions, strict=True))
            return is_held and positions == sorted(positions)
        if pa.types.is_map(old) and pa.types.is_map(new):
            return holds(old.key_type, new.key_type) and holds(old.item_type, new.item_type)
        if pa.types.is_list(old) and pa.types.is_list(new):
            return holds(old.value_type, new.value_type)
        return False
    if pa.types.is_integer(old):
        signed = pa.types.is_signed_integer(old)
        bits = old.bit_width - signed
        if pa.types.is_integer(new):
            fits = bool(bits <= new.bit_width - pa.types.is_signed_integer(new))
            return fits and (not signed or pa.types.is_signed_integer(new))
        if pa.types.is_floating(new):
            return bool(bits <= _EXACT[new.bit_width])
        digits = len(str((1 << bits) - 1))
        return bool(pa.types.is_decimal(new) and digits <= new.precision - new.scale)
    if pa.types.is_floating(old):
        return bool(pa.types.is_floating(new) and new.bit_width >= old.bit_width)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale)
    if pa.types.is_timestamp(old) and pa.types.is_timestamp(new):
        return bool(old.tz == new.tz and _UNITS.index(new.unit) >= _UNITS.index(old.unit))
    return False


def recast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the later schema's columns and types.

    Raises ArrowInvalid for a value that does not fit after all, such as a time beyond the calendar of a finer unit.
    """
    return pa.RecordBatch.from_arrays([_column(rows, f) for f in schema], schema=schema)


def _column(rows: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = rows.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(rows.num_rows, field.type)
    column = rows.column(at)
    return column if column.type.equals(field.type) else column.cast(field.type)


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema as files hold it: dictionary types become the type of their values."""
    return pa.schema([f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in schema])
