"""The check of one window: whether it is complete and why not, the account of its offsets, late and repeated records.

It uses the ledger and exactly the window's files. Kafka is asked only about a window that is due and not complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.audit.gaps import find_remedies
from sluice.pipelines.batch.result import find_remedy
from sluice.pipelines.errors import (
    Failed,
    NotYet,
    PartUnreadable,
    UsageError,
    WindowIncomplete,
    WindowRetired,
    is_transient,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.account import OffsetAccount, build_account
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.maintenance.expiry import Hold, list_holds
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt, Reporter
from sluice.pipelines.operating.feed_status import FeedStatus, read_status_through
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.schema_changes import find_columns, shape_named
from sluice.pipelines.planning.windows import OpenWindows
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.published_files import File, build_file, describe_protection_then
from sluice.pipelines.quarantine.listing import Filter, SampledGroup, listing, sample_groups
from sluice.pipelines.records.rows.row_format import landed_schema
from sluice.pipelines.status import strip
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.status.repeats import Coordinate
from sluice.pipelines.status.window_rows import Ends, WindowRows, read_rows
from sluice.pipelines.status.window_state import Standing, WindowStanding, describe_pending
from sluice.pipelines.util.documents import Derived, Flat, Instant, Internal
from sluice.pipelines.util.units import many, show_instant

_NAMED = 3
"""How many wrong files have a reason each."""
_WAITING = (Standing.OPEN, Standing.HELD, Standing.RUNNING)


@dataclass(frozen=True, slots=True)
class CheckedPartition:
    """The account of one partition in the window. `start` and `end` are None while the boundary is not pinned.

    `pending` is the rest of the range; None while its end is not pinned. `first` and `last` are the landed records.
    """

    key: Flat[Key]
    start: int | None
    end: int | None
    account: Flat[OffsetAccount]
    first: Coordinate | None = None
    last: Coordinate | None = None

    @property
    def pending(self) -> Derived[int | None]:
        return None if self.start is None or self.end is None else self.end - self.start - self.account.total


def check_partitions(
    state: State, settings: WindowSettings, window: int, receipts: Sequence[Receipt], ends: Ends
) -> Iterator[CheckedPartition]:
    """Yields each partition that the window (its start, ms) has offsets of, with its account from these receipts.

    `ends` are the first and the last record of partitions.
    """
    by_key = BatchFacts(receipts).by_partition
    former = {k: span for k in state.ended if (span := windows.find_known_range(state, k, window, settings))}
    for key in sorted({*state.known(), *by_key, *(k for k, span in former.items() if span.span)}):
        start, end = former.get(key) or (
            windows.find_boundary(state, key, time) for time in (window, settings.end_of(window))
        )
        span = Range(0, 0) if start is None or end is None else Range(start, end)
        counts = by_key[key].counts if key in by_key else Counts()
        yield CheckedPartition(key, start, end, build_account(state, key, counts, span), *ends.get(key, ()))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a window is not complete, and what to do."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LandingBatch:
    """A batch that published rows of a window: `records` are those of the window, `run` is the run and its process."""

    batch: int
    published: Instant
    request: str
    run: str
    engine: str
    records: int


@dataclass(frozen=True)
class WindowCheck:
    """The result of a check.

    `feed_name` names no output: commands about whole feeds take it. `reasons` say why the window is not complete.
    `rows` is None if a file is missing or damaged. `batches` are those whose rows are in the files, `columns` the
    landed ones with their types; raw rows have none. `unchecked` names the questions to Kafka that got no answer.
    `clocks` is the note on boundaries that were decided against a record's stamp, and `protection` on rules of
    `protect` that were others than now; both are empty without one.
    """

    feed: str
    feed_name: Internal[str]
    settings: Internal[WindowSettings]
    standing: Flat[WindowStanding]
    reasons: tuple[Reason, ...]
    partitions: tuple[CheckedPartition, ...]
    reasons_of_quarantine: tuple[SampledGroup, ...]
    rows: Flat[WindowRows | None]
    files: tuple[File, ...]
    batches: tuple[LandingBatch, ...]
    columns: Mapping[str, str]
    receipts: Internal[tuple[Receipt, ...]]
    unchecked: tuple[str, ...] = ()
    clocks: str = ""
    protection: str = ""
    holds: tuple[Hold, ...] = ()

    @property
    def complete(self) -> Derived[bool]:
        """Returns whether each offset of the window is accounted for and all of its files can be read."""
        pending = any(p.pending for p in self.partitions)
        return self.standing.state is Standing.LANDED and not self.reasons and not pending

    @property
    def account(self) -> OffsetAccount:
        """The account of the window, in all lives of its partitions."""
        return sum((p.account for p in self.partitions), OffsetAccount(Counts()))

    @property
    def counts(self) -> Derived[Flat[Counts]]:
        return self.account.counts

    @property
    def empty(self) -> Derived[bool]:
        """Returns whether the window is complete and no record arrived in it."""
        return self.complete and self.standing.empty

    @property
    def passed(self) -> Derived[bool]:
        """Returns whether the window is complete and no record is in its files twice."""
        return self.complete and not self.is_doubled

    @property
    def is_doubled(self) -> bool:
        """Returns whether a record is in the files twice."""
        return self.rows is not None and bool(self.rows.landed_twice)

    @property
    def bytes(self) -> Derived[int]:
        return sum(f.bytes for f in self.files)

    @property
    def exit_code(self) -> Derived[int]:
        """The command's exit code: that of NotYet for a window that needs nothing but time."""
        if self.passed:
            return 0
        return NotYet.exit_code if self.standing.state in _WAITING and not self.is_doubled else Failed.exit_code


