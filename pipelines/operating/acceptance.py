"""The ways out when Sluice refuses: somebody accepts what happened to Kafka, with a reason.

Design: docs/developers/design/failures.md

    lost        pending offsets fell below the log start     → a loss; the frontier moves on
    recreated   the topic was deleted and created again   → a new life of each partition, from 0
    truncated   the log lost records that were read       → a new life, from where the log ends
    gone        Kafka no longer has the partition         → windows and commits do without it
    cluster     another cluster took the old one's place  → new lives, from committed offsets, a time or the start
    moved       the group's committed offsets were moved  → the next commit continues there, or they become skips
    corrupt     a batch cannot be read                    → a loss of exactly its offsets
    damaged     landed files are missing or damaged       → their rows are retired, and may land again
    ledger      the ledger lost its newest entries        → files of lost entries are set aside, and pending again
    group       another ledger committed for the group    → the feed takes it over, from there or from its `start`

Guarantees: only an event that happened can be accepted (else NothingToAccept). Each decision is made on the state just
below its entry. No intact file that counts is touched; only what remains of `damaged` ones is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.batch.survey import find_changed_logs, list_topics, open_ledger, take_survey, with_first_windows
from sluice.pipelines.committing.commit import CommitVerdict, adopt, judge, list_remedies, log_ends
from sluice.pipelines.errors import (
    CorruptBatch,
    IncarnationChanged,
    LogTruncated,
    NothingToAccept,
    PlanBusy,
    SluiceError,
    TopicRecreated,
    UnsupportedBatch,
    UsageError,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode, Start
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import are_files_intact
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import (
    AcceptEntry,
    Entering,
    GapEntry,
    KeyOffset,
    KeyRange,
    LossEntry,
    MovedEntry,
    OriginEntry,
    OriginItem,
    RetireEntry,
    TakeEntry,
    TakenMark,
)
from sluice.pipelines.ledger.marks import Foreign, Mark, check_marks, check_owner, find_foreign_marks, find_traces
from sluice.pipelines.ledger.tip import Tip, Trace
from sluice.pipelines.maintenance.expiry import remove_retired
from sluice.pipelines.model.kafka import (
    GONE,
    CommittedOffset,
    FetchLimits,
    Isolation,
    Key,
    PartitionState,
    Range,
    TopicPartition,
    encode_topic,
    intersect,
    subtract,
    union,
)
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import group_by_sharing
from sluice.pipelines.operating.rebuild_ledger import Rebuilt, list_standing, rebuild
from sluice.pipelines.planning import origins, windows
from sluice.pipelines.planning import plan as planning
from sluice.pipelines.ports import Fetcher, FetchFailed, Lake, Ports
from sluice.pipelines.publishing import lost_entries, publish
from sluice.pipelines.publishing.manifest import read_receipts_meeting, with_sharers
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions


class AcceptEvent(StrEnum):
    LOST = "lost"
    RECREATED = "recreated"
    TRUNCATED = "truncated"
    GONE = "gone"
    CLUSTER = "cluster"
    MOVED = "moved"
    CORRUPT = "corrupt"
    DAMAGED = "damaged"
    LEDGER = "ledger"
    GROUP = "group"


class Begin(StrEnum):
    """The offsets at which a feed continues that takes a group over from another ledger."""

    COMMITTED = "committed"
    START = "start"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of an acceptance. `entry` is its newest one; `abandoned` are the batches that ended.

    For a ledger that lost entries, `next` is the number with which it continues, `aside` are the files that were moved
    into `aside_folder`, and `gone` are ranges that they cover and Kafka no longer holds. For a group that
    was taken over, `begun` are the feed's new origins. `retired` are the ranges whose rows are given up, `again` what
    Kafka still has of them. `unseen` are the ends of the lives that were left, as far as the ledger knows them: whether
    their logs had more is unknown. `rebuilt` are files that count again in a ledger that was lost.
    """

    event: AcceptEvent
    entry: int
    lost: tuple[KeyRange, ...] = ()
    skipped: tuple[KeyRange, ...] = ()
    entered: tuple[Entering, ...] = ()
    moved: tuple[KeyOffset, ...] = ()
    abandoned: tuple[int, ...] = ()
    next: int = 0
    aside: tuple[str, ...] = ()
    aside_folder: str = ""
    gone: tuple[KeyRange, ...] = ()
    begun: tuple[OriginItem, ...] = ()
    retired: tuple[KeyRange, ...] = ()
    again: tuple[KeyRange, ...] = ()
    unseen: tuple[KeyOffset, ...] = ()
    rebuilt: Rebuilt | None = None


Only = Sequence[TopicPartition]


# -- lost


