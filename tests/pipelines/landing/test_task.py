"""Tasks over logs in memory and a lake on disk: the log's records land, and every offset gets a class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.errors import (
    IncarnationChanged,
    KafkaUnavailable,
    LakeFull,
    LakeUnavailable,
    OffsetsLost,
    SluiceError,
)
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.landing import task
from sluice.pipelines.landing.task import Assignment, Tools, run_task, salvage_task, share_memory
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Task
from sluice.pipelines.model.receipts import Counts, Outcome, PartKind, RangeFailure, Receipt
from sluice.pipelines.records.rows.row_format import REFUSED, Format, Formatted, RawFormat
from sluice.pipelines.status.batch_facts import ACTIVITIES
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import ABORT, COMMIT, LZ4, ZSTD, Log, LogBatch, LogRecord, log

ZERO, ONE = TopicPartition("orders", 0), TopicPartition("orders", 1)
SOME = tuple(LogRecord(b"k%d" % i, b"value %d " % i * (i % 9), 1_700_000_000_000 + i) for i in range(400))
ODD = (
    LogRecord(None, b"no key"),
    LogRecord(b"gone", None),
    LogRecord(b"", b""),
    LogRecord(b"h", b"v", headers=(("a", b"1"), ("a", None), ("größe", b"\xff"))),
)
PLAIN = log(
    LogBatch(SOME, LZ4), LogBatch(ODD), LogBatch(SOME[:50], ZSTD), *[LogBatch(SOME[i : i + 7]) for i in range(0, 70, 7)]
)
MIXED = log(
    LogBatch(SOME[:10], producer=1, transactional=True),
    LogBatch(SOME[10:15], producer=2, transactional=True),
    LogBatch(producer=2, marker=ABORT),
    LogBatch(ODD, gap=5, tail=3),
    LogBatch(producer=1, marker=COMMIT),
    LogBatch((), tail=19),
)
WORK = Assignment("sales", 12, "hash", Isolation.READ_COMMITTED, "a-1", LandingSettings(), FetchLimits(), 512 << 20)


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def make_range(tp: TopicPartition, source: Log) -> OffsetRange:
    return OffsetRange(tp.topic, tp.partition, "topic-id", 0, source.end, estimated_bytes=1000)


def run(
    lake: Any, logs: Mapping[TopicPartition, Log], work: Assignment = WORK, format: Format | None = None, **fetcher: Any
) -> tuple[list[Outcome], MemoryFetcher]:
    """Run a task over all of each log. Returns its outcomes, and the fetcher that it read from."""
    source = MemoryFetcher(logs, **fetcher)
    task = Task(0, 1, tuple(make_range(tp, log) for tp, log in logs.items()))
    return run_task(task, work, Tools(source, lake, format or RawFormat())), source


def expect_receipts(outcomes: list[Outcome]) -> list[Receipt]:
    assert all(isinstance(o, Receipt) for o in outcomes), outcomes
    return [o for o in outcomes if isinstance(o, Receipt)]


def read_rows(lake: LocalLake, receipt: Receipt) -> list[dict[str, Any]]:
    """Returns the rows of the receipt's landed parts, in the form that `Log.visible` has."""
    tables = [pq.read_table(lake.locate(p.staged)) for p in receipt.parts if p.kind is PartKind.LANDED]
    table = pa.concat_tables(tables)
    assert table["topic"].unique().to_pylist() == [receipt.offset_range.topic]
    assert table["partition"].unique().to_pylist() == [receipt.offset_range.partition]
    table = table.set_column(5, "timestamp", table["timestamp"].cast(pa.int64()))
    return table.drop_columns(["topic", "partition"]).to_pylist()


def list_staged(lake: LocalLake) -> list[str]:
    return list(lake.list("_sluice/sales/staging"))


@pytest.mark.parametrize("answer_bytes", [1, 300, 1 << 20])
def test_task_lands_the_records_of_the_log(lake: LocalLake, answer_bytes: int) -> None:
    outcomes, _ = run(lake, {ZERO: PLAIN, ONE: MIXED}, answer_bytes=answer_bytes)
    for receipt, source in zip(expect_receipts(outcomes), (PLAIN, MIXED), strict=True):
        assert read_rows(lake, receipt) == source.visible(0, source.end)
        assert receipt.position == source.end
        assert receipt.counts.total == receipt.offset_range.span == source.end


