"""The columns of a typed feed's files: what lands, and what goes into quarantine. Light: no compiled loop is loaded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.formats import RawFormat, fixed, text_array
from sluice.pipelines.typed.schema import EXTRA, KAFKA, Schema, arrow_type

_FEW = pa.dictionary(pa.int16(), pa.string())

COORDINATES = tuple(f for f in RawFormat.schema if f.name != "value")
"""What landed rows keep of a record besides its typed value."""
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
"""The record as it came, and why it does not land, as a format says it: the stage that refused it (`decode`, `schema`
or `contract`), the reason in a word, the expectation that it broke, the field's path, a sentence, the byte of the
value.
"""
QUARANTINED = pa.schema([*REFUSED, pa.field("batch", pa.int64(), nullable=False), pa.field("contract", _FEW)])
"""The same with the batch that read it, and the hash of the contract that it was held against."""


def quarantined(refused: pa.RecordBatch, batch: int, contract: str) -> pa.RecordBatch:
    """Rows of `REFUSED` as they go into the quarantine."""
    n = refused.num_rows
    valid = None if contract else pa.py_buffer(bytes((n + 7) // 8))
    places = pa.Array.from_buffers(pa.int16(), n, [valid, pa.py_buffer(bytes(2 * n))])
    hashes = pa.DictionaryArray.from_arrays(places, text_array([contract]))
    return pa.RecordBatch.from_arrays(
        [*refused.columns, fixed(pa.int64(), np.full(n, batch, np.int64)), hashes], schema=QUARANTINED
    )


def landed_schema(schema: Schema | None) -> pa.Schema:
    """Of landed rows: the schema's fields, the unknown ones as JSON, the record's coordinates; None: of raw feeds."""
    if schema is None:
        return RawFormat.schema
    fields = [pa.field(f.name, arrow_type(f.type)) for f in schema.fields]
    return pa.schema([*fields, pa.field(EXTRA, pa.string()), *KAFKA_FIELDS])
