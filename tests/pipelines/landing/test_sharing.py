"""Small offset ranges of a task share files: which ones, in which order, and what becomes of those beside a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import KafkaUnavailable, OffsetsLost
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
PLACES = [TopicPartition("orders", n) for n in range(5)]


def log_of(n: int, records: int = 40) -> Log:
    some = tuple(LogRecord(b"k%d" % i, b"%d: value %d" % (n, i), WINDOW + i) for i in range(records))
    return log(LogBatch(some, LZ4), *[LogBatch(some[i : i + 7]) for i in range(0, 21, 7)])


LOGS = {tp: log_of(tp.partition) for tp in PLACES}


def build_range(tp: TopicPartition, **other: Any) -> OffsetRange:
    said = {"estimated_bytes": 500, "window": WINDOW, "folder": FOLDER} | other
    return OffsetRange(tp.topic, tp.partition, "life", 0, LOGS[tp].end, **said)


RANGES = [build_range(tp) for tp in PLACES]


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def planned(ranges: Sequence[OffsetRange] = RANGES) -> Plan:
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
    plan, source = planned(ranges), MemoryFetcher(LOGS, **fetcher)
    memory, isolation = 512 << 20, Isolation.READ_COMMITTED
    work = Assignment("sales", 12, plan.hash, isolation, attempt, landing, FetchLimits(), memory)
    tools = Tools(source, lake, format or RawFormat())
    return run_task(plan.tasks[0], work, tools, last_try=last_try), source


def receipts(outcomes: Sequence[Outcome]) -> list[Receipt]:
    return [o for o in outcomes if isinstance(o, Receipt)]


def parts(outcomes: Sequence[Outcome], kind: PartKind = PartKind.LANDED) -> list[Part]:
    return [p for r in receipts(outcomes) for p in r.of(kind)]


def values(lake: LocalLake, r: Receipt, kind: PartKind = PartKind.LANDED) -> list[bytes]:
    """The values of the offset range's own rows."""
    found = [b for p in r.of(kind) for b in parquet.read_part(lake, p, p.staged, 3)]
    return [v for b in found for v in b.column("value").to_pylist()]


def logged(s: OffsetRange) -> list[bytes]:
    return [r["value"] for r in LOGS[s.tp].visible(s.start, s.end)]


def proven(lake: LocalLake, outcomes: Sequence[Outcome], ranges: Sequence[OffsetRange] = RANGES) -> list[OffsetRange]:
    return [r.offset_range for r in prove(planned(ranges), 12, outcomes, lake)[0]]


# -- what shares


def test_small_ranges_of_a_window_lie_in_one_file_by_partition(lake: LocalLake) -> None:
    outcomes, _ = run(lake, RANGES[::-1])
    (path,) = {p.staged for p in parts(outcomes)}
    assert path.endswith("/data/date=2023-11-05/hour=16/orders-0-0-61-b12-shared.parquet")
    table = pq.read_table(lake.locate(path), partitioning=None)
    order = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert order == sorted(order)
    assert len(order) == sum(len(logged(s)) for s in RANGES)
    assert all(values(lake, r) == logged(r.offset_range) for r in receipts(outcomes))
    assert proven(lake, outcomes, RANGES[::-1]) == RANGES[::-1]


def test_each_has_its_own_receipt_and_its_share_of_the_file(lake: LocalLake) -> None:
    outcomes, _ = run(lake)
    assert len({r.offset_range for r in receipts(outcomes)}) == 5
    size = lake.size(parts(outcomes)[0].staged)
    assert sum(p.bytes for p in parts(outcomes)) == size == parts(outcomes)[0].file_bytes
    (together,) = (p for p in lake.list("_sluice/sales/staging") if paths.parse_receipt_path(p))
    assert [r.offset_range for r in read_receipts(together, lake)] == RANGES
    assert receipt_files.read_finished(lake, "sales", 12, {}) == {paths.name_range(s) for s in RANGES}


def test_the_footer_names_them(lake: LocalLake) -> None:
    outcomes, _ = run(lake)
    about = pq.read_metadata(lake.locate(parts(outcomes)[0].staged)).metadata
    assert json.loads(about[b"sluice.slices"]) == [[str(s), len(logged(s))] for s in RANGES]
    assert about[b"sluice.topic_id"] == b"life"


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
def test_others_do_not(lake: LocalLake, other: dict[str, Any]) -> None:
    ranges = [*RANGES[:2], build_range(PLACES[2], **other)]
    outcomes, _ = run(lake, ranges)
    assert [bool(p.shared) for p in parts(outcomes)] == [True, True, False]
    assert proven(lake, outcomes, ranges) == ranges


def test_nor_does_another_life_of_the_topic(lake: LocalLake) -> None:
    ranges = [*RANGES[:2], *(replace(s, incarnation="other") for s in RANGES[2:])]
    outcomes, _ = run(lake, ranges)
    assert len({p.staged for p in parts(outcomes)}) == 2
    assert proven(lake, outcomes, ranges) == ranges