def accept_lost(feed: Feed, ports: Ports, reason: str, only: Only = ()) -> Accepted:
    """Record pending offsets below the log start as lost, in the given partitions or in all.

    Batches of dead runs that reserve some of it are abandoned first. Raises NothingToAccept, PlanBusy.
    """
    ledger = open_ledger(feed, ports)
    partitions = take_survey(feed, ports, ledger).partitions
    planning.check_only(only, {k.tp: k for k in partitions})
    partitions = {k: p for k, p in partitions.items() if not only or k.tp in only}
    abandoned = _abandon_dead(ports, ledger, _lost(feed, ledger.read(), partitions))

    def decide(state: State) -> LossEntry | None:
        lost_ranges = _lost(feed, state, partitions)
        if in_the_way := _reserving(state, lost_ranges):
            raise publish.build_busy_error(feed.name, *in_the_way[0], publish.NEW)
        return LossEntry(ranges=lost_ranges, reason=reason) if lost_ranges else None

    appended = ledger.append(decide)
    if appended is None or not isinstance(appended.entry, LossEntry):
        raise NothingToAccept(
            f"no pending offset of feed {feed.name} has fallen below a log start",
            remedy=f"see the pending offsets: sluice status {feed.name}",
        )
    return Accepted(AcceptEvent.LOST, appended.number, lost=appended.entry.ranges, abandoned=abandoned)


def _lost(feed: Feed, state: State, partitions: Mapping[Key, PartitionState]) -> tuple[KeyRange, ...]:
    planned = {k: p for k, p in partitions.items() if state.current.get(k.tp) == k}
    pending, _ = planning.find_pending_ranges(Request(RequestKind.CATCH_UP), state, planned, feed.window)
    lost_ranges = [KeyRange(key=o.key, range=r) for o in pending for r in o.lost]
    for key, p in planned.items():  # and those of the first window, below the origin
        if (origin := state.origins.get(key)) is not None and origin.cuts is not None:
            first = Range(origin.cuts, min(origin.offset, p.log_start))
            lost_ranges += [KeyRange(key=key, range=r) for r in subtract(first, state.list_accounted(key))]
    return tuple(lost_ranges)


def _reserving(state: State, ranges: Iterable[KeyRange]) -> list[tuple[Batch, OffsetRange]]:
    """The live batches with an offset range that meets one of the ranges."""
    wanted = list(ranges)
    return [
        (b, s) for b, s in state.list_live_ranges() if any(w.key == s.key and w.range.meets(s.range) for w in wanted)
    ]


def _abandon_dead(ports: Ports, ledger: Ledger, ranges: Iterable[KeyRange]) -> tuple[int, ...]:
    """Abandon the batches that reserve some of the ranges. Raises PlanBusy when one is at work."""
    reserving = {b.id: (b, s) for b, s in _reserving(ledger.read(), ranges)}
    batches = [b for b, _ in reserving.values()]
    verdicts = publish.judge_batches(ports.liveness, batches)
    for batch, s in reserving.values():
        if not verdicts[batch.id].dead:
            raise publish.build_busy_error(ledger.feed, batch, s, verdicts[batch.id])
    return publish.give_up(ledger, batches, verdicts, lambda p: None, "some of it was accepted as lost")


# -- another log


def accept_log(
    feed: Feed, ports: Ports, event: AcceptEvent, reason: str, only: Only = (), begin: Start | None = None
) -> Accepted:
    """Leave the life of the log that the ledger knows for the one in Kafka now: recreated, truncated, on another
    cluster, or none. Live batches that touch the old life end.

    On another cluster, or in a truncated log with a `begin`, the feed goes on from there; None: on another cluster from
    the group's committed offsets. Raises NothingToAccept, UsageError for one that is missing or beyond the log.
    """
    ledger = Ledger(ports.lake, feed.stored, ports.clock, "", ports.cluster.cluster_id())
    ledger_state = ledger.read()
    changes = _unlike(feed, ports, ledger_state, event)
    chosen = {tp: change for tp, change in changes.items() if not only or tp in only}
    committed = ports.group.fetch_committed(list(chosen))
    chooses = event is AcceptEvent.CLUSTER or (event is AcceptEvent.TRUNCATED and begin is not None)
    entered = [p for tp, (p, _) in sorted(chosen.items()) if chooses and tp in ledger_state.current]
    # Kafka is asked before the entry is decided: `decide` may run again with a newer state.
    starts = _find_cluster_starts(feed, ports, entered, committed, begin)
    ended: tuple[int, ...] = ()

    def decide(state: State) -> AcceptEntry | None:
        nonlocal ended
        items = tuple(
            _entering(state, event, p, error, committed.get(tp), starts.get(tp))
            for tp, (p, error) in sorted(chosen.items())
            if tp in state.current
            and state.current[tp] == ledger_state.current.get(tp)  # else somebody accepted it before us
        )
        left_keys = {i.leaves for i in items}
        # Live batches with offsets of the old log end with it: their records are gone.
        ended = tuple(sorted({b.id for b, s in state.list_live_ranges() if s.key in left_keys}))
        passed, lost = _split_pending(state, event, items)
        return AcceptEntry(event=event, items=items, passed=passed, lost=lost, reason=reason) if items else None

    appended = ledger.append(decide) if chosen or event is AcceptEvent.CLUSTER else None
    if appended is None or not isinstance(appended.entry, AcceptEntry):
        raise NothingToAccept(
            f"no topic of feed {feed.name} {_SAID[event]}" + (f" among {', '.join(map(str, only))}" if only else ""),
            remedy=f"see how Kafka and the ledger stand: sluice plan {feed.name}",
        )
    entry = appended.entry
    # Records behind the known end of the old log may never have been read.
    former = [i.leaves for i in entry.items if not i.leaves.is_ended]
    unseen = tuple(KeyOffset(key=k, offset=ledger_state.find_known_end(k)) for k in former)
    return Accepted(event, appended.number, entry.lost, entry.passed, entry.items, abandoned=ended, unseen=unseen)


