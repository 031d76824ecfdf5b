"""Feeds whose log was replaced, on a real Kafka and through the commands. Nothing unread is "complete and empty"."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka import TopicPartition as Plain
from kafka.errors import CoordinatorLoadInProgressError, CoordinatorNotAvailableError, NotCoordinatorError
from kafka.structs import OffsetAndMetadata

from sluice.assets.checks.feed_checks import check_complete
from sluice.assets.events.ledger_view import LedgerView
from sluice.pipelines.errors import ClusterChanged, Refused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import show_window
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call, Lines
from tests.integration.support import FeedProject, commit_feed, open_inline_ports, read_rows, run
from tests.resources.kafka.tools import wait_until

HOUR = 3_600_000


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=4), lake())


def find_hour(ago: int) -> int:
    now = time.time_ns() // 1_000_000
    return now - now % HOUR - ago * HOUR


def produce(project: FeedProject, topic: str, hour: int, count: int) -> None:
    """Write `count` records of the hour to each of four partitions."""
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in range(4 * count):
            producer.send(topic, b"%d" % i, partition=i % 4, timestamp_ms=hour + i)


def recreate(project: FeedProject, topic: str, partitions: int) -> None:
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_topics([topic])
        wait_until(lambda: topic not in admin.list_topics())
        if partitions:
            admin.create_topics({topic: {"num_partitions": partitions}}, wait_for_metadata=True)


def check_in_dagster(feed: Feed, window: int) -> Any:
    with open_inline_ports(feed) as ports:
        view = LedgerView.open(feed, ports)
        return check_complete(view, window)


def test_unread_records_of_a_recreated_topic_are_lost_by_name(project: FeedProject, call: Call) -> None:
    feed, hour, topic = project.write_feed(), find_hour(3), project.topic
    produce(project, topic, hour, 30)
    run(feed, Request(RequestKind.CATCH_UP, only=(TopicPartition(topic, 0),)))
    window = show_window(hour)
    code, before = call("check", "orders", window, "--json")
    assert (code, [p["pending"] for p in before["partitions"]]) == (1, [0, 30, 30, 30])
    recreate(project, topic, partitions=4)
    produce(project, topic, find_hour(0), 5)
    with pytest.raises(Refused):
        run(feed)
    code, accepted = call("accept", "orders", "recreated", "--reason", "INC-1", "--json")
    assert code == 2, "giving up offsets needs a confirmation"
    code, accepted = call("accept", "orders", "recreated", "--reason", "INC-1", "--yes", "--json")
    assert (code, [(r["partition"], r["start"], r["end"]) for r in accepted["lost"]]) == (
        0,
        [(1, 0, 30), (2, 0, 30), (3, 0, 30)],
    )
    assert [(u["partition"], u["offset"]) for u in accepted["unseen"]] == [(p, 30) for p in range(4)]
    run(feed)

    code, after = call("check", "orders", window, "--json")
    assert (code, after["complete"], after["empty"], after["lost"], after["landed"]) == (0, True, False, 90, 30)
    for command in (("check", "orders", window), ("wait", "orders", "--window", window)):
        code, text = call(*command)
        assert (code, "! window" in text, "but 90 offsets are lost" in text) == (0, True, True), text
    assert check_in_dagster(feed, hour)["description"] == "the window is complete, but 90 offsets are lost"
    assert not check_in_dagster(feed, hour)["passed"]
    quiet, text = call("check", "orders", show_window(find_hour(2)))
    assert (quiet, "complete and empty" in text) == (0, True), "that hour was seen before the topic was replaced"
    code, report = call("audit", "orders", "--strict", "--json")
    assert (code, sum(p["lost"] for p in report["partitions"])) == (0, 90)
    assert "records beyond 30, if there were any, are unknown" in call("audit", "orders")[1]


def test_unread_records_of_a_deleted_topic_are_lost_until_it_returns(
    project: FeedProject, fresh_topic: Callable[..., str], call: Call
) -> None:
    other, hour = fresh_topic(partitions=4), find_hour(3)
    feed = project.write_feed(topics=f"[{project.topic}, {other}]")
    for topic in (project.topic, other):
        produce(project, topic, hour, 30)
    run(feed, Request(RequestKind.CATCH_UP, only=tuple(TopicPartition(project.topic, p) for p in range(4))))
    without = project.write_feed()  # for this feed, the other topic is gone
    code, accepted = call("accept", "orders", "gone", "--reason", "INC-2", "--yes", "--json")
    assert (code, sum(r["end"] - r["start"] for r in accepted["lost"])) == (0, 120)
    run(without)
    code, after = call("check", "orders", show_window(hour), "--json")
    assert (code, after["empty"], after["lost"]) == (0, False, 120)

    feed = project.write_feed(topics=f"[{project.topic}, {other}]")
    assert call("accept", "orders", "recreated", "--reason", "it is back", "--yes")[0] == 0
    run(feed)
    code, back = call("check", "orders", show_window(hour), "--json")
    assert (code, back["lost"]) == (0, 0), "the records landed, in a later window"
    code, report = call("audit", "orders", "--strict", "--json")
    assert (code, sum(p["landed"] for p in report["partitions"])) == (0, 240)


def test_quarantine_of_a_former_life_is_replayed(project: FeedProject, call: Call) -> None:
    settings = {"format": "json", "policies": "{quarantine_limit: {share: 1.0}}"}
    feed, hour = project.write_feed(schema="{id: int8}", **settings), find_hour(3)
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in range(60):
            producer.send(project.topic, b'{"id": %d}' % (i + 100), partition=0, timestamp_ms=hour + i)
    run(feed)
    recreate(project, project.topic, partitions=4)
    assert call("accept", "orders", "recreated", "--reason", "INC-3", "--yes")[0] == 0
    produce(project, project.topic, find_hour(0), 1)
    feed = project.write_feed(schema="{id: int64}", **settings)
    run(feed)
    _, preview = call("quarantine", "replay", "orders", "--dry-run", "--json")
    code, replayed = call("quarantine", "replay", "orders", "--json")
    assert (code, preview["landed"], replayed["landed"], replayed["stay"]) == (0, 32, 32, 4), replayed
    code, after = call("check", "orders", show_window(hour), "--json")
    assert (code, after["landed"], after["quarantined"]) == (0, 60, 0)
    assert call("audit", "orders", "--strict", "--hashes")[0] == 0


def translate(admin: KafkaAdminClient, group: str, offsets: Any) -> bool:
    """Write the group's offsets, as a mirror does. Returns False while the new broker has no coordinator."""
    try:
        admin.alter_group_offsets(group, offsets)
        return len(admin.list_group_offsets({group: None})[group]) == len(offsets)
    except (CoordinatorLoadInProgressError, CoordinatorNotAvailableError, NotCoordinatorError):
        return False


