"""A run's clock that differs from the brokers'. An environment variable has the offset."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from unittest.mock import patch

CLOCK = "SLUICE_FAULTS_CLOCK"
"""The offset in seconds. Of several, separated by commas, each reading of the clock takes the next one in a cycle."""


@contextmanager
def shift_clock(ahead: str) -> Iterator[None]:
    """Shift this process's wall clock by `ahead` seconds inside the block. Monotonic clocks stay as they are."""
    offsets = itertools.cycle([int(seconds) for seconds in ahead.split(",")])
    real_time_ns = time.time_ns

    def read_ns() -> int:
        return real_time_ns() + next(offsets) * 1_000_000_000

    class ShiftedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(read_ns() / 1e9, tz)

    with (
        patch.object(time, "time_ns", read_ns),
        patch.object(time, "time", lambda: read_ns() / 1e9),
        patch("sluice.resources.lake.store_client.datetime", ShiftedDatetime),
    ):
        yield
