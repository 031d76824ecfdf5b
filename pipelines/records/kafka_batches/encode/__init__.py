"""Turns Arrow columns into Kafka's record batches, in compiled, bounds-checked loops.

    Arrow rows ─► partitions (murmur2) ─► open batches, one for each partition ─► codec ─► sealed batches

`Accumulator` takes rows with their partitions and gives sealed batches. Importing this package loads the library of
compiled loops.
"""

from sluice.pipelines.records.kafka_batches.encode.accumulator import (
    CODECS,
    Accumulator,
    SealedBatch,
    by_key,
    split,
    spread,
)
from sluice.pipelines.records.rows.row_format import TO_SEND

__all__ = ["CODECS", "TO_SEND", "Accumulator", "SealedBatch", "by_key", "split", "spread"]
