"""What Dagster shows beside an event: standard keys, numbers that it plots, and tables by partition.

All of it comes from the ledger and from what Kafka said of itself; no setting of a client goes in, and of records no
more than names of fields. Tables are bounded: the first `MAX_ROWS` partitions, and a line that says how many more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pyarrow as pa

from sluice.assets.books import Books, Judged, quarantines
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.committing.commit import CommitResult
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, State
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.validation.drift import drift_of
from sluice.pipelines.vocabulary.kafka import Key, PartitionState
from sluice.pipelines.vocabulary.ranges import Range
from sluice.pipelines.vocabulary.receipts import Counts, DriftKind, Met, Part, PartKind, Receipt
from sluice.pipelines.vocabulary.units import show_window
from sluice.pipelines.watching.outlook import Outlook
from sluice.pipelines.watching.timings import spent
from sluice.pipelines.watching.watch import WatchResult

Metadata = dict[str, Any]

MAX_ROWS = 200
"""Rows of a table: an event is read whole by every page that shows it."""


def columns_of(schema: pa.Schema) -> dg.TableSchema:
    """An Arrow schema as Dagster shows columns."""
    kinds = ((f, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema)
    return dg.TableSchema(
        [
            dg.TableColumn(f.name, str(kind), constraints=dg.TableColumnConstraints(nullable=f.nullable))
            for f, kind in kinds
        ]
    )


def table(rows: Sequence[Mapping[str, str | int | float]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """A bounded table; `columns` maps name to Dagster's type (`string`, `int`, `float`)."""
    shown = [dg.TableRecord(dict(r)) for r in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest = {c: f"… and {len(rows) - MAX_ROWS} more" if i == 0 else "" for i, c in enumerate(columns)}
        shown.append(dg.TableRecord(rest))
    return dg.MetadataValue.table(shown, dg.TableSchema([dg.TableColumn(n, t) for n, t in columns.items()]))


# -- landed


def of_batch(books: Books, batch: Batch) -> Metadata:
    """What one published batch landed, as its publish entry says: the same whoever records it, and when."""
    entry = books.entry(batch)
    return {
        "dagster/uri": books.lake.locate(paths.visible_roots(books.feed.name)[0]),
        "ranges": _ranges(entry.receipts),
        **_amounts(entry.receipts),
        **_rates(books, (batch,)),
        **task_time(entry.receipts),
        "slices_adopted": sum(r.adopted for r in entry.receipts),
        "slices_failed": len(entry.failures),
        **_provenance(books.state, batch),
    }


def of_window(books: Books, window: int) -> Metadata:
    """What a complete window holds, whichever batches landed it."""
    receipts, batches = books.receipts_in(window), books.batches_in(window)
    folder = paths.window_folder(window, books.feed.window.length)
    return {
        "dagster/partition_row_count": sum(r.counts.landed for r in receipts),
        "dagster/uri": books.lake.locate(f"{paths.visible_roots(books.feed.name)[0]}/{folder}"),
        "boundaries": _boundaries(books, window, receipts),
        **_amounts(receipts),
        **_quality(books, window, receipts),
        **column_schema(books, receipts),
        **_rates(books, batches),
        **task_time(receipts),
        **_provenances(books.state, batches),
    }


def of_quarantine(books: Books, window: int) -> Metadata:
    """What of a complete window broke the contract."""
    receipts = books.receipts_in(window)
    parts = [p for r in receipts for p in r.of(PartKind.QUARANTINED)]
    rows, seen = sum(p.rows for p in parts), sum(r.counts.landed + r.counts.quarantined for r in receipts)
    folder = paths.window_folder(window, books.feed.window.length)
    return {
        "dagster/partition_row_count": rows,
        "dagster/uri": books.lake.locate(f"{paths.visible_roots(books.feed.name)[1]}/{folder}"),
        "rows": rows,
        "share": round(rows / seen, 6) if seen else 0.0,
        "bytes": sum(p.bytes for p in parts),
        "files": len(parts),
        "reasons": _reasons(books.lake, parts),
    }


def _quality(books: Books, window: int, receipts: Sequence[Receipt]) -> Metadata:
    """Numbers to plot: how much of the window broke the contract, and how many fields the schema does not name."""
    counts, said = sum((r.counts for r in receipts), Counts()), Metadata()
    if books.feed.contract is not None:
        said |= breach_counts(books.judged(window))
    if quarantines(books.feed):
        rows = counts.landed + counts.quarantined
        said["quarantined_share"] = round(counts.quarantined / rows, 6) if rows else 0.0
    if books.feed.columns is not None:
        said["new_fields"] = sum(d.kind is DriftKind.NEW for d in drift_of(receipts))
    return said


def breach_counts(found: Sequence[Judged]) -> Metadata:
    """Values that broke an expectation, of all that were held against one; nothing where there were none to hold."""
    if not found:
        return {}
    count, checked = sum(j.outcome.unexpected for j in found), sum(j.outcome.checked for j in found)
    return {"unexpected": count, "unexpected_share": round(count / checked, 6) if checked else 0.0}


def column_schema(books: Books, receipts: Sequence[Receipt]) -> Metadata:
    """The columns that these rows landed with, by the newest of their shapes: a feed may have taken in more than its
    file says."""
    names = {r.format for r in receipts}
    newest = next((n for n in reversed(books.state.shapes) if n in names), None)
    shape = books.shape(newest) if newest else None
    return {"dagster/column_schema": columns_of(shape.landed)} if shape else {}


def _reasons(lake: Lake, parts: Sequence[Part]) -> dg.TableMetadataValue:
    """Rows by who refused them and why, the most frequent first; what a part's file does not say is not told."""
    from sluice.pipelines.quarantine.limit import faults_of  # late: definitions load without it

    found: Counter[tuple[str, ...]] = Counter()
    names = ("stage", "reason", "field", "expectation")
    for part in parts:
        with suppress(OSError, pa.ArrowException):
            for f in faults_of([part.path], lake):
                found[tuple(getattr(f.kind, name) or "" for name in names)] += f.records
    rows: list[dict[str, str | int]] = [
        {"rows": n} | dict(zip(names, why, strict=True)) for why, n in found.most_common()
    ]
    return table(rows, {"rows": "int"} | dict.fromkeys(names, "string"))


def _amounts(receipts: Sequence[Receipt]) -> Metadata:
    counts = sum((r.counts for r in receipts), Counts())
    return {
        "rows": counts.landed,
        "bytes": sum(p.bytes for r in receipts for p in r.parts),
        "input_bytes": sum(r.input_bytes for r in receipts),
        "files": sum(len(r.parts) for r in receipts),
        "quarantined": counts.quarantined,
        "dropped": counts.dropped,
        "invisible": counts.invisible,
        "slices": len(receipts),
    }


def _rates(books: Books, batches: Iterable[Batch]) -> Metadata:
    """How long the batches took, from plan to publish, and how fast they were."""
    entries = [(b, books.entry(b)) for b in batches]
    seconds = sum(max(entry.at - batch.planned_at, 1) for batch, entry in entries) / 1000
    receipts = [r for _, entry in entries for r in entry.receipts]
    return {
        "seconds": seconds,
        "rows_per_second": round(sum(r.counts.landed for r in receipts) / seconds) if seconds else 0,
        "bytes_per_second": round(sum(p.bytes for r in receipts for p in r.parts) / seconds) if seconds else 0,
    }


def task_time(receipts: Iterable[Receipt]) -> Metadata:
    """Where the time of tasks went, as `sluice run --profile` says it; nothing where no task read anything."""
    all_ = spent(receipts)
    rows: list[dict[str, str | int | float]] = [
        {
            "activity": activity,
            "seconds": round(ns / 1e9, 6),
            "share": round(ns / all_.total, 6),
            "ns_per_record": round(all_.per_record(ns), 1),
        }
        for activity, ns in all_.ns.items()
        if ns
    ]
    columns = {"activity": "string"} | dict.fromkeys(("seconds", "share", "ns_per_record"), "float")
    if not rows:
        return {}
    return {
        "task_seconds": round(all_.total / 1e9, 3),
        "task_ns_per_record": round(all_.per_record(all_.total), 1),
        "task_time": table(rows, columns),
    }


def _provenance(state: State, batch: Batch) -> Metadata:
    return {
        "batch": batch.id,
        "publish_entry": batch.published if batch.published is not None else -1,
        "plan": batch.hash,
        "ledger": state.ledger_id,
        "request": str(batch.request),
        **({"run": dg.MetadataValue.dagster_run(batch.owner.run)} if batch.owner.run else {}),
    }


def _provenances(state: State, batches: Sequence[Batch]) -> Metadata:
    """Of several batches, the newest one's."""
    if not batches:
        return {"batch": "none: nothing happened in this window", "ledger": state.ledger_id}
    several = {"batches": ", ".join(str(b.id) for b in batches)} if len(batches) > 1 else {}
    return several | _provenance(state, batches[-1])


def _boundaries(books: Books, window: int, receipts: Sequence[Receipt]) -> dg.TableMetadataValue:
    """The window's offsets in each partition, and what is in them."""
    ranges = {k: windows.range_of(books.state, k, window, books.feed.window) for k in books.state.origins}
    stretches = {k: _Stretch(k, r.start, r.end) for k, r in sorted(ranges.items()) if r is not None}
    for r in receipts:
        if r.slice.key in stretches:
            stretches[r.slice.key].add(r)
    return table([s.row() for s in stretches.values()], {"partition": "string"} | dict.fromkeys(_RANGE_NUMBERS, "int"))


@dataclass
class _Stretch:
    """Receipts of one partition that follow each other without a gap."""

    key: Key
    start: int
    end: int
    counts: Counts = field(default_factory=Counts)
    files: int = 0

    def add(self, r: Receipt) -> None:
        self.counts, self.files = self.counts + r.counts, self.files + len(r.parts)

    def row(self) -> dict[str, str | int]:
        return {
            "partition": str(self.key),
            "start": self.start,
            "end": self.end,
            "landed": self.counts.landed,
            "quarantined": self.counts.quarantined,
            "invisible": self.counts.invisible,
            "files": self.files,
        }


def _ranges(receipts: Iterable[Receipt]) -> dg.TableMetadataValue:
    stretches: list[_Stretch] = []
    for r in sorted(receipts, key=lambda r: (r.slice.key, r.slice.start)):
        if not stretches or (stretches[-1].key, stretches[-1].end) != (r.slice.key, r.slice.start):
            stretches.append(_Stretch(r.slice.key, r.slice.start, r.slice.start))
        stretches[-1].end = r.slice.end
        stretches[-1].add(r)
    columns = {"partition": "string"} | dict.fromkeys(_RANGE_NUMBERS, "int")
    return table([s.row() for s in stretches], columns)


_RANGE_NUMBERS = ("start", "end", "landed", "quarantined", "invisible", "files")


# -- the check


@dataclass(frozen=True, slots=True)
class PartitionStanding:
    """How far one partition's account is closed. `holes` lie between the frontier and the furthest landed offset;
    `untried`: the first of them is what nothing was done about yet.
    """

    key: Key
    origin: int
    frontier: int
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    untried: bool = False

    @property
    def whole(self) -> bool:
        return not self.holes[self.untried :] and not self.reserved


def standings(books: Books) -> list[PartitionStanding]:
    """Every current partition's account, by the ledger alone."""
    return [_standing(books, key) for key in books.state.known()]


def _standing(books: Books, key: Key) -> PartitionStanding:
    state = books.state
    origin, holes, reserved = state.origins[key].offset, state.holes(key), state.reserved(key)
    return PartitionStanding(key, origin, books.frontiers[key], holes, reserved, bool(holes) and books.untried(key))


def of_standings(found: Sequence[PartitionStanding]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(s.key),
            "origin": s.origin,
            "frontier": s.frontier,
            "holes": _range_list(s.holes),
            "reserved": _range_list(s.reserved),
        }
        for s in sorted(found, key=lambda s: (s.whole, s.key))
    ]
    columns = {"partition": "string", "origin": "int", "frontier": "int", "holes": "string", "reserved": "string"}
    return {"partitions": len(found), "holes": sum(len(s.holes) for s in found), "account": table(rows, columns)}


