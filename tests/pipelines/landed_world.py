"""A feed with two partitions and two closed hours in a lake in memory, landed in pieces of any size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import PartTarget, PartWriter
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import Boundaries, BoundaryEntry, OriginEntry, OriginItem, PlanEntry
from sluice.pipelines.maintenance.compaction import Compacted, compact
from sluice.pipelines.model.kafka import Isolation, Key
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import published_files
from sluice.pipelines.publishing.manifest import write_manifests
from sluice.pipelines.publishing.publish import publish, roll_forward
from sluice.pipelines.records.rows.row_format import HEADERS, REFUSED, RawFormat, quarantine_rows
from sluice.testing.cluster import MemoryCluster
from sluice.testing.engine import MemoryLiveness, owner
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake

HOUR = 3_600_000
START = 400_000 * HOUR
FEED = "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: orders\nstart: earliest\n"
A, B = Key("orders", 0, "id-1"), Key("orders", 1, "id-1")


def set_sharing(feed: Feed, shares: bool) -> Feed:
    landing = feed.landing.model_copy(update={"shared_files": None if shares else False})
    return feed.model_copy(update={"landing": landing})


class World:
    """Two partitions, two closed hours of 100 offsets each, landed in pieces of any size. If it `shares`, a compaction
    puts the rows of both partitions into one file."""

    def __init__(
        self, root: Path, more: str = "", by_time: bool = False, lake: Lake | None = None, *, shares: bool = False
    ) -> None:
        (root / "feeds").mkdir(parents=True, exist_ok=True)
        (root / "feeds" / "orders.yaml").write_text(FEED + more)
        feed = load_feed(root / "feeds" / "orders.yaml", {})
        self.feed = set_sharing(feed, shares)
        self.lake = cast(MemoryLake, lake or MemoryLake())
        self.liveness, self.now = MemoryLiveness(), START + 9 * HOUR
        self.by_time = HOUR if by_time else 0
        self.ledger = self.reopen_ledger()
        items = tuple(OriginItem(key=k, offset=0, committed=None, why="test", opens=START) for k in (A, B))
        self.ledger.append(lambda s: OriginEntry(items=items))
        times = (START + HOUR, START + 2 * HOUR)
        pins = tuple(Boundaries(key=k, times=times, offsets=(100, 200)) for k in (A, B))
        self.ledger.append(lambda s: BoundaryEntry(items=pins))

    def reopen_ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", lambda: self.now, "test", "c")

    def fork(self) -> Self:
        """Return a copy with a lake, a ledger and a liveness of its own, in the same state."""
        other = copy.copy(self)
        other.lake, other.liveness = MemoryLake(self.lake.files), MemoryLiveness(set(self.liveness.dead))
        other.ledger = other.reopen_ledger()
        return other

    @property
    def ports(self) -> Ports:
        cluster, group = MemoryCluster(), MemoryGroup()
        return Ports(cluster, group, self.lake, None, self.liveness, lambda: self.now, None)  # type: ignore[arg-type]

    def build_range(self, key: Key, start: int, end: int, window: int | None = None) -> OffsetRange:
        hour = START + start // 100 * HOUR if window is None else None
        folder = paths.window_folder(None if self.by_time else hour, HOUR, self.folder_prefix)
        return OffsetRange(*key, start, end, 3, 0, hour, folder, self.by_time)

    @property
    def folder_prefix(self) -> paths.FolderPrefix:
        """The ledger's prefix; a plan without a schema entry before it belongs to an old ledger."""
        state = self.ledger.read()
        return state.folder_prefix if state.shapes else paths.FORMER_PREFIX

    def plan(self, ranges: Sequence[OffsetRange], kind: RequestKind = RequestKind.CATCH_UP, by: str = "landing") -> int:
        tasks, request = (Task(0, 1, tuple(ranges)),), Request(kind)
        plan = Plan("orders", "c", request, Isolation.READ_COMMITTED, tasks)
        appended = self.ledger.append(lambda s: PlanEntry(plan=plan, hash=plan.hash, owner=owner(by)))
        assert appended is not None
        return appended.number

    def land(self, *ranges: tuple[Key, int, int], bad: int = 0, gaps: int = 1) -> None:
        """Land a batch with these offset ranges: the last `bad` are quarantined, one in `gaps` offsets has a record."""
        planned = [self.build_range(*r) for r in ranges]
        batch = self.plan(planned)
        plan = self.ledger.plan(batch)
        receipts = [self.land_range(s, batch, plan.hash, bad, gaps) for s in planned]
        publish(self.ledger, batch, owner("landing"), receipts, [])
        roll_forward(self.ledger, self.lake, "orders")  # type: ignore[arg-type]
        write_manifests(self.ledger, self.lake, "orders", self.feed.window)  # type: ignore[arg-type]

    def land_range(self, s: OffsetRange, batch: int, plan_hash: str, bad: int, gaps: int) -> Receipt:
        offsets = np.arange(s.start, s.end, gaps)
        good, refused = offsets[: len(offsets) - bad], offsets[len(offsets) - bad :]
        parts = self.write(s, batch, plan_hash, PartKind.LANDED, _convert(s, good))
        parts += self.write(s, batch, plan_hash, PartKind.QUARANTINED, _make_refused(s, refused))
        counts = Counts(landed=len(good), quarantined=len(refused), compacted=s.span - len(offsets))
        return Receipt(s, s.end, counts, parts, "a", input_bytes=s.span)

    def write(
        self, s: OffsetRange, batch: int, plan_hash: str, kind: PartKind, rows: pa.RecordBatch
    ) -> tuple[Part, ...]:
        target = PartTarget("orders", batch, plan_hash, "a", s, kind)
        writer = PartWriter(self.lake, target, rows.schema, self.feed.landing, 1 << 20)  # type: ignore[arg-type]
        writer.write(rows)
        return writer.close()

    def compact(self, windows: Sequence[int] | None = None, by: str = "merging") -> Compacted:
        try:
            return compact(self.feed, self.ports, windows, owner(by, "compact"), lambda progress: None)
        finally:
            self.liveness.dead.add(by)

    def state(self) -> State:
        return self.reopen_ledger().read()

    def read_rows(
        self,
        kind: PartKind = PartKind.LANDED,
        windows: Sequence[int] = (START, START + HOUR),
        partitions: Sequence[int] = (0, 1),
    ) -> pa.Table:
        """Returns the rows of the hours that readers see, by the ledger."""
        files = published_files.list_files(self.feed, self.lake, windows, kind)  # type: ignore[arg-type]
        paths = dict.fromkeys(f.path for f in files if f.partition in partitions)
        tables = [pq.read_table(self.lake.open(path)) for path in paths]
        return pa.concat_tables(tables).combine_chunks() if tables else pa.table({})

    def list_files(self) -> list[str]:
        return [p for root in ("data", "quarantine") for p in self.lake.list(f"{root}/orders")]

    def check(self) -> None:
        report = audit(self.reopen_ledger(), self.lake, hashes=True)  # type: ignore[arg-type]
        assert report.problems == ()


