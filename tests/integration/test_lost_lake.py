"""A lake that was removed or replaced, while the group has its committed offsets: on a real Kafka.

Kafka's own command and another client read the group's offsets.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
import pytest
from kafka import KafkaAdminClient, TopicPartition

from sluice.pipelines.errors import ForeignMarks
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.operating.acceptance import Begin, accept_group
from sluice.pipelines.util.units import show_window
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.tools import Java
from tests.integration.conftest import Call, Lines
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    open_inline_ports,
    produce_numbers,
    produce_values,
    read_rows,
    rescan_feed,
    run,
)
from tests.integration.test_lives import find_hour


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    feed_project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce_values(feed_project, 40)
    return feed_project


def land(feed: Feed) -> None:
    run(feed)
    commit_feed(feed)


def fetch_offsets(project: FeedProject, feed: Feed) -> dict[int, tuple[int, str]]:
    """Fetch the committed offset and metadata of each partition with another client."""
    admin = KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap)
    try:
        committed = admin.list_group_offsets({feed.group: None})[feed.group]
        return {tp.partition: (committed[tp].offset, committed[tp].metadata) for tp in committed}
    finally:
        admin.close()


def remove_lake(feed: Feed) -> None:
    lake = open_lake(feed)
    for path in list(lake.list("")):
        lake.remove(path)


def take_over(feed: Feed, begin: Begin) -> None:
    with open_inline_ports(feed) as ports:
        accept_group(feed, ports, begin, "the lake is lost")


@pytest.mark.parametrize("begin", list(Begin), ids=str)
def test_removed_lake_is_detected_and_its_group_is_taken_over(project: FeedProject, begin: Begin) -> None:
    feed = project.write_feed()
    land(feed)
    remove_lake(feed)
    produce_values(project, 10)
    before = fetch_offsets(project, feed)
    assert {p: offset for p, (offset, _) in before.items()} == {0: 20, 1: 20}
    with pytest.raises(ForeignMarks, match="the committed offset 20 has the mark of entry"):
        run(feed)
    assert (fetch_offsets(project, feed), list(open_lake(feed).list(""))) == (before, [])

    take_over(feed, begin)
    land(feed)
    first = 0 if begin is Begin.START else 20
    assert read_rows(feed) == [row for row in consume_topic(project.kafka, project.topic) if row["offset"] >= first]
    after = fetch_offsets(project, feed)
    assert {p: offset for p, (offset, _) in after.items()} == {0: 25, 1: 25}
    ledger_id = Ledger(open_lake(feed), feed.name, lambda: 0).read().ledger_id
    assert all(ledger_id in metadata for _, metadata in after.values())
    assert rescan_feed(feed).reconciled


def test_second_lake_on_a_group_is_refused_until_takeover(project: FeedProject, lake: Lines) -> None:
    """The second lands nothing, for any `on_group_moved`; once it has taken the group over, the first is refused."""
    feed = project.write_feed()
    land(feed)
    produce_values(project, 10)
    other = FeedProject(project.root / "other", project.kafka, project.topic, lake())
    other.root.mkdir()
    second = other.write_feed(group=feed.group, policies="{on_group_moved: adopt}")
    with pytest.raises(ForeignMarks):
        run(second)
    take_over(second, Begin.COMMITTED)
    land(second)
    for refused in (run, commit_feed):
        with pytest.raises(ForeignMarks):
            refused(feed)
    both = sorted(read_rows(feed) + read_rows(second), key=lambda row: (row["partition"], row["offset"]))
    assert both == consume_topic(project.kafka, project.topic), "each record once"


def test_offsets_reset_by_kafka_command_are_used_as_start(project: FeedProject) -> None:
    """The command writes no mark: the feed begins at its offsets, as at any other consumer's."""
    feed = project.write_feed()
    land(feed)
    remove_lake(feed)
    reset = ["--reset-offsets", "--to-offset", "5", "--topic", project.topic, "--execute"]
    server = ["--bootstrap-server", project.kafka.bootstrap, "--group", feed.group]
    tool = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    Java.of_local_kafka().run(tool, *server, *reset)
    assert fetch_offsets(project, feed) == {0: (5, ""), 1: (5, "")}
    landed = run(feed)
    assert "`start: earliest` is not used in 2 of 2 partitions" in landed.start_not_used
    assert read_rows(feed) == [row for row in consume_topic(project.kafka, project.topic) if row["offset"] >= 5]


