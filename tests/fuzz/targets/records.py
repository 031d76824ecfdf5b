"""Record bytes: batches with right checksums, so that their contents are read, however wrong they are.

The first four bytes of an input are options (`_Options`), the rest is the response of a broker.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch
from sluice.pipelines.records.kafka_batches.decode import (
    BatchDecoder,
    DecodeOptions,
    columns,
    loops,
    next_position,
)
from sluice.pipelines.records.kafka_batches.decode.decompression import BatchProblem, Scratch
from sluice.testing.logs import (
    ABORT,
    COMMIT,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    BatchHeader,
    LogBatch,
    LogRecord,
    compress,
    encode_message,
    encode_raw_v2,
    log,
)
from tests.fuzz.mutation import INTEGERS, mutate_bytes
from tests.fuzz.target import Target
from tests.guarded import Guarded

BATCH_BYTES = 1 << 20
_MOST = 20_000
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9]+")
_GUARDED = Guarded()


@dataclass(frozen=True)
class _Options:
    data: bytes

    @property
    def decoder(self) -> dict[str, Any]:
        flags, size = self.data[0], self.data[1]
        return {
            "read_committed": bool(flags & 1),
            "check_crc": bool(flags & 2),
            "chunk_rows": size % 16 + 1,
            "chunk_bytes": 1 << size % 20,
            "max_batch_bytes": BATCH_BYTES,
        }

    @property
    def at_end(self) -> bool:
        return not self.data[0] & 4

    @property
    def offset_range(self) -> tuple[int, int]:
        start = self.data[2] % 32
        return start, 1 << 62 if self.data[3] & 128 else start + self.data[3]

    @property
    def aborted(self) -> list[tuple[int, int]]:
        return [(producer, 0) for producer in range(self.data[0] >> 4)]


# -- seeds


def _make_seeds() -> list[bytes]:
    usual = tuple(LogRecord(b"k%d" % i, b"v" * i, 1_700_000_000_000 + i) for i in range(6))
    odd = (
        LogRecord(None, None, -1),
        LogRecord(b"", b"", -(1 << 63)),
        LogRecord(b"x" * 300, b"y" * 70, (1 << 63) - 1, (("h", b"1"), ("", None), ("größe", b""))),
        LogRecord(b"k", b"v", headers=(("a" * 20, b"b" * 20),) * 3, skip=5),
    )
    logs = [
        log(LogBatch(usual + odd, codec, tail=2), LogBatch(odd, codec)) for codec in (NONE, GZIP, SNAPPY, LZ4, ZSTD)
    ]
    logs += [log(LogBatch(usual, codec, magic)) for codec in (NONE, GZIP, SNAPPY, LZ4) for magic in (0, 1)]
    logs += [
        log(LogBatch(usual, SNAPPY, xerial=False)),
        log(
            LogBatch(usual, GZIP, 1, append_time=7),
            LogBatch(usual, NONE, 1, append_time=7),
            LogBatch(usual, append_time=7),
        ),
        log(
            LogBatch(usual[:2], producer=1, transactional=True),
            LogBatch(usual[:2], ZSTD, producer=2, transactional=True),
            LogBatch(producer=1, marker=ABORT),
            LogBatch(producer=2, marker=COMMIT),
            LogBatch(usual[:1]),
        ),
    ]
    framed = [encode_raw_v2(BatchHeader(), r) for r in _ODD_RECORDS]
    inner = [log(LogBatch(usual, NONE, magic)).data for magic in (0, 1)]
    wrapped = [
        inner[0][:-3],
        inner[0] + inner[0][:30],
        inner[1][:-3],
        inner[0] * 2,
        inner[1] * 2,
        log(LogBatch(usual, GZIP, 1)).data,
    ]
    framed += [encode_message(20, magic, GZIP, 0, None, compress(data, GZIP)) for data in wrapped for magic in (0, 1)]
    options = (bytes([0x13, 250, 0, 128]), bytes([0x20, 3, 2, 9]), bytes([0x07, 17, 0, 200]))
    seeds = [options[i % 3] + source.data for i, source in enumerate(logs)]
    return [*seeds, *(options[0] + f for f in framed), bytes([3, 9, 1, 2]) + log(LogBatch(usual, GZIP, 1)).data]


_ODD_RECORDS = (
    b"\x16\0" + b"\xff" * 9 + b"\x7f\0\1\1\0",
    b"\x0c\0\x80\x80\0\0\x80",
    b"\x0c\0\x80\0\0\1\x80",
    b"\x0c\0\0\0\1\1\x80",
    b"\x10\0\0\0\1\1\2\x80\x80",
    b"\x10\0\0\0\1\1\2\0\x80",
    b"\x10\0\0\0\1\1\2\0\x7e",
)
"""Records in which a varint is cut or wrong, one in each field."""


# -- mutation


def _mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    options, raw = bytearray(data[:4].ljust(4, b"\0")), data[4:]
    if random.randrange(4) == 0:
        options[random.randrange(4)] = random.randrange(256)
    frames = _split_frames(raw)
    for _ in range(1 << random.randrange(3)):
        at = random.randrange(len(frames) + 1)
        match random.randrange(12):
            case 0:
                other = random.choice(others)[4:]
                frames[at:at] = _split_frames(other)[: random.choice((1, 2, 9))]
            case 1:
                frames[at : at + 1] = frames[at : at + 1] * 2
            case 2:
                frames[at : at + 1] = []
            case 3:
                frames[at:at] = [random.randbytes(random.choice((3, 17, 61, 80)))]
            case 4:
                frames[at : at + 1] = [mutate_bytes(random, f, others) for f in frames[at : at + 1]]
            case _:
                frames[at : at + 1] = [_mutate_frame(random, f, others) for f in frames[at : at + 1]]
    if random.randrange(3):
        _follow(random, frames)
    out = b"".join(frames)
    if random.randrange(8) == 0:
        out = out[: random.randrange(len(out) + 1)]
    return bytes(options) + out[:_MOST]


def _split_frames(raw: bytes) -> list[bytes]:
    """Split at the sizes in the headers; any remaining bytes come last."""
    out, at = [], 0
    while len(raw) - at >= 17:
        size = 12 + struct.unpack_from(">i", raw, at + 8)[0]
        if not 17 <= size <= len(raw) - at:
            break
        out.append(raw[at : at + size])
        at += size
    return [*out, raw[at:]] if at < len(raw) else out


def _follow(random: Random, frames: list[bytes]) -> None:
    """Make base offsets follow one another, so that all frames are read."""
    offset = 0
    for i, f in enumerate(frames):
        if len(f) < 27:
            continue
        offset += random.choice((0, 0, 0, 1, 7))
        last = max(struct.unpack_from(">i", f, 23)[0], 0) if f[16] == 2 else 0
        frames[i] = struct.pack(">q", offset) + f[8:]
        offset += min(last, 1 << 30) + 1


def _mutate_frame(random: Random, f: bytes, others: Sequence[bytes]) -> bytes:
    """Return the frame with its contents changed, and its size and checksum corrected."""
    if len(f) < 26:
        return mutate_bytes(random, f, others)
    return _mutate_batch(random, f, others) if f[16] == 2 and len(f) >= 61 else _mutate_message(random, f, others)


_FIELDS = [(21, 2), (23, 4), (27, 8), (35, 8), (43, 8), (51, 2), (53, 4), (57, 4)]


def _mutate_batch(random: Random, f: bytes, others: Sequence[bytes]) -> bytes:
    head, body = bytearray(f[:61]), f[61:]
    codec = head[22] & 7
    plain = _inflate(codec, body)
    match random.randrange(6):
        case 0:
            at, size = random.choice(_FIELDS)
            head[at : at + size] = (random.choice(INTEGERS) & ((1 << 8 * size) - 1)).to_bytes(size, "big")
        case 1:
            head[22] ^= 1 << random.randrange(3, 8)
        case 2 if plain is not None:
            head[22] = head[22] & 0xF8 | random.randrange(7)
            body = compress(plain, head[22] & 7, xerial=random.randrange(2) == 0)
        case 3 | 4 if plain is not None:
            body = compress(_mutate_records(random, plain, others), codec, xerial=random.randrange(2) == 0)
        case _:
            body = mutate_bytes(random, body, others)
    if random.randrange(4) == 0:
        head[57:61] = struct.pack(">i", random.choice((0, 1, 2, 3, 6, 10)))
    return _seal(bytes(head) + body)


def _seal(f: bytes) -> bytes:
    """Return a batch of format v2 with its size and checksum corrected."""
    return f[:8] + struct.pack(">i", len(f) - 12) + f[12:17] + struct.pack(">I", crc32c(f[21:])) + f[21:]


def _inflate(codec: int, body: bytes) -> bytes | None:
    if codec == NONE:
        return body
    try:
        kind = {GZIP: pa.Codec("gzip"), ZSTD: pa.Codec("zstd"), LZ4: pa.Codec("lz4")}[codec]
        with pa.CompressedInputStream(pa.BufferReader(body), kind.name) as stream:
            return stream.read(_MOST)  # type: ignore[no-any-return]
    except (KeyError, OSError, pa.ArrowInvalid):
        return None


def _mutate_records(random: Random, body: bytes, others: Sequence[bytes]) -> bytes:
    """Return records with varints changed, mostly in the places of varints; sometimes lengths change with them."""
    records = _split_records(body)
    if not records or random.randrange(4) == 0:
        return mutate_bytes(random, body, others)
    at = random.randrange(len(records))
    fields = records[at]
    index = random.randrange(len(fields))
    match random.randrange(5):
        case 0:
            fields[index] = mutate_bytes(random, fields[index], others)
        case 1 | 2:
            fields[index] = _encode_varint(random.choice([*INTEGERS, *range(-3, 12)]))
        case 3:
            fields[index:index] = [random.choice(fields)]
        case 4:
            fields[index : index + 1] = []
    return b"".join(_encode_varint(len(joined := b"".join(fs))) + joined for fs in records)


def _split_records(body: bytes) -> list[list[bytes]]:
    """Return each record as its fields: attributes, two deltas, key, value, headers. Empty if it does not parse."""
    out, at = list[list[bytes]](), 0
    while at < len(body):
        size, at = _read_varint(body, at)
        stop, fields = at + size, [body[at : at + 1]]
        at += 1
        for k in range(4):
            begin = at
            number, at = _read_varint(body, at)
            fields.append(body[begin:at])
            if k >= 2 and 0 < number <= len(body):
                fields.append(body[at : at + number])
                at += number
        if not at <= stop <= len(body) or len(out) > 100:
            return []
        fields.append(body[at:stop])
        out.append(fields)
        at = stop
    return out


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return (value >> 1) ^ -(value & 1), at + max(shift // 7, 1)


def _encode_varint(number: int) -> bytes:
    """Encode in zigzag, in up to ten bytes."""
    bits = ((number << 1) ^ (number >> 80)) & ((1 << 70) - 1)
    out = bytearray()
    while True:
        out.append(bits & 0x7F | (0x80 if bits > 0x7F else 0))
        bits >>= 7
        if not bits:
            return bytes(out)


def _mutate_message(random: Random, f: bytes, others: Sequence[bytes]) -> bytes:
    """Return a message of magic 0 or 1 with its contents changed, or the messages that it wraps."""
    if len(f) < 34 or f[16] > 1:
        return mutate_bytes(random, f, others)
    at = 18 if f[16] == 0 else 26
    (key,) = struct.unpack_from(">i", f, at)
    value_at = at + 4 + max(key, 0)
    codec = f[17] & 7
    if not codec or random.randrange(3) == 0 or value_at + 4 > len(f):
        return _sign(f[:16] + mutate_bytes(random, f[16:], others))
    inner = _inflate(codec, f[value_at + 4 :])
    if inner is None:
        return _sign(f[: value_at + 4] + mutate_bytes(random, f[value_at + 4 :], others))
    frames = _split_frames(inner)
    index = random.randrange(len(frames)) if frames else 0
    frames[index : index + 1] = [
        _sign(m[:16] + mutate_bytes(random, m[16:], others)) for m in frames[index : index + 1]
    ]
    body = compress(b"".join(frames), codec)
    return _sign(f[:value_at] + struct.pack(">i", len(body)) + body)


def _sign(f: bytes) -> bytes:
    """Return a message with its size and checksum corrected."""
    return f[:8] + struct.pack(">iI", len(f) - 12, zlib.crc32(f[16:])) + f[16:]


# -- guarantees


def _resize_guarded(self: Scratch, size: int) -> None:
    self._memory = _GUARDED.allocate(size)
    self._view = self._memory.data


def _allocate_buffer(capacity: columns.Capacity, kind: Any, measure: str, how: str) -> np.ndarray:
    new = _GUARDED.allocate_items(columns._get_length(capacity, measure, how), kind)
    if how == "bits":
        new.fill(0xFF)
    elif how == "ends":
        new[0] = 0
    return new


def guard() -> None:
    """Make the decoder write into memory that ends at a guarded page, from here on."""
    Scratch._resize = _resize_guarded  # type: ignore[method-assign]
    columns._allocate_buffer = _allocate_buffer


def _run(data: bytes) -> str:
    options = _Options(data[:4].ljust(4, b"\0"))
    raw = _GUARDED.fill(data[4:], at_end=options.at_end)
    try:
        return _decode(raw.data, options)
    finally:
        _GUARDED.free()


def _decode(raw: memoryview, options: _Options) -> str:
    start, end = options.offset_range
    decoder = BatchDecoder("orders", 3, start, end, DecodeOptions(**options.decoder))
    offsets, outcome, before = list[int](), "rows", start
    try:
        for chunk in decoder.feed(raw, options.aborted):
            offsets += _check_chunk(chunk)
            assert decoder.position >= before
            before = decoder.position
    except (CorruptBatch, UnsupportedBatch) as error:
        outcome = _check_error(error)
    for chunk in decoder.finish():
        offsets += _check_chunk(chunk)
    assert offsets == sorted(set(offsets))
    assert not offsets or start <= offsets[0] <= offsets[-1] < min(end, decoder.position)
    counts = decoder.counts
    assert counts.records == len(offsets)
    assert min(counts.control, counts.aborted) >= 0
    _probe(raw, start)
    return outcome


def _check_error(error: BatchProblem) -> str:
    """Return the problem named by an error, without numbers; the error must name its batch."""
    assert (error.topic, error.partition) == ("orders", 3)
    assert error.start is not None
    assert f"orders:3: batch at offset {error.start}" in error.message
    return _DIGITS.sub("#", error.message.rpartition(f"offset {error.start}: ")[2])


def _check_chunk(chunk: pa.RecordBatch) -> list[int]:
    chunk.validate(full=True)
    assert chunk.num_rows
    return chunk.column("offset").to_pylist()  # type: ignore[no-any-return]


def _probe(raw: memoryview, start: int) -> None:
    """Find the next position, as the fetcher does."""
    try:
        assert next_position(raw, start, "orders", 3) >= start
    except (CorruptBatch, UnsupportedBatch) as error:
        _check_error(error)


# -- the loops alone: many small edits of one input, without a Python object for each

VARIANTS = 64
_CAPACITY = columns.Capacity(64, 4096, 4096, 64, 1024, 1024)
_BYTES = (0, 1, 2, 0x7F, 0x80, 0xFF)


def _run_loops(data: bytes) -> str:
    """Decode without correcting checksums, and read compressed bytes as records."""
    options, random = _Options(data[:4].ljust(4, b"\0")), Random(zlib.crc32(data))
    raw = _GUARDED.fill(data[4:], at_end=options.at_end)
    original, codes = raw.copy(), set[int]()
    view = raw.view()
    view.flags.writeable = False
    room = columns.allocate(_CAPACITY)
    for _ in range(VARIANTS):
        for _ in range(random.randrange(min(len(raw), 4) + 1)):
            at = random.randrange(len(raw))
            raw[at] = random.choice((*_BYTES, raw[at] ^ 1 << random.randrange(8), random.randrange(256)))
        codes.add(_decode_with_loops(view, room, options))
        raw[:] = original
    _GUARDED.free()
    return " ".join(map(str, sorted(codes)))


def _decode_with_loops(raw: np.ndarray, room: loops.ChunkBuffers, options: _Options) -> int:
    table = _GUARDED.allocate_items((raw.size // 26 + 1) * loops.FIELDS, np.int64).reshape(-1, loops.FIELDS)
    frames, at, code = loops.scan(raw, table)
    assert 0 <= at <= raw.size
    table[:frames][table[:frames, loops.MODE] == loops.LOOK, loops.MODE] = loops.HIDE
    for bitmap in (room.key_valid, room.value_valid, room.header_lists_valid, room.header_values_valid):
        bitmap.fill(0xFF)
    start, end = options.offset_range
    state = np.zeros(loops.SLOTS, np.int64)
    state[loops.POSITION], state[loops.END], state[loops.AT] = start, end, -1
    state[loops.MAX_ROWS], state[loops.MAX_BYTES] = 64, 1 << 13
    done = loops.decode(raw, raw, table[:frames], room, state)
    rows = int(state[loops.ROWS])
    assert 0 <= rows <= _CAPACITY.rows
    assert state[loops.POSITION] >= start
    assert (np.diff(room.offsets[:rows]) > 0).all()
    for ends in (room.key_offsets, room.value_offsets, room.header_lists):
        assert (np.diff(ends[: rows + 1]) >= 0).all()
    assert loops.control_type(raw, 0, raw.size) >= -1
    return done or code


LOOPS = Target("loops", _make_seeds, _run_loops, _mutate, variants=VARIANTS)
RECORDS = Target("records", _make_seeds, _run, _mutate)