def _find_cluster_starts(
    feed: Feed,
    ports: Ports,
    partitions: Sequence[PartitionState],
    committed: Mapping[TopicPartition, CommittedOffset | None],
    begin: Start | None,
) -> dict[TopicPartition, int]:
    """Returns the offsets at which the feed goes on in another cluster."""
    if begin is not None:
        starts = origins.find_starts(partitions, begin, ports.cluster, ports.clock, feed.window.max_skew)
        return {tp: offset for tp, (offset, _) in starts.items()}
    offsets = {p.tp: c.offset for p in partitions if (c := committed.get(p.tp)) and c.offset <= p.high_watermark}
    without = [str(p.tp) for p in partitions if p.tp not in offsets]
    if without:
        names = ", ".join(without[:_NAMED]) + (f" and {len(without) - _NAMED} more" if without[_NAMED:] else "")
        raise UsageError(
            f"group {feed.group} has no committed offset within the log of {names} on this cluster",
            remedy="let the mirror translate its offsets (MirrorMaker: sync.group.offsets.enabled), or choose: "
            + origins.explain_begin(feed.name),
        )
    return offsets


_NAMED = 5


def _split_pending(
    state: State, event: AcceptEvent, items: Sequence[Entering]
) -> tuple[tuple[KeyRange, ...], tuple[KeyRange, ...]]:
    """Returns the pending ranges of the lives that are left: those passed over in a log that stays, and lost ones."""
    passed, lost = list[KeyRange](), list[KeyRange]()
    for i in items:
        stays = i.enters.offset if event in (AcceptEvent.TRUNCATED, AcceptEvent.GONE) else 0
        pending = () if i.leaves.is_ended else state.pending(i.leaves, state.find_known_end(i.leaves))
        passed += [KeyRange(key=i.leaves, range=r) for r in intersect(pending, Range(0, stays))]
        lost += [KeyRange(key=i.leaves, range=r) for x in pending for r in subtract(x, [Range(0, stays)])]
    return tuple(passed), tuple(lost)


_SAID = {
    AcceptEvent.RECREATED: "was deleted and created again since the ledger knew it",
    AcceptEvent.TRUNCATED: "lost records that were read",
    AcceptEvent.CLUSTER: "is on another cluster than the ledger's",
    AcceptEvent.GONE: "lacks a partition in Kafka that the ledger has",
}


def _unlike(
    feed: Feed, ports: Ports, state: State, event: AcceptEvent
) -> dict[TopicPartition, tuple[PartitionState, SluiceError | None]]:
    """The partitions affected by the event, with their refusals. Raises ClusterChanged, NothingToAccept."""
    topics = match(feed.topics, ports.cluster.topics())
    partitions = ports.cluster.partitions(topics, feed.isolation)
    if event is AcceptEvent.CLUSTER:
        if not state.cluster or state.cluster == ports.cluster.cluster_id():
            raise NothingToAccept(
                f"the ledger of feed {feed.name} belongs to the cluster that answers ({ports.cluster.cluster_id()})",
                remedy="there is nothing to accept",
            )
        return {p.tp: (p, None) for p in partitions}
    origins.check_cluster(state, ports.cluster.cluster_id(), feed.name)
    if event is AcceptEvent.GONE:
        there = {p.tp for p in partitions}
        return {
            k.tp: (PartitionState(*k.tp, k.topic_id, -1, -1, log_start=0, last_stable_offset=0, high_watermark=0), None)
            for k in state.known()
            if k.tp not in there
        }
    kind: type[IncarnationChanged] = TopicRecreated if event is AcceptEvent.RECREATED else LogTruncated
    refused = {r.tp: r.error for r in find_changed_logs(feed.name, state, partitions, ports.cluster)}
    still = ports.cluster.topics()  # a recreated topic has other epochs under the same name
    same = [p for p in partitions if still.get(p.topic) == p.topic_id]
    return {p.tp: (p, refused[p.tp]) for p in same if isinstance(refused.get(p.tp), kind)}


