"""A batch that is full: its records are encoded and compressed; its header waits for the producer's numbers.

Format: record batch v2 (KIP-98), its checksum CRC32C from the attributes on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