def test_duckdb_reads_the_same_rows(lake: LocalLake) -> None:
    outcomes, _ = run(lake, {ZERO: PLAIN})
    (part,) = expect_receipts(outcomes)[0].parts
    query = 'select "offset", key, value, epoch_ms(timestamp), headers from read_parquet(?) order by "offset"'
    rows = duckdb.connect().execute(query, [lake.locate(part.staged)]).fetchall()
    expected = [(r["offset"], r["key"], r["value"], r["timestamp"], r["headers"]) for r in PLAIN.visible(0, PLAIN.end)]
    assert rows == expected


def test_every_offset_has_its_class(lake: LocalLake) -> None:
    (committed,) = expect_receipts(run(lake, {ZERO: MIXED})[0])
    assert committed.counts == Counts(landed=14, control=2, aborted=5, compacted=5 + 3 + 19)
    work = replace(WORK, isolation=Isolation.READ_UNCOMMITTED, batch=13)
    (uncommitted,) = expect_receipts(run(lake, {ZERO: MIXED}, work)[0])
    assert uncommitted.counts == Counts(landed=19, control=2, compacted=5 + 3 + 19)


def test_a_part_of_a_log(lake: LocalLake) -> None:
    s = OffsetRange("orders", 0, "topic-id", 13, 395)
    (receipt,) = expect_receipts(
        run_task(Task(0, 1, (s,)), WORK, Tools(MemoryFetcher({ZERO: PLAIN}), lake, RawFormat()))
    )
    assert read_rows(lake, receipt) == PLAIN.visible(13, 395)
    assert receipt.position >= 395


def test_range_without_visible_records_has_a_receipt_and_no_part(lake: LocalLake) -> None:
    (receipt,) = expect_receipts(run(lake, {ZERO: log(LogBatch((), tail=19), LogBatch(producer=1, marker=COMMIT))})[0])
    assert receipt.parts == ()
    assert receipt.counts == Counts(control=1, compacted=19)
    assert list_staged(lake) == [paths.receipt_path("sales", 12, "a-1", receipt.offset_range)]


def test_responses_of_any_size_give_the_same_bytes(lake: LocalLake) -> None:
    landing = LandingSettings(row_group_rows=100, target_file_bytes=2000)
    hashes = set()
    for batch, answer_bytes in enumerate([1, 777, 1 << 20]):
        work = replace(WORK, landing=landing, attempt=f"a-{batch}")
        (receipt,) = expect_receipts(run(lake, {ZERO: PLAIN}, work, answer_bytes=answer_bytes)[0])
        assert len(receipt.parts) > 1
        hashes.add(tuple((p.name, p.rows, p.sha256) for p in receipt.parts))
        for path in list_staged(lake):
            lake.remove(path)
    assert len(hashes) == 1


def test_work_of_an_earlier_attempt_is_not_repeated(lake: LocalLake) -> None:
    first, _ = run(lake, {ZERO: PLAIN})
    again, source = run(lake, {ZERO: PLAIN, ONE: MIXED}, replace(WORK, attempt="a-2"))
    assert [[s.tp for s in read] for read in source.read] == [[ONE]]
    assert [r.adopted for r in expect_receipts(again)] == [True, False]
    assert again[0] == first[0]
    tools = Tools(MemoryFetcher({}), lake, RawFormat())
    assert salvage_task(Task(0, 1, (expect_receipts(first)[0].offset_range,)), WORK, tools, "killed") == first


