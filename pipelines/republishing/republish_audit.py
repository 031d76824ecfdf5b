"""Compares a republish with Kafka: every row of the plan with the map and with the record that the map names.

Records are compared value by value, as a reader of committed records sees them.

It goes file by file of the map, so memory holds one transaction's rows and records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.audit.rescan import equal_rows
from sluice.pipelines.errors import Refused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.kafka import FetchLimits, Isolation, PartitionState
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.ports import Fetcher, FetchFailed, Ports
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder
from sluice.pipelines.records.rows.row_format import HEADERS, TO_SEND, get_offsets, inside
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing import coordinates, republish_plan, row_filter
from sluice.pipelines.republishing.republish_plan import Republish, check_still_there
from sluice.pipelines.republishing.republish_rows import CHUNK_ROWS, RowCursor, Shelf, records_of
from sluice.pipelines.republishing.values import check_schema
from sluice.pipelines.schema.arrays import fixed_width, int64s
from sluice.pipelines.util.documents import Derived, Flat

MOST = 1000
"""Findings that are named; the others are only counted."""
_LOG_APPEND_TIME = 1
_CHUNK = pa.schema([*TO_SEND, ("timestampType", pa.int32()), ("offset", pa.int64())])


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """One record that is not as it should be. `old` and `new` are its coordinates, empty where it has none."""

    text: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{' → '.join(filter(None, (self.old, self.new)))} {self.text}"


@dataclass(slots=True)
class RepublishAudit:
    """The result of the comparison. `rows` are those of the plan in the lake, `compared` the records that were equal or
    not; `gone` those that the topic no longer keeps, `hidden` those behind somebody's open transaction, `replayed`
    rows that a replay landed, or took out of quarantine, since. `findings` are at most `MOST` of all."""

    plan: Flat[Republish]
    rows: int = 0
    compared: int = 0
    gone: int = 0
    hidden: int = 0
    replayed: int = 0
    findings_in_all: int = 0
    findings: list[RecordDifference] = field(default_factory=list)

    @property
    def holds(self) -> Derived[bool]:
        return not self.findings_in_all


def audit(feed: Feed, ports: Ports, name: str, report_progress: Reporter = lambda progress: None) -> RepublishAudit:
    """Compare a finished republish of the feed with its target. Progress counts records.

    Raises Refused if it is not finished, WindowRetired and WindowIncomplete if rows of the plan are gone,
    PartUnreadable, UnknownTopic, and what loading the plan and fetching raise.
    """
    lake, ledger = ports.lake, Ledger(ports.lake, feed.stored, ports.clock)
    plan = republish_plan.load(lake, feed.stored, name)
    partitions = ports.cluster.partitions([plan.wishes.to], Isolation.READ_COMMITTED)
    done = lake.get(paths.republish_done_path(plan.feed, plan.id))
    if done is None:
        raise Refused(
            f"republish {plan.id} of {plan.feed} is not finished",
            remedy=f"finish it first: sluice republish {plan.feed} --resume {plan.id}",
        )
    summary = json.loads(done)
    state = ledger.read()
    check_still_there(state, plan)
    check_schema(plan.wishes, shape := republish_plan.find_shape_of(plan, feed, state), plan.feed)
    with (
        ports.open_fetcher(Isolation.READ_COMMITTED) as fetcher,
        row_filter.open_condition(plan.wishes, shape.landed_columns) as condition,
    ):
        shelf = Shelf(lake, ledger, state, plan, condition)
        comparison = _Comparison(plan, shelf, shape, partitions, fetcher)
        for name in summary["files"]:
            comparison.transaction(coordinates.read(lake, plan, name))
            report_progress(Progress("compare", comparison.report.rows, summary["records"]))
        comparison.rest()
    return comparison.report


@dataclass(frozen=True, slots=True)
class _Sent:
    """Records of one transaction, sorted by source and old offset."""

    source: Array
    offset: Array
    partition: Array
    new: Array

    @classmethod
    def of(cls, plan: Republish, table: pa.Table) -> _Sent:
        old, offset, partition, new = (
            int64s(table.column(name).combine_chunks().cast(pa.int64()))
            for name in ("partition", "offset", "to_partition", "to_offset")
        )
        topic = table.column("topic").combine_chunks()
        source = np.full(len(offset), -1, np.int64)
        for n, s in enumerate(plan.sources):
            source[(old == s.partition) & np.asarray(pc.equal(topic, s.topic))] = n
        order = np.lexsort((offset, source))
        return cls(source[order], offset[order], partition[order], new[order])

    def of_source(self, source: int) -> _Sent:
        first, stop = np.searchsorted(self.source, (source, source + 1))
        return self.at(slice(int(first), int(stop)))

    def at(self, rows: Array | slice) -> _Sent:
        return _Sent(self.source[rows], self.offset[rows], self.partition[rows], self.new[rows])


class _Comparison:
    """The state of the transactions seen in the log."""

    def __init__(
        self, plan: Republish, shelf: Shelf, shape: Shape, partitions: Sequence[PartitionState], fetcher: Fetcher
    ) -> None:
        self.report = RepublishAudit(plan)
        self._plan, self._shape, self._fetcher = plan, shape, fetcher
        self._target = {p.partition: p for p in partitions}
        self._cursors: list[RowCursor] = [shelf.cursor(n, s.ranges[0].start) for n, s in enumerate(plan.sources)]
        self._at = [s.ranges[0].start for s in plan.sources]
        self._replayed = [shelf.list_replayed(n) for n in range(len(plan.sources))]
        self._named: dict[int, list[Array]] = {}  # by partition of the target: first and last of offsets in a row

    def transaction(self, table: pa.Table) -> None:
        sent = _Sent.of(self._plan, table)
        self._check_map(sent)
        log = self._log(sent)
        for source in np.unique(sent.source[sent.source >= 0]).tolist():
            mine = sent.of_source(source)
            compared = np.zeros(len(mine.offset), np.bool_)
            for rows in self._rows(source, int(mine.offset[-1]) + 1):
                self._compare(source, rows, mine, compared, log)
            self._strange(source, mine.at(~compared))

    def rest(self) -> None:
        """Rows that no transaction sent, and new coordinates that the map names twice. The latter show at the end:
        transactions of one lane lie between those of others."""
        for n, source in enumerate(self._plan.sources):
            for rows in self._rows(n, source.ranges[-1].end):
                self._not_sent(n, get_offsets(rows))
        for partition, runs in sorted(self._named.items()):
            first, last = np.concatenate(runs, axis=1)
            order = np.argsort(first, kind="stable")
            for offset in first[order][1:][first[order][1:] <= np.maximum.accumulate(last[order])[:-1]].tolist():
                at = f"{self._plan.wishes.to}:{partition}:{offset}"
                self._add(RecordDifference("the map names a new coordinate twice", "", at))

    def _rows(self, source: int, end: int) -> Iterator[pa.RecordBatch]:
        """The plan's rows of a source from where the last call ended."""
        start, self._at[source] = self._at[source], max(end, self._at[source])
        for rows in self._cursors[source].read_between(start, end, lambda: CHUNK_ROWS):
            wanted = inside(get_offsets(rows), self._plan.sources[source].ranges)
            chosen = rows if wanted.all() else take_rows(rows, np.flatnonzero(wanted))
            self.report.rows += chosen.num_rows
            if chosen.num_rows:
                yield chosen

    def _compare(
        self, source: int, rows: pa.RecordBatch, sent: _Sent, compared: Array, log: Mapping[int, pa.Table]
    ) -> None:
        offsets = get_offsets(rows)
        positions = np.minimum(np.searchsorted(sent.offset, offsets), len(sent.offset) - 1)
        matched = sent.offset[positions] == offsets
        self._not_sent(source, offsets[~matched])
        compared[positions[matched]] = True
        if not matched.any():
            return
        selected = rows if matched.all() else take_rows(rows, np.flatnonzero(matched))
        records = records_of(selected, self._plan.sources[source], self._plan, self._shape, -1)
        chosen = sent.at(positions[matched])
        for partition in np.unique(chosen.partition).tolist():
            here = np.flatnonzero(chosen.partition == partition)
            self._compare_with_log(chosen.at(here), take_rows(records, here), log.get(partition))

    def _compare_with_log(self, sent: _Sent, records: pa.RecordBatch, log: pa.Table | None) -> None:
        """Compare records with those at their new coordinates, all in one partition."""
        there = self._reachable(sent)
        sent, records = sent.at(there), take_rows(records, there)
        log_offsets = int64s(log.column("offset").combine_chunks()) if log else np.empty(0, np.int64)
        positions = np.searchsorted(log_offsets, sent.new)
        present = np.isin(sent.new, log_offsets)
        for n in np.flatnonzero(~present).tolist():
            self._find("is not there for readers of committed records", sent, n)
        self.report.compared += int(present.sum())
        if not (log and present.any()):
            return
        mine = take_rows(records, np.flatnonzero(present))
        (theirs,) = log.take(fixed_width(pa.int64(), positions[present].astype(np.int64))).combine_chunks().to_batches()
        for name, differ in _differences(mine, theirs, times=self._plan.wishes.keep_timestamps):
            for n in np.flatnonzero(present)[differ].tolist():
                self._find(f"has another {name} than the row in the lake", sent, n)

    def _reachable(self, sent: _Sent) -> Array:
        """The places of those that the topic may still hold, and readers see."""
        log = self._target.get(int(sent.partition[0]))
        if log is None:
            for n in range(len(sent.new)):
                self._find("lies in a partition that the topic does not have", sent, n)
            return np.empty(0, np.int64)
        beyond = np.flatnonzero(sent.new >= log.high_watermark)
        for n in beyond.tolist():
            self._find("lies beyond the end of the log: the topic was made again, or has lost records", sent, n)
        deleted, hidden = (
            sent.new < log.log_start,
            (sent.new >= log.last_stable_offset) & (sent.new < log.high_watermark),
        )
        self.report.gone += int(deleted.sum())
        self.report.hidden += int(hidden.sum())
        return np.flatnonzero(~deleted & (sent.new < log.last_stable_offset))

    def _log(self, sent: _Sent) -> dict[int, pa.Table]:
        """Returns the records of the topic at the positions of the transaction's records."""
        ranges = []
        for partition in np.unique(sent.partition).tolist():
            log, new = self._target.get(partition), sent.new[sent.partition == partition]
            if log is None:
                continue
            start, end = max(int(new.min()), log.log_start), min(int(new.max()) + 1, log.last_stable_offset)
            if start < end:
                ranges.append(OffsetRange(log.topic, partition, log.topic_id, start, end, log.leader_epoch))
        by_partition: dict[int, list[pa.RecordBatch]] = {s.partition: [] for s in ranges}
        decoders = [BatchDecoder(s.topic, s.partition, s.start, s.end) for s in ranges]
        for fetched in self._fetcher.stream(ranges, FetchLimits()) if ranges else ():
            if isinstance(fetched, FetchFailed):
                raise fetched.error
            decoder = decoders[fetched.index]
            chunks = [*decoder.feed(fetched.records, fetched.aborted), *(decoder.finish() if fetched.last else ())]
            by_partition[ranges[fetched.index].partition] += [_to_compare(c) for c in chunks]
        return {partition: pa.Table.from_batches(batches, _CHUNK) for partition, batches in by_partition.items()}

    # -- findings

    def _check_map(self, sent: _Sent) -> None:
        """Each old coordinate once and in the plan; in each partition of the target, new ones in the old order."""
        for n in np.flatnonzero(sent.source < 0).tolist():
            self._find("is in the map, and its partition is not in the plan", sent, n)
        twice = np.flatnonzero((np.diff(sent.offset) == 0) & (np.diff(sent.source) == 0)) + 1
        for n in twice.tolist():
            self._find("was sent twice", sent, n)
        grouped = np.lexsort((sent.offset, sent.source, sent.partition))
        by = sent.at(grouped)
        same = (np.diff(by.partition) == 0) & (np.diff(by.source) == 0)
        for n in (np.flatnonzero(same & (np.diff(by.new) <= 0)) + 1).tolist():
            self._find("stands before an older record of its old partition", by, n)
        for partition in np.unique(sent.partition).tolist():
            new = np.sort(sent.new[sent.partition == partition])
            begins = np.concatenate([[True], np.diff(new) != 1])
            runs = np.stack([new[begins], new[np.concatenate([begins[1:], [True]])]])
            self._named.setdefault(partition, []).append(runs)

    def _not_sent(self, source: int, offsets: Array) -> None:
        since = inside(offsets, self._replayed[source])
        self.report.replayed += int(since.sum())
        for offset in offsets[~since].tolist():
            self._add(
                RecordDifference("is in the lake, and was not sent", f"{self._plan.sources[source].key}:{offset}", "")
            )

    def _strange(self, source: int, sent: _Sent) -> None:
        since = inside(sent.offset, self._replayed[source])
        self.report.replayed += int(since.sum())
        for n in np.flatnonzero(~since).tolist():
            self._find("was sent, and is no row of the lake", sent, n)

    def _find(self, text: str, sent: _Sent, n: int) -> None:
        source = int(sent.source[n])
        old = f"{self._plan.sources[source].key}:{sent.offset[n]}" if source >= 0 else ""
        self._add(RecordDifference(text, old, f"{self._plan.wishes.to}:{sent.partition[n]}:{sent.new[n]}"))

    def _add(self, finding: RecordDifference) -> None:
        self.report.findings_in_all += 1
        if len(self.report.findings) < MOST:
            self.report.findings.append(finding)


