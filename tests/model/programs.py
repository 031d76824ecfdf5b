"""What actors do, by Sluice's own functions, as Dagster's assets and the commands call them; and how faults heal."""

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
from sluice.pipelines.maintenance import rewrite
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire, remove_retired
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import Owner
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
from tests.model.scheduler import current_actor
from tests.model.world import FEED, HOUR, START, TOPIC, World

CATCH_UP = Request(RequestKind.CATCH_UP)
Spec = tuple[Any, ...]


def owner(name: str) -> Owner:
    return Owner(name, name, "host", 1, 0)


def program(world: World, name: str, spec: Spec) -> Callable[[], object]:
    """What an actor runs: `spec` is its kind and what it asks for."""
    kind, *rest = spec

    def run() -> object:
        try:
            return _PROGRAMS[kind](world, name, *rest)
        finally:
            world.dead.add(name)

    return run


def _land(world: World, name: str, request: Request, skip: Skip | None = None, commits: bool = True) -> str:
    """A run: land, and commit unless some of it failed."""
    landed = land(world.feed, world.edges(name), request, owner(name), lambda p: None, LandingOptions(skip=skip))
    landed.check()
    return _commit(world, name) if commits else "landed"


def _commit(world: World, name: str) -> str:
    feed, edges = world.feed, world.edges(name)
    settings = CommitSettings(feed.commit, "tid", feed.policies.on_group_moved)
    result = commit(world.ledger(name), edges.group, settings, Outlet.of(feed, edges.lake))
    return str(result.status)


def _catch_up(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP)


def _no_commit(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP, commits=False)


def _window(world: World, name: str, hour: int) -> str:
    return _land(world, name, Request(RequestKind.WINDOW, window=START + hour * HOUR), commits=False)


def _offsets(world: World, name: str, partition: int, start: int, end: int, replacing: bool = False) -> str:
    asked = (AskedRange(TOPIC, partition, start, end),)
    return _land(world, name, Request(RequestKind.OFFSETS, asked, replace=replacing))


def _again(world: World, name: str, partition: int, start: int, end: int) -> str:
    return _offsets(world, name, partition, start, end, True)


def _skip(world: World, name: str) -> str:
    return _land(world, name, CATCH_UP, Skip(None, "passed over"))


def _compact(world: World, name: str) -> str:
    found = compact(world.feed, world.edges(name), None, owner(name), lambda p: None)
    return f"merged {len(found.merged)}"


def _replay(world: World, name: str) -> str:
    found = replay(world.feed, world.edges(name), Filter(), None, owner(name), lambda p: None)
    return f"replayed {len(found.done)}"


def _expire(world: World, name: str, hour: int) -> str:
    feed, lake = world.feed, world.edges(name).lake
    done = expire(
        world.ledger(name), lake, RetireRequest(START + hour * HOUR, "old"), feed.window, world.edges(name).liveness
    )
    return f"retired {len(done.expiry.receipts)}"


def _accept(world: World, name: str) -> str:
    """An operator who accepts whatever a run is refused for."""
    edges, said = world.edges(name), []
    for event in (AcceptEvent.RECREATED, AcceptEvent.TRUNCATED):
        with suppress(NothingToAccept):
            accept_log(world.feed, edges, event, "it was seen")
            said.append(event)
    return f"accepted {' '.join(said) or 'nothing'}"


def _accept_lost(world: World, name: str) -> str:
    return str(accept_lost(world.feed, world.edges(name), "it was seen").lost)


def _accept_moved(world: World, name: str, adopting: bool = False) -> str:
    return str(accept_moved(world.feed, world.edges(name), "it was seen", adopting=adopting).moved)


def _accept_ledger(world: World, name: str) -> str:
    return str(accept_ledger(world.feed, world.edges(name), "it was seen").next)


def _accept_group(world: World, name: str, begin: str) -> str:
    return str(accept_group(world.feed, world.edges(name), Begin(begin), "it was seen").begun)


def _outsider(world: World, name: str) -> str:
    """A consumer of somebody else in our group: joins, consumes what is there, commits by its generation, leaves."""
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
    """What changed since the last audit, beside whatever else goes on."""
    lake, ledger = world.edges(name).lake, world.ledger(name)
    before = audit_cache.load_audited(lake, FEED)
    report = audit(ledger, lake, previous=before, at=world.now, quick=True)
    audit_cache.keep(lake, FEED, report.audited, before, report.at)
    return f"looked at {report.looked}"


def _pack(world: World, name: str) -> str:
    return f"packed {world.ledger(name).pack(limit=2)}"


_PROGRAMS: dict[str, Callable[..., object]] = {
    "catch": _catch_up,
    "land": _no_commit,
    "win": _window,
    "bf": _offsets,
    "rep": _again,
    "skip": _skip,
    "compact": _compact,
    "replay": _replay,
    "expire": _expire,
    "accept": _accept,
    "lost": _accept_lost,
    "moved": _accept_moved,
    "ledger": _accept_ledger,
    "group": _accept_group,
    "ext": _outsider,
    "commit": _commit,
    "audit": _audit,
    "pack": _pack,
}


# -- once faults are over


MAX_CLEAN = 3