def of_live(books: Books, run: str) -> Metadata:
    """The live batches of other runs: how those stand, and what goes on when they are dead."""
    rows: list[dict[str, str | int]] = [
        {
            "batch": m.batch,
            "standing": str(m),
            "way out": " or ".join(f"`{command}` {what}" for command, what in m.ways) or "wait for it to end",
        }
        for m in books.live
        if m.owner.run != run
    ]
    columns = {"batch": "int", "standing": "string", "way out": "string"}
    return {"live_batches": table(rows, columns)} if rows else {}


def of_failures(landed: Landed) -> Metadata:
    """The slices and partitions that a run could not land, and losses that it accepted."""
    rows: list[dict[str, str | int]] = [
        {"range": str(f.slice), "error": f.error, "message": f.message} for b in landed.batches for f in b.failures
    ]
    rows += [{"range": str(r.tp), "error": type(r.error).__name__, "message": r.error.message} for r in landed.refusals]
    rows += [{"range": f"{x.key}:{x.range}", "error": "loss", "message": "accepted as lost"} for x in landed.losses]
    return {"failed": table(rows, dict.fromkeys(("range", "error", "message"), "string"))} if rows else {}


def _range_list(ranges: Sequence[Range]) -> str:
    more = f" … {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return ", ".join(map(str, ranges[:3])) + more


