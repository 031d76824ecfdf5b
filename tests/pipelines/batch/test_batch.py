"""All stages over logs in memory: with any records, failures and order of requests, windows tile and the audit
reconciles (invariants 1 to 6).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.pipelines.audit.audit import audit, list_live_receipts
from sluice.pipelines.batch import land as rounds
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Landed, Skip
from sluice.pipelines.errors import (
    BatchIncomplete,
    LogTruncated,
    OffsetsLost,
    Refused,
    UsageError,
    WindowHeld,
    WindowIncomplete,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import OnLoss, parse_start
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.ledger.entries import AcceptEntry, Entering, OriginItem, PlanEntry
from sluice.pipelines.model.kafka import (
    CommittedOffset,
    Configs,
    Isolation,
    Key,
    OffsetAtTime,
    PartitionState,
    Range,
    TopicConfig,
    TopicPartition,
)
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Outcome, Progress, RangeFailure, Reporter, TaskTraffic
from sluice.pipelines.operating.feed_status import watch
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.origins import Refusal
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.util.units import show_window
from sluice.running import FeedRun, RunResult
from sluice.testing.cluster import MemoryCluster, MemoryFetcher, partition
from sluice.testing.engine import MemoryEngine, MemoryLiveness, owner
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import ABORT, COMMIT, Log, LogBatch, LogRecord, log
from tests.examples import scale_examples

HOUR = 3_600_000
START = 400_000 * HOUR
PARTITIONS = [TopicPartition("orders", 0), TopicPartition("orders", 1)]


@dataclass
class Topic(MemoryCluster):
    """Two partitions of batches; open transactions lie above the last stable offset."""

    batches: dict[TopicPartition, list[LogBatch]] = field(default_factory=lambda: {tp: [] for tp in PARTITIONS})
    open_at: dict[TopicPartition, int] = field(default_factory=dict)
    log_start: int = 0
    topic_id: str = "id-1"
    broken: set[tuple[TopicPartition, int]] = field(default_factory=set)
    """Batches, by their base offset, that do not match their CRC."""
    takes_markers: bool = False
    """Look-ups by time count markers as records, as Kafka's own do: our adapters must not."""

    def log(self, tp: TopicPartition) -> Log:
        return log(*self.batches[tp])

    def make_fetcher(self) -> MemoryFetcher:
        return MemoryFetcher({tp: self._as_read(tp) for tp in PARTITIONS})

    def _as_read(self, tp: TopicPartition) -> Log:
        source = self.log(tp)
        flipped = (
            replace(b, data=b.data[:-1] + bytes([b.data[-1] ^ 1])) if (tp, b.base) in self.broken else b
            for b in source.batches
        )
        return replace(source, batches=tuple(flipped))

    def write(self, tp: TopicPartition, stamps: Sequence[int], transactional: bool) -> None:
        if transactional:
            self.open_at.setdefault(tp, self.log(tp).end)
        records = tuple(LogRecord(b"k", b"v%d" % i, time) for i, time in enumerate(stamps))
        self.batches[tp].append(LogBatch(records, producer=7 if transactional else -1, transactional=transactional))

    def end_transaction(self, tp: TopicPartition, marker: int, now: int) -> None:
        """End the transaction with a marker that has the broker's time."""
        if self.open_at.pop(tp, None) is not None:
            self.batches[tp].append(LogBatch((LogRecord(time=now),), producer=7, marker=marker))

    def topics(self) -> Mapping[str, str]:
        return {"orders": self.topic_id}

    def known(self) -> Iterable[TopicPartition]:
        return PARTITIONS

    def state(self, tp: TopicPartition) -> PartitionState:
        end = self.log(tp).end
        stable = self.open_at.get(tp, end)
        return partition(
            tp.topic,
            tp.partition,
            topic_id=self.topic_id,
            log_start=min(self.log_start, end),
            last_stable_offset=stable,
            high_watermark=end,
        )

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        stamps = self.log(tp).stamps(markers=self.takes_markers)
        return next((OffsetAtTime(o, t) for o, t in stamps if t >= time), None)


@dataclass
class Dropping(MemoryEngine):
    """Drops the outcomes of some offset ranges."""

    drops: frozenset[int] = frozenset()

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        done = enumerate(super().run(job, tasks))
        return [RangeFailure(o.offset_range, "Failed", "made to") if i in self.drops else o for i, o in done]


