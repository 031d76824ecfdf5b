"""Locates any offset: the file and row with its record, or the reason why it has none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.audit.gaps import read_policies
from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.account import OffsetClass, list_unread
from sluice.pipelines.ledger.entries import EraseEntry, PublishEntry
from sluice.pipelines.model.kafka import Key, Range, TopicPartition
from sluice.pipelines.model.receipts import Part, PartKind, Receipt
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Cluster, Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine.listing import describe_reason
from sluice.pipelines.records.rows.row_format import offset_column
from sluice.pipelines.schema.arrays import int64s
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import show_instant


@dataclass(frozen=True, slots=True)
class Explanation:
    """`text` is one readable sentence. Landed records have a lake path, row group and row within it (from 0)."""

    tp: Flat[TopicPartition]
    offset: int
    class_: OffsetClass
    text: str
    path: str | None = None
    row_group: int | None = None
    row: int | None = None
    batch: int | None = None
    published: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    topic_id: str = ""


def explain(
    ledger: Ledger,
    lake: Lake,
    tp: TopicPartition,
    offset: int,
    cluster: Cluster | None = None,
    life: Key | None = None,
) -> Explanation:
    """Explain one offset from ledger and files, in the partition's current life or in this one. Raises PartUnreadable.

    The cluster, if given, is asked for the topic's policy if the offset may be in no batch of the log.
    """
    state = ledger.read()
    key = life or state.current.get(tp)
    if key is None:
        return Explanation(tp, offset, OffsetClass.UNKNOWN_PARTITION, f"the ledger knows no partition {tp}")
    explanation = _explain_offset(ledger, lake, state, key, offset)
    if cluster and explanation.counts.get("compacted"):
        explanation = replace(explanation, text=explanation.text + _describe_policy(cluster, tp.topic))
    which = f" (of topic id {key.life})" if any(k.tp == tp and k != key for k in state.origins) else ""
    return replace(explanation, text=explanation.text + which, topic_id=key.topic_id)


def _explain_offset(ledger: Ledger, lake: Lake, state: State, key: Key, offset: int) -> Explanation:
    if (publication := _publication_of(ledger, state, key, offset)) is None:
        return _explain_unlanded(ledger, state, key, offset)
    explanation = _explain_landed(ledger, lake, offset, *publication)
    if explanation.class_ is not OffsetClass.LANDED:
        return explanation
    return replace(explanation, text=explanation.text + _relanding_text(ledger, lake, key, offset, *publication[1:]))


def _publication_of(ledger: Ledger, state: State, key: Key, offset: int) -> tuple[int, int, Receipt] | None:
    """Returns the newest (batch, publish entry, receipt) that covers the offset, searching its window first."""
    if not any(r.start <= offset < r.end for r in state.landed.get(key, ())):
        return None
    for number in _candidates(state, key, offset):
        entry = ledger.entry(number)
        if isinstance(entry, PublishEntry):
            for r in state.receipts(number, entry):
                if r.offset_range.key == key and r.offset_range.start <= offset < r.offset_range.end:
                    return entry.batch, number, r
    return None


def _candidates(state: State, key: Key, offset: int) -> Iterator[int]:
    """Yields numbers of publish entries: first those of the offset's window, then the others, newest first."""
    (piece,) = windows.cut_at_boundaries(state, key, Range(offset, offset + 1))
    first = state.published_in.get(piece.window, ())
    yield from sorted(first, reverse=True)
    yield from sorted(set(state.published_in.every()) - set(first), reverse=True)


