"""Finds landed rows and quarantined records that meet a condition in SQL, that have a key, or that a run landed.

Landed rows are searched by their columns; a column that a file lacks is null. A quarantined record has only its bytes:
its key and coordinates are searched, and the fields of a value that is JSON. The condition may name a person, so no
error, log or entry repeats it, except the errors of the command that was given it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.audit.audit import list_live_receipts
from sluice.pipelines.errors import PartUnreadable, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet
from sluice.pipelines.landing.landed_rows import read_part_at
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.maintenance.erasure import find_holds
from sluice.pipelines.maintenance.expiry import Hold, list_holds
from sluice.pipelines.model.kafka import Key, Range, union
from sluice.pipelines.model.plans import OffsetRange, RequestKind
from sluice.pipelines.model.receipts import Part, PartKind, Progress, Receipt, Reporter
from sluice.pipelines.planning.windows import list_windows_within
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.records.rows.row_format import get_offsets, has_bytes
from sluice.pipelines.republishing.row_filter import Condition
from sluice.pipelines.schema.schema import KAFKA, Field, arrow_type
from sluice.pipelines.tables.pending import column_types
from sluice.pipelines.util.documents import Internal


@dataclass(frozen=True, slots=True)
class Criteria:
    """Selects rows that meet `where`, or whose `column` (empty: the record's key) is one of `keys`; else all rows.

    `run` narrows the search to offsets that a run with this in its id published; `windows` to those
    of windows (their starts, ms).
    """

    where: str = field(default="", repr=False)
    keys: tuple[str, ...] = field(default=(), repr=False)
    column: str = ""
    run: str = ""
    windows: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Matches:
    """The matching records by partition, and their number by window (its start, ms; None: outside windows).

    `unsearchable` are quarantined records whose value is no JSON object, or is not stored: only their keys were
    searched. `skipped` are outputs without the columns of the condition. `holds` refuse the erasure.
    """

    offsets: Internal[dict[Key, tuple[Range, ...]]]
    landed: int = 0
    quarantined: int = 0
    unsearchable: int = 0
    windows: Internal[dict[int | None, int]] = field(default_factory=dict)
    files: int = 0
    skipped: tuple[str, ...] = ()
    holds: tuple[Hold, ...] = ()

    @property
    def records(self) -> int:
        return self.landed + self.quarantined


def search(dataset: Feed, ports: Ports, criteria: Criteria, report: Reporter) -> Matches:
    """Search all rows that count, of one output or of all. Writes nothing.

    Raises UsageError for a condition that is none over the columns, and PartUnreadable.
    """
    ledger = Ledger.offline(ports.lake, dataset.stored, ports.clock)
    while True:
        try:
            return _search(dataset, ports.lake, ledger, criteria, report)
        except PartUnreadable as error:
            if not ledger.list_replaced([error.path]):
                raise


def _search(dataset: Feed, lake: Lake, ledger: Ledger, criteria: Criteria, report: Reporter) -> Matches:
    state = ledger.read()
    receipts, within = list_live_receipts(ledger, state), None
    if criteria.windows:
        starts = {t for w in criteria.windows for t in list_windows_within(state, w, dataset.window)}
        receipts = [r for r in receipts if r.offset_range.window in starts]
    if criteria.run:
        within = _list_published(ledger, state, criteria.run)
        receipts = [
            r for r in receipts if any(r.offset_range.range.meets(x) for x in within.get(r.offset_range.key, ()))
        ]
    total, done = sum(r.offset_range.span for r in receipts), 0
    findings = _Findings(within)
    with ExitStack() as stack:
        matchers: dict[str, _Matcher] = {}
        skipped: dict[str, UsageError] = {}
        for own in dataset.datasets:
            types = column_types(state, output=own.output)
            schema = pa.schema([pa.field(name, arrow_type(t)) for name, t in types.items()])
            try:
                matchers[own.output] = stack.enter_context(_Matcher(criteria, schema, own))
            except UsageError as error:
                skipped[own.dataset] = error
        # The condition may name fields of some outputs only; of none, it is a mistake.
        if not matchers:
            raise next(iter(skipped.values()))
        for r in receipts:
            for part in r.parts:
                chosen = [matchers[part.output]] if part.output in matchers else []
                if not part.output and dataset.split:  # a record that no output takes
                    chosen = [*matchers.values()]
                # Landed rows are matched by columns; records in quarantine are decoded first.
                if chosen and part.kind is PartKind.LANDED:
                    findings.add(
                        r, part, (chosen[0].match(rows) for rows in read_part_at(lake, part, parquet.place(lake, part)))
                    )
                elif chosen:
                    findings.add(r, part, _match_refused(lake, part, chosen, findings))
            done += r.offset_range.span
            report(Progress("search", done, total))
    matches = findings.to_matches(tuple(skipped))
    numbers = {n for n, _, _ in find_holds(state, ((k, r) for k, ranges in matches.offsets.items() for r in ranges))}
    return replace(matches, holds=tuple(h for h in list_holds(ledger, state, dataset.window) if h.number in numbers))


def _list_published(ledger: Ledger, state: State, run: str) -> Mapping[Key, tuple[Range, ...]]:
    """Returns the ranges that the run published, also those whose rows another batch rewrote since.

    A compaction landed none, and a replay the records that left the quarantine.
    """
    ranges = list[tuple[Key, Range]]()
    for number, e in ledger.entries():
        if isinstance(e, PublishEntry) and number not in state.void:
            batch = ledger.recall(state.batches[e.batch])
            for r in e.receipts if run in batch.owner.run else ():
                replayed = r.relanded if batch.request.kind is RequestKind.REPLAY else ()
                ranges += [(r.offset_range.key, x) for x in (replayed if batch.rewrites else (r.offset_range.range,))]
    return {key: union(own) for key, own in by_key(ranges).items()}


class _Findings:
    def __init__(self, within: Mapping[Key, tuple[Range, ...]] | None) -> None:
        self.unsearchable = 0
        self._within = within
        self._offsets: dict[Key, list[Any]] = {}
        self._counts = dict.fromkeys(PartKind, 0)
        self._windows: dict[int | None, int] = {}
        self._files: set[str] = set()

    def add(self, r: Receipt, part: Part, matches: Iterator[Any]) -> None:
        s: OffsetRange = r.offset_range
        for offsets in matches:
            if self._within is not None:
                bounds = [x for own in self._within[s.key] for x in own]
                offsets = offsets[np.searchsorted(bounds, offsets, side="right") % 2 == 1]
            if not len(offsets):
                continue
            self._offsets.setdefault(s.key, []).append(offsets)
            self._counts[part.kind] += len(offsets)
            self._windows[s.window] = self._windows.get(s.window, 0) + len(offsets)
            self._files.add(part.path)

    def to_matches(self, skipped: tuple[str, ...]) -> Matches:
        ranges = dict[Key, tuple[Range, ...]]()
        for key, chunks in self._offsets.items():
            offsets = np.unique(np.concatenate(chunks))
            rows = np.split(offsets, np.flatnonzero(np.diff(offsets) > 1) + 1)
            ranges[key] = tuple(Range(int(r[0]), int(r[-1]) + 1) for r in rows)
        windows = dict(sorted(self._windows.items(), key=lambda x: (x[0] is None, x[0] or 0)))
        counts = self._counts[PartKind.LANDED], self._counts[PartKind.QUARANTINED]
        return Matches(ranges, *counts, self.unsearchable, windows, len(self._files), skipped)


class _Matcher:
    """Finds the offsets of matching rows of one dataset."""

    def __init__(self, criteria: Criteria, schema: pa.Schema, dataset: Feed) -> None:
        self.schema = schema
        fields: Sequence[Field] = dataset.columns.fields if dataset.columns else ()
        self._fields = {f.name: f for f in fields}
        self._condition: Condition | None = None
        if criteria.where or not criteria.keys:
            self._condition = Condition(criteria.where or "true", schema)
            try:
                self._condition.check(schema)
            except UsageError as error:
                self._condition.__exit__()
                raise UsageError(error.message, remedy=f"columns: {', '.join(schema.names)}") from None
            return
        self._column = criteria.column or (f"{KAFKA}key" if f"{KAFKA}key" in schema.names else "key")
        if self._column not in schema.names:
            raise UsageError(
                f"{dataset.dataset} has no column {self._column}", remedy=f"columns: {', '.join(schema.names)}"
            )
        self._keys = _to_column(criteria.keys, schema.field(self._column).type, self._column)

    def __enter__(self) -> _Matcher:
        return self

    def __exit__(self, *error: object) -> None:
        if self._condition:
            self._condition.__exit__()

    def match(self, rows: pa.RecordBatch) -> Any:
        """Returns the offsets of the rows that match."""
        if self._condition:
            return np.concatenate([np.empty(0, np.int64), *map(get_offsets, self._condition.filter(iter([rows])))])
        import pyarrow.compute as pc

        if self._column not in rows.schema.names:
            return np.empty(0, np.int64)
        column = rows.column(rows.schema.get_field_index(self._column))
        mask = pc.is_in(column.cast(self._keys.type), value_set=self._keys)
        return get_offsets(rows)[mask.to_numpy(zero_copy_only=False)]

    def decode(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Any]:
        """Returns quarantined records as rows of the dataset, and a mask of those whose values could be read.

        A field that does not fit its column is null there, after its text was tried.
        """
        if f"{KAFKA}offset" not in self.schema.names:
            names = [n for n in self.schema.names if n in rows.schema.names]
            return rows.select(names), has_bytes(rows).to_numpy(zero_copy_only=False)
        values = [_parse_object(v) for v in rows.column(rows.schema.get_field_index("value")).to_pylist()]
        columns, readable = [], np.array([v is not None for v in values], np.bool_)
        for f in self.schema:
            own = f.name.removeprefix(KAFKA)
            if f.name.startswith(KAFKA) and own in rows.schema.names:
                columns.append(rows.column(rows.schema.get_field_index(own)).cast(f.type))
                continue
            cells = [_fit(_find(v, self._fields.get(f.name), f.name), f.type) for v in values]
            readable &= np.array([fits for _, fits in cells], np.bool_)
            columns.append(pa.array([value for value, _ in cells], f.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema), readable


def _match_refused(lake: Lake, part: Part, matchers: Sequence[_Matcher], findings: _Findings) -> Iterator[Any]:
    for rows in read_part_at(lake, part, parquet.place(lake, part)):
        met, unread = np.empty(0, np.int64), np.ones(rows.num_rows, np.bool_)
        for matcher in matchers:
            decoded, readable = matcher.decode(rows)
            met = np.union1d(met, matcher.match(decoded))
            unread &= ~readable
        findings.unsearchable += int((unread & ~np.isin(get_offsets(rows), met)).sum())
        yield met


def _parse_object(value: bytes | None) -> Any:
    """Returns the JSON object; None for anything else."""
    try:
        document = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _find(document: Any, f: Field | None, name: str) -> Any:
    for step in (f.path or (f.json_name,)) if f else (name,):
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and -len(document) <= step < len(document):
            document = document[step]
        else:
            return None
    return document


def _fit(value: Any, kind: pa.DataType) -> tuple[Any, bool]:
    """Returns the value as one of the type, and whether nothing of it is lost."""
    if value is None:
        return None, True
    conversions: list[Callable[[], pa.Array]] = [lambda: pa.array([value], kind)]
    if not isinstance(value, dict | list):
        conversions.append(lambda: pa.array([str(value)]).cast(kind))
    for convert in conversions:
        with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            return convert()[0].as_py(), True
    return None, False


def _to_column(keys: Sequence[str], kind: pa.DataType, name: str) -> pa.Array:
    """Returns the keys as values of the column. Raises UsageError with the number of the line that is none."""
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return pa.array(keys).cast(kind)
    for line, key in enumerate(keys, 1):
        try:
            pa.array([key]).cast(kind)
        except pa.ArrowException:
            raise UsageError(
                f"line {line} of the keys is no {kind}", remedy=f"{name} has values of that type"
            ) from None
    return pa.array(keys).cast(kind)
