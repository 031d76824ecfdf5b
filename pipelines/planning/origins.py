"""The origins of a feed in each partition, and the check that Kafka still has the logs of the ledger.

An origin is pinned once. It is the group's committed offset or, on the first plan, the feed's `start`. A topic that
appears later begins at its log start. A partition added to a known topic begins at 0, so that records deleted by
retention before the first read count as a loss (docs/developers/design/origins.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.errors import (
    ClusterChanged,
    LogTruncated,
    OffsetsLost,
    SluiceError,
    TopicRecreated,
    UsageError,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import Start, StartKind
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import KeyRange, OriginItem, SkipEntry
from sluice.pipelines.ledger.fold import MOVED_TO
from sluice.pipelines.ledger.marks import Committed
from sluice.pipelines.model.kafka import CommittedOffset, Key, PartitionState, Range, Tail, TopicPartition, subtract
from sluice.pipelines.ports import Clock, Cluster
from sluice.pipelines.util.documents import Flat, Internal


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused partition, with the error."""

    tp: Internal[TopicPartition]
    error: Flat[SluiceError]


def format_accept(feed: str, event: str, more: str = "") -> str:
    """Returns the command that accepts an event."""
    return f"sluice accept {feed} {event}{more} --reason …"


def explain_begin(feed: str) -> str:
    """Returns the commands with which a feed goes on in another cluster, and what each means."""
    return (
        f"{format_accept(feed, 'cluster', ' --begin committed')}   begins at the group's offsets there, if a mirror"
        " translated them; `--begin TIME`, such as 2026-11-20T14:00:00Z, at the first record of that time or later;"
        " `--begin earliest` at the log starts: records that a mirror copied land twice"
    )


def advise_absent(feed: str) -> str:
    """Returns what to do about a partition of the ledger that Kafka does not list for the feed."""
    return (
        "restore the topic, the right to DESCRIBE it, or its name in `topics`; if it was deleted or taken out of the"
        f" feed: {format_accept(feed, 'gone')}"
    )


def check_cluster(state: State, cluster_id: str, feed: str) -> None:
    """Raises ClusterChanged if the ledger belongs to another Kafka cluster."""
    if state.cluster and state.cluster != cluster_id:
        raise ClusterChanged(
            f"the ledger belongs to cluster {state.cluster}, but the bootstrap address answers as {cluster_id}",
            remedy="point kafka.bootstrap at the right cluster; or, if this one takes its place: "
            + explain_begin(feed),
        )


def find_key(state: State, partition: PartitionState) -> Key:
    """Returns the key under which the ledger currently accounts for the partition."""
    current = state.current.get(partition.tp)
    if current is not None and current.topic_id == partition.topic_id:
        return current
    return Key(partition.topic, partition.partition, partition.topic_id)


def check_incarnation(
    state: State, partition: PartitionState, epoch_ends: Mapping[TopicPartition, int], feed: str
) -> Refusal | None:
    """Returns the error if the partition's log is no longer the one in the ledger; else None.

    The topic was deleted and created again, or the log was truncated below the landed offsets.
    """
    current = state.current.get(partition.tp)
    if current is None:
        return None
    if current.is_ended and (why := state.origins[current].why).startswith(MOVED_TO):
        text = f"was {why} at offset {state.origins[current].offset}"
        back = f"sluice feeds move-topic {partition.topic} {why.removeprefix(MOVED_TO)} {feed}"
        return _refuse(UsageError, partition, text, f"take it out of `topics`, or move it back: {back}")
    # A topic's id is new with each creation, while offsets of a new topic may well continue where the old one ended.
    if current.topic_id != partition.topic_id:
        text = f"was deleted and created again: its topic id was {current.topic_id}, now {partition.topic_id}"
        accept = format_accept(feed, "recreated")
        remedy = f"restore the topic, or land the new one from its beginning: {accept}"
        return _refuse(TopicRecreated, partition, text, remedy)
    if current.is_ended:
        remedy = f"land it from {state.origins[current].offset} on: {format_accept(feed, 'recreated')}"
        return _refuse(TopicRecreated, partition, "is in Kafka again, and was accepted as gone", remedy)
    landed, epoch = state.epochs.get(current, (0, -1))
    if 0 <= partition.leader_epoch < epoch:
        why = f"in leader epoch {epoch}, and its leader is in epoch {partition.leader_epoch}: epochs never fall"
        return _refuse_restored(partition, why, feed)
    # The end of the epoch of the last landed record comes first. After an unclean election the log may have grown past
    # the landed offset again, with other records; but that epoch still ends before it.
    epoch_end = min(partition.high_watermark, epoch_ends.get(partition.tp, partition.high_watermark))
    for read, log_end in ((landed, epoch_end), (state.frontier(current), partition.high_watermark)):
        if read > log_end:
            text = f"was read up to {read}, but that part of the log now ends at {log_end}: it was truncated"
            remedy = (
                "find out which broker lost it (unclean leader election?); what now stands in place of the lost records"
                f" is landed from {log_end} on after: {format_accept(feed, 'truncated')}"
            )
            return _refuse(LogTruncated, partition, text, remedy, start=log_end, end=read)
    return None


def refuse_restored_log(partition: PartitionState, tail: Tail, feed: str) -> Refusal:
    """Returns the refusal of a log that has another batch where this one was read."""
    why = f"up to {tail.offset}, and the batch there is now another one: a log never changes"
    return _refuse_restored(partition, why, feed)