class World:
    def __init__(self, feed: Feed) -> None:
        self.feed, self.topic, self.lake, self.now, self.runs = feed, Topic(), MemoryLake(), START, 0
        self.liveness, self.group = MemoryLiveness(), MemoryGroup()

    def land(
        self,
        request: Request,
        drops: frozenset[int] = frozenset(),
        skip: Skip | None = None,
        report: Reporter = lambda progress: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Landed:
        self.runs += 1
        ports = self.make_ports(drops)
        try:
            options = LandingOptions(skip=skip, enough=enough)
            done = land(self.feed, ports, request, owner(f"token-{self.runs}"), report, options)
            assert manifest.write_manifests(self.ledger, self.lake, "orders", self.feed.window, everywhere=True) == ()  # type: ignore[arg-type]
            return done
        finally:
            self.liveness.dead.add(f"token-{self.runs}")

    def make_ports(self, drops: frozenset[int] = frozenset()) -> Ports:
        engine = Dropping(self.lake, self.topic.make_fetcher, self.feed.landing, drops=drops)
        tasks = 1 if self.feed.landing.shared_files else 2  # offset ranges of one task share files
        outside = self.topic, self.group, self.lake, engine, self.liveness, lambda: self.now, None
        return Ports(*outside, parallelism=tasks)  # type: ignore[arg-type]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", lambda: self.now, "test", self.topic.id)  # type: ignore[arg-type]

    def list_windows(self, pending: bool = False) -> list[int]:
        state = self.ledger.read()
        manifest_windows = windows.list_manifest_windows(state, self.feed.window)
        return [w for w in manifest_windows if not (pending and windows.complete(state, w, self.feed.window))]

    def read_rows(self, paths: Iterable[str]) -> list[tuple[int, int]]:
        tables = [pq.read_table(self.lake.open(p), columns=["partition", "offset"]).to_pydict() for p in paths]
        return [spot for t in tables for spot in zip(t["partition"], t["offset"], strict=True)]


stamps = st.lists(
    st.one_of(st.integers(-2 * HOUR, 0), st.sampled_from([0, 10 * 365 * 24 * HOUR, -START, -START - 1])), max_size=6
)
steps = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PARTITIONS), stamps.filter(bool), st.booleans()),
    st.tuples(st.just("end"), st.sampled_from(PARTITIONS), st.sampled_from([ABORT, COMMIT])),
    st.tuples(st.just("pass"), st.sampled_from([60_000, HOUR, 5 * HOUR])),
    st.tuples(st.just("catch up"), st.frozensets(st.integers(0, 4), max_size=2)),
    st.tuples(st.just("window"), st.integers(0, 9), st.frozensets(st.integers(0, 4), max_size=1)),
    st.tuples(
        st.just("offsets"),
        st.sampled_from(PARTITIONS),
        st.integers(0, 10),
        st.integers(1, 10),
        st.booleans(),
        st.frozensets(st.integers(0, 4), max_size=1),
    ),
)


def apply_step(world: World, step: tuple[Any, ...]) -> None:
    match step:
        case "write", tp, ages, transactional:
            world.topic.write(tp, [max(world.now + age, -1) for age in ages], transactional)
        case "end", tp, marker:
            world.topic.end_transaction(tp, marker, world.now)
        case "pass", time:
            world.now += time
        case "catch up", drops:
            world.land(Request(RequestKind.CATCH_UP), drops)
        case "window", back, drops:
            if closed := world.list_windows():
                world.land(Request(RequestKind.WINDOW, window=closed[-1 - back % len(closed)]), drops)
        case "offsets", tp, start, span, again, drops:
            (state,) = (s for s in world.topic.partitions(["orders"], Isolation.READ_COMMITTED) if s.tp == tp)
            if start + span <= state.last_stable_offset:
                ranges = (AskedRange(tp.topic, tp.partition, start, start + span),)
                world.land(Request(RequestKind.OFFSETS, ranges=ranges, replace=again), drops)


@pytest.fixture(scope="module", params=["window", "record_time", "window, shared_files: true"])
def feed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Feed:
    path: Path = tmp_path_factory.mktemp("feeds") / "orders.yaml"
    path.write_text(
        f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: earliest\nlanding: {{layout: {request.param}}}\n"
    )
    return load_feed(path, {})


@settings(max_examples=scale_examples(25))
@example(
    script=[
        ("write", PARTITIONS[0], [-1, 0], False),
        ("offsets", PARTITIONS[0], 0, 1, False, frozenset()),
        ("catch up", frozenset([0])),
    ],
    order=random.Random(0),
)
@example(
    script=[
        ("write", PARTITIONS[0], [-1, -1, -1], False),
        ("offsets", PARTITIONS[0], 0, 2, False, frozenset()),
        ("offsets", PARTITIONS[0], 1, 2, True, frozenset({0})),
    ],
    order=random.Random(0),
)
@given(script=st.lists(steps, min_size=3, max_size=14), order=st.randoms())
def test_windows_tile_through_random_events(feed: Feed, script: list[tuple[Any, ...]], order: Any) -> None:
    world = World(feed)
    for step in script:
        apply_step(world, step)
    for tp in PARTITIONS:
        world.topic.end_transaction(tp, COMMIT, world.now)
    world.now += 2 * HOUR
    world.land(Request(RequestKind.OFFSETS, ranges=()))  # pins the boundaries that have passed, lands no records
    pending = world.list_windows(pending=True)
    order.shuffle(pending)
    for window in pending:
        world.land(Request(RequestKind.WINDOW, window=window)).check()
    assert world.list_windows(pending=True) == []
    world.land(Request(RequestKind.CATCH_UP)).check()
    check(world)


