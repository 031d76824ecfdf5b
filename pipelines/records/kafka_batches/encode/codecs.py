"""Kafka's codecs: records → compressed records, in the framings that Kafka's own Java clients write and read.

Snappy is in xerial's framing of 32 KiB blocks, LZ4 a frame of independent blocks, which is what Kafka's reader demands
(KIP-57), zstd one frame (KIP-110).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cramjam
import numpy as np

_XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 32 << 10
_LZ4_HEADER = bytes.fromhex("04224d18 60 50 fb")  # independent blocks of at most 256 KiB, and the header's checksum
# Beyond 64 KiB, lz4 looks for matches by five bytes, and not by four: a tenth faster, and smaller. Blocks that are much
# larger are smaller still, and slower.
_LZ4_BLOCK = 80 << 10
_LZ4_STORED = 0x80000000
_put_u32 = struct.Struct("<I").pack_into
_be32 = struct.Struct(">i").pack


def _snappy(data: memoryview) -> bytes:
    out = [_XERIAL]
    for at in range(0, len(data), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + _XERIAL_BLOCK]))
        out += [_be32(len(block)), block]
    return b"".join(out)


def _lz4(data: memoryview, free: int) -> memoryview:
    blocks = -(-len(data) // _LZ4_BLOCK)
    out = np.empty(free + len(_LZ4_HEADER) + _lz4_most(len(data), blocks) + 4 * (blocks + 1), np.uint8)
    out.resize(_lz4_into(data, out.data, free), refcheck=False)
    return out.data


def _lz4_into(data: memoryview, out: memoryview, at: int) -> int:
    """Write a frame, each block to where it stays; the byte behind it."""
    out[at : at + len(_LZ4_HEADER)] = _LZ4_HEADER
    at += len(_LZ4_HEADER)
    for start in range(0, len(data), _LZ4_BLOCK):
        plain = data[start : start + _LZ4_BLOCK]
        room = out[at + 4 : at + 4 + _lz4_most(len(plain))]
        size, stored = cramjam.lz4.compress_block_into(plain, room, store_size=False), 0
        if size >= len(plain):
            size, stored = len(plain), _LZ4_STORED
            room[:size] = plain
        _put_u32(out, at, size | stored)
        at += 4 + size
    _put_u32(out, at, 0)
    return at + 4


def _lz4_most(size: int, blocks: int = 1) -> int:
    """Returns the upper bound of the compressed size in blocks. With this room lz4 need not check its end."""
    return size + size // 255 + 16 * blocks


def _behind(compress: Callable[[memoryview], Any]) -> Callable[[memoryview, int], memoryview]:
    def encode(data: memoryview, free: int) -> memoryview:
        compressed = memoryview(compress(data))
        out = np.empty(free + len(compressed), np.uint8).data
        out[free:] = compressed
        return out

    return encode


@dataclass(frozen=True, slots=True)
class Codec:
    """`number` is that of Kafka's CompressionType in a batch's attributes. `encode` gives memory of its own: as many
    bytes as it is told, which are left free, and the compressed data behind them."""

    number: int
    encode: Callable[[memoryview, int], memoryview]


CODECS = {
    "none": Codec(0, _behind(lambda data: data)),
    "gzip": Codec(1, _behind(lambda data: cramjam.gzip.compress(data, level=6))),
    "snappy": Codec(2, _behind(_snappy)),
    "lz4": Codec(3, _lz4),
    "zstd": Codec(4, _behind(lambda data: cramjam.zstd.compress(data, level=3))),
}
"""By the name that Kafka's `compression.type` has for it."""
