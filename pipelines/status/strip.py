"""The strip of a feed's windows: how each of them stands, at a glance.

From the folded ledger alone, and, where somebody asked Kafka anyway, from the last stable offsets: then a window that
an open transaction holds differs from one that is only pending. Pure, and linear in windows × partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import OriginItem
from sluice.pipelines.model.kafka import Key, OpenTransaction, Range, TopicPartition, intersect, subtract
from sluice.pipelines.planning import windows
from sluice.pipelines.publishing.manifest import is_retired
from sluice.pipelines.status.window_state import PendingPart, Standing, WindowStanding

RECENT = 20
"""How many of the newest partly failed batches are checked for failures."""


@dataclass(frozen=True, slots=True)
class OutsideFacts:
    """Facts from outside the ledger. `last_stable_offsets` and `holders` come from Kafka. `running` and `failed` are
    batches by window: `running` are live batches whose run is alive, `failed` are live batches whose run is dead and
    batches that published only in part.
    """

    last_stable_offsets: Mapping[Key, int] = field(default_factory=dict)
    holders: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    running: Mapping[int, int] = field(default_factory=dict)
    failed: Mapping[int, int] = field(default_factory=dict)


LEDGER_ALONE = OutsideFacts()


def last_windows(state: State, settings: WindowSettings, now: int, count: int) -> Sequence[int]:
    """The starts of the newest windows, including the open one; none before the feed's first."""
    if state.first_window is None:
        return ()
    first = settings.start_at(settings.number_of(now) + 1 - count)
    return settings.list_starts(max(settings.start_of(state.first_window), first), settings.end_of(now))


def outside_facts(
    ledger: Ledger,
    state: State,
    last_stable_offsets: Mapping[Key, int],
    holders: Mapping[TopicPartition, OpenTransaction],
    abandoned: Sequence[Batch],
) -> OutsideFacts:
    """Collect the facts: what live batches work on, and what failed. `abandoned` are live batches whose run is dead."""
    dead = {b.id for b in abandoned}
    running = {w: b.id for b, w in _reserved_windows(state) if b.id not in dead}
    unfinished = {w: b.id for b, w in _reserved_windows(state) if b.id in dead}
    entries = map(ledger.publication, state.batches.failed_in_part()[-RECENT:])
    failures = ((f.offset_range.window, e.batch) for e in entries for f in e.failures)
    failed = {window: batch for window, batch in failures if window is not None}
    return OutsideFacts(last_stable_offsets, holders, running, failed | unfinished)


def _reserved_windows(state: State) -> Iterator[tuple[Batch, int]]:
    return ((b, s.window) for b, s in state.list_live_ranges() if s.window is not None)


def standings(
    state: State, settings: WindowSettings, starts: Sequence[int], now: int, outside: OutsideFacts
) -> tuple[WindowStanding, ...]:
    """How each of the windows `asked` for (their starts, ms) stands, in that order."""
    partitions = [_Partition(state, k, settings) for k in state.known()]
    return tuple(_standing(state, partitions, settings, window, now, outside) for window in starts)


def standing(
    state: State, settings: WindowSettings, window: int, now: int, outside: OutsideFacts = LEDGER_ALONE
) -> WindowStanding:
    """How one window stands."""
    return standings(state, settings, (window,), now, outside)[0]


class _Partition:
    """One partition's account, window by window."""

    def __init__(self, state: State, key: Key, settings: WindowSettings) -> None:
        self.key = key
        self._state, self._settings = state, settings
        self._accounted, self._frontier = state.list_accounted(key), state.frontier(key)

    def look(self, window: int, outside: OutsideFacts) -> tuple[int, int | None, PendingPart | None]:
        """Returns (accounted offsets, all offsets, pending offsets) of a window."""
        r = windows.find_range(self._state, self.key, window, self._settings)
        if r is None:
            return self._count_unresolved(window), None, PendingPart(self.key, None)
        if self._state.origins[self.key].offset <= r.start and r.end <= self._frontier:
            return r.span, r.span, None
        due = subtract(r, self._accounted)
        if not due:
            return r.span, r.span, None
        last_stable_offset = outside.last_stable_offsets.get(self.key, r.end)
        holder = (last_stable_offset, outside.holders.get(self.key.tp)) if last_stable_offset < r.end else (None, None)
        return r.span - sum(d.span for d in due), r.span, PendingPart(self.key, due, *holder)

    def _count_unresolved(self, window: int) -> int:
        """Returns the landed offsets above the start of a window whose end is not pinned.

        They lie in this window, or in later ones that are not pinned either.
        """
        start = windows.find_boundary(self._state, self.key, window)
        if start is None:
            return 0
        end = max((r.end for r in self._accounted), default=start)
        return sum(r.span for r in intersect(self._accounted, Range(start, max(start, end))))


def _standing(
    state: State,
    partitions: Sequence[_Partition],
    settings: WindowSettings,
    window: int,
    now: int,
    outside: OutsideFacts,
) -> WindowStanding:
    looked = [p.look(window, outside) for p in partitions]
    done, spans = sum(d for d, _, _ in looked), [span for _, span, _ in looked]
    pending = tuple(o for _, _, o in looked if o is not None)
    span = None if None in spans or not spans else sum(s or 0 for s in spans)
    closed, standing = settings.is_closed(window, now), Standing.LANDED
    if pending or not looked:
        from_origin = bool(pending) and all(_is_cut_off(state.origins[o.key], o, window, settings) for o in pending)
        standing = _standing_of(window, closed, outside, done, pending, from_origin=from_origin)
    if standing is Standing.LANDED and is_retired(state, window, settings):
        standing = Standing.RETIRED
    batch = {Standing.RUNNING: outside.running, Standing.FAILED: outside.failed}.get(standing, {}).get(window)
    losses, against = windows.find_losses(state, window, settings), windows.count_against(state, window, settings)
    return WindowStanding(window, standing, done, span, pending, batch, losses, bool(against), settings.name(window))


def _is_cut_off(origin: OriginItem, o: PendingPart, window: int, settings: WindowSettings) -> bool:
    """Returns whether the feed began in the window or later, and all that is pending lies below its origin."""
    began = origin.cuts is not None and (origin.opens or 0) < settings.end_of(window)
    return began and o.ranges is not None and o.ranges[-1].end <= origin.offset


def _standing_of(
    window: int, closed: bool, outside: OutsideFacts, done: int, pending: Sequence[PendingPart], *, from_origin: bool
) -> Standing:
    if window in outside.running:
        return Standing.RUNNING
    if not closed:
        return Standing.OPEN
    if window in outside.failed:
        return Standing.FAILED
    if any(o.held_at is not None for o in pending):
        return Standing.HELD
    if from_origin:
        return Standing.FROM_ORIGIN
    return Standing.PARTIAL if done else Standing.PENDING