def test_one_alone_has_a_part_as_ever(lake: LocalLake) -> None:
    outcomes, _ = run(lake, RANGES[:1])
    assert [p.name for p in parts(outcomes)] == ["orders-0-0-61-b12.parquet"]


@pytest.mark.parametrize(("ranges", "files"), [(3, 3), (4, 1), (5, 1)])
def test_a_feed_that_says_nothing_shares_files_where_there_would_be_many(
    lake: LocalLake, ranges: int, files: int
) -> None:
    outcomes, _ = run(lake, RANGES[:ranges], landing=LandingSettings())
    assert len({p.staged for p in parts(outcomes)}) == files
    assert proven(lake, outcomes, RANGES[:ranges]) == RANGES[:ranges]


def test_a_feed_may_have_a_file_for_each(lake: LocalLake) -> None:
    outcomes, _ = run(lake, landing=LandingSettings(shared_files=False))
    assert [p.shared for p in parts(outcomes)] == [None] * 5


def test_a_file_ends_at_its_target(lake: LocalLake) -> None:
    landing = LandingSettings(shared_files=True, target_file_bytes=1, row_group_rows=100)
    outcomes, _ = run(lake, landing=landing)
    files = [p.staged for p in parts(outcomes)]
    assert len(set(files)) > 1
    assert files == sorted(files)
    assert proven(lake, outcomes) == RANGES
    groups = [pq.ParquetFile(lake.locate(f)).metadata.row_group(0).num_rows for f in set(files)]
    assert max(groups) <= 100


def test_one_larger_than_it_seemed_has_its_own(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "SMALL_BYTES", 4000)
    monkeypatch.setitem(LOGS, PLACES[2], log_of(2, records=400))
    ranges = [build_range(tp) for tp in PLACES]
    outcomes, _ = run(lake, ranges)
    assert [bool(p.shared) for p in parts(outcomes)] == [True, True, False, True, True]
    assert all(values(lake, r) == logged(r.offset_range) for r in receipts(outcomes))
    assert proven(lake, outcomes, ranges) == ranges


# -- the same plan, the same files


