"""What the integration tests share: a feed over a real cluster, its edges, and an independent reader.

Most tests run tasks in this process (`Inline`), the same code that Spark's workers run; the tests marked `spark`
use the real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.committing.commit import CommitResult, CommitSettings, commit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Outcome, Owner, TaskTraffic
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.quarantine.dead_letters import Outlet
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from sluice.resources.spark import executor

CATCH_UP = Request(RequestKind.CATCH_UP)


class Inline:
    """Runs tasks in this process, one after the other, by the code that Spark's workers run."""

    def start(self) -> None: ...

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome | TaskTraffic]:
        work = executor.TaskWork.of(job, tasks, tries=1)
        return [executor.sent_in(*row) for row in executor.run(work, range(len(work.queues)))]

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> list[str]:
        return [said for _, said in executor.call(call, range(count))]

    def cancel(self) -> None: ...


def offsets(topic: str, partition: int, start: int, end: int) -> Request:
    return Request(RequestKind.OFFSETS, ranges=(AskedRange(topic, partition, start, end),))


@dataclass
class Place:
    """A project folder with one feed."""

    root: Path
    kafka: LocalKafka
    topic: str
    lake: Mapping[str, str] = field(default_factory=dict)
    """What its feeds say of their lake."""

    def feed(self, name: str = "orders", **settings: Any) -> Feed:
        """The feed, written to a file and read as users' are."""
        path = self.root / "feeds" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        lines = {"topics": self.topic, "start": "earliest", "group": f"g-{self.topic}-{name}", **self.lake} | settings
        text = f"kafka: {{bootstrap: '{self.kafka.bootstrap}'}}\n"
        path.write_text(text + "".join(f"{k}: {v}\n" for k, v in lines.items()))
        return load_feed(path, {})


@contextmanager
def edges(feed: Feed) -> Iterator[Ports]:
    """The feed's real edges, with tasks run in this process."""
    with open_ports(feed) as opened:
        yield replace(opened, engine=Inline())


def run(feed: Feed, request: Request = CATCH_UP, owner: Owner | None = None) -> Landed:
    """Land, and raise what was not landed."""
    with edges(feed) as opened:
        landed = land(feed, opened, request, owner or new_owner("test"), lambda progress: None)
    landed.check()
    return landed


def commit_feed(feed: Feed) -> CommitResult:
    with edges(feed) as opened:
        outlet = Outlet.of(feed, opened.lake)
        return commit(open_ledger(feed, opened), opened.group, settings(feed), outlet, opened.cluster)


def settings(feed: Feed) -> CommitSettings:
    return CommitSettings(feed.commit, feed.transactional_id, feed.policies.on_group_moved)


def ledger(feed: Feed, opened: Ports) -> Ledger:
    return open_ledger(feed, opened)


def rescanned(feed: Feed) -> AuditReport:
    """The feed's account, with what landed compared to what Kafka has today."""
    with edges(feed) as opened:
        book = ledger(feed, opened)
        current = book.read().current
        log = opened.cluster.partitions(sorted({key.topic for key in current}), feed.isolation)
        today = {current[p.tp]: p for p in log}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            report = audit(book, opened.lake)
            return rescan(report, book, opened.lake, feed.shape, CurrentLog(fetcher, feed.isolation, today))
        finally:
            fetcher.close()


def rows(feed: Feed) -> list[dict[str, Any]]:
    """What landed, read by DuckDB, in log order."""
    query = """select key, value, topic, partition, "offset", epoch_ms("timestamp") as timestamp, "timestampType",
        headers from read_parquet($files, hive_partitioning = false) order by topic, partition, "offset" """
    return asked(feed, query, visible(feed)).to_pylist() if visible(feed) else []


def visible(feed: Feed) -> list[str]:
    """The paths of the feed's visible files in its lake."""
    return list(open_lake(feed).list(f"data/{feed.name}"))


def asked(feed: Feed, query: str, paths: Sequence[str]) -> pa.Table:
    """DuckDB's answer to a query over `$files`, which are the files at the paths, brought here where they are not."""
    lake, files = open_lake(feed), []
    with TemporaryDirectory() as folder:
        for path in paths:
            file = Path(lake.locate(path))
            if not file.is_absolute():
                file = Path(folder, path.replace("/", "_"))
                file.write_bytes(lake.get(path) or b"")
            files.append(str(file))
        return duckdb.connect().sql(query, params={"files": files}).to_arrow_table()


def consumed(kafka: LocalKafka, topic: str, *, committed: bool = True) -> list[dict[str, Any]]:
    """The same records as a plain consumer sees them: the independent oracle."""
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
                out += [_row(r) for r in records]
        return sorted(out, key=lambda r: (r["topic"], r["partition"], r["offset"]))
    finally:
        consumer.close()


def _row(r: Any) -> dict[str, Any]:
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
