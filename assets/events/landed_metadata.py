"""Dagster's metadata of landed batches, windows and their quarantine, all from the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import dagster as dg
import pyarrow as pa

from sluice.assets.events.ledger_view import Judged, LedgerView, quarantines
from sluice.assets.specs.metadata_tables import Metadata, columns_of, table
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, State
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.receipts import Counts, DriftKind, Part, PartKind, Receipt, count_files
from sluice.pipelines.model.traffic import SHARES, BrokerTraffic, Traffic, all_brokers
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.status.broker_traffic import TopicTraffic, by_topic, notable
from sluice.pipelines.status.timings import sum_times
from sluice.pipelines.validation.drift import drift_of


def batch_metadata(books: LedgerView, batch: Batch) -> Metadata:
    """What one published batch landed, as its publish entry says: the same whoever records it, and when."""
    entry = books.entry(batch)
    return {
        "dagster/uri": books.lake.locate(paths.visible_roots(books.feed.name)[0]),
        "ranges": _ranges(entry.receipts),
        **_amounts(entry.receipts),
        **_rates(books, (batch,)),
        **task_time(entry.receipts),
        **brokers(entry.receipts, entry.traffic),
        "slices_adopted": sum(r.adopted for r in entry.receipts),
        "slices_failed": len(entry.failures),
        **_provenance(books.state, books.ledger.recall(batch)),
    }


def window_metadata(books: LedgerView, window: int) -> Metadata:
    """Returns the metadata of a complete window, over all batches that landed it."""
    receipts, batches = books.receipts_in(window), books.batches_in(window)
    folder = paths.window_folder(window, books.feed.window.length, books.state.folder_prefix)
    return {
        "dagster/partition_row_count": sum(r.counts.landed for r in receipts),
        "dagster/uri": books.lake.locate(f"{paths.visible_roots(books.feed.name)[0]}/{folder}"),
        "boundaries": _boundaries(books, window, receipts),
        **_amounts(receipts),
        **_quality(books, window, receipts),
        **column_schema(books, receipts),
        **_rates(books, batches),
        **task_time(receipts),
        **brokers(receipts, sum((books.entry(b).traffic for b in batches), Traffic())),
        **_provenances(books, batches),
    }


def quarantine_metadata(books: LedgerView, window: int) -> Metadata:
    """Returns the metadata of a complete window's quarantine."""
    receipts = books.receipts_in(window)
    parts = [p for r in receipts for p in r.of(PartKind.QUARANTINED)]
    rows, seen = sum(p.rows for p in parts), sum(r.counts.landed + r.counts.quarantined for r in receipts)
    folder = paths.window_folder(window, books.feed.window.length, books.state.folder_prefix)
    return {
        "dagster/partition_row_count": rows,
        "dagster/uri": books.lake.locate(f"{paths.visible_roots(books.feed.name)[1]}/{folder}"),
        "rows": rows,
        "share": round(rows / seen, 6) if seen else 0.0,
        "bytes": sum(p.bytes for p in parts),
        "files": len({p.path for p in parts}),
        "reasons": _reasons(books.lake, parts),
    }


def _quality(books: LedgerView, window: int, receipts: Sequence[Receipt]) -> Metadata:
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
    """Returns the share of values that broke an expectation; empty if no value was checked."""
    if not found:
        return {}
    count, checked = sum(j.outcome.unexpected for j in found), sum(j.outcome.checked for j in found)
    return {"unexpected": count, "unexpected_share": round(count / checked, 6) if checked else 0.0}


def column_schema(books: LedgerView, receipts: Sequence[Receipt]) -> Metadata:
    """The columns that these rows landed with, by the newest of their shapes: a feed may have taken in more than its
    file says."""
    names = {r.format for r in receipts}
    newest = next((n for n in reversed(books.state.shapes) if n in names), None)
    shape = books.shape(newest) if newest else None
    return (
        {"dagster/column_schema": columns_of(shape.landed, books.feed.descriptions, own=shape.columns is None)}
        if shape
        else {}
    )


def _reasons(lake: Lake, parts: Sequence[Part]) -> dg.TableMetadataValue:
    """Returns refused rows by stage and reason, the most frequent first."""
    from sluice.pipelines.quarantine.limit import faults_of  # late: definitions load without it

    found: Counter[tuple[str, ...]] = Counter()
    names = ("stage", "reason", "field", "expectation")
    for path in dict.fromkeys(p.path for p in parts):
        with suppress(OSError, pa.ArrowException):
            for f in faults_of([path], lake):
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
        "files": count_files(receipts),
        "quarantined": counts.quarantined,
        "dropped": counts.dropped,
        "invisible": counts.invisible,
        "slices": len(receipts),
    }


