"""Reports about time: records without a stamp or with an impossible one, folders of hours, nights when clocks change.

Python's datetime computes the expected folder of each row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sluice.testing import Message, land
from sluice.testing.logs import Log, LogBatch, LogRecord, log
from tests.reports.world import RAW, land_json, land_log, write_feed

BY_TIME = RAW + "landing: {layout: record_time}\n"
NOWHERE = "__HIVE_DEFAULT_PARTITION__"
HOUR = 3_600_000


def stamp(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def read_folders(root: Path, feed: str, *times: int) -> dict[tuple[str, ...], list[int]]:
    """Returns the stamps of the rows in each folder, by the values of its keys; read by pyarrow."""
    lake = root / "lake"
    land(write_feed(root, feed), [Message(b"v", time=t) for t in times], lake=lake, environ={})
    out: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for path in sorted((lake / "data" / "orders").rglob("*.parquet")):
        keys = tuple(p.partition("=")[2] for p in path.relative_to(lake / "data" / "orders").parts[:-1])
        out[keys] += pq.ParquetFile(path).read()["timestamp"].cast("int64").to_pylist()
    return dict(out)


def get_hour(t: int) -> tuple[str, ...]:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=t)
    return at.strftime("%Y-%m-%d"), at.strftime("%H")


FAR = {
    "confluentinc/kafka-connect-storage-common#55": -1,
    "apache/druid#5232": (1 << 63) - 1,
    "wepay/kafka-connect-bigquery#269": stamp("2019-01-01T00:00:00+00:00"),
    "apache/kafka#2076": -(1 << 63),
}


@pytest.mark.parametrize("report", FAR)
@pytest.mark.parametrize("layout", [RAW, BY_TIME])
def test_record_with_extreme_timestamp_lands(report: str, layout: str, tmp_path: Path) -> None:
    t = FAR[report]
    source = log(LogBatch((LogRecord(b"a", b"a"), LogRecord(b"b", b"b", t), LogRecord(b"c", b"c"))))
    landed = land_log(tmp_path, source, layout)
    stamps = {
        r["value"]: r["timestamp"]
        for r in landed.rows.set_column(
            landed.rows.schema.get_field_index("timestamp"), "timestamp", landed.rows["timestamp"].cast("int64")
        ).to_pylist()
    }
    assert stamps == {b"a": 1_700_000_000_000, b"b": t, b"c": 1_700_000_000_000}


def test_records_without_timestamp_land(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-elasticsearch#235: a record without a stamp stopped the sink."""
    source = log(LogBatch((LogRecord(b"k", b"v"),) * 3, magic=0))
    landed = land_log(tmp_path, source, BY_TIME)
    assert landed.rows["timestampType"].to_pylist() == [-1] * 3
    assert landed.rows["timestamp"].cast("int64").to_pylist() == [-1] * 3


def test_late_and_early_rows_land_in_folders_of_their_hours(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-storage-cloud#200: records of later hours were put into the open one."""
    base = stamp("2026-01-01T10:59:59.999+00:00")
    times = [base, base + 1, base - HOUR, base + 5 * HOUR, base, base + HOUR, base - 1, base + 2]
    hours = read_folders(tmp_path, BY_TIME, *times)
    expected: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for t in times:
        expected[get_hour(t)].append(t)
    assert {k: sorted(v) for k, v in hours.items()} == {k: sorted(v) for k, v in expected.items()}


def test_late_record_in_arrival_layout_adds_no_old_hour(tmp_path: Path) -> None:
    """apache/inlong#5423: one machine's wrong clock opened old partitions again."""
    base = stamp("2026-01-01T10:30:00+00:00")
    root = tmp_path / "p"
    read_folders(root, RAW, base)
    before = {p: p.stat().st_mtime_ns for p in (root / "lake" / "data").rglob("*.parquet")}
    hours = read_folders(root, RAW, base - 400 * 24 * HOUR, base + HOUR)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert [k for k in hours if k != get_hour(base)] == [get_hour(base + HOUR)]


def test_out_of_order_rows_make_one_file_per_hour(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-storage-common#82: each record out of order rolled a file."""
    base = stamp("2026-01-01T10:00:00+00:00")
    times = [base + (i * 7919 % 3600) * 1000 for i in range(500)]
    assert {k: len(v) for k, v in read_folders(tmp_path, BY_TIME, *times).items()} == {get_hour(base): 500}
    assert len(list((tmp_path / "lake" / "data").rglob("*.parquet"))) == 1


@pytest.fixture(params=["America/Los_Angeles", "Europe/Berlin", "Asia/Kathmandu"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


NIGHTS = {
    "dagster-io/dagster#18022": "2023-11-05T05:00:00+00:00",
    "dagster-io/dagster#7071": "2023-03-12T05:00:00+00:00",
    "pgpartman/pg_partman#334": "2025-10-26T00:00:00+00:00",
}


@pytest.mark.parametrize("report", NIGHTS)
def test_windows_are_in_utc_when_clocks_change(report: str, zone: str, tmp_path: Path) -> None:
    """An hour of these nights existed twice or not at all. Windows are in UTC in any time zone of the machine."""
    first = stamp(NIGHTS[report])
    times = [first + i * HOUR // 2 for i in range(14)]
    hours = read_folders(tmp_path, RAW, *times)
    assert hours == {get_hour(first + i * HOUR): times[2 * i : 2 * i + 2] for i in range(7)}


def test_nanoseconds_do_not_shift_the_date(tmp_path: Path) -> None:
    """pinterest/secor#305: nine digits of a second were read as milliseconds, and records moved by days."""
    values = [b'{"t": "2017-01-31T23:59:59.999999999Z"}', b'{"t": "2017-01-31T23:59:59Z"}']
    landed = land_json(tmp_path, "t: timestamp", *values)
    expected = [datetime(2017, 1, 31, 23, 59, 59, 999_999, UTC), datetime(2017, 1, 31, 23, 59, 59, 0, UTC)]
    assert landed.rows["t"].to_pylist() == expected


def append_by_broker(*times: int) -> Log:
    """Returns a batch that the broker stamped with its last time."""
    return log(LogBatch(tuple(LogRecord(time=t) for t in times), append_time=times[-1]))


def test_log_append_time_replaces_record_timestamps(tmp_path: Path) -> None:
    """redpanda-data/redpanda#910: a topic by LogAppendTime had stamps that were no times since 1970."""
    landed = land_log(tmp_path, append_by_broker(1, 2, 1_700_000_000_000))
    assert landed.rows["timestamp"].cast("int64").to_pylist() == [1_700_000_000_000] * 3
    assert landed.rows["timestampType"].to_pylist() == [1] * 3
