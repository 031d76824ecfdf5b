"""A lake that is gone, or another one, beside a group that remembers it: on a real Kafka and both lakes.

Kafka's own command and another client say what the group holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.pipelines.errors import ForeignMarks
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.operating.acceptance import Begin, accept_group
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.tools import Java
from tests.integration.conftest import Lines
from tests.integration.support import Place, commit_feed, consumed, edges, rescanned, rows, run


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    there = Place(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce(there, 40)
    return there


def produce(place: Place, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(place.topic, f"value {i}".encode(), partition=i % 2)
    producer.close()


def land(feed: Feed) -> None:
    run(feed)
    commit_feed(feed)


def offsets_in_kafka(place: Place, feed: Feed) -> dict[int, tuple[int, str]]:
    """Of each partition the committed offset and its metadata, as another client reads them."""
    admin = KafkaAdminClient(bootstrap_servers=place.kafka.bootstrap)
    try:
        committed = admin.list_group_offsets({feed.group: None})[feed.group]
        return {tp.partition: (committed[tp].offset, committed[tp].metadata) for tp in committed}
    finally:
        admin.close()


def remove_lake(feed: Feed) -> None:
    lake = open_lake(feed)
    for path in list(lake.list("")):
        lake.remove(path)


def taken_over(feed: Feed, begin: Begin) -> None:
    with edges(feed) as opened:
        accept_group(feed, opened, begin, "the lake is lost")


@pytest.mark.parametrize("begin", list(Begin), ids=str)
def test_a_removed_lake_is_noticed_and_the_group_taken_over(place: Place, begin: Begin) -> None:
    feed = place.feed()
    land(feed)
    remove_lake(feed)
    produce(place, 10)
    before = offsets_in_kafka(place, feed)
    assert {p: offset for p, (offset, _) in before.items()} == {0: 20, 1: 20}
    with pytest.raises(ForeignMarks, match="the committed offset 20 has the mark of entry"):
        run(feed)
    assert (offsets_in_kafka(place, feed), list(open_lake(feed).list(""))) == (before, [])

    taken_over(feed, begin)
    land(feed)
    first = 0 if begin is Begin.START else 20
    assert rows(feed) == [row for row in consumed(place.kafka, place.topic) if row["offset"] >= first]
    after = offsets_in_kafka(place, feed)
    assert {p: offset for p, (offset, _) in after.items()} == {0: 25, 1: 25}
    mine = Ledger(open_lake(feed), feed.name, lambda: 0).read().ledger_id
    assert all(mine in metadata for _, metadata in after.values())
    assert rescanned(feed).is_reconciled


def test_two_lakes_on_one_group(place: Place, lake: Lines) -> None:
    """The second lands nothing, whatever `on_group_moved` says; once it took the group over, the first is refused."""
    feed = place.feed()
    land(feed)
    produce(place, 10)
    other = Place(place.root / "other", place.kafka, place.topic, lake())
    other.root.mkdir()
    second = other.feed(group=feed.group, policies="{on_group_moved: adopt}")
    with pytest.raises(ForeignMarks):
        run(second)
    taken_over(second, Begin.COMMITTED)
    land(second)
    for refused in (run, commit_feed):
        with pytest.raises(ForeignMarks):
            refused(feed)
    both = sorted(rows(feed) + rows(second), key=lambda row: (row["partition"], row["offset"]))
    assert both == consumed(place.kafka, place.topic), "each record once"


def test_offsets_reset_by_kafkas_own_command_are_nobodys(place: Place) -> None:
    """It writes no mark: the feed begins there, as with any other consumer's offsets."""
    feed = place.feed()
    land(feed)
    remove_lake(feed)
    reset = ["--reset-offsets", "--to-offset", "5", "--topic", place.topic, "--execute"]
    server = ["--bootstrap-server", place.kafka.bootstrap, "--group", feed.group]
    tool = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    Java.of_local_kafka().run(tool, *server, *reset)
    assert offsets_in_kafka(place, feed) == {0: (5, ""), 1: (5, "")}
    landed = run(feed)
    assert "`start: earliest` is not used in 2 of 2 partitions" in landed.start_not_used
    assert rows(feed) == [row for row in consumed(place.kafka, place.topic) if row["offset"] >= 5]
