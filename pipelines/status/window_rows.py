"""The rows of one window in its files: timestamps outside the window, first and last record, repeats.

It reads exactly the parts that the ledger names, batch by batch. Memory is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
import pyarrow as pa

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import parquet
from sluice.pipelines.landing.landed_rows import in_order
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, Progress, Reporter
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import KAFKA_FIELDS, RawFormat, offset_column, time_column
from sluice.pipelines.records.rows.row_hashes import combine, hash_rows, is_valid
from sluice.pipelines.schema.arrays import as_mask, boolean_array, int64s, view_int32s
from sluice.pipelines.status.repeats import NO_TIME, Coordinate, Kind, RepeatCounter, Repeats
from sluice.pipelines.util.documents import Internal
from sluice.pipelines.util.units import MINUTE

_ROWS = 1 << 14
_TYPE, _LOG_APPEND_TIME = "Type", 1
"""The suffix of the column with a timestamp's type, and the type of a timestamp by the broker."""
_MOST = 1 << 20
_WINDOWS = 100
_TYPED = frozenset(f.name for f in KAFKA_FIELDS[:-1])
"""Columns of typed rows that are no part of the value. The last one, the tombstone, is."""
_RAW = frozenset(RawFormat.schema.names) - {"value"}


@dataclass(frozen=True, slots=True)
class Outside:
    """Rows with a timestamp before the window, or after it: `median_seconds` and `furthest_seconds` are how far.

    `windows` has the number of rows by the name of the window of their timestamp, the most frequent first.
    """

    records: int = 0
    median_seconds: float = 0
    furthest_seconds: float = 0
    furthest: Coordinate | None = None
    windows: Mapping[str, int] = field(default_factory=dict)


Ends = Mapping[Key, tuple[Coordinate, Coordinate]]
"""The first and the last record of each partition."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows of a window. `ends` has each partition's first and last record; `earliest` and `latest` are by
    timestamp. `untimed` have no timestamp. `landed_twice` are records that are in the files twice: always none."""

    rows: int
    ends: Internal[Ends]
    earliest: Coordinate | None
    latest: Coordinate | None
    late: Outside
    early: Outside
    untimed: int
    repeats: Repeats
    landed_twice: tuple[Coordinate, ...] = ()