def check_window(feed: Feed, ports: Ports, window: int | None, by: Sequence[str], report: Reporter) -> WindowCheck:
    """Check a window by its start (ms); None: the newest one that is due, or the
    feed's first. `by` names the columns of a key.

    Raises UsageError for a time that is not a window of the feed and for a column that it lacks.
    """
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    state, settings = ledger.read(), feed.window
    newest = settings.before(settings.last_boundary(ports.clock()))
    start = max(newest, settings.start_of(state.first_window or 0)) if window is None else window
    windows.check_aligned(start, settings)
    windows.check_begun(feed.name, start, settings, state)
    _check_columns(feed, state, by)
    # Files may be replaced while they are read: then the window is read again.
    while True:
        state = ledger.read()
        receipts = sorted(
            manifest.group_receipts(ledger, state, (start,), settings)[start],
            key=lambda r: (r.offset_range.key, r.offset_range.start),
        )
        receipts = [r.of_output(feed.output) for r in receipts] if feed.output else receipts
        placed = [(r.offset_range, p) for r in receipts for p in r.parts]
        landed = [(s, p) for s, p in placed if p.kind is PartKind.LANDED]
        wrong, rows = manifest.find_wrong_files(ports.lake, (p for _, p in placed)), None
        refused = [(s, p.path) for s, p in placed if p.kind is PartKind.QUARANTINED]
        quarantine: tuple[SampledGroup, ...] = ()
        try:
            if refused and wrong.keys().isdisjoint(path for _, path in refused):
                meant = Filter(windows=frozenset([start]), output=feed.output)
                quarantine = sample_groups(listing(ledger, ports.lake, meant, settings).held, ports.lake, refused)
            if not wrong:
                rows = read_rows(ports.lake, landed, start, settings, by, report)
        except PartUnreadable as error:
            wrong, rows = {error.path: error}, None
        if not wrong or not ledger.list_replaced(wrong):
            break  # else the window has landed again
    # Kafka is asked for reasons alone: with a complete window the command needs only the lake.
    standing, reasons, unchecked = _explain(feed, ports, ledger, state, start)
    return WindowCheck(
        feed.dataset,
        feed.name,
        settings,
        standing,
        (*_list_wrong_files(feed, ports, state, start, wrong, placed), *reasons),
        tuple(check_partitions(state, settings, start, receipts, rows.ends if rows else {})),
        quarantine,
        rows,
        tuple(
            build_file(ports.lake.locate(p.path), settings.name(start), s, p)
            for kind in PartKind
            for s, p in placed
            if p.kind is kind and p.path not in wrong
        ),
        tuple(_list_batches(ledger, state, start, settings, receipts)),
        _find_column_types(ledger, state, receipts, feed.output),
        tuple(receipts),
        unchecked,
        windows.describe_against(state, start, settings),
        describe_protection_then(feed, ledger, state, receipts),
        list_holds(ledger, state, settings, (start,)),
    )


