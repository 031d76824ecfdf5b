"""A refused batch holds only its own windows: newer ones land, and the committed offset stays before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sluice.cli.main import main
from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.planning import windows
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import (
    FeedProject,
    commit_feed,
    open_feed_ledger,
    open_inline_ports,
    rescan_feed,
    run,
)
from tests.integration.test_operator import HOUR, find_first_hour, request_window
from tests.resources.kafka.tools import open_producer

Topics = Callable[..., str]
GOOD, BAD = b'{"id": 1}', b"nonsense"


class Hours:
    """A feed with hours of 20 records each, some of them bad."""

    def __init__(self, root: Path, kafka: LocalKafka, topic: str) -> None:
        self.project, self.start = FeedProject(root, kafka, topic), find_first_hour()
        self.feed = self.write(0.1)

    def write(self, share: float, **settings: str) -> Feed:
        limit = f"{{quarantine_limit: {{share: {share}, at_least: 1}}}}"
        return self.project.write_feed(format="json", schema="{id: int64}", policies=limit, **settings)

    def produce(self, *values: bytes, first: int = 0) -> None:
        with open_producer(self.project.kafka) as producer:
            for hour, value in enumerate(values, first):
                for i in range(20):
                    stamp = self.start + hour * HOUR + i
                    producer.send(self.project.topic, value, partition=i % 2, timestamp_ms=stamp)

    def list_incomplete(self) -> list[int]:
        """Returns the numbers of the hours, of the first six, that are not complete."""
        with open_inline_ports(self.feed) as ports:
            state = open_feed_ledger(self.feed, ports).read()
        starts = [self.start + hour * HOUR for hour in range(6)]
        complete = windows.complete_of(state, starts, self.feed.window)
        return [hour for hour, start in enumerate(starts) if start not in complete]

    def count_rows(self) -> int:
        files = (self.project.root / ".sluice" / "lake" / "data").rglob("*.parquet")
        return sum(pq.read_metadata(file).num_rows for file in files)

    def read_committed(self) -> list[int]:
        tps = [TopicPartition(self.project.topic, p) for p in (0, 1)]
        with open_inline_ports(self.feed) as ports:
            return [c.offset for c in ports.group.fetch_committed(tps).values() if c]


@pytest.fixture
def hours(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics) -> Hours:
    return Hours(tmp_path, kafka, fresh_topic(partitions=2))


def test_a_bad_hour_of_a_catch_up_holds_only_itself(hours: Hours) -> None:
    hours.produce(GOOD, BAD, GOOD, BAD, GOOD)
    with pytest.raises(QuarantineExceeded):
        run(hours.feed)
    assert hours.list_incomplete() == [1, 3]
    commit_feed(hours.feed)
    assert hours.read_committed() == [10, 10]

    hours.produce(GOOD, first=9)
    with pytest.raises(QuarantineExceeded):
        run(hours.feed)
    assert (hours.list_incomplete(), hours.count_rows()) == ([1, 3], 80)
    assert commit_feed(hours.feed).status == "unchanged"
    assert rescan_feed(hours.feed).problems == ()

    hours.feed = hours.write(1.0)
    run(hours.feed)
    assert hours.list_incomplete() == []
    commit_feed(hours.feed)
    assert hours.read_committed() == [60, 60]
    assert hours.count_rows() == 80
    assert rescan_feed(hours.feed).problems == ()


def test_a_batch_that_is_all_or_nothing_stays_whole(hours: Hours) -> None:
    hours.feed = hours.write(0.1, publish="all_or_nothing")
    hours.produce(GOOD, BAD, GOOD)
    with pytest.raises(QuarantineExceeded):
        run(hours.feed)
    assert hours.list_incomplete() == [0, 1, 2]
    hours.produce(GOOD, first=9)
    with pytest.raises(QuarantineExceeded):
        run(hours.feed)
    assert (hours.list_incomplete(), hours.count_rows()) == ([0, 1, 2], 20)


def test_single_hours_land_next_to_a_refused_one(hours: Hours) -> None:
    """As Airflow and a schedule request them: an hour each, or several in a row."""
    hours.produce(BAD, GOOD, GOOD, GOOD)
    with pytest.raises(QuarantineExceeded):
        run(hours.feed, request_window(hours.start))
    run(hours.feed, request_window(hours.start + HOUR))
    with pytest.raises(QuarantineExceeded):
        run(hours.feed, request_window(hours.start, hours.start + 4 * HOUR))
    assert hours.list_incomplete()[:1] == [0]
    assert hours.count_rows() == 60


def test_the_command_calls_a_refused_batch_refused(hours: Hours, capfd: pytest.CaptureFixture[str]) -> None:
    hours.produce(GOOD, BAD)
    project = ("--project", str(hours.project.root))
    assert main(["run", "--all", "--no-dagster", *project]) == 3
    hours.produce(GOOD, first=9)
    capfd.readouterr()
    assert main(["run", "orders", "--no-dagster", *project]) == 3
    text = capfd.readouterr().out
    assert "was refused, and waits for a decision" in text
    assert "is dead" not in text
    assert (hours.list_incomplete(), hours.count_rows()) == ([1], 40)
