"""Rows gathered by partition until a batch is full.

Promises: each partition's records keep their order; a batch holds at most `batch_bytes` of records before compression,
unless it is one larger record; open batches hold at most `held_bytes` and what one chunk brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder
from sluice.pipelines.records.kafka_batches.encode import loops
from sluice.pipelines.records.kafka_batches.encode.codecs import CODECS
from sluice.pipelines.records.kafka_batches.encode.columns import rows_of
from sluice.pipelines.records.kafka_batches.encode.loops import Rows
from sluice.pipelines.records.kafka_batches.encode.sealed_batch import HEADER_BYTES, SealedBatch
from sluice.pipelines.records.rows.row_format import TO_SEND

BATCH_BYTES = 900_000
"""Bytes of records in a batch: less than a topic accepts by default, compressed or not."""
HELD_BYTES = 64 << 20
_FIRST_BYTES = 16 << 10  # of room that an open batch begins with
_SPARE = 8  # buffers of batches that were sealed, for those that come
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


@dataclass(slots=True)
class _Open:
    """A batch that is being filled."""

    out: Array
    state: Array
    numbers: list[Array] = field(default_factory=list)

    @classmethod
    def empty(cls, limit: int, spare: list[Array]) -> _Open:
        state = np.zeros(loops.STATE, np.int64)
        state[loops.LIMIT] = limit
        return cls(spare.pop() if spare else np.empty(min(_FIRST_BYTES, limit), np.uint8), state)

    def append(self, rows: Rows, chosen: Array, first: int, numbers: Array) -> int:
        """Append rows; where in `chosen` it stopped. A batch without room grows, up to its limit or one record."""
        while True:
            stopped = int(loops.append(rows, chosen, first, self.out, self.state))
            if stopped > first:
                self.numbers.append(numbers[first:stopped])
            need = int(self.state[loops.NEED])
            if not need:
                return stopped
            first, limit = stopped, int(self.state[loops.LIMIT])
            grown = np.empty(max(need, min(4 * len(self.out), limit)), np.uint8)
            used = int(self.state[loops.USED])
            grown[:used] = self.out[:used]
            self.out = grown


class Accumulator:
    """Makes batches from rows. `codec` is a number of Kafka's CompressionType. Not for two threads at once."""

    def __init__(self, codec: int = 0, batch_bytes: int = BATCH_BYTES, held_bytes: int = HELD_BYTES) -> None:
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._held_bytes = held_bytes
        self._open: dict[int, _Open] = {}
        self._spare: list[Array] = []

    def add(self, batch: pa.RecordBatch, partitions: Array, numbers: Array) -> Iterator[SealedBatch]:
        """Take rows of `format.TO_SEND` with the partition and the number of each; yield the batches that are full.

        Exhaust it before the next call.
        """
        rows, ends = rows_of(batch), np.cumsum(np.bincount(partitions))
        order = np.empty(len(partitions), np.int64)
        loops.group(partitions, ends, order)  # from now on ends are where the partitions begin
        for partition, (first, stop) in enumerate(pairwise([*ends.tolist(), len(order)])):
            if first < stop:
                chosen = order[first:stop]
                yield from self._add(partition, rows, chosen, numbers[chosen])
        if sum(len(o.out) for o in self._open.values()) > self._held_bytes:
            yield from self.flush()

    def flush(self) -> Iterator[SealedBatch]:
        """The batches that are open, by partition."""
        for partition in sorted(self._open):
            yield self._seal(partition)

    def _add(self, partition: int, rows: Rows, chosen: Array, numbers: Array) -> Iterator[SealedBatch]:
        at = 0
        while True:
            if partition not in self._open:
                self._open[partition] = _Open.empty(self._batch_bytes, self._spare)
            at = self._open[partition].append(rows, chosen, at, numbers)
            if at == len(chosen):
                return
            yield self._seal(partition)

    def _seal(self, partition: int) -> SealedBatch:
        done = self._open.pop(partition)
        used = int(done.state[loops.USED])
        data = _BY_NUMBER[self._codec].encode(done.out[:used].data, HEADER_BYTES)
        if len(self._spare) < _SPARE:
            self._spare.append(done.out)
        return SealedBatch(
            partition,
            self._codec,
            int(done.state[loops.BASE_TIME]),
            int(done.state[loops.MAX_TIME]),
            data,
            used,
            np.concatenate(done.numbers),
        )


def split(batch: SealedBatch) -> tuple[SealedBatch, SealedBatch]:
    """Return the records of a batch in two batches of half as many each. The batch must have two or more."""
    decoder = BatchDecoder("", batch.partition, 0, batch.count)
    rows = pa.concat_batches([*decoder.feed(batch.numbered()), *decoder.finish()])
    timestamps = rows.column("timestamp").cast(pa.int64())
    rows = pa.RecordBatch.from_arrays(
        [rows.column("key"), rows.column("value"), timestamps, rows.column("headers")], schema=TO_SEND
    )
    middle = batch.count // 2
    first, second = _encode_half(batch, rows, 0, middle), _encode_half(batch, rows, middle, batch.count)
    return first, second


def _encode_half(batch: SealedBatch, rows: pa.RecordBatch, start: int, stop: int) -> SealedBatch:
    accumulator = Accumulator(batch.codec, batch.plain_bytes + 1)
    partitions = np.full(stop - start, batch.partition, np.int64)
    numbers = batch.numbers[start:stop]
    (half,) = [*accumulator.add(rows.slice(start, stop - start), partitions, numbers), *accumulator.flush()]
    return half