def check(world: World) -> None:
    ledger, state = world.ledger, world.ledger.read()
    assert audit(ledger, world.lake, hashes=True).problems == ()  # type: ignore[arg-type]
    landed = world.read_rows(world.lake.list("data/orders"))
    visible = [(tp.partition, r["offset"]) for tp in PARTITIONS for r in _list_visible(world, tp)]
    assert sorted(landed) == sorted(visible), "each record that can be seen, once"
    for key in state.origins:
        _check_tiling(world, key)
    for window in world.list_windows():
        files = manifest.read_window_files(ledger, window, world.feed.window)
        assert files.complete
        spans = {k.partition: windows.find_range(state, k, window, world.feed.window) for k in state.origins}
        inside = [(p, o) for p, o in visible if (r := spans[p]) is not None and r.start <= o < r.end]
        assert sorted(world.read_rows({p.path for p in files.parts})) == sorted(inside)


def _list_visible(world: World, tp: TopicPartition) -> list[dict[str, Any]]:
    source = world.topic.log(tp)
    return source.visible(0, source.end)


def _check_tiling(world: World, key: Key) -> None:
    state, expected_start = world.ledger.read(), world.ledger.read().origins[key].offset
    for window in world.list_windows():
        span = windows.find_range(state, key, window, world.feed.window)
        assert span is not None
        assert (span.start, span.end >= expected_start) == (expected_start, True)
        expected_start = span.end


def test_range_is_cut_at_window_boundaries(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + HOUR, START + HOUR + 5, START + 2 * HOUR], False)
    world.now = START + 3 * HOUR
    (batch,) = world.land(Request(RequestKind.CATCH_UP)).batches
    cut = sorted((s.start, s.end, s.window) for s in batch.plan.offset_ranges)
    assert cut == [(0, 1, START), (1, 3, START + HOUR), (3, 4, START + 2 * HOUR)]
    by_time = feed.landing.layout == "record_time"
    window = {None if by_time else s.window for s in batch.plan.offset_ranges}
    assert {s.folder for s in batch.plan.offset_ranges} == {paths.window_folder(w, HOUR, paths.PREFIX) for w in window}


