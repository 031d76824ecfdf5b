"""Every path in the lake, in one place. All are relative with `/`, and none depends on the wall clock.

    data/<feed>/[<folder>/]<part>                       what readers read
    quarantine/<feed>/[<folder>/]<part>                 what broke the contract, with its raw bytes
    reports/<report>/<folder>/<report>.parquet          what a report made of a window
    _sluice/<feed>/log/<20 digits>.json                 the ledger, an entry a file
                   checkpoints/<20 digits>.json         a fold of the ledger up to that number
                   tip.json                             the newest number that is known to have been used
                   staging/<batch>/<attempt>/data|quarantine/[<folder>/]<part>
                   staging/<batch>/<attempt>/<slice>.receipt.json
                   owners/<token>.json                  a run's sign of life
                   windows/<window>.json                "this window is complete"
                   reports/<batch>[-<attempt>].html     a batch's report, for people; an attempt's if it was refused
                   relanded/<batch>/<slice>.parquet     why what a replay landed had been in quarantine
                   aside/<number>/<path>                what lost entries told of, moved here from <path>

`<slice>` is `<topic>-<partition>-<start>-<end>` and `<part>` is `<slice>-b<batch>.parquet`, the topic encoded
by `encode_topic` (whose names hold no `-`). A slice cut into several files by size adds `-1`, `-2`, … to
those after the first. `<folder>` is empty outside windows. The same plan gives the same names.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.format import RawFormat
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


def quarantine_rows(refused: pa.RecordBatch, batch: int, contract: str) -> pa.RecordBatch:
    """Rows of `REFUSED` as they go into the quarantine."""
    n = refused.num_rows
    valid = None if contract else pa.py_buffer(bytes((n + 7) // 8))
    places = pa.Array.from_buffers(pa.int16(), n, [valid, pa.py_buffer(bytes(2 * n))])
    hashes = pa.DictionaryArray.from_arrays(places, text_array([contract]))
    return pa.RecordBatch.from_arrays(
        [*refused.columns, fixed_width(pa.int64(), np.full(n, batch, np.int64)), hashes], schema=QUARANTINED
    )


def landed_schema(schema: Schema | None) -> pa.Schema:
    """Of landed rows: the schema's fields, the unknown ones as JSON, the record's coordinates; None: of raw feeds."""
    if schema is None:
        return RawFormat.schema
    fields = [pa.field(f.name, arrow_type(f.type)) for f in schema.fields]
    return pa.schema([*fields, pa.field(EXTRA, pa.string()), *KAFKA_FIELDS])
