"""Helpers of the integration tests: a feed over a real cluster, its ports, and an independent reader.

Most tests run tasks in this process (`InlineEngine`) by the code that Spark's workers run; the tests marked `spark`
use the real engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.committing.commit import CommitResult, CommitSettings, commit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.maintenance.replay import Replayed, replay
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import EngineKind, EngineUse, Outcome, Owner, TaskTraffic
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.quarantine.dead_letters import Outlet
from sluice.pipelines.quarantine.listing import Filter
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from sluice.resources.spark import executor

SLUICE = (sys.executable, "-c", "import sys; from sluice.cli.entry import main; sys.exit(main())")
"""The command, in the environment of the tests."""
CATCH_UP = Request(RequestKind.CATCH_UP)


class InlineEngine:
    """An engine that runs tasks in this process, one after another, by the code that Spark's workers run."""

    def start(self) -> None: ...

    def describe(self) -> EngineUse:
        return EngineUse(EngineKind.PROCESSES)

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome | TaskTraffic]:
        work = executor.TaskWork.of(job, tasks, tries=1)
        return [executor.sent_in(*row) for row in executor.run(work, range(len(work.queues)))]

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> list[str]:
        return [reply for _, reply in executor.call(call, range(count))]

    def cancel(self) -> None: ...


def request_offsets(topic: str, partition: int, start: int, end: int) -> Request:
    return Request(RequestKind.OFFSETS, ranges=(AskedRange(topic, partition, start, end),))


@dataclass
class FeedProject:
    """A project folder with one feed."""

    root: Path
    kafka: LocalKafka
    topic: str
    lake: Mapping[str, str] = field(default_factory=dict)
    """The lines about the lake in its feed files."""

    def write_feed(self, name: str = "orders", **settings: Any) -> Feed:
        """Write the feed file, and load it as a user's feed is loaded."""
        path = self.root / "feeds" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        lines = {"topics": self.topic, "start": "earliest", "group": f"g-{self.topic}-{name}", **self.lake} | settings
        text = f"kafka: {{bootstrap: '{self.kafka.bootstrap}'}}\n"
        path.write_text(text + "".join(f"{k}: {v}\n" for k, v in lines.items()))
        return load_feed(path, {})


def produce_values(project: FeedProject, count: int) -> None:
    """Write `value 0` and so on, in turn to the first two partitions."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(project.topic, f"value {i}".encode(), partition=i % 2)
    producer.close()


def produce_numbers(project: FeedProject, numbers: range, hour: int) -> None:
    """Write objects with these numbers in turn to two partitions; every tenth one does not fit."""
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in numbers:
            value = b'{"id": %d}' % i if i % 10 else b'{"id": "no"}'
            producer.send(project.topic, value, b"%d" % i, partition=i % 2, timestamp_ms=hour + i)


def fetch_committed(kafka: LocalKafka, group: str, topic: str, partitions: int = 2) -> list[int | None]:
    """Fetch the group's committed offsets with a plain consumer, after waiting for open transactions."""
    settings = {"group_id": group, "isolation_level": "read_committed", "enable_auto_commit": False}
    with closing(KafkaConsumer(bootstrap_servers=kafka.bootstrap, **settings)) as consumer:
        return [consumer.committed(TopicPartition(topic, p)) for p in range(partitions)]


@contextmanager
def open_inline_ports(feed: Feed) -> Iterator[Ports]:
    """Open the feed's real ports, with an engine that runs tasks in this process."""
    with open_ports(feed) as ports:
        yield replace(ports, engine=InlineEngine())


def run(feed: Feed, request: Request = CATCH_UP, owner: Owner | None = None) -> Landed:
    """Land the feed, and raise if anything failed to land."""
    with open_inline_ports(feed) as ports:
        landed = land(feed, ports, request, owner or new_owner("test"), lambda progress: None)
    landed.check()
    return landed


def replay_feed(feed: Feed) -> Replayed:
    with open_inline_ports(feed) as ports:
        return replay(feed, ports, Filter(), None, new_owner("replay"), lambda progress: None)


def commit_feed(feed: Feed) -> CommitResult:
    with open_inline_ports(feed) as ports:
        outlet = Outlet.of(feed, ports.lake)
        return commit(open_ledger(feed, ports), ports.group, build_commit_settings(feed), outlet, ports.cluster)


def build_commit_settings(feed: Feed) -> CommitSettings:
    return CommitSettings(feed.commit, feed.transactional_id, feed.policies.on_group_moved)


def open_feed_ledger(feed: Feed, ports: Ports) -> Ledger:
    return open_ledger(feed, ports)


def rescan_feed(feed: Feed) -> AuditReport:
    """Audit the feed, and compare the landed rows with the records in Kafka."""
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        current = ledger.read().current
        log = ports.cluster.partitions(sorted({key.topic for key in current}), feed.isolation)
        partitions = {current[p.tp]: p for p in log}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            report = audit(ledger, ports.lake)
            return rescan(report, ledger, ports.lake, feed.shape, CurrentLog(fetcher, feed.isolation, partitions))
        finally:
            fetcher.close()


def read_rows(feed: Feed) -> list[dict[str, Any]]:
    """Read the landed rows with DuckDB, in log order."""
    query = """select key, value, topic, partition, "offset", epoch_ms("timestamp") as timestamp, "timestampType",
        headers from read_parquet($files, hive_partitioning = false) order by topic, partition, "offset" """
    return query_files(feed, query, list_files(feed)).to_pylist() if list_files(feed) else []


def list_files(feed: Feed) -> list[str]:
    """List the paths of the feed's visible files in its lake."""
    return list(open_lake(feed).list(f"data/{feed.name}"))


def query_files(feed: Feed, query: str, paths: Sequence[str]) -> pa.Table:
    """Run a DuckDB query over `$files`, the files at the paths; files in a remote lake are downloaded first."""
    lake, files = open_lake(feed), []
    with TemporaryDirectory() as folder:
        for path in paths:
            file = Path(lake.locate(path))
            if not file.is_absolute():
                file = Path(folder, path.replace("/", "_"))
                file.write_bytes(lake.get(path) or b"")
            files.append(str(file))
        return duckdb.connect().sql(query, params={"files": files}).to_arrow_table()


def consume_topic(kafka: LocalKafka, topic: str, *, committed: bool = True) -> list[dict[str, Any]]:
    """Read the topic with a plain consumer: the independent oracle."""
    consumer = KafkaConsumer(
        bootstrap_servers=kafka.bootstrap,
        isolation_level="read_committed" if committed else "read_uncommitted",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        group_id=None,
    )
    try:
        tps = [TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic) or ())]
        consumer.assign(tps)
        ends = consumer.end_offsets(tps)
        for tp in tps:
            consumer.seek_to_beginning(tp)
        out = []
        while any(consumer.position(tp) < ends[tp] for tp in tps):
            for records in consumer.poll(timeout_ms=500).values():
                out += [_build_row(r) for r in records]
        return sorted(out, key=lambda r: (r["topic"], r["partition"], r["offset"]))
    finally:
        consumer.close()


def _build_row(r: Any) -> dict[str, Any]:
    return {
        "key": r.key,
        "value": r.value,
        "topic": r.topic,
        "partition": r.partition,
        "offset": r.offset,
        "timestamp": r.timestamp,
        "timestampType": r.timestamp_type,
        "headers": [{"key": k, "value": v} for k, v in r.headers] if r.headers else None,
    }
