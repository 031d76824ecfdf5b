"""Writes landed parts again, without Kafka and without Spark: what compaction and replay have in common.

    plan (reserves, names replaced parts) → write → prove → publish → swap

Guarantees: a batch is all or nothing. Each row is in exactly one part that counts: before, after, and at any crash in
between. When its run dies, the parts are as they were, and the next command that meets the batch gives it up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import Generic, Protocol, TypeVar

from sluice.pipelines.errors import PlanBusy, ProofFailed, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.columns import NOTHING_SUPERSEDED
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.maintenance.merging import RewriteContext
from sluice.pipelines.model.kafka import intersect
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Met, Owner, Part, Progress, Receipt, Reporter, Verdict, group_by_sharing
from sluice.pipelines.ports import Liveness, Ports
from sluice.pipelines.publishing import publish as owners
from sluice.pipelines.publishing.publish import abandon, check_owner, publish, roll_forward
from sluice.pipelines.util.grouping import group_by

MAX_PIECES = 1000
"""The most pieces that one batch writes."""
_ENDLESS = 1 << 62


class RewritePiece(Protocol):
    """Parts to be written again. `offset_range` covers all of them."""

    @property
    def offset_range(self) -> OffsetRange: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...
    @property
    def bytes(self) -> int: ...


P = TypeVar("P", bound=RewritePiece)


@dataclass(frozen=True, slots=True)
class RewriteMethod(Generic[P]):
    """One way of writing again: the request, the name of the stage, what writes pieces, and how many at once.

    A writer gets the pieces that are to share a file, whose first offset range is `file_of` each, or else one piece.
    With `whole_windows`, the pieces of a window are in one batch, so that readers find it either old or new.
    """

    request: Request
    stage: str
    writer: Callable[[RewriteContext], Callable[[Sequence[P]], list[Receipt]]]
    threads: int
    file_of: Callable[[P], OffsetRange | None] = lambda piece: None
    whole_windows: bool = False

    def group(self, pieces: Sequence[P]) -> list[list[P]]:
        """The pieces in groups: those that share files, or are to share one, are in one."""
        groups: dict[OffsetRange, list[P]] = {}
        for group in group_by_sharing(pieces):
            groups.setdefault(self.file_of(group[0]) or group[0].offset_range, []).extend(group)
        return list(groups.values())


def rewriting(state: State) -> list[Batch]:
    """The live batches that write parts again."""
    return [b for b in state.live() if b.rewrites]


def give_up_dead(ledger: Ledger, liveness: Liveness, kind: RequestKind | None, report: Reporter) -> None:
    """Give up the rewriting batches of dead runs, and report them. Raises PlanBusy while one of this kind is at
    work."""
    batches = rewriting(ledger.read())
    verdicts = owners.judge_batches(liveness, batches)
    owners.give_up(ledger, batches, verdicts, report)
    for batch in batches:
        if batch.request.kind is kind and not verdicts[batch.id].dead:
            raise _one_at_once(ledger.feed, batch, verdicts[batch.id])


def _one_at_once(feed: str, batch: Batch, verdict: Verdict) -> PlanBusy:
    return PlanBusy(
        f"{owners.report_met(feed, batch, verdict)}; one of this kind at a time writes parts of feed {feed} again",
        remedy=owners.find_remedy(feed, batch, verdict),
    )


@contextmanager
def open_for_rewriting(feed: Feed, ports: Ports, owner: Owner, kind: RequestKind, report: Reporter) -> Iterator[Ledger]:
    """The ledger, rolled forward and without rewriting batches of dead runs; the run's heartbeats are sent.

    Raises PlanBusy while another batch of this kind is at work.
    """
    with ports.liveness.send_heartbeats(owner):
        ledger = Ledger.offline(ports.lake, feed.stored, ports.clock, owner.run)
        report(Progress("roll forward"))
        give_up_dead(ledger, ports.liveness, kind, report)
        roll_forward(ledger, ports.lake, feed.stored)
        yield ledger


def foresee_free(
    feed: Feed, ports: Ports, ledger: Ledger, groups: Iterable[Sequence[P]], since: int
) -> tuple[list[P], dict[int | None, int], tuple[Met, ...]]:
    """Returns the pieces that a call would rewrite now, busy batches by window, and reports of these. Reservations of
    dead runs do not count."""
    state, busy = ledger.read(), dict[int | None, int]()
    dead = {i for i, verdict in owners.judge_batches(ports.liveness, rewriting(state)).items() if verdict.dead}
    free = [piece for group in groups if are_free(state, group, since, busy, dead) for piece in group]
    return free, busy, company(feed.name, ledger, ports.liveness, busy.values())


def company(feed: str, ledger: Ledger, liveness: Liveness, busy: Iterable[int]) -> tuple[Met, ...]:
    """Reports of the busy batches: whether their runs are alive, and the ways out."""
    batches = ledger.read().batches
    planned = [b for i in sorted(set(busy)) if (b := batches[i]).status is BatchStatus.PLANNED]
    verdicts = owners.judge_batches(liveness, planned)
    return tuple(owners.report_met(feed, b, verdicts[b.id]) for b in planned)


def is_free(
    state: State, s: OffsetRange, since: int, busy: dict[int | None, int], dead: Container[int] = frozenset()
) -> bool:
    """Returns whether the offset range's parts below entry `since` still count, and no live batch reserves any of it. A
    batch that does is put into `busy`, by window.
    """
    if state.superseded.get(s.key, NOTHING_SUPERSEDED).after(since - 1, s.range):
        return False
    for batch, other in state.list_live_ranges():
        if other.key == s.key and other.range.meets(s.range) and batch.id not in dead:
            busy[s.window] = batch.id
            return False
    return True  # also in a former life of the log: only the lake is read


def are_free(
    state: State, group: Sequence[P], since: int, busy: dict[int | None, int], dead: Container[int] = frozenset()
) -> bool:
    """Returns whether all pieces of a group that shares files are free."""
    free = [is_free(state, p.offset_range, since, busy, dead) for p in group]  # each may add to `busy`
    return all(free)


def is_erasing(state: State, piece: RewritePiece) -> bool:
    """Returns whether an erasure that is not finished has to remove rows of the piece."""
    s = piece.offset_range
    return bool(intersect(state.erasing.get(s.key, ()), s.range))


class Rewriting(Generic[P]):
    """One call that rewrites parts that counted at one entry. Pieces that share files are written in one batch.

    `done`, `batches` and `busy` grow with progress.
    """

    def __init__(
        self,
        feed: Feed,
        ports: Ports,
        ledger: Ledger,
        owner: Owner,
        report: Reporter,
        how: RewriteMethod[P],
    ) -> None:
        self.done: list[tuple[P, Receipt]] = []
        self.batches: list[int] = []
        self.busy: dict[int | None, int] = {}
        self._feed, self._edges, self._ledger, self._owner, self._report = feed, ports, ledger, owner, report
        self._how, self._since = how, 0
        self._total = self._written = 0

    def all(self, pieces: Sequence[P], since: int) -> None:
        """Rewrite the pieces, which counted below entry `since`, batch by batch. A published batch stays."""
        self._since = since
        self._total = sum(p.offset_range.span for p in pieces)
        groups = self._how.group(pieces)
        if self._how.whole_windows:
            # Groups of one window become one. Offset ranges outside windows stay as they are.
            windows: dict[object, list[P]] = {}
            for at, group in enumerate(groups):
                window = group[0].offset_range.window
                windows.setdefault((None, at) if window is None else window, []).extend(group)
            groups = list(windows.values())
        for batch in _batches(groups, self._feed.compaction.batch_bytes):
            if (planned := self._plan_free(batch)) is not None:
                self._carry_out(*planned)

    def _plan_free(self, pieces: Sequence[P]) -> tuple[int, Plan, Sequence[P]] | None:
        """Plan pieces that no other run works on; None when none is left."""
        free: list[P] = []

        def decide(state: State) -> PlanEntry | None:
            nonlocal free
            kind = self._how.request.kind
            for batch in rewriting(state):
                if batch.request.kind is kind:
                    raise _one_at_once(self._feed.name, batch, owners.NEW)
            groups = [g for g in self._how.group(pieces) if are_free(state, g, self._since, self.busy)]
            if kind is not RequestKind.ERASE:  # rows to be erased would be written again, and the batch void
                groups = [g for g in groups if not any(is_erasing(state, p) for p in g)]
            free = [p for g in groups for p in g]
            tasks = tuple(Task(i, -1, (p.offset_range,)) for i, p in enumerate(free))
            replaces = tuple(dict.fromkeys(part.path for p in free for part in p.parts))
            plan = Plan(self._feed.stored, state.cluster, self._how.request, self._feed.isolation, tasks, replaces)
            return PlanEntry(plan=plan, hash=plan.hash, owner=self._owner) if free else None

        appended = self._ledger.append(decide)
        if appended is None or not isinstance(appended.entry, PlanEntry):
            return None
        return appended.number, appended.entry.plan, free

    def _carry_out(self, batch: int, plan: Plan, pieces: Sequence[P]) -> None:
        ledger, lake, feed = self._ledger, self._edges.lake, self._feed.stored
        try:
            try:
                receipts = self._write(batch, plan, pieces)
            finally:  # a run that was taken for dead may find its files gone
                check_owner(ledger, batch, self._owner)
            proven, failures = prove(plan, batch, receipts, lake)
            if failures:
                raise ProofFailed(failures[0].message, remedy=failures[0].remedy)
        except BaseException:
            with suppress(SluiceError):
                abandon(ledger, batch, "writing parts again ended early; they are as they were")
                roll_forward(ledger, lake, feed)
            raise
        publish(ledger, batch, self._owner, proven)
        roll_forward(ledger, lake, feed)
        self.done += zip(pieces, proven, strict=True)
        self.batches.append(batch)

    def _write(self, batch: int, plan: Plan, pieces: Sequence[P]) -> list[Receipt]:
        """The receipts of all pieces. The first failure ends the others."""
        feed, stop, out = self._feed, Event(), []
        unbounded = feed.landing.model_copy(update={"target_file_bytes": _ENDLESS})
        write = self._how.writer(
            RewriteContext(self._edges.lake, feed.stored, batch, plan.hash, self._owner.token, unbounded, stop)
        )
        files = group_by(pieces, lambda p: self._how.file_of(p) or p.offset_range)
        with ThreadPoolExecutor(self._how.threads, "sluice-rewrite") as pool:
            try:
                for done in as_completed([pool.submit(write, of_file) for of_file in files.values()]):
                    receipts = done.result()
                    out += receipts
                    self._written += sum(r.offset_range.span for r in receipts)
                    self._report(Progress(self._how.stage, self._written, self._total))
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return out


def _batches(groups: Iterable[list[P]], limit: int) -> Iterator[list[P]]:
    """The pieces in order, in batches of at most `limit` bytes, or of one group."""
    batch: list[P] = []
    for group in groups:
        size = sum(p.bytes for p in group)
        if batch and (len(batch) + len(group) > MAX_PIECES or sum(b.bytes for b in batch) + size > limit):
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch
