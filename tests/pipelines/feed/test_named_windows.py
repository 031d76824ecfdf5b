"""Text that names windows: a date, an hour, or one start."""

from __future__ import annotations

from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.util.units import HOUR, show_window


@given(st.dates(date(1970, 1, 1), date(2100, 1, 1)), st.sampled_from(["1m", "15m", "30m", "1h", "6h", "12h", "1d"]))
def test_date_names_all_windows_of_its_day(day: date, length: str) -> None:
    split = WindowSettings.model_validate(length)
    windows = split.list_named(day.isoformat())
    assert show_window(windows[0]) == f"{day}T00:00"
    assert show_window(windows.stop) == f"{day + timedelta(days=1)}T00:00"
    assert windows.step == split.length
    hour = split.list_named(f"{day}T06")
    assert (hour.start, len(hour)) == (windows.start + 6 * HOUR, max(HOUR // split.length, 1))
    assert split.list_named(f"{day}T06:00") == range(hour.start, hour.start + split.length, split.length)
