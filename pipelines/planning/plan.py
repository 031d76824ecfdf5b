"""The plan of a batch: requested ranges minus accounted ones, cut into offset ranges and assigned to tasks.

Pure functions: the same state, partitions and settings give the same plan, and so the same hash, part names and rows
(invariant 9). `find_pending_ranges` finds pending ranges, `build` makes the plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sluice.pipelines.errors import OffsetsLost, SluiceError, UsageError, WindowHeld
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, State
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.model.kafka import Key, PartitionState, Range, TopicPartition, cut, intersect, subtract, union
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Plan, Request, RequestKind
from sluice.pipelines.model.receipts import Receipt, group_by_sharing
from sluice.pipelines.planning import assignment, windows
from sluice.pipelines.planning.assignment import Sizing
from sluice.pipelines.planning.held_back import HeldBack
from sluice.pipelines.planning.origins import Refusal, explain_out_of_range
from sluice.pipelines.util.units import show_window

DEFAULT_RECORD_BYTES = 256
"""Estimated bytes per offset if the cluster does not report log sizes."""


@dataclass(frozen=True, slots=True)
class PendingRanges:
    """A request's pending ranges in one partition.

    `asked` is the requested range. Of it, `ranges` can still be read, and `lost` lies below the log start.
    """

    key: Key
    partition: PartitionState
    asked: Range
    ranges: tuple[Range, ...]
    lost: tuple[Range, ...] = ()

    @property
    def span(self) -> int:
        return sum(r.span for r in self.ranges)

    @property
    def bytes_per_offset(self) -> float:
        readable = self.partition.high_watermark - self.partition.log_start
        if self.partition.log_bytes is None or readable <= 0:
            return DEFAULT_RECORD_BYTES
        return max(self.partition.log_bytes / readable, 1.0)

    @property
    def estimated_bytes(self) -> int:
        return math.ceil(self.span * self.bytes_per_offset)


def find_pending_ranges(
    request: Request,
    state: State,
    partitions: Mapping[Key, PartitionState],
    window: WindowSettings,
    replaced: Sequence[Receipt] = (),
    feed: str = "",
) -> tuple[tuple[PendingRanges, ...], tuple[Refusal, ...]]:
    """Returns the request's pending ranges in each partition, and the refused partitions.

    A replacing request has all of its ranges pending, and the complete offset ranges of all receipts in `replaced`.
    They are cut where these begin and end, so that the records of each piece can be counted before and after.
    Pending offsets below a partition's log start go into `lost`. Remedies of refusals name the `feed`. Raises
    UsageError if a range names an unknown partition or reaches beyond the last stable offset.
    """
    pending: list[PendingRanges] = []
    refused: list[Refusal] = []
    landed = by_key((r.offset_range.key, r.offset_range.range) for r in replaced)
    for key, wanted in _widen_to_ranges(find_requested_ranges(request, state, partitions, window), replaced):
        if (partition := partitions.get(key)) is None:
            raise UsageError(
                f"{key}: {wanted} shares a file with the offsets to land again, and is not a partition of the feed in"
                " Kafka",
                remedy="landed rows stay: the offset ranges of a file are landed again together",
                topic=key.topic,
                partition=key.partition,
                start=wanted.start,
                end=wanted.end,
            )
        if wrong := _explain_unreadable(request, wanted, key, partition, state, feed):
            refused.append(Refusal(key.tp, wrong))
            before = (
                windows.find_last_boundary(state, key, partition.last_stable_offset)
                if isinstance(wrong, WindowHeld)
                else 0
            )
            if request.replace or before <= wanted.start:
                continue
            wanted = Range(wanted.start, before)  # of several windows, those before the held one can be read
        # Pending: requested, and neither landed nor given up. Below the log's start, Kafka has nothing to read.
        due = subtract(wanted, _find_accounted(request, state, key))
        below = Range(0, partition.log_start)
        readable = Range(partition.log_start, max(wanted.end, partition.log_start))
        # New ranges end where those that they replace do.
        seams = [offset for r in union(landed.get(key, ())) for offset in r]
        pieces = tuple(piece for r in intersect(due, readable) for piece in cut(r, seams))
        pending.append(PendingRanges(key, partition, wanted, pieces, intersect(due, below)))
    return tuple(pending), tuple(refused)


def _find_accounted(request: Request, state: State, key: Key) -> Iterable[Range]:
    """Returns the ranges that need no reading. Skipped offsets are read if the request names them by number."""
    if request.replace:
        return ()
    accounted = state.list_accounted(key)
    if request.kind is RequestKind.OFFSETS:
        skipped = state.skipped.get(key, ())
        return tuple(rest for r in accounted for rest in subtract(r, skipped))
    return accounted


def _widen_to_ranges(wanted: Iterable[tuple[Key, Range]], replaced: Sequence[Receipt]) -> Iterator[tuple[Key, Range]]:
    """The ranges and those of the replaced offset ranges, which meet them or share a file with one that does."""
    if not replaced:
        yield from wanted
        return
    wide = by_key((*wanted, *((r.offset_range.key, r.offset_range.range) for r in replaced)))
    yield from ((key, r) for key, ranges in wide.items() for r in union(ranges))


def _explain_unreadable(
    request: Request, requested: Range, key: Key, partition: PartitionState, state: State, feed: str
) -> SluiceError | None:
    """Returns the reason why the requested range cannot be read now; None if it can.

    The ledger may be newer than our view of the partition: others may have landed offsets beyond it since.
    """
    if request.kind is RequestKind.WINDOW and requested.end > partition.last_stable_offset:
        return build_window_held_error(key.tp, requested.end, partition.last_stable_offset)
    if request.replace and requested.start < partition.log_start:
        return _build_not_again_error(requested, key, partition, feed)
    beyond = requested.start > partition.high_watermark and requested.start == state.origins[key].offset
    return explain_out_of_range(requested.start, key, partition, feed) if beyond else None


def build_window_held_error(
    tp: TopicPartition, end: int, last_stable_offset: int, by: HeldBack | None = None
) -> WindowHeld:
    """Returns the error for a window that ends above the last stable offset, with the open transaction, if known."""
    return WindowHeld(
        f"{tp}: the window ends at {end}, but {by.who if by else 'an open transaction'} holds the last stable offset at"
        f" {last_stable_offset}",
        remedy=by.remedy if by else "the next run lands it once that has ended",
        topic=tp.topic,
        partition=tp.partition,
        start=last_stable_offset,
        end=end,
    )


def _build_not_again_error(requested: Range, key: Key, partition: PartitionState, feed: str) -> OffsetsLost:
    return OffsetsLost(
        f"{key}: {requested} cannot be landed again: Kafka holds it only from {partition.log_start} on",
        remedy="landed rows stay; request ranges that Kafka still holds: windows, or offset ranges of published batches"
        " are landed again completely. If a file is missing or damaged, bring it back from a backup, or give it up:"
        f" sluice accept {feed} damaged --offsets {key}:{requested.start}-{requested.end} --reason …",
        topic=key.topic,
        partition=key.partition,
        start=requested.start,
        end=partition.log_start,
    )


def find_requested_ranges(
    request: Request, state: State, partitions: Mapping[Key, PartitionState], window: WindowSettings
) -> Iterable[tuple[Key, Range]]:
    """Yields the requested ranges by partition. Raises UsageError."""
    by_tp = {key.tp: key for key in partitions}
    if request.kind is RequestKind.OFFSETS:
        ranges_of = by_key(_resolve_range(r, by_tp, partitions) for r in request.ranges)
        yield from ((key, r) for key, ranges in ranges_of.items() for r in union(ranges))
        return
    check_only(request.only, by_tp)
    for key, partition in partitions.items():
        if request.only and key.tp not in request.only:
            continue
        if request.window is not None:
            yield key, _find_pinned_range(state, key, request.window, request.until or window.end_of(request.window))
        else:
            start = state.frontier(key)
            yield key, Range(start, max(start, partition.last_stable_offset))


def _resolve_range(
    r: AskedRange, by_tp: Mapping[TopicPartition, Key], partitions: Mapping[Key, PartitionState]
) -> tuple[Key, Range]:
    key = by_tp.get(TopicPartition(r.topic, r.partition))
    if key is None:
        raise _build_unknown_partition_error(TopicPartition(r.topic, r.partition), by_tp)
    last_stable_offset = partitions[key].last_stable_offset
    if not 0 <= r.start < r.end:
        raise UsageError(f"{key}: [{r.start}, {r.end}) is not a range", remedy="give START-END with 0 ≤ START < END")
    if r.end > last_stable_offset:
        raise UsageError(
            f"{key}: [{r.start}, {r.end}) reaches beyond the last stable offset {last_stable_offset}",
            remedy=f"ask for at most {key}:{r.start}-{last_stable_offset}, or wait for the records to become stable",
            topic=key.topic,
            partition=key.partition,
        )
    return key, Range(r.start, r.end)


def _find_pinned_range(state: State, key: Key, start: int, end: int) -> Range:
    if (between := windows.find_range_between(state, key, start, end)) is None:
        raise UsageError(
            f"{key} has no windows from {show_window(start)} to {show_window(end)}: they had another length or zone"
            " then",
            remedy="ask for windows as the feed had them then, or for offsets by number; a catch-up lands the rest",
        )
    return between


def check_only(only: Sequence[TopicPartition], by_tp: Mapping[TopicPartition, Key]) -> None:
    """Raises UsageError for a partition that is not one of the feed's."""
    for tp in only:
        if tp not in by_tp:
            raise _build_unknown_partition_error(tp, by_tp)


