"""Small offset ranges of a task share files: which ranges, in which order, and with a failure among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import KafkaUnavailable, LakeFull, OffsetsLost
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import parquet, paths, receipt_files
from sluice.pipelines.landing import sharing, task
from sluice.pipelines.landing.proof import prove, read_receipts
from sluice.pipelines.landing.task import Assignment, Tools, run_task
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task, to_json
from sluice.pipelines.model.receipts import Outcome, Part, PartKind, RangeFailure, Receipt
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.logs import LZ4, Log, LogBatch, LogRecord, log
from tests.pipelines.landing.test_task import Picky

HOUR = 3_600_000
WINDOW, FOLDER = 472_000 * HOUR, "date=2023-11-05/hour=16"
LANDING = LandingSettings(shared_files=True)
PARTITIONS = [TopicPartition("orders", n) for n in range(5)]


def make_log(n: int, count: int = 40) -> Log:
    records = tuple(LogRecord(b"k%d" % i, b"%d: value %d" % (n, i), WINDOW + i) for i in range(count))
    return log(LogBatch(records, LZ4), *[LogBatch(records[i : i + 7]) for i in range(0, 21, 7)])


LOGS = {tp: make_log(tp.partition) for tp in PARTITIONS}


def build_range(tp: TopicPartition, **other: Any) -> OffsetRange:
    fields = {"estimated_bytes": 500, "window": WINDOW, "folder": FOLDER} | other
    return OffsetRange(tp.topic, tp.partition, "life", **{"start": 0, "end": LOGS[tp].end} | fields)


RANGES = [build_range(tp) for tp in PARTITIONS]


def build_backfill(windows: int) -> list[OffsetRange]:
    """Returns ranges of two partitions in as many windows."""
    step = LOGS[PARTITIONS[0]].end // windows
    return [
        build_range(
            tp, start=n * step, end=(n + 1) * step, window=WINDOW + n * HOUR, folder=f"date=2023-11-06/hour={n:02}"
        )
        for tp in PARTITIONS[:2]
        for n in range(windows)
    ]


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def make_plan(ranges: Sequence[OffsetRange] = RANGES) -> Plan:
    return Plan("sales", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, tuple(ranges)),))


def run(
    lake: Any,
    ranges: Sequence[OffsetRange] = RANGES,
    attempt: str = "a-1",
    landing: LandingSettings = LANDING,
    format: Any = None,
    last_try: bool = True,
    **fetcher: Any,
) -> tuple[list[Outcome], MemoryFetcher]:
    plan, source = make_plan(ranges), MemoryFetcher(LOGS, **fetcher)
    memory, isolation = 512 << 20, Isolation.READ_COMMITTED
    work = Assignment("sales", 12, plan.hash, isolation, attempt, landing, FetchLimits(), memory)
    tools = Tools(source, lake, format or RawFormat())
    return run_task(plan.tasks[0], work, tools, last_try=last_try), source


def list_receipts(outcomes: Sequence[Outcome]) -> list[Receipt]:
    return [o for o in outcomes if isinstance(o, Receipt)]


def list_parts(outcomes: Sequence[Outcome], kind: PartKind = PartKind.LANDED) -> list[Part]:
    return [p for r in list_receipts(outcomes) for p in r.of(kind)]


def read_values(lake: LocalLake, r: Receipt, kind: PartKind = PartKind.LANDED) -> list[bytes]:
    """Returns the values of the offset range's own rows."""
    batches = [b for p in r.of(kind) for b in parquet.read_part(lake, p, p.staged, 3)]
    return [v for b in batches for v in b.column("value").to_pylist()]


def list_logged(s: OffsetRange) -> list[bytes]:
    return [r["value"] for r in LOGS[s.tp].visible(s.start, s.end)]


def list_proven(
    lake: LocalLake, outcomes: Sequence[Outcome], ranges: Sequence[OffsetRange] = RANGES
) -> list[OffsetRange]:
    return [r.offset_range for r in prove(make_plan(ranges), 12, outcomes, lake)[0]]


# -- which ranges share


def test_small_ranges_of_a_window_share_a_file_in_partition_order(lake: LocalLake) -> None:
    outcomes, _ = run(lake, RANGES[::-1])
    (path,) = {p.staged for p in list_parts(outcomes)}
    assert path.endswith("/data/date=2023-11-05/hour=16/orders-0-0-61-b12-shared.parquet")
    table = pq.read_table(lake.locate(path), partitioning=None)
    order = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert order == sorted(order)
    assert len(order) == sum(len(list_logged(s)) for s in RANGES)
    assert all(read_values(lake, r) == list_logged(r.offset_range) for r in list_receipts(outcomes))
    assert list_proven(lake, outcomes, RANGES[::-1]) == RANGES[::-1]