def _entering(
    state: State,
    event: AcceptEvent,
    p: PartitionState,
    error: SluiceError | None,
    committed: CommittedOffset | None,
    start: int | None,
) -> Entering:
    current = state.current[p.tp]
    back = current.is_ended and current.topic_id == p.topic_id
    starts = {
        AcceptEvent.RECREATED: state.origins[current].offset if back else 0,
        AcceptEvent.GONE: max([state.frontier(current), *(r.end for r in state.list_accounted(current))]),
    }
    offset = (
        start
        if start is not None
        else starts.get(event, error.start if error and error.start is not None else p.log_start)
    )
    origin = OriginItem(
        key=state.find_unused_life(Key(p.topic, p.partition, p.topic_id + (GONE if event is AcceptEvent.GONE else ""))),
        offset=offset,
        committed=committed.offset if committed else None,
        why=f"accepted: {event}",
        opens=state.boundary_times[-1] if state.boundary_times else None,
    )
    return Entering(leaves=current, enters=origin)


# -- moved offsets


def accept_moved(feed: Feed, ports: Ports, reason: str, only: Only = (), *, adopting: bool = False) -> Accepted:
    """Let the next commit continue from the moved offsets. With `adopting`, skip the offsets that they pass over.

    Raises NothingToAccept, UsageError, ForeignMarks, and GroupMoved for an offset beyond the end of its log.
    """
    if feed.commit is CommitMode.NONE:
        raise UsageError(f"feed {feed.name} commits no offsets", remedy="no committed offset can conflict with it")
    ledger = open_ledger(feed, ports)
    state = ledger.read()
    targets = {k: o for k, o in state.frontiers().items() if not only or k.tp in only}
    committed = ports.group.fetch_committed([k.tp for k in targets])
    check_owner(ledger, state := ledger.read(), committed)
    verdicts = {k: judge(state, k, o, committed.get(k.tp)) for k, o in targets.items()}
    moved = [k for k, v in verdicts.items() if v is CommitVerdict.MOVED]
    if not moved:
        raise NothingToAccept(
            f"the committed offsets of group {feed.group} are where feed {feed.name} expects them",
            remedy=f"see them: sluice offsets show {feed.name}",
        )
    if not adopting:  # offsets that somebody put at the frontier would conflict once it moves on
        moved += [k for k, v in verdicts.items() if v is CommitVerdict.DONE and state.commits.get(k) != targets[k]]
    offsets = tuple(KeyOffset(key=k, offset=o.offset) for k in moved if (o := committed.get(k.tp)))
    if adopting:
        _check_ahead(ledger.feed, ports, offsets, targets)
    skipped = adopt(ledger, moved, committed, ports.cluster, reason) if adopting else ()
    appended = ledger.append(lambda _: MovedEntry(offsets=offsets, reason=reason))
    return Accepted(AcceptEvent.MOVED, appended.number if appended else -1, skipped=skipped, moved=offsets)


def _check_ahead(feed: str, ports: Ports, offsets: Sequence[KeyOffset], frontiers: Mapping[Key, int]) -> None:
    """Raises UsageError, with the commands that help, if one of the offsets passes over nothing."""
    back = [at for at in offsets if at.offset < frontiers[at.key]]
    if not back:
        return
    positions = "; ".join(
        f"{at.key}: the group's offset {at.offset} is below the frontier {frontiers[at.key]}" for at in back
    )
    ends = log_ends(ports.cluster, [at.key for at in offsets])
    raise UsageError(
        f"{positions}: nothing is passed over by it",
        remedy="; ".join(list_remedies(feed, {at.key: (frontiers[at.key], at.offset) for at in offsets}, ends)),
    )


# -- a batch that cannot be read