def test_run_delayed_after_its_survey_pins_no_outdated_boundary(feed: Feed) -> None:
    """Its log end is older than the boundary: records of the hour would be in the next one (invariant 16)."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + HOUR // 2], False)
    world.now = START + HOUR // 2
    world.land(Request(RequestKind.CATCH_UP)).check()
    ends, slept = world.topic.epoch_ends, []

    def sleep(epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        if not slept:  # the first request after the ends of the logs
            slept.append(True)
            world.topic.write(PARTITIONS[0], [START + HOUR - 2, START + HOUR - 1, START + HOUR], False)
            world.now = START + 2 * HOUR - 1
        return ends(epochs)

    world.topic.epoch_ends = sleep  # type: ignore[method-assign]
    world.land(Request(RequestKind.CATCH_UP)).check()
    world.land(Request(RequestKind.CATCH_UP)).check()
    (first,) = (k for k in world.ledger.read().origins if k.partition == 0)
    assert windows.find_range(world.ledger.read(), first, START, feed.window) == Range(0, 4)
    check(world)


def test_positions_from_before_a_window_closed_are_requested_again(feed: Feed) -> None:
    """Feeds share them for seconds: with a short grace period, records of the hour would be in the next one."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START], False)
    world.land(Request(RequestKind.CATCH_UP)).check()
    positions = world.topic.partitions(("orders",), Isolation.READ_COMMITTED)
    world.topic.write(PARTITIONS[0], [START + HOUR - 1, START + HOUR], False)
    world.now, ask, forgotten = START + HOUR + feed.window.grace + 3000, world.topic.partitions, []

    def share(topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        return ask(topics, isolation) if forgotten else positions

    world.topic.get_age = lambda: 0 if forgotten else 5000  # type: ignore[method-assign]
    world.topic.forget = lambda: forgotten.append(True)  # type: ignore[method-assign]
    world.topic.partitions = share  # type: ignore[method-assign]
    world.land(Request(RequestKind.WINDOW, window=START)).check()
    assert read_landed(world) == [(0, 0), (0, 1)]
    (first,) = (k for k in world.ledger.read().origins if k.partition == 0)
    assert windows.find_range(world.ledger.read(), first, START, feed.window) == Range(0, 2)


def test_window_of_a_deleted_partition_is_reported(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[1], [START], False)
    world.land(Request(RequestKind.CATCH_UP)).check()
    world.topic.known = lambda: PARTITIONS[:1]  # type: ignore[method-assign]
    world.now = START + HOUR + feed.window.grace
    assert [f.about for f in watch(world.make_ports(), feed, world.ledger).findings] == ["absent orders"]
    landed = world.land(Request(RequestKind.WINDOW, window=START))
    result = RunResult("orders", "run", landed=landed)
    with pytest.raises(WindowIncomplete, match=r"has no end in orders:1, .* Kafka did not list it"):
        FeedRun(feed, world.make_ports(), world.ledger, "run", lambda progress: None, result).check([START])


def request_offsets(start: int, end: int, again: bool = False) -> Request:
    return Request(RequestKind.OFFSETS, (AskedRange("orders", 0, start, end),), replace=again)


def read_landed(world: World) -> list[tuple[int, int]]:
    return sorted(world.read_rows(world.lake.list("data/orders")))


def test_landing_again_replaces_whole_ranges_once(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START + i for i in range(10)], False)
    world.land(request_offsets(0, 4)).check()
    world.land(request_offsets(4, 8)).check()
    before = set(world.lake.list("data/orders"))
    landed = world.land(request_offsets(2, 5, again=True))
    assert [(s.start, s.end) for b in landed.batches for s in b.plan.offset_ranges] == [(0, 8)]
    assert not before & set(world.lake.list("data/orders"))
    assert read_landed(world) == [(0, o) for o in range(8)]
    world.land(Request(RequestKind.CATCH_UP)).check()
    check(world)


