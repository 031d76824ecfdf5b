"""Days of a time zone. They tile the time from the epoch on, and last 23, 24 or 25 hours, or others that a zone had.

A day begins at the first instant whose local date is this one or a later one: clocks may skip midnight, or a whole
day, which then has no length. Where midnight occurs twice, the first one counts, and the time between the two belongs
to the new day. Days have the numbers of `date.toordinal`, instants are in ms since the epoch.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import date, datetime, time
from functools import lru_cache
from zoneinfo import ZoneInfo

from sluice.pipelines.util.units import CALENDAR_ENDS, DAY


@lru_cache(1 << 16)
def start_of_day(zone: str, day: int) -> int:
    """The instant at which the day begins. Raises ValueError, OverflowError for a day that the calendar lacks."""
    clock = ZoneInfo(zone)
    midnight = datetime.combine(date.fromordinal(day), time(), clock)
    second, before = int(midnight.timestamp()), int(midnight.replace(fold=1).timestamp())
    if before < second:  # clocks were put forward over midnight, in between
        days = range(before, second + 1)
        second = days[bisect_left(days, day, key=lambda s: datetime.fromtimestamp(s, clock).toordinal())]
    return max(second, 0) * 1000


def find_day(zone: str, at: int) -> int:
    """Returns the day of an instant: the first one for those before the epoch, the last one beyond the calendar."""
    at = min(max(at, 0), CALENDAR_ENDS - 3 * DAY)
    day = datetime.fromtimestamp(at // 1000, ZoneInfo(zone)).toordinal()
    return day + 1 if start_of_day(zone, day + 1) <= at else day