def _differences(mine: pa.RecordBatch, theirs: pa.RecordBatch, *, times: bool) -> Iterator[tuple[str, Array]]:
    """By column, the places where they differ. A time that the broker gave is not compared."""
    for name in ("key", "value", "headers", *(("timestamp",) if times else ())):
        a, b = (_headers(r.column(name)) if name == "headers" else r.column(name) for r in (mine, theirs))
        differ = ~equal_rows(*(pa.table({name: column}) for column in (a, b)))
        if name == "timestamp":
            differ &= int64s(theirs.column("timestampType").cast(pa.int64())) != _LOG_APPEND_TIME
        if differ.any():
            yield name, np.flatnonzero(differ)


def _headers(column: pa.Array) -> pa.Array:
    """With an empty list where there are none."""
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(fixed_width(pa.int32(), ends), column.flatten().cast(HEADERS.value_type))


def _to_compare(chunk: pa.RecordBatch) -> pa.RecordBatch:
    columns = {n: chunk.column(chunk.schema.get_field_index(n)) for n in _CHUNK.names}
    stamps = columns["timestamp"]
    columns["timestamp"] = pc.fill_null(stamps.cast(pa.int64()), -1)
    arrays = [columns[f.name].cast(f.type) for f in _CHUNK]
    return pa.RecordBatch.from_arrays(arrays, schema=_CHUNK)