def test_each_range_has_a_receipt_for_its_share_of_the_file(lake: LocalLake) -> None:
    outcomes, _ = run(lake)
    assert len({r.offset_range for r in list_receipts(outcomes)}) == 5
    size = lake.size(list_parts(outcomes)[0].staged)
    assert sum(p.bytes for p in list_parts(outcomes)) == size == list_parts(outcomes)[0].file_bytes
    (together,) = (p for p in lake.list("_sluice/sales/staging") if paths.parse_receipt_path(p))
    assert [r.offset_range for r in read_receipts(together, lake)] == RANGES
    assert receipt_files.read_finished(lake, "sales", 12, {}) == {paths.name_range(s) for s in RANGES}


def test_footer_names_the_ranges(lake: LocalLake) -> None:
    outcomes, _ = run(lake)
    metadata = pq.read_metadata(lake.locate(list_parts(outcomes)[0].staged)).metadata
    assert json.loads(metadata[b"sluice.slices"]) == [[str(s), len(list_logged(s))] for s in RANGES]
    assert metadata[b"sluice.topic_id"] == b"life"


@pytest.mark.parametrize(
    "other",
    [
        {"window": WINDOW + HOUR, "folder": "date=2023-11-05/hour=17"},
        {"window": None, "folder": "date=__HIVE_DEFAULT_PARTITION__/hour=__HIVE_DEFAULT_PARTITION__"},
        {"estimated_bytes": sharing.SMALL_BYTES},
        {"folder": "", "by_time": HOUR},
    ],
    ids=["another window", "outside windows", "large", "by record time"],
)
def test_other_ranges_do_not_share_files(lake: LocalLake, other: dict[str, Any]) -> None:
    ranges = [*RANGES[:2], build_range(PARTITIONS[2], **other)]
    outcomes, _ = run(lake, ranges)
    assert [bool(p.shared) for p in list_parts(outcomes)] == [True, True, False]
    assert list_proven(lake, outcomes, ranges) == ranges


def test_another_life_of_the_topic_does_not_share_a_file(lake: LocalLake) -> None:
    ranges = [*RANGES[:2], *(replace(s, incarnation="other") for s in RANGES[2:])]
    outcomes, _ = run(lake, ranges)
    assert len({p.staged for p in list_parts(outcomes)}) == 2
    assert list_proven(lake, outcomes, ranges) == ranges


def test_single_range_has_a_part_of_the_usual_name(lake: LocalLake) -> None:
    outcomes, _ = run(lake, RANGES[:1])
    assert [p.name for p in list_parts(outcomes)] == ["orders-0-0-61-b12.parquet"]


@pytest.mark.parametrize(("ranges", "files"), [(3, 3), (4, 1), (5, 1)])
def test_default_shares_files_for_many_ranges(lake: LocalLake, ranges: int, files: int) -> None:
    outcomes, _ = run(lake, RANGES[:ranges], landing=LandingSettings())
    assert len({p.staged for p in list_parts(outcomes)}) == files
    assert list_proven(lake, outcomes, RANGES[:ranges]) == RANGES[:ranges]


@pytest.mark.parametrize(("windows", "files"), [(15, 30), (16, 16)])
def test_two_ranges_of_a_window_share_a_file_in_a_task_of_many(lake: LocalLake, windows: int, files: int) -> None:
    ranges = build_backfill(windows)
    outcomes, _ = run(lake, ranges, landing=LandingSettings())
    assert len({p.staged for p in list_parts(outcomes)}) == files
    assert list_proven(lake, outcomes, ranges) == ranges


def test_a_task_of_many_ranges_writes_their_receipts_together(lake: LocalLake) -> None:
    """They are adopted file by file."""
    ranges = build_backfill(16)
    first = list_receipts(run(lake, ranges)[0])
    (together,) = (p for p in lake.list("_sluice/sales/staging") if paths.parse_receipt_path(p))
    assert len(read_receipts(together, lake)) == 32
    lake.remove(first[4].parts[0].staged)
    again, source = run(lake, ranges, attempt="a-2")
    lost = [r.offset_range for r in first if r.parts[0].staged == first[4].parts[0].staged]
    assert [r.offset_range for r in list_receipts(again) if not r.adopted] == lost
    assert set(source.read[0]) == set(lost)
    assert list_proven(lake, again, ranges) == ranges


