"""Programs of actors, which call Sluice's own functions as Dagster's assets and commands do; and healing of faults."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sluice.pipelines.audit import audit_cache, receipt_rows
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.batch import carry_out
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import BatchIncomplete, NothingToAccept, OffsetsLost, SluiceError
from sluice.pipelines.landing import task, writer
from sluice.pipelines.ledger import Ledger, batches, segments
from sluice.pipelines.ledger import log as ledger_log
from sluice.pipelines.maintenance import erasure, rewrite
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire, hold_windows, remove_retired
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Owner
from sluice.pipelines.operating import move_topic
from sluice.pipelines.operating.acceptance import (
    AcceptEvent,
    Begin,
    accept_group,
    accept_ledger,
    accept_log,
    accept_lost,
    accept_moved,
)
from sluice.pipelines.planning import windows
from sluice.pipelines.publishing.manifest import write_manifests
from sluice.pipelines.publishing.publish import LATE
from sluice.pipelines.quarantine.dead_letters import Outlet
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.records.kafka_batches.decode import columns as decoded_rows
from sluice.pipelines.records.kafka_batches.decode import decoder
from sluice.pipelines.util import parallel
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import ABORT
from tests.model.scheduler import get_current_actor
from tests.model.world import FEED, HOUR, START, TOPIC, World

CATCH_UP = Request(RequestKind.CATCH_UP)
Spec = tuple[Any, ...]


def make_owner(name: str) -> Owner:
    return Owner(name, name, "host", 1, 0)


def build_program(world: World, name: str, spec: Spec) -> Callable[[], object]:
    """Return the function that an actor runs. `spec` is the kind of program and its arguments."""
    kind, *rest = spec

    def run() -> object:
        try:
            return _PROGRAMS[kind](world, name, *rest)
        finally:
            world.dead.add(name)

    return run


def _land(world: World, name: str, request: Request, skip: Skip | None = None, commits: bool = True) -> str:
    """Land, and commit unless a part of the batch failed."""
    landed = land(
        world.feed, world.open_ports(name), request, make_owner(name), lambda p: None, LandingOptions(skip=skip)
    )
    landed.check()
    return _commit(world, name) if commits else "landed"


def _commit(world: World, name: str) -> str:
    feed, ports = world.feed, world.open_ports(name)
    settings = CommitSettings(feed.commit, "tid", feed.policies.on_group_moved)
    result = commit(world.open_ledger(name), ports.group, settings, Outlet.of(feed, ports.lake))
    return str(result.status)


def _catch_up(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP)


def _land_without_commit(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP, commits=False)


def _land_window(world: World, name: str, hour: int) -> str:
    return _land(world, name, Request(RequestKind.WINDOW, window=START + hour * HOUR), commits=False)


def _land_offsets(world: World, name: str, partition: int, start: int, end: int, replacing: bool = False) -> str:
    ranges = (AskedRange(TOPIC, partition, start, end),)
    return _land(world, name, Request(RequestKind.OFFSETS, ranges, replace=replacing))


def _land_again(world: World, name: str, partition: int, start: int, end: int) -> str:
    return _land_offsets(world, name, partition, start, end, True)


def _skip(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP, Skip(None, "passed over"))


def _compact(world: World, name: str) -> str:
    result = compact(world.feed, world.open_ports(name), None, make_owner(name), lambda p: None)
    return f"merged {len(result.merged)}"


def _replay(world: World, name: str) -> str:
    result = replay(world.feed, world.open_ports(name), Filter(), None, make_owner(name), lambda p: None)
    return f"replayed {len(result.done)}"


def _expire(world: World, name: str, hour: int) -> str:
    feed, lake = world.feed, world.open_ports(name).lake
    done = expire(
        world.open_ledger(name),
        lake,
        RetireRequest(START + hour * HOUR, "old"),
        feed.window,
        world.open_ports(name).liveness,
    )
    return f"retired {len(done.expiry.receipts)}"


def _put_on_hold(world: World, name: str) -> str:
    """Hold the first hour."""
    hold_windows(world.open_ledger(name), START, START + HOUR, "case 12")
    return "on hold"


def _erase(world: World, name: str, partition: int, start: int, end: int) -> str:
    """Erase the landed ones of these offsets, in the partition's current life, and finish other erasures."""
    ports, ledger = world.open_ports(name), world.open_ledger(name)
    state = ledger.read()
    keys = [key for tp, key in state.current.items() if tp.partition == partition]
    erasure.decide(ledger, ports.liveness, {k: (Range(start, end),) for k in keys}, "asked for", lambda p: None)
    return f"rewrote {len(erasure.finish(world.feed, ports, make_owner(name), lambda p: None).done)}"


