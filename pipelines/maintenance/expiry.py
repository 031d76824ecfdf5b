"""Expiry: retires rows that landed before a time, first by an entry in the ledger, then their files.

Guarantees: the decision is made on the state just below its entry, for whole windows of every partition, and only if
nothing is pending there and no run is active. The account stays closed: landed offsets become retired. A crash leaves
files that do not count; `remove_retired` removes them, and may be called at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sluice.pipelines.errors import UsageError, WindowIncomplete
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import HoldEntry, KeyRange, RetireEntry
from sluice.pipelines.ledger.fold import NO_PINS, by_key
from sluice.pipelines.model.kafka import Key, Range, union
from sluice.pipelines.model.receipts import Receipt, Reporter, group_by_sharing
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake, Liveness, Ports
from sluice.pipelines.publishing import manifest, publish, published_files
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.util.documents import Instant
from sluice.pipelines.util.units import show_duration

ENDLESS = 1 << 63


@dataclass(frozen=True, slots=True)
class Retirement:
    """The data to retire before a time (ms): receipts that lie wholly below the boundary of their partition.

    Those in `across` lie across the boundary, outside windows, and those in `on_hold` in windows on hold: they stay.
    """

    before: int
    receipts: tuple[Receipt, ...]
    across: tuple[Receipt, ...] = ()
    on_hold: tuple[Receipt, ...] = ()

    @property
    def ranges(self) -> tuple[KeyRange, ...]:
        ranges = by_key((r.offset_range.key, r.offset_range.range) for r in self.receipts)
        return tuple(KeyRange(key=k, range=r) for k, of_key in sorted(ranges.items()) for r in union(of_key))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.path for r in self.receipts for p in r.parts))


@dataclass(frozen=True, slots=True)
class Retired:
    """`number` is the entry's; None when there was nothing to retire. `removed` includes files of earlier decisions."""

    expiry: Retirement
    number: int | None
    removed: Removed


@dataclass(frozen=True, slots=True)
class Removed:
    """Lake paths of removed parts, of the manifests of windows that are no longer whole, and of pages: the reports of
    batches, and notes of replays, of which nothing is left. Parts in `kept` stay for a table's older snapshots."""

    parts: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def look(feed: Feed, ports: Ports, before: int) -> Retirement:
    """Returns what `expire` would retire now. Raises as `expire` does, and writes nothing."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return _find_retirement(ledger, ledger.read(), before, feed.window, ports.liveness)


@dataclass(frozen=True, slots=True)
class Hold:
    """A legal hold on windows, by entry `number`, from and to these names of windows (empty: without a limit)."""

    number: int
    from_: str
    to: str
    reason: str
    by: str
    at: Instant

    def __str__(self) -> str:
        limits = [f"from {self.from_}"] * bool(self.from_) + [f"to {self.to}"] * bool(self.to)
        return f"{' '.join(limits) or 'all windows'}, by {self.by}: {self.reason}"


def list_holds(
    ledger: Ledger, state: State, settings: WindowSettings, starts: Iterable[int] | None = None
) -> tuple[Hold, ...]:
    """Returns the holds that have not ended, oldest first: all, or those on one of these windows (their starts, ms)."""
    numbers = {*state.holds}
    if numbers and starts is not None:
        numbers = {n for start in starts for n in state.find_holds(start, settings.end_of(start))}
    entries = ((n, e) for n in sorted(numbers) if isinstance(e := ledger.entry(n), HoldEntry))
    limits = ((n, e, ["" if t is None else settings.name(t) for t in (e.start, e.end)]) for n, e in entries)
    return tuple(Hold(n, start, end, e.reason, e.run, e.at) for n, e, (start, end) in limits)


def read_holds(feed: Feed, ports: Ports, starts: Iterable[int]) -> tuple[Hold, ...]:
    """Returns the holds on one of these windows (their starts, ms)."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return list_holds(ledger, ledger.read(), feed.window, starts)


def change_holds(
    feed: Feed, ports: Ports, by: str, reason: str, windows: tuple[int | None, int | None], ends: int | None
) -> tuple[Hold, ...]:
    """Hold windows, or release the hold `ends`, if there is a reason to. Returns the holds that are in force then.

    The ledger names `by`. Raises as `hold_windows` and `release_hold`.
    """
    ledger = Ledger.offline(ports.lake, feed.stored, ports.clock, by)
    if ends is not None:
        release_hold(ledger, ends, reason)
    elif reason:
        hold_windows(ledger, *windows, reason)
    return list_holds(ledger, ledger.read(), feed.window)


def hold_windows(ledger: Ledger, start: int | None, end: int | None, reason: str) -> None:
    """Append the entry of a hold. Raises UsageError if nothing has landed. Rows that have expired are not restored."""

    def decide(state: State) -> HoldEntry:
        if not state.number:
            raise UsageError(f"nothing of feed {ledger.feed} has landed yet", remedy="hold it after its first run")
        return HoldEntry(start=start, end=end, reason=reason)

    ledger.append(decide)


