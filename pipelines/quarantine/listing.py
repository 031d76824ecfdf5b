"""The current quarantine, counted by reason, sampled or shown row by row, from the ledger's receipts and their parts.

Promise: counting reads only the columns with coordinates and reasons, and keeps only the result in memory. A refusal
of a staged batch is decided by the same functions, on the same receipts, as by the run that takes the batch over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import BatchRefused, PartUnreadable
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.landed_rows import read_part_at
from sluice.pipelines.landing.proof import read_receipts
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan
from sluice.pipelines.model.receipts import Part, PartKind, Receipt, group_by_sharing
from sluice.pipelines.planning.schema_changes import find_shape
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine.limit import ROWS_AT_ONCE, QuarantineKind, check_quarantine, kinds_of
from sluice.pipelines.records.rows.row_format import OVERSIZED, WITHHELD
from sluice.pipelines.schema.arrays import boolean_array, fixed_width, int64s, text_array, view_int32s
from sluice.pipelines.util.documents import Derived, Flat, Instant, Internal
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.validation.drift import check_drift


@dataclass(frozen=True, slots=True)
class Filter:
    """Which quarantined records are meant; an empty field restricts nothing. `windows` are starts (ms). `output` is one
    of a split feed."""

    windows: frozenset[int] | None = None
    reasons: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    expectations: tuple[str, ...] = ()
    places: tuple[tuple[TopicPartition, int], ...] = ()
    output: str = ""

    def receipts(self, ledger: Ledger, state: State, settings: WindowSettings) -> list[Receipt]:
        """The receipts that count and may hold such records, by window and in log order."""

        return self.among(manifest.read_receipts_lying(ledger, state, partial(self._wants, settings)), settings)

    def among(self, receipts: Iterable[Receipt], settings: WindowSettings) -> list[Receipt]:
        """The given receipts that may hold such records, by window and in log order."""
        in_windows = [r for r in receipts if self._wants(settings, r.offset_range.window) and self._meets(r)]
        in_windows = [r.of_output(self.output) for r in in_windows] if self.output else in_windows
        return sorted(in_windows, key=lambda r: (r.offset_range.window or 0, r.offset_range.key, r.offset_range.start))

    def _wants(self, settings: WindowSettings, lies_in: int | None) -> bool:
        return self.windows is None or (lies_in is not None and settings.start_of(lies_in) in self.windows)

    def _meets(self, r: Receipt) -> bool:
        s = r.offset_range
        return not self.places or any(tp == s.tp and s.start <= offset < s.end for tp, offset in self.places)

    def split(self, rows: pa.RecordBatch, tp: TopicPartition) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The rows of a partition's quarantine that are meant, and the others."""
        import pyarrow.compute as pc  # late: it takes 40 ms

        conditions = (("reason", self.reasons), ("field", self.fields), ("expectation", self.expectations))
        masks = [
            pc.is_in(rows.column(rows.schema.get_field_index(name)), value_set=text_array(texts))
            for name, texts in conditions
            if texts
        ]
        if self.places:
            offsets = np.array([o for at, o in self.places if at == tp], np.int64)
            masks.append(boolean_array(np.isin(int64s(rows.column(rows.schema.get_field_index("offset"))), offsets)))
        if not masks:
            return rows, rows.slice(0, 0)
        mask = reduce(pc.and_, masks)
        return rows.filter(mask), rows.filter(pc.invert(mask))


# -- counted


@dataclass(frozen=True, slots=True)
class QuarantineGroup:
    """Records of one window (by name; None: outside windows) refused for one reason. `first` is a coordinate, `start`
    the window's (ms), and `share` that of the window's records."""

    window: str | None
    start: Internal[int | None]
    kind: Flat[QuarantineKind]
    records: int
    first: str
    share: float = 0


@dataclass(frozen=True, slots=True)
class WindowQuarantine:
    """The counts of a window's records. `relanded` counts those `landed` records that had been in quarantine, `fixed`
    those of them with other bytes than in the log."""

    window: str | None
    landed: int = 0
    quarantined: int = 0
    relanded: int = 0
    fixed: int = 0

    @property
    def share(self) -> Derived[float]:
        """The share of all records that is in quarantine."""
        return self.quarantined / max(self.landed + self.quarantined, 1)

    def __add__(self, other: WindowQuarantine) -> WindowQuarantine:
        relanded, fixed = self.relanded + other.relanded, self.fixed + other.fixed
        landed, quarantined = self.landed + other.landed, self.quarantined + other.quarantined
        return WindowQuarantine(self.window, landed, quarantined, relanded, fixed)