def test_ranges_without_rows_are_landed_again_once(feed: Feed) -> None:
    """Its offset ranges have no parts that a plan could replace, so both receipts would have counted."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START], True)
    world.topic.end_transaction(PARTITIONS[0], ABORT, world.now)
    world.land(request_offsets(0, 2)).check()
    world.land(request_offsets(0, 2, again=True)).check()
    assert len(list(list_live_receipts(world.ledger, world.ledger.read()))) == 1
    check(world)


def test_partly_failed_replacement_changes_nothing_and_can_be_repeated(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + HOUR], False)
    world.now = START + 2 * HOUR
    world.land(request_offsets(0, 2)).check()
    before = {p: world.lake.files[p] for p in world.lake.list("data/orders")}
    with pytest.raises(BatchIncomplete, match="nothing was published"):
        world.land(request_offsets(0, 2, again=True), drops=frozenset({1})).check()
    assert {p: world.lake.files[p] for p in world.lake.list("data/orders")} == before
    landed = world.land(request_offsets(0, 2, again=True))
    landed.check()
    (batch,) = landed.batches
    assert batch.adopted_offset_ranges == 2
    assert not before.keys() & set(world.lake.list("data/orders"))
    check(world)


def test_records_deleted_from_kafka_are_not_landed_again(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + 1, START + 2], False)
    world.land(request_offsets(0, 3)).check()
    world.topic.log_start = 1
    landed = world.land(request_offsets(1, 3, again=True))
    assert landed.batches == ()
    with pytest.raises(OffsetsLost, match="cannot be landed again"):
        landed.check()
    assert read_landed(world) == [(0, 0), (0, 1), (0, 2)]


def test_catching_up_cannot_replace(feed: Feed) -> None:
    world = World(feed)
    with pytest.raises(UsageError, match="without a range"):
        world.land(Request(RequestKind.CATCH_UP, replace=True))


def test_feed_without_a_start_is_refused(feed: Feed) -> None:
    """`start: fail` accepts only committed offsets; it names partitions without one, and pins no origin."""
    world = World(feed.model_copy(update={"start": parse_start("fail")}))
    for tp in PARTITIONS:
        world.topic.write(tp, [START, START + 1], False)
    world.group.offsets[PARTITIONS[0]] = CommittedOffset(1)
    with pytest.raises(UsageError, match=r"no committed offset for orders:1 and start is `fail`"):
        world.land(Request(RequestKind.CATCH_UP))
    assert not world.ledger.read().origins
    world.group.offsets[PARTITIONS[1]] = CommittedOffset(2)
    world.land(Request(RequestKind.CATCH_UP)).check()
    assert read_landed(world) == [(0, 1)]


def begin_at_end(feed: Feed) -> World:
    """Returns six hours of records and a feed that began after them."""
    world = World(feed.model_copy(update={"start": parse_start("latest")}))
    for tp in PARTITIONS:
        world.topic.write(tp, [START + h * HOUR + i for h in range(6) for i in range(2)], False)
    world.now = START + 6 * HOUR
    world.land(Request(RequestKind.CATCH_UP)).check()
    assert read_landed(world) == []
    return world


def test_windows_below_the_origin_are_backfilled_in_any_order_and_tile(feed: Feed) -> None:
    world = begin_at_end(feed)
    frontiers = world.ledger.read().frontiers()
    first = world.ledger.read().first_window
    for hour in (4, 2, 3):
        landed = world.land(Request(RequestKind.WINDOW, window=START + hour * HOUR))
        landed.check()
        assert landed.windows == (START + hour * HOUR,)
    assert read_landed(world) == [(p, o) for p in (0, 1) for o in range(4, 10)]
    state = world.ledger.read()
    assert (state.frontiers(), state.first_window) == (frontiers, first)
    assert windows.list_pending_windows(state, world.feed.window, world.now + 2 * HOUR) != [], (
        "the offsets before are not pending"
    )
    assert all(w >= (first or 0) for w in windows.list_pending_windows(state, world.feed.window, world.now + 2 * HOUR))
    assert windows.complete(state, START + 4 * HOUR, world.feed.window)
    assert not windows.complete(state, START + 5 * HOUR, world.feed.window)


def test_several_windows_below_the_origin_are_one_batch(feed: Feed) -> None:
    world = begin_at_end(feed)
    landed = world.land(Request(RequestKind.WINDOW, window=START + HOUR, until=START + 5 * HOUR))
    landed.check()
    (batch,) = landed.batches
    assert {s.window for s in batch.plan.offset_ranges} == {START + h * HOUR for h in (1, 2, 3, 4)}
    assert landed.windows == tuple(START + h * HOUR for h in (1, 2, 3, 4))


def test_window_older_than_the_log_is_refused_without_writes(feed: Feed) -> None:
    world = begin_at_end(feed)
    before = dict(world.lake.files)
    with pytest.raises(UsageError, match="holds no record of window") as error:
        world.land(Request(RequestKind.WINDOW, window=START - 3 * HOUR))
    assert show_window(START) in error.value.remedy
    assert world.lake.files == before


@pytest.mark.parametrize("deleted", [0, 1])
def test_the_last_closed_window_of_a_new_topic_is_empty_if_nothing_was_deleted(feed: Feed, deleted: int) -> None:
    """A schedule requests it on its first tick: all records of the topic are in the window that is still open."""
    world = World(feed)
    for tp in PARTITIONS:
        world.topic.write(tp, [START + HOUR + i for i in range(3)], False)
    world.topic.log_start = deleted
    world.now = START + HOUR + HOUR // 6
    first = Request(RequestKind.WINDOW, window=START)
    if deleted:
        with pytest.raises(UsageError, match="holds no record of window"):
            world.land(first)
        return
    landed = world.land(first)
    landed.check()
    assert (landed.batches, read_landed(world)) == ((), [])
    assert windows.complete(world.ledger.read(), START, world.feed.window)
    with pytest.raises(UsageError, match="holds no record of window"):
        world.land(Request(RequestKind.WINDOW, window=START - HOUR))
    world.now = START + 2 * HOUR + HOUR // 6
    assert windows.list_pending_windows(world.ledger.read(), world.feed.window, world.now) == [START + HOUR]
    world.land(Request(RequestKind.WINDOW, window=START + HOUR)).check()
    assert read_landed(world) == [(p, o) for p in (0, 1) for o in range(3)]
    check(world)


def test_skipped_offsets_are_read_only_on_request(feed: Feed) -> None:
    world = World(feed)
    for tp in PARTITIONS:
        world.topic.write(tp, [START + i * HOUR for i in range(4)], False)
    world.now = START + 5 * HOUR
    skip = Skip(START + 2 * HOUR, "too old")
    landed = world.land(Request(RequestKind.CATCH_UP, only=(PARTITIONS[0],)), skip=skip)
    assert [(s.key.tp, s.range) for s in landed.skipped] == [(PARTITIONS[0], Range(0, 2))]
    assert read_landed(world) == [(0, 2), (0, 3)]
    world.land(Request(RequestKind.CATCH_UP)).check()
    world.land(Request(RequestKind.WINDOW, window=START)).check()
    assert (0, 0) not in read_landed(world)
    world.land(request_offsets(0, 1)).check()
    assert (0, 0) in read_landed(world)
    state = world.ledger.read()
    assert [ranges for ranges in state.skipped.values() if ranges] == [(Range(1, 2),)]
    assert audit(world.ledger, world.lake).problems == ()  # type: ignore[arg-type]


def test_skipping_to_the_end_leaves_nothing_pending(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    landed = world.land(Request(RequestKind.CATCH_UP), skip=Skip(None, "not wanted"))
    assert landed.batches == ()
    assert landed.frontiers[next(k for k in landed.frontiers if k.partition == 0)] == 2


def test_remainder_beyond_limits_is_reported(feed: Feed) -> None:
    limited = feed.model_copy(update={"limits": feed.limits.model_copy(update={"records": 3})})
    world = World(limited)
    world.topic.write(PARTITIONS[0], [START + i for i in range(8)], False)
    assert [world.land(request_offsets(0, 8)).left for _ in range(3)] == [5, 2, 0]
    with pytest.raises(UsageError, match="replaced only as a whole"):
        world.land(request_offsets(0, 8, again=True))


# -- long catch-ups


@pytest.fixture
def outage(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> World:
    """Twelve hours with two records each in both partitions, and batches of few offset ranges."""
    monkeypatch.setattr(rounds, "BATCH_RANGES", 6)
    world = World(feed)
    for tp in PARTITIONS:
        for number in range(12):
            world.topic.write(tp, [START + number * HOUR, START + number * HOUR + 1], False)
    world.now = START + 12 * HOUR + 600_000
    return world


def test_long_catch_up_is_several_batches_oldest_windows_first(outage: World) -> None:
    reports: list[Progress] = []
    landed = outage.land(Request(RequestKind.CATCH_UP), report=reports.append)
    landed.check()
    per_batch = [sorted({s.window for s in b.plan.offset_ranges if s.window}) for b in landed.batches]
    assert len(per_batch) > 2
    assert [w for windows in per_batch for w in windows] == [START + n * HOUR for n in range(12)]
    assert max(len(b.plan.offset_ranges) for b in landed.batches) <= 8, "four for each of two tasks at once"
    assert sorted(landed.windows) == outage.list_windows()
    assert audit(outage.ledger, outage.lake).problems == ()  # type: ignore[arg-type]
    assert [p.note for p in reports if p.stage == "plan"][1] == f"batch 2, {12 - len(per_batch[0])} windows to go"
    assert {p.total for p in reports if p.stage == "publish"} == {48}
    assert [p.done for p in reports if p.stage == "publish"][-1] == 48


def test_failed_ranges_of_a_long_catch_up_stay_pending_and_others_land(outage: World) -> None:
    landed = outage.land(Request(RequestKind.CATCH_UP), drops=frozenset({0}))
    failed = [f.offset_range for f in landed.failures]
    assert len(landed.batches) > 1
    assert len(failed) == len(set(failed)) >= len(landed.batches), "failures in each batch, no range tried twice"
    with pytest.raises(BatchIncomplete):
        landed.check()
    outage.land(Request(RequestKind.CATCH_UP)).check()
    assert outage.list_windows(pending=True) == []


def test_stopped_catch_up_leaves_the_rest_pending(outage: World) -> None:
    asked_for = Request(RequestKind.WINDOW, window=START, until=START + 12 * HOUR)
    first = outage.land(asked_for, enough=lambda: True)
    assert (len(first.batches), first.stopped) == (1, True)
    assert first.left == 48 - first.batches[0].plan.offsets
    rest = outage.land(asked_for)
    assert (rest.left, rest.stopped, outage.list_windows(pending=True)) == (0, False, [])


def test_open_transaction_delays_no_earlier_hour(outage: World) -> None:
    outage.topic.write(PARTITIONS[0], [START + 11 * HOUR + 5], True)
    asked_for = Request(RequestKind.WINDOW, window=START, until=START + 12 * HOUR)
    landed = outage.land(asked_for)
    with pytest.raises(WindowHeld):
        landed.check()
    assert outage.list_windows(pending=True) == [START + 11 * HOUR]


def test_limits_of_a_run_cover_all_its_batches(outage: World) -> None:
    limits = outage.feed.limits.model_copy(update={"records": 20})
    outage.feed = outage.feed.model_copy(update={"limits": limits})
    landed = outage.land(Request(RequestKind.CATCH_UP))
    assert len(landed.batches) > 1
    assert (sum(b.plan.offsets for b in landed.batches), landed.left) == (20, 28)


@pytest.mark.parametrize("kind", [RequestKind.COMPACT, RequestKind.REPLAY])
def test_dead_batch_that_rewrote_parts_is_abandoned(kind: RequestKind, feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    (batch,) = world.land(request_offsets(0, 2)).batches
    merge = replace(batch.plan, request=Request(kind))
    dead = world.ledger.append(lambda s: PlanEntry(plan=merge, hash=merge.hash, owner=owner("token-1")))
    assert dead is not None
    world.land(request_offsets(0, 2, again=True)).check()
    assert world.ledger.read().batches[dead.number].status is BatchStatus.ABANDONED
    assert read_landed(world) == [(0, 0), (0, 1)]


def test_batch_taken_over_without_success_is_reported_as_failed(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START], False)
    for _ in range(2):
        landed = world.land(Request(RequestKind.CATCH_UP), drops=frozenset({0}))
        assert len(landed.batches) == 1
        with pytest.raises(BatchIncomplete, match="nothing was published"):
            landed.check()
    world.land(Request(RequestKind.CATCH_UP)).check()


@dataclass
class Changing(MemoryEngine):
    """While it runs, Kafka changes so that no offset range can be read."""

    topic: Topic = field(default_factory=Topic)
    error: str = ""
    change: Callable[[Topic], None] = lambda topic: None

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        self.change(self.topic)
        return [RangeFailure(s, self.error, "gone", fatal=True) for s in job.plan.offset_ranges]


def _land_during(world: World, error: str, change: Callable[[Topic], None]) -> Landed:
    engine = Changing(topic=world.topic, error=error, change=change)
    ports = replace(world.make_ports(), engine=engine)
    try:
        return land(world.feed, ports, Request(RequestKind.CATCH_UP), owner("overtaken"), lambda progress: None)
    finally:
        world.liveness.dead.add("overtaken")


def test_loss_before_the_first_read_does_not_block_a_plan_forever(feed: Feed) -> None:
    """The plan was taken over and failed in each run, although the feed accepts losses."""
    policies = feed.policies.model_copy(update={"on_loss": OnLoss.ACCEPT})
    world = World(feed.model_copy(update={"policies": policies}))
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    landed = _land_during(world, OffsetsLost.__name__, lambda topic: setattr(topic, "log_start", 2))
    assert [k.range for k in landed.losses] == [Range(0, 2)]
    landed.check()  # nothing is pending any more
    assert world.ledger.read().live() == ()
    assert world.land(Request(RequestKind.CATCH_UP)).batches == ()


def test_unaccepted_loss_stays_reserved(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    _land_during(world, OffsetsLost.__name__, lambda topic: setattr(topic, "log_start", 2))
    assert len(world.ledger.read().live()) == 1


def test_range_truncated_before_the_first_read_is_planned_again(feed: Feed) -> None:
    """No record of the plan had landed, so no loss needed an accept entry."""
    world = World(feed)
    for _ in range(2):
        world.topic.write(PARTITIONS[0], [START], False)
    _land_during(world, LogTruncated.__name__, lambda topic: topic.batches[PARTITIONS[0]].pop())
    world.topic.write(PARTITIONS[0], [START + 1], False)
    world.land(Request(RequestKind.CATCH_UP)).check()
    check(world)


def land_more(world: World) -> None:
    """Produce one more record, and land it in another run."""
    world.topic.write(PARTITIONS[0], [START + 1], False)
    world.land(Request(RequestKind.CATCH_UP)).check()


def test_concurrent_landing_is_not_mistaken_for_truncation(feed: Feed) -> None:
    """The survey asks Kafka first and reads the ledger afterwards."""
    world = World(feed)
    land_more(world)
    real = world.topic.partitions

    def land_during_survey(topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        partitions = real(topics, isolation)
        world.topic.partitions = real  # type: ignore[method-assign]
        land_more(world)
        return partitions

    world.topic.partitions = land_during_survey  # type: ignore[method-assign]
    world.land(Request(RequestKind.CATCH_UP)).check()
    check(world)


def test_a_partition_added_during_a_survey_keeps_its_committed_offset(feed: Feed) -> None:
    world, numbers = World(feed), {0}
    real = world.topic.partitions

    def filter_partitions(topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        return tuple(p for p in real(topics, isolation) if p.partition in numbers)

    def answer_late(topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        first = filter_partitions(topics, isolation)
        world.topic.partitions = filter_partitions  # type: ignore[method-assign]
        land_more(world)
        numbers.add(1)
        return first

    world.topic.partitions = filter_partitions  # type: ignore[method-assign]
    land_more(world)
    world.topic.write(PARTITIONS[1], [START, START + 1, START + 2], False)
    world.group.offsets[PARTITIONS[1]] = CommittedOffset(2)
    world.topic.partitions = answer_late  # type: ignore[method-assign]
    for _ in range(2):
        world.land(Request(RequestKind.CATCH_UP)).check()
    assert {k.tp: o.offset for k, o in world.ledger.read().origins.items()}[PARTITIONS[1]] == 2


def test_range_landed_between_survey_and_plan_is_not_pending(feed: Feed) -> None:
    world = World(feed)
    land_more(world)

    def land_before_plan(path: str) -> None:
        world.lake.before.clear()
        land_more(world)

    world.topic.write(PARTITIONS[0], [START + 1], False)
    world.lake.before["put_if_absent"] = land_before_plan
    world.land(Request(RequestKind.CATCH_UP)).check()
    check(world)


@pytest.mark.parametrize("compacts", [False, True])
def test_offsets_in_no_batch_are_a_finding_in_a_topic_that_is_not_compacted(compacts: bool, feed: Feed) -> None:
    world, record = World(feed), LogRecord(time=START)
    world.topic.settings = Configs({"orders": TopicConfig(compacts=compacts)})
    world.topic.batches[PARTITIONS[0]] += [LogBatch((record,)), LogBatch((record, replace(record, skip=2)), gap=3)]
    world.land(Request(RequestKind.CATCH_UP)).check()
    findings = watch(world.make_ports(), feed, world.ledger).findings
    gaps = [f for f in findings if f.about == "gaps orders"]
    assert bool(gaps) is not compacts
    assert all("5 offsets of orders" in f.text and not f.severe for f in gaps)


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_nothing_is_planned_or_lost_in_an_ended_life(on_loss: OnLoss, feed: Feed) -> None:
    """The survey is older than the entry: the plan would reserve its ranges permanently, and no run could read them."""
    policies = feed.policies.model_copy(update={"on_loss": on_loss})
    world = World(feed.model_copy(update={"policies": policies}))
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    world.land(Request(RequestKind.CATCH_UP)).check()
    world.topic.write(PARTITIONS[0], [START, START + 1], False)
    world.topic.log_start = 3 if on_loss is OnLoss.ACCEPT else 0
    state = world.ledger.read()
    keys = [state.current[tp] for tp in PARTITIONS]

    def accept_new_life(path: str) -> None:
        world.lake.before.clear()
        items = tuple(
            Entering(leaves=k, enters=OriginItem(key=k._replace(incarnation="id-2"), offset=0, committed=None, why="t"))
            for k in keys
        )
        world.ledger.append(lambda s: AcceptEntry(event="recreated", items=items, reason="test"))

    world.lake.before["put_if_absent"] = accept_new_life
    with pytest.raises(Refused, match="another life"):
        world.land(Request(RequestKind.CATCH_UP)).check()
    after = [e for n, e in world.ledger.entries() if n > state.number]
    assert [e.kind for e in after] == [], "the accept is the last entry"


def test_refused_partitions_are_named() -> None:
    refusals = tuple(Refusal(TopicPartition("t", p), Refused(f"t:{p} went back", remedy="accept it")) for p in (0, 1))
    with pytest.raises(Refused, match=r"(?s)2 partitions were refused, the others have nothing pending.*t:0.*t:1"):
        Landed((), refusals, ()).check()


def test_partitions_waiting_for_transactions_are_not_refused() -> None:
    waiting = tuple(Refusal(TopicPartition("t", p), WindowHeld(f"t:{p} is held")) for p in (0, 1))
    with pytest.raises(WindowHeld, match="2 partitions"):
        Landed((), waiting, ()).check()
    with pytest.raises(Refused, match="3 partitions"):
        Landed((), (*waiting, Refusal(TopicPartition("t", 2), Refused("t:2 went back"))), ()).check()


def test_limits_of_a_run_apply_after_an_empty_first_plan(feed: Feed) -> None:
    policies = feed.policies.model_copy(update={"on_loss": OnLoss.ACCEPT})
    limits = feed.limits.model_copy(update={"records": 4})
    world = World(feed.model_copy(update={"policies": policies, "limits": limits}))
    world.topic.write(PARTITIONS[0], [START + i for i in range(16)], False)
    ports, planned = world.make_ports(), list[int]()
    engine = ports.engine

    class Overtaken(MemoryEngine):
        def run(self, job: Job, tasks: Sequence[int]) -> Sequence[Outcome | TaskTraffic]:  # type: ignore[override]
            planned.append(job.plan.offsets)
            if len(planned) > 1:
                return engine.run(job, tasks)
            world.topic.log_start = 8
            return [RangeFailure(s, OffsetsLost.__name__, "gone", fatal=True) for s in job.plan.offset_ranges]

    ports = replace(ports, engine=Overtaken())
    landed = land(world.feed, ports, Request(RequestKind.CATCH_UP), owner("limited"), lambda progress: None)
    assert planned == [4, 4]
    assert landed.left == 4
