"""Offsets that open transactions hold back: counts, names, and Kafka's command to abort for each partition."""

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
    return _make_feed(tmp_path, "")


def _make_feed(folder: Path, more: str) -> Feed:
    file = folder / "orders.yaml"
    file.write_text(f"kafka: {{bootstrap: 'k1:9092,k2:9092'{more}}}\ntopics: orders\nstart: earliest\n")
    return load_feed(file, {})


def make_partition(number: int, start: int, end: int = 100) -> PartitionState:
    return partition("orders", number, last_stable_offset=start, high_watermark=end)


def make_transaction(start: int, producer: int = 7, written: int = NOW - 5000) -> OpenTransaction:
    return OpenTransaction(start, producer, 2, written, name=f"billing-{producer}")


def make_tp(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def test_offsets_behind_young_open_transaction_are_counted_and_reported(feed: Feed) -> None:
    (finding,) = list_held_back(
        feed, [make_partition(0, 100), make_partition(1, 60)], {make_tp(1): make_transaction(60)}, BROKER, NOW
    )
    assert finding.message == (
        "orders:1 is held at offset 60 by transaction 'billing-7' of producer 7, last written"
        " 2027-01-15T07:59:55Z (5 s ago): 40 offsets cannot land yet"
    )
    assert finding.remedy == (
        "runs land it once its producer has ended it, or its coordinator 15m here (transaction.max.timeout.ms) after it"
        f" began. Not to wait, abort it: {ABORT} 1 --start-offset 60"
    )
    assert (finding.offsets, finding.age, finding.overdue) == (40, 5000, False)


def test_multi_partition_transaction_is_one_finding_with_commands(feed: Feed) -> None:
    partitions, holders = (
        [make_partition(n, 90 - n) for n in range(5)],
        {make_tp(n): make_transaction(90 - n) for n in range(5)},
    )
    (finding,) = list_held_back(feed, partitions, holders, BROKER, NOW)
    assert finding.message.startswith(
        "orders:0 is held at offset 90, orders:1 at 89, orders:2 at 88 and 2 more partitions by"
    )
    commands = " && ".join(f"{ABORT} {n} --start-offset {90 - n}" for n in range(3))
    assert finding.remedy.endswith(f"abort it, and so in 2 more partitions: {commands}")
    assert [p.last_stable_offset for p in finding.partitions] == [90, 89, 88, 87, 86]
    assert by_partition([finding])[make_tp(4)].remedy.endswith(f": {ABORT} 4 --start-offset 86")


def test_transactions_are_sorted_by_blocked_offsets(feed: Feed) -> None:
    holders = {make_tp(0): make_transaction(99, 1), make_tp(1): make_transaction(10, 2)}
    findings = list_held_back(feed, [make_partition(0, 99), make_partition(1, 10)], holders, BROKER, NOW)
    assert [(h.offsets, h.transaction and h.transaction.producer_id) for h in findings] == [(90, 2), (1, 1)]


def test_blocked_offsets_are_reported_when_transaction_is_unknown(feed: Feed) -> None:
    (finding,) = list_held_back(feed, [make_partition(0, 60)], {}, BrokerConfig(), NOW)
    assert "by an open transaction (Kafka does not report which): 40 offsets" in finding.message
    assert finding.remedy.endswith(f"{ABORT} 0 --start-offset 60")
    assert (finding.transaction, finding.age, finding.overdue) == (None, None, False)


def test_transaction_begun_after_partition_was_described_is_not_blamed(feed: Feed) -> None:
    """Partitions are described before their open transactions: the holder may have ended in between."""
    (finding,) = list_held_back(feed, [make_partition(0, 60)], {make_tp(0): make_transaction(120)}, BROKER, NOW)
    assert (finding.transaction, finding.partitions[0].last_stable_offset) == (None, 60)


def test_transaction_without_recent_writes_is_reported_as_hanging(feed: Feed) -> None:
    (finding,) = list_held_back(
        feed, [make_partition(0, 60)], {make_tp(0): make_transaction(60, written=NOW - 16 * MINUTE)}, BROKER, NOW
    )
    assert finding.overdue
    assert finding.remedy.startswith(
        "it hangs: none may last longer than 15m here (transaction.max.timeout.ms). Abort it"
    )


def test_transaction_written_in_another_partition_is_not_overdue(feed: Feed) -> None:
    holders = {make_tp(0): make_transaction(60, written=NOW - 16 * MINUTE), make_tp(1): make_transaction(70)}
    (finding,) = list_held_back(feed, [make_partition(0, 60), make_partition(1, 70)], holders, BROKER, NOW)
    assert (finding.overdue, finding.age) == (False, 5000)


def test_abort_command_has_command_config_for_a_secured_cluster(tmp_path: Path) -> None:
    (finding,) = list_held_back(
        _make_feed(tmp_path, ", security_protocol: SSL"), [make_partition(0, 60)], {}, BROKER, NOW
    )
    assert "--bootstrap-server k1:9092,k2:9092 --command-config FILE abort" in finding.remedy


def test_transactions_are_requested_only_for_blocked_partitions(feed: Feed) -> None:
    cluster = MemoryCluster(open={make_tp(1): make_transaction(60)}, settings=Configs(broker=BROKER))
    assert look(feed, cluster, [make_partition(0, 100)], NOW) == ()
    (finding,) = look(feed, cluster, [make_partition(0, 100), make_partition(1, 60)], NOW)
    assert (finding.transaction, finding.limit) == (make_transaction(60), 15 * MINUTE)