@dataclass(frozen=True, slots=True)
class Listing:
    """All that is in quarantine, the most frequent kind first, and the windows with quarantined or re-landed records.

    `batch` is the batch that has them staged and unpublished; None if they are published.
    """

    held: tuple[QuarantineGroup, ...]
    windows: tuple[WindowQuarantine, ...]
    batch: int | None = None

    @property
    def records(self) -> Derived[int]:
        return sum(w.quarantined for w in self.windows)


def listing(ledger: Ledger, lake: Lake, wanted: Filter, settings: WindowSettings) -> Listing:
    """Count the records in quarantine."""
    return _counting(wanted.receipts(ledger, ledger.read(), settings), lake, wanted, settings)


def list_all(feed: Feed, ports: Ports, wanted: Filter) -> tuple[Listing, list[Listing]]:
    """Count the records in quarantine, and those that live batches have staged. Batches without any are left out."""
    lake, ledger = ports.lake, Ledger(ports.lake, feed.stored, ports.clock)
    published, staged = listing(ledger, lake, wanted, feed.window), list[Listing]()
    for batch, receipts in staged_batches(feed, ledger, ledger.read(), lake):
        meant = wanted.among(receipts, feed.window)
        if any(r.counts.quarantined for r in meant):
            staged.append(replace(_counting(meant, lake, wanted, feed.window), batch=batch.id))
    return published, staged


def _counting(receipts: Iterable[Receipt], lake: Lake, wanted: Filter, settings: WindowSettings) -> Listing:
    windows: dict[int | None, WindowQuarantine] = {}
    kinds: dict[tuple[int | None, QuarantineKind], QuarantineGroup] = {}
    for r in receipts:
        window = None if r.offset_range.window is None else settings.start_of(r.offset_range.window)
        name = None if window is None else settings.name(window)
        relanded, fixed = sum(x.span for x in r.relanded), sum(x.span for x in r.mended)
        windows[window] = windows.get(window, WindowQuarantine(name)) + WindowQuarantine(
            name, r.counts.landed, r.counts.quarantined, relanded, fixed
        )
        for part in r.of(PartKind.QUARANTINED):
            for kind, records, first in _count_kinds(lake, part, wanted, r.offset_range.tp):
                group = kinds.get(
                    (window, kind), QuarantineGroup(name, window, kind, 0, f"{r.offset_range.tp}:{first}")
                )
                kinds[window, kind] = replace(group, records=group.records + records)
    sizes = {w.window: max(w.landed + w.quarantined, 1) for w in windows.values()}
    groups = (replace(h, share=h.records / sizes[h.window]) for h in kinds.values())
    ranked = sorted(groups, key=lambda h: (-h.records, h.start or 0, h.kind.stage, str(h.kind)))
    touched = (w for _, w in sorted(windows.items(), key=lambda x: x[0] or 0) if w.quarantined or w.relanded)
    return Listing(tuple(ranked), tuple(touched))


def _count_kinds(
    lake: Lake, part: Part, wanted: Filter, tp: TopicPartition
) -> Iterator[tuple[QuarantineKind, int, int]]:
    columns = ["offset", *QuarantineKind._fields]
    path = parquet.place(lake, part)
    for rows in parquet.read_part(lake, part, path, ROWS_AT_ONCE, columns, use_threads=False):
        yield from kinds_of(wanted.split(rows, tp)[0])


# -- samples