def _explain_landed(ledger: Ledger, lake: Lake, offset: int, batch: int, number: int, r: Receipt) -> Explanation:
    tp, rows = r.offset_range.tp, 0
    if _among(offset, r.erased):
        entries = (e for _, e in ledger.entries() if isinstance(e, EraseEntry))
        here = (e for e in entries if any(x.key == r.offset_range.key and _among(offset, [x.range]) for x in e.ranges))
        entry = next(here)
        text = f"erased on {show_instant(entry.at)}{f' by {entry.run}' if entry.run else ''}: {entry.reason}"
        return Explanation(tp, offset, OffsetClass.ERASED, text, batch=batch, published=number)
    for part in r.parts:
        _check_own(lake, ledger.feed, part, r)
        position = _row(lake, part, offset)
        if position is not None:
            kind = OffsetClass.LANDED if part.kind is PartKind.LANDED else OffsetClass.QUARANTINED
            text = f"{kind} by batch {batch}: row {position[1]} of row group {position[0]} in {lake.locate(part.path)}"
            if kind is OffsetClass.QUARANTINED:
                text += f"; {_reason(lake, part, *position)}"
            others = [p for p in r.parts if p.output != part.output] if r.counts.copies else []
            if also := [p.output for p in others if _row(lake, p, offset) is not None]:
                text += f"; also in {', '.join(sorted(also))}"
            return Explanation(tp, offset, kind, text, part.path, *position, batch, number)
        rows += _rows_within(lake, part, r.offset_range.range)
    counts = {k: getattr(r.counts, k) for k in _UNSEEN}
    possible = [k for k, n in counts.items() if n]
    if rows != r.counts.rows or not possible:
        wanted = r.counts.rows
        where = ", ".join(lake.locate(p.path) for p in r.parts) or "no file"
        raise PartUnreadable(
            f"{r.offset_range} landed {wanted} rows by the ledger, but {where} has {rows} of them: the file was"
            " replaced",
            remedy=paths.find_part_remedy(ledger.feed),
            path=r.parts[0].path if r.parts else "",
        )
    reasons = " or ".join(_UNSEEN[k] for k in possible)
    numbers = ", ".join(f"{counts[k]} {k}" for k in possible)
    text = f"read by batch {batch} and not landed: {reasons} (offset range {r.offset_range} has {numbers})"
    kind = OffsetClass.DROPPED if possible == ["dropped"] else OffsetClass.NO_RECORD
    return Explanation(tp, offset, kind, text, None, None, None, batch, number, counts)


def _check_own(lake: Lake, feed: str, part: Part, r: Receipt) -> None:
    """Raises PartUnreadable if the file's metadata names another offset range."""
    with _open_part(lake, part) as file:
        about = file.metadata.metadata or {}
    range_, shared = about.get(b"sluice.range"), about.get(b"sluice.slices")
    if range_ is None and shared is None:
        return
    ranges = [str(s) for s, _ in json.loads(shared)] if shared else [(range_ or b"").decode(errors="replace")]
    if str(r.offset_range) not in ranges:
        raise PartUnreadable(
            f"{lake.locate(part.path)} is not the file of {r.offset_range}: it has the rows of {ranges[0]}",
            remedy=paths.find_part_remedy(feed),
            path=part.path,
        )


def _rows_within(lake: Lake, part: Part, own: Range) -> int:
    """Returns the number of rows in the file with an offset of its range."""
    with _open_part(lake, part) as file:
        column = file.read(columns=[offset_column(file.schema_arrow)]).column(0)
    first = part.shared.first if part.shared else 0
    offsets = np.concatenate([np.empty(0, np.int64), *(int64s(c) for c in column.slice(first, part.rows).chunks)])
    return int(((offsets >= own.start) & (offsets < own.end)).sum())


def _relanding_text(ledger: Ledger, lake: Lake, key: Key, offset: int, number: int, r: Receipt) -> str:
    """Describe the replay that landed it and the reason for its quarantine; empty if it landed directly."""
    if not _among(offset, r.relanded):
        return ""
    state, replayed = ledger.read(), None
    for at in sorted(n for n in set(_candidates(state, key, offset)) if n <= number and n not in state.void)[::-1]:
        entry = ledger.entry(at)
        receipts = entry.receipts if isinstance(entry, PublishEntry) else ()
        covering = [
            x for x in receipts if x.offset_range.key == key and x.offset_range.start <= offset < x.offset_range.end
        ]
        if covering and not _among(offset, covering[0].relanded):
            break
        if covering and isinstance(entry, PublishEntry):
            replayed = entry.batch, covering[0].offset_range
    if replayed is None:
        return ""
    batch, s = replayed
    how = f"re-landed by batch {batch}, {'fixed' if _among(offset, r.mended) else 'as it was'}"
    return f"; {how}: {_was(lake, paths.relanded_path(ledger.feed, batch, s), offset)}"


def _among(offset: int, ranges: Iterable[Range]) -> bool:
    return any(x.start <= offset < x.end for x in ranges)