def make_records(offsets: np.ndarray) -> pa.RecordBatch:
    """Returns records in the form of the decoder's output."""
    columns = {
        "key": pa.array([None if o % 3 else b"k%d" % o for o in offsets.tolist()], pa.binary()),
        "value": pa.array([b"v%d" % o * (o % 7) for o in offsets.tolist()], pa.binary()),
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array(START + offsets * 7919 % 5 * HOUR, pa.int64()).cast(pa.timestamp("ms", "UTC")),
        "timestampType": pa.array(np.zeros(len(offsets), np.int32)),
        "headers": pa.array([[{"key": "h", "value": b"%d" % o}] if o % 2 else None for o in offsets.tolist()], HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


def _convert(s: OffsetRange, offsets: np.ndarray) -> pa.RecordBatch:
    return next(RawFormat().convert(s, make_records(offsets))).landed


def _make_refused(s: OffsetRange, offsets: np.ndarray) -> pa.RecordBatch:
    converted = _convert(s, offsets)
    columns = {"stage": "decode", "reason": "not_json", "expectation": None, "field": None, "detail": "no", "byte": 3}
    more = [pa.array([v] * len(offsets)).cast(REFUSED.field(n).type) for n, v in columns.items()]
    return quarantine_rows(pa.RecordBatch.from_arrays([*converted.columns, *more], schema=REFUSED), 1, "")


def split_offsets(key: Key, step: int, start: int = 0, end: int = 200) -> list[tuple[Key, int, int]]:
    return [(key, at, min(at + step, end)) for at in range(start, end, step)]


class Died(BaseException):
    """The machine died: no code runs any more, not even cleanup."""


@contextlib.contextmanager
def crash_after(lake: MemoryLake, after: int) -> Iterator[None]:
    """Make the lake fail every change after the given number."""
    remaining = [after]

    def spend(path: str) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise Died

    lake.before |= dict.fromkeys(("put_if_absent", "put", "create", "show", "remove"), spend)
    try:
        yield
    finally:
        lake.before.clear()
