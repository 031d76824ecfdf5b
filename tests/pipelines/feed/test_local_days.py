"""Windows of local days tile the time in every zone, and agree with its calendar."""

from __future__ import annotations

from datetime import UTC, date, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.assets.specs.asset_specs import partitions_of
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.planning.windows import check_aligned
from sluice.pipelines.util.units import DAY, HOUR, parse_instant, show_duration
from sluice.reading import list_windows
from tests.examples import scale_examples

ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",  # no midnight when summer began
    "America/Havana",  # two midnights
    "America/St_Johns",  # from 00:01 back to 23:01
    "Asia/Beirut",
    "Africa/Cairo",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",  # half an hour of summer time
    "Pacific/Apia",  # without 2011-12-30
    "Pacific/Kwajalein",  # without 1993-08-21
    "America/Godthab",
]
zones = st.sampled_from(ZONES)
instants = st.integers(0, parse_instant("2060-01-01T00:00:00Z"))


def split(zone: str) -> WindowSettings:
    return WindowSettings.model_validate({"length": "1d", "timezone": zone})


def find_date(zone: str, at: int) -> date:
    return datetime.fromtimestamp(at // 1000, ZoneInfo(zone)).date()


@given(zones, instants)
@settings(max_examples=scale_examples(400))
def test_every_instant_is_in_one_window(zone: str, at: int) -> None:
    days = split(zone)
    start, end = days.start_of(at), days.end_of(at)
    assert start <= at < end, "it lies in its window"
    assert (days.start_of(end), days.start_of(end - 1)) == (end, start), "no gap, no overlap"
    assert (days.before(end), days.is_start(start)) == (start, True)
    assert days.start_at(days.number_of(at)) == start
    assert days.list_starts(start, end) == (start,)
    name = days.name(start)
    assert days.list_named(name) == (start,), "the name is read back"
    if start:
        assert find_date(zone, start).isoformat() == name
        assert find_date(zone, start - 1) < find_date(zone, start)
        assert 22 * HOUR <= end - start <= 26 * HOUR
    assert days.local(start) % DAY == 0


@given(zones, st.dates(date(1971, 1, 1), date(2060, 1, 1)))
@settings(max_examples=scale_examples(200))
def test_window_starts_at_the_first_second_of_its_date(zone: str, day: date) -> None:
    """The oracle counts through the minutes around midnight in UTC, a day to both sides."""
    days = split(zone)
    first = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) - 86_400
    minutes = range(first, first + 2 * 86_400, 900 if day.year > 1990 else 30)
    oracle = next(s for s in minutes if find_date(zone, 1000 * s) >= day)
    if find_date(zone, 1000 * oracle) == day:
        assert days.parse_name(day.isoformat()) == 1000 * oracle
    else:
        with pytest.raises(ValueError, match="is not a day that Pacific"):
            days.parse_name(day.isoformat())


def test_days_of_a_change_are_shorter_and_longer() -> None:
    berlin = split("Europe/Berlin")
    names = ("2026-03-29", "2026-10-25", "2026-11-01")
    assert [show_duration(berlin.length_of(berlin.parse_name(n))) for n in names] == ["23h", "25h", "1d"]
    howe = split("Australia/Lord_Howe")
    assert howe.length_of(howe.parse_name("2026-04-05")) == 24 * HOUR + HOUR // 2
    apia = split("Pacific/Apia")
    starts = apia.list_starts(apia.parse_name("2011-12-29"), apia.parse_name("2012-01-01"))
    assert [apia.name(s) for s in starts] == ["2011-12-29", "2011-12-31"]
    assert [apia.length_of(s) for s in starts] == [DAY, DAY]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_leap_day_is_a_window_in_leap_years_only(zone: str | None) -> None:
    days = WindowSettings.model_validate({"length": "1d"} | ({"timezone": zone} if zone else {}))
    start = days.parse_name("2028-02-29")
    assert [days.name(w)[:10] for w in (days.before(start), days.end_of(start))] == ["2028-02-28", "2028-03-01"]
    assert len(list_windows(WindowSettings(), "2028-02-29")) == 24
    with pytest.raises(UsageError):
        list_windows(days, "2027-02-29")


def test_dates_are_local_and_times_are_in_utc() -> None:
    berlin = split("Europe/Berlin")
    start = parse_instant("2026-10-24T22:00:00Z")
    assert list_windows(berlin, "2026-10-25") == list_windows(berlin, "2026-10-24T22:00") == (start,)
    assert [berlin.name(w) for w in list_windows(berlin, "2026-10-24", "2026-10-27")] == [
        "2026-10-24",
        "2026-10-25",
        "2026-10-26",
    ]
    with pytest.raises(UsageError, match="windows of this feed last 1d in Europe/Berlin") as refused:
        check_aligned(berlin.parse_name("2026-10-25T00:00"), berlin)
    assert refused.value.remedy == "ask for the window that begins at 2026-10-25"


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ({"length": "1h", "timezone": "Europe/Berlin"}, "`timezone` needs `length: 1d`"),
        ({"timezone": "Europe/Berlin"}, "`timezone` needs `length: 1d`"),
        ({"length": "1d", "timezone": "Mars/Olympus"}, "is no time zone"),
        ({"length": "1d", "timezone": "Europe"}, "is no time zone"),
        ({"length": "1d", "timezone": "../../etc/passwd"}, "is no time zone"),
        ({"length": "1d", "timezone": ""}, "is no time zone"),
    ],
)
def test_wrong_zones_are_refused(window: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        WindowSettings.model_validate(window)


def test_utc_as_a_zone_changes_nothing() -> None:
    assert WindowSettings.model_validate({"length": "1h", "timezone": "UTC"}) == WindowSettings()


@pytest.mark.parametrize("zone", [z for z in ZONES if z not in ("Pacific/Kwajalein",)])
def test_partitions_in_dagster_are_the_windows(zone: str) -> None:
    days = split(zone)
    keys = {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest"}
    feed = Feed.model_validate({**keys, "window": {"length": "1d", "timezone": zone}})
    for year in (2005, 2011, 2018, 2026, 2028):
        first, end = days.parse_name(f"{year}-01-01"), days.parse_name(f"{year + 1}-01-08")
        partitions = partitions_of(feed, first, end)
        keys = partitions.get_partition_keys(current_time=datetime.fromtimestamp(end // 1000, ZoneInfo(zone)))
        missing = {"2011-12-30"} if zone == "Pacific/Apia" else set()
        names = [days.name(w) for w in days.list_starts(first, end)]
        assert [k for k in keys if k not in missing] == names
        for key in names:
            window = partitions.time_window_for_partition_key(key)
            start = days.parse_name(key)
            assert [round(t.timestamp() * 1000) for t in window] == [start, days.end_of(start)]


def test_numbers_of_days_rise_by_one() -> None:
    for zone in ZONES:
        days = split(zone)
        starts = days.list_starts(0, days.start_of(parse_instant("2030-01-01T00:00:00Z")))
        assert all(days.end_of(a) == b for a, b in pairwise(starts)), "so their lengths are the distances"
        assert starts[-1] - starts[0] >= 59 * 365 * DAY
        assert len({days.local(s) // DAY for s in starts}) == len(starts), "so are their names"
        assert min(b - a for a, b in pairwise(starts[1:])) >= 22 * HOUR