def release_hold(ledger: Ledger, number: int, reason: str) -> None:
    """Append the entry that ends a hold. Raises UsageError if none of that number is in force."""

    def decide(state: State) -> HoldEntry:
        if number not in state.holds:
            raise UsageError(
                f"ledger entry {number} is no hold in force on feed {ledger.feed}", remedy=f"sluice hold {ledger.feed}"
            )
        return HoldEntry(ends=number, reason=reason)

    ledger.append(decide)


class RetireRequest(NamedTuple):
    """A request to retire everything that landed before a boundary of windows (ms), with its reason."""

    before: int
    reason: str


def request_retention(feed: Feed, now: int) -> RetireRequest | None:
    """Returns the request to retire windows beyond the feed's `retention`; None if it has none."""
    if feed.retention is None:
        return None
    before = feed.window.start_of(max(now - feed.retention, 0))
    return RetireRequest(before, f"retention: {show_duration(feed.retention)}")


def retire(feed: Feed, ports: Ports, request: RetireRequest, by: str, report: Reporter) -> Retired:
    """As `expire`; the ledger names `by`."""
    ledger = Ledger.offline(ports.lake, feed.stored, ports.clock, by)
    return expire(ledger, ports.lake, request, feed.window, ports.liveness, report)


def expire(
    ledger: Ledger,
    lake: Lake,
    request: RetireRequest,
    settings: WindowSettings,
    liveness: Liveness,
    report: Reporter = lambda p: None,
) -> Retired:
    """Retire everything that landed before the requested time, then remove its files.

    Rewriting batches of dead runs are given up first, and reported. Raises UsageError for a time at which no window
    begins, or none has ended yet in some partition; WindowIncomplete while anything before it is pending; PlanBusy
    while any other live batch reserves something there.
    """
    from sluice.pipelines.maintenance.rewrite import give_up_dead  # late: it takes pyarrow

    give_up_dead(ledger, liveness, None, report)
    before, reason = request
    retirement = Retirement(before, ())

    def decide(state: State) -> RetireEntry | None:
        nonlocal retirement
        retirement = _find_retirement(ledger, state, before, settings, liveness)
        if not retirement.receipts:
            return None
        return RetireEntry(before=before, ranges=retirement.ranges, parts=retirement.paths, reason=reason)

    appended = ledger.append(decide)
    number = appended.number if appended else None
    return Retired(retirement, number, remove_retired(ledger, lake))


def remove_retired(ledger: Ledger, lake: Lake) -> Removed:
    """Remove visible files that no longer count, and the manifests of windows with retired rows. Idempotent.

    Staged files of such parts go first, so that a sleeping run with an old fold cannot restore one
    (docs/developers/design/compaction-and-expiry.md).
    """
    feed = ledger.feed
    roll_forward(ledger, lake, feed)
    state = ledger.read()
    visible = (p for root in paths.visible_roots(feed) for p in lake.list(root))
    parts = sorted(ledger.list_replaced(visible, state))
    removed = published_files.remove_unless_named(lake, feed, parts)
    stay = tuple(sorted({*parts}.difference(removed)))
    manifests, pages = manifest.withdraw(ledger, lake), tuple(_pages(state, lake, feed))
    for path in pages:
        lake.remove(path)
    return Removed(tuple(removed), manifests, pages, stay)


def _pages(state: State, lake: Lake, feed: str) -> Iterator[str]:
    """The pages of retired windows, and the reports and notes of batches that published in such windows only."""
    if not any(state.retired.values()):
        return
    live_entries = {n for w, numbers in state.published_in.items() for n in numbers if not _gone(state, w, n)}
    for path in lake.list(paths.batch_page_folder(feed)):
        start = paths.parse_page_window(path)
        if (
            start is not None
            and (numbers := state.published_in.get(start))
            and all(_gone(state, start, n) for n in numbers)
        ):
            yield path
    reports, notes = paths.batch_page_folder(feed), paths.relanded_folder(feed)
    for folder, batch_of in ((reports, paths.page_batch), (notes, paths.relanded_batch)):
        for path in lake.list(folder):
            number = batch_of(path)
            batch = None if number is None else state.batches.get(number)
            if batch is not None and batch.published is not None and batch.published not in live_entries:
                yield path


def _gone(state: State, window: int | None, number: int) -> bool:
    """Returns whether everything that entry `number` published in the window was retired since."""
    after = bisect_right(state.boundary_times, window) if window is not None else len(state.boundary_times)
    if window is None or after == len(state.boundary_times):
        return False
    for key, pins in state.boundaries.items():
        first, end = pins.position(window), pins.position(state.boundary_times[after])
        if first == len(pins) or end == len(pins):
            continue
        r = Range(pins.offsets[first], pins.offsets[end])
        retired = any(x.start <= r.start and r.end <= x.end for x in state.retired.get(key, ()))
        if r.span and not (retired and state.superseded[key].after(number, r)):
            return False
    return True