def _build_unknown_partition_error(tp: TopicPartition, by_tp: Mapping[TopicPartition, Key]) -> UsageError:
    listed_tps = sorted(by_tp)
    listed = ", ".join(map(str, listed_tps[:6])) + (f" … ({len(listed_tps)} in all)" if len(listed_tps) > 6 else "")
    return UsageError(f"{tp} is not a partition of this feed", remedy=f"its partitions are: {listed or 'none'}")


def find_overlapping(
    state: State, request: Request, pending: Sequence[PendingRanges]
) -> Iterator[tuple[Batch, OffsetRange]]:
    """Yields the live batches that reserve any of the pending ranges, each with the conflicting offset range.

    Includes every live batch of the same replacing request, because its records may be gone from Kafka.
    """
    wanted = {o.key: (*o.ranges, *o.lost) for o in pending}
    for batch, s in state.list_live_ranges():
        same = request.replace and batch.request == request
        if same or any(r.meets(s.range) for r in wanted.get(s.key, ())):
            yield batch, s


def build(
    blank: Plan,
    pending: Sequence[PendingRanges],
    sizing: Sizing,
    state: State,
    window: WindowSettings,
    replaced: Sequence[Receipt] = (),
) -> Plan | None:
    """Returns the plan for the pending ranges within the limits of run and batch, oldest windows first; else None.

    `blank` is the plan without tasks. A replacing plan names the parts of the receipts in `replaced` that it covers.
    Raises UsageError if it exceeds the limits of a run: a replacement is never cut short.
    """
    due, request = [o for o in pending if o.ranges], blank.request
    # First the run's limits, then the number of ranges, whole windows at a time.
    within = _limit_pending(due, sizing)
    if not within:
        return None
    if request.replace and within != due:
        raise UsageError(
            f"{sum(o.span for o in due)} offsets exceed the feed's limits of one run, and are replaced only as a whole",
            remedy="replace less at once (a window, some partitions by --only), or raise `limits` in the feed",
        )
    if sizing.max_ranges is not None and not request.replace:
        within = _take_oldest_windows(within, sizing, sizing.max_ranges, state)
    # A part of a shared file cannot be replaced alone: its other ranges would lose their rows.
    _check_whole_files(due, replaced)
    # Ranges of similar size keep all workers busy to the end.
    size = _compute_range_size(within, sizing)
    ranges = [(o.partition.leader, s) for o in within for s in _cut_ranges(o, size, state, window, sizing.by_time)]
    return replace(
        blank,
        tasks=assignment.assign_tasks(ranges, sizing),
        replaces=tuple(sorted({p.path for r in _find_covered(due, replaced) for p in r.parts})),
    )