def accept_corrupt(feed: Feed, ports: Ports, fetcher: Fetcher, wanted: AskedRange, reason: str) -> Accepted:
    """Record the first unreadable batch in the range as lost: exactly those of its offsets that are pending.

    The range is read again for this. Raises NothingToAccept when all of it can be read, PlanBusy, and any error that
    keeps it from being read at all.
    """
    ledger = open_ledger(feed, ports)
    surveyed = take_survey(feed, ports, ledger)
    request = Request(RequestKind.OFFSETS, (wanted,))
    pending, _ = planning.find_pending_ranges(request, surveyed.state, surveyed.partitions, feed.window)
    due = [(o.key, o.partition, r) for o in pending for r in o.ranges]
    damaged = next((d for key, p, r in due if (d := _confirm_damage(feed, fetcher, key, p, r))), None)
    if damaged is None:
        raise NothingToAccept(
            f"every batch that is pending in {wanted.topic}:{wanted.partition}:{wanted.start}-{wanted.end} can be read",
            remedy=f"land it: sluice run {feed.name}",
        )
    abandoned = _abandon_dead(ports, ledger, [damaged])

    def decide(state: State) -> LossEntry | None:
        current = state.current.get(damaged.key.tp) == damaged.key
        unaccounted = subtract(damaged.range, state.list_accounted(damaged.key)) if current else ()
        ranges = tuple(KeyRange(key=damaged.key, range=r) for r in unaccounted)
        return LossEntry(ranges=ranges, reason=reason) if ranges else None

    appended = ledger.append(decide)
    lost = appended.entry.ranges if appended and isinstance(appended.entry, LossEntry) else ()
    return Accepted(AcceptEvent.CORRUPT, appended.number if appended else -1, lost=lost, abandoned=abandoned)


def _confirm_damage(feed: Feed, fetcher: Fetcher, key: Key, p: PartitionState, r: Range) -> KeyRange | None:
    """Returns `_damaged_range` if a second reading finds damage, too: the first may be the network's."""
    return _damaged_range(feed, fetcher, key, p, r) and _damaged_range(feed, fetcher, key, p, r)


def _damaged_range(feed: Feed, fetcher: Fetcher, key: Key, p: PartitionState, r: Range) -> KeyRange | None:
    """Returns the offsets of the leader's first unreadable batch, up to the range's end if its own is unknown."""
    piece = OffsetRange(*key, r.start, r.end, p.leader_epoch)
    committed = feed.isolation is Isolation.READ_COMMITTED
    options = DecodeOptions(read_committed=committed, max_batch_bytes=feed.batch_bytes)
    decoder = BatchDecoder(key.topic, key.partition, r.start, r.end, options)
    try:
        for fetched in fetcher.stream([piece], FetchLimits(leaders_only=True)):
            if isinstance(fetched, FetchFailed):
                raise fetched.error
            for _ in decoder.read(fetched.records, fetched.aborted):
                pass
        for _ in decoder.finish():
            pass
    except (CorruptBatch, UnsupportedBatch) as error:
        start = r.start if error.start is None else error.start
        damaged = intersect([Range(start, error.end or r.end)], r)
        return KeyRange(key=key, range=damaged[0]) if damaged else None
    return None


# -- a landed file that cannot be read


def accept_damaged(feed: Feed, ports: Ports, wanted: AskedRange, reason: str) -> Accepted:
    """Retire the rows of missing or damaged files with offsets in the range; whole files, with all of their ranges.

    Raises NothingToAccept when all files have the ledger's hashes, and PlanBusy.
    """
    ledger, lake = Ledger.offline(ports.lake, feed.stored, ports.clock), ports.lake

    def decide(state: State) -> RetireEntry | None:
        keys = [k for k in state.origins if k.tp == (wanted.topic, wanted.partition)]
        meeting = read_receipts_meeting(ledger, state, [(k, Range(wanted.start, wanted.end)) for k in keys])
        groups = group_by_sharing(with_sharers(ledger, state, meeting))
        damaged = [r for group in groups if not are_files_intact(group, lake, visible=True) for r in group]
        ranges = tuple(KeyRange(key=r.offset_range.key, range=r.offset_range.range) for r in damaged)
        if in_the_way := _reserving(state, ranges):
            raise publish.build_busy_error(feed.name, *in_the_way[0], publish.NEW)
        parts = tuple(dict.fromkeys(p.path for r in damaged for p in r.parts))
        return RetireEntry(before=0, ranges=ranges, parts=parts, reason=reason) if ranges else None

    roll_forward(ledger, lake, feed.stored)
    appended = ledger.append(decide)
    if appended is None or not isinstance(appended.entry, RetireEntry):
        raise NothingToAccept(
            f"the files of {wanted.topic}:{wanted.partition}:{wanted.start}-{wanted.end} have the ledger's hashes",
            remedy=f"see all files: sluice audit {feed.name} --all --hashes",
        )
    remove_retired(ledger, lake)
    retired, state = appended.entry.ranges, appended.state
    logs = dict.fromkeys(state.current.values(), Range(0, 1 << 63))
    with suppress(SluiceError):  # without an answer, Kafka may have all of it
        topics = {r.key.topic for r in retired} & ports.cluster.topics().keys()
        partitions = ports.cluster.partitions(topics, feed.isolation) if topics else ()
        logs = {origins.find_key(state, p): Range(p.log_start, p.last_stable_offset) for p in partitions}
    there = ((r.key, x) for r in retired if r.key in logs for x in intersect([r.range], logs[r.key]))
    again = tuple(KeyRange(key=key, range=r) for key, r in there)
    return Accepted(AcceptEvent.DAMAGED, appended.number, retired=retired, again=again)


