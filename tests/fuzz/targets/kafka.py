"""Responses of brokers that Sluice parses without a client library, and the metadata of committed offsets."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

from kafka.errors import KafkaError

from sluice.pipelines.ledger.marks import Mark, OffsetNote, by_hand
from sluice.resources.kafka.connection.zero_copy_transport import _ResponseFrame
from sluice.resources.kafka.protocol.messages import FETCH_VERSIONS, read_fetch
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.target import Target


def _encode_length(n: int) -> bytes:
    """Encode a compact length (KIP-482)."""
    out, n = bytearray(), n + 1
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _make_response(version: int, records: bytes, aborted: Sequence[tuple[int, int]] = (), tags: bytes = b"\0") -> bytes:
    topic = bytes(range(16)) if version >= 13 else _encode_length(6) + b"orders"
    pairs = b"".join(struct.pack(">qq", *pair) + b"\0" for pair in aborted)
    part = struct.pack(">ihqqq", 3, 0, 10, 10, 0) + _encode_length(len(aborted)) + pairs
    part += struct.pack(">i", -1) + _encode_length(len(records)) + records + tags
    return struct.pack(">ihi", 0, 0, 0) + _encode_length(1) + topic + _encode_length(2) + part * 2 + b"\0" + b"\0"


def _make_fetch_seeds() -> list[bytes]:
    answers = [
        bytes([i]) + _make_response(v, r, a, t)
        for i, v in enumerate(FETCH_VERSIONS)
        for r, a, t in ((b"", (), b"\0"), (b"x" * 200, ((1, 2), (3, 4)), b"\x01\x00\x02ab"))
    ]
    return [*answers, b"\0" + struct.pack(">ihi", 5, 6, 0) + b"\1\0", b"\1" + bytes(40)]


def _run_fetch(data: bytes) -> str:
    version = FETCH_VERSIONS[(data[0] if data else 0) % 2]
    body = data[1:]
    try:
        answer = read_fetch(memoryview(body), 0, version)
    except KafkaError as error:
        return type(error).__name__
    assert sum(len(p.records) for p in answer.parts.values()) <= len(body)
    return f"{len(answer.parts)} parts"


def _make_frame_seeds() -> list[bytes]:
    return [struct.pack(">i", n) + b"x" * n for n in (4, 5, 100)] + [
        struct.pack(">i", n) + b"x" * 8 for n in (-1, 0, 3, 1 << 20, (1 << 31) - 1)
    ]


def _run_frame(data: bytes) -> str:
    """Read responses in pieces, as from a socket."""
    frame, at, responses = _ResponseFrame(1 << 20), 0, 0
    try:
        while at < len(data):
            room = frame.room
            piece = data[at : at + min(len(room), 1 + at % 7)]
            room[: len(piece)] = piece
            at += len(piece)
            responses += frame.advance(len(piece)) is not None
    except KafkaError as error:
        return type(error).__name__
    return f"{min(responses, 5)} answers"


def _make_metadata_seeds() -> list[bytes]:
    return [
        Mark("ledger", 7, "id#1").dump().encode(),
        by_hand("ledger", 5).encode(),
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"x"',
        b"0",
    ]


def _run_metadata(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    mark, position = Mark.parse(text), OffsetNote.parse(text)
    assert position is None or isinstance(position.entry, int)
    return f"{mark is not None} {position is not None}"


def _mutate_any(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return (mutate_json if random.randrange(2) else mutate_bytes)(random, data, others)


FETCH = Target("fetch", _make_fetch_seeds, _run_fetch, mutate_bytes)
FRAMES = Target("frames", _make_frame_seeds, _run_frame, mutate_bytes)
METADATA = Target("metadata", _make_metadata_seeds, _run_metadata, _mutate_any)
