"""Windows on a real Kafka: whatever is produced, in whatever order windows run, they tile (invariants 1 to 6 and 9)."""

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
from sluice.pipelines.audit.explain_offset import Class, explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch import land as rounds
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import BatchIncomplete, WindowHeld, WindowIncomplete
from sluice.pipelines.feed.feed import Feed
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
from tests.integration.support import CATCH_UP, Inline, Place, asked, commit_feed, consumed, ledger, rows, visible
from tests.integration.support import edges as real_edges

HOUR = 3_600_000
START = 1_795_183_200_000
FUTURE = START + 14 * 365 * 24 * HOUR


@dataclass
class Clumsy(Inline):
    """Fails the offset ranges that `drops` says."""

    drops: Callable[[OffsetRange], bool]

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        done = super().run(job, tasks)
        outcomes = (o for o in done if not isinstance(o, TaskTraffic))
        return [RangeFailure(o.offset_range, "Failed", "clumsy") if self.drops(o.offset_range) else o for o in outcomes]


@dataclass
class World:
    """A feed whose clock we set."""

    place: Place
    feed: Feed
    now: int = START
    random: random.Random = field(default_factory=random.Random)

    @contextmanager
    def edges(self) -> Iterator[Ports]:
        with real_edges(self.feed) as opened:
            yield replace(opened, clock=lambda: self.now)

    def land(
        self,
        request: Request = CATCH_UP,
        drops: Callable[[OffsetRange], bool] = lambda s: False,
        enough: Callable[[], bool] = lambda: False,
    ) -> Landed:
        with self.edges() as opened:
            clumsy = replace(opened, engine=Clumsy(drops))
            options = LandingOptions(enough=enough)
            return land(self.feed, clumsy, request, new_owner("test"), lambda progress: None, options)

    def window(self, start: int) -> Landed:
        return self.land(Request(RequestKind.WINDOW, window=start))

    def closed(self, pending: bool = False) -> list[int]:
        """The windows that are pinned by name; those that are pending alone."""
        with self.edges() as opened:
            state = ledger(self.feed, opened).read()
        found = windows.list_manifest_windows(state, self.feed.window)
        return [w for w in found if not (pending and windows.complete(state, w, self.feed.window))]

    def produce(self, count: int, producer: KafkaProducer | None = None) -> None:
        own = producer or KafkaProducer(bootstrap_servers=self.place.kafka.bootstrap, linger_ms=2)
        for i in range(count):
            own.send(self.place.topic, b"%d" % i, partition=self.random.randrange(3), timestamp_ms=self._stamp())
        own.flush()
        if producer is None:
            own.close()

    def _stamp(self) -> int:
        """Mostly now, some late, some absurd."""
        late = self.random.randrange(5 * HOUR)
        return self.random.choice([self.now, self.now - 1000, self.now, self.now - late, 0, FUTURE])

    @contextmanager
    def transaction(self, name: str) -> Iterator[KafkaProducer]:
        producer = KafkaProducer(bootstrap_servers=self.place.kafka.bootstrap, transactional_id=name)
        producer.init_transactions()
        producer.begin_transaction()
        try:
            yield producer
        finally:
            producer.close()


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    unbounded = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    return Place(tmp_path, kafka, fresh_topic(partitions=3, config=unbounded), lake())


def check(world: World) -> None:
    """What must hold once everything has landed."""
    feed = world.feed
    with world.edges() as opened:
        book = ledger(feed, opened)
        state = book.read()
        assert rows(feed) == consumed(world.place.kafka, world.place.topic), "invariants 1 to 3"
        report = audit(book, opened.lake, hashes=True)
        partitions = {state.current[p.tp]: p for p in opened.cluster.partitions([world.place.topic], feed.isolation)}
        fetcher = KafkaFetcher(opened.wiring.kafka, feed.isolation)  # type: ignore[attr-defined]
        report = rescan(report, book, opened.lake, RAW, CurrentLog(fetcher, feed.isolation, partitions))
        fetcher.close()
        assert report.problems == ()
        in_windows: dict[tuple[int, int], int] = {}
        for key in state.origins:
            at = state.origins[key].offset
            for window in world.closed():
                r = windows.find_range(state, key, window, feed.window)
                assert r is not None
                assert r.start == at, "windows tile"
                at = r.end
                in_windows |= {(key.partition, offset): window for offset in range(r.start, r.end)}
        found: list[dict[str, Any]] = []
        for window in world.closed():
            files = manifest.read_window_files(book, window, feed.window)
            assert files.complete
            mine = _offsets(feed, [p.path for p in files.parts])
            assert {in_windows[spot] for spot in mine} <= {window}, "a window's files hold its rows and no others"
            found += mine
        assert len(found) == len(set(found)) == sum((r["partition"], r["offset"]) in in_windows for r in rows(feed))


def _offsets(feed: Feed, paths: Sequence[str]) -> list[tuple[int, int]]:
    if not paths:
        return []
    query = 'select partition, "offset" from read_parquet($files, hive_partitioning = false)'
    return [(r["partition"], r["offset"]) for r in asked(feed, query, paths).to_pylist()]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 60))
def test_windows_tile_for_many_seeds(place: Place, seed: int) -> None:
    _windows_tile(place, seed, "record_time" if seed % 3 == 0 else "window")


def test_windows_tile_whatever_happens(place: Place) -> None:
    _windows_tile(place, 1, "window")


def test_windows_tile_by_record_time(place: Place) -> None:
    _windows_tile(place, 2, "record_time")


