"""Turns Arrow columns into Kafka's record batches, in compiled, bounds-checked loops: the way back of `records.decode`.

    Arrow rows ─► partitions (murmur2) ─► open batches, one for each partition ─► codec ─► sealed batches

`Accumulator` takes rows with their partitions and gives sealed batches. Importing this package loads the compiled loops
from numba's cache, as `records.decode` does.
"""

from sluice.pipelines.records.encode.accumulator import Accumulator
from sluice.pipelines.records.encode.batches import SealedBatch, split
from sluice.pipelines.records.encode.codecs import CODECS
from sluice.pipelines.records.encode.partitions import by_key, spread
from sluice.pipelines.records.format import TO_SEND

__all__ = ["CODECS", "TO_SEND", "Accumulator", "SealedBatch", "by_key", "split", "spread"]
