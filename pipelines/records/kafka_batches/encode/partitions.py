"""To which partition a record goes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.encode import loops
from sluice.pipelines.records.kafka_batches.encode.columns import binary


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
