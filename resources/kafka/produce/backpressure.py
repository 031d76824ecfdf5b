"""How many bytes of a producer may wait for their brokers: few at first, more while brokers take them at once, and what
goes out in some seconds where brokers throttle it (KIP-219), so that a transaction ends before its time is up."""

from __future__ import annotations

import time

MOST_BYTES = 16 << 20
"""Of batches that wait to be sent, or for their answer."""
FIRST_BYTES = 2 << 20
THROTTLED_SECONDS = 5.0
"""How long what waits for a broker that throttles may take to go out, or a quarter of a transaction's time."""


class Room:
    """`bytes`: the room now. `tight`: the last answer came from a broker that throttles. `throttled_ms`: how long
    brokers had us pause, so far; `until`: till when they do (monotonic seconds). For one producer; it outlives its
    transactions."""

    def __init__(self, transaction_seconds: float) -> None:
        self._seconds = min(THROTTLED_SECONDS, transaction_seconds / 4)
        self.bytes = FIRST_BYTES
        self.tight = False
        self.throttled_ms = 0
        self.until = 0.0

    def answered(self, size: int, throttle_ms: int) -> None:
        """A broker took so many bytes, and wants nothing more for a while."""
        self.tight = throttle_ms > 0
        self.throttled_ms += throttle_ms
        if self.tight:
            self.until = max(self.until, time.monotonic() + throttle_ms / 1000)
            self.bytes = min(self.bytes, int(size * self._seconds * 1000 / throttle_ms))
        else:
            self.bytes = min(self.bytes + size, MOST_BYTES)
