"""Windows tile a partition: pinned boundaries, whatever order windows run in (DESIGN §3, §13).

`boundary(T)` is the first offset whose record is stamped at or after T, over all records; where there is none, or
its stamp lies absurdly ahead, the high watermark serves (`by_clock`). It is resolved once, when T + settle has
passed, then pinned in the ledger: first resolution wins. Boundaries of a partition never decrease: each is clamped
between its neighbours on the very state that it is put on. A late record belongs to the window its offset is in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed import WindowSettings
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.entries import BoundaryEntry, BoundaryItem, OriginItem
from sluice.pipelines.ports import Clock, Cluster
from sluice.pipelines.ranges import Range, covers, cut
from sluice.pipelines.units import show_duration, show_instant, show_window
from sluice.pipelines.values import Key, OffsetAtTime, PartitionState, TopicPartition

Partitions = Mapping[Key, PartitionState]


def check_window(window: int, settings: WindowSettings, state: State, now: int) -> None:
    """Raises UsageError for a window that is not aligned, before the first one, or not closed yet."""
    name = show_window(window)
    if window % settings.length:
        raise UsageError(
            f"{name} is no start of a window: windows of this feed last {show_duration(settings.length)}",
            remedy=f"ask for the window that begins at {show_window(settings.start_of(window))}",
        )
    if not settings.closed(window, now):
        when = show_instant(window + settings.length + settings.settle)
        raise UsageError(
            f"window {name} is not closed yet",
            remedy=f"it can be landed from {when} on (its end plus settle); a catch-up lands what is there now",
        )
    if state.first_window is not None and window < state.first_window:
        raise UsageError(
            f"window {name} is before the feed's first window {show_window(state.first_window)}",
            remedy="ask for offsets below the origin by number: --offsets TOPIC:PARTITION:START-END",
        )


def opening(
    cluster: Cluster, partitions: Partitions, origins: Sequence[OriginItem], settings: WindowSettings, now: int
) -> tuple[OriginItem, ...]:
    """The first plan's origins with the window that opens there: the earliest that any partition begins in.

    A partition begins in the newest window whose boundary is at or below its origin, found by bisecting over time.
    """
    newest = now // settings.length
    bounds = {item.key: (0, newest) for item in origins}
    while open_ := {k: (a + b + 1) // 2 for k, (a, b) in bounds.items() if a < b}:
        found = cluster.offsets_at({k.tp: middle * settings.length for k, middle in open_.items()})
        for item in origins:
            if (middle := open_.get(item.key)) is not None:
                low, high = bounds[item.key]
                boundary = _item(item.key, partitions[item.key], found.get(item.key.tp), now + settings.max_skew)
                bounds[item.key] = (middle, high) if boundary.offset <= item.offset else (low, middle - 1)
    first = min((a for a, _ in bounds.values() if a > 0), default=newest) * settings.length
    return tuple(item.model_copy(update={"opens": first}) for item in origins)


def unpinned(state: State, partitions: Partitions, boundary: int) -> dict[Key, PartitionState]:
    """The partitions without that boundary, although their first window began before it."""
    pinned = state.boundaries.get(boundary, {})
    opened = _opened(state)
    return {k: p for k, p in partitions.items() if k not in pinned and k in opened and opened[k] < boundary}


def _opened(state: State) -> dict[Key, int]:
    return {k: item.opens for k, item in state.origins.items() if item.opens is not None}


def resolved(
    cluster: Cluster, clock: Clock, partitions: Partitions, boundary: int, settings: WindowSettings
) -> BoundaryEntry:
    """The boundary in each of the partitions as Kafka tells it now, not yet clamped."""
    found = cluster.offsets_at({k.tp: boundary for k in partitions})
    latest = clock() + settings.max_skew
    items = tuple(_item(k, p, found.get(k.tp), latest) for k, p in partitions.items())
    return BoundaryEntry(boundary=boundary, items=items)


def _item(key: Key, p: PartitionState, hit: OffsetAtTime | None, latest: int) -> BoundaryItem:
    if hit is None or hit.timestamp > latest:
        return BoundaryItem(key=key, offset=p.high_watermark, by_clock=True)
    return BoundaryItem(key=key, offset=hit.offset)


def clamped(state: State, entry: BoundaryEntry) -> BoundaryEntry | None:
    """What of a resolved boundary is still to be pinned, clamped on this state; None when nothing is."""
    pinned = state.boundaries.get(entry.boundary, {})
    times = sorted(state.boundaries)
    due = [i for i in entry.items if i.key not in pinned and state.current.get(i.key.tp) == i.key]
    offsets = [clamp(state, times, i.key, entry.boundary, i.offset) for i in due]
    items = tuple(i.model_copy(update={"offset": o}) for i, o in zip(due, offsets, strict=True))
    return BoundaryEntry(boundary=entry.boundary, items=items) if items else None


def clamp(state: State, times: Sequence[int], key: Key, boundary: int, offset: int) -> int:
    """`offset` moved between the pinned boundaries around it, the origin, and what a catch-up landed before it.

    `times` are the pinned boundaries' times, sorted.
    """
    at = bisect_left(times, boundary)
    below = next((o for t in reversed(times[:at]) if (o := state.boundaries[t].get(key)) is not None), 0)
    above = next((o for t in times[at:] if (o := state.boundaries[t].get(key)) is not None), None)
    window, end = state.floors.get(key, (boundary, 0))
    floor = max(state.origins[key].offset, below, end if window < boundary else 0)
    return max(floor, offset) if above is None else min(max(floor, offset), above)


def due_boundaries(state: State, settings: WindowSettings, now: int) -> range:
    """Every boundary from the feed's first window on that may be resolved now."""
    if state.first_window is None:
        return range(0)
    return range(state.first_window, settings.last_boundary(now) + 1, settings.length)