def _flip(lake: LocalLake, r: Receipt) -> None:
    file = Path(lake.locate(r.parts[0].staged))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _rewrite(lake: LocalLake, r: Receipt, **changes: Any) -> None:
    path = paths.receipt_path("sales", 12, r.attempt, r.offset_range)
    receipt = json.loads(lake.get(path) or b"") | changes
    lake.put(path, json.dumps(receipt).encode())


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda lake, r: Path(lake.locate(r.parts[0].staged)).unlink(),
        lambda lake, r: lake.put(paths.receipt_path("sales", 12, "a-1", r.offset_range), b'{"slice":'),
        lambda lake, r: lake.put(paths.receipt_path("sales", 12, "a-1", r.offset_range), b"[" * 100_000),
        lambda lake, r: _rewrite(lake, r, counts={"landed": 1}),
        lambda lake, r: _rewrite(lake, r, position=3),
        lambda lake, r: _rewrite(
            lake, r, slice=json.loads(json.dumps(r.offset_range, default=_list_fields)) | {"leader_epoch": 9}
        ),
    ],
)
def test_invalid_receipt_is_not_adopted(lake: LocalLake, damage: Any) -> None:
    (first,) = expect_receipts(run(lake, {ZERO: PLAIN})[0])
    damage(lake, first)
    again, source = run(lake, {ZERO: PLAIN}, replace(WORK, attempt="a-2"))
    assert len(source.read[0]) == 1
    assert [r.adopted for r in expect_receipts(again)] == [False]
    assert read_rows(lake, expect_receipts(again)[0]) == PLAIN.visible(0, PLAIN.end)


def test_files_of_another_format_are_read_again(lake: LocalLake) -> None:
    run(lake, {ZERO: PLAIN})
    again, source = run(lake, {ZERO: PLAIN}, replace(WORK, attempt="a-2", shape="picky"))
    assert len(source.read[0]) == 1
    assert [r.adopted for r in expect_receipts(again)] == [False]


LARGE = log(LogBatch(SOME[:3]), LogBatch((LogRecord(b"k", bytes(17 << 20)),), ZSTD), LogBatch(SOME[3:6]))


def test_receipt_with_an_oversized_batch_is_adopted_until_the_batch_fits(lake: LocalLake) -> None:
    small = replace(WORK, memory=300 << 20)
    (first,) = expect_receipts(run(lake, {ZERO: LARGE}, small)[0])
    assert (first.counts, first.batch_bytes) == (Counts(landed=6, quarantined=1), 16 << 20)
    (again,) = expect_receipts(run(lake, {ZERO: LARGE}, replace(small, attempt="a-2"))[0])
    assert again.adopted
    (landed,) = expect_receipts(run(lake, {ZERO: LARGE}, replace(WORK, attempt="a-3"))[0])
    assert (landed.adopted, landed.counts, landed.batch_bytes) == (False, Counts(landed=7), 0)
    assert read_rows(lake, landed) == LARGE.visible(0, LARGE.end)


def test_oversized_batch_is_dropped_and_counted(lake: LocalLake) -> None:
    (receipt,) = expect_receipts(run(lake, {ZERO: LARGE}, replace(WORK, memory=300 << 20, dropping=True))[0])
    assert receipt.counts == Counts(landed=6, dropped=1)


def test_oversized_batch_with_unknown_offsets_fails_its_range(lake: LocalLake) -> None:
    cut = log(LogBatch((LogRecord(b"k", bytes(17 << 20)),), ZSTD, tail=1))
    (failed,) = run(lake, {ZERO: cut}, replace(WORK, memory=300 << 20))[0]
    assert isinstance(failed, RangeFailure)
    assert (failed.error, "task_memory" in failed.remedy) == ("OversizedBatch", True)


