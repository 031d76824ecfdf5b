"""Logs of brokers: record batches as bytes, built with kafka-python's builders.

Other libraries compress the bytes of the builders. The rows that a consumer must receive are derived from the
description of the log, never from its bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cramjam
from crc32c import crc32c
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
ABORT, COMMIT = 0, 1
HUGE = 1 << 40

Headers = tuple[tuple[str, bytes | None], ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class LogRecord:
    """A record; compaction removed `skip` offsets before it."""

    key: bytes | None = b"k"
    value: bytes | None = b"v"
    time: int = 1_700_000_000_000
    headers: Headers = ()
    skip: int = 0


@dataclass(frozen=True)
class LogBatch:
    """A batch of a log, with `gap` offsets before it and `tail` offsets after its last record.

    A marker has the time of its first record.
    """

    records: tuple[LogRecord, ...] = (LogRecord(),)
    codec: int = NONE
    magic: int = 2
    producer: int = -1
    transactional: bool = False
    marker: int | None = None
    append_time: int | None = None
    gap: int = 0
    tail: int = 0
    delete_horizon: bool = False
    xerial: bool = True


@dataclass(frozen=True)
class Stored:
    """A batch with its offsets and bytes."""

    batch: LogBatch
    base: int
    last: int
    offsets: tuple[int, ...]
    data: bytes


@dataclass
class Log:
    """A partition: batches in offset order, and transactions.

    Aborted transactions are (producer, first offset, last offset); open ones are first offsets by producer.
    """

    batches: list[Stored] = field(default_factory=list)
    aborted: list[tuple[int, int, int]] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)
    start: int = 0

    @property
    def end(self) -> int:
        return self.batches[-1].last + 1 if self.batches else self.start

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset: the first offset of an open transaction, else the end."""
        return min(self.open.values(), default=self.end)

    @property
    def data(self) -> bytes:
        return b"".join(b.data for b in self.batches)

    def fetch(self, position: int, max_bytes: int = HUGE) -> tuple[bytes, list[tuple[int, int]]]:
        """Returns bytes from the batch of `position` on, cut at `max_bytes`, and aborted transactions."""
        batches = [b for b in self.batches if b.last >= position]
        aborted = [(producer, first) for producer, first, last in self.aborted if last >= position]
        return b"".join(b.data for b in batches)[:max_bytes], aborted

    def stamps(self, *, markers: bool = False) -> list[tuple[int, int]]:
        """Returns (offset, timestamp) of all records in order, with `markers` also of control records."""
        return [
            (offset, r.time if b.batch.append_time is None else b.batch.append_time)
            for b in self.batches
            if markers or b.batch.marker is None
            for offset, r in zip(b.offsets, b.batch.records, strict=True)
        ]

    def visible(self, start: int, end: int, read_committed: bool = True) -> list[Row]:
        """Returns the rows of [start, end) that a consumer must receive."""
        rows = []
        for b in self.batches:
            if b.batch.marker is not None or (read_committed and self.is_aborted(b)):
                continue
            pairs = zip(b.offsets, b.batch.records, strict=True)
            rows += [build_row(b.batch, r, offset) for offset, r in pairs if start <= offset < end]
        return rows

    def is_aborted(self, b: Stored) -> bool:
        inside = (p == b.batch.producer and first <= b.base < last for p, first, last in self.aborted)
        return b.batch.transactional and any(inside)

    def count(self, start: int, end: int, control: bool) -> int:
        """Returns the number of records of [start, end) in control batches, or in aborted transactions."""
        batches = (b for b in self.batches if (b.batch.marker is not None if control else self.is_aborted(b)))
        return sum(start <= offset < end for b in batches for offset in b.offsets)


def log(*batches: LogBatch, start: int = 0) -> Log:
    """Append the batches from offset `start` on; markers decide which transactions are aborted."""
    out = Log(start=start)
    for batch in batches:
        stored = store(batch, out.end + batch.gap)
        out.batches.append(stored)
        if batch.marker is not None:
            first = out.open.pop(batch.producer, None)
            if batch.marker == ABORT and first is not None:
                out.aborted.append((batch.producer, first, stored.last))
        elif batch.transactional:
            out.open.setdefault(batch.producer, stored.base)
    return out


def store(batch: LogBatch, base: int) -> Stored:
    if batch.marker is not None:
        key, value = struct.pack(">hh", 0, batch.marker), struct.pack(">hi", 0, 7)
        batch = replace(batch, records=(LogRecord(key, value, batch.records[0].time),), transactional=True)
    offsets, at = [], base
    for r in batch.records:
        at += r.skip
        offsets.append(at)
        at += 1
    last = at - 1 + batch.tail if batch.magic == 2 else at - 1
    data = encode_v2(batch, base, last, offsets) if batch.magic == 2 else encode_message_set(batch, offsets)
    return Stored(batch, base, last, tuple(offsets), data)


def build_row(batch: LogBatch, r: LogRecord, offset: int) -> Row:
    time, time_type = r.time, 0
    if batch.magic == 0:
        time, time_type = -1, -1
    elif batch.append_time is not None:
        time, time_type = batch.append_time, 1
    return {
        "key": r.key,
        "value": r.value,
        "offset": offset,
        "timestamp": wrap_int64(time),
        "timestampType": time_type,
        "headers": [{"key": k, "value": v} for k, v in r.headers] or None,
    }


def wrap_int64(n: int) -> int:
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


# --- format v2 ----------------------------------------------------------------------------------------------------


def encode_v2(batch: LogBatch, base: int, last: int, offsets: Sequence[int]) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, HUGE)
    first = batch.records[0].time if batch.records else 0
    for r, offset in zip(batch.records, offsets, strict=True):
        # Deltas in the log wrap around at 64 bits.
        builder.append(offset - base, first + wrap_int64(r.time - first), r.key, r.value, list(r.headers))
    payload = bytes(builder._buffer)[61:]  # `build` fails for such times in its header
    newest = max((wrap_int64(r.time) for r in batch.records), default=-1)
    newest = newest if batch.append_time is None else batch.append_time
    attributes = batch.codec if batch.records else 0
    attributes |= 0x08 if batch.append_time is not None else 0
    attributes |= 0x10 if batch.transactional else 0
    attributes |= 0x20 if batch.marker is not None else 0
    attributes |= 0x40 if batch.delete_horizon else 0
    records = compress(payload, attributes & 7, batch.xerial)
    header = BatchHeader(base, last - base, attributes, first, newest, batch.producer, len(batch.records))
    return encode_raw_v2(header, records)


@dataclass(frozen=True)
class BatchHeader:
    """Fields of a batch's header of format v2, as it is encoded: `delta` is the last offset's, times are in ms."""

    base: int = 0
    delta: int = 0
    attributes: int = 0
    first: int = 0
    newest: int = 0
    producer: int = -1
    count: int = 1


def encode_raw_v2(header: BatchHeader, records: bytes) -> bytes:
    """Returns a batch of format v2 with this header and a valid checksum."""
    h = header
    body = struct.pack(">hiqqqhii", h.attributes, h.delta, h.first, h.newest, h.producer, 0, -1, h.count) + records
    return struct.pack(">qiibI", h.base, len(body) + 9, 3, 2, crc32c(body)) + body


def with_checksum(batch: bytes) -> bytes:
    """Returns the v2 batch with a valid checksum."""
    return batch[:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]


def compress(data: bytes, codec: int, xerial: bool = True) -> bytes:
    match codec:
        case 1:
            return gzip.compress(data, 1)
        case 2:
            return compress_xerial(data) if xerial else bytes(cramjam.snappy.compress_raw(data))
        case 3:
            return compress_lz4(data)
        case 4:
            return bytes(cramjam.zstd.compress(data))
    return data


def compress_xerial(data: bytes, block: int = 32 << 10) -> bytes:
    """Compress with Xerial's framing, like the Java client."""
    out = bytearray(b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1))
    for i in range(0, len(data), block):
        piece = bytes(cramjam.snappy.compress_raw(data[i : i + block]))
        out += struct.pack(">i", len(piece)) + piece
    return bytes(out)


def compress_lz4(data: bytes, checksum: int = 0x82, block: int = 64 << 10) -> bytes:
    """Compress into a frame of independent 64 KiB blocks without content size, like the Java client."""
    out = bytearray(b"\x04\x22\x4d\x18\x60\x40" + bytes([checksum]))
    for i in range(0, len(data), block):
        piece = data[i : i + block]
        packed = bytes(cramjam.lz4.compress_block(piece, store_size=False))
        stored = len(packed) >= len(piece)
        out += struct.pack("<I", len(piece) | 1 << 31 if stored else len(packed)) + (piece if stored else packed)
    return bytes(out + bytes(4))


# --- magic 0 and 1 ------------------------------------------------------------------------------------------------


def encode_message_set(batch: LogBatch, offsets: Sequence[int]) -> bytes:
    """Returns plain messages one after another, or wrapped into one compressed message."""
    shift = 0 if batch.magic == 0 or batch.codec == NONE else offsets[0]
    builder = LegacyRecordBatchBuilder(batch.magic, 0, HUGE)
    for r, offset in zip(batch.records, offsets, strict=True):
        builder.append(offset - shift, wrap_int64(r.time), r.key, r.value)
    messages = bytes(builder.build())
    stamp = batch.append_time if batch.append_time is not None else max(r.time for r in batch.records)
    if batch.codec == NONE:
        return messages if batch.append_time is None else b"".join(stamp_messages(messages, batch.append_time))
    # Clients of magic 0 wrote a wrong header checksum into LZ4 frames (KIP-57).
    data = compress_lz4(messages, 0x55) if (batch.magic, batch.codec) == (0, LZ4) else compress(messages, batch.codec)
    attributes = batch.codec | (0x08 if batch.append_time is not None else 0)
    return encode_message(offsets[-1], batch.magic, attributes, stamp, None, data)


def encode_message(
    offset: int, magic: int, attributes: int, time: int, key: bytes | None, value: bytes | None
) -> bytes:
    body = struct.pack(">bb", magic, attributes) + (struct.pack(">q", time) if magic else b"")
    for part in (key, value):
        body += struct.pack(">i", -1) if part is None else struct.pack(">i", len(part)) + part
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body


def stamp_messages(messages: bytes, time: int) -> Iterable[bytes]:
    """Yields plain messages of magic 1 with the broker's time."""
    at = 0
    while at < len(messages):
        stop = at + 12 + struct.unpack_from(">i", messages, at + 8)[0]
        body = b"\x01\x08" + struct.pack(">q", time) + messages[at + 26 : stop]
        yield messages[at : at + 12] + struct.pack(">I", zlib.crc32(body)) + body
        at = stop