def test_the_same_however_it_is_read(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for attempt, how in enumerate([{"answer_bytes": 1}, {"answer_bytes": 300}, {}]):
        outcomes, _ = run(LocalLake(Path(lake.locate(f"{attempt}"))), **how)
        found.append([(p.name, p.rows, p.sha256, p.shared) for p in parts(outcomes)])
    monkeypatch.setattr(sharing, "WAITING_BYTES", 0)
    outcomes, _ = run(lake, answer_bytes=1)
    found.append([(p.name, p.rows, p.sha256, p.shared) for p in parts(outcomes)])
    assert found[0] == found[1] == found[2] == found[3]


def test_what_waits_for_an_earlier_range_waits_on_disk(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(sharing._OnDisk):
        def __init__(self, held: Any) -> None:
            made.append(held.receipt.offset_range)
            super().__init__(held)

    monkeypatch.setattr(sharing, "WAITING_BYTES", 0)
    monkeypatch.setattr(sharing, "_OnDisk", Counted)
    slow = [LogBatch((LogRecord(b"k", b"slow %d" % i, WINDOW),)) for i in range(50)]
    monkeypatch.setitem(LOGS, PLACES[0], log(*slow))
    ranges = [build_range(tp) for tp in PLACES]
    outcomes, _ = run(lake, ranges, answer_bytes=1)
    assert set(made) == set(ranges[1:])
    assert all(values(lake, r) == logged(r.offset_range) for r in receipts(outcomes))


# -- failures


def test_one_that_fails_is_left_out(lake: LocalLake) -> None:
    lost = OffsetsLost("gone", remedy="none")
    outcomes, _ = run(lake, failing={PLACES[0]: lost, PLACES[3]: lost}, answer_bytes=1)
    assert [type(o) for o in outcomes] == [RangeFailure, Receipt, Receipt, RangeFailure, Receipt]
    assert {p.name for p in parts(outcomes)} == {"orders-1-0-61-b12-shared.parquet"}
    assert all(values(lake, r) == logged(r.offset_range) for r in receipts(outcomes))
    assert proven(lake, outcomes) == [RANGES[n] for n in (1, 2, 4)]


def test_the_next_try_adopts_those_beside_it(lake: LocalLake) -> None:
    away = KafkaUnavailable("away", remedy="none")
    with pytest.raises(KafkaUnavailable):
        run(lake, failing={PLACES[3]: away}, last_try=False, answer_bytes=1)
    outcomes, source = run(lake, attempt="a-2")
    assert source.read == [(RANGES[3],)]
    assert [r.adopted for r in receipts(outcomes)] == [True, True, True, False, True]
    assert {p.name for p in parts(outcomes)} == {"orders-0-0-61-b12-shared.parquet", "orders-3-0-61-b12.parquet"}
    assert proven(lake, outcomes) == RANGES


def test_damaged_records_are_read_again_and_land_beside(lake: LocalLake) -> None:
    outcomes, _ = run(lake, damaged={PLACES[1]: 1})
    assert [bool(p.shared) for p in parts(outcomes)] == [True, False, True, True, True]
    assert proven(lake, outcomes) == RANGES


def test_a_full_disk_fails_all_and_leaves_nothing(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, *how: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    outcomes, _ = run(lake)
    assert all(isinstance(o, RangeFailure) for o in outcomes)
    assert list(lake.list("_sluice/sales/staging")) == []


# -- a file counts whole, or not at all


TOGETHER = paths.receipts_path("sales", 12, "a-1", RANGES[0])


def test_without_one_of_its_receipts_none_is_adopted(lake: LocalLake) -> None:
    found = receipts(run(lake)[0])
    lake.put(TOGETHER, to_json([r for r in found if r.offset_range != RANGES[2]]).encode())
    outcomes, source = run(lake, attempt="a-2")
    assert set(source.read[0]) == set(RANGES)
    assert {r.attempt for r in receipts(outcomes)} == {"a-2"}


@pytest.mark.parametrize(
    "said",
    [b"", b"[]", b"[1]", b"[" * 100_000, b'{"slice":'],
    ids=["nothing", "none", "a number", "deep", "cut short"],
)
def test_what_is_no_list_of_receipts_is_read_again(lake: LocalLake, said: bytes) -> None:
    run(lake)
    lake.put(TOGETHER, said)
    outcomes, source = run(lake, attempt="a-2")
    assert set(source.read[0]) == set(RANGES)
    assert proven(lake, outcomes) == RANGES


def test_attempts_are_not_mixed(lake: LocalLake) -> None:
    """A zombie's file has some of the offset ranges, the next attempt's has all: rows of no range are in two files."""
    lost = OffsetsLost("gone", remedy="none")
    zombie, _ = run(lake, failing={PLACES[4]: lost}, answer_bytes=1)
    for path in list(lake.list("_sluice/sales/staging")):
        if paths.parse_receipt_path(path):
            lake.remove(path)
    whole, _ = run(lake, attempt="a-2")
    for said in ([*zombie, *whole], [*whole, *zombie]):
        found, failed = prove(planned(), 12, said, lake)
        assert {r.attempt for r in found} == {"a-1"}
        assert [f.offset_range for f in failed] == [RANGES[4]]


@pytest.mark.parametrize("wrong", ["rows", "first", "bytes", "left out", "twice"])
def test_a_receipt_that_lies_fails_with_its_file(lake: LocalLake, wrong: str) -> None:
    outcomes, _ = run(lake)
    said = receipts(outcomes)
    (part,) = said[2].parts
    assert part.shared
    if wrong == "left out":
        said.pop(2)
    elif wrong == "twice":
        said[2] = replace(said[2], parts=said[1].parts)
    else:
        shared = replace(part.shared, first=part.shared.first + 1) if wrong == "first" else part.shared
        other = {"rows": {"rows": part.rows - 1}, "bytes": {"bytes": part.bytes + 1}}.get(wrong, {"shared": shared})
        said[2] = replace(said[2], parts=(replace(part, **other),))
    assert proven(lake, said) == []


def test_rows_of_another_partition_fail_the_proof(lake: LocalLake) -> None:
    """The file is what its receipts say, but for the swapped rows of two ranges."""
    outcomes, _ = run(lake)
    place = lake.locate(parts(outcomes)[0].staged)
    table = pq.read_table(place, partitioning=None)
    at = table.schema.get_field_index("partition")
    turned = pa.array([{0: 1, 1: 0}.get(n, n) for n in table["partition"].to_pylist()], pa.int32())
    pq.write_table(table.set_column(at, table.schema.field(at), turned), place)
    size = Path(place).stat().st_size
    said = [replace(r, parts=tuple(_resized(p, size) for p in r.parts)) for r in receipts(outcomes)]
    found, failed = prove(planned(), 12, said, lake)
    assert found == []
    assert "are not those of its range, in order" in failed[0].message


def _resized(part: Part, size: int) -> Part:
    assert part.shared
    first, rows = part.shared.first, part.shared.rows
    start, end = (size * n // rows for n in (first, first + part.rows))
    return replace(part, bytes=end - start, shared=replace(part.shared, bytes=size))


def test_what_is_quarantined_shares_a_file_too(lake: LocalLake) -> None:
    outcomes, _ = run(lake, format=Picky())
    for kind in PartKind:
        assert len({p.staged for p in parts(outcomes, kind)}) == 1
    for r in receipts(outcomes):
        bad = [row["value"] for row in LOGS[r.offset_range.tp].visible(0, r.offset_range.end) if row["offset"] % 3 == 0]
        assert values(lake, r, PartKind.QUARANTINED) == bad
    assert proven(lake, outcomes) == RANGES
