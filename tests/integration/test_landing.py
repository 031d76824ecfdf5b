"""Landed rows equal the records of the log, value by value, for an independent reader (invariants 1 to 6 and 9)."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kafka as kafka_client
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.audit.gaps import choose_remedies
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.errors import BatchIncomplete, NothingToAccept, Refused, UnknownTopic, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import Range, TopicPartition
from sluice.pipelines.model.plans import AskedRange
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.operating.acceptance import accept_damaged
from sluice.pipelines.records.shape import RAW
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from tests.integration.conftest import Lines
from tests.integration.support import (
    CATCH_UP,
    SLUICE,
    FeedProject,
    commit_feed,
    consume_topic,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    read_rows,
    request_offsets,
    run,
)

pytestmark = pytest.mark.usefixtures("default_engine")

Topics = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3), lake())


def produce(
    kafka: LocalKafka, topic: str, count: int, *, first: int = 0, keyless: bool = True, **settings: object
) -> None:
    """Produce records with and without key, value and headers, round-robin over the partitions."""
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=5, **settings)
    for i in range(first, first + count):
        key = None if keyless and i % 7 == 0 else f"k{i % 50}".encode()
        value = None if i % 11 == 0 and key else (b"" if i % 13 == 0 else f"value {i} ".encode() * (1 + i % 9))
        headers = [("n", str(i).encode()), ("empty", b""), ("n", b"again")] if i % 5 == 0 else None
        producer.send(topic, value, key=key, headers=headers, partition=i % 3, timestamp_ms=1_700_000_000_000 + i)
    producer.close()


@pytest.mark.each_lake
def test_records_of_every_codec_match_a_plain_consumer(project: FeedProject) -> None:
    for i, codec in enumerate((None, "gzip", "snappy", "lz4", "zstd")):
        produce(project.kafka, project.topic, 300, first=i * 300, compression_type=codec)
    feed = project.write_feed()
    landed = run(feed)
    assert landed.batches[0].counts.landed == 1500
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("engine", EngineKind)
def test_run_without_standard_streams_lands(project: FeedProject, engine: EngineKind) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed()
    command = shlex.join([*SLUICE, "run", "orders", "--no-dagster", "--engine", engine])
    subprocess.run(f"{command} <&- >&- 2>&-", shell=True, cwd=project.root, check=True)
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


@pytest.mark.each_lake
@pytest.mark.spark
@pytest.mark.slow
def test_spark_tasks_write_into_the_lake(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed(spark="{master: 'local[2]'}")
    with open_ports(feed) as ports:
        land(feed, ports, CATCH_UP, new_owner("test"), lambda progress: None).check()
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def test_second_run_reads_only_pending_offsets(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed()
    run(feed)
    assert run(feed).batches == ()
    produce(project.kafka, project.topic, 90, first=300)
    assert run(feed).batches[0].plan.offsets == 90
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def test_aborted_and_control_records_are_skipped_and_counted(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 60)
    for i, is_committed in enumerate((True, False, True, False)):
        producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, transactional_id=f"{project.topic}-{i}")
        producer.init_transactions()
        producer.begin_transaction()
        for n in range(20):
            producer.send(project.topic, f"txn {i} {n}".encode(), partition=n % 3)
        producer.flush()
        producer.commit_transaction() if is_committed else producer.abort_transaction()
        producer.close()
    feed = project.write_feed()
    counts = run(feed).batches[0].counts
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)
    assert (counts.landed, counts.aborted, counts.control) == (100, 40, 12)
    dirty = project.write_feed("dirty", isolation="read_uncommitted")
    run(dirty)
    assert read_rows(dirty) == consume_topic(project.kafka, project.topic, committed=False)


def test_batch_ends_before_an_open_transaction(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 30)
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, transactional_id=f"{project.topic}-open")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(project.topic, b"pending", partition=0).get(10)
    produce(project.kafka, project.topic, 30, first=30)
    feed = project.write_feed()
    run(feed)
    before = [r for r in read_rows(feed) if r["partition"] == 0]
    assert len(before) == 10, "nothing beyond the last stable offset"
    producer.commit_transaction()
    producer.close()
    run(feed)
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def test_compacted_topic_with_tombstones_lands(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines
) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": "1048576",
        "min.cleanable.dirty.ratio": "0.001",
        "segment.ms": "100",
        "delete.retention.ms": "86400000",
    }
    topic = fresh_topic(partitions=3, config=config)
    for i in range(5):
        produce(kafka, topic, 150, first=i * 150, keyless=False)
    project = FeedProject(tmp_path, kafka, topic, lake())
    feed = project.write_feed()
    landed = run(feed)
    landed_rows = read_rows(feed)
    assert landed.batches[0].counts.total == landed.batches[0].plan.offsets
    records = {(r["partition"], r["offset"]): r for r in consume_topic(kafka, topic)}
    assert {(r["partition"], r["offset"]) for r in landed_rows} >= set(records), "compaction may have gone on since"
    assert all(records.get((r["partition"], r["offset"]), r) == r for r in landed_rows)


def test_rows_without_records_in_compacted_topic_stay_until_they_are_retired(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines
) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "500",
        "min.cleanable.dirty.ratio": "0.001",
        "max.compaction.lag.ms": "500",
        "delete.retention.ms": "0",
    }
    topic = fresh_topic(partitions=3, config=config | {"segment.ms": "604800000"})
    produce(kafka, topic, 300, keyless=False)
    feed = FeedProject(tmp_path, kafka, topic, lake()).write_feed()
    run(feed)
    before = read_rows(feed)
    assert len(before) == 300
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, config)
        admin.alter_configs([resource])
    _await_compaction(kafka, topic, 0, 100)
    again = replace(request_offsets(topic, 0, 0, 100), replace=True)
    with pytest.raises(BatchIncomplete, match=r"Kafka no longer has \d+ records of it"):
        run(feed, again)
    assert read_rows(feed) == before

    path = next(p for p in list_files(feed) if "-0-0-100-" in p)
    open_lake(feed).remove(path)
    (problem,) = _audit_with_remedies(feed).problems
    assert "bring the file back from a backup; without one: sluice run" in problem.remedy
    with pytest.raises(BatchIncomplete) as refused:
        run(feed, again)
    assert f"sluice accept orders damaged --offsets {topic}:0:0-100 --reason" in refused.value.remedy
    with open_inline_ports(feed) as ports:
        done = accept_damaged(feed, ports, AskedRange(topic, 0, 0, 100), "no backup")
        assert [r.range for r in done.retired] == [Range(0, 100)]
        with pytest.raises(NothingToAccept):
            accept_damaged(feed, ports, AskedRange(topic, 1, 0, 100), "no backup")
    run(feed, again)
    assert _audit_with_remedies(feed).problems == ()
    rows = {r["offset"] for r in read_rows(feed) if r["partition"] == 0}
    records = {r["offset"] for r in consume_topic(kafka, topic) if r["partition"] == 0 and r["offset"] < 100}
    assert records
    assert rows >= records


def _await_compaction(kafka: LocalKafka, topic: str, partition: int, records: int) -> None:
    """Write to the partition until Kafka has fewer than `records` of its first ones."""
    for n in range(300):
        with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            producer.send(topic, b"later", key=b"k%d" % (n % 50), partition=partition).get(10)
        rest = [r for r in consume_topic(kafka, topic) if r["partition"] == partition and r["offset"] < records]
        if len(rest) < records:
            return
        time.sleep(0.2)
    pytest.fail("the topic was not compacted")


def _audit_with_remedies(feed: Feed) -> AuditReport:
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        return choose_remedies(audit(ledger, ports.lake), ledger.read(), ports.cluster)


def test_empty_topic_lands_nothing_and_empty_partitions_are_skipped(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=4), lake())
    feed = project.write_feed()
    assert run(feed).batches == ()
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        producer.send(project.topic, b"one", partition=2).get(10)
    run(feed)
    assert [(r["partition"], r["value"]) for r in read_rows(feed)] == [(2, b"one")]
    assert commit_feed(feed).offsets


def test_tasks_follow_partition_leaders_on_three_brokers(
    tmp_path: Path, kafka3: LocalKafka, fresh_topic: Topics, lake: Lines
) -> None:
    topic = fresh_topic(cluster=kafka3, assignments={0: [1], 1: [2], 2: [3]})
    produce(kafka3, topic, 300)
    feed = FeedProject(tmp_path, kafka3, topic, lake()).write_feed()
    landed = run(feed)
    assert sorted(t.leader for t in landed.batches[0].plan.tasks) == [1, 2, 3]
    assert read_rows(feed) == consume_topic(kafka3, topic)


def test_topics_of_a_pattern_land_in_one_feed(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines
) -> None:
    prefix = secrets.token_hex(4)
    names = [fresh_topic(name=f"{prefix}.{name}") for name in ("x0", "x1", "skip")]
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for name in names:
            producer.send(name, name.encode()).get(10)
    project = FeedProject(tmp_path, kafka, "unused", lake())
    feed = project.write_feed(topics=f"{{include: ['{prefix}\\..*'], exclude: ['.*skip.*']}}")
    run(feed)
    assert {r["value"].decode() for r in read_rows(feed)} == set(names[:2])


def test_ranges_below_the_origin_land_and_beyond_the_end_are_refused(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed(start="latest")
    run(feed)
    run(feed, request_offsets(project.topic, 0, 10, 20))
    run(feed, request_offsets(project.topic, 0, 5, 25))
    assert [r["offset"] for r in read_rows(feed)] == list(range(5, 25))
    with pytest.raises(UsageError, match="beyond the last stable offset"):
        run(feed, request_offsets(project.topic, 0, 90, 1000))
    assert {m.after for m in commit_feed(feed).offsets} == {100}, "a backfill below the origin moves nothing"


@pytest.mark.each_lake
def test_the_same_plan_gives_the_same_files(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300, compression_type="lz4")
    digests = []
    for name in ("one", "two"):
        feed = project.write_feed(name)
        (batch,) = run(feed).batches
        digests.append(sorted((p.rows, p.bytes) for r in batch.receipts for p in r.parts))
    assert digests[0] == digests[1]


def test_preview_changes_nothing_and_matches_the_run(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed()
    with open_inline_ports(feed) as ports:
        previewed = preview(feed, ports, CATCH_UP)
        assert list(ports.lake.list("")) == []
    assert previewed.plan is not None
    assert run(feed).batches[0].plan == previewed.plan


def test_limits_land_a_topic_in_several_runs(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed(limits="{records: 100}")
    sizes = []
    while landed := run(feed).batches:
        sizes.append(landed[0].plan.offsets)
    assert sum(sizes) == 300
    assert max(sizes) <= 102
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def test_deleted_offsets_are_reported_and_accepted_only_by_policy(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed()
    run(feed, request_offsets(project.topic, 0, 0, 10))
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({kafka_client.TopicPartition(project.topic, 0): 40})
    with pytest.raises(Refused, match=r"offsets \[10, 40\) are gone"):
        run(feed)
    assert {r["partition"] for r in read_rows(feed) if r["offset"] >= 10} == {1, 2}, "the others landed"
    accepting = project.write_feed(policies="{on_loss: accept}")
    run(accepting)
    with open_inline_ports(accepting) as ports:
        state = open_feed_ledger(accepting, ports).read()
        key = state.current[TopicPartition(project.topic, 0)]
        assert state.lost[key] == (Range(10, 40),)
        assert state.frontier(key) == 100
        assert explain(open_feed_ledger(accepting, ports), ports.lake, key.tp, 20).class_ is OffsetClass.LOST
        assert audit(open_feed_ledger(accepting, ports), ports.lake).reconciled


@pytest.mark.each_lake
def test_audit_rescan_and_explain_match_landed_records(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300, compression_type="zstd")
    feed = project.write_feed()
    run(feed)
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        report = audit(ledger, ports.lake, hashes=True)
        assert report.reconciled
        current = ledger.read().current
        partitions = {current[p.tp]: p for p in ports.cluster.partitions([project.topic], feed.isolation)}
        full = rescan(
            report,
            ledger,
            ports.lake,
            RAW,
            CurrentLog(KafkaFetcher(feed.kafka, feed.isolation), feed.isolation, partitions),
        )
        assert (full.reconciled, full.compared) == (True, 300)
        explanation = explain(ledger, ports.lake, TopicPartition(project.topic, 1), 42)
        assert (explanation.class_, explanation.row) == (OffsetClass.LANDED, 42)
        assert explain(ledger, ports.lake, TopicPartition(project.topic, 1), 1000).class_ is OffsetClass.PENDING
        assert explain(ledger, ports.lake, TopicPartition("nowhere", 1), 1).class_ is OffsetClass.UNKNOWN_PARTITION


@pytest.mark.each_lake
def test_audit_detects_planted_faults(project: FeedProject) -> None:
    produce(project.kafka, project.topic, 300)
    feed = project.write_feed()
    run(feed)
    lake, part = open_lake(feed), list_files(feed)[0]
    content = lake.get(part)
    assert content is not None

    def find_problems() -> set[int]:
        with open_inline_ports(feed) as ports:
            return {p.invariant for p in audit(open_feed_ledger(feed, ports), ports.lake, hashes=True).problems}

    assert find_problems() == set()
    lake.remove(part)
    assert find_problems() == {1}
    lake.put(part, content[:-1])
    assert find_problems() == {3}
    lake.put(part, content[:50] + b"\x00" + content[51:])
    assert find_problems() == {3}
    lake.put(part, content)
    lake.put(f"{part.rpartition('/')[0]}/stranger.parquet", content)
    assert find_problems() == {10}


def test_unknown_topic_error_suggests_similar_names(project: FeedProject) -> None:
    feed = project.write_feed(topics=project.topic + "x")
    with pytest.raises(UnknownTopic, match=project.topic):
        run(feed)