def test_receipts_that_cannot_be_written_leave_no_files(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    put = LocalLake.put

    def refuse(self: LocalLake, path: str, data: bytes) -> None:
        if paths.parse_receipt_path(path):
            raise LakeFull("no room", remedy="make some")
        put(self, path, data)

    monkeypatch.setattr(LocalLake, "put", refuse)
    outcomes, _ = run(lake, build_backfill(16))
    assert [type(o) for o in outcomes] == [RangeFailure] * 32
    assert list(lake.list("_sluice/sales/staging")) == []


def test_feed_can_have_a_file_per_range(lake: LocalLake) -> None:
    outcomes, _ = run(lake, landing=LandingSettings(shared_files=False))
    assert [p.shared for p in list_parts(outcomes)] == [None] * 5


def test_a_file_ends_at_its_target(lake: LocalLake) -> None:
    landing = LandingSettings(shared_files=True, target_file_bytes=1, row_group_rows=100)
    outcomes, _ = run(lake, landing=landing)
    files = [p.staged for p in list_parts(outcomes)]
    assert len(set(files)) > 1
    assert files == sorted(files)
    assert list_proven(lake, outcomes) == RANGES
    groups = [pq.ParquetFile(lake.locate(f)).metadata.row_group(0).num_rows for f in set(files)]
    assert max(groups) <= 100


def test_range_larger_than_estimated_has_a_separate_file(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "SMALL_BYTES", 4000)
    monkeypatch.setitem(LOGS, PARTITIONS[2], make_log(2, count=400))
    ranges = [build_range(tp) for tp in PARTITIONS]
    outcomes, _ = run(lake, ranges)
    assert [bool(p.shared) for p in list_parts(outcomes)] == [True, True, False, True, True]
    assert all(read_values(lake, r) == list_logged(r.offset_range) for r in list_receipts(outcomes))
    assert list_proven(lake, outcomes, ranges) == ranges


# -- the same plan, the same files


def test_bytes_do_not_depend_on_the_reading_order(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for attempt, options in enumerate([{"answer_bytes": 1}, {"answer_bytes": 300}, {}]):
        outcomes, _ = run(LocalLake(Path(lake.locate(f"{attempt}"))), **options)
        files.append([(p.name, p.rows, p.sha256, p.shared) for p in list_parts(outcomes)])
    monkeypatch.setattr(sharing, "WAITING_BYTES", 0)
    outcomes, _ = run(lake, answer_bytes=1)
    files.append([(p.name, p.rows, p.sha256, p.shared) for p in list_parts(outcomes)])
    assert files[0] == files[1] == files[2] == files[3]


def test_ranges_waiting_for_an_earlier_one_are_buffered_on_disk(
    lake: LocalLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = []

    class Counted(sharing._OnDisk):
        def __init__(self, waiting: Any) -> None:
            spilled.append(waiting.receipt.offset_range)
            super().__init__(waiting)

    monkeypatch.setattr(sharing, "WAITING_BYTES", 0)
    monkeypatch.setattr(sharing, "_OnDisk", Counted)
    slow = [LogBatch((LogRecord(b"k", b"slow %d" % i, WINDOW),)) for i in range(50)]
    monkeypatch.setitem(LOGS, PARTITIONS[0], log(*slow))
    ranges = [build_range(tp) for tp in PARTITIONS]
    outcomes, _ = run(lake, ranges, answer_bytes=1)
    assert set(spilled) == set(ranges[1:])
    assert all(read_values(lake, r) == list_logged(r.offset_range) for r in list_receipts(outcomes))


# -- failures


def test_failed_range_is_omitted(lake: LocalLake) -> None:
    lost = OffsetsLost("gone", remedy="none")
    outcomes, _ = run(lake, failing={PARTITIONS[0]: lost, PARTITIONS[3]: lost}, answer_bytes=1)
    assert [type(o) for o in outcomes] == [RangeFailure, Receipt, Receipt, RangeFailure, Receipt]
    assert {p.name for p in list_parts(outcomes)} == {"orders-1-0-61-b12-shared.parquet"}
    assert all(read_values(lake, r) == list_logged(r.offset_range) for r in list_receipts(outcomes))
    assert list_proven(lake, outcomes) == [RANGES[n] for n in (1, 2, 4)]


def test_next_attempt_adopts_the_other_ranges(lake: LocalLake) -> None:
    away = KafkaUnavailable("away", remedy="none")
    with pytest.raises(KafkaUnavailable):
        run(lake, failing={PARTITIONS[3]: away}, last_try=False, answer_bytes=1)
    outcomes, source = run(lake, attempt="a-2")
    assert source.read == [(RANGES[3],)]
    assert [r.adopted for r in list_receipts(outcomes)] == [True, True, True, False, True]
    assert {p.name for p in list_parts(outcomes)} == {"orders-0-0-61-b12-shared.parquet", "orders-3-0-61-b12.parquet"}
    assert list_proven(lake, outcomes) == RANGES


def test_damaged_records_are_read_again_and_land_separately(lake: LocalLake) -> None:
    outcomes, _ = run(lake, damaged={PARTITIONS[1]: 1})
    assert [bool(p.shared) for p in list_parts(outcomes)] == [True, False, True, True, True]
    assert list_proven(lake, outcomes) == RANGES


def test_a_full_disk_fails_all_and_leaves_nothing(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_full(self: Any, *arguments: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", raise_full)
    outcomes, _ = run(lake)
    assert all(isinstance(o, RangeFailure) for o in outcomes)
    assert list(lake.list("_sluice/sales/staging")) == []


# -- all of a file counts, or none


TOGETHER = paths.receipts_path("sales", 12, "a-1", RANGES[0])


def test_file_with_a_missing_receipt_is_not_adopted(lake: LocalLake) -> None:
    receipts = list_receipts(run(lake)[0])
    lake.put(TOGETHER, to_json([r for r in receipts if r.offset_range != RANGES[2]]).encode())
    outcomes, source = run(lake, attempt="a-2")
    assert set(source.read[0]) == set(RANGES)
    assert {r.attempt for r in list_receipts(outcomes)} == {"a-2"}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"[1]", b"[" * 100_000, b'{"slice":'],
    ids=["nothing", "none", "a number", "deep", "cut short"],
)
def test_invalid_receipt_list_is_read_again(lake: LocalLake, content: bytes) -> None:
    run(lake)
    lake.put(TOGETHER, content)
    outcomes, source = run(lake, attempt="a-2")
    assert set(source.read[0]) == set(RANGES)
    assert list_proven(lake, outcomes) == RANGES


def test_attempts_are_not_mixed(lake: LocalLake) -> None:
    """A zombie's file has some of the ranges, the next attempt's has all: no range's rows count twice."""
    lost = OffsetsLost("gone", remedy="none")
    zombie, _ = run(lake, failing={PARTITIONS[4]: lost}, answer_bytes=1)
    for path in list(lake.list("_sluice/sales/staging")):
        if paths.parse_receipt_path(path):
            lake.remove(path)
    complete, _ = run(lake, attempt="a-2")
    for outcomes in ([*zombie, *complete], [*complete, *zombie]):
        receipts, failed = prove(make_plan(), 12, outcomes, lake)
        assert {r.attempt for r in receipts} == {"a-1"}
        assert [f.offset_range for f in failed] == [RANGES[4]]


@pytest.mark.parametrize("wrong", ["rows", "first", "bytes", "left out", "twice"])
def test_wrong_receipt_fails_with_its_file(lake: LocalLake, wrong: str) -> None:
    outcomes, _ = run(lake)
    receipts = list_receipts(outcomes)
    (part,) = receipts[2].parts
    assert part.shared
    if wrong == "left out":
        receipts.pop(2)
    elif wrong == "twice":
        receipts[2] = replace(receipts[2], parts=receipts[1].parts)
    else:
        shared = replace(part.shared, first=part.shared.first + 1) if wrong == "first" else part.shared
        other = {"rows": {"rows": part.rows - 1}, "bytes": {"bytes": part.bytes + 1}}.get(wrong, {"shared": shared})
        receipts[2] = replace(receipts[2], parts=(replace(part, **other),))
    assert list_proven(lake, receipts) == []


def test_rows_of_another_partition_fail_the_proof(lake: LocalLake) -> None:
    """The file fits its receipts, except that the rows of two ranges are swapped."""
    outcomes, _ = run(lake)
    file = lake.locate(list_parts(outcomes)[0].staged)
    table = pq.read_table(file, partitioning=None)
    at = table.schema.get_field_index("partition")
    swapped = pa.array([{0: 1, 1: 0}.get(n, n) for n in table["partition"].to_pylist()], pa.int32())
    pq.write_table(table.set_column(at, table.schema.field(at), swapped), file)
    size = Path(file).stat().st_size
    receipts = [replace(r, parts=tuple(_resize_part(p, size) for p in r.parts)) for r in list_receipts(outcomes)]
    proven, failed = prove(make_plan(), 12, receipts, lake)
    assert proven == []
    assert "are not those of its range, in order" in failed[0].message


def _resize_part(part: Part, size: int) -> Part:
    assert part.shared
    first, rows = part.shared.first, part.shared.rows
    start, end = (size * n // rows for n in (first, first + part.rows))
    return replace(part, bytes=end - start, shared=replace(part.shared, bytes=size))


def test_quarantined_records_share_a_file(lake: LocalLake) -> None:
    outcomes, _ = run(lake, format=Picky())
    for kind in PartKind:
        assert len({p.staged for p in list_parts(outcomes, kind)}) == 1
    for r in list_receipts(outcomes):
        bad = [row["value"] for row in LOGS[r.offset_range.tp].visible(0, r.offset_range.end) if row["offset"] % 3 == 0]
        assert read_values(lake, r, PartKind.QUARANTINED) == bad
    assert list_proven(lake, outcomes) == RANGES
