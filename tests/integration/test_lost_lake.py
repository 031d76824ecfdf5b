"""A lake that was removed or replaced, while the group has its committed offsets: on a real Kafka.

Kafka's own command and another client read the group's offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from sluice.pipelines.errors import ForeignMarks
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.operating.acceptance import Begin, accept_group
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.tools import Java
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    open_inline_ports,
    produce_values,
    read_rows,
    rescan_feed,
    run,
)


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
