"""Kafka's codecs: records → compressed records, in the framings that Kafka's own Java clients write and read.

Snappy is in xerial's framing of 32 KiB blocks, LZ4 a frame of independent 64 KiB blocks, which is what Kafka's reader
demands (KIP-57), zstd one frame (KIP-110).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import cramjam

_XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 32 << 10
_LZ4_HEADER = bytes.fromhex("04224d18 60 40 82")  # independent blocks of at most 64 KiB, and the header's checksum
_LZ4_BLOCK = 64 << 10
_LZ4_STORED = 0x80000000
_u32 = struct.Struct("<I").pack
_be32 = struct.Struct(">i").pack


def _snappy(data: memoryview) -> bytes:
    out = [_XERIAL]
    for at in range(0, len(data), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + _XERIAL_BLOCK]))
        out += [_be32(len(block)), block]
    return b"".join(out)


def _lz4(data: memoryview) -> bytes:
    out: list[bytes | memoryview] = [_LZ4_HEADER]
    for at in range(0, len(data), _LZ4_BLOCK):
        plain = data[at : at + _LZ4_BLOCK]
        block = bytes(cramjam.lz4.compress_block(plain, store_size=False))
        small = len(block) < len(plain)
        out += [_u32(len(block)), block] if small else [_u32(len(plain) | _LZ4_STORED), plain]
    return b"".join([*out, _u32(0)])


@dataclass(frozen=True, slots=True)
class Codec:
    """`number` is that of Kafka's CompressionType in a batch's attributes."""

    number: int
    encode: Callable[[memoryview], bytes]


CODECS = {
    "none": Codec(0, bytes),
    "gzip": Codec(1, lambda data: bytes(cramjam.gzip.compress(data, level=6))),
    "snappy": Codec(2, _snappy),
    "lz4": Codec(3, _lz4),
    "zstd": Codec(4, lambda data: bytes(cramjam.zstd.compress(data, level=3))),
}
"""By the name that Kafka's `compression.type` has for it."""
