"""Days of a time zone on a real Kafka: every record is in the local day of its arrival, over both changes of clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from kafka import KafkaProducer

import sluice
from sluice.assets.events.landed_metadata import build_window_event
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.specs.asset_specs import Keys, partitions_of
from sluice.pipelines.batch.land import land
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import HOUR, parse_instant
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call, Lines
from tests.integration.support import (
    CATCH_UP,
    FeedProject,
    commit_feed,
    list_files,
    open_inline_ports,
    read_rows,
    run,
)

SHORT, LONG = "2026-03-29", "2026-10-25"
DAYS = {
    SHORT: ["2026-03-28", SHORT, "2026-03-30"],
    LONG: ["2026-10-24", LONG, "2026-10-26"],
}


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), lake())


def produce_around(project: FeedProject, change: str) -> list[int]:
    """Write records of three days and more to two partitions: at the begin of each hour and 1 ms before."""
    first = parse_instant(f"{DAYS[change][0]}T00:00:00Z") - 6 * HOUR
    stamps = [at + by for at in range(first, first + 96 * HOUR, HOUR) for by in (0, HOUR - 1)]
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for at in stamps:
            for partition in range(2):
                producer.send(project.topic, str(at).encode(), partition=partition, timestamp_ms=at)
    return stamps


def count_by_day(stamps: list[int], zone: str) -> dict[str, int]:
    """The oracle: DuckDB's calendar, by the records' stamps."""
    table = pa.table({"stamp": pa.array([at for at in stamps for _ in range(2)], pa.timestamp("ms", "UTC"))})
    connection = duckdb.connect()
    connection.register("stamps", table)
    days = f"select timezone('{zone}', stamp)::date::varchar, count(*) from stamps group by 1"
    return dict(connection.sql(days).fetchall())


def write(project: FeedProject, name: str, zone: str = "Europe/Berlin") -> Feed:
    return project.write_feed(name, window=f"{{length: 1d, timezone: {zone}}}")


@pytest.mark.parametrize("change", [SHORT, LONG])
def test_days_have_23_and_25_hours(change: str, project: FeedProject, call: Call) -> None:
    stamps = produce_around(project, change)
    expected = count_by_day(stamps, "Europe/Berlin")
    assert [expected[d] for d in DAYS[change]] == [96, {SHORT: 92, LONG: 100}[change], 96], "four records an hour"
    feeds = [write(project, name) for name in ("at_once", "one_by_one", "backfilled")]
    starts = [feeds[0].window.parse_name(d) for d in DAYS[change]]
    run(feeds[0])
    for start in starts:
        run(feeds[1], Request(RequestKind.WINDOW, window=start))
    run(feeds[2], Request(RequestKind.WINDOW, window=starts[0], until=feeds[2].window.end_of(starts[-1])))
    landed: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    for feed in feeds:
        for day in DAYS[change]:
            rows = sluice.read(feed.name, day, project=project.root).arrow()
            values = [int(v) for v in rows["value"].to_pylist()]
            assert count_by_day(values[::2], "Europe/Berlin") == {day: expected[day]}, "the rows of this day alone"
            assert len(values) == expected[day], "all of them"
            landed.setdefault(day, {})[feed.name] = sorted(
                zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), values, strict=True)
            )
            code, check = call("check", feed.name, day, "--json")
            assert (code, check["window"], check["complete"]) == (0, day, True)
            assert sum(p["landed"] for p in check["partitions"]) == expected[day]
        commit_feed(feed)
    assert all(len({*map(str, of_feeds.values())}) == 1 for of_feeds in landed.values()), "every way lands the same"
    folders = {p.split("/")[2] for p in list_files(feeds[1])}
    assert folders >= {f"kafka_window_date={d}" for d in DAYS[change]}
    code, text = call("audit", "at_once", "--all")
    assert (code, "reconciled" in text) == (0, True), text


def test_names_of_days_serve_everywhere(project: FeedProject, call: Call) -> None:
    produce_around(project, LONG)
    feed = write(project, "orders")
    run(feed)
    before = sorted(list_files(feed))
    code, text = call("check", "orders", LONG)
    assert (code, f"window {LONG} is complete" in text) == (0, True)
    code, document = call("files", "orders", "--window", LONG, "--json")
    assert document["windows"] == [LONG]
    assert {f["window"] for f in document["files"]} == {LONG}
    assert document["rows"] == 100
    code, document = call("files", "orders", "--from", "2026-10-24", "--to", "2026-10-26", "--json")
    assert document["windows"] == ["2026-10-24", LONG]
    assert call("wait", "orders", "--window", LONG, "--timeout", "1s")[0] == 0
    code, text = call("plan", "orders", "--window", LONG)
    assert code == 0, text
    code, text = call("check", "orders", f"{LONG}T00")
    assert (code, f"ask for the window that begins at {LONG}" in text) == (2, True)
    code, text = call("check", "orders", "2026-10-24T22:00")
    assert (code, f"window {LONG} is complete" in text) == (0, True), "an instant in UTC names the same window"
    code, document = call("status", "orders", "--json")
    assert [document["feeds"][0][key] for key in ("window", "timezone")] == ["1d", "Europe/Berlin"]
    with open_inline_ports(feed) as ports:
        view = LedgerView.open(feed, ports, Keys.of(feed.name))
        event = build_window_event(view, view.keys.landed, feed.window.parse_name(LONG))
        partitions = partitions_of(feed, view.state.first_window, ports.clock())
    assert event.partition == LONG
    assert partitions.has_partition_key(LONG)
    run(feed, Request(RequestKind.WINDOW, window=feed.window.parse_name(LONG), replace=True))
    assert sluice.read("orders", LONG, project=project.root).arrow().num_rows == 100
    assert {p.rpartition("/")[0] for p in before} == {p.rpartition("/")[0] for p in list_files(feed)}


ZONED = "{length: 1d, timezone: Europe/Berlin}"


@pytest.mark.parametrize(
    ("before", "after", "spanning", "later"),
    [("1d", ZONED, "2026-10-25", ["2026-10-26"]), ("12h", "8h", "2026-10-25T08", ["2026-10-25T16", "2026-10-26T00"])],
)
def test_another_zone_is_as_another_length(
    before: str, after: str, spanning: str, later: list[str], project: FeedProject, call: Call
) -> None:
    """Both apply after the newest boundary; a catch-up lands the rest of a window that spans it."""
    produce_around(project, LONG)
    feed = project.write_feed("orders", window=before)
    land_at(feed, "2026-10-25T13:00:00Z", WHEN_CLOSED)
    rows, landed = read_rows(feed), {*list_files(feed)}
    assert rows
    moved = project.write_feed("orders", window=after)
    window = Request(RequestKind.WINDOW, window=moved.window.parse_name(spanning))
    with pytest.raises(UsageError, match="they had another length or zone then"):
        land_at(moved, "2026-10-27T04:00:00Z", window)
    for name in later:
        land_at(moved, "2026-10-27T04:00:00Z", Request(RequestKind.WINDOW, window=moved.window.parse_name(name)))
        code, check = call("check", "orders", name, "--json")
        assert (code, check["complete"]) == (0, True)
    land_at(moved, "2026-10-27T04:00:00Z")
    assert {*list_files(moved)} > landed, "files of before stay"
    assert len(read_rows(moved)) == 4 * 96, "each record once"
    assert call("audit", "orders", "--all")[0] == 0
    assert [call("check", "orders", n)[0] for n in (spanning, *later)] == [1, *(0 for _ in later)]


WHEN_CLOSED = Request(RequestKind.WINDOW, window=parse_instant("2026-10-24T00:00:00Z"))


def land_at(feed: Feed, now: str, request: Request = CATCH_UP) -> None:
    with open_inline_ports(feed) as ports:
        at = replace(ports, clock=lambda: parse_instant(now))
        land(feed, at, request, new_owner("test"), lambda progress: None).check()