def _windows_tile(place: Place, seed: int, layout: str) -> None:
    chance = random.Random(seed)
    world = World(place, place.feed(window="1h", landing=f"{{layout: {layout}}}"), random=chance)
    world.produce(40)
    for step in range(9):
        world.now += chance.choice([10 * 60_000, HOUR, 3 * HOUR])
        world.produce(chance.randrange(60))
        with world.transaction(f"{place.topic}-{step}") as producer:
            world.produce(chance.randrange(1, 20), producer)
            if chance.random() < 0.5:
                _some_request(world, chance)  # while the transaction is open
            (producer.commit_transaction if chance.random() < 0.5 else producer.abort_transaction)()
        _some_request(world, chance)
        if chance.random() < 0.4:
            commit_feed(world.feed)
    world.now += 2 * HOUR
    last = world.feed.window.last_boundary(world.now) - HOUR
    world.window(last).check()
    pending = world.closed(pending=True)
    for window in chance.sample(pending, len(pending)):
        world.window(window).check()
    assert world.closed(pending=True) == []
    world.land().check()
    check(world)
    commit_feed(world.feed)


def _some_request(world: World, chance: random.Random) -> None:
    closed = world.closed()
    if closed and chance.random() < 0.6:
        world.window(chance.choice(closed[-8:]))
    else:
        world.land(drops=lambda s: chance.random() < 0.2)


def test_an_open_transaction_holds_its_window_and_no_other(place: Place) -> None:
    world = World(place, place.feed(window="1h"))
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    producer.send(place.topic, b"before", partition=0, timestamp_ms=START + 1).get()
    with world.transaction(place.topic) as open_one:
        open_one.send(place.topic, b"open", partition=0, timestamp_ms=START + HOUR + 1).get()
        for hour in range(1, 4):
            producer.send(place.topic, b"after", partition=0, timestamp_ms=START + hour * HOUR + 5).get()
        world.now = START + 3 * HOUR + 20 * 60_000
        world.window(START).check()
        with pytest.raises(WindowHeld, match=r"kafka-transactions"):
            world.window(START + HOUR).check()
        with world.edges() as opened:
            held = manifest.read_window_files(ledger(world.feed, opened), START + HOUR, world.feed.window)
        with pytest.raises(WindowIncomplete):
            manifest.demand_complete(held, world.feed.name)
        open_one.commit_transaction()
    landed = world.window(START + HOUR)
    landed.check()
    assert landed.windows == (START + HOUR,)
    world.window(START + 2 * HOUR).check()
    assert [r["value"] for r in rows(world.feed)] == [b"before", b"open", b"after", b"after"]
    producer.close()


def test_late_records_belong_to_the_hour_they_came_in(place: Place) -> None:
    world = World(place, place.feed(window="1h"), now=START + HOUR + 20 * 60_000)
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    producer.send(place.topic, b"early", partition=0, timestamp_ms=START + 1).get()
    world.window(START).check()
    producer.send(place.topic, b"late", partition=0, timestamp_ms=START + 2).get()
    producer.send(place.topic, b"on time", partition=0, timestamp_ms=START + HOUR + 2).get()
    world.now += HOUR
    assert not world.window(START).batches, "the hour is what it was"
    world.window(START + HOUR).check()
    assert [p.split("/")[-2] for p in visible(world.feed)] == ["kafka_window_hour=14", "kafka_window_hour=15"]
    with world.edges() as opened:
        told = explain(ledger(world.feed, opened), opened.lake, TopicPartition(place.topic, 0), 1)
    assert told.found is Class.LANDED
    assert "hour=15" in (told.path or "")
    producer.close()


def test_a_partial_window_is_finished_by_the_next_run(place: Place) -> None:
    world = World(place, place.feed(window="1h"), now=START + HOUR + 20 * 60_000)
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for partition in range(3):
        producer.send(place.topic, b"v", partition=partition, timestamp_ms=START + 1).get()
    producer.close()
    request = Request(RequestKind.WINDOW, window=START)
    first = world.land(request, drops=lambda s: s.partition == 1)
    with pytest.raises(BatchIncomplete):
        first.check()
    assert first.windows == ()
    second = world.window(START)
    second.check()
    assert second.windows == (START,)
    assert len(second.batches[0].receipts) == len(first.batches[0].failures), "only what was pending is read"
    check(world)


def test_an_outage_is_caught_up_in_batches_the_oldest_windows_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty hours of records, an open transaction in the last one, an offset range that fails on the way, and a
    stop.
    """
    monkeypatch.setattr(rounds, "BATCH_RANGES", 18)
    monkeypatch.setattr(rounds, "RANGES_PER_CORE", 0)
    world = World(place, place.feed(start="earliest"), START + 31 * HOUR)
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for n in range(600):
        producer.send(place.topic, b"%d" % n, partition=n % 3, timestamp_ms=START + n * HOUR // 20)
    producer.close()
    with world.transaction("left-open") as open_:
        open_.send(place.topic, b"open", partition=0, timestamp_ms=START + 30 * HOUR - 1).get(10)
        pending = Request(RequestKind.WINDOW, window=START, until=START + 30 * HOUR)
        first = world.land(pending, enough=lambda: True)
        assert (len(first.batches), first.stopped) == (1, True)
        failing: list[OffsetRange] = []
        second = world.land(pending, lambda s: (s in failing or not failing) and failing.append(s) is None)
        assert len(second.batches) > 2
        assert [f.offset_range for f in second.failures] == failing[:1], "what failed was not tried twice"
        per_batch = [[s.window for s in b.plan.offset_ranges if s.window] for b in (*first.batches, *second.batches)]
        assert all(max(a) <= min(b) for a, b in pairwise(per_batch)), "the oldest first"
        assert len(world.closed(pending=True)) <= 2, "the window with the failure, and the held one"
        open_.abort_transaction()
    world.land().check()
    assert not world.closed(pending=True)
    check(world)
