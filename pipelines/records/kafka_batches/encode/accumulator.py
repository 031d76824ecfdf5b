"""Gathers rows by partition into record batches, and compresses full ones.

A batch is in format v2 (KIP-98), with CRC32C from the attributes on. Codecs use the framings of Kafka's Java clients:
snappy xerial's blocks of 32 KiB, LZ4 one frame of independent blocks (KIP-57), zstd one frame (KIP-110).

Promises: each partition's records keep their order. A batch holds at most `batch_bytes` of records before compression,
unless it is one larger record. Open batches hold at most `held_bytes` and one chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import cramjam
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder
from sluice.pipelines.records.kafka_batches.encode import loops
from sluice.pipelines.records.kafka_batches.encode.loops import RowBuffers
from sluice.pipelines.records.rows.row_format import TO_SEND, unescape_keys
from sluice.pipelines.schema.arrays import int64s, unpack_bits


def get_buffers(batch: pa.RecordBatch) -> RowBuffers:
    """The buffers of rows of TO_SEND, possibly a slice. Raises ValueError for others.

    Copies nothing but bitmaps, and keys of headers where some are escaped.
    """
    if batch.schema.remove_metadata() != TO_SEND:
        raise ValueError(f"not rows to send: {batch.schema}")
    key, value, timestamp, headers = batch.columns
    if timestamp.null_count:
        raise ValueError("rows to send need times")
    lists = _get_offsets(headers)
    if headers.null_count and np.diff(lists)[_read_validity(headers) == 0].any():
        raise ValueError("null headers that hold some")  # none of our writers makes these
    entries = headers.values
    return RowBuffers(
        *get_binary(key),
        *get_binary(value),
        _read_only(int64s(timestamp)),
        lists,
        *get_binary(unescape_keys(entries.field(0)))[:2],
        *get_binary(entries.field(1)),
    )


def get_binary(column: pa.Array) -> tuple[Array, Array, Array]:
    """Data, offsets and validity of a column of bytes or text."""
    data = column.buffers()[2]
    raw = _read_only(np.frombuffer(data, np.uint8)) if data is not None else _NOTHING
    return raw, _get_offsets(column), _read_validity(column)


def _get_offsets(column: pa.Array) -> Array:
    """Where a column's own rows begin and end."""
    buffer = column.buffers()[1]
    if buffer is None or buffer.size == 0:
        return _read_only(np.zeros(1, np.int32))  # an empty column needs no buffer
    return _read_only(np.frombuffer(buffer, np.int32, len(column) + 1, 4 * column.offset))


def _read_validity(column: pa.Array) -> Array:
    """A byte for each row; nothing where no row is null."""
    bitmap = column.buffers()[0]
    if bitmap is None or not column.null_count:
        return _NOTHING
    return _read_only(unpack_bits(bitmap, column.offset, len(column)).view(np.uint8))


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


_NOTHING = _read_only(np.empty(0, np.uint8))


def by_key(keys: pa.Array, partitions: int, otherwise: Array) -> Array:
    """The partitions of records with these keys (bytes), as Kafka's Java producer chooses them (murmur2).

    Java spreads records without a key as it likes; here they go where `otherwise` says.
    """
    hashes = np.empty(len(keys), np.int64)
    loops.hash_keys(*get_binary(keys), hashes)
    return np.where(hashes < 0, otherwise, hashes % partitions)


def spread(numbers: Array, partitions: int) -> Array:
    """One partition after the other: a record's number decides, so that a repetition decides the same."""
    return numbers % partitions


_HEAD = struct.Struct(">qiibI")  # base offset, length, leader epoch, magic, checksum
_CHECKED = struct.Struct(">hiqqqhii")  # attributes … count
_BEFORE_LENGTH = 12
_TRANSACTIONAL = 0x10
HEADER_BYTES = _HEAD.size + _CHECKED.size


@dataclass(frozen=True, slots=True)
class Numbering:
    """The producer of a batch (KIP-98): its id and epoch, and the first record's sequence number. All −1: anybody."""

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

    def encode(self, by: Numbering = ANYBODY) -> memoryview:
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


_XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 32 << 10
_LZ4_HEADER = bytes.fromhex("04224d18 60 50 fb")  # independent blocks of at most 256 KiB, and the header's checksum
# Beyond 64 KiB, lz4 looks for matches by five bytes, and not by four: a tenth faster, and smaller. Blocks that are much
# larger are smaller still, and slower.
_LZ4_BLOCK = 80 << 10
_LZ4_STORED = 0x80000000
_put_u32 = struct.Struct("<I").pack_into
_be32 = struct.Struct(">i").pack


def _compress_snappy(data: memoryview) -> bytes:
    out = [_XERIAL]
    for at in range(0, len(data), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + _XERIAL_BLOCK]))
        out += [_be32(len(block)), block]
    return b"".join(out)