# -- committed


def of_commit(group: str, result: CommitResult) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {"partition": str(m.key), "before": "none" if m.before is None else str(m.before), "after": m.after}
        for m in result.offsets
    ]
    return {
        "group": group,
        "status": str(result.status),
        "committed_offsets": sum(m.after for m in result.offsets),
        "mark": result.mark,
        **({"dead_letters": result.letters, "dead_letters_to": result.letters_to} if result.letters else {}),
        "frontier": table(rows, {"partition": "string", "before": "string", "after": "int"}),
    }


@dataclass(frozen=True, slots=True)
class PartitionBehind:
    """A partition whose frontier has not reached a window's end; `window` (ms) is the one that it stands in, `live` the
    batch that reserves what is owed there."""

    key: Key
    frontier: int
    end: int | None
    window: int | None
    live: Met | None


def behind(books: Books, window: int) -> list[PartitionBehind]:
    """What keeps the frontier from passing a window, by partition; nothing when it has passed."""
    ends, at = books.ends(window), books.frontiers
    return [_behind(books, k, at[k], end) for k, end in ends.items() if end is None or at[k] < end]


def _behind(books: Books, key: Key, frontier: int, end: int | None) -> PartitionBehind:
    here = Range(frontier, frontier + 1)
    pieces = windows.pieces(books.state, key, here)
    holding = {b.id for b, s in books.state.live_slices() if s.key == key and s.range.meets(here)}
    live = next((m for m in books.live if m.batch in holding), None)
    return PartitionBehind(key, frontier, end, pieces[0].window if pieces else None, live)