def read_rows(
    lake: Lake,
    parts: Sequence[tuple[OffsetRange, Part]],
    window: int,
    settings: WindowSettings,
    by: Sequence[str],
    report: Reporter,
) -> WindowRows:
    """Read the landed `parts` of a window (its start in ms), in log order and output by output.

    `by` names the columns of the key; empty: the Kafka key. Raises PartUnreadable.
    """
    reading = _RowSums(window, settings, by)
    total = sum(p.rows for _, p in parts)
    for (s, output), placed in groupby(parts, lambda placed: (placed[0], placed[1].output)):
        own = [part for _, part in placed]
        # Files by record time are adjacent in the order; all others follow one another.
        batch_rows = max(_ROWS // len(own), 1) if s.by_time else _ROWS
        files = [_read_part(lake, part, reading, batch_rows) for part in own]
        for rows in in_order(files) if s.by_time else chain.from_iterable(files):
            reading.add(s.key, rows, output)
            report(Progress("reading", reading.rows, total))
    return reading.build()


def _read_part(lake: Lake, part: Part, reading: _RowSums, batch_rows: int) -> Iterator[pa.RecordBatch]:
    with parquet.open_parquet(lake, part.path) as file:
        parquet.check_rows(file.metadata, part.path, part.shared.rows if part.shared else part.rows)
        names = reading.choose_columns(file.schema_arrow)
        groups, before = parquet.find_row_groups(file.metadata, part)
        yield from parquet.own_rows(parquet.read(file, part.path, batch_rows, names, groups), part, before)


class _RowSums:
    """Sums over the rows that were added."""

    def __init__(self, window: int, settings: WindowSettings, by: Sequence[str]) -> None:
        self.rows = self._untimed = 0
        self._by = tuple(by)
        self._window = span = Range(window, settings.end_of(window))
        self._repeats = RepeatCounter(by)
        self._late = _Distances(settings, lambda times: span.start - times)
        self._early = _Distances(settings, lambda times: times - span.end + 1)
        self._ends: dict[Key, tuple[Coordinate, Coordinate]] = {}
        self._last: dict[tuple[Key, str], int] = {}
        self._extremes: tuple[Coordinate | None, Coordinate | None] = None, None
        self._twice: list[Coordinate] = []
        self._tombstones: dict[Key, np.ndarray] = {}

    def choose_columns(self, schema: pa.Schema) -> list[str]:
        """Returns the columns to read of a file: coordinates, keys and values, but no headers."""
        times = time_column(schema), time_column(schema) + _TYPE
        wanted = {offset_column(schema), *times, *(self._by or (_choose_key(schema),))}
        return [name for name in schema.names if name in wanted or name not in _list_coordinates(schema)]

    def add(self, key: Key, rows: pa.RecordBatch, output: str) -> None:
        """Add rows of one partition and output, in log order. A tombstone of several outputs counts once."""
        self.rows += rows.num_rows
        offsets = int64s(_get_column(rows, offset_column(rows.schema)))
        self._check_order((key, output), offsets)
        kinds = _find_kinds(rows)
        tombstones = kinds == Kind.TOMBSTONE
        if output and tombstones.any():
            counted = self._tombstones.get(key, ())
            new = ~(tombstones & np.isin(offsets, counted))
            self._tombstones[key] = np.union1d(offsets[tombstones], counted).astype(np.int64)
            if not new.any():
                return
            rows, offsets, kinds = rows.filter(boolean_array(new)), offsets[new], kinds[new]
        times = _read_times(_get_column(rows, time_column(rows.schema)))
        self._note_ends(key, offsets, times)
        timed = times != NO_TIME
        self._untimed += int((~timed).sum())
        self._late.add(key, offsets, times, timed & (times < self._window.start))
        self._early.add(key, offsets, times, timed & (times >= self._window.end))
        keys, there = self._hash_keys(rows)
        pairs = zip(rows.schema.names, rows.columns, strict=True)
        payload = [(name, column) for name, column in pairs if name not in _list_coordinates(rows.schema)]
        values = combine(np.where(there, keys, np.uint64(0)), hash_rows(payload, rows.num_rows))
        self._repeats.add(key, offsets, times, (keys, there), (values, kinds))

    def _hash_keys(self, rows: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns the hash of each row's key, and whether it has one: none of its columns is null."""
        names = [n for n in self._by or (_choose_key(rows.schema),) if n in rows.schema.names]
        columns = [(name, _get_column(rows, name)) for name in names]
        there = np.full(rows.num_rows, len(names) == max(len(self._by), 1))
        for _, column in columns:
            there &= is_valid(column)
        return hash_rows(columns, rows.num_rows), there

    def _check_order(self, of: tuple[Key, str], offsets: np.ndarray) -> None:
        """Note offsets that do not increase: the record is in the files twice."""
        highest = np.maximum.accumulate(np.concatenate([[self._last.get(of, -1)], offsets]))
        repeated = offsets[offsets <= highest[:-1]].tolist()
        self._last[of] = int(highest[-1])
        self._twice += [Coordinate(of[0], offset, None) for offset in repeated[: _WINDOWS - len(self._twice)]]

    def _note_ends(self, key: Key, offsets: np.ndarray, times: np.ndarray) -> None:
        first, last = (_find_coordinate(key, offsets, times, at) for at in (0, -1))
        start, end = self._ends.get(key, (first, last))
        by_offset = attrgetter("offset")
        self._ends[key] = min(start, first, key=by_offset), max(end, last, key=by_offset)
        timed = np.flatnonzero(times != NO_TIME)
        if not len(timed):
            return
        first, last = (
            _find_coordinate(key, offsets, times, int(timed[at(times[timed])])) for at in (np.argmin, np.argmax)
        )
        stamped = [c for c in (*self._extremes, first, last) if c]
        self._extremes = min(stamped, key=_time), max(stamped, key=_time)

    def build(self) -> WindowRows:
        late, early, repeats = self._late.build(), self._early.build(), self._repeats.build()
        twice = tuple(self._twice)
        return WindowRows(self.rows, self._ends, *self._extremes, late, early, self._untimed, repeats, twice)


class _Distances:
    """How far timestamps lie outside the window. Of more than a million, every n-th counts for the median."""

    def __init__(self, settings: WindowSettings, distance: Callable[[np.ndarray], np.ndarray]) -> None:
        self._settings, self._distance = settings, distance
        self._records = self._held = 0
        self._every = 1
        self._chunks: list[np.ndarray] = []
        self._most = 0
        self._furthest: Coordinate | None = None
        self._windows: Counter[int] = Counter()

    def add(self, key: Key, offsets: np.ndarray, times: np.ndarray, chosen: np.ndarray) -> None:
        """Add the chosen ones of these rows."""
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        distances = self._distance(times[rows])
        self._records += len(rows)
        at = int(np.argmax(distances))
        if distances[at] > self._most:
            self._most, self._furthest = int(distances[at]), _find_coordinate(key, offsets, times, int(rows[at]))
        unit = MINUTE if self._settings.timezone else self._settings.length
        units, counts = np.unique(times[rows] // unit, return_counts=True)
        for number, count in zip(units.tolist(), counts.tolist(), strict=True):
            self._windows[self._settings.start_of(number * unit)] += count
        if len(self._windows) > _MOST:
            self._windows = Counter(dict(self._windows.most_common(_MOST // 2)))
        self._chunks.append(distances[:: self._every])
        self._held += len(self._chunks[-1])
        while self._held > _MOST:
            self._every *= 2
            self._chunks = [np.concatenate(self._chunks)[::2]]
            self._held = len(self._chunks[0])

    def build(self) -> Outside:
        if not self._records:
            return Outside()
        median = int(np.median(np.concatenate(self._chunks)))
        windows = {self._settings.name(w): n for w, n in self._windows.most_common(_WINDOWS)}
        return Outside(self._records, median / 1000, self._most / 1000, self._furthest, windows)


def _get_column(rows: pa.RecordBatch, name: str) -> pa.Array:
    return rows.column(rows.schema.get_field_index(name))


def _list_coordinates(schema: pa.Schema) -> frozenset[str]:
    """Returns the columns that are no part of a row's value. `schema` has the offset, but not always the key."""
    return _TYPED if offset_column(schema) in _TYPED else _RAW


def _choose_key(schema: pa.Schema) -> str:
    return "kafka_key" if offset_column(schema) in _TYPED else "key"


def _find_kinds(rows: pa.RecordBatch) -> np.ndarray:
    """Returns the kind of each row. A tombstone has a null for a value, which typed rows note in a column."""
    typed = offset_column(rows.schema) in _TYPED
    tombstones = _get_column(rows, KAFKA_FIELDS[-1].name) if typed else _get_column(rows, "value").is_null()
    by_broker = view_int32s(_get_column(rows, time_column(rows.schema) + _TYPE)) == _LOG_APPEND_TIME
    kinds = np.where(by_broker, Kind.BROKER_TIMED, Kind.RECORD)
    return np.where(as_mask(tombstones), Kind.TOMBSTONE, kinds).astype(np.int8)


def _read_times(column: pa.Array) -> np.ndarray:
    """Returns the timestamps in ms; NO_TIME for nulls."""
    times = np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)
    return np.where(is_valid(column), times, NO_TIME) if column.null_count else times


def _find_coordinate(key: Key, offsets: np.ndarray, times: np.ndarray, at: int) -> Coordinate:
    time = int(times[at])
    return Coordinate(key, int(offsets[at]), None if time == NO_TIME else time)


def _time(coordinate: Coordinate) -> int:
    return coordinate.timestamp or 0