def _list_batches(
    ledger: Ledger, state: State, window: int, settings: WindowSettings, receipts: Sequence[Receipt]
) -> Iterator[LandingBatch]:
    """Yields the batches of the receipts, in the order of their publication."""
    landed = Counter({(r.attempt, r.offset_range): r.counts.records for r in receipts})
    within = windows.list_windows_within(state, window, settings)
    for number in sorted({n for w in within for n in state.published_in.get(w, ())}):
        if not isinstance(entry := ledger.entry(number), PublishEntry):
            continue
        records = [landed.get((r.attempt, r.offset_range)) for r in entry.receipts]
        if any(n is not None for n in records):
            batch, engines = ledger.recall(state.batches[entry.batch]), "; ".join(map(str, entry.traffic.engines))
            total = sum(n or 0 for n in records)
            yield LandingBatch(batch.id, entry.at, str(batch.request), batch.owner.describe(), engines, total)


def _find_column_types(ledger: Ledger, state: State, receipts: Sequence[Receipt], output: str) -> Mapping[str, str]:
    """Returns the columns of the newest shape of the rows, with their types."""
    formats = {r.format for r in receipts}
    newest = next((name for name in reversed(state.shapes) if name in formats), None)
    shape = newest and shape_named(ledger, state, newest)
    if shape and shape.split is not None:
        shape = shape.datasets.get(output)
    return shape.landed_columns.texts() if shape and shape.landed_columns else {}


def _list_wrong_files(
    feed: Feed,
    ports: Ports,
    state: State,
    window: int,
    wrong: Mapping[str, PartUnreadable | None],
    placed: Sequence[tuple[OffsetRange, Part]],
) -> Iterator[Reason]:
    """Yields why the window's files cannot be read, with the remedies of an audit."""
    files: dict[str, list[OffsetRange]] = {}
    for s, p in placed:
        if wrong.get(p.path):
            files.setdefault(p.path, []).append(s)
    remedies = find_remedies(feed.name, files, state, ports.cluster)
    damage = [error for error in wrong.values() if error]
    for error in damage[:_NAMED]:
        yield Reason(error.message, remedies.get(error.path, error.remedy))
    if len(damage) > _NAMED:
        yield Reason(f"{many(len(damage) - _NAMED, 'more file')} cannot be read", f"sluice audit {feed.name} --all")
    if staged := len(wrong) - len(damage):
        yield Reason(
            f"{many(staged, 'file')} of it are published and not visible yet",
            f"wait for the run: sluice wait {feed.name} --window {feed.window.name(window)}; if it is dead: sluice run"
            f" {feed.name}",
        )


def _check_columns(feed: Feed, state: State, by: Sequence[str]) -> None:
    """Raises UsageError for a column that no row of the feed has."""
    columns = {*landed_schema(find_columns(feed, state)).names, *state.table}
    for name in by:
        if name not in columns:
            raise UsageError(f"feed {feed.name} has no column `{name}`", remedy=f"one of {', '.join(sorted(columns))}")


# -- why it is not complete


def _explain(
    feed: Feed, ports: Ports, ledger: Ledger, state: State, window: int
) -> tuple[WindowStanding, tuple[Reason, ...], tuple[str, ...]]:
    """Returns the state of the window, the reasons why it is not complete, and what could not be checked."""
    standing = strip.standing(state, feed.window, window, ports.clock())
    if not state.origins:
        status = read_status_through(ports, feed, ledger, ())
        findings = [Reason(f.text, f.remedy) for f in status.findings if f.severe]
        text = f"feed {feed.name} has landed nothing yet"
        return standing, (*findings, Reason(text, f"land it: sluice run {feed.name}")), ()
    match standing.state:
        case Standing.LANDED:
            return standing, (), ()
        case Standing.FROM_ORIGIN:
            return standing, (_describe_cut(feed, standing),), ()
        case Standing.RETIRED:
            return standing, (_describe_retired(feed, ledger, state, window),), ()
        case Standing.OPEN:
            return standing, (_describe_open(feed, window),), ()
    status = read_status_through(ports, feed, ledger, (window,))
    error = status.error
    unchecked = (f"{error.message} → {error.remedy}",) if error and is_transient(error) else ()
    standing = status.windows[0]
    return standing, tuple(_list_reasons(feed, ledger, status, standing)), unchecked


