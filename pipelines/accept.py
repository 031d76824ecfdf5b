"""The ways out of what Sluice refuses: somebody accepts, with a reason, what happened to Kafka (DESIGN §8, §13).

    lost        owed offsets fell below the log start     → a loss; the frontier moves on
    recreated   the topic was deleted and created again   → a new life of each partition, from 0
    truncated   the log lost records that were read       → a new life, from where the log ends
    cluster     another cluster took the old one's place  → new lives, from the log starts
    moved       the group's committed offsets were moved  → the next commit goes on from there, or they pass as skips
    corrupt     a batch that cannot be read               → a loss of exactly its offsets

Guarantee: what has not happened cannot be accepted (NothingToAccept), and everything is decided again on the state that
the entry is put on. Nothing that landed is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines import plan as planning
from sluice.pipelines import positions as pos
from sluice.pipelines.batch import Edges, changed, open_ledger, survey
from sluice.pipelines.commit import Verdict, adopt, log_ends, verdict, ways_out
from sluice.pipelines.decode import BatchDecoder
from sluice.pipelines.errors import (
    CorruptBatch,
    IncarnationChanged,
    LogTruncated,
    NothingToAccept,
    SluiceError,
    TopicRecreated,
    UnsupportedBatch,
    UsageError,
)
from sluice.pipelines.feed import CommitMode, Feed
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import (
    AcceptEntry,
    Entering,
    KeyOffset,
    KeyRange,
    LossEntry,
    MovedEntry,
    OriginItem,
)
from sluice.pipelines.ports import Fetcher, FetchFailed, FetchLimits
from sluice.pipelines.publish import abandon
from sluice.pipelines.ranges import Range, intersect, subtract
from sluice.pipelines.topics import match
from sluice.pipelines.values import (
    AskedRange,
    CommittedOffset,
    Isolation,
    Key,
    PartitionState,
    Request,
    RequestKind,
    Slice,
    TopicPartition,
)


class Event(StrEnum):
    LOST = "lost"
    RECREATED = "recreated"
    TRUNCATED = "truncated"
    CLUSTER = "cluster"
    MOVED = "moved"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Accepted:
    """What stands in the ledger now. `number` is its newest entry of these; `abandoned` are batches that it ended."""

    event: Event
    number: int
    lost: tuple[KeyRange, ...] = ()
    skipped: tuple[KeyRange, ...] = ()
    entered: tuple[Entering, ...] = ()
    moved: tuple[KeyOffset, ...] = ()
    abandoned: tuple[int, ...] = ()


Only = Sequence[TopicPartition]


# -- lost


def accept_lost(feed: Feed, edges: Edges, reason: str, only: Only = ()) -> Accepted:
    """Record as lost what is owed and below the log start, in these partitions or all.

    Dead batches that reserve some of it are abandoned first. Raises NothingToAccept, PlanBusy.
    """
    ledger = open_ledger(feed, edges)
    partitions = _chosen(survey(feed, edges, ledger).partitions, only)
    abandoned = _abandon_dead(edges, ledger, _lost(feed, ledger.read(), partitions))

    def decide(state: State) -> LossEntry | None:
        gone = _lost(feed, state, partitions)
        if in_the_way := _reserving(state, gone):
            raise planning.busy(*in_the_way[0])
        return LossEntry(ranges=gone, reason=reason) if gone else None

    appended = ledger.append(decide)
    if appended is None or not isinstance(appended.entry, LossEntry):
        raise NothingToAccept(
            f"nothing that feed {feed.name} owes has fallen below a log start",
            remedy=f"see what is owed: sluice status {feed.name}",
        )
    return Accepted(Event.LOST, appended.number, lost=appended.entry.ranges, abandoned=abandoned)


def _lost(feed: Feed, state: State, partitions: Mapping[Key, PartitionState]) -> tuple[KeyRange, ...]:
    planned = {k: p for k, p in partitions.items() if state.current.get(k.tp) == k}
    owed, _ = planning.owed(Request(RequestKind.CATCH_UP), state, planned, feed.window)
    return tuple(KeyRange(key=o.key, range=r) for o in owed for r in o.lost)


def _reserving(state: State, ranges: Iterable[KeyRange]) -> list[tuple[Batch, Slice]]:
    """Live batches with a slice that holds some of the ranges."""
    wanted = list(ranges)
    return [(b, s) for b, s in state.live_slices() if any(w.key == s.key and w.range.meets(s.range) for w in wanted)]


def _abandon_dead(edges: Edges, ledger: Ledger, ranges: Iterable[KeyRange]) -> tuple[int, ...]:
    """Abandon the batches that hold some of the ranges. Raises PlanBusy for one that is at work."""
    found = {b.id: (b, s) for b, s in _reserving(ledger.read(), ranges)}
    for batch, s in found.values():
        if not edges.liveness.is_dead(batch.owner):
            raise planning.busy(batch, s)
    return tuple(b for b in found if abandon(ledger, b, "some of it was accepted as lost"))


# -- another log


def accept_log(feed: Feed, edges: Edges, event: Event, reason: str, only: Only = ()) -> Accepted:
    """Leave the life of the log that the ledger knows for the one that Kafka has now: recreated, truncated, or on
    another cluster. Live batches that touch it end there. Raises NothingToAccept.
    """
    ledger = Ledger(edges.lake, feed.name, edges.clock, "", edges.cluster.cluster_id())
    known = ledger.read()
    found = _unlike(feed, edges, known, event)
    chosen = {tp: each for tp, each in found.items() if not only or tp in only}
    committed = edges.group.committed(list(chosen))
    ended: tuple[int, ...] = ()

    def decide(state: State) -> AcceptEntry | None:
        nonlocal ended
        items = tuple(
            _entering(state, event, p, error, committed.get(tp))
            for tp, (p, error) in sorted(chosen.items())
            if tp in state.current and state.current[tp] == known.current.get(tp)  # else somebody accepted it before us
        )
        left = {i.leaves for i in items}
        ended = tuple(sorted({b.id for b, s in state.live_slices() if s.key in left}))
        # Of an earlier life, nobody will read what is owed any more.
        passed = tuple(KeyRange(key=k, range=r) for k in sorted(left) for r in state.holes(k))
        return AcceptEntry(event=event, items=items, passed=passed, reason=reason) if items else None

    appended = ledger.append(decide) if chosen or event is Event.CLUSTER else None
    if appended is None or not isinstance(appended.entry, AcceptEntry):
        raise NothingToAccept(
            f"no topic of feed {feed.name} {_SAID[event]}" + (f" among {', '.join(map(str, only))}" if only else ""),
            remedy=f"see how Kafka and the ledger stand: sluice plan {feed.name}",
        )
    return Accepted(
        event, appended.number, entered=appended.entry.items, skipped=appended.entry.passed, abandoned=ended
    )


_SAID = {
    Event.RECREATED: "was deleted and created again since the ledger knew it",
    Event.TRUNCATED: "lost records that were read",
    Event.CLUSTER: "is on another cluster than the ledger's",
}


def _unlike(
    feed: Feed, edges: Edges, state: State, event: Event
) -> dict[TopicPartition, tuple[PartitionState, SluiceError | None]]:
    """The partitions that it happened to, with the refusal that says so. Raises ClusterChanged, NothingToAccept."""
    topics = match(feed.topics, edges.cluster.topics())
    partitions = edges.cluster.partitions(topics, feed.isolation)
    if event is Event.CLUSTER:
        if not state.cluster or state.cluster == edges.cluster.cluster_id():
            raise NothingToAccept(
                f"the ledger of feed {feed.name} belongs to the cluster that answers ({edges.cluster.cluster_id()})",
                remedy="there is nothing to accept",
            )
        return {p.tp: (p, None) for p in partitions}
    pos.check_cluster(state, edges.cluster.cluster_id(), feed.name)
    kind: type[IncarnationChanged] = TopicRecreated if event is Event.RECREATED else LogTruncated
    refused = {r.tp: r.error for r in changed(feed.name, state, partitions, edges.cluster)}
    still = edges.cluster.topics()  # epochs are asked for by name: of a topic recreated meanwhile they tell nothing
    same = [p for p in partitions if still.get(p.topic) == p.topic_id]
    return {p.tp: (p, refused[p.tp]) for p in same if isinstance(refused.get(p.tp), kind)}


def _entering(
    state: State, event: Event, p: PartitionState, error: SluiceError | None, committed: CommittedOffset | None
) -> Entering:
    starts = {Event.RECREATED: 0, Event.CLUSTER: p.log_start}
    offset = starts.get(event, error.start if error and error.start is not None else p.log_start)
    origin = OriginItem(
        key=_unused(state, Key(p.topic, p.partition, p.topic_id)),
        offset=offset,
        committed=committed.offset if committed else None,
        why=f"accepted: {event}",
        opens=state.boundary_times[-1] if state.boundary_times else None,
    )
    return Entering(leaves=state.current[p.tp], enters=origin)


def _unused(state: State, key: Key) -> Key:
    """The first life under this topic id that the ledger does not know yet."""
    number, found = 0, key
    while found in state.origins:
        number += 1
        found = key._replace(incarnation=f"{key.topic_id}#{number}")
    return found


# -- moved offsets


def accept_moved(feed: Feed, edges: Edges, reason: str, only: Only = (), *, adopting: bool = False) -> Accepted:
    """Let the next commit go on from the offsets that somebody moved; or, adopting, skip what they pass over.

    Raises NothingToAccept, UsageError; GroupMoved for an offset beyond the end of its log, which nobody passed over.
    """
    if feed.commit is CommitMode.NONE:
        raise UsageError(f"feed {feed.name} commits no offsets", remedy="nobody's offsets are in its way")
    ledger = open_ledger(feed, edges)
    state = ledger.read()
    targets = {k: o for k, o in state.frontiers().items() if not only or k.tp in only}
    committed = edges.group.committed([k.tp for k in targets])
    verdicts = {k: verdict(state, k, o, committed.get(k.tp)) for k, o in targets.items()}
    moved = [k for k, v in verdicts.items() if v is Verdict.MOVED]
    if not moved:
        raise NothingToAccept(
            f"the committed offsets of group {feed.group} are where feed {feed.name} expects them",
            remedy=f"see them: sluice offsets show {feed.name}",
        )
    if not adopting:  # what was put where the frontier happens to be is in the way once that has gone on
        moved += [k for k, v in verdicts.items() if v is Verdict.DONE and state.commits.get(k) != targets[k]]
    offsets = tuple(KeyOffset(key=k, offset=o.offset) for k in moved if (o := committed.get(k.tp)))
    if adopting:
        _check_ahead(ledger.feed, edges, offsets, targets)
    skipped = adopt(ledger, moved, committed, edges.cluster, reason) if adopting else ()
    appended = ledger.append(lambda _: MovedEntry(offsets=offsets, reason=reason))
    return Accepted(Event.MOVED, appended.number if appended else -1, skipped=skipped, moved=offsets)


def _check_ahead(feed: str, edges: Edges, offsets: Sequence[KeyOffset], frontiers: Mapping[Key, int]) -> None:
    """Raises UsageError where one of the offsets passes nothing over, with what works for each."""
    back = [at for at in offsets if at.offset < frontiers[at.key]]
    if not back:
        return
    said = "; ".join(
        f"{at.key}: the group's offset {at.offset} is below the frontier {frontiers[at.key]}" for at in back
    )
    ends = log_ends(edges.cluster, [at.key for at in offsets])
    raise UsageError(
        f"{said}: nothing is passed over by it",
        remedy=ways_out(feed, {at.key: (frontiers[at.key], at.offset) for at in offsets}, ends),
    )


# -- a batch that cannot be read


def accept_corrupt(feed: Feed, edges: Edges, fetcher: Fetcher, asked: AskedRange, reason: str) -> Accepted:
    """Record the first batch in the range that cannot be read as lost: exactly its offsets, as far as they are owed.

    It is read again for that. Raises NothingToAccept when all of it can be read, PlanBusy, and what keeps it from being
    read at all.
    """
    ledger = open_ledger(feed, edges)
    found = survey(feed, edges, ledger)
    request = Request(RequestKind.OFFSETS, (asked,))
    owed, _ = planning.owed(request, found.state, found.partitions, feed.window)
    due = [(o.key, o.partition, r) for o in owed for r in o.ranges]
    damaged = next((d for key, p, r in due if (d := _damaged(feed, fetcher, key, p, r))), None)
    if damaged is None:
        raise NothingToAccept(
            f"every batch that is owed in {asked.topic}:{asked.partition}:{asked.start}-{asked.end} can be read",
            remedy=f"land it: sluice run {feed.name}",
        )
    abandoned = _abandon_dead(edges, ledger, [damaged])

    def decide(state: State) -> LossEntry | None:
        current = state.current.get(damaged.key.tp) == damaged.key
        gone = subtract(damaged.range, state.accounted(damaged.key)) if current else ()
        ranges = tuple(KeyRange(key=damaged.key, range=r) for r in gone)
        return LossEntry(ranges=ranges, reason=reason) if ranges else None

    appended = ledger.append(decide)
    lost = appended.entry.ranges if appended and isinstance(appended.entry, LossEntry) else ()
    return Accepted(Event.CORRUPT, appended.number if appended else -1, lost=lost, abandoned=abandoned)


def _damaged(feed: Feed, fetcher: Fetcher, key: Key, p: PartitionState, r: Range) -> KeyRange | None:
    """The offsets of the first batch in the range that cannot be read; to its end where the batch does not tell."""
    piece = Slice(*key, r.start, r.end, p.leader_epoch)
    committed = feed.isolation is Isolation.READ_COMMITTED
    decoder = BatchDecoder(key.topic, key.partition, r.start, r.end, read_committed=committed)
    try:
        for fetched in fetcher.stream([piece], FetchLimits()):
            if isinstance(fetched, FetchFailed):
                raise fetched.error
            for _ in decoder.feed(fetched.records, fetched.aborted):
                pass
        for _ in decoder.finish():
            pass
    except (CorruptBatch, UnsupportedBatch) as error:
        start = r.start if error.start is None else error.start
        held = intersect([Range(start, error.end or r.end)], r)
        return KeyRange(key=key, range=held[0]) if held else None
    return None


def _chosen(partitions: Mapping[Key, PartitionState], only: Only) -> dict[Key, PartitionState]:
    planning.check_only(only, {k.tp: k for k in partitions})
    return {k: p for k, p in partitions.items() if not only or k.tp in only}