def _compress_lz4(data: memoryview, free: int) -> memoryview:
    blocks = -(-len(data) // _LZ4_BLOCK)
    out = np.empty(free + len(_LZ4_HEADER) + _bound_lz4(len(data), blocks) + 4 * (blocks + 1), np.uint8)
    out.resize(_write_lz4(data, out.data, free), refcheck=False)
    return out.data


def _write_lz4(data: memoryview, out: memoryview, at: int) -> int:
    """Write a frame, each block to where it stays; the byte behind it."""
    out[at : at + len(_LZ4_HEADER)] = _LZ4_HEADER
    at += len(_LZ4_HEADER)
    for start in range(0, len(data), _LZ4_BLOCK):
        plain = data[start : start + _LZ4_BLOCK]
        room = out[at + 4 : at + 4 + _bound_lz4(len(plain))]
        size, stored = cramjam.lz4.compress_block_into(plain, room, store_size=False), 0
        if size >= len(plain):
            size, stored = len(plain), _LZ4_STORED
            room[:size] = plain
        _put_u32(out, at, size | stored)
        at += 4 + size
    _put_u32(out, at, 0)
    return at + 4


def _bound_lz4(size: int, blocks: int = 1) -> int:
    """Returns the upper bound of the compressed size in blocks. With this room lz4 need not check its end."""
    return size + size // 255 + 16 * blocks


def _make_encoder(compress: Callable[[memoryview], Any]) -> Callable[[memoryview, int], memoryview]:
    def encode(data: memoryview, free: int) -> memoryview:
        compressed = memoryview(compress(data))
        out = np.empty(free + len(compressed), np.uint8).data
        out[free:] = compressed
        return out

    return encode


@dataclass(frozen=True, slots=True)
class Compressor:
    """`number` is that of Kafka's CompressionType in a batch's attributes. `encode` returns new memory: the requested
    number of free bytes, and the compressed data behind them."""

    number: int
    encode: Callable[[memoryview, int], memoryview]


CODECS = {
    "none": Compressor(0, _make_encoder(lambda data: data)),
    "gzip": Compressor(1, _make_encoder(lambda data: cramjam.gzip.compress(data, level=6))),
    "snappy": Compressor(2, _make_encoder(_compress_snappy)),
    "lz4": Compressor(3, _compress_lz4),
    "zstd": Compressor(4, _make_encoder(lambda data: cramjam.zstd.compress(data, level=3))),
}
"""By the name that Kafka's `compression.type` has for it."""


BATCH_BYTES = 900_000
"""Bytes of records in a batch: less than a topic accepts by default, compressed or not."""
HELD_BYTES = 64 << 20
_FIRST_BYTES = 16 << 10  # of room that an open batch begins with
_SPARE = 8  # buffers of batches that were sealed, for those that come
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


@dataclass(slots=True)
class _OpenBatch:
    """A batch that is being filled."""

    out: Array
    state: Array
    numbers: list[Array] = field(default_factory=list)

    @classmethod
    def empty(cls, limit: int, spare: list[Array]) -> _OpenBatch:
        state = np.zeros(loops.STATE, np.int64)
        state[loops.LIMIT] = limit
        return cls(spare.pop() if spare else np.empty(min(_FIRST_BYTES, limit), np.uint8), state)

    def append(self, rows: RowBuffers, chosen: Array, first: int, numbers: Array) -> int:
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
        self._open: dict[int, _OpenBatch] = {}
        self._spare: list[Array] = []

    def add(self, batch: pa.RecordBatch, partitions: Array, numbers: Array) -> Iterator[SealedBatch]:
        """Take rows of `format.TO_SEND` with the partition and the number of each; yield the batches that are full.

        Exhaust it before the next call.
        """
        rows, ends = get_buffers(batch), np.cumsum(np.bincount(partitions))
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

    def _add(self, partition: int, rows: RowBuffers, chosen: Array, numbers: Array) -> Iterator[SealedBatch]:
        at = 0
        while True:
            if partition not in self._open:
                self._open[partition] = _OpenBatch.empty(self._batch_bytes, self._spare)
            at = self._open[partition].append(rows, chosen, at, numbers)
            if at == len(chosen):
                return
            yield self._seal(partition)

    def _seal(self, partition: int) -> SealedBatch:
        done = self._open.pop(partition)
        used = int(done.state[loops.USED])
        data = _BY_NUMBER[self._codec].encode(done.out[:used].data, HEADER_BYTES)
        if len(self._spare) < _SPARE and len(done.out) <= self._batch_bytes:  # one of a huge record is not kept
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
    rows = pa.concat_batches([*decoder.feed(batch.encode()), *decoder.finish()])
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
