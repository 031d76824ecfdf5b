"""A feed's windows as Dagster's partitions: `2026-11-20T14:00` is the key of the window that begins then, in UTC.

Kafka is not asked. Partitions begin with the first window in the feed's ledger; before there is one, where the feed's
`start` points. They end with the newest window that is over. Feeds may have windows of different lengths.
"""

from __future__ import annotations

import time
from functools import cache

import dagster as dg

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import StartKind, WindowSettings
from sluice.pipelines.util.units import DAY, HOUR, MINUTE, many, show_window

KEY_FORMAT = "%Y-%m-%dT%H:%M"

REACH = 7 * DAY
"""How far back partitions reach if nothing is known: as long as Kafka keeps records by default."""


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def partitions_of(feed: Feed, first_window: int | None, now: int) -> dg.TimeWindowPartitionsDefinition:
    """The feed's windows. `now` (ms) counts only as long as the ledger has no first window."""
    first = feed.window.start_of(_find_first(feed, now) if first_window is None else first_window)
    return _build_partitions(show_window(first), cron(feed.window.length))


@cache  # feeds with the same windows share what Dagster computes of them
def _build_partitions(start: str, every: str) -> dg.TimeWindowPartitionsDefinition:
    return dg.TimeWindowPartitionsDefinition(start=start, fmt=KEY_FORMAT, cron_schedule=every, timezone="UTC")


def _find_first(feed: Feed, now: int) -> int:
    """The earliest time that may be requested; a whole day, so that it does not move with every load."""
    if feed.start.kind is StartKind.TIME:
        return feed.start.ms
    first = feed.start.earliest(now)
    begin = now - REACH if first is None else first
    return begin - begin % DAY


def cron(length: int) -> str:
    """When windows of that length (ms) begin, in UTC."""
    if length < HOUR:
        return f"*/{length // MINUTE} * * * *"
    return {HOUR: "0 * * * *", DAY: "0 0 * * *"}.get(length, f"0 */{length // HOUR} * * *")


def closing_words(window: WindowSettings) -> str:
    """The same in words: `every hour, 5 minutes past`."""
    every, first = _compute_closing(window)
    length = "hour" if every == 60 else many(every, "minute")
    return f"every {length}, {many(first, 'minute')} past" if first else f"every {length}, on the dot"


def closing_cron(window: WindowSettings) -> str:
    """When windows have closed; once an hour for longer ones, so that a failed window does not wait for a day."""
    every, first = _compute_closing(window)
    return f"{first} * * * *" if every == 60 else f"{first}-59/{every} * * * *"


def closings_until(window: WindowSettings, time: int) -> int:
    """How often, since the epoch, `closing_cron` has been due at a time (ms)."""
    every, first = _compute_closing(window)
    return (time // MINUTE - first) // every


def _compute_closing(window: WindowSettings) -> tuple[int, int]:
    """How often, and how long after that, in minutes."""
    every = min(window.length, HOUR) // MINUTE
    return every, -(-window.grace // MINUTE) % every