def _find_covered(due: Sequence[PendingRanges], replaced: Sequence[Receipt]) -> list[Receipt]:
    """Returns the receipts that are landed again."""
    requested_of = by_key((o.key, o.asked) for o in due)
    return [r for r in replaced if any(a.meets(r.offset_range.range) for a in requested_of.get(r.offset_range.key, ()))]


def _check_whole_files(due: Sequence[PendingRanges], replaced: Sequence[Receipt]) -> None:
    """Raises UsageError if an offset range of a replaced file cannot be read."""
    covered = {r.offset_range for r in _find_covered(due, replaced)}
    for group in group_by_sharing(replaced):
        missing_ranges = [r.offset_range for r in group if r.offset_range not in covered]
        if missing_ranges and len(missing_ranges) < len(group):
            s, more = missing_ranges[0], f" and {len(missing_ranges) - 1} more" if len(missing_ranges) > 1 else ""
            raise UsageError(
                f"{s}{more} cannot be landed again now, and shares a file with requested offsets",
                remedy="landed rows stay: the offset ranges of a file are landed again together. `sluice plan` shows"
                " the problem with that partition",
                topic=s.topic,
                partition=s.partition,
                start=s.start,
                end=s.end,
            )


def _limit_pending(pending: Sequence[PendingRanges], sizing: Sizing) -> list[PendingRanges]:
    """Shorten all partitions by one ratio, so that a limited run moves them evenly."""
    ratio = share_within(pending, sizing)
    if ratio >= 1.0:
        return list(pending)
    return [replace(o, ranges=_take_head(o.ranges, max(1, int(o.span * ratio)))) for o in pending]