def heal(
    world: World,
    *,
    by_windows: bool = False,
    moved: bool = False,
    retired: bool = False,
    loses: bool = False,
    removed: bool = False,
) -> str:
    """Every run is dead, sessions and transactions are over, what was late has arrived: then clean runs until nothing
    is pending. What keeps them from it, or breaks an invariant meanwhile; empty: nothing."""
    _calm(world)
    try:
        if loses:
            with suppress(NothingToAccept):
                program(world, "operator-ledger", ("ledger",))()
        if removed:
            with suppress(NothingToAccept):
                program(world, "operator-group", ("group", "start"))()
        _settle(world, by_windows, moved)
        if world.slow_copies:
            world.now += LATE
            program(world, "healing-later", ("catch",))()
        if retired:
            remove_retired(world.ledger("operator"), world.edges("operator").lake)
        if wrong := _looked_at(world) or _packed(world):
            return wrong
        if late := write_manifests(world.ledger("n"), world.edges("n").lake, FEED, world.feed.window, everywhere=True):
            return f"W: the runs did not declare {len(late)} complete windows"
    except SluiceError as error:
        return world.broken or f"I14: a clean run is refused: {type(error).__name__}: {error.message}"
    return world.broken


def _looked_at(world: World) -> str:
    """An audit of what changed finds what one of everything finds."""
    lake, ledger = world.edges("auditor").lake, world.ledger("auditor")
    if (before := audit_cache.load_audited(lake, FEED)) is None:
        return ""
    quick, whole = (audit(ledger, lake, previous=known, quick=True) for known in (before, None))
    said = [(sorted(map(str, r.problems)), r.accounts, r.batches) for r in (quick, whole)]
    return "" if said[0] == said[1] else f"AU: the quick audit says {said[0]}, one of everything {said[1]}"


def _packed(world: World) -> str:
    """A fold from the log's start, by segments, is the fold."""
    files = {p: data for p, data in world.files.items() if "/checkpoints/" not in p}
    if not any("/segments/" in p for p in files):
        return ""
    cold = Ledger(MemoryLake(files), FEED, lambda: world.now).read()
    return "" if cold == world.ledger("reader").read() else "SE: a fold by segments is another than the ledger's"


def _calm(world: World) -> None:
    world.group.pending = None
    world.group.members.clear()
    world.group.generation += 1
    for path, data in list(world.delayed):
        if path not in world.files:
            world.write(path, data)
    world.delayed.clear()
    for n, p in enumerate(world.partitions):
        for producer in p.open:
            p = p.ended(world.now, producer, ABORT)
        world.partitions[n] = p


def _settle(world: World, by_windows: bool, moved: bool) -> None:
    for n, what in enumerate(("accept", *(("moved",) if moved else ()))):
        with suppress(NothingToAccept):
            program(world, f"operator{n}", (what,))()
    if by_windows:
        world.now += 2 * HOUR
        program(world, "healing-pins", ("land-nothing",))()
    _accept_what_is_lost(world, "operator-lost")
    if by_windows:
        state = world.ledger("healing").read()
        for at, w in enumerate(windows.list_manifest_windows(state, world.feed.window)):
            if not windows.complete(world.ledger("healing").read(), w, world.feed.window):
                program(world, f"healing-window{at}", ("win", (w - START) // HOUR))()
    for attempt in range(MAX_CLEAN):
        try:
            program(world, f"healing{attempt}", ("catch",))()
        except (BatchIncomplete, OffsetsLost):  # Kafka had changed while it was planned, or before it ever was
            if attempt == MAX_CLEAN - 1:
                raise
            _accept_what_is_lost(world, f"operator-lost{attempt}")


def _accept_what_is_lost(world: World, name: str) -> None:
    """Where the feed leaves it to an operator."""
    if world.feed.policies.on_loss == "fail":
        with suppress(NothingToAccept):
            program(world, name, ("lost",))()


def _land_nothing(world: World, name: str) -> str:
    return _land(world, name, Request(RequestKind.OFFSETS), commits=False)


_PROGRAMS["land-nothing"] = _land_nothing


# -- threads and numbers of chance


class Inline:
    """An executor that does the work where it is asked for: one effect after the other."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, work: Callable[..., Any], *items: Any) -> list[Any]:
        return [work(*each) for each in zip(*items, strict=False)]

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        out: Future[Any] = Future()
        out.set_result(work(*args))
        return out

    def shutdown(self, *_: object, **__: object) -> None: ...


class NoThread:
    """In place of the thread that tells of progress: it changes nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def start(self) -> None: ...

    def join(self) -> None: ...


_alone = itertools.count()


def _write_id(size: int) -> str:
    """Each differs, and a run that does the same has the same ones."""
    if (actor := current_actor()) is None:
        return f"alone-{next(_alone)}"
    actor.writes += 1
    return f"{actor.name}-{actor.writes}"


@contextmanager
def forgetful() -> Iterator[None]:
    """What the state forgets is forgotten at once, folds begin at checkpoints, segments hold few entries, and what
    audits know of entries is soon in files of its own."""
    small = patch.object(segments, "ENTRIES", 3)
    old = patch.object(receipt_rows, "ENTRIES", 4), patch.object(audit_cache, "BLOCK", 2)
    with patch.object(batches, "KEPT", 1), patch.object(ledger_log, "CHECKPOINT_EVERY", 4), small, old[0], old[1]:
        yield


@contextmanager
def as_one() -> Iterator[None]:
    """Sluice without threads, clocks and chance of its own."""
    still = SimpleNamespace(perf_counter_ns=lambda: 0)
    with ExitStack() as stack:
        for module in (parallel, rewrite):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", Inline))
        # What runs inline marks the caller's own thread, which lives on.
        stack.enter_context(patch.object(parallel, "_here", threading.local()))
        stack.enter_context(patch.object(ledger_log, "secrets", SimpleNamespace(token_hex=_write_id)))
        stack.enter_context(patch.object(carry_out, "Thread", NoThread))
        for module in (task, writer):
            stack.enter_context(patch.object(module, "time", still))
        for module in (decoder, decoded_rows):
            stack.enter_context(patch.object(module, "perf_counter_ns", still.perf_counter_ns))
        yield