# -- decided


def _find_retirement(
    ledger: Ledger, state: State, before: int, settings: WindowSettings, liveness: Liveness
) -> Retirement:
    feed = ledger.feed
    windows.check_aligned(before, settings)
    _check_pinned(state, feed, before, settings)
    ends = {k: _end(state, k, before) for k in state.origins}
    _check_nothing_pending(state, feed, ends, settings)
    _check_free(state, feed, ends, liveness)
    earlier = (r for r in manifest.read_receipts_lying(ledger, state, lambda w: w is None or w < before))
    receipts = sorted(earlier, key=lambda r: (r.offset_range.key, r.offset_range.start))
    groups = group_by_sharing(receipts)
    groups = [g for g in groups if all(r.offset_range.end <= ends[r.offset_range.key] for r in g)]
    below = {r.offset_range for g in groups for r in g}
    across = [r for r in receipts if r.offset_range not in below and r.offset_range.start < ends[r.offset_range.key]]
    limits = {w: None if w is None else settings.end_of(w) for w in {s.window for s in below}}
    kept_windows = {w for w, end in limits.items() if state.find_holds(w, end)}
    on_hold = {r.offset_range for g in groups if any(r.offset_range.window in kept_windows for r in g) for r in g}
    retired = tuple(r for r in receipts if r.offset_range in below - on_hold)
    return Retirement(before, retired, tuple(across), tuple(r for r in receipts if r.offset_range in on_hold))


def _check_pinned(state: State, feed: str, before: int, settings: WindowSettings) -> None:
    keys = state.known()
    if not keys:
        raise UsageError(f"nothing of feed {feed} has landed yet", remedy="there is nothing to retire")
    open_ = [k for k in keys if windows.find_boundary(state, k, before) is None]
    if not open_:
        return
    earlier = (t for t in reversed(state.boundary_times) if t < before and settings.is_start(t))
    nearest = next((t for t in earlier if all(windows.find_boundary(state, k, t) is not None for k in keys)), None)
    raise UsageError(
        f"no window of feed {feed} has ended at {settings.name(before)} yet, in {open_[0]}"
        + (f" and {len(open_) - 1} more partitions" if len(open_) > 1 else ""),
        remedy="no window has ended in all partitions: there is nothing to retire"
        if nearest is None
        else f"the nearest end of a window before it is {settings.name(nearest)}",
    )


def _end(state: State, key: Key, before: int) -> int:
    """Where to cut the partition. A life that ended before the time lies wholly below it."""
    at = windows.find_boundary(state, key, before)
    if at is not None:
        return at
    pinned = state.boundaries.get(key, NO_PINS)
    position = pinned.position(before)
    return ENDLESS if position == len(pinned) else pinned.offsets[position - 1]


def _check_nothing_pending(state: State, feed: str, ends: dict[Key, int], settings: WindowSettings) -> None:
    pending = [(k, r) for k in state.known() for r in state.pending(k, ends[k])]
    if not pending:
        return
    pieces = [p for k, r in pending for p in windows.cut_at_boundaries(state, k, r)]
    starts = sorted({settings.start_of(p.window) for p in pieces if p.window is not None})
    more = f" and {len(pending) - 3} more ranges" if len(pending) > 3 else ""
    ranges = ", ".join(f"{k} {r}" for k, r in pending[:3]) + more
    raise WindowIncomplete(
        f"feed {feed} still has pending offsets in the range to retire: {ranges}",
        remedy=f"land it, or skip it, first: sluice run {feed} {_asking(starts, settings)}".rstrip(),
    )


def _asking(starts: Sequence[int], settings: WindowSettings) -> str:
    """The options that ask for the windows."""
    if not starts:
        return ""
    if all(b == settings.end_of(a) for a, b in pairwise(starts)) and len(starts) > 1:
        return f"--from {settings.name(starts[0])} --to {settings.name(settings.end_of(starts[-1]))}"
    return " ".join(f"--window {settings.name(w)}" for w in starts[:5])


def _check_free(state: State, feed: str, ends: dict[Key, int], liveness: Liveness) -> None:
    overlapping = {b.id: (b, s) for b, s in state.list_live_ranges() if s.start < ends.get(s.key, 0)}
    verdicts = publish.judge_batches(liveness, (b for b, _ in overlapping.values()))
    for batch, s in overlapping.values():
        if not (batch.rewrites and verdicts[batch.id].dead):
            raise publish.build_busy_error(feed, batch, s, verdicts[batch.id])


def windows_of(expiry: Retirement, settings: WindowSettings) -> Iterator[tuple[int | None, list[Receipt]]]:
    """The receipts by their window (its start, ms; None: outside windows), oldest first."""
    by_window: dict[int | None, list[Receipt]] = {}
    for r in expiry.receipts:
        w = r.offset_range.window
        by_window.setdefault(None if w is None else settings.start_of(w), []).append(r)
    yield from sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
