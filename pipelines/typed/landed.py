"""The columns of a typed feed's files: what lands, and what goes into quarantine. Light: no compiled loop is loaded."""

from __future__ import annotations

import pyarrow as pa

from sluice.pipelines.formats import RawFormat
from sluice.pipelines.typed.schema import EXTRA, KAFKA, Schema, arrow_type

_FEW = pa.dictionary(pa.int16(), pa.string())

COORDINATES = tuple(f for f in RawFormat.schema if f.name != "value")
"""What landed rows keep of a record besides its typed value."""
KAFKA_FIELDS = (
    *(f.with_name(KAFKA + f.name) for f in COORDINATES),
    pa.field(f"{KAFKA}tombstone", pa.bool_(), nullable=False),
)
QUARANTINED = pa.schema(
    [
        *RawFormat.schema,
        pa.field("reason", _FEW, nullable=False),
        pa.field("field", _FEW),
        pa.field("detail", _FEW, nullable=False),
        pa.field("byte", pa.int32()),
    ]
)
"""The record as it came, and why: the reason in a word, the field's path, a sentence, the byte of the value."""


def landed_schema(schema: Schema | None) -> pa.Schema:
    """Of landed rows: the schema's fields, the unknown ones as JSON, the record's coordinates; None: of raw feeds."""
    if schema is None:
        return RawFormat.schema
    fields = [pa.field(f.name, arrow_type(f.type)) for f in schema.fields]
    return pa.schema([*fields, pa.field(EXTRA, pa.string()), *KAFKA_FIELDS])
