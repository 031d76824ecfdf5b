"""Adaptive limit on a producer's buffered bytes.

It starts small, grows while brokers keep up, and shrinks to a few seconds' worth when brokers throttle (KIP-219), so
that a transaction ends within its timeout."""

from __future__ import annotations

import time

MAX_BYTES = 16 << 20
"""The largest limit, for batches that are queued or in flight."""
FIRST_BYTES = 2 << 20
THROTTLED_SECONDS = 5.0
"""The time in which a throttling broker must accept all buffered bytes; at most a quarter of a transaction."""


class Backpressure:
    """The limit of one producer, across its transactions.

    `bytes`: the current limit. `tight`: the last answer came from a throttling broker. `throttled_ms`: the total pause
    that brokers demanded; `until`: the end of the current pause (monotonic seconds).
    """

    def __init__(self, transaction_seconds: float) -> None:
        self._seconds = min(THROTTLED_SECONDS, transaction_seconds / 4)
        self.bytes = FIRST_BYTES
        self.tight = False
        self.throttled_ms = 0
        self.until = 0.0

    def record_answer(self, size: int, throttle_ms: int) -> None:
        """Adapt the limit after a broker accepted `size` bytes and demanded a pause."""
        self.tight = throttle_ms > 0
        self.throttled_ms += throttle_ms
        if self.tight:
            self.until = max(self.until, time.monotonic() + throttle_ms / 1000)
            self.bytes = min(self.bytes, int(size * self._seconds * 1000 / throttle_ms))
        else:
            self.bytes = min(self.bytes + size, MAX_BYTES)