def _describe_retired(feed: Feed, ledger: Ledger, state: State, window: int) -> Reason:
    try:
        manifest.demand_kept(ledger, state, feed.name, window, feed.window)
    except WindowRetired as error:
        return Reason(error.message, error.remedy)
    return Reason("its rows were retired", f"sluice status {feed.name}")


def _describe_cut(feed: Feed, s: WindowStanding) -> Reason:
    return Reason(
        f"records of it below the feed's origins have not landed: {describe_pending(s.pending)}",
        f"land them, if Kafka still has them: sluice run {feed.name} --window {feed.window.name(s.start)}",
    )


def _describe_open(feed: Feed, window: int) -> Reason:
    pending = OpenWindows.of(window, 1, feed.window)
    end = show_instant(feed.window.end_of(window))
    return Reason(
        f"it is open until {end}, and lands from {show_instant(pending.lands_from)} on, after the grace period",
        pending.remedy(feed.name),
    )


def _list_reasons(feed: Feed, ledger: Ledger, status: FeedStatus, s: WindowStanding) -> Iterator[Reason]:
    """Yields the causes, and last the command that completes the window."""
    name = feed.window.name(s.start)
    pending = {o.key.tp for o in s.pending}
    if s.state is Standing.RUNNING and s.batch is not None and (met := status.met.get(s.batch)):
        yield Reason(str(met), f"wait for it: sluice wait {feed.name} --window {name}")
        return
    mine = (f for f in status.findings if f.severe or f.about == f"unfinished {s.batch}")
    yield from (Reason(f.text, f.remedy) for f in mine if f.kind != "failed")
    yield from _list_failures(feed, ledger, s)
    yield from (Reason(h.message, h.remedy) for h in status.held_back if pending & {x.tp for x in h.partitions})
    verb = "complete" if s.accounted else "land"
    yield Reason(f"pending: {describe_pending(s.pending)}", f"{verb} it: sluice run {feed.name} --window {name}")


def _list_failures(feed: Feed, ledger: Ledger, s: WindowStanding) -> Iterator[Reason]:
    """Yields the failures of the batch that published only part of the window."""
    batch = None if s.batch is None else ledger.read().batches.get(s.batch)
    if batch is None or batch.published is None:
        return
    pending = {o.key for o in s.pending}
    for f in ledger.publication(batch).failures:
        if f.offset_range.window == s.start and f.offset_range.key in pending:
            yield Reason(f"batch {batch.id} failed in {f.offset_range}: {f.message}", find_remedy(feed.name, f))


LookAtWindow = Callable[[], tuple[WindowStanding, bool]]
"""Returns a window's state, and True if it is complete and readers can read its files."""


def watch_window(feed: Feed, ports: Ports, start: int) -> LookAtWindow:
    """Returns a function that reads new ledger entries at each call. Reads the lake only.

    Raises UsageError for no start of a window; the function raises it for one before the feed's first, and
    WindowRetired, WindowIncomplete for one that the feed's origin cuts, and PartUnreadable for a file that is missing
    or has another size.
    """
    windows.check_aligned(start, feed.window)
    ledger = Ledger(ports.lake, feed.stored, ports.clock)

    def look() -> tuple[WindowStanding, bool]:
        state = ledger.read()
        windows.check_begun(feed.name, start, feed.window, state)
        manifest.demand_kept(ledger, state, feed.name, start, feed.window)
        window = strip.standing(state, feed.window, start, ports.clock())
        if window.state is Standing.FROM_ORIGIN:
            reason = _describe_cut(feed, window)
            raise WindowIncomplete(
                f"window {feed.window.name(start)} is not complete: {reason.text}", remedy=reason.remedy
            )
        if window.state is not Standing.LANDED:
            return window, False
        parts = manifest.read_window_files(ledger, start, feed.window).parts
        wrong = manifest.find_wrong_files(ports.lake, parts)
        damage = next(filter(None, wrong.values()), None)
        if damage and not ledger.list_replaced(wrong):
            raise damage
        return window, not wrong

    return look
