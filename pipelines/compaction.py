"""Compaction: the many small parts of a window merged into few, without Kafka and without Spark.

    find what is small and follows itself → plan (reserves, names what it replaces) → merge → prove → publish → swap

Guarantees: rows, offsets and coordinates stay as they are, and so does the account; each row is in exactly one part
that counts, before, after and at any crash between. It is a batch like any other, but all or nothing; when its run
dies, the parts are as they were, and whoever comes next gives the batch up.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from sluice.pipelines import manifest, windows
from sluice.pipelines.batch import Edges
from sluice.pipelines.errors import PlanBusy, ProofFailed, SluiceError
from sluice.pipelines.feed import CompactionSettings, Feed
from sluice.pipelines.landing import MAX_FOLDERS
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.merging import MERGE_BYTES, Merge, Merger
from sluice.pipelines.ports import Liveness, Progress, Reporter
from sluice.pipelines.proof import prove
from sluice.pipelines.publish import abandon, check_owner, publish, roll_forward
from sluice.pipelines.values import Owner, Plan, Receipt, Request, RequestKind, Task

REQUEST = Request(RequestKind.COMPACT)
MAX_MERGES = 1000
"""Merges that one batch carries out at most."""
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to merge, oldest windows first, by the state below entry `number`.

    `incomplete` are windows (their starts, ms) with small parts that are left alone because some of them is owed.
    """

    number: int
    merges: tuple[Merge, ...]
    incomplete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was merged, with the receipt that took its place, None where it is only foreseen; `batches` did it.

    `busy`: where another batch is at work (its id), by window (None: outside windows); that was left alone.
    """

    merged: tuple[tuple[Merge, Receipt | None], ...] = ()
    batches: tuple[int, ...] = ()
    busy: Mapping[int | None, int] = field(default_factory=dict)
    incomplete: tuple[int, ...] = ()


def open_ledger(feed: Feed, edges: Edges, run: str = "") -> Ledger:
    return Ledger.offline(edges.lake, feed.name, edges.clock, run)


# -- what there is to merge


def find(feed: Feed, ledger: Ledger, asked: Sequence[int] | None = None) -> Found:
    """Small parts of complete windows (those that start at `asked`; None: all, and rows outside windows)."""
    state, window = ledger.read(), feed.window
    chosen = None if asked is None else frozenset(asked)

    def wanted(lies_in: int | None) -> bool:
        return chosen is None or (lies_in is not None and window.start_of(lies_in) in chosen)

    merges = list(_merges(state, manifest.receipts_lying(ledger, state, wanted), feed.compaction))
    starts = {window.start_of(m.slice.window) for m in merges if m.slice.window is not None}
    whole = {w for w in starts if windows.complete(state, w, window)}
    whole_merges = (m for m in merges if m.slice.window is None or window.start_of(m.slice.window) in whole)
    in_order = sorted(whole_merges, key=lambda m: (m.slice.window or 0, m.slice.key, m.slice.start))
    return Found(state.number, tuple(in_order), tuple(sorted(starts - whole)))


def _merges(state: State, receipts: Iterable[Receipt], settings: CompactionSettings) -> Iterator[Merge]:
    """Runs of small receipts of one kind of place, each no larger than one file should be, that save files."""
    alike: dict[tuple[object, ...], list[Receipt]] = {}
    for r in receipts:
        s = r.slice
        if state.current.get(s.tp) == s.key:
            alike.setdefault((s.key, s.window, s.folder, s.by_time, r.format), []).append(r)
    for held in alike.values():
        in_order = sorted(held, key=lambda r: r.slice.start)
        runs = (Merge(run) for run in _runs(state, in_order, settings.target_file_bytes))
        yield from (m for m in runs if len(m.receipts) > 1 and m.files_after < len(m.parts))


def _runs(state: State, receipts: Sequence[Receipt], target: int) -> Iterator[tuple[Receipt, ...]]:
    """Neighbours that fit into one file. What has half of one is left alone: no row is written anew for ever."""
    run: list[Receipt] = []
    held, folders = 0, frozenset[str]()
    for r in receipts:
        size, lies_in = sum(p.bytes for p in r.parts), frozenset(p.path.rpartition("/")[0] for p in r.parts)
        small = size < target // 2
        fits = held + size <= target and len(folders | lies_in) <= MAX_FOLDERS
        if run and not (small and fits and _follows(state, run, r)):
            yield tuple(run)
            run, held, folders = [], 0, frozenset()
        if small:
            run.append(r)
            held, folders = held + size, folders | lies_in
    yield tuple(run)


def _follows(state: State, run: Sequence[Receipt], r: Receipt) -> bool:
    """Whether it goes on where the run ends, with no boundary of a window between: they may be pinned later, too."""
    offsets, s = state.boundaries.get(r.slice.key, NO_PINS).offsets, r.slice
    bounded = bisect_right(offsets, run[0].slice.start) < bisect_left(offsets, s.end)
    return run[-1].slice.end == s.start and not bounded


def foreseen(feed: Feed, edges: Edges, asked: Sequence[int] | None = None) -> Compacted:
    """What `compact` would merge now; what a dead run was merging, too. Writes nothing, and waits for no evidence."""
    ledger = open_ledger(feed, edges)
    found, busy = find(feed, ledger, asked), dict[int | None, int]()
    state = ledger.read()
    dead = {b.id for b in _merging(state) if edges.liveness.looks_dead(b.owner)}
    free = [m for m in found.merges if _is_free(state, m, found.number, busy, dead)]
    return Compacted(tuple((m, None) for m in free), busy=busy, incomplete=found.incomplete)


def _is_free(
    state: State, m: Merge, since: int, busy: dict[int | None, int], dead: Container[int] = frozenset()
) -> bool:
    """Whether its receipts still count, as they did below entry `since`, and no live batch reserves any of it."""
    s = m.slice
    if any(at >= since and r.meets(s.range) for at, r in state.superseded.get(s.key, ())):
        return False
    for batch, other in state.live_slices():
        if other.key == s.key and other.range.meets(s.range) and batch.id not in dead:
            busy[s.window] = batch.id
            return False
    return state.current.get(s.tp) == s.key


# -- carried out


def compact(feed: Feed, edges: Edges, asked: Sequence[int] | None, owner: Owner, report: Reporter) -> Compacted:
    """Merge what `find` finds, a batch after the other. What a batch put in place stays, whatever stops the next.

    A batch of a dead run that merged is given up first. Raises PlanBusy while another one merges, OwnershipLost,
    ProofFailed for a part that is not what the ledger says, LakeFull, LakeUnavailable.
    """
    with edges.liveness.beat(owner):
        ledger = open_ledger(feed, edges, owner.run)
        report(Progress("roll forward"))
        _give_up_dead(feed.name, ledger, edges.liveness)
        roll_forward(ledger, edges.lake, feed.name)
        report(Progress("find"))
        run = _Run(feed, edges, ledger, owner, report, find(feed, ledger, asked))
        run.all()
    return Compacted(tuple(run.merged), tuple(run.batches), run.busy, run.found.incomplete)


def _give_up_dead(feed: str, ledger: Ledger, liveness: Liveness) -> None:
    for batch in _merging(ledger.read()):
        if not liveness.is_dead(batch.owner):
            raise _busy(feed, batch)
        abandon(ledger, batch.id, "the run that merged these parts died; they are as they were")


def _merging(state: State) -> list[Batch]:
    return [b for b in state.live() if b.merges]


def _busy(feed: str, batch: Batch) -> PlanBusy:
    return PlanBusy(
        f"batch {batch.id} ({batch.request}, {batch.owner.describe()}) is merging parts of feed {feed} already",
        remedy=f"wait for it to end; when its run is dead, the next `sluice compact {feed}` gives it up",
    )


class _Run:
    """One call: `merged`, `batches` and `busy` grow as it goes on."""

    def __init__(self, feed: Feed, edges: Edges, ledger: Ledger, owner: Owner, report: Reporter, found: Found) -> None:
        self.found = found
        self.merged: list[tuple[Merge, Receipt | None]] = []
        self.batches: list[int] = []
        self.busy: dict[int | None, int] = {}
        self._feed, self._edges, self._ledger, self._owner, self._report = feed, edges, ledger, owner, report
        self._total = sum(m.slice.span for m in found.merges)
        self._done = 0

    def all(self) -> None:
        for merges in _batches(self.found.merges, self._feed.compaction.batch_bytes):
            if (planned := self._planned(merges)) is not None:
                self._carry_out(*planned)

    def _planned(self, merges: Sequence[Merge]) -> tuple[int, Plan, Sequence[Merge]] | None:
        """The plan in the ledger, of those merges that nobody else is at; None when none is left."""
        left: list[Merge] = []

        def decide(state: State) -> PlanEntry | None:
            nonlocal left
            for batch in _merging(state):
                raise _busy(self._feed.name, batch)
            left = [m for m in merges if _is_free(state, m, self.found.number, self.busy)]
            plan = self._plan(state, left)
            return PlanEntry(plan=plan, hash=plan.hash, owner=self._owner) if left else None

        appended = self._ledger.append(decide)
        if appended is None or not isinstance(appended.entry, PlanEntry):
            return None
        return appended.number, appended.entry.plan, left

    def _plan(self, state: State, merges: Sequence[Merge]) -> Plan:
        tasks = tuple(Task(i, -1, (m.slice,)) for i, m in enumerate(merges))
        replaces = tuple(p.path for m in merges for p in m.parts)
        return Plan(self._feed.name, state.cluster, REQUEST, self._feed.isolation, tasks, replaces)

    def _carry_out(self, batch: int, plan: Plan, merges: Sequence[Merge]) -> None:
        ledger, lake, feed = self._ledger, self._edges.lake, self._feed.name
        try:
            receipts = self._merge(batch, plan, merges)
            check_owner(ledger, batch, self._owner)
            proven, failures = prove(plan, batch, receipts, lake)
            if failures:
                raise ProofFailed(failures[0].message, remedy=failures[0].remedy)
        except BaseException:
            with suppress(SluiceError):
                abandon(ledger, batch, "merging ended early; the parts are as they were")
                roll_forward(ledger, lake, feed)
            raise
        publish(ledger, batch, self._owner, proven, ())
        roll_forward(ledger, lake, feed)
        self.merged += zip(merges, proven, strict=True)
        self.batches.append(batch)

    def _merge(self, batch: int, plan: Plan, merges: Sequence[Merge]) -> list[Receipt]:
        """The receipts of all merges; the first that fails ends the others."""
        feed, stop, out = self._feed, Event(), []
        whole = feed.landing.model_copy(update={"target_file_bytes": _ENDLESS})
        merger = Merger(self._edges.lake, feed.name, batch, plan.hash, self._owner.token, whole, stop)
        with ThreadPoolExecutor(threads(feed.compaction, os.cpu_count() or 1), "sluice-merge") as pool:
            try:
                for done in as_completed([pool.submit(merger.merge, m) for m in merges]):
                    out.append(done.result())
                    self._done += out[-1].slice.span
                    self._report(Progress("merge", self._done, self._total))
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return out


def threads(settings: CompactionSettings, cores: int) -> int:
    """How many merges go on at once."""
    return max(min(cores, settings.memory // MERGE_BYTES), 1)


def _batches(merges: Iterable[Merge], most: int) -> Iterator[list[Merge]]:
    """The merges in turn, as many at once as have `most` bytes."""
    batch: list[Merge] = []
    for m in merges:
        if batch and (len(batch) == MAX_MERGES or sum(b.bytes for b in batch) + m.bytes > most):
            yield batch
            batch = []
        batch.append(m)
    if batch:
        yield batch
