"""Compressed bytes passed to each codec, with output that ends at a guarded page. The first byte is the codec."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from functools import cache
from random import Random

import cramjam

from sluice.pipelines.errors import OversizedBatch
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, decompression
from sluice.testing.logs import BatchHeader, compress, encode_raw_v2
from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import Target
from tests.guarded import Guarded

_ROOM = 1 << 15
_GUARDED = Guarded()


def _make_seeds() -> list[bytes]:
    texts = [b"", b"x", b"a record, and another record, " * 40, bytes(range(256)) * 8, bytes(100_000)]
    seeds = [
        bytes([codec]) + compress(t, codec, xerial) for codec in (1, 2, 3, 4) for t in texts for xerial in (True, False)
    ]
    linked = [bytes([3]) + bytes(cramjam.lz4.compress(t)) for t in texts]
    return list(dict.fromkeys([*seeds, *linked]))


def _mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    codec = bytes([random.randrange(1, 5)]) if random.randrange(20) == 0 else data[:1]
    return codec + mutate_bytes(random, data[1:], others)


def _run(data: bytes) -> str:
    codec = 1 + (data[0] + 3) % 4 if data else 1
    room = _GUARDED.allocate(_ROOM)
    try:
        written = decompression.decompress(codec, memoryview(data[1:]), room.data)
        assert 0 <= written <= _ROOM
        return f"{decompression.CODECS[codec].name}: done"
    except (decompression.Undecodable, decompression.NoRoom) as error:
        return f"{decompression.CODECS[codec].name}: {type(error).__name__}"
    finally:
        _GUARDED.free()


# -- bombs: batches that expand beyond the limit that landing sets


@cache
def _make_bombs() -> tuple[bytes, ...]:
    """Return more than 256 MiB of zeros compressed by each codec, and eight times that by gzip and zstd."""
    return tuple(
        bytes([codec]) + _make_bomb(codec, times) for codec, times in ((1, 1), (1, 8), (2, 1), (3, 1), (4, 1), (4, 8))
    )


def _make_bomb(codec: int, times: int) -> bytes:
    size = times * (256 << 20) + 1
    match codec:
        case 1:
            return gzip.compress(_ZEROS) * ((size >> 20) + 1)
        case 2:
            block = bytes(cramjam.snappy.compress_raw(_ZEROS))
            return (
                b"\x82SNAPPY\0"
                + struct.pack(">ii", 1, 1)
                + (struct.pack(">i", len(block)) + block) * ((size >> 20) + 1)
            )
        case 3:
            block = bytes(cramjam.lz4.compress_block(_ZEROS, store_size=False))
            return (
                b"\x04\x22\x4d\x18\x60\x60\x51"
                + (struct.pack("<I", len(block)) + block) * ((size >> 20) + 1)
                + bytes(4)
            )
    return bytes(cramjam.zstd.compress(_ZEROS)) * ((size >> 20) + 1)


_ZEROS = bytes(1 << 20)


def _check_message(error: OversizedBatch) -> str:
    assert "orders:3: batch at offset 0" in error.message
    assert "more than 268,435,456 bytes of records" in error.message
    return error.message.rpartition(":")[2]


def _run_bomb(data: bytes) -> str:
    """Decode a batch whose header claims one record; its compressed bytes are the input's."""
    batch = encode_raw_v2(BatchHeader(attributes=data[0]), data[1:])
    decoder = BatchDecoder("orders", 3, 0, 1)
    try:
        list(decoder.feed(batch))
    except OversizedBatch as error:
        return decompression.CODECS[data[0]].name + _check_message(error)
    raise AssertionError("nothing was refused")


BOMBS = Target("bombs", _make_bombs, _run_bomb, lambda random, data, others: data)
CODECS = Target("codecs", _make_seeds, _run, _mutate)
