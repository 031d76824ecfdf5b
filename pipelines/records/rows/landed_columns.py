"""The columns of landed and quarantined rows: their names, their Arrow schemas, and how raw and typed feeds differ.

raw feeds      key, value, topic, partition, offset, timestamp, timestampType, headers
typed feeds    the schema's fields, `_extra`, and the record's coordinates as kafka_key, kafka_topic, …
quarantine     the raw columns; why the record does not land (`REFUSED`); batch and contract (`QUARANTINED`)
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Schema, arrow_type


def offset_column(schema: pa.Schema) -> str:
    """The column that holds the Kafka offset: `offset` in raw feeds, `kafka_offset` in typed ones."""
    return "kafka_offset" if "kafka_offset" in schema.names else "offset"


def time_column(schema: pa.Schema) -> str:
    """The column that holds the record's time: `timestamp` in raw feeds, `kafka_timestamp` in typed ones."""
    return "kafka_timestamp" if "kafka_timestamp" in schema.names else "timestamp"


_FEW = pa.dictionary(pa.int16(), pa.string())

COORDINATES = tuple(f for f in RawFormat.schema if f.name != "value")
"""The columns of a record that typed rows keep, besides the value."""

KAFKA_FIELDS = (
    *(f.with_name(KAFKA + f.name) for f in COORDINATES),
    pa.field(f"{KAFKA}tombstone", pa.bool_(), nullable=False),
)

REFUSED = pa.schema(
    [
        *RawFormat.schema,
        pa.field("stage", _FEW, nullable=False),
        pa.field("reason", _FEW, nullable=False),
        pa.field("expectation", _FEW),
        pa.field("field", _FEW),
        pa.field("detail", _FEW, nullable=False),
        pa.field("byte", pa.int32()),
    ]
)
"""The record as it came, and why it does not land: the stage that refused it (`decode`, `schema` or `contract`), the
reason in one word, the expectation that it broke, the field's path, a sentence, and the byte of the value.
"""

QUARANTINED = pa.schema([*REFUSED, pa.field("batch", pa.int64(), nullable=False), pa.field("contract", _FEW)])
"""The same, with the batch that read the record and the hash of the contract that it was checked against."""


def quarantine_rows(refused: pa.RecordBatch, batch: int, contract: str) -> pa.RecordBatch:
    """Rows of `REFUSED`, completed to rows of `QUARANTINED` by the batch and the hash of its contract (empty: none)."""
    n = refused.num_rows
    valid = None if contract else pa.py_buffer(bytes((n + 7) // 8))
    indices = pa.Array.from_buffers(pa.int16(), n, [valid, pa.py_buffer(bytes(2 * n))])
    hashes = pa.DictionaryArray.from_arrays(indices, text_array([contract]))
    return pa.RecordBatch.from_arrays(
        [*refused.columns, fixed_width(pa.int64(), np.full(n, batch, np.int64)), hashes], schema=QUARANTINED
    )


def landed_schema(schema: Schema | None) -> pa.Schema:
    """The Arrow schema of landed rows. `schema` None means a raw feed.

    Typed rows have the schema's fields, the unknown fields as JSON, and the record's coordinates.
    """
    if schema is None:
        return RawFormat.schema
    fields = [pa.field(f.name, arrow_type(f.type)) for f in schema.fields]
    return pa.schema([*fields, pa.field(EXTRA, pa.string()), *KAFKA_FIELDS])
