"""Rows by their own time across windows: where the rows of an event hour landed, and the hours that new ones change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.pipelines.audit.audit import list_live_receipts
from sluice.pipelines.contract.literals import PER_UNIT
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.model.receipts import Part, PartKind, Progress, Reporter
from sluice.pipelines.planning.schema_changes import find_columns
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.records.rows.row_format import landed_schema, offset_column, time_column
from sluice.pipelines.schema.arrays import int64s
from sluice.pipelines.status import strip
from sluice.pipelines.status.repeats import Coordinate
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.documents import Derived
from sluice.pipelines.util.units import MINUTE

_ROWS = 1 << 16
_FIRST = -(1 << 63)


@dataclass(frozen=True, slots=True)
class EventRows:
    """The rows of an event hour in one window, and the first of them. `window` is None for rows outside windows."""

    window: str | None
    rows: int
    quarantined: int
    first: Coordinate


@dataclass(frozen=True, slots=True)
class EventHour:
    """The windows with rows whose `column` lies in `event_hour`.

    `late` rows are in later windows, `early` ones in windows before. `complete_before` is the first window from the
    hour on that is due and not complete; None if all of them are. The rows of `expired` windows are gone.
    """

    feed: str
    event_hour: str
    column: str
    windows: tuple[EventRows, ...]
    rows: int
    late: int
    early: int
    complete_before: str | None
    expired: tuple[str, ...]

    @property
    def exit_code(self) -> Derived[int]:
        return int(self.complete_before is not None)


@dataclass(frozen=True, slots=True)
class LateHours:
    """Event hours with rows in later windows: rows by window by the hour's name. `number` is the newest ledger entry
    that was read: pass it to the next call."""

    number: int
    hours: Mapping[str, Mapping[str, int]]


def find_event_hour(feed: Feed, ports: Ports, hour: str, column: str, report: Reporter) -> EventHour:
    """Look up the rows of an hour, or of a day, in the files of all windows.

    `column` is a column with times; empty: Kafka's timestamp, by which quarantined records count, too. Files whose
    statistics exclude the hour are not read. Raises UsageError and PartUnreadable.
    """
    ledger, settings = Ledger.offline(ports.lake, feed.stored, ports.clock), feed.window
    state = ledger.read()
    try:
        starts = settings.list_named(hour)
    except ValueError as error:
        raise UsageError(f"{hour!r} {error}", remedy="name an hour or a day, such as 2026-11-20T14") from None
    schema = landed_schema(find_columns(feed, state))
    if column and (column not in schema.names or not pa.types.is_timestamp(schema.field(column).type)):
        names = ", ".join(f.name for f in schema if pa.types.is_timestamp(f.type))
        raise UsageError(f"{feed.dataset} has no column {column} with times", remedy=f"one of {names}")
    within = Range(starts[0], settings.end_of(starts[-1]))
    rows, first = Counter[tuple[int | None, PartKind]](), dict[int | None, Coordinate]()
    # Files of all windows, since late records lie in later ones. Statistics of the files exclude nearly all of them.
    receipts = list_live_receipts(ledger, state)
    for at, r in enumerate(receipts):
        window = None if r.offset_range.window is None else settings.start_of(r.offset_range.window)
        for part in r.parts:
            if part.output != feed.output or (column and part.kind is PartKind.QUARANTINED):
                continue
            for offsets, times in _read_times(ports.lake, part, column, within):
                rows[window, part.kind] += len(offsets)
                first.setdefault(window, Coordinate(r.offset_range.key, int(offsets[0]), int(times[0])))
        report(Progress("search", at + 1, len(receipts)))
    # Records of the hour may still be pending: in the first due window, from the hour on, that is not complete.
    now = ports.clock()
    due = settings.list_starts(starts[0], max(settings.last_boundary(now), starts[0]))
    standings = strip.standings(state, settings, due, now, strip.LEDGER_ALONE)
    landed = Counter({w: n for (w, kind), n in rows.items() if kind is PartKind.LANDED})
    return EventHour(
        feed.dataset,
        hour,
        column or time_column(schema),
        tuple(
            EventRows(None if w is None else settings.name(w), landed[w], rows[w, PartKind.QUARANTINED], first[w])
            for w in sorted(first, key=lambda w: (w is None, w or 0))
        ),
        sum(landed.values()),
        sum(n for w, n in landed.items() if w is not None and w >= within.end),
        sum(n for w, n in landed.items() if w is not None and w < within.start),
        next((s.window for s in standings if s.state not in (Standing.LANDED, Standing.RETIRED)), None),
        tuple(s.window for s in standings if s.state is Standing.RETIRED),
    )


def find_late_hours(feed: Feed, ports: Ports, after: int | None, column: str = "") -> LateHours:
    """Returns the event hours with late rows that were published after ledger entry `after`; none if it is None.

    Compactions do not count. Raises PartUnreadable.
    """
    ledger, settings = Ledger.offline(ports.lake, feed.stored, ports.clock), feed.window
    state, hours = ledger.read(), dict[str, Counter[str]]()
    published = ledger.entries((state.number if after is None else after) + 1)
    entries = ((n, e) for n, e in published if isinstance(e, PublishEntry) and not state.batches[e.batch].merges)
    for r in (r for number, entry in entries for r in state.receipts(number, entry)):
        if r.offset_range.window is None:
            continue
        window = settings.start_of(r.offset_range.window)
        for part in r.of(PartKind.LANDED):
            if part.output != feed.output:
                continue
            for _, times in _read_times(ports.lake, part, column, Range(_FIRST, window)):
                unit = MINUTE if settings.timezone else settings.length
                for start, n in zip(*(x.tolist() for x in np.unique(times // unit, return_counts=True)), strict=True):
                    name = settings.name(settings.start_of(start * unit))
                    hours.setdefault(name, Counter())[settings.name(window)] += n
    return LateHours(state.newest, hours)


def _read_times(lake: Lake, part: Part, column: str, within: Range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (offsets, times in ms) of the part's rows whose time lies `within`. Raises PartUnreadable."""
    with parquet.open_parquet(lake, parquet.place(lake, part)) as file:
        schema = file.schema_arrow
        name = column or time_column(schema)
        if name not in schema.names:
            return
        per_ms = PER_UNIT["ms"] // PER_UNIT[schema.field(name).type.unit]
        bounds = parquet.read_bounds(file.metadata).get(name)
        low, high = (bounds.low, bounds.high) if bounds else (None, None)
        if low is not None and high is not None and not Range(low // per_ms, high // per_ms + 1).meets(within):
            return
        groups, before = parquet.find_row_groups(file.metadata, part)
        names = [offset_column(schema), name]
        for rows in parquet.own_rows(parquet.read(file, part.path, _ROWS, names, groups), part, before):
            timed = rows.filter(rows.column(name).is_valid())
            times = int64s(timed.column(name).cast(pa.int64())) // per_ms
            chosen = (times >= within.start) & (times < within.end)
            if chosen.any():
                yield int64s(timed.column(names[0]))[chosen], times[chosen]
