"""Windows on a real Kafka: for any records and any order of runs, windows tile (invariants 1 to 6 and 9)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch import land as rounds
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import BatchIncomplete, WindowHeld, WindowIncomplete
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Outcome, RangeFailure, TaskTraffic
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.records.shape import RAW
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import (
    CATCH_UP,
    FeedProject,
    InlineEngine,
    commit_feed,
    consume_topic,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    query_files,
    read_rows,
)

HOUR = 3_600_000
START = 1_795_183_200_000
FUTURE = START + 14 * 365 * 24 * HOUR


@dataclass
class FailingEngine(InlineEngine):
    """An engine that fails the offset ranges that `drops` selects."""

    drops: Callable[[OffsetRange], bool]

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        done = super().run(job, tasks)
        outcomes = (o for o in done if not isinstance(o, TaskTraffic))
        return [RangeFailure(o.offset_range, "Failed", "clumsy") if self.drops(o.offset_range) else o for o in outcomes]


@dataclass
class World:
    """A feed with a clock that the test sets."""

    project: FeedProject
    feed: Feed
    now: int = START
    random: random.Random = field(default_factory=random.Random)

    @contextmanager
    def open_ports(self) -> Iterator[Ports]:
        with open_inline_ports(self.feed) as ports:
            yield replace(ports, clock=lambda: self.now)

    def land(
        self,
        request: Request = CATCH_UP,
        drops: Callable[[OffsetRange], bool] = lambda s: False,
        enough: Callable[[], bool] = lambda: False,
    ) -> Landed:
        with self.open_ports() as ports:
            failing_ports = replace(ports, engine=FailingEngine(drops))
            options = LandingOptions(enough=enough)
            return land(self.feed, failing_ports, request, new_owner("test"), lambda progress: None, options)

    def land_window(self, start: int) -> Landed:
        return self.land(Request(RequestKind.WINDOW, window=start))

    def list_windows(self, pending: bool = False) -> list[int]:
        """List the windows that are pinned by name; with `pending`, only those that are not complete."""
        with self.open_ports() as ports:
            state = open_feed_ledger(self.feed, ports).read()
        pinned = windows.list_manifest_windows(state, self.feed.window)
        return [w for w in pinned if not (pending and windows.complete(state, w, self.feed.window))]

    def produce(self, count: int, producer: KafkaProducer | None = None) -> None:
        sender = producer or KafkaProducer(bootstrap_servers=self.project.kafka.bootstrap, linger_ms=2)
        for i in range(count):
            sender.send(self.project.topic, b"%d" % i, partition=self.random.randrange(3), timestamp_ms=self._stamp())
        sender.flush()
        if producer is None:
            sender.close()

    def _stamp(self) -> int:
        """Returns a random timestamp: mostly now, sometimes late, sometimes absurd."""
        delay = self.random.randrange(5 * HOUR)
        return self.random.choice([self.now, self.now - 1000, self.now, self.now - delay, 0, FUTURE])

    @contextmanager
    def open_transaction(self, name: str) -> Iterator[KafkaProducer]:
        producer = KafkaProducer(bootstrap_servers=self.project.kafka.bootstrap, transactional_id=name)
        producer.init_transactions()
        producer.begin_transaction()
        try:
            yield producer
        finally:
            producer.close()


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    unbounded = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3, config=unbounded), lake())


def check(world: World) -> None:
    """Check the invariants that hold once everything has landed."""
    feed = world.feed
    with world.open_ports() as ports:
        ledger = open_feed_ledger(feed, ports)
        state = ledger.read()
        assert read_rows(feed) == consume_topic(world.project.kafka, world.project.topic), "invariants 1 to 3"
        report = audit(ledger, ports.lake, hashes=True)
        partitions = {state.current[p.tp]: p for p in ports.cluster.partitions([world.project.topic], feed.isolation)}
        fetcher = KafkaFetcher(ports.wiring.kafka, feed.isolation)  # type: ignore[attr-defined]
        report = rescan(report, ledger, ports.lake, RAW, CurrentLog(fetcher, feed.isolation, partitions))
        fetcher.close()
        assert report.problems == ()
        in_windows: dict[tuple[int, int], int] = {}
        for key in state.origins:
            at = state.origins[key].offset
            for window in world.list_windows():
                r = windows.find_range(state, key, window, feed.window)
                assert r is not None
                assert r.start == at, "windows tile"
                at = r.end
                in_windows |= {(key.partition, offset): window for offset in range(r.start, r.end)}
        positions: list[dict[str, Any]] = []
        for window in world.list_windows():
            files = manifest.read_window_files(ledger, window, feed.window)
            assert files.complete
            in_files = _read_offsets(feed, [p.path for p in files.parts])
            assert {in_windows[position] for position in in_files} <= {window}, (
                "a window's files hold its rows and no others"
            )
            positions += in_files
        assert (
            len(positions)
            == len(set(positions))
            == sum((r["partition"], r["offset"]) in in_windows for r in read_rows(feed))
        )


def _read_offsets(feed: Feed, paths: Sequence[str]) -> list[tuple[int, int]]:
    if not paths:
        return []
    query = 'select partition, "offset" from read_parquet($files, hive_partitioning = false)'
    return [(r["partition"], r["offset"]) for r in query_files(feed, query, paths).to_pylist()]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 60))
def test_windows_tile_for_many_seeds(project: FeedProject, seed: int) -> None:
    _check_windows_tile(project, seed, "record_time" if seed % 3 == 0 else "window")


def test_windows_tile_through_random_events(project: FeedProject) -> None:
    _check_windows_tile(project, 1, "window")


def test_windows_tile_by_record_time(project: FeedProject) -> None:
    _check_windows_tile(project, 2, "record_time")


def _check_windows_tile(project: FeedProject, seed: int, layout: str) -> None:
    rng = random.Random(seed)
    world = World(project, project.write_feed(window="1h", landing=f"{{layout: {layout}}}"), random=rng)
    world.produce(40)
    for step in range(9):
        world.now += rng.choice([10 * 60_000, HOUR, 3 * HOUR])
        world.produce(rng.randrange(60))
        with world.open_transaction(f"{project.topic}-{step}") as producer:
            world.produce(rng.randrange(1, 20), producer)
            if rng.random() < 0.5:
                _land_at_random(world, rng)  # while the transaction is open
            (producer.commit_transaction if rng.random() < 0.5 else producer.abort_transaction)()
        _land_at_random(world, rng)
        if rng.random() < 0.4:
            commit_feed(world.feed)
    world.now += 2 * HOUR
    last = world.feed.window.last_boundary(world.now) - HOUR
    world.land_window(last).check()
    pending = world.list_windows(pending=True)
    for window in rng.sample(pending, len(pending)):
        world.land_window(window).check()
    assert world.list_windows(pending=True) == []
    world.land().check()
    check(world)
    commit_feed(world.feed)


def _land_at_random(world: World, rng: random.Random) -> None:
    closed = world.list_windows()
    if closed and rng.random() < 0.6:
        world.land_window(rng.choice(closed[-8:]))
    else:
        world.land(drops=lambda s: rng.random() < 0.2)


def test_open_transaction_delays_its_window_only(project: FeedProject) -> None:
    world = World(project, project.write_feed(window="1h"))
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    producer.send(project.topic, b"before", partition=0, timestamp_ms=START + 1).get()
    with world.open_transaction(project.topic) as open_producer:
        open_producer.send(project.topic, b"open", partition=0, timestamp_ms=START + HOUR + 1).get()
        for hour in range(1, 4):
            producer.send(project.topic, b"after", partition=0, timestamp_ms=START + hour * HOUR + 5).get()
        world.now = START + 3 * HOUR + 20 * 60_000
        world.land_window(START).check()
        with pytest.raises(WindowHeld, match=r"kafka-transactions"):
            world.land_window(START + HOUR).check()
        with world.open_ports() as ports:
            files = manifest.read_window_files(open_feed_ledger(world.feed, ports), START + HOUR, world.feed.window)
        with pytest.raises(WindowIncomplete):
            manifest.demand_complete(files, world.feed.name, world.feed.window)
        open_producer.commit_transaction()
    landed = world.land_window(START + HOUR)
    landed.check()
    assert landed.windows == (START + HOUR,)
    world.land_window(START + 2 * HOUR).check()
    assert [r["value"] for r in read_rows(world.feed)] == [b"before", b"open", b"after", b"after"]
    producer.close()


def test_late_records_belong_to_their_arrival_hour(project: FeedProject) -> None:
    world = World(project, project.write_feed(window="1h"), now=START + HOUR + 20 * 60_000)
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    producer.send(project.topic, b"early", partition=0, timestamp_ms=START + 1).get()
    world.land_window(START).check()
    producer.send(project.topic, b"late", partition=0, timestamp_ms=START + 2).get()
    producer.send(project.topic, b"on time", partition=0, timestamp_ms=START + HOUR + 2).get()
    world.now += HOUR
    assert not world.land_window(START).batches, "the hour is unchanged"
    world.land_window(START + HOUR).check()
    assert [p.split("/")[-2] for p in list_files(world.feed)] == ["kafka_window_hour=14", "kafka_window_hour=15"]
    with world.open_ports() as ports:
        explanation = explain(open_feed_ledger(world.feed, ports), ports.lake, TopicPartition(project.topic, 0), 1)
    assert explanation.class_ is OffsetClass.LANDED
    assert "hour=15" in (explanation.path or "")
    producer.close()


def test_a_partial_window_is_finished_by_the_next_run(project: FeedProject) -> None:
    world = World(project, project.write_feed(window="1h"), now=START + HOUR + 20 * 60_000)
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for partition in range(3):
        producer.send(project.topic, b"v", partition=partition, timestamp_ms=START + 1).get()
    producer.close()
    request = Request(RequestKind.WINDOW, window=START)
    first = world.land(request, drops=lambda s: s.partition == 1)
    with pytest.raises(BatchIncomplete):
        first.check()
    assert first.windows == ()
    second = world.land_window(START)
    second.check()
    assert second.windows == (START,)
    assert len(second.batches[0].receipts) == len(first.batches[0].failures), "only pending ranges are read"
    check(world)


def test_outage_is_caught_up_in_batches_oldest_windows_first(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty hours of records, with an open transaction in the last hour, a failing offset range, and a stop."""
    monkeypatch.setattr(rounds, "BATCH_RANGES", 18)
    monkeypatch.setattr(rounds, "RANGES_PER_CORE", 0)
    world = World(project, project.write_feed(start="earliest"), START + 31 * HOUR)
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for n in range(600):
        producer.send(project.topic, b"%d" % n, partition=n % 3, timestamp_ms=START + n * HOUR // 20)
    producer.close()
    with world.open_transaction("left-open") as open_producer:
        open_producer.send(project.topic, b"open", partition=0, timestamp_ms=START + 30 * HOUR - 1).get(10)
        pending = Request(RequestKind.WINDOW, window=START, until=START + 30 * HOUR)
        first = world.land(pending, enough=lambda: True)
        assert (len(first.batches), first.stopped) == (1, True)
        failing: list[OffsetRange] = []
        second = world.land(pending, lambda s: (s in failing or not failing) and failing.append(s) is None)
        assert len(second.batches) > 2
        assert [f.offset_range for f in second.failures] == failing[:1], "the failed range was not tried twice"
        per_batch = [[s.window for s in b.plan.offset_ranges if s.window] for b in (*first.batches, *second.batches)]
        assert all(max(a) <= min(b) for a, b in pairwise(per_batch)), "the oldest first"
        assert len(world.list_windows(pending=True)) <= 2, "the window with the failure, and the held one"
        open_producer.abort_transaction()
    world.land().check()
    assert not world.list_windows(pending=True)
    check(world)