def test_feed_moves_to_a_mirror_by_the_printed_remedy(project: FeedProject, tmp_path: Path, call: Call) -> None:
    """The mirror has other offsets: it lacks the first records. The group's offsets there are translated."""
    feed, hour = project.write_feed(), find_hour(2)
    produce(project, project.topic, hour, 30)
    run(feed)
    commit_feed(feed)
    mirror = LocalKafka(tmp_path / "mirror", brokers=1)
    mirror.start()
    try:
        there = FeedProject(project.root, mirror, project.topic)
        with KafkaAdminClient(bootstrap_servers=mirror.bootstrap) as admin:
            admin.create_topics({project.topic: {"num_partitions": 4}}, wait_for_metadata=True)
            produce(there, project.topic, hour, 20)
            offsets = {Plain(project.topic, p): OffsetAndMetadata(20, "", None) for p in range(4)}
            wait_until(lambda: translate(admin, feed.group, offsets))
        produce(there, project.topic, find_hour(0), 5)
        feed = there.write_feed()
        with pytest.raises(ClusterChanged) as refused:
            run(feed)
        remedy = "sluice accept orders cluster --begin committed --reason"
        assert remedy in refused.value.remedy
        code, text = call(*remedy.split()[1:], "failover")
        assert code == 0, text
        run(feed)
        assert len(read_rows(feed)) == 120 + 20, "each record once"
        assert commit_feed(feed).status == "committed"
        assert call("audit", "orders", "--strict")[0] == 0
    finally:
        mirror.stop()