SHOWN = 12
"""The number of reasons with samples."""
SAMPLES = 2
"""Of a reason."""
SAMPLE_BYTES = 1 << 10
"""Bytes that are kept of a key, and of a value around the byte at fault."""
_AROUND = 120
"""Characters that are shown before and after it."""
_COLUMNS = {*QuarantineKind._fields, "topic", "partition", "offset", "timestamp", "key", "value", "byte", WITHHELD.name}


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """One refused record. `byte` is the position of the error in its value of `size` bytes, and `value` an excerpt,
    from byte `start` on. Without an excerpt, `absence` is the reason.
    """

    position: str
    timestamp: Instant | None
    key: Internal[bytes | None]
    value: Internal[bytes | None]
    size: int
    byte: int | None
    start: Internal[int]
    absence: str

    @property
    def pieces(self) -> tuple[str, str, str]:
        """Returns the excerpt as text: before the byte at fault, its character, and after it."""
        data, at = self.value or b"", 0 if self.byte is None else self.byte - self.start
        ends = (i for i in range(at + 1, at + 4) if i >= len(data) or data[i] & 0xC0 != 0x80)
        end = at if self.byte is None else next(ends, at + 4)
        texts = (d.decode("utf-8", "backslashreplace") for d in (data[:at], data[at:end], data[end:]))
        before, wrong, after = (text.replace("\n", "\\n") for text in texts)
        before = f"…{before[-_AROUND:]}" if self.start or len(before) > _AROUND else before
        is_cut = len(after) > _AROUND or self.start + len(data) < self.size
        return before, wrong, f"{after[:_AROUND]}…" if is_cut else after

    @property
    def excerpt(self) -> Derived[str | None]:
        return None if self.value is None else "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """Records that were refused for one reason, and the first of them."""

    group: Flat[QuarantineGroup]
    samples: tuple[RejectedRecord, ...] = ()


def sample_groups(
    groups: Iterable[QuarantineGroup], lake: Lake, files: Sequence[tuple[OffsetRange, str]]
) -> tuple[SampledGroup, ...]:
    """Returns the groups, the first `SHOWN` with samples from the quarantined files (lake paths) of these ranges.

    Of each, only row groups are read whose bounds have its first record. Missing and damaged files have no samples.
    """
    sampled = list[SampledGroup]()
    for number, group in enumerate(groups):
        partition, _, offset = group.first.rpartition(":")
        records: tuple[RejectedRecord, ...] = ()
        for s, path in files if number < SHOWN else ():
            if not records and str(s.tp) == partition and s.start <= int(offset) < s.end:
                with suppress(PartUnreadable):
                    records = _search(lake, path, s.partition, int(offset))
        sampled.append(SampledGroup(group, records))
    return tuple(sampled)


def _search(lake: Lake, path: str, partition: int, offset: int) -> tuple[RejectedRecord, ...]:
    """Returns the record at this place, and those soon after it that were refused for the same reason."""
    with parquet.open_parquet(lake, path) as file:
        columns = [f.name for f in file.schema_arrow if f.name in _COLUMNS]
        names, numbers = file.schema_arrow.names, range(file.num_row_groups)
        near = set(numbers)
        for name, value in (("partition", partition), ("offset", offset)):
            bounds = {i: file.metadata.row_group(i).column(names.index(name)).statistics for i in numbers}
            near &= {i for i, b in bounds.items() if b and b.has_min_max and b.min <= value <= b.max}
        for rows in parquet.read(file, path, 1 << 10, columns, sorted(near)):
            of_partition = view_int32s(rows.column("partition")) == partition
            at = np.flatnonzero(of_partition & (int64s(rows.column("offset")) >= offset)).tolist()
            if at and rows.column("offset")[at[0]].as_py() == offset:
                kinds = [[rows.column(name)[i].as_py() for name in QuarantineKind._fields] for i in at]
                like = [i for i, kind in zip(at, kinds, strict=True) if kind == kinds[0]]
                return tuple(_cut_sample(rows, i) for i in like[:SAMPLES])
    return ()


def _cut_sample(rows: pa.RecordBatch, row: int) -> RejectedRecord:
    cell = {name: rows.column(name)[row] for name in rows.schema.names}
    stamp = cell.pop("timestamp")  # which no calendar may have
    record = {WITHHELD.name: None} | {name: value.as_py() for name, value in cell.items()}
    key, value, withheld, byte = (record[n] for n in ("key", "value", WITHHELD.name, "byte"))
    absence = "only in Kafka" if record["reason"] == OVERSIZED else "no value (a tombstone)"
    if withheld is not None:
        value, absence = None, "not shown: the feed protects fields"
    start = 0 if value is None else min(max(0, (byte or 0) - SAMPLE_BYTES // 4), len(value))
    return RejectedRecord(
        f"{record['topic']}:{record['partition']}:{record['offset']}",
        stamp.value if stamp.is_valid else None,
        key and key[:SAMPLE_BYTES],
        None if value is None else value[start : start + SAMPLE_BYTES],
        withheld or len(value or b""),
        byte,
        start,
        absence if value is None else "",
    )


def samples(feed: Feed, ports: Ports, wanted: Filter, limit: int) -> Iterator[tuple[int | None, pa.Table]]:
    """The first `limit` rows that are asked for, whole, with the windows (their starts, ms) that they are in."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    for r in wanted.receipts(ledger, ledger.read(), feed.window):
        for part in r.of(PartKind.QUARANTINED):
            for rows in read_part_at(ports.lake, part, parquet.place(ports.lake, part)):
                matching = wanted.split(rows, r.offset_range.tp)[0].slice(0, limit)
                limit -= matching.num_rows
                if matching.num_rows:
                    yield r.offset_range.window, pa.Table.from_batches([matching])
                if not limit:
                    return


