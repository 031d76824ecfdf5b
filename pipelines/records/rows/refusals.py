"""Rows of a piece that a stage behind the typing refuses: quarantined as their records came, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.rows.row_format import KAFKA_FIELDS, REFUSED, Formatted, RawFormat
from sluice.pipelines.schema.arrays import fixed_width, int64s

OFFSET, TOMBSTONE = "kafka_offset", KAFKA_FIELDS[-1].name
_RAW = RawFormat()


def refuse_rows(
    piece: Formatted, s: OffsetRange, chunk: pa.RecordBatch, retained: Array, why: Sequence[pa.Array], dropping: bool
) -> Formatted:
    """The piece with the landed rows of the mask `retained` alone. The others' records are quarantined.

    `why` has the columns of `REFUSED` after those of the record, for the others. With `dropping`, they are counted
    and left out.
    """
    offsets = int64s(piece.landed.column(piece.landed.schema.get_field_index(OFFSET)))[~retained]
    landed = take_rows(piece.landed, np.flatnonzero(retained))
    before, after = (n.num_rows - get_tombstones(n).true_count for n in (piece.landed, landed))
    typed = piece.typed - (before - after)
    drift = (replace(d, records=min(d.records, typed)) if d.kind is DriftKind.MISSING else d for d in piece.drift)
    piece = replace(piece, landed=landed, typed=typed, drift=tuple(drift))
    if dropping:
        return replace(piece, dropped=piece.dropped + len(offsets))
    records = int64s(chunk.column(chunk.schema.get_field_index("offset")))
    chosen = chunk.take(fixed_width(pa.int32(), np.searchsorted(records, offsets).astype(np.int32)))
    (raw,) = _RAW.convert(s, chosen)
    refused = pa.RecordBatch.from_arrays([*raw.landed.columns, *why], schema=REFUSED)
    return replace(piece, quarantined=merge_refused(piece.quarantined, refused))


def merge_refused(before: pa.RecordBatch | None, refused: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of `REFUSED` of two stages in offset order."""
    if before is None:
        return refused
    both = pa.Table.from_batches([before, refused])
    order = np.argsort(int64s(both.column("offset").combine_chunks()))
    return both.take(fixed_width(pa.int64(), order)).combine_chunks().to_batches()[0]


def get_tombstones(rows: pa.RecordBatch) -> pa.BooleanArray:
    """Which typed rows are tombstones."""
    return rows.column(rows.schema.get_field_index(TOMBSTONE))