# -- a ledger that lost entries


_UNTRACED = 100
"""Numbers that are skipped where lost entries may have left no trace."""


@dataclass(frozen=True, slots=True)
class _LedgerRemains:
    """A ledger without its newest entries, and the state of Kafka. `ledger_id` is its own, or that of a ledger
    that was lost as a whole."""

    state: State
    ledger_id: str
    tip: Tip | None
    partitions: tuple[PartitionState, ...]
    committed: Mapping[TopicPartition, CommittedOffset | None]
    traces: tuple[Trace, ...]


def accept_ledger(feed: Feed, ports: Ports, reason: str, *, from_files: bool = False) -> Accepted:
    """Continue with the entries that stand. Files of lost entries are set aside and pending again; live batches end.

    With `from_files`, files of which Kafka does not have all records count again. The next number is above all numbers
    known to be used, so that no name and no mark ever means two things. Raises NothingToAccept, and PlanBusy while any
    run is at work.
    """
    ledger = Ledger.from_entries(ports.lake, feed.stored, ports.clock, ports.cluster.cluster_id())
    origins.check_cluster(ledger.read(), ports.cluster.cluster_id(), feed.name)
    remains = _ledger_remains(feed, ports, ledger.read())
    standing = list_standing(feed, ports.lake, remains.state, remains.partitions) if from_files else ()
    if standing and not remains.traces and remains.state.gaps:  # a call that was killed
        _check_idle(feed, ports, remains.state)
        for batch in remains.state.live():
            publish.abandon(ledger, batch.id, "the call that rebuilt the account was killed")
        done = rebuild(feed, ports, ledger, standing, remains.partitions)
        return Accepted(AcceptEvent.LEDGER, ledger.read().newest, rebuilt=done)
    if not remains.traces:
        raise NothingToAccept(
            f"the ledger of feed {feed.name} shows no trace of lost entries",
            remedy=f"compare all of it with Kafka: sluice audit {feed.name} --strict --rescan",
        )
    # A live run could append in between.
    _check_idle(feed, ports, remains.state)
    after = _find_unused_number(remains)
    # From here on the loss is known, even if this process dies.
    ports.lake.put(paths.tip_path(feed.stored), Tip(remains.ledger_id, after - 1).dump())
    counting = {f.path for f in standing}
    aside = [p for p in lost_entries.list_strays(feed, ports.lake, remains.state) if p not in counting]
    begun, missing = _begun_at(ports, remains, aside), _not_in_kafka(ports.lake, remains, aside)
    lost_entries.set_aside(ports.lake, feed.stored, after, aside)
    appended = ledger.append(
        lambda state: _gap(remains, after, reason) if state.number == remains.state.number else None
    )
    if appended is None:
        raise NothingToAccept("another process has accepted it", remedy=f"see: sluice status {feed.name}")
    rebuilt = rebuild(feed, ports, ledger, standing, remains.partitions) if standing else None
    _originate(feed, ports, ledger, remains, begun)
    ended = tuple(b.id for b in remains.state.live())
    folder, moved = paths.aside_path(feed.stored, after, ""), tuple(aside)
    outcome = Accepted(AcceptEvent.LEDGER, appended.number, abandoned=ended, next=after, aside=moved, gone=missing)
    return replace(outcome, aside_folder=folder, rebuilt=rebuilt)


def _find_unused_number(remains: _LedgerRemains) -> int:
    """Returns the number of the next entry.

    The entry of a finished commit is known from the tip alone. So if other evidence is newer, or the tip is lost,
    numbers directly above may have been used.
    """
    after = max(remains.state.number, *(t.number for t in remains.traces)) + 1
    tip = remains.tip
    is_newest = tip is not None and (tip.ledger, tip.number) == (remains.ledger_id, after - 1)
    return after if is_newest else after + _UNTRACED


def _ledger_remains(feed: Feed, ports: Ports, state: State) -> _LedgerRemains:
    partitions = ports.cluster.partitions(match(feed.topics, ports.cluster.topics()), feed.isolation)
    committed = ports.group.fetch_committed([p.tp for p in partitions])
    evidence = lost_entries.collect_traces(feed, ports.lake, state)
    tip = lost_entries.read_tip(ports.lake, feed.stored)
    marks = [m.ledger for c in committed.values() if c and (m := Mark.parse(c.metadata))]
    ledger_id = state.ledger_id or (tip.ledger if tip else "") or (marks[0] if marks and evidence else "")
    return _LedgerRemains(
        state, ledger_id, tip, partitions, committed, (*evidence, *find_traces(state, committed, ledger_id))
    )


