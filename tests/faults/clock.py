"""A run's clock that is not the brokers': how far it is off is said by whoever starts the run, in its environment."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from unittest.mock import patch

CLOCK = "SLUICE_FAULTS_CLOCK"
"""Seconds that it is ahead. Several, with commas: the next one at each look, and then again from the first."""


@contextmanager
def moved(ahead: str) -> Iterator[None]:
    """This process's clock is so far ahead while the block lasts; what only ever goes forward goes on as it does."""
    offsets = itertools.cycle([int(seconds) for seconds in ahead.split(",")])
    real = time.time_ns

    def now_ns() -> int:
        return real() + next(offsets) * 1_000_000_000

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now_ns() / 1e9, tz)

    with (
        patch.object(time, "time_ns", now_ns),
        patch.object(time, "time", lambda: now_ns() / 1e9),
        patch("sluice.resources.lake.s3_client.datetime", Moved),
    ):
        yield