def describe_reason(row: Mapping[str, Any]) -> str:
    """`amount: bad_type: is no number (byte 12)`."""
    where = f"{row['field']}: " if row["field"] else ""
    byte = f" (byte {row['byte']})" if row.get("byte") is not None else ""
    return f"{where}{row.get('expectation') or row['reason']}: {row['detail']}{byte}"


def without(rows: pa.RecordBatch, offsets: Any) -> pa.RecordBatch:
    """The rows without those of these offsets (an array)."""
    mine = int64s(rows.column(rows.schema.get_field_index("offset")))
    return rows.take(fixed_width(pa.int64(), np.flatnonzero(~np.isin(mine, offsets))))


def receipts_in_staging(lake: Lake, plan: Plan, batch: int) -> tuple[Receipt, ...]:
    """One receipt for each offset range that has any: the first by attempt, those of a shared file together, as the
    proof chooses.
    """
    staged = [p for p in lake.list(paths.staging_folder(plan.feed, batch)) if paths.parse_receipt_path(p)]
    receipts = [r for there in map_parallel(lambda p: read_receipts(p, lake), staged) for r in there]
    first: dict[str, Receipt] = {}
    for together in group_by_sharing(sorted(receipts, key=lambda r: r.attempt)):
        names = {paths.name_range(r.offset_range): r for r in together}
        if first.keys().isdisjoint(names) and _are_all(together):
            first |= names
    return tuple(first[name] for s in plan.offset_ranges if (name := paths.name_range(s)) in first)


def _are_all(together: Sequence[Receipt]) -> bool:
    """Returns whether the receipts of a shared file are all there: its attempt may have died while it wrote them."""
    rows: dict[str, int] = {}
    for p in (p for r in together for p in r.parts if p.shared):
        rows[p.staged] = rows.get(p.staged, p.shared.rows if p.shared else 0) - p.rows
    return not any(rows.values())


def staged_batches(feed: Feed, ledger: Ledger, state: State, lake: Lake) -> Iterator[tuple[Batch, tuple[Receipt, ...]]]:
    """The live landing batches, with the receipts that today's feed files would produce. An offset range of another
    shape, or with an oversized batch that would fit now, does not count: it will be read again.
    """
    shape = find_shape(feed, state).name
    for batch in state.live():
        if not batch.rewrites:
            receipts = receipts_in_staging(lake, batch.plan or ledger.plan(batch.id), batch.id)
            fits = feed.batch_bytes
            yield batch, tuple(r for r in receipts if r.format == shape and not 0 < r.batch_bytes < fits)


def refusals_of_staged(
    feed: Feed, ledger: Ledger, state: State, lake: Lake, dead: Collection[int]
) -> dict[int, BatchRefused]:
    """By number, why those of the `dead` live batches that are completely read would not be published."""
    complete = [
        (batch, receipts)
        for batch, receipts in (staged_batches(feed, ledger, state, lake) if dead else ())
        if batch.id in dead and len(receipts) == len((batch.plan or ledger.plan(batch.id)).offset_ranges)
    ]
    reasons = ((batch.id, _why(feed, ledger, state, batch, receipts, lake)) for batch, receipts in complete)
    return {batch: why for batch, why in reasons if why}


def _why(
    feed: Feed, ledger: Ledger, state: State, batch: Batch, receipts: tuple[Receipt, ...], lake: Lake
) -> BatchRefused | None:
    from sluice.pipelines.validation.batch_expectations import check_contract  # late: few feeds have dead runs

    try:
        check_quarantine(receipts, feed.policies, lake)
        check_drift(receipts, feed.policies)
        check_contract(find_shape(feed, state), ledger, batch, receipts, lake)
    except BatchRefused as why:
        return why
    return None
