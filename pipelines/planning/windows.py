"""Windows tile each partition by pinned boundaries, in whatever order windows run (docs/developers/design/windows.md).

`boundary(T)` is the first offset whose record is stamped at or after T, over all records that their neighbours do not
contradict (`boundary_search`; `against`: one stamped so late lies before it). If there is none, or its timestamp lies
absurdly far ahead of the clock, the high watermark serves (`by_clock`). If transaction markers hide that record and it
is far away, it was searched by offset (`by_marker`). A boundary is resolved once, after the grace period, and then
pinned in the ledger: the first resolution wins. Boundaries of a partition never decrease, because each is clamped
between its neighbours on the state that it is appended to. A late record belongs to the window that its offset is in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import NamedTuple

from sluice.pipelines.errors import UsageError, WindowOpen
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.columns import Pins
from sluice.pipelines.ledger.entries import Boundaries, BoundaryEntry, OriginItem
from sluice.pipelines.ledger.fold import MOVED_FROM, NO_PINS
from sluice.pipelines.model.kafka import Key, OffsetAtTime, PartitionState, Range, cut, intersect, is_covered, subtract
from sluice.pipelines.model.plans import Losses, Request
from sluice.pipelines.ports import Cluster
from sluice.pipelines.util.documents import Instant, Internal
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import many, show_instant, show_window

Partitions = Mapping[Key, PartitionState]


@dataclass(frozen=True, slots=True)
class OpenWindows:
    """Requested windows within their grace period: the first one (its start, ms), their number, the time (ms) from
    which the first can be landed, and its name."""

    first: Internal[int]
    windows: int
    lands_from: Instant
    window: str

    @classmethod
    def of(cls, first: int, number: int, settings: WindowSettings) -> OpenWindows:
        return cls(first, number, settings.end_of(first) + settings.grace, settings.name(first))

    @classmethod
    def of_request(cls, request: Request, settings: WindowSettings) -> OpenWindows | None:
        """Returns all windows of a request; None if it has none."""
        if request.window is None:
            return None
        return cls.of(request.window, len(windows_of(request, settings)), settings)

    def list_starts(self, settings: WindowSettings) -> Sequence[int]:
        """Their starts, if they are in a row."""
        return settings.list_starts(self.first, settings.start_at(settings.number_of(self.first) + self.windows))

    @property
    def text(self) -> str:
        later = f" and {many(self.windows - 1, 'later one')}" if self.windows > 1 else ""
        when = show_instant(self.lands_from)
        verb = "are" if later else "is"
        return f"window {self.window}{later} {verb} still open: it can be landed from {when} on"

    def remedy(self, feed: str) -> str:
        return f"the feed's schedule lands it then, if it is on; by hand: sluice run {feed} --window {self.window}"


def windows_of(request: Request, settings: WindowSettings) -> Sequence[int]:
    """The windows (their starts, ms) that a request names."""
    if request.window is None:
        return ()
    return settings.list_starts(request.window, request.until or settings.end_of(request.window))


def split_settled(request: Request, settings: WindowSettings, now: int) -> tuple[Request, OpenWindows | None]:
    """Returns the request without windows in their grace period, and these.

    Raises UsageError for a window that is not aligned, and WindowOpen if all are in their grace period.
    """
    if request.window is None:
        return request, None
    first, end = request.window, request.until or settings.end_of(request.window)
    if end <= first:
        raise UsageError("the windows end before they begin", remedy="the end is the first window that is left out")
    check_window(first, settings, now)
    check_aligned(end, settings)
    last = settings.last_boundary(now)
    if end <= last:
        return request, None
    return replace(request, until=last), OpenWindows.of(last, len(settings.list_starts(last, end)), settings)


def check_window(window: int, settings: WindowSettings, now: int) -> None:
    """Raises UsageError for a window that is not aligned, WindowOpen for one whose grace period is not over."""
    check_aligned(window, settings)
    if not settings.is_closed(window, now):
        when = show_instant(settings.end_of(window) + settings.grace)
        raise WindowOpen(
            f"window {settings.name(window)} is not closed yet",
            remedy=f"it can be landed from {when} on (end plus grace period); a catch-up lands the records so far",
        )


def check_aligned(window: int, settings: WindowSettings) -> None:
    """Raises UsageError for a time (ms) at which no window of the feed begins."""
    if not settings.is_start(window):
        raise UsageError(
            f"{show_window(window)} is not the start of a window: windows of this feed last {settings.words}",
            remedy=f"ask for the window that begins at {settings.name(settings.start_of(window))}",
        )


def check_begun(feed: str, window: int, settings: WindowSettings, state: State) -> None:
    """Raises UsageError for a window that ends before the first known one begins."""
    first = find_earliest(state)
    if first is not None and settings.end_of(window) <= first:
        raise UsageError(
            f"window {settings.name(window)} is before the feed's first window {settings.name(first)}",
            remedy=f"a run that asks for it lands it, if Kafka still holds it: sluice run {feed} --window "
            + settings.name(window),
        )


def find_earliest(state: State) -> int | None:
    """Returns the start of the known windows (ms): the feed's first one, or an earlier one that was backfilled."""
    return state.boundary_times[0] if state.boundary_times else None


