"""What open transactions hold back: counted, named, and with Kafka's own command for each partition."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.kafka import BrokerConfig, Configs, OpenTransaction, PartitionState, TopicPartition
from sluice.pipelines.planning.held_back import by_partition, list_held_back, look
from sluice.testing.cluster import MemoryCluster, partition

NOW = 1_800_000_000_000
MINUTE = 60_000
BROKER = BrokerConfig(transaction_max_timeout=15 * MINUTE)
ABORT = "kafka-transactions.sh --bootstrap-server k1:9092,k2:9092 abort --topic orders --partition"


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return _feed(tmp_path, "")


def _feed(folder: Path, more: str) -> Feed:
    file = folder / "orders.yaml"
    file.write_text(f"kafka: {{bootstrap: 'k1:9092,k2:9092'{more}}}\ntopics: orders\nstart: earliest\n")
    return load_feed(file, {})


def held(number: int, start: int, end: int = 100) -> PartitionState:
    return partition("orders", number, last_stable_offset=start, high_watermark=end)


def by(start: int, producer: int = 7, written: int = NOW - 5000) -> OpenTransaction:
    return OpenTransaction(start, producer, 2, written, name=f"billing-{producer}")


def tp(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def test_what_is_held_is_counted_and_named_however_young_it_is(feed: Feed) -> None:
    (found,) = list_held_back(feed, [held(0, 100), held(1, 60)], {tp(1): by(60)}, BROKER, NOW)
    assert found.text == (
        "orders:1 is held at offset 60 by transaction 'billing-7' of producer 7, last written"
        " 2027-01-15T07:59:55Z (5 s ago): 40 offsets cannot land yet"
    )
    assert found.remedy == (
        "runs land it once its producer has ended it, or its coordinator 15m here (transaction.max.timeout.ms) after it"
        f" began. Not to wait, abort it: {ABORT} 1 --start-offset 60"
    )
    assert (found.offsets, found.age, found.overdue) == (40, 5000, False)


def test_a_transaction_over_several_partitions_is_one_with_a_command_for_each(feed: Feed) -> None:
    partitions, holders = [held(n, 90 - n) for n in range(5)], {tp(n): by(90 - n) for n in range(5)}
    (found,) = list_held_back(feed, partitions, holders, BROKER, NOW)
    assert found.text.startswith(
        "orders:0 is held at offset 90, orders:1 at 89, orders:2 at 88 and 2 more partitions by"
    )
    commands = " && ".join(f"{ABORT} {n} --start-offset {90 - n}" for n in range(3))
    assert found.remedy.endswith(f"abort it, and so in 2 more partitions: {commands}")
    assert [p["last_stable_offset"] for p in found.document()["partitions"]] == [90, 89, 88, 87, 86]
    assert by_partition([found])[tp(4)].remedy.endswith(f": {ABORT} 4 --start-offset 86")


def test_several_transactions_come_by_how_much_they_hold(feed: Feed) -> None:
    holders = {tp(0): by(99, 1), tp(1): by(10, 2)}
    found = list_held_back(feed, [held(0, 99), held(1, 10)], holders, BROKER, NOW)
    assert [(h.offsets, h.by and h.by.producer_id) for h in found] == [(90, 2), (1, 1)]


def test_a_holder_that_kafka_does_not_tell_is_no_reason_to_be_silent(feed: Feed) -> None:
    (found,) = list_held_back(feed, [held(0, 60)], {}, BrokerConfig(), NOW)
    assert "by an open transaction (Kafka does not report which): 40 offsets" in found.text
    assert found.remedy.endswith(f"{ABORT} 0 --start-offset 60")
    assert (found.document()["transaction"], found.age, found.overdue) == (None, None, False)


def test_one_that_began_after_the_look_holds_nothing_of_it(feed: Feed) -> None:
    """Partitions are asked for first, and whoever holds them then: that one may have ended meanwhile."""
    (found,) = list_held_back(feed, [held(0, 60)], {tp(0): by(120)}, BROKER, NOW)
    assert (found.by, found.held[0].start) == (None, 60)


def test_nobody_has_written_to_it_for_long(feed: Feed) -> None:
    (found,) = list_held_back(feed, [held(0, 60)], {tp(0): by(60, written=NOW - 16 * MINUTE)}, BROKER, NOW)
    assert found.overdue
    assert found.remedy.startswith(
        "it hangs: none may last longer than 15m here (transaction.max.timeout.ms). Abort it"
    )


def test_written_to_in_another_partition_it_is_at_work(feed: Feed) -> None:
    holders = {tp(0): by(60, written=NOW - 16 * MINUTE), tp(1): by(70)}
    (found,) = list_held_back(feed, [held(0, 60), held(1, 70)], holders, BROKER, NOW)
    assert (found.overdue, found.age) == (False, 5000)


def test_a_cluster_that_asks_who_one_is_wants_to_be_told(tmp_path: Path) -> None:
    (found,) = list_held_back(_feed(tmp_path, ", security_protocol: SSL"), [held(0, 60)], {}, BROKER, NOW)
    assert "--bootstrap-server k1:9092,k2:9092 --command-config FILE abort" in found.remedy


def test_kafka_is_asked_only_where_something_is_held(feed: Feed) -> None:
    cluster = MemoryCluster(open={tp(1): by(60)}, settings=Configs(broker=BROKER))
    assert look(feed, cluster, [held(0, 100)], NOW) == ()
    (found,) = look(feed, cluster, [held(0, 100), held(1, 60)], NOW)
    assert (found.by, found.limit) == (by(60), 15 * MINUTE)