def _check_idle(feed: Feed, ports: Ports, state: State) -> None:
    """Raises PlanBusy while a run may be at work that still knows the lost entries."""
    all_owners = (*ports.liveness.owners(), *(b.owner for b in state.live()))
    verdicts = ports.liveness.judge(dict.fromkeys(all_owners))
    for owner in all_owners:
        if not verdicts[owner.token].dead:
            who = owner.describe() if owner.run else f"owner {owner.token[:8]}"
            raise PlanBusy(
                f"{who} is at work on feed {feed.name}, and may know of more than the ledger holds",
                remedy=f"end it, or wait for its end; then again: {origins.format_accept(feed.name, 'ledger')}",
            )


def _gap(remains: _LedgerRemains, after: int, reason: str) -> GapEntry:
    """The gap entry. It names the committed offsets that lost entries had put there."""
    marked = {t for t, c in remains.committed.items() if c and find_traces(remains.state, {t: c}, remains.ledger_id)}
    committed = [
        (origins.find_key(remains.state, p), c.offset) for p in remains.partitions if (c := remains.committed.get(p.tp))
    ]
    return GapEntry(
        next=after,
        evidence=tuple(t.said for t in remains.traces[:20]),
        ledger="" if remains.state.ledger_id else remains.ledger_id,
        committed=tuple(KeyOffset(key=k, offset=o) for k, o in committed if k.tp in marked),
        reason=reason,
    )


def _begun_at(ports: Ports, remains: _LedgerRemains, aside: Iterable[str]) -> tuple[OriginItem, ...]:
    """New origins for partitions whose origin is lost: the first offset of this log that had landed."""
    names = sorted((start, path, tp) for path in aside for tp, (start, _) in _ranges_in(ports.lake, path))
    items: dict[TopicPartition, OriginItem] = {}
    for p in origins.find_missing_origins(remains.state, remains.partitions):
        mine = (encode_topic(p.topic), p.partition)
        first = (start for start, path, tp in names if tp == mine and _life(ports, path) == p.topic_id)
        if (start := next(first, None)) is not None:
            committed = remains.committed.get(p.tp)
            items[p.tp] = OriginItem(
                key=origins.find_key(remains.state, p),
                offset=start,
                committed=committed.offset if committed else None,
                why="the ledger lost its origin: the first offset that had landed",
            )
    return tuple(items.values())


def _ranges_in(lake: Lake, path: str) -> list[tuple[tuple[str, int], Range]]:
    """The offset ranges of a part's file, each as (encoded topic, partition) and range; none of another file.

    They are in its name, or, of a shared file, in its footer. A shared one that cannot be read tells its first range.
    """
    if (name := paths.parse_part(path)) is None:
        return []
    own = [((name.topic, name.partition), Range(name.start, name.end))]
    if not name.shared:
        return own
    try:
        with lake.open(path) as file:
            about = pq.read_metadata(file).metadata or {}
        return [_parse_range(text) for text, _ in json.loads(about[b"sluice.slices"])]
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError):
        return own


def _parse_range(text: str) -> tuple[tuple[str, int], Range]:
    """An offset range as it is written: `topic:partition:start-end`."""
    topic, partition, offsets = text.rsplit(":", 2)
    start, end = offsets.split("-")
    return (encode_topic(topic), int(partition)), Range(int(start), int(end))


def _life(ports: Ports, path: str) -> str:
    """The life of the log that the part names; empty if it cannot be read."""
    try:
        with ports.lake.open(path) as file:
            about = pq.read_metadata(file).metadata or {}
    except (OSError, pa.ArrowException):
        return ""
    return str(about.get(b"sluice.topic_id", b""), errors="replace")


def _originate(
    feed: Feed, ports: Ports, ledger: Ledger, remains: _LedgerRemains, begun: tuple[OriginItem, ...]
) -> None:
    state = ledger.read()
    if begun := tuple(o for o in begun if o.key.tp not in state.current):
        keyed = {origins.find_key(remains.state, p): p for p in remains.partitions}
        if state.current and not remains.state.current:  # rebuilt: the window of its oldest file, and no later one
            begun = tuple(o.model_copy(update={"opens": state.boundary_times[0]}) for o in begun)
        else:
            begun = with_first_windows(feed, ports.cluster, state, keyed, begun, ports.clock())
        items = windows.find_cuts(ports.cluster, keyed, begun, feed.window.max_skew)
        ledger.append(lambda _: OriginEntry(items=items))


def _not_in_kafka(lake: Lake, remains: _LedgerRemains, aside: Iterable[str]) -> tuple[KeyRange, ...]:
    """Returns offsets that the parts cover and the logs no longer hold: the next run cannot land them again."""
    ranges, out = [range_ for path in aside for range_ in _ranges_in(lake, path)], list[KeyRange]()
    for p in remains.partitions:
        mine = (r for tp, r in ranges if tp == (encode_topic(p.topic), p.partition))
        below = union(Range(r.start, min(r.end, p.log_start)) for r in mine if r.start < p.log_start)
        out += [KeyRange(key=origins.find_key(remains.state, p), range=r) for r in below]
    return tuple(out)


