"""Feeds for tests of public reports: records, or whole logs as on a broker, through the real pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.pipelines.batch.land import land as land_batch
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.records.rows.wire_format import RegisteredSchema
from sluice.resources.liveness import new_owner
from sluice.testing import LandedMessages, Message, land
from sluice.testing.cluster import MemoryCluster, MemoryFetcher, partition
from sluice.testing.engine import MemoryClock, MemoryEngine, MemoryLiveness
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import Log

RAW = "topics: orders\nstart: earliest\n"
JSON = "topics: orders\nstart: earliest\nformat: json\nschema: {%s}\npolicies: {%s}\n"
TP = TopicPartition("orders", 0)
A_DAY_LATER = 1_700_086_400_000


def write_feed(root: Path, text: str = RAW, files: Mapping[str, str] | None = None) -> Path:
    """Write a project with one feed, `orders`, and its files; return the path of the feed."""
    (root / "feeds").mkdir(parents=True, exist_ok=True)
    for name, content in (files or {}).items():
        (root / name).write_text(content)
    path = root / "feeds" / "orders.yaml"
    path.write_text(text)
    return path


def land_values(
    root: Path, feed: str, values: Iterable[bytes | None], lake: Any = None, **files: str
) -> LandedMessages:
    """Land values by the feed's text; `files` are its schemas, by name with `__` for the dot."""
    contents = {name.replace("__", "."): text for name, text in files.items()}
    return land(write_feed(root, feed, contents), map(Message, values), lake=lake, environ={})


def land_json(root: Path, schema: str, *values: bytes | None, policies: str = "") -> LandedMessages:
    return land_values(root, JSON % (schema, policies), values)


def keep_schema(lake: Lake, number: int, kind: str, *texts: str) -> None:
    """Write a schema to the lake, as an earlier run did after a request to the registry."""
    KeptSchemas(lake, "orders").keep(RegisteredSchema(number, kind, texts))


def list_reasons(landed: LandedMessages) -> list[str]:
    return list(landed.quarantined["reason"].to_pylist())


@dataclass
class Topics:
    """Topics in a cluster in memory that change between landings into one lake."""

    root: Path
    text: str = RAW
    logs: dict[TopicPartition, Log] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    """The id of each topic that is not `id-1`."""
    lake: MemoryLake = field(default_factory=MemoryLake)
    group: MemoryGroup = field(default_factory=MemoryGroup)
    now: int = A_DAY_LATER
    answer_bytes: int = 1 << 20

    def land(self) -> LandedMessages:
        feed, ports = self._build_ports()
        result = land_batch(feed, ports, Request(RequestKind.CATCH_UP), new_owner("test"), lambda progress: None)
        result.check()
        return LandedMessages(feed, self.lake, result)

    def accept_event(self, event: AcceptEvent) -> None:
        """Decide as `sluice accept` does."""
        accept_log(*self._build_ports(), event, "a test")

    def _build_ports(self) -> tuple[Feed, Ports]:
        feed = load_feed(write_feed(self.root, self.text), {"KAFKA_BOOTSTRAP": "memory:9092"})
        states = {
            tp: partition(*tp, topic_id=self.ids.get(tp.topic, "id-1"), log_start=log.start)
            for tp, log in self.logs.items()
        }
        return feed, Ports(
            cluster=MemoryCluster(states, logs=self.logs),
            group=self.group,
            lake=self.lake,
            engine=MemoryEngine(self.lake, self._make_fetcher, feed.landing),
            liveness=MemoryLiveness(),
            clock=MemoryClock(self.now),
            wiring=None,
            parallelism=1,
        )

    def _make_fetcher(self) -> MemoryFetcher:
        return MemoryFetcher(self.logs, answer_bytes=self.answer_bytes)


def land_log(root: Path, source: Log, text: str = RAW, answer_bytes: int = 1 << 20) -> LandedMessages:
    """Land a partition's log, with its transactions and gaps, by answers of at most `answer_bytes`."""
    return Topics(root, text, {TP: source}, answer_bytes=answer_bytes).land()
