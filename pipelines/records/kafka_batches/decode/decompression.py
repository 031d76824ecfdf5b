"""Reads the frames of a fetch response, and decompresses record batches, several into one buffer.

Formats: gzip; snappy in xerial's framing or raw; LZ4 frames, including those with the wrong header checksum of clients
before KIP-57; zstd (KIP-110). The checksums inside LZ4 frames are ignored, because the batch's checksum covers them.

Promises: nothing is written beyond the buffer; damaged data raises `Undecodable`, and data that needs a larger buffer
`NoRoom`, never anything else. The buffer stays within `max_batch_bytes`, however far a batch would expand, and shrinks
again before the next rows are made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import cramjam
import numpy as np

from sluice.pipelines.errors import CorruptBatch, OversizedBatch, UnsupportedBatch
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops
from sluice.pipelines.records.kafka_batches.decode.loops import Frame

BatchProblem = CorruptBatch | UnsupportedBatch

_CORRUPT = (
    "read it again; if it stays so, this replica's log is damaged: compare it with other replicas "
    "(kafka-dump-log --deep-iteration), or accept the range as lost"
)
_UNSUPPORTED = "check with kafka-dump-log what wrote it; a newer Sluice may read it, or accept the range as lost"

REASONS = {
    loops.BAD_SIZE: "the size field is smaller than any batch",
    loops.BAD_OFFSETS: "its offsets are negative or out of bounds",
    loops.OUT_OF_ORDER: "its offsets do not follow those of the batch before",
    loops.BAD_VARINT: "a varint is cut or too long",
    loops.BAD_RECORD_LENGTH: "a record is longer than the rest of its batch, or shorter than any",
    loops.BAD_OFFSET: "a record's offset goes back or leaves the batch",
    loops.BAD_KEY: "a key runs past its record",
    loops.BAD_VALUE: "a value runs past its record",
    loops.BAD_HEADER_COUNT: "a record claims more headers than it can hold",
    loops.BAD_HEADER_KEY: "a header's key is null or runs past its record",
    loops.BAD_HEADER_VALUE: "a header's value runs past its record",
    loops.BAD_RECORD_END: "a record's fields end before or after its length",
    loops.BAD_BATCH_END: "bytes are left over after the last record",
    loops.BAD_COUNT: "the record count does not fit offsets and bytes",
    loops.BAD_MESSAGE: "a message is cut or of another format than its set",
    loops.BAD_MESSAGE_CRC: "a message does not match its CRC-32",
    loops.NESTED: "a compressed message inside of a compressed message",
    loops.NO_MESSAGES: "a compressed set without readable messages",
}


HEAD = 21
"""The bytes of a batch before those that its checksum covers."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where in the log a decoder works. Its errors name it."""

    topic: str | None
    partition: int | None

    def make_corrupt(self, reason: str, base: int, last: int | None = None, at: int | None = None) -> CorruptBatch:
        """Returns the error for a damaged batch of offsets `base` to `last`; `at` is its byte."""
        return CorruptBatch(
            self._format_message(reason, base, at),
            remedy=_CORRUPT,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def make_unsupported(self, reason: str, base: int, last: int | None = None) -> UnsupportedBatch:
        """The error for a batch, at offset `base`, of a kind that Sluice cannot read."""
        return UnsupportedBatch(
            self._format_message(reason, base, None),
            remedy=_UNSUPPORTED,
            topic=self.topic,
            partition=self.partition,
            start=base,
            end=None if last is None else last + 1,
        )

    def make_oversized(self, f: Frame, limit: int) -> OversizedBatch:
        """Returns the error for a batch with more than `limit` bytes of records."""
        size = f.stop - f.checked + HEAD
        error = OversizedBatch(
            self._format_message(f"of {size:,} bytes, it has more than {limit:,} bytes of records", f.first, None),
            remedy="raise `tuning.task_memory`, and run again",
            topic=self.topic,
            partition=self.partition,
            start=f.first,
            end=f.last + 1,
        )
        error.size, error.limit, error.records = size, limit, f.records
        error.latest, error.append_time = f.max_time, bool(f.attributes & loops.LOG_APPEND)
        return error

    def _format_message(self, reason: str, base: int, at: int | None) -> str:
        where = "record bytes" if self.topic is None else f"{self.topic}:{self.partition}"
        byte = "" if at is None else f" (byte {at})"
        return f"{where}: batch at offset {base}: {reason}{byte}"


def make_frame_error(origin: LogPlace, raw: Array, at: int, code: int) -> BatchProblem | None:
    """The error for a code that `loops.scan` returned for the frame at byte `at`; None for DONE."""
    if code == loops.DONE:
        return None
    base = int.from_bytes(raw[at : at + 8].tobytes(), "big", signed=True)
    if code == loops.BAD_MAGIC:
        return origin.make_unsupported(f"record format {int(raw[at + 16])}", base)
    return origin.make_corrupt(REASONS[code], base, at=at)


def read_only(records: bytes | memoryview) -> Array:
    """The bytes as a read-only array, without a copy."""
    return np.frombuffer(memoryview(records).toreadonly().cast("B"), np.uint8)


def read_frames(raw: Array, origin: LogPlace) -> tuple[Array, int, BatchProblem | None]:
    """The headers of all complete frames (rows of `loops.FIELDS` numbers), their bytes, and the next error."""
    # One row for the smallest frame there is: memory that is not written to costs nothing.
    table = np.empty((raw.size // loops.MESSAGE_OVERHEAD[0] + 1, loops.FIELDS), np.int64)
    frames, at, code = loops.scan(raw, table)
    return table[:frames], at, make_frame_error(origin, raw, at, code)


def next_position(
    records: bytes | memoryview, position: int, topic: str | None = None, partition: int | None = None
) -> int:
    """The position after the last complete batch of a response that was fetched at `position`.

    Reads headers only: nothing is decompressed and no checksum is computed. Returns `position` unchanged when there is
    no complete batch. Raises CorruptBatch or UnsupportedBatch when the first batch is bad. A
    bad batch further on ends the walk, and is found again at its own position.
    """
    if not len(records):
        return position
    frames, _, problem = read_frames(read_only(records), LogPlace(topic, partition))
    if len(frames):
        return max(position, int(frames[-1, loops.LAST]) + 1)
    if problem:
        raise problem
    return position


def find_batches(records: memoryview, start: int, end: int = 1 << 62) -> tuple[memoryview, int]:
    """The batches of a response from that of offset `start` on, up to `end`, and the position after them. None of
    responses with older formats.
    """
    frames, _, _ = read_frames(read_only(records), LogPlace(None, None))
    lasts = frames[:, loops.LAST]
    first, last = np.searchsorted(lasts, (start, end - 1)).tolist()
    if first == len(frames) or bool(np.any(frames[:, loops.KIND] != loops.BATCH)):
        return records[:0], start
    last = min(last, len(frames) - 1)
    begin = int(frames[first - 1, loops.STOP]) if first else 0
    return records[begin : int(frames[last, loops.STOP])], int(lasts[last]) + 1


_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER = 16
_LZ4_MAGIC = 0x184D2204
_LZ4_INDEPENDENT, _LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE = 0x20, 0x10, 0x08
_LZ4_STORED = 0x80000000

_u32 = struct.Struct("<I").unpack_from
_lz4_header = struct.Struct("<IBB").unpack_from
_be32 = struct.Struct(">i").unpack_from


class Undecodable(Exception):
    """The data is damaged."""


class NoRoom(Exception):
    """The data needs a larger buffer."""


_BUFFER_IS_FULL = "failed to write whole buffer"


def decompress(codec: int, data: memoryview, out: memoryview) -> int:
    """Decompress `data` into the beginning of `out`; returns the bytes written. Raises Undecodable, NoRoom."""
    try:
        return CODECS[codec].decode(data, out)
    except struct.error:
        raise Undecodable("cut short") from None


def is_known_codec(codec: int, *, in_old: bool = False) -> bool:
    """Returns whether record batches may carry this codec; with `in_old`, message sets of magic 0 and 1."""
    return codec == 0 or (codec in CODECS and (CODECS[codec].in_old or not in_old))


def _stream(decode: Callable[[memoryview, memoryview], int]) -> Callable[[memoryview, memoryview], int]:
    def run(data: memoryview, out: memoryview) -> int:
        try:
            return decode(data, out)
        except cramjam.DecompressionError as e:
            raise (NoRoom if _BUFFER_IS_FULL in str(e) else Undecodable)(str(e)) from None

    return run


def _decompress_snappy(data: memoryview, out: memoryview) -> int:
    if data[:8] != _XERIAL:
        return _decompress_snappy_block(data, out)
    # The two version numbers after the magic say nothing: some clients write them in the wrong byte order.
    at, written = _XERIAL_HEADER, 0
    while at < len(data):
        if data[at : at + 8] == _XERIAL:  # streams one after another, which xerial's own reader joins
            at += _XERIAL_HEADER
            continue
        (size,) = _be32(data, at)
        at += 4
        if size < 0 or size > len(data) - at:
            raise Undecodable("a snappy block runs past the end")
        written += _decompress_snappy_block(data[at : at + size], out[written:])
        at += size
    return written


def _decompress_snappy_block(data: memoryview, out: memoryview) -> int:
    try:
        if cramjam.snappy.decompress_raw_len(data) > len(out):
            raise NoRoom("snappy")
        return cramjam.snappy.decompress_raw_into(data, out)
    except cramjam.DecompressionError as e:
        raise Undecodable(str(e)) from None


def _decompress_lz4(data: memoryview, out: memoryview) -> int:
    """The blocks of a frame one by one: faster than liblz4's own reader of frames, which the odd ones are left to."""
    magic, flags, descriptor = _lz4_header(data, 0)
    if magic != _LZ4_MAGIC:
        raise Undecodable("not an LZ4 frame")
    if not flags & _LZ4_INDEPENDENT:
        return _lz4_frame(data, out)
    at = 15 if flags & _LZ4_CONTENT_SIZE else 7
    checksum = 4 if flags & _LZ4_BLOCK_CHECKSUM else 0
    block_size = 1 << (8 + 2 * (descriptor >> 4 & 7))
    written = 0
    while True:
        (size,) = _u32(data, at)
        at += 4
        if size == 0:
            return written
        stored, size = size & _LZ4_STORED, size & ~_LZ4_STORED
        if size > len(data) - at or size > block_size:
            raise Undecodable("an LZ4 block runs past the end")
        written += _decompress_lz4_block(
            data[at : at + size], out[written : written + block_size], block_size, bool(stored)
        )
        at += size + checksum


def _decompress_lz4_block(block: memoryview, out: memoryview, limit: int, stored: bool) -> int:
    if len(out) < (len(block) if stored else 1):
        raise NoRoom("lz4")
    if stored:
        out[: len(block)] = block
        return len(block)
    try:
        return cramjam.lz4.decompress_block_into(block, out, output_len=len(out))
    except cramjam.DecompressionError as e:
        if len(out) < limit:
            _decompress_lz4_block(block, memoryview(bytearray(limit)), limit, stored)  # raises Undecodable
            raise NoRoom("lz4") from None
        raise Undecodable(str(e)) from None


_lz4_frame = _stream(cramjam.lz4.decompress_into)


@dataclass(frozen=True, slots=True)
class Decompressor:
    """`decode` fills a buffer from compressed bytes; `in_old`: whether messages of magic 0 and 1 know it, too."""

    name: str
    decode: Callable[[memoryview, memoryview], int]
    in_old: bool = True


CODECS = {
    1: Decompressor("gzip", _stream(cramjam.gzip.decompress_into)),
    2: Decompressor("snappy", _decompress_snappy),
    3: Decompressor("lz4", _decompress_lz4),
    4: Decompressor("zstd", _stream(cramjam.zstd.decompress_into), in_old=False),
}
"""By the number in a batch's attributes (Kafka's CompressionType)."""


_USUAL_BYTES = 4 << 20
_GROUP_BYTES = 1 << 20


class Scratch:
    """Holds one group of decompressed batches."""

    def __init__(self, origin: LogPlace, max_batch_bytes: int) -> None:
        self._place, self._most = origin, max_batch_bytes
        self._resize(0)

    @property
    def data(self) -> Array:
        """The bytes that `fill` wrote, read-only."""
        data = self._memory.view()
        data.flags.writeable = False
        return data

    def shrink(self) -> None:
        """Give back the memory of a large batch."""
        if len(self._memory) > _USUAL_BYTES:
            self._resize(0)

    def fill(self, view: memoryview, table: Array) -> tuple[int, BatchProblem | None]:
        """Decompress the first frames of `table`, and note in it where their records are now.

        Returns the number of frames that are ready, and the error of the next one. At least one is ready unless the
        first is damaged or oversized.
        """
        self.shrink()
        used, cells = 0, table.data
        rows = table[:, loops.MODE : loops.TO + 1].tolist()
        for i, (mode, attributes, first, stop) in enumerate(rows):
            codec = attributes & loops.CODEC_BITS
            if not codec and stop - first > self._most and table[i, loops.KIND] == loops.BATCH and mode != loops.PASS:
                return i, self._place.make_oversized(Frame(*table[i].tolist()), self._most)
            if not codec or mode == loops.PASS:
                continue
            # A group of frames at a time: its records are taken out of the buffer before the next group is
            # decompressed.
            if used >= _GROUP_BYTES:
                return i, None
            try:
                size = self._decompress(codec, view[first:stop], used)
            except (Undecodable, NoRoom) as e:
                # Frames before this one are ready, and point into the buffer. Only without any is its memory given
                # back.
                if not used:
                    self._resize(0)
                frame = Frame(*table[i].tolist())
                if isinstance(e, NoRoom):
                    return i, self._place.make_oversized(frame, self._most)
                reason = f"{CODECS[codec].name} data does not decompress: {e}"
                return i, self._place.make_corrupt(reason, frame.first, frame.last)
            if size < 0:
                return i, None
            cells[i, loops.SOURCE] = loops.SCRATCH
            cells[i, loops.FROM] = used
            used += size
            cells[i, loops.TO] = used
        return len(rows), None

    def _decompress(self, codec: int, data: memoryview, used: int) -> int:
        """How many bytes were written from byte `used` on; −1 when the earlier frames left too little room.

        Raises NoRoom if the largest buffer is too small.
        """
        while True:
            try:
                return decompress(codec, data, self._view[used:])
            except NoRoom:
                if used:
                    return -1
                if (size := len(self._memory)) >= self._most:
                    raise
            self._resize(min(max(4 * size, _USUAL_BYTES), self._most))

    def _resize(self, size: int) -> None:
        self._memory = np.empty(size, np.uint8)
        self._view = self._memory.data