def _refuse_restored(partition: PartitionState, why: str, feed: str) -> Refusal:
    remedy = (
        "find out from when the copy is, and land what stands there now from that time on:"
        f" {format_accept(feed, 'truncated', ' --begin TIME')} (`--begin earliest`: all of it). Records of the copy"
        " that had landed land again"
    )
    return _refuse(LogTruncated, partition, f"was read {why}, so this log was restored from an older copy", remedy)


def _refuse(
    kind: type[SluiceError], p: PartitionState, text: str, remedy: str, start: int | None = None, end: int | None = None
) -> Refusal:
    error = kind(f"{p.tp} {text}", remedy=remedy, topic=p.topic, partition=p.partition, start=start, end=end)
    return Refusal(p.tp, error)


def find_missing_origins(state: State, partitions: Sequence[PartitionState]) -> tuple[PartitionState, ...]:
    """The partitions without a pinned origin."""
    return tuple(p for p in partitions if find_key(state, p) not in state.origins and p.tp not in state.current)


def resolve_origins(
    state: State,
    partitions: Sequence[PartitionState],
    committed: Committed,
    feed: Feed,
    cluster: Cluster,
    clock: Clock,
) -> tuple[OriginItem, ...]:
    """Returns an origin for each partition without one. Raises UsageError if `start: fail` forbids it."""
    new = find_missing_origins(state, partitions)
    by_policy = [p for p in new if committed.get(p.tp) is None and not state.origins]
    starts = find_starts(by_policy, feed.start, cluster, clock, feed.window.max_skew)
    known_topics = {(k.topic, k.topic_id) for k in state.origins}
    return tuple(_build_origin(p, committed.get(p.tp), starts.get(p.tp), known_topics) for p in new)


def _build_origin(
    p: PartitionState,
    committed: CommittedOffset | None,
    by_policy: tuple[int, str] | None,
    known_topics: set[tuple[str, str]],
) -> OriginItem:
    key = Key(p.topic, p.partition, p.topic_id)
    if committed is not None:
        return OriginItem(key=key, offset=committed.offset, committed=committed.offset, why="committed")
    if by_policy is not None:
        return OriginItem(key=key, offset=by_policy[0], committed=None, why=by_policy[1])
    if (p.topic, p.topic_id) in known_topics:
        return OriginItem(key=key, offset=0, committed=None, why="partition added to a known topic")
    return OriginItem(key=key, offset=p.log_start, committed=None, why="topic appeared later: its log start")


def find_starts(
    partitions: Sequence[PartitionState], start: Start, cluster: Cluster, clock: Clock, max_skew: int
) -> dict[TopicPartition, tuple[int, str]]:
    """Returns the offset at which each partition begins, and why. Raises UsageError for `fail`."""
    if not partitions:
        return {}
    why = f"start: {start}"
    match start.kind:
        case StartKind.EARLIEST:
            return {p.tp: (p.log_start, why) for p in partitions}
        case StartKind.LATEST:
            return {p.tp: (p.last_stable_offset, why) for p in partitions}
        case StartKind.FAIL:
            names = ", ".join(str(p.tp) for p in partitions[:5])
            raise UsageError(
                f"no committed offset for {names}" + (" …" if len(partitions) > 5 else "") + " and start is `fail`",
                remedy="commit offsets for the group, or choose start: earliest, latest, a time or a look-back",
            )
    time = start.resolve(clock())
    hits = cluster.offsets_at({p.tp: time for p in partitions}, max_skew)
    return {
        p.tp: (min(getattr(hits.get(p.tp), "offset", p.last_stable_offset), p.last_stable_offset), why)
        for p in partitions
    }


def explain_out_of_range(position: int, key: Key, p: PartitionState, feed: str) -> SluiceError | None:
    """Returns the error for a position outside the current log, with the exact lost range; None for one inside."""
    if position < p.log_start:
        return OffsetsLost(
            f"{p.tp}: offsets [{position}, {p.log_start}) are gone from Kafka (log start {p.log_start}); "
            f"{p.log_start - position} offsets were pending",
            remedy=f"record them as a loss and go on: {format_accept(feed, 'lost')};"
            " `policies.on_loss: accept` in the feed does so by itself",
            topic=p.topic,
            partition=p.partition,
            start=position,
            end=p.log_start,
        )
    if position > p.high_watermark:
        return OffsetsLost(
            f"{p.tp}: position {position} is beyond the end of the log ({p.high_watermark})",
            remedy=f"the log was truncated or the committed offset is wrong: see sluice offsets show {feed}",
            topic=p.topic,
            partition=p.partition,
            start=p.high_watermark,
            end=position,
        )
    return None


def skip_to(ledger: Ledger, ends: Mapping[Key, int], reason: str) -> tuple[KeyRange, ...]:
    """Record the offsets from each frontier up to `ends` as skipped. Returns the skipped ranges.

    Leaves out offsets that are accounted for or reserved by live batches.
    """

    def decide(state: State) -> SkipEntry | None:
        passed = [
            KeyRange(key=k, range=r)
            for k, end in sorted(ends.items())
            if state.current.get(k.tp) == k
            for r in subtract(Range(state.frontier(k), end), [*state.list_accounted(k), *state.list_reserved(k)])
        ]
        return SkipEntry(ranges=tuple(passed), reason=reason) if passed else None

    appended = ledger.append(decide)
    return appended.entry.ranges if appended and isinstance(appended.entry, SkipEntry) else ()