# -- a group of another ledger


def accept_group(feed: Feed, ports: Ports, begin: Begin, reason: str) -> Accepted:
    """Take the group over from the ledgers whose marks its committed offsets carry. Newer marks are refused again.

    A partition that the feed has not planned begins at the committed offset, or as `start` says. One that it has
    planned continues at its frontier, or skips what lies up to the committed offset. Raises NothingToAccept,
    UsageError, EntriesLost, GroupMoved.
    """
    ledger = open_ledger(feed, ports)
    partitions = ports.cluster.partitions(list_topics(feed, ports.cluster), feed.isolation)
    committed = ports.group.fetch_committed([p.tp for p in partitions])
    state = check_marks(ledger, ledger.read(), committed)
    marks = find_foreign_marks(state, committed, commits=feed.commit is not CommitMode.NONE)
    if not marks:
        raise NothingToAccept(
            f"no committed offset of group {feed.group} belongs to another ledger than that of feed {feed.name}",
            remedy=f"see them: sluice offsets show {feed.name}",
        )
    entry = _takeover(feed, ports, state, _ForeignGroup(partitions, committed, marks), begin, reason)
    ahead = [at.key for at in entry.committed if at.key in state.origins and at.offset > state.frontier(at.key)]
    skipped = adopt(ledger, ahead, committed, ports.cluster, reason) if begin is Begin.COMMITTED and ahead else ()
    # Without origins that somebody else has pinned since.
    appended = ledger.append(
        lambda state: entry.model_copy(
            update={"origins": tuple(o for o in entry.origins if o.key.tp not in state.current)}
        )
    )
    begun = appended.entry.origins if appended and isinstance(appended.entry, TakeEntry) else ()
    number = appended.number if appended else -1
    return Accepted(AcceptEvent.GROUP, number, skipped=skipped, moved=entry.committed, begun=begun)


@dataclass(frozen=True, slots=True)
class _ForeignGroup:
    """A group with marks of other ledgers: the log's partitions, their committed offsets, and the marks."""

    partitions: Sequence[PartitionState]
    committed: Mapping[TopicPartition, CommittedOffset | None]
    marks: Sequence[Foreign]


def _takeover(feed: Feed, ports: Ports, state: State, group: _ForeignGroup, begin: Begin, reason: str) -> TakeEntry:
    """The entry. It pins an origin in every partition without one: `start` counts only in a feed's first origins."""
    partitions, marks = group.partitions, group.marks
    keyed, by_tp = {origins.find_key(state, p): p for p in partitions}, {p.tp: p for p in partitions}
    if begin is Begin.COMMITTED:
        _check_of_this_log(feed.name, state, marks, by_tp)
    theirs = {mark.tp for mark in marks}
    counted = {tp: c for tp, c in group.committed.items() if begin is Begin.COMMITTED or tp not in theirs}
    began = origins.resolve_origins(state, partitions, counted, feed, ports.cluster, ports.clock)
    began = with_first_windows(feed, ports.cluster, state, keyed, began, ports.clock())
    began = windows.find_cuts(ports.cluster, keyed, began, feed.window.max_skew)
    offsets = {mark.tp: mark.offset for mark in marks}
    newest = {m.ledger: max(n.number for n in marks if n.ledger == m.ledger) for m in marks}
    return TakeEntry(
        marks=tuple(TakenMark(ledger=ledger, number=number) for ledger, number in sorted(newest.items())),
        committed=tuple(KeyOffset(key=k, offset=offsets[p.tp]) for k, p in sorted(keyed.items()) if p.tp in offsets),
        origins=tuple(o.model_copy(update={"committed": offsets.get(o.key.tp, o.committed)}) for o in began),
        begin=begin.value,
        reason=reason,
    )


def _check_of_this_log(
    feed: str, state: State, marks: Sequence[Foreign], partitions: Mapping[TopicPartition, PartitionState]
) -> None:
    """Raises UsageError for a committed offset at which no feed can begin: it is beyond the log, or of another log."""
    for mark in (mark for mark in marks if mark.tp not in state.current):
        p = partitions[mark.tp]
        beyond = f"its log ends at {p.high_watermark}" if mark.offset > p.high_watermark else ""
        another = (
            f"it is of topic id {mark.topic_id}, now {p.topic_id}" if mark.topic_id not in ("", p.topic_id) else ""
        )
        if beyond or another:
            raise UsageError(
                f"{mark.tp} cannot begin at the committed offset {mark.offset}: {beyond or another}",
                remedy=f"begin as `start` says: {origins.format_accept(feed, 'group', ' --begin start')}",
                topic=mark.tp.topic,
                partition=mark.tp.partition,
            )
