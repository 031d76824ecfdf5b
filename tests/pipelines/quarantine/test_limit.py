"""Typed offset ranges end to end over logs in memory: quarantined rows have their own files, their proof, and their
limit.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed.sections import LandingSettings, OnUndecodable, Policies, QuarantineLimit
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.landing.task import Assignment, Tools, run_task
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, PartKind, Receipt
from sluice.pipelines.quarantine.limit import MOST_FAULTS, check_quarantine, faults_of
from sluice.pipelines.records.json.format import JsonFormat
from sluice.pipelines.schema.schema import parse_schema
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.logs import LZ4, LogBatch, LogRecord, log

SCHEMA = parse_schema(
    {"n": "int32", "amount": "decimal(9,2)", "day": "date", "lines": "list<struct<sku:string, q:int8>>"}
)
ZERO = TopicPartition("orders", 0)
GOOD = b'{"n":%d,"amount":%d.25,"day":"2026-11-20","lines":[{"sku":"a","q":1},{}],"more":"x"}'


def make_value(i: int) -> bytes | None:
    if i % 10 == 3:
        return (b"{", b'{"n":"one"}', b'{"n":3000000000}')[i // 10 % 3]
    return None if i % 17 == 0 else GOOD % (i, i)


RECORDS = tuple(LogRecord(b"k%d" % i, make_value(i), 1_700_000_000_000 + i) for i in range(600))
LOG = log(*[LogBatch(RECORDS[i : i + 100], LZ4) for i in range(0, 600, 100)])
WORK = Assignment("sales", 12, "hash", Isolation.READ_COMMITTED, "a-1", LandingSettings(), FetchLimits(), 512 << 20)
RANGE = OffsetRange("orders", 0, "topic-id", 0, LOG.end, estimated_bytes=1000, folder="date=2026-11-20/hour=14")
PLAN = Plan("sales", "cluster", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (RANGE,)),))


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def land(lake: LocalLake, *, dropping: bool = False, **settings: int) -> Receipt:
    work = replace(WORK, plan_hash=PLAN.hash, landing=LandingSettings(**settings))
    tools = Tools(MemoryFetcher({ZERO: LOG}, answer_bytes=4000), lake, JsonFormat(SCHEMA, dropping=dropping))
    (receipt,) = run_task(PLAN.tasks[0], work, tools)
    assert isinstance(receipt, Receipt)
    return receipt


def test_landed_and_quarantined_files_are_proven(lake: LocalLake) -> None:
    receipt = land(lake, row_group_rows=50, target_file_bytes=4000)
    assert receipt.counts == Counts(landed=540, quarantined=60)
    proven, failures = prove(PLAN, 12, [receipt], lake)
    assert (proven, failures) == ([receipt], [])
    assert {p.path.split("/")[0] for p in receipt.parts} == {"data", "quarantine"}
    assert all("/sales/date=2026-11-20/hour=14/" in p.path for p in receipt.parts)


def test_quarantine_file_with_wrong_row_count_is_detected(lake: LocalLake) -> None:
    receipt = land(lake)
    (part,) = (p for p in receipt.parts if p.kind is PartKind.QUARANTINED)
    wrong = replace(receipt, parts=tuple(replace(p, rows=p.rows - 1) if p is part else p for p in receipt.parts))
    proven, failures = prove(PLAN, 12, [wrong], lake)
    assert (proven, [f.error for f in failures]) == ([], ["ProofFailed"])


def test_duckdb_reads_the_records_of_the_log(lake: LocalLake) -> None:
    receipt = land(lake, row_group_rows=77)
    files = {k: [lake.locate(p.staged) for p in receipt.parts if p.kind is k] for k in PartKind}
    query = """select kafka_offset, n, amount::varchar, day::varchar, lines, _extra, kafka_tombstone, kafka_key
        from read_parquet(?, hive_partitioning = false) order by 1"""
    rows = duckdb.connect().execute(query, [files[PartKind.LANDED]]).fetchall()
    lines = [{"sku": "a", "q": 1}, {"sku": None, "q": None}]
    assert rows == [
        (i, None, None, None, None, None, True, r.key)
        if r.value is None
        else (i, i, f"{i}.25", "2026-11-20", lines, '{"more":"x"}', False, r.key)
        for i, r in enumerate(RECORDS)
        if i % 10 != 3
    ]
    quarantined = pq.read_table(files[PartKind.QUARANTINED][0]).to_pylist()
    assert [(r["offset"], r["value"], r["key"], r["topic"]) for r in quarantined] == [
        (i, r.value, r.key, "orders") for i, r in enumerate(RECORDS) if i % 10 == 3
    ]
    assert [(r["reason"], r["field"], r["byte"]) for r in quarantined[:3]] == [
        ("not_json", None, 1),
        ("wrong_type", "n", 5),
        ("out_of_range", "n", 5),
    ]


@pytest.mark.parametrize(
    ("policies", "refused"),
    [
        (Policies(), False),
        (Policies(quarantine_limit=QuarantineLimit(at_least=60)), True),
        (Policies(quarantine_limit=QuarantineLimit(at_least=61)), False),
        (Policies(quarantine_limit=QuarantineLimit(at_least=1, share=0.1)), False),
        (Policies(quarantine_limit=QuarantineLimit(at_least=1, share=0.09)), True),
        (Policies(on_undecodable=OnUndecodable.FAIL), True),
        (Policies(quarantine_limit=QuarantineLimit(at_most=60)), False),
        (Policies(quarantine_limit=QuarantineLimit(at_most=59)), True),
        (Policies(quarantine_limit=QuarantineLimit(share=1, at_most=0)), True),
    ],
)
def test_quarantine_above_the_limit_is_refused(lake: LocalLake, policies: Policies, refused: bool) -> None:
    receipt = land(lake)
    if not refused:
        check_quarantine([receipt], policies, lake)
        return
    with pytest.raises(QuarantineExceeded) as caught:
        check_quarantine([receipt], policies, lake)
    message = str(caught.value)
    assert "60 of 600 records (10.0%)" in message
    assert "n: wrong_type (should be int32), 20 records, the first at orders:0:13" in message
    fails = policies.on_undecodable is OnUndecodable.FAIL
    value = "at_most: 60" if policies.quarantine_limit.at_most is not None else "share: 0.11"
    assert ("{on_undecodable: quarantine}`" if fails else f"`policies: {{quarantine_limit: {{{value}}}}}`") in message
    assert lake.locate(receipt.parts[1].staged) in message


def test_reported_first_record_is_the_first_in_the_log(lake: LocalLake) -> None:
    task = Task(0, 1, (replace(RANGE, start=300), replace(RANGE, end=300)))
    tools = Tools(MemoryFetcher({ZERO: LOG}, answer_bytes=4000), lake, JsonFormat(SCHEMA))
    receipts = [r for r in run_task(task, replace(WORK, plan_hash=PLAN.hash), tools) if isinstance(r, Receipt)]
    receipts.sort(key=lambda r: -r.offset_range.start)
    with pytest.raises(QuarantineExceeded, match="20 records, the first at orders:0:13"):
        check_quarantine(receipts, Policies(on_undecodable=OnUndecodable.FAIL), lake)


def test_dropped_records_are_counted_and_never_exceed_the_limit(lake: LocalLake) -> None:
    receipt = land(lake, dropping=True)
    assert receipt.counts == Counts(landed=540, dropped=60)
    assert [p.kind for p in receipt.parts] == [PartKind.LANDED]
    check_quarantine([receipt], Policies(on_undecodable=OnUndecodable.DROP), lake)


def write_refused(*reasons: tuple[str | None, str, str]) -> bytes:
    """Returns a file of the quarantine with one record for each (field, reason, detail)."""
    n = len(reasons)
    columns = {
        "topic": ["orders"] * n,
        "partition": pa.array([0] * n, pa.int32()),
        "offset": range(n),
        "stage": ["contract"] * n,
        "expectation": ["expect_column_values_to_be_between"] * n,
        "field": [field for field, _, _ in reasons],
        "reason": [reason for _, reason, _ in reasons],
        "detail": [detail for _, _, detail in reasons],
        "value": [b"secret"] * n,
    }
    pq.write_table(pa.table(columns), sink := io.BytesIO(), row_group_size=7)
    return sink.getvalue()


def test_reasons_are_ranked_over_all_files(tmp_path: Path) -> None:
    lake = LocalLake(tmp_path)
    rare, often = (None, "not_json", "it ends too early"), ("n", "out_of_bounds", "n should be at most 9")
    for i in range(40):
        lake.put(f"q/{i}", write_refused(rare, *[often] * (i + 1)))
    first, second = faults_of([f"q/{i}" for i in range(40)], lake)
    assert (first.records, str(first.kind)) == (820, "n: expect_column_values_to_be_between")
    assert str(second) == "not_json (it ends too early), 40 records, the first at orders:0:0"


def test_reported_reasons_are_escaped_and_truncated(tmp_path: Path) -> None:
    lake = LocalLake(tmp_path)
    lake.put("q", write_refused(("\x1b[2J\u202e" + "x" * 5000, "out_of_bounds", "\r\nall is well\x07")))
    (fault,) = faults_of(["q"], lake)
    assert str(fault).isprintable()
    assert len(str(fault)) < 400
    assert "secret" not in str(fault)
    assert "\\x1b[2J\\u202exxx" in str(fault)


def test_all_records_are_counted_above_the_limit_of_kinds(tmp_path: Path) -> None:
    lake = LocalLake(tmp_path)
    lake.put("q", write_refused(*[(f"field {i}", "wrong_type", "should be int32") for i in range(MOST_FAULTS + 500)]))
    faults = faults_of(["q"], lake)
    assert len(faults) == MOST_FAULTS + 1
    assert (faults[0].kind.reason, faults[0].records) == ("others", 500)
    assert sum(f.records for f in faults) == MOST_FAULTS + 500