def _accept_logs(world: World, name: str) -> str:
    """Accept the events for which runs are refused, as an operator does."""
    ports, accepted = world.open_ports(name), []
    for event in (AcceptEvent.RECREATED, AcceptEvent.TRUNCATED):
        with suppress(NothingToAccept):
            accept_log(world.feed, ports, event, "it was seen")
            accepted.append(event)
    return f"accepted {' '.join(accepted) or 'nothing'}"


def _move_topic(world: World, name: str) -> str:
    """Move the topic to another feed, and back from where that one would begin."""
    ports, ledger = world.open_ports(name), world.open_ledger(name)
    seam = move_topic.leave(ledger, world.feed, TOPIC, FEED)
    move_topic.arrive(ledger, world.feed, world.feed, TOPIC, seam, ports)
    return f"moved at {[at.offset for at in seam]}"


def _accept_lost(world: World, name: str) -> str:
    return str(accept_lost(world.feed, world.open_ports(name), "it was seen").lost)


def _accept_moved(world: World, name: str, adopting: bool = False) -> str:
    return str(accept_moved(world.feed, world.open_ports(name), "it was seen", adopting=adopting).moved)


def _accept_ledger(world: World, name: str) -> str:
    return str(accept_ledger(world.feed, world.open_ports(name), "it was seen").next)


def _accept_group(world: World, name: str, begin: str) -> str:
    return str(accept_group(world.feed, world.open_ports(name), Begin(begin), "it was seen").begun)


def _run_outsider(world: World, name: str) -> str:
    """Join our group as a foreign consumer, consume to the end, commit with its generation, and leave."""
    g, stage = world.group, world.stage
    stage.point("joins")
    g.generation += 1
    g.members[name] = generation = g.generation
    stage.point("commits")
    took = g.members.get(name) == generation and g.generation == generation and g.pending is None
    if took:
        world.put_foreign(world.partitions[0].tp, world.partitions[0].stable)
    stage.point("leaves")
    g.drop(name)
    return f"committed: {took}"


def _audit(world: World, name: str) -> str:
    """Audit the changes since the last audit, concurrently with other actors."""
    lake, ledger = world.open_ports(name).lake, world.open_ledger(name)
    before = audit_cache.load_audited(lake, FEED)
    report = audit(ledger, lake, previous=before, at=world.now, quick=True)
    audit_cache.keep(lake, FEED, report.audited, before, report.at)
    return f"looked at {report.looked_at}"


def _pack(world: World, name: str) -> str:
    return f"packed {world.open_ledger(name).pack(limit=2)}"


_PROGRAMS: dict[str, Callable[..., object]] = {
    "catch": _catch_up,
    "land": _land_without_commit,
    "win": _land_window,
    "bf": _land_offsets,
    "rep": _land_again,
    "skip": _skip,
    "compact": _compact,
    "replay": _replay,
    "expire": _expire,
    "erase": _erase,
    "hold": _put_on_hold,
    "accept": _accept_logs,
    "move": _move_topic,
    "lost": _accept_lost,
    "moved": _accept_moved,
    "ledger": _accept_ledger,
    "group": _accept_group,
    "ext": _run_outsider,
    "commit": _commit,
    "audit": _audit,
    "pack": _pack,
}


# -- after the last fault


MAX_CLEAN = 3


def heal(
    world: World,
    *,
    by_windows: bool = False,
    moved: bool = False,
    retired: bool = False,
    erased: bool = False,
    loses: bool = False,
    removed: bool = False,
) -> str:
    """End all runs, sessions and transactions, deliver delayed writes, then run clean runs until nothing is pending.
    Returns the violated invariant, or the error that stops a clean run; empty: none."""
    _end_faults(world)
    try:
        if loses:
            with suppress(NothingToAccept):
                build_program(world, "operator-ledger", ("ledger",))()
        if removed:
            with suppress(NothingToAccept):
                build_program(world, "operator-group", ("group", "start"))()
        _settle(world, by_windows, moved)
        if world.slow_copies:
            world.now += LATE
            build_program(world, "healing-later", ("catch",))()
        if erased:
            build_program(world, "operator-erases", ("erase", 0, 0, 0))()
        if retired:
            remove_retired(world.open_ledger("operator"), world.open_ports("operator").lake)
        if wrong := _compare_audits(world) or _check_segments(world):
            return wrong
        if late := write_manifests(
            world.open_ledger("n"), world.open_ports("n").lake, FEED, world.feed.window, everywhere=True
        ):
            return f"W: the runs did not declare {len(late)} complete windows"
    except SluiceError as error:
        return world.broken or f"I14: a clean run is refused: {type(error).__name__}: {error.message}"
    return world.broken


def _compare_audits(world: World) -> str:
    """Check that a quick audit finds the same as a full one."""
    lake, ledger = world.open_ports("auditor").lake, world.open_ledger("auditor")
    if (before := audit_cache.load_audited(lake, FEED)) is None:
        return ""
    quick, full = (audit(ledger, lake, previous=previous, quick=True) for previous in (before, None))
    views = [(sorted(map(str, r.problems)), r.partitions, r.batches) for r in (quick, full)]
    return "" if views[0] == views[1] else f"AU: the quick audit says {views[0]}, one of everything {views[1]}"