AGO = (5, 4, 3)
"""The closed hours, in hours before now."""


def land_hours(project: FeedProject, call: Call, shared: str) -> Feed:
    """Land three hours of good and bad records, and an open one. Kafka deletes the first hour, and half of the next."""
    project.write_feed(
        format="json",
        schema="{id: int64}",
        policies="{quarantine_limit: {share: 1.0}}",
        landing=f"{{shared_files: {shared}}}",
    )
    for n, ago in enumerate((*AGO, 0)):
        produce_numbers(project, range(40 * n, 40 * (n + 1)), find_hour(ago))
    assert call("run", "orders", "--no-dagster")[0] == 0
    with closing(KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap)) as admin:
        admin.delete_records({TopicPartition(project.topic, p): 30 for p in (0, 1)})
    return load_feed(project.root / "feeds" / "orders.yaml", {})


def read_ids(feed: Feed) -> tuple[list[int], int]:
    """Returns the landed numbers, and the number of records in quarantine."""
    folders = [Path(open_lake(feed).uri.removeprefix("file://")) / root / "orders" for root in ("data", "quarantine")]
    landed, bad = (f"from read_parquet('{f}/**/*.parquet', hive_partitioning = false)" for f in folders)
    ids = duckdb.execute(f"select id {landed} order by id").fetchall()
    return [i for (i,) in ids], len(duckdb.execute(f"select 1 {bad}").fetchall())


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["true", "false"], ids=["shared files", "own files"])
def test_account_is_rebuilt_from_files_that_kafka_cannot_replace(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], call: Call, shared: str
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})
    feed = land_hours(project, call, shared)
    assert call("quarantine", "list", "orders")[0] == 0
    hours = [show_window(find_hour(ago)) for ago in AGO]
    before = [call("check", "orders", hour, "--json")[1] for hour in hours]
    shutil.rmtree(tmp_path / ".sluice" / "lake" / "_sluice" / "orders")
    assert call("run", "orders", "--no-dagster")[0] == 3
    accept = ("accept", "orders", "ledger", "--from-files", "--reason", "INC-21")
    code, foreseen = call(*accept, "--dry-run", "--json")
    assert (code, foreseen.get("applied")) == (0, False), foreseen
    assert call("status", "orders")[0] != 0, "a dry run changes nothing"
    code, done = call(*accept, "--json")
    assert (code, done["rebuilt"]) == (0, foreseen["rebuilt"])
    assert (done["rebuilt"]["rows"], done["rebuilt"]["without_row"], done["rebuilt"]["holes"]) == (80, 0, [])
    assert call(*accept)[0] != 0, "once"
    assert call("run", "orders", "--no-dagster")[0] == 0
    produce_numbers(project, range(160, 180), find_hour(0))
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert read_ids(feed) == ([i for i in range(180) if i % 10], 18)
    for words in (("audit", "orders", "--strict", "--hashes"), ("audit", "orders", "--rescan")):
        code, text = call(*words)
        assert code == 0, text
    after = [call("check", "orders", hour, "--json")[1] for hour in hours]
    assert [(c["complete"], c["rows"]) for c in after] == [(c["complete"], c["rows"]) for c in before]
    assert [c["complete"] for c in after] == [True] * 3


@pytest.mark.slow
def test_gap_without_a_file_is_reported_as_lost(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], call: Call
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})
    feed = land_hours(project, call, "false")
    lake = tmp_path / ".sluice" / "lake"
    shutil.rmtree(lake / "_sluice" / "orders")
    for path in lake.rglob("*-0-20-40-*.parquet"):
        path.unlink()
    code, text = call("accept", "orders", "ledger", "--from-files", "--reason", "INC-21")
    assert (code, "10 offsets without a file" in text, f"of {project.topic}:0 [20, 30)" in text) == (0, True, True), (
        text
    )
    code, text = call("run", "orders", "--no-dagster")
    assert (code, "sluice accept orders lost" in text) == (3, True), text
    assert call("accept", "orders", "lost", "--reason", "INC-21", "--yes")[0] == 0
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert read_ids(feed)[0] == [i for i in range(160) if i % 10 and i not in range(40, 60, 2)]
    assert call("audit", "orders", "--strict", "--hashes")[0] == 0
    code, checked = call("check", "orders", show_window(find_hour(AGO[0])), "--json")
    assert (code, sum(p["lost"] for p in checked["partitions"])) == (0, 10), checked
