"""How much may wait for brokers: more while they take it at once, what goes out in seconds where they throttle."""

from __future__ import annotations

from sluice.resources.kafka.produce.backpressure import FIRST_BYTES, MOST_BYTES, Room


def test_room_grows_with_what_was_taken_up_to_its_bound() -> None:
    room, answers = Room(60.0), 0
    while room.bytes < MOST_BYTES:
        room.answered(room.bytes // 2, 0)
        answers += 1
    assert answers < 10
    room.answered(8 << 20, 0)
    assert (room.bytes, room.tight, room.throttled_ms) == (MOST_BYTES, False, 0)


def test_room_is_what_a_throttling_broker_takes_in_some_seconds() -> None:
    room = Room(60.0)
    room.answered(1_000_000, 1)  # hardly at all
    assert (room.bytes, room.tight) == (FIRST_BYTES, True)
    room.answered(1_000_000, 10_000)
    assert (room.bytes, room.tight, room.throttled_ms) == (500_000, True, 10_001)
    room.answered(100_000, 500)
    assert room.bytes == 500_000
    brief = Room(8.0)
    brief.answered(1_000_000, 10_000)
    assert brief.bytes == 200_000
    room.answered(100_000, 0)
    assert (room.bytes, room.tight) == (600_000, False)