def _check_segments(world: World) -> str:
    """Check that a fold from the log's start, with segments, equals the current fold."""
    files = {p: data for p, data in world.files.items() if "/checkpoints/" not in p}
    if not any("/segments/" in p for p in files):
        return ""
    cold = Ledger(MemoryLake(files), FEED, lambda: world.now).read()
    return "" if cold == world.open_ledger("reader").read() else "SE: a fold by segments is another than the ledger's"


def _end_faults(world: World) -> None:
    world.group.pending = None
    world.group.members.clear()
    world.group.generation += 1
    for path, data in list(world.delayed):
        if path not in world.files:
            world.write(path, data)
    world.delayed.clear()
    for n, p in enumerate(world.partitions):
        for producer in p.open:
            p = p.with_transaction_end(world.now, producer, ABORT)
        world.partitions[n] = p


def _settle(world: World, by_windows: bool, moved: bool) -> None:
    if any(key.is_ended for key in world.open_ledger("operator").read().current.values()):
        build_program(world, "operator-moves", ("move",))()
    for n, what in enumerate(("accept", *(("moved",) if moved else ()))):
        with suppress(NothingToAccept):
            build_program(world, f"operator{n}", (what,))()
    if by_windows:
        world.now += 2 * HOUR
        build_program(world, "healing-pins", ("land-nothing",))()
    _accept_losses(world, "operator-lost")
    if by_windows:
        state = world.open_ledger("healing").read()
        for at, w in enumerate(windows.list_manifest_windows(state, world.feed.window)):
            if not windows.complete(world.open_ledger("healing").read(), w, world.feed.window):
                build_program(world, f"healing-window{at}", ("win", (w - START) // HOUR))()
    for attempt in range(MAX_CLEAN):
        try:
            build_program(world, f"healing{attempt}", ("catch",))()
        except (BatchIncomplete, OffsetsLost):  # Kafka changed during planning, or before the first plan
            if attempt == MAX_CLEAN - 1:
                raise
            _accept_losses(world, f"operator-lost{attempt}")


def _accept_losses(world: World, name: str) -> None:
    """Accept losses as an operator, if the feed's policy is `on_loss: fail`."""
    if world.feed.policies.on_loss == "fail":
        with suppress(NothingToAccept):
            build_program(world, name, ("lost",))()


def _land_nothing(world: World, name: str) -> str:
    return _land(world, name, Request(RequestKind.OFFSETS), commits=False)


_PROGRAMS["land-nothing"] = _land_nothing


# -- threads, clocks and random numbers


class Inline:
    """An executor that runs each call in the caller's thread, so that effects happen in sequence."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, work: Callable[..., Any], *items: Any) -> list[Any]:
        return [work(*arguments) for arguments in zip(*items, strict=False)]

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        out: Future[Any] = Future()
        out.set_result(work(*args))
        return out

    def shutdown(self, *_: object, **__: object) -> None: ...


class NoThread:
    """A substitute for the thread that reports progress; it does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def start(self) -> None: ...

    def join(self) -> None: ...


_alone = itertools.count()


def _write_id(size: int) -> str:
    """Return a unique id. A run that repeats the same writes gets the same ids."""
    if (actor := get_current_actor()) is None:
        return f"alone-{next(_alone)}"
    actor.writes += 1
    return f"{actor.name}-{actor.writes}"


@contextmanager
def forget_early() -> Iterator[None]:
    """Lower the limits: the state forgets old batches at once, folds begin at checkpoints, segments hold few entries,
    and the caches of audits soon use separate files."""
    small = patch.object(segments, "ENTRIES", 3)
    old = patch.object(receipt_rows, "ENTRIES", 4), patch.object(audit_cache, "BLOCK", 2)
    with patch.object(batches, "KEPT", 1), patch.object(ledger_log, "CHECKPOINT_EVERY", 4), small, old[0], old[1]:
        yield


@contextmanager
def run_deterministically() -> Iterator[None]:
    """Run Sluice without its own threads, clocks and random numbers."""
    still = SimpleNamespace(perf_counter_ns=lambda: 0, monotonic=lambda: 0)
    with ExitStack() as stack:
        for module in (parallel, rewrite):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", Inline))
        # An inline call marks the caller's own thread, which outlives it.
        stack.enter_context(patch.object(parallel, "_here", threading.local()))
        stack.enter_context(patch.object(ledger_log, "secrets", SimpleNamespace(token_hex=_write_id)))
        stack.enter_context(patch.object(carry_out, "Thread", NoThread))
        for module in (task, writer):
            stack.enter_context(patch.object(module, "time", still))
        for module in (decoder, decoded_rows):
            stack.enter_context(patch.object(module, "perf_counter_ns", still.perf_counter_ns))
        yield