def _was(lake: Lake, path: str, offset: int) -> str:
    """Returns the reason for the record's quarantine, as noted by the replay."""
    with suppress(PartUnreadable), parquet.open_parquet(lake, path) as file:
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group)
            if (at := _place(rows.column("offset"), offset)) is not None:
                row = rows.slice(at, 1).to_pylist()[0]
                return f"it was quarantined by batch {row['batch']}: {describe_reason(row)}"
    return "it was quarantined, and the reason is no longer recorded"


_UNSEEN = {
    "control": "a control record",
    "aborted": "in an aborted transaction",
    "compacted": "in no batch of the log",
    "dropped": "dropped by the feed's on_undecodable",
}


def _describe_policy(cluster: Cluster, topic: str) -> str:
    match read_policies(cluster, {topic}).get(topic):
        case True:
            return "; Kafka compacts this topic, which leaves offsets without a batch"
        case False:
            return "; Kafka does not compact this topic: it lost the record, unless it once compacted the topic"
        case _:
            return "; whether Kafka compacts this topic, which leaves offsets without a batch, is unknown"


_UNREAD = {
    OffsetClass.LOST: "recorded in the ledger and never read",
    OffsetClass.SKIPPED: "skipped by a decision that the ledger records",
}


def _row(lake: Lake, part: Part, offset: int) -> tuple[int, int] | None:
    """Returns (row group, row in it) of the offset in a part. Row groups are chosen by their statistics."""
    with _open_part(lake, part) as file:
        column = offset_column(file.schema_arrow)
        index = file.schema_arrow.get_field_index(column)
        groups, before = parquet.find_row_groups(file.metadata, part)
        for group in range(file.metadata.num_row_groups) if groups is None else groups:
            rows = file.metadata.row_group(group).num_rows
            first, end = 0, rows
            if part.shared:
                first = part.shared.first - before
                first, end = max(first, 0), min(first + part.rows, rows)
            before += rows
            # Nested fields before it take several of Parquet's columns.
            name = file.schema_arrow.field(index).name
            names = [file.schema.column(i).path for i in range(len(file.schema))]
            stats = file.metadata.row_group(group).column(names.index(name)).statistics
            if stats is not None and stats.has_min_max and not stats.min <= offset <= stats.max:
                continue
            row = _place(file.read_row_group(group, columns=[column]).column(0).slice(first, end - first), offset)
            if row is not None:
                return group, first + row
    return None


def _place(offsets: pa.ChunkedArray, offset: int) -> int | None:
    """Returns the position of the offset in an increasing column of offsets."""
    # Not pc.index(): making its scalar imports pandas, a second of the two that an answer may take.
    values = np.concatenate([int64s(c) for c in offsets.chunks])
    at = int(np.searchsorted(values, offset))
    return at if at < len(values) and values[at] == offset else None


def _reason(lake: Lake, part: Part, group: int, row: int) -> str:
    """Returns the reason for the record's quarantine."""
    with _open_part(lake, part) as file:
        columns = ["reason", "field", "detail", "byte"]
        return describe_reason(file.read_row_group(group, columns=columns).slice(row, 1).to_pylist()[0])


def _open_part(lake: Lake, part: Part) -> AbstractContextManager[pq.ParquetFile]:
    return parquet.open_parquet(lake, parquet.place(lake, part))


def _explain_unlanded(ledger: Ledger, state: State, key: Key, offset: int) -> Explanation:
    for kind, ranges in list_unread(state, key).items():
        for r in (r for r in ranges if r.start <= offset < r.end):
            text = f"{kind}: in the range {r}, {_UNREAD.get(kind)}"
            if kind is OffsetClass.RETIRED:
                why = manifest.describe_retirement(ledger, state, key, Range(offset, offset + 1))
                text = f"landed once, in the range {r}; {why}"
            return Explanation(key.tp, offset, kind, text)
    for batch, s in state.list_live_ranges():
        if s.key == key and s.start <= offset < s.end:
            text = f"batch {batch.id} ({batch.owner.describe()}) reserves it and has not published"
            return Explanation(key.tp, offset, OffsetClass.RESERVED, text, batch=batch.id)
    origin, frontier = state.origins[key].offset, state.frontier(key)
    if offset < origin:
        text = f"below the feed's origin {origin}: never requested"
        return Explanation(key.tp, offset, OffsetClass.BELOW_ORIGIN, text)
    return Explanation(key.tp, offset, OffsetClass.PENDING, f"not read yet: the frontier is {frontier}")