def find_opening(
    cluster: Cluster, partitions: Partitions, origins: Sequence[OriginItem], settings: WindowSettings, now: int
) -> tuple[OriginItem, ...]:
    """The first plan's origins, with the window that opens the feed: the earliest in which any partition begins.

    A partition begins in the newest window before which no believable record from its origin on is stamped. If the
    origin is the log's first record, that is this record's window; otherwise it is found by bisecting over time.
    """
    offsets = {item.key: item.offset for item in origins}
    firsts = cluster.offsets_at({key.tp: 0 for key in offsets})
    bounds = {key: _bound_first_window(firsts.get(key.tp), offset, now, settings) for key, offset in offsets.items()}
    open_ = {k: a for k, (a, b) in bounds.items() if a == b}  # the first record's window, if its neighbours agree
    while open_ := open_ or {k: (a + b + 1) // 2 for k, (a, b) in bounds.items() if a < b}:
        times = {k.tp: settings.start_at(middle) for k, middle in open_.items()}
        hits = cluster.offsets_at(times, settings.max_skew)
        for key, middle in open_.items():
            hit, (low, high) = hits.get(key.tp), bounds[key]
            first = partitions[key].high_watermark if hit is None else hit.offset
            below = (low if low < high else 0), max(middle - 1, 0)
            bounds[key] = (middle, high) if first <= offsets[key] else below
        open_ = {}
    opens = settings.start_at(min(a for a, _ in bounds.values()))
    return tuple(item.model_copy(update={"opens": opens}) for item in origins)


def find_cuts(
    cluster: Cluster, partitions: Partitions, origins: Sequence[OriginItem], max_skew: int
) -> tuple[OriginItem, ...]:
    """The origins, with `cuts` where the log has records of the feed's first window below them."""
    times = {o.key.tp: o.opens for o in origins if o.opens is not None and o.offset > partitions[o.key].log_start}
    hits = cluster.offsets_at(times, max_skew) if times else {}
    cuts = {o.key: hit.offset for o in origins if (hit := hits.get(o.key.tp)) and hit.offset < o.offset}
    return tuple(o.model_copy(update={"cuts": cuts.get(o.key)}) for o in origins)


def _bound_first_window(hit: OffsetAtTime | None, origin: int, now: int, settings: WindowSettings) -> tuple[int, int]:
    """The numbers of the first and the last window in which a log may begin. `hit` is its first record."""
    newest = settings.number_of(now)
    if hit is None or hit.offset > origin:
        return 0, newest
    first = settings.number_of(min(hit.timestamp, now))
    return first, first if hit.offset == origin else newest


def find_due(
    state: State, cluster: Cluster, now: int, partitions: Partitions, settings: WindowSettings
) -> list[BoundaryEntry]:
    """Returns the passed boundaries that some partition has not pinned yet, from Kafka, oldest first.

    Bisects over time, so that a log of few records over many years costs few requests: between two equal boundaries
    all are equal. Those in between are left out, except the newest `LISTED`.
    """
    last = settings.last_boundary(now)
    behind = {k: p for k, p in partitions.items() if _find_newest(state, k, last) < last}
    if not behind:
        return []
    since = min(_find_newest(state, k, last) for k in behind)
    # The times that other partitions have, then every window's end.
    boundary_times = state.boundary_times
    have = boundary_times[bisect_right(boundary_times, since) : bisect_right(boundary_times, last)]
    newest = max(boundary_times[-1], since)
    times = [*have, *settings.list_starts(settings.end_of(newest), last + 1)]
    if not times:
        return []  # the clock jumped back: the others' newest boundary is ahead of it
    look = _Lookup(state, cluster, behind, now, settings.max_skew)
    look.search_between(times)
    return look.entries()


def find_before(
    state: State, cluster: Cluster, now: int, partitions: Partitions, settings: WindowSettings, window: int
) -> list[BoundaryEntry]:
    """The boundaries from `window` up to the earliest known one, in the partitions that have that one.

    With them a backfill below the origins finds windows, and these tile too. Empty when `window` is not earlier than
    the earliest known one. Raises UsageError when Kafka holds no records that old. A feed that has landed nothing may
    get the window directly before its first one if logs begin at offset 0: it is empty. A schedule's first run on a
    new topic requests it.
    """
    first = find_earliest(state)
    if first is None or window >= first:
        return []
    if not (oldest := {k: p for k, p in partitions.items() if _from_the_first(state, k)}):
        raise UsageError(
            f"window {settings.name(window)} is before the feed's first window {settings.name(first)}",
            remedy="its topics are another feed's there: sluice status",
        )
    times = settings.list_starts(window, settings.end_of(first - 1))
    look = _Lookup(state, cluster, oldest, now, settings.max_skew)
    look.among(times)
    ends = ((t, k, boundary) for t in times[1:] for k, boundary in look.at(t).items())
    below = any(state.boundaries[k][0][1] > p.log_start for k, p in oldest.items())
    oldest_held = next(
        (t for t, k, b in ends if b.offset > oldest[k].log_start), first if below else settings.end_of(first)
    )
    # Logs of a new topic hold nothing before the first window, so nothing can be missing from the one before it.
    is_new = not state.batches and not any(p.log_start for p in oldest.values())
    is_last = settings.end_of(window) >= settings.start_of(state.first_window or first)
    if oldest_held > settings.end_of(window) and not (is_new and is_last):
        raise UsageError(
            f"Kafka holds no record of window {settings.name(window)} any more, nor an older one",
            remedy=f"the oldest window that it holds records of is {settings.name(settings.before(oldest_held))}",
        )
    return look.entries()


def _from_the_first(state: State, key: Key) -> bool:
    """Returns whether the partition was there when the feed began. Only then may it get earlier windows. Those of a
    moved topic are another feed's."""
    origin = state.origins[key]
    return key in state.boundaries and origin.opens == state.first_window and not origin.why.startswith(MOVED_FROM)


LISTED = 100
"""The number of newest windows that are pinned one by one without records. Of a longer silence only the ends are
pinned."""
_ENTRY = 50_000
"""The maximum number of boundaries in one ledger entry, unless there are more partitions."""


def _find_newest(state: State, key: Key, otherwise: int) -> int:
    """The time of the key's newest boundary, or `otherwise` if it has no windows."""
    pinned = state.boundaries.get(key)
    return pinned[-1][0] if pinned else otherwise


class _BoundaryAnswer(NamedTuple):
    """A boundary from Kafka's answer. `by_clock`, `by_marker` and `against` are those of the ledger."""

    offset: int
    by_clock: bool
    by_marker: bool
    against: bool


class _Lookup:
    """Looks up boundaries in one view of the partitions. None lies beyond the high watermark in that view."""

    def __init__(self, state: State, cluster: Cluster, partitions: Partitions, now: int, max_skew: int) -> None:
        self._state, self._cluster, self._latest, self._max_skew = state, cluster, now + max_skew, max_skew
        self._partitions = partitions
        self._found: dict[int, dict[Key, _BoundaryAnswer]] = {}
        self._reads: list[int] = []

    def search_between(self, times: Sequence[int]) -> None:
        # A first run often finds all records in the first window: the rest need not be bisected then.
        map_parallel(self._look, sorted({times[0], times[-1]}), patience=0)
        self._bisect(times)
        above = times[-1]
        for time in reversed(times[-LISTED:]):
            if time in self._found:
                above = time
            else:
                self._found[time] = self._found[above]

    def among(self, times: Sequence[int]) -> None:
        map_parallel(self._look, sorted({times[0], times[min(1, len(times) - 1)], times[-1]}), patience=0)
        self._bisect(times)

    def at(self, time: int) -> Mapping[Key, _BoundaryAnswer]:
        """Returns the boundaries at a time; empty if not looked up, because they equal those before and after."""
        return self._found.get(time, {})

    def entries(self) -> list[BoundaryEntry]:
        """Returns all looked-up boundaries, oldest first."""
        times = sorted(self._found)
        step = max(_ENTRY // max(len(self._partitions), 1), 1)
        entries = [self._entry(times[at : at + step]) for at in range(0, len(times), step)]
        return [entries[0].model_copy(update={"reads": sum(self._reads)}), *entries[1:]]

    def _entry(self, times: Sequence[int]) -> BoundaryEntry:
        items = []
        looked = zip(*(self._found[time].values() for time in times), strict=True)  # each in the partitions' order
        for key, there in zip(self._partitions, looked, strict=True):
            offsets, by_clock, by_marker, against = zip(*there, strict=True)
            items.append(
                Boundaries(
                    key=key,
                    times=tuple(times),
                    offsets=offsets,
                    by_clock=tuple(compress(times, by_clock)),
                    by_marker=tuple(compress(times, by_marker)),
                    against=tuple(compress(times, against)),
                )
            )
        return BoundaryEntry(items=tuple(items))

    def _bisect(self, times: Sequence[int]) -> None:
        """Look up every time around which boundaries differ; the first and the last have been looked up. Each round
        halves all open spans at once."""
        spans = [(0, len(times) - 1)]
        while apart := [(a, b) for a, b in spans if b - a > 1 and self._offsets(times, a) != self._offsets(times, b)]:
            halves = [(a, (a + b) // 2, b) for a, b in apart]
            map_parallel(self._look, [times[middle] for _, middle, _ in halves], patience=0)
            spans = [half for a, middle, b in halves for half in ((a, middle), (middle, b))]

    def _look(self, time: int) -> None:
        hits = self._cluster.offsets_at({k.tp: time for k in self._partitions}, self._max_skew)
        self._reads.append(sum(hit.reads for hit in hits.values() if hit))
        answers = {k: _interpret_answer(p, hits.get(k.tp), self._latest) for k, p in self._partitions.items()}
        self._found[time] = {k: b._replace(offset=clamp(self._state, k, time, b.offset)) for k, b in answers.items()}

    def _offsets(self, times: Sequence[int], index: int) -> list[int]:
        return [answer.offset for answer in self._found[times[index]].values()]


def _interpret_answer(p: PartitionState, hit: OffsetAtTime | None, latest: int) -> _BoundaryAnswer:
    if hit is None:
        return _BoundaryAnswer(p.high_watermark, True, by_marker=False, against=False)
    end, is_far = p.high_watermark, hit.timestamp > latest
    if is_far or hit.offset > end or (hit.against and hit.offset == end):
        return _BoundaryAnswer(end, True, hit.by_marker, hit.against or (is_far and hit.offset < end))
    return _BoundaryAnswer(hit.offset, False, hit.by_marker, hit.against)


def clamp_boundaries(state: State, entry: BoundaryEntry) -> BoundaryEntry | None:
    """The resolved boundaries that this state has not pinned yet, clamped; None when there are none."""
    current = (item for item in entry.items if state.current.get(item.key.tp) == item.key)
    items = tuple(unpinned for item in current if (unpinned := _find_unpinned(state, item)).times)
    return entry.model_copy(update={"items": items}) if items else None


def _find_unpinned(state: State, resolved: Boundaries) -> Boundaries:
    """The boundaries that the key can still pin, each not below the one before it.

    A partition that came later gets none before the one that it opened with; the others may get earlier ones.
    """
    key, minimum = resolved.key, 0
    pinned, began, near = state.boundaries.get(key, NO_PINS), _from_the_first(state, key), _Neighbours.of(state, key)
    if near.hold_before(resolved):
        return resolved
    have, fresh = pinned.times, dict[int, int]()
    for time, offset in zip(resolved.times, resolved.offsets, strict=True):
        at = bisect_left(have, time)
        if (at or began) and (at == len(have) or have[at] != time):
            fresh[time] = minimum = near.clamp(at, time, max(offset, minimum))
    by = {
        name: tuple(t for t in getattr(resolved, name) if t in fresh) for name in ("by_clock", "by_marker", "against")
    }
    return Boundaries(key=key, times=tuple(fresh), offsets=tuple(fresh.values()), **by)


def clamp(state: State, key: Key, time: int, offset: int) -> int:
    """Returns the offset, clamped between the neighbouring boundaries and above offsets landed in earlier windows.

    It also stays where the feed begins or above, except for windows before the first one.
    """
    near = _Neighbours.of(state, key)
    return near.clamp(near.pinned.position(time), time, offset)


class _Neighbours(NamedTuple):
    """The limits of a partition's boundary: its pinned boundaries, where the feed begins (after a time), and the end of
    the offsets that a catch-up landed up to a window."""

    pinned: Pins
    opens: int
    origin: int
    landed_window: int | None
    landed_end: int

    @classmethod
    def of(cls, state: State, key: Key) -> _Neighbours:
        window, end = state.floors.get(key, (None, 0))
        origin = state.origins[key]
        return cls(state.boundaries.get(key, NO_PINS), origin.opens or 0, origin.begins, window, end)

    def hold_before(self, resolved: Boundaries) -> bool:
        """Returns whether all boundaries come after the pinned ones and need no clamping."""
        pinned, opens, origin, window, end = self
        if not pinned or not resolved.times or resolved.times[0] <= max(pinned.times[-1], opens, window or 0):
            return False
        minimum = max(pinned.offsets[-1], origin, end)
        return resolved.offsets[0] >= minimum and all(a <= b for a, b in pairwise(resolved.offsets))

    def clamp(self, at: int, time: int, offset: int) -> int:
        """The offset of a boundary at `time`, which is to stand in place `at`."""
        pinned, opens, origin, window, end = self
        offsets = pinned.offsets
        landed = end if window is not None and window < time else 0
        offset = max(offset, origin if time > opens else 0, offsets[at - 1] if at else 0, landed)
        return offset if at == len(offsets) else min(offset, offsets[at])


def find_boundary(state: State, key: Key, time: int) -> int | None:
    """The offset that separates the windows before and after `time` (ms); None while it is not pinned.

    Between two equal boundaries all are equal. Before the key's first window nothing precedes the origin.
    """
    return _find_pinned(state.boundaries.get(key, NO_PINS), time)


def _find_pinned(pinned: Pins, time: int) -> int | None:
    times, offsets = pinned.times, pinned.offsets
    at = bisect_left(times, time)
    if at < len(times) and (times[at] == time or at == 0 or offsets[at - 1] == offsets[at]):
        return offsets[at]
    return None


def _find_all_pinned(pinned: Pins, times: Sequence[int]) -> dict[int, int | None]:
    """`_find_pinned` for times in order: mostly the very ones that are pinned there."""
    first = pinned.position(times[0]) if times else 0
    near = pinned[first : first + len(times)]
    if near.times.tolist() == times:
        return dict(zip(times, near.offsets, strict=True))
    return {time: _find_pinned(pinned, time) for time in times}


def find_first_offset(state: State, key: Key, time: int) -> int | None:
    """The offset of the key's first boundary at `time` (ms) or later; None while there is none."""
    pinned = state.boundaries.get(key, NO_PINS)
    at = bisect_left(pinned.times, time)
    return pinned.offsets[at] if at < len(pinned) else None


def find_last_boundary(state: State, key: Key, last_stable_offset: int) -> int:
    """The last boundary of the key that is not above its last stable offset; 0 if there is none."""
    pinned = state.boundaries.get(key, NO_PINS)
    at = bisect_right(pinned.offsets, last_stable_offset)
    return pinned.offsets[at - 1] if at else 0


def find_window_end(state: State, key: Key, offset: int) -> int | None:
    """The time (ms) of the first boundary above an offset, where its window ends; None while that is open."""
    pinned = state.boundaries.get(key, NO_PINS)
    at = bisect_right(pinned.offsets, offset)
    return pinned.times[at] if at < len(pinned) else None


def find_range(state: State, key: Key, window: int, settings: WindowSettings) -> Range | None:
    """The offsets of a window in one partition; None while one of its boundaries is not pinned.

    A partition that opened after the window has an empty range there, at its origin.
    """
    return find_range_between(state, key, window, settings.end_of(window))


def find_losses(state: State, window: int, settings: WindowSettings) -> Losses:
    """Returns the window's losses in all lives of its partitions."""
    former, lost, unseen = 0, 0, list[Key]()
    ended = [k for k, at in state.ended.items() if window <= at]
    for key in (*ended, *(k for k in state.lost if k not in state.ended)):
        if (r := find_known_range(state, key, window, settings)) is None:
            continue
        lost += sum(x.span for x in intersect(state.lost.get(key, ()), r))
        if key in state.ended and not state.find_new_feed(key):
            former += r.span
            last = state.boundaries[key].times[-1]
            unseen += [key] if last < settings.end_of(window) or subtract(r, state.list_accounted(key)) else []
    return Losses(former, lost, tuple(sorted(unseen)))


def find_known_range(state: State, key: Key, window: int, settings: WindowSettings) -> Range | None:
    """The offsets of a window in one life of a partition, as far as the ledger knows them: an ended life, or an open
    window, has no last boundary."""
    pinned = state.boundaries.get(key, NO_PINS)
    first, last = (_find_pinned(pinned, t) for t in (window, settings.end_of(window)))
    if first is None and key in state.ended and pinned and pinned.times[-1] < window:
        first = last = state.find_known_end(key)
    return None if first is None else Range(first, max(first, state.find_known_end(key)) if last is None else last)


def count_marker_searches(state: State, window: int, settings: WindowSettings) -> int:
    """Returns the number of partitions in which a boundary of the window was searched by offset."""
    return max(state.by_marker.get(time, 0) for time in (window, settings.end_of(window)))


def count_against(state: State, window: int, settings: WindowSettings) -> int:
    """Returns the number of partitions in which a boundary of the window was decided against a record's stamp."""
    return max(state.against.get(time, 0) for time in (window, settings.end_of(window)))


def describe_against(state: State, window: int, settings: WindowSettings) -> str:
    """Returns a note if a boundary of the window was decided against a record's stamp; else empty."""
    number = count_against(state, window, settings)
    return (
        f"in {many(number, 'partition')}, records stamped ahead of their neighbours moved no boundary of the window"
        if number
        else ""
    )


def find_range_between(state: State, key: Key, start: int, end: int) -> Range | None:
    """The offsets of all windows between two times (ms); None while a boundary is not pinned."""
    pinned = state.boundaries.get(key, NO_PINS)
    first, last = _find_pinned(pinned, start), _find_pinned(pinned, end)
    return None if first is None or last is None else Range(first, last)


def list_manifest_windows(
    state: State, settings: WindowSettings, among: Collection[int] | None = None
) -> tuple[int, ...]:
    """The starts (ms) of the windows that get a manifest, oldest first: both their boundaries are pinned one by one.

    All, or those `among` some times."""
    boundary_times = state.boundary_times
    if among is None:
        times, candidates = set(boundary_times), boundary_times
    else:
        near = {t for w in among for t in (w, settings.end_of(w))}
        times = {
            t for t in near if (at := bisect_left(boundary_times, t)) < len(boundary_times) and boundary_times[at] == t
        }
        candidates = tuple(sorted(times.intersection(among)))
    return tuple(t for t in candidates if settings.is_start(t) and settings.end_of(t) in times)


def list_windows_within(state: State, window: int, settings: WindowSettings) -> tuple[int, ...]:
    """Returns the starts (ms) of the windows in this one: itself, and former shorter ones."""
    boundary_times = state.boundary_times
    return boundary_times[bisect_left(boundary_times, window) : bisect_left(boundary_times, settings.end_of(window))]


def describe_unpinned(state: State, window: int, settings: WindowSettings) -> str:
    """Returns a sentence on partitions without an end of the window, although a run pinned all; empty if none."""
    keys = [k for k in state.known() if find_range(state, k, window, settings) is None]
    if not keys:
        return ""
    others = f" and {many(len(keys) - 1, 'more partition')}" if keys[1:] else ""
    return (
        f"window {settings.name(window)} has no end in {keys[0]}{others}, which the ledger has: Kafka did not list"
        f" {'them' if others else 'it'} for the feed"
    )


def find_pinned_end(state: State) -> int | None:
    """The time (ms) up to which every partition has all of its boundaries; None where one has none."""
    ends = [pins.times[-1] if (pins := state.boundaries.get(k)) else None for k in state.known()]
    return min((t for t in ends if t is not None), default=None) if None not in ends else None


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """The part of a range that lies in one window. `window` is its start (ms), None below the first boundary."""

    range: Range
    window: int | None


def cut_at_boundaries(state: State, key: Key, r: Range) -> tuple[WindowPiece, ...]:
    """`r` cut at the pinned boundaries. What follows the last boundary lies in the open window that begins there."""
    pinned = state.boundaries.get(key, NO_PINS)
    first = max(bisect_right(pinned.offsets, r.start) - 1, 0)
    offsets = pinned.offsets[first : bisect_left(pinned.offsets, r.end)]
    out = []
    for piece in cut(r, offsets):
        before = first + bisect_right(offsets, piece.start)
        out.append(WindowPiece(piece, pinned.times[before - 1] if before else None))
    return tuple(out)


def complete(state: State, window: int, settings: WindowSettings) -> bool:
    """Returns whether the window's range is pinned and wholly accounted for in every partition."""
    return bool(complete_of(state, (window,), settings))


def complete_of(state: State, starts: Iterable[int], settings: WindowSettings) -> dict[int, dict[Key, Range]]:
    """The complete windows among `starts`, in that order, each with its range in every partition."""
    keys = state.known()
    complete_ranges: dict[int, dict[Key, Range]] = {window: {} for window in (starts if keys else ())}
    ends_at = {window: settings.end_of(window) for window in complete_ranges}
    times = sorted({*ends_at, *ends_at.values()})
    for key in keys:
        accounted, bounds = state.list_accounted(key), _find_all_pinned(state.boundaries.get(key, NO_PINS), times)
        cache: dict[tuple[int | None, int | None], Range | None] = {}  # in a silence many windows have the same range
        for window, ranges in [*complete_ranges.items()]:
            ends = bounds[window], bounds[ends_at[window]]
            if ends not in cache:
                cache[ends] = _find_accounted(accounted, *ends)
            if (window_range := cache[ends]) is None:
                del complete_ranges[window]
            else:
                ranges[key] = window_range
    return complete_ranges


def _find_accounted(accounted: Sequence[Range], first: int | None, last: int | None) -> Range | None:
    """The range between two boundaries if both are pinned and all of it is accounted for."""
    if first is None or last is None:
        return None
    between = Range(first, last)
    return between if is_covered(accounted, between) else None


def list_pending_windows(state: State, settings: WindowSettings, now: int) -> list[int]:
    """The closed windows (their starts, ms) that have pending offsets or lack a boundary, oldest first.

    With an empty ledger, only the newest closed window.
    """
    last = settings.last_boundary(now)
    first = settings.before(last) if state.first_window is None else settings.start_of(state.first_window)
    keys = state.known()
    if not keys:
        return list(settings.list_starts(first, last))
    pending = {w for key in keys for w in _list_pending_in_partition(state, key, settings, Range(first, last))}
    return sorted(w for w in pending if first <= w < last)


def _list_pending_in_partition(state: State, key: Key, settings: WindowSettings, closed: Range) -> Iterator[int]:
    pinned = state.boundaries.get(key) or ((closed.start, 0),)
    time, end = pinned[-1]
    yield from settings.list_starts(max(settings.start_of(time), closed.start), closed.end)
    for gap in state.pending(key, end):
        yield from (settings.start_of(p.window) for p in cut_at_boundaries(state, key, gap) if p.window is not None)