def _list_fields(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_receipt_of_another_batch_is_ignored(lake: LocalLake) -> None:
    run(lake, {ZERO: PLAIN}, replace(WORK, batch=11))
    _, source = run(lake, {ZERO: PLAIN})
    assert len(source.read[0]) == 1


def test_wrong_checksum_is_read_again_once(lake: LocalLake) -> None:
    outcomes, source = run(lake, {ZERO: PLAIN, ONE: MIXED}, damaged={ZERO: 1}, answer_bytes=300)
    assert [[s.tp for s in read] for read in source.read] == [[ZERO, ONE], [ZERO]]
    assert read_rows(lake, expect_receipts(outcomes)[0]) == PLAIN.visible(0, PLAIN.end)
    assert len(list_staged(lake)) == 4


def test_persistent_wrong_checksum_fails_its_range_only(lake: LocalLake) -> None:
    outcomes, source = run(lake, {ZERO: PLAIN, ONE: MIXED}, damaged={ZERO: 9}, answer_bytes=300)
    failed, landed = outcomes
    assert isinstance(failed, RangeFailure)
    assert (failed.error, failed.fatal, failed.offset_range.tp) == ("CorruptBatch", True, ZERO)
    assert isinstance(landed, Receipt)
    assert len(source.read) == 2
    assert len(list_staged(lake)) == 2


@pytest.mark.parametrize("error", [OffsetsLost("gone", remedy="accept it"), IncarnationChanged("recreated")])
def test_a_refusal_fails_its_range_at_once(lake: LocalLake, error: SluiceError) -> None:
    source = MemoryFetcher({ZERO: PLAIN, ONE: MIXED}, failing={ZERO: error}, answer_bytes=300)
    task = Task(0, 1, (make_range(ZERO, PLAIN), make_range(ONE, MIXED)))
    failed, landed = run_task(task, WORK, Tools(source, lake, RawFormat()), last_try=False)
    assert isinstance(failed, RangeFailure)
    assert (failed.error, failed.message, failed.remedy, failed.fatal) == (
        type(error).__name__, error.message, error.remedy, True,
    )  # fmt: skip
    assert isinstance(landed, Receipt)
    assert not any(paths.name_range(failed.offset_range) in path for path in list_staged(lake))


def test_staging_of_a_new_batch_is_not_listed() -> None:
    lake = MemoryLake()
    assert [r.adopted for r in expect_receipts(run(lake, {ZERO: PLAIN}, replace(WORK, fresh=True))[0])] == [False]
    assert lake.requests["list"] == 0
    assert [r.adopted for r in expect_receipts(run(lake, {ZERO: PLAIN}, replace(WORK, attempt="a-2"))[0])] == [True]


def test_transient_errors_are_raised_until_the_last_attempt(lake: LocalLake) -> None:
    source = MemoryFetcher({ZERO: PLAIN, ONE: MIXED}, failing={ZERO: KafkaUnavailable("no leader")}, answer_bytes=300)
    task = Task(0, 1, (make_range(ZERO, PLAIN), make_range(ONE, MIXED)))
    tools = Tools(source, lake, RawFormat())
    with pytest.raises(KafkaUnavailable):
        run_task(task, WORK, tools, last_try=False)
    failed, landed = run_task(task, replace(WORK, attempt="a-2"), tools, last_try=True)
    assert isinstance(failed, RangeFailure)
    assert (failed.error, failed.fatal) == ("KafkaUnavailable", False)
    assert expect_receipts([landed])[0].adopted, "the offset range that landed in the first try is read only once"


def test_stream_that_ends_early_leaves_no_partial_file(lake: LocalLake) -> None:
    outcomes, _ = run(lake, {ZERO: PLAIN, ONE: MIXED}, answer_bytes=300, cut_short=2)
    assert [type(o) for o in outcomes] == [RangeFailure, RangeFailure]
    assert list_staged(lake) == []


class Broken(LocalLake):
    """Fails when a receipt or a part is written."""

    error: Exception = LakeFull("no space")
    where = ".parquet"

    def create(self, path: str) -> Any:
        if path.endswith(self.where):
            raise self.error
        return super().create(path)

    def put(self, path: str, data: bytes) -> None:
        if path.endswith(self.where):
            raise self.error
        super().put(path, data)


@pytest.mark.parametrize("where", [".parquet", ".receipt.json"])
@pytest.mark.parametrize(
    ("error", "fatal"), [(LakeFull("no space"), True), (LakeUnavailable("later"), False), (OSError(5, "odd"), False)]
)
def test_failing_lake_fails_the_range(tmp_path: Path, where: str, error: Exception, fatal: bool) -> None:
    lake = Broken(tmp_path)
    lake.error, lake.where = error, where
    (failed,), _ = run(lake, {ZERO: PLAIN})
    assert isinstance(failed, RangeFailure)
    assert (failed.error, failed.fatal) == (type(error).__name__, fatal)
    assert list_staged(lake) == []


class Picky(RawFormat):
    """Quarantines every third record, drops every fifth of the others, lands the rest."""

    lose = 0
    validating = 1

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        rows = next(super().convert(s, chunk)).landed
        offsets = rows.column(4).to_pylist()
        bad = [o % 3 == 0 for o in offsets]
        dropped = [not b and o % 5 == 0 for b, o in zip(bad, offsets, strict=True)]
        landed = [not b and not d for b, d in zip(bad, dropped, strict=True)]
        refused = _make_refused(rows.filter(pa.array(bad))) if any(bad) else None
        yield Formatted(rows.filter(pa.array(landed)), refused, sum(dropped) - self.lose, validate_ns=self.validating)


def _make_refused(raw: pa.RecordBatch) -> pa.RecordBatch:
    refusal = {"stage": "decode", "reason": "not_json", "expectation": None, "field": None, "detail": "no", "byte": 3}
    more = [pa.array([v] * raw.num_rows).cast(REFUSED.field(n).type) for n, v in refusal.items()]
    return pa.RecordBatch.from_arrays([*raw.columns, *more], schema=REFUSED)


def test_format_separates_landed_and_quarantined_records(lake: LocalLake) -> None:
    (receipt,) = expect_receipts(run(lake, {ZERO: PLAIN}, format=Picky())[0])
    offsets = range(PLAIN.end)
    bad = [o for o in offsets if o % 3 == 0]
    dropped = [o for o in offsets if o % 3 and o % 5 == 0]
    assert receipt.counts == Counts(PLAIN.end - len(bad) - len(dropped), len(bad), len(dropped))
    landed, quarantined = receipt.parts
    assert landed.path.startswith("data/sales/")
    assert quarantined.path.startswith("quarantine/sales/")
    assert pq.read_table(lake.locate(quarantined.staged))["offset"].to_pylist() == bad


def test_time_of_each_activity_is_reported(lake: LocalLake) -> None:
    (receipt,) = expect_receipts(run(lake, {ZERO: PLAIN}, format=Picky())[0])
    assert list(receipt.timings) == list(ACTIVITIES)
    assert receipt.timings["validate"] == Picky.validating
    assert min(receipt.timings.values()) >= 0


def test_format_that_loses_a_record_is_detected(lake: LocalLake) -> None:
    format = Picky()
    format.lose = 1
    (failed,), _ = run(lake, {ZERO: PLAIN}, format=format)
    assert isinstance(failed, RangeFailure)
    assert failed.error == "ProofFailed"
    assert list_staged(lake) == []


def test_windows_have_folders(lake: LocalLake) -> None:
    s = replace(make_range(ZERO, PLAIN), window=1_795_183_200_000, folder="date=2026-11-20/hour=14")
    (receipt,) = expect_receipts(
        run_task(Task(0, 1, (s,)), WORK, Tools(MemoryFetcher({ZERO: PLAIN}), lake, RawFormat()))
    )
    assert receipt.parts[0].path == f"data/sales/date=2026-11-20/hour=14/{receipt.parts[0].name}"


sizes = st.lists(st.integers(0, 1 << 32), min_size=1, max_size=40)


@given(sizes, st.integers(64 << 20, 4 << 30), st.integers(1, 64))
def test_memory_is_bounded_for_any_ranges(sizes: list[int], memory: int, active: int) -> None:
    ranges = [OffsetRange("orders", i, "id", 0, 10, estimated_bytes=size) for i, size in enumerate(sizes)]
    work = replace(WORK, memory=memory, limits=FetchLimits(active_ranges=active))
    chunks, limits = share_memory(ranges, work)
    assert 1 <= limits.active_ranges <= active
    used = sum(sorted(chunks.values())[-limits.active_ranges :])
    assert limits.active_ranges == 1 or used * 5 <= memory
    for s in ranges:
        assert share_memory([s], work)[0] == {s: chunks[s]}, "a share depends on its offset range alone"


def test_begun_ranges_are_noted_until_the_attempt_ends(lake: LocalLake, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, put = list[dict[str, int]](), lake.put

    def note(path: str, data: bytes) -> None:
        put(path, data)
        if path.endswith(paths.PROGRESS):
            notes.append(receipt_files.read_partial(lake, "sales", 12, "a"))
            assert receipt_files.read_partial(lake, "sales", 12, "another owner's") == {}

    monkeypatch.setattr(task, "_NOTE_SECONDS", 0)
    monkeypatch.setattr(lake, "put", note)
    outcomes, _ = run(lake, {ZERO: PLAIN}, answer_bytes=1)
    (receipt,) = expect_receipts(outcomes)
    done = [n for name in notes for n in name.values()]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] <= receipt.offset_range.end
    assert not [path for path in list_staged(lake) if path.endswith(paths.PROGRESS)]