def range_of(state: State, key: Key, window: int, settings: WindowSettings) -> Range | None:
    """The pinned offsets of a window in a partition; None while a boundary is missing.

    A partition that opened after the window has nothing in it: an empty range at its origin.
    """
    origin = state.origins[key]
    if origin.opens is not None and window < origin.opens:
        return Range(origin.offset, origin.offset)
    start = state.boundaries.get(window, {}).get(key)
    end = state.boundaries.get(window + settings.length, {}).get(key)
    return None if start is None or end is None else Range(start, end)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a range that lies in one window (its start, ms); None below the first boundary."""

    range: Range
    window: int | None


def pieces(state: State, key: Key, r: Range) -> tuple[Piece, ...]:
    """`r` cut at the pinned boundaries; what lies after the last one is in the open window that it begins."""
    pinned = _from(state, key, r.start)
    offsets = [o for o, _ in pinned]
    out = []
    for piece in cut(r, offsets):
        before = bisect_right(offsets, piece.start)
        out.append(Piece(piece, pinned[before - 1][1] if before else None))
    return tuple(out)


def _from(state: State, key: Key, offset: int) -> list[tuple[int, int]]:
    """(offset, time) of the key's boundaries in order, from the newest one at or below `offset` on."""
    found = []
    for time in sorted(state.boundaries, reverse=True):
        boundary = state.boundaries[time].get(key)
        if boundary is not None:
            found.append((boundary, time))
            if boundary <= offset:
                break
    return found[::-1]


def complete(state: State, window: int, settings: WindowSettings) -> bool:
    """Whether every partition's range of the window is pinned and wholly accounted for."""
    keys = [k for k in state.current.values() if k in state.origins]
    ranges = [range_of(state, k, window, settings) for k in keys]
    return bool(keys) and all(
        r is not None and covers(state.accounted(k), r) for k, r in zip(keys, ranges, strict=True)
    )


def held(state: State, partitions: Partitions, window: int, settings: WindowSettings) -> tuple[TopicPartition, ...]:
    """Partitions whose stable end has not reached the window's end: an open transaction holds them."""
    ranges = {k: range_of(state, k, window, settings) for k in partitions if k in state.origins}
    return tuple(k.tp for k, r in ranges.items() if r is not None and r.end > partitions[k].stable_end)
