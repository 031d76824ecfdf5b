"""A batch that is full: its records are encoded and compressed; its header waits for the producer's numbers.

Format: record batch v2 (KIP-98), its checksum CRC32C from the attributes on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from sluice.pipelines.records.compiled.jit import Array

_HEAD = struct.Struct(">qiibI")  # base offset, length, leader epoch, magic, checksum
_CHECKED = struct.Struct(">hiqqqhii")  # attributes … count
_BEFORE_LENGTH = 12
_TRANSACTIONAL = 0x10
HEADER_BYTES = _HEAD.size + _CHECKED.size


@dataclass(frozen=True, slots=True)
class Numbering:
    """Who sends a batch (KIP-98): producer id and epoch, and its first record's sequence number. All −1: anybody."""

    producer: int = -1
    epoch: int = -1
    sequence: int = -1
    transactional: bool = False


ANYBODY = Numbering()


@dataclass(frozen=True, slots=True, eq=False)
class SealedBatch:
    """One batch: `data` are its compressed records behind room for its header. `numbers` are those that the caller gave
    its rows; `plain_bytes` is the size of the records before compression."""

    partition: int
    codec: int
    base_time: int
    max_time: int
    data: memoryview
    plain_bytes: int
    numbers: Array

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def size(self) -> int:
        """Its bytes on the wire and in the log."""
        return len(self.data)

    def numbered(self, by: Numbering = ANYBODY) -> memoryview:
        """The whole batch, with base offset 0, which the broker replaces. Valid until the next call of this."""
        _CHECKED.pack_into(
            self.data,
            _HEAD.size,
            self.codec | (_TRANSACTIONAL if by.transactional else 0),
            self.count - 1,
            self.base_time,
            self.max_time,
            by.producer,
            by.epoch,
            by.sequence,
            self.count,
        )
        _HEAD.pack_into(self.data, 0, 0, self.size - _BEFORE_LENGTH, -1, 2, crc32c(self.data[_HEAD.size :]))
        return self.data


def split(batch: SealedBatch) -> tuple[SealedBatch, SealedBatch]:
    """The same records in two batches of half as many each. The batch must have two or more."""
    from sluice.pipelines.records.kafka_batches.decode import BatchDecoder
    from sluice.pipelines.records.kafka_batches.encode.accumulator import Accumulator
    from sluice.pipelines.records.rows.row_format import TO_SEND

    decoder = BatchDecoder("", batch.partition, 0, batch.count)
    chunks = [*decoder.feed(batch.numbered()), *decoder.finish()]
    rows = pa.concat_batches(chunks)
    stamps = rows.column("timestamp").cast(pa.int64())
    rows = pa.RecordBatch.from_arrays(
        [rows.column("key"), rows.column("value"), stamps, rows.column("headers")], schema=TO_SEND
    )
    half = batch.count // 2
    made = []
    for first, stop in ((0, half), (half, batch.count)):
        some = Accumulator(batch.codec, batch.plain_bytes + 1)
        where = np.full(stop - first, batch.partition, np.int64)
        made += [*some.add(rows.slice(first, stop - first), where, batch.numbers[first:stop]), *some.flush()]
    one, other = made
    return one, other
