"""Reads the headers of a fetch response: its table of frames, and how far it reaches. Decodes nothing."""

from __future__ import annotations

import numpy as np

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops
from sluice.pipelines.records.kafka_batches.decode.decode_errors import BatchProblem, LogPlace, frame_error


def read_only(records: bytes | memoryview) -> Array:
    """The bytes as a read-only array, without a copy."""
    return np.frombuffer(memoryview(records).toreadonly().cast("B"), np.uint8)


def frame_table(raw: Array, origin: LogPlace) -> tuple[Array, int, BatchProblem | None]:
    """The headers of all complete frames (rows of `loops.FIELDS` numbers), their bytes, and the next error."""
    # One row for the smallest frame there is: memory that is not written to costs nothing.
    table = np.empty((raw.size // loops.MESSAGE_OVERHEAD[0] + 1, loops.FIELDS), np.int64)
    frames, at, code = loops.scan(raw, table)
    return table[:frames], at, frame_error(origin, raw, at, code)


def next_position(
    records: bytes | memoryview, position: int, topic: str | None = None, partition: int | None = None
) -> int:
    """The position after the last complete batch of a response that was fetched at `position`.

    Reads headers only: nothing is decompressed and no checksum is computed. Returns `position` unchanged when there is
    no complete batch; ask `bytes_needed` then. Raises CorruptBatch or UnsupportedBatch when the first batch is bad. A
    bad batch further on ends the walk, and is found again at its own position.
    """
    if not len(records):
        return position
    frames, _, problem = frame_table(read_only(records), LogPlace(topic, partition))
    if len(frames):
        return max(position, int(frames[-1, loops.LAST]) + 1)
    if problem:
        raise problem
    return position


def bytes_needed(records: bytes | memoryview) -> int:
    """The size of the first batch if the response holds only its beginning; 0 if it holds all of it, or nothing."""
    if len(records) >= loops.LOG_OVERHEAD:
        size = loops.LOG_OVERHEAD + int.from_bytes(records[8:12], "big", signed=True)
        return size if size > len(records) else 0
    return loops.BATCH_OVERHEAD if len(records) else 0