def of_behind(found: Sequence[PartitionBehind]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(b.key),
            "frontier": b.frontier,
            "end of the window": "not resolved" if b.end is None else str(b.end),
            "held by": _held_by(b),
        }
        for b in found
    ]
    columns = {"partition": "string", "frontier": "int", "end of the window": "string", "held by": "string"}
    return {"partitions_behind": len(found)} | ({"behind": table(rows, columns)} if rows else {})


def _held_by(b: PartitionBehind) -> str:
    where = "what lies before the first window" if b.window is None else f"window {show_window(b.window)}"
    return f"{where}, {f'where {b.live},' if b.live else 'owed'} from offset {b.frontier} on"


# -- what to look at


def of_watched(seen: WatchResult) -> Metadata:
    """The findings of a look at a feed, and where it stands."""
    rows: list[dict[str, str | int]] = [
        {"finding": f.text, "way out": f.remedy, "severity": "error" if f.severe else "warning"} for f in seen.findings
    ]
    columns = dict.fromkeys(("finding", "way out", "severity"), "string")
    findings = {"findings": table(rows, columns)} if rows else {}
    return findings | ({} if seen.outlook is None else of_outlook(seen.outlook))


def of_outlook(outlook: Outlook) -> Metadata:
    """How far behind a feed is, and how fast it goes; what is not known is left out."""
    told = {
        "lag_offsets": outlook.lag,
        "lag_seconds": _seconds(outlook.age),
        "catch_up_seconds": _seconds(outlook.eta),
        "landing_offsets_per_second": _rate(outlook.landing),
        "production_offsets_per_second": _rate(outlook.production),
        "ranges_at_risk": len(outlook.at_risk),
    }
    return {name: value for name, value in told.items() if value is not None}


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)


# -- topics


@dataclass(frozen=True)
class TopicReader:
    """A feed that reads a topic: the next offset that it owes by partition, how old (ms) the oldest record is that it
    owes there, where that is known, and what of the topic Kafka will delete before it lands.
    """

    feed: str
    frontiers: Mapping[int, int] = field(default_factory=dict)
    ages: Mapping[int, int] = field(default_factory=dict)
    at_risk: Sequence[str] = ()


def of_topic(partitions: Sequence[PartitionState], readers: Sequence[TopicReader]) -> Metadata:
    """What Kafka says of a topic, and how far behind each feed is, in offsets and in time."""
    lags = {r.feed: [_lag(p, r) for p in partitions] for r in readers}
    rows: list[dict[str, str | int]] = [
        {
            "partition": p.partition,
            "leader": p.leader,
            "start": p.log_start,
            "end": p.stable_end,
            **{f"lag of {feed}": lag[i] for feed, lag in lags.items()},
        }
        for i, p in enumerate(partitions)
    ]
    columns = dict.fromkeys(("partition", "leader", "start", "end", *(f"lag of {feed}" for feed in lags)), "int")
    return {
        "partitions": len(partitions),
        "offsets": sum(p.stable_end - p.log_start for p in partitions),
        **{f"lag_{feed}": sum(lag) for feed, lag in lags.items()},
        **{f"lag_seconds_{r.feed}": age / 1000 for r in readers if (age := _age(r, sum(lags[r.feed]))) is not None},
        **{f"at_risk_{r.feed}": "\n".join(r.at_risk) for r in readers if r.at_risk},
        "log": table(rows, columns),
    }


def _lag(p: PartitionState, reader: TopicReader) -> int:
    return max(0, p.stable_end - reader.frontiers.get(p.partition, p.log_start))


def _age(reader: TopicReader, lag: int) -> int | None:
    """How old (ms) the oldest record is that the feed owes in the topic: 0 when it owes none."""
    return max(reader.ages.values(), default=None if lag else 0)