def _rates(books: LedgerView, batches: Iterable[Batch]) -> Metadata:
    """How long the batches took, from plan to publish, and how fast they were."""
    entries = [(books.ledger.recall(b), books.entry(b)) for b in batches]
    seconds = sum(max(entry.at - batch.planned_at, 1) for batch, entry in entries) / 1000
    receipts = [r for _, entry in entries for r in entry.receipts]
    return {
        "seconds": seconds,
        "rows_per_second": round(sum(r.counts.landed for r in receipts) / seconds) if seconds else 0,
        "bytes_per_second": round(sum(p.bytes for r in receipts for p in r.parts) / seconds) if seconds else 0,
    }


def task_time(receipts: Iterable[Receipt]) -> Metadata:
    """Returns the time of tasks by activity, as in `sluice run --profile`; empty if no task read anything."""
    all_ = sum_times(receipts)
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


def brokers(receipts: Iterable[Receipt], traffic: Traffic) -> Metadata:
    """Returns the requests to brokers, as in `sluice run --profile`; empty if there were none."""
    if not traffic.brokers:
        return {}
    whole = all_brokers(traffic.brokers)
    return {
        "fetches": float(whole.requests),
        "fetched_bytes": float(whole.bytes),
        **{f"fetch_{name}_ms": whole.latency.percentile_ms(share) for name, share in SHARES.items()},
        "fetch_wait_seconds": whole.latency.total_us / 1e6,
        "fetch_held_seconds": whole.held_us / 1e6,
        "throttled_seconds": whole.throttle_ms / 1e3,
        "leaders_moved": float(whole.moved),
        "brokers": table([_broker(b) for b in traffic.brokers], _BROKER),
        "topics": table([_topic(t) for t in by_topic(receipts, traffic)], _TOPIC),
        **({"brokers_noted": dg.MetadataValue.text("; ".join(said))} if (said := notable(traffic.brokers)) else {}),
    }


def _broker(b: BrokerTraffic) -> dict[str, str | int | float]:
    return {
        "broker": f"{b.node} {b.address}".strip(),
        "fetches": b.requests,
        "mb": round(b.bytes / 1e6, 3),
        **{f"{name}_ms": b.latency.percentile_ms(share) for name, share in SHARES.items()},
        "wait_seconds": round(b.latency.total_us / 1e6, 3),
        "held_seconds": round(b.held_us / 1e6, 3),
        "throttled_seconds": b.throttle_ms / 1e3,
        "moved": b.moved,
        "errors": ", ".join(f"{name} {n}" for name, n in sorted(b.errors.items())),
    }


_BROKER = (
    {"broker": "string", "fetches": "int", "mb": "float"}
    | {f"{name}_ms": "float" for name in SHARES}
    | dict.fromkeys(("wait_seconds", "held_seconds", "throttled_seconds"), "float")
    | {"moved": "int", "errors": "string"}
)


def _topic(t: TopicTraffic) -> dict[str, str | int | float]:
    return {
        "topic": t.topic,
        "records": t.records,
        "mb": round(t.bytes / 1e6, 3),
        "behind": -1 if t.behind is None else t.behind,
    }


_TOPIC = {"topic": "string", "records": "int", "mb": "float", "behind": "int"}


def _provenance(state: State, batch: Batch) -> Metadata:
    return {
        "batch": batch.id,
        **({} if batch.published is None else {"publish_entry": batch.published}),
        "plan": batch.hash,
        "ledger": state.ledger_id,
        "request": str(batch.request),
        **({"run": dg.MetadataValue.dagster_run(batch.owner.run)} if batch.owner.run else {}),
    }


def _provenances(books: LedgerView, batches: Sequence[Batch]) -> Metadata:
    """Of several batches, the newest one's."""
    if not batches:
        return {"batch": "none: nothing happened in this window", "ledger": books.state.ledger_id}
    several = {"batches": ", ".join(str(b.id) for b in batches)} if len(batches) > 1 else {}
    return several | _provenance(books.state, books.ledger.recall(batches[-1]))


def _boundaries(books: LedgerView, window: int, receipts: Sequence[Receipt]) -> dg.TableMetadataValue:
    """Returns the window's offsets in each partition, by class."""
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
