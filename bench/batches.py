"""Record batches as a producer packs them (KIP-98, format v2), built here so that a topic of millions loads in seconds.

Written apart from the product's decoder on purpose: so its input in a benchmark does not come from its own code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import cramjam
import crc32c
import pyarrow as pa

from bench.workloads import TRACE

_MAGIC = 2
_AFTER_CRC = struct.Struct(">hiqqqhii")
_HEADER = struct.Struct(">qiibI")
_LENGTH_AFTER = 8 + 4  # base offset and length itself are not in the length
# An LZ4 frame as Kafka's Java client writes it: independent blocks of at most 64 KB, no checksums.
_LZ4_BEGIN, _LZ4_END = bytes.fromhex("04224d18604082"), bytes(4)
_LZ4_BLOCK = 64 << 10
_STORED = 1 << 31
_XERIAL = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)


class EncodedBatch(NamedTuple):
    """One record batch: the offset that its first record must get, how many there are, and its bytes."""

    base: int
    records: int
    data: bytes


def batches(rows: pa.Table, codec: str, batch_bytes: int) -> Iterator[EncodedBatch]:
    """The rows (`offset, key, value, timestamp, trace`, in order) as uncompressed batches of about this size."""
    columns = (rows.column(name).cast(pa.binary()).to_pylist() for name in ("key", "value", "trace"))
    stamped = zip(rows.column("offset").to_pylist(), rows.column("timestamp").to_pylist(), *columns, strict=True)
    packing: _Packing | None = None
    for offset, stamp, key, value, trace in stamped:
        packing = packing or _Packing(offset, stamp)
        packing.add(stamp, key, value, trace)
        if packing.bytes >= batch_bytes:
            yield packing.batch(codec)
            packing = None
    if packing:
        yield packing.batch(codec)


class _Packing:
    """A batch that is being filled."""

    def __init__(self, base: int, stamp: int) -> None:
        self._base, self._first, self._last = base, stamp, stamp
        self._pieces: list[bytes] = []
        self._count = 0
        self.bytes = 0

    def add(self, stamp: int, key: bytes, value: bytes, trace: bytes | None) -> None:
        n = _VARINT
        headers = n[0] if trace is None else b"".join((n[1], n[len(TRACE)], TRACE.encode(), n[len(trace)], trace))
        body = b"".join(
            (b"\0", n[stamp - self._first], n[self._count], n[len(key)], key, n[len(value)], value, headers)
        )
        self._pieces += (n[len(body)], body)
        self._last = stamp
        self._count += 1
        self.bytes += len(body) + 2

    def batch(self, codec: str) -> EncodedBatch:
        """Returns the batch. In its bytes the base offset is 0: the broker assigns the real one."""
        code, compress = CODECS[codec]
        records = compress(b"".join(self._pieces))
        rest = _AFTER_CRC.pack(code, self._count - 1, self._first, self._last, -1, -1, -1, self._count) + records
        length = _HEADER.size + len(rest) - _LENGTH_AFTER
        return EncodedBatch(self._base, self._count, _HEADER.pack(0, length, -1, _MAGIC, crc32c.crc32c(rest)) + rest)


class _Varints(dict[int, bytes]):
    """Numbers as zigzag varints; each is worked out once."""

    def __missing__(self, number: int) -> bytes:
        rest, out = (number << 1) ^ (number >> 63), bytearray()
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        self[number] = bytes(out)
        return self[number]


_VARINT = _Varints()


def _lz4(data: bytes) -> bytes:
    return b"".join((_LZ4_BEGIN, *map(_lz4_block, _cut(data, _LZ4_BLOCK)), _LZ4_END))


def _lz4_block(data: bytes) -> bytes:
    packed = bytes(cramjam.lz4.compress_block(data, store_size=False))
    if len(packed) < len(data):
        return struct.pack("<I", len(packed)) + packed
    return struct.pack("<I", len(data) | _STORED) + data


def _snappy(data: bytes) -> bytes:
    """The framing of snappy-java's streams, which Kafka's clients use."""
    blocks = (bytes(cramjam.snappy.compress_raw(block)) for block in _cut(data, 32 << 10))
    return _XERIAL + b"".join(struct.pack(">i", len(block)) + block for block in blocks)


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


CODECS: Mapping[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (0, lambda data: data),
    "gzip": (1, lambda data: bytes(cramjam.gzip.compress(data))),
    "snappy": (2, _snappy),
    "lz4": (3, _lz4),
    "zstd": (4, lambda data: bytes(cramjam.zstd.compress(data))),
}
"""By a producer's name for it: the codec's number in a batch's attributes, and how records are packed by it."""
