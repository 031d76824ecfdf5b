"""What Dagster shows beside an event: standard keys, numbers that it plots, and tables by partition.

All of it comes from the ledger and from what Kafka said of itself; no setting of a client and nothing that was read
from a record goes in. Tables are bounded: the first `MAX_ROWS` partitions, and a line that says how many more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pyarrow as pa

from sluice.pipelines import layout
from sluice.pipelines.batch import Landed
from sluice.pipelines.commit import CommitResult
from sluice.pipelines.errors import LedgerCorrupt
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ports import Lake
from sluice.pipelines.ranges import Range, subtract
from sluice.pipelines.values import Counts, Key, PartitionState, Receipt

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


def table(rows: Sequence[Mapping[str, str | int]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """A bounded table; `columns` maps name to Dagster's type (`string`, `int`)."""
    shown = [dg.TableRecord(dict(r)) for r in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest = {c: f"… and {len(rows) - MAX_ROWS} more" if i == 0 else "" for i, c in enumerate(columns)}
        shown.append(dg.TableRecord(rest))
    return dg.MetadataValue.table(shown, dg.TableSchema([dg.TableColumn(n, t) for n, t in columns.items()]))


# -- landed


def of_batch(feed: str, ledger: Ledger, state: State, batch: Batch, lake: Lake) -> Metadata:
    """What one published batch landed, as its publish entry says: the same whoever records it, and when."""
    entry = ledger.entry(batch.published if batch.published is not None else -1)
    if not isinstance(entry, PublishEntry):
        raise LedgerCorrupt(f"entry {batch.published} is not the publish entry of batch {batch.id}")
    return {
        "dagster/uri": lake.locate(layout.visible_roots(feed)[0]),
        "ranges": _ranges(entry.receipts),
        **_amounts(entry, max(entry.at - batch.planned_at, 1) / 1000),
        **_provenance(batch, state),
    }


def nothing_owed(feed: str, lake: Lake) -> Metadata:
    """What a run that had nothing to land says."""
    return {
        "dagster/row_count": 0,
        "dagster/uri": lake.locate(layout.visible_roots(feed)[0]),
        "batch": "none: nothing was owed",
    }


def _amounts(entry: PublishEntry, seconds: float) -> Metadata:
    counts = sum((r.counts for r in entry.receipts), Counts())
    size = sum(p.bytes for r in entry.receipts for p in r.parts)
    return {
        "dagster/row_count": counts.landed,
        "bytes": size,
        "input_bytes": sum(r.input_bytes for r in entry.receipts),
        "files": sum(len(r.parts) for r in entry.receipts),
        "quarantined": counts.quarantined,
        "dropped": counts.dropped,
        "invisible": counts.invisible,
        "seconds": seconds,
        "rows_per_second": round(counts.landed / seconds),
        "bytes_per_second": round(size / seconds),
        "slices": len(entry.receipts),
        "slices_adopted": sum(r.adopted for r in entry.receipts),
        "slices_failed": len(entry.failures),
    }


def _provenance(batch: Batch, state: State) -> Metadata:
    return {
        "batch": batch.id,
        "publish_entry": batch.published if batch.published is not None else -1,
        "plan": batch.hash,
        "ledger": state.ledger_id,
        "request": batch.request,
        **({"run": dg.MetadataValue.dagster_run(batch.owner.run)} if batch.owner.run else {}),
    }


@dataclass
class _Stretch:
    """Receipts of one partition that follow each other without a gap."""

    key: Key
    start: int
    end: int
    counts: Counts = field(default_factory=Counts)
    files: int = 0

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
        last = stretches[-1]
        last.end, last.counts, last.files = r.slice.end, last.counts + r.counts, last.files + len(r.parts)
    columns = {"partition": "string"} | dict.fromkeys(_RANGE_NUMBERS, "int")
    return table([s.row() for s in stretches], columns)


_RANGE_NUMBERS = ("start", "end", "landed", "quarantined", "invisible", "files")


# -- the check


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one partition's account is closed. `holes` lie between the frontier and the furthest landed offset."""

    key: Key
    origin: int
    frontier: int
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]

    @property
    def whole(self) -> bool:
        return not self.holes and not self.reserved


def standings(state: State) -> list[Standing]:
    """Every current partition's account, by the ledger alone."""
    return [_standing(state, key) for key in sorted(state.current.values()) if key in state.origins]


def _standing(state: State, key: Key) -> Standing:
    accounted, frontier = state.accounted(key), state.frontier(key)
    top = max((r.end for r in accounted), default=frontier)
    holes = subtract(Range(frontier, max(top, frontier)), accounted)
    return Standing(key, state.origins[key].offset, frontier, holes, state.reserved(key))


def of_standings(found: Sequence[Standing]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(s.key),
            "origin": s.origin,
            "frontier": s.frontier,
            "holes": _listed(s.holes),
            "at work": _listed(s.reserved),
        }
        for s in sorted(found, key=lambda s: (s.whole, s.key))
    ]
    columns = {"partition": "string", "origin": "int", "frontier": "int", "holes": "string", "at work": "string"}
    return {"partitions": len(found), "holes": sum(len(s.holes) for s in found), "account": table(rows, columns)}


def of_failures(landed: Landed) -> Metadata:
    """The slices and partitions that a run could not land, and losses that it accepted."""
    rows: list[dict[str, str | int]] = [
        {"range": str(f.slice), "error": f.error, "message": f.message} for b in landed.batches for f in b.failures
    ]
    rows += [{"range": str(r.tp), "error": type(r.error).__name__, "message": r.error.message} for r in landed.refusals]
    rows += [{"range": f"{x.key}:{x.range}", "error": "loss", "message": "accepted as lost"} for x in landed.losses]
    return {"failed": table(rows, dict.fromkeys(("range", "error", "message"), "string"))} if rows else {}


def _listed(ranges: Sequence[Range]) -> str:
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
        "frontier": table(rows, {"partition": "string", "before": "string", "after": "int"}),
    }


# -- topics


@dataclass(frozen=True)
class Reader:
    """A feed that reads a topic, with the next offset that it owes by partition."""

    feed: str
    frontiers: Mapping[int, int] = field(default_factory=dict)


def of_topic(partitions: Sequence[PartitionState], readers: Sequence[Reader]) -> Metadata:
    """What Kafka says of a topic, and how far behind each feed is, in offsets."""
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
        "log": table(rows, columns),
    }


def _lag(p: PartitionState, reader: Reader) -> int:
    return max(0, p.stable_end - reader.frontiers.get(p.partition, p.log_start))