def share_within(pending: Sequence[PendingRanges], sizing: Sizing) -> float:
    """Returns the share of pending offsets within the limits of a run: 1 for all."""
    span = sum(o.span for o in pending)
    size = sum(o.estimated_bytes for o in pending)
    return min(
        1.0,
        (sizing.max_records or span) / span if span else 1.0,
        (sizing.max_bytes or size) / size if size else 1.0,
    )


def _take_head(ranges: Sequence[Range], span: int) -> tuple[Range, ...]:
    out: list[Range] = []
    for r in ranges:
        if span <= 0:
            break
        out.append(Range(r.start, min(r.end, r.start + span)))
        span -= out[-1].span
    return tuple(out)


def _take_oldest_windows(
    pending: Sequence[PendingRanges], sizing: Sizing, ranges: int, state: State
) -> list[PendingRanges]:
    """Returns the pending ranges up to the latest boundary that leaves at most `ranges` offset ranges.

    Includes the oldest window in any case: retention by time deletes the oldest records first.
    """
    ends = [end for o in pending if (end := windows.find_window_end(state, o.key, o.ranges[0].start)) is not None]
    if not ends:
        return list(pending)
    times, size = state.boundary_times, _compute_range_size(pending, sizing)
    first = bisect_left(times, min(ends))

    def upto(at: int) -> list[PendingRanges]:
        return list(pending) if at == len(times) else _take_before(pending, state, times[at])

    def too_much(at: int) -> bool:
        counts = accumulate(_count_cuts(o, p, size) for o in upto(at) for p in _iterate_pieces(o, state))
        return any(count > ranges for count in counts)

    if not too_much(len(times)):
        return list(pending)
    span = 1  # check only as many windows as a batch may have
    while first + span <= len(times) and not too_much(first + span):
        span *= 2
    further = range(first + 1, min(first + span, len(times) + 1))
    return upto(first + bisect_left(further, True, key=too_much))


def _take_before(pending: Sequence[PendingRanges], state: State, time: int) -> list[PendingRanges]:
    """Returns the pending ranges in the windows before a boundary."""
    ends = ((o, windows.find_first_offset(state, o.key, time)) for o in pending)
    readable = (o if end is None else replace(o, ranges=intersect(o.ranges, Range(0, end))) for o, end in ends)
    return [o for o in readable if o.ranges]


def _compute_range_size(pending: Sequence[PendingRanges], sizing: Sizing) -> int:
    """Bytes per offset range: small enough to keep every core busy, large enough to avoid tiny files."""
    total = sum(o.estimated_bytes for o in pending)
    return max(min(sizing.range_bytes, math.ceil(total / sizing.parallelism)), sizing.min_range_bytes)


def _cut_ranges(
    o: PendingRanges, size: int, state: State, window: WindowSettings, by_time: int
) -> Iterable[OffsetRange]:
    """The pending ranges, cut at pinned window boundaries. Large pieces are cut evenly."""
    for piece in _iterate_pieces(o, state):
        folder = paths.window_folder(
            None if by_time or piece.window is None else window.local(piece.window), window.length, state.folder_prefix
        )
        for r in _cut_evenly(piece.range, _count_cuts(o, piece, size)):
            yield OffsetRange(
                *o.key,
                r.start,
                r.end,
                o.partition.leader_epoch,
                math.ceil(r.span * o.bytes_per_offset),
                piece.window,
                folder,
                by_time,
            )


def _iterate_pieces(o: PendingRanges, state: State) -> Iterator[windows.WindowPiece]:
    return (p for r in o.ranges for p in windows.cut_at_boundaries(state, o.key, r))


def _count_cuts(o: PendingRanges, piece: windows.WindowPiece, size: int) -> int:
    """Returns the number of offset ranges of about that size (bytes) into which a piece is cut."""
    return math.ceil(piece.range.span * o.bytes_per_offset / size)


def _cut_evenly(r: Range, pieces: int) -> tuple[Range, ...]:
    pieces = max(1, min(pieces, r.span))
    return cut(r, (r.start + r.span * i // pieces for i in range(1, pieces)))
