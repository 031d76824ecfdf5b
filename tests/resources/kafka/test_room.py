"""Bounds of the bytes that wait for brokers: they grow while brokers keep up, and shrink where brokers throttle."""

from __future__ import annotations

from sluice.resources.kafka.produce.send_queue import FIRST_BYTES, MAX_BYTES, Backpressure


def test_pending_bytes_limit_grows_with_acknowledged_bytes_up_to_maximum() -> None:
    room, answers = Backpressure(60.0), 0
    while room.bytes < MAX_BYTES:
        room.record_answer(room.bytes // 2, 0)
        answers += 1
    assert answers < 10
    room.record_answer(8 << 20, 0)
    assert (room.bytes, room.tight, room.throttled_ms) == (MAX_BYTES, False, 0)


def test_pending_bytes_limit_covers_some_seconds_of_a_throttling_broker() -> None:
    room = Backpressure(60.0)
    room.record_answer(1_000_000, 1)  # hardly at all
    assert (room.bytes, room.tight) == (FIRST_BYTES, True)
    room.record_answer(1_000_000, 10_000)
    assert (room.bytes, room.tight, room.throttled_ms) == (500_000, True, 10_001)
    room.record_answer(100_000, 500)
    assert room.bytes == 500_000
    brief = Backpressure(8.0)
    brief.record_answer(1_000_000, 10_000)
    assert brief.bytes == 200_000
    room.record_answer(100_000, 0)
    assert (room.bytes, room.tight) == (600_000, False)
