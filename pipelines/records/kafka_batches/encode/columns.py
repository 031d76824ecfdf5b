"""The columns that are sent, and their buffers as the loops read them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.encode import loops
from sluice.pipelines.records.kafka_batches.encode.loops import Rows
from sluice.pipelines.records.rows.header_keys import bytes_column
from sluice.pipelines.records.rows.row_format import TO_SEND
from sluice.pipelines.schema.arrays import int64s


def rows_of(batch: pa.RecordBatch) -> Rows:
    """The buffers of rows of TO_SEND, possibly a slice. Raises ValueError for others.

    Copies nothing but bitmaps, and keys of headers where some are escaped.
    """
    if batch.schema.remove_metadata() != TO_SEND:
        raise ValueError(f"not rows to send: {batch.schema}")
    key, value, timestamp, headers = batch.columns
    if timestamp.null_count:
        raise ValueError("rows to send need times")
    lists = _offsets(headers)
    if headers.null_count and np.diff(lists)[_read_validity(headers) == 0].any():
        raise ValueError("null headers that hold some")  # none of our writers makes these
    entries = headers.values
    return Rows(
        *binary(key),
        *binary(value),
        _read_only(int64s(timestamp)),
        lists,
        *binary(bytes_column(entries.field(0)))[:2],
        *binary(entries.field(1)),
    )


def binary(column: pa.Array) -> tuple[Array, Array, Array]:
    """Data, offsets and validity of a column of bytes or text."""
    data = column.buffers()[2]
    raw = _read_only(np.frombuffer(data, np.uint8)) if data is not None else _NOTHING
    return raw, _offsets(column), _read_validity(column)


def _offsets(column: pa.Array) -> Array:
    """Where a column's own rows begin and end."""
    buffer = column.buffers()[1]
    if buffer is None or buffer.size == 0:
        return _read_only(np.zeros(1, np.int32))  # an empty column needs no buffer
    return _read_only(np.frombuffer(buffer, np.int32, len(column) + 1, 4 * column.offset))


def _read_validity(column: pa.Array) -> Array:
    """A byte for each row; nothing where no row is null."""
    bitmap = column.buffers()[0]
    if bitmap is None or not column.null_count:
        return _NOTHING
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[column.offset :][: len(column)]
    return _read_only(bits)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


_NOTHING = _read_only(np.empty(0, np.uint8))


def by_key(keys: pa.Array, partitions: int, otherwise: Array) -> Array:
    """The partitions of records with these keys (bytes), as Kafka's Java producer chooses them (murmur2).

    Java spreads records without a key as it likes; here they go where `otherwise` says.
    """
    hashes = np.empty(len(keys), np.int64)
    loops.hash_keys(*binary(keys), hashes)
    return np.where(hashes < 0, otherwise, hashes % partitions)


def spread(numbers: Array, partitions: int) -> Array:
    """One partition after the other: a record's number decides, so that a repetition decides the same."""
    return numbers % partitions
