"""The proof refuses every receipt that does not fit its plan, range or files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.landing.task import Assignment, Tools, run_task
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Outcome, Part, PartKind, RangeFailure, Receipt
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.logs import LogBatch, LogRecord, log

LOG = log(*[LogBatch(tuple(LogRecord(b"k", b"v%d" % i) for _ in range(30))) for i in range(5)])
ZERO, ONE = (OffsetRange("orders", p, "topic-id", 0, LOG.end, estimated_bytes=1) for p in (0, 1))
PLAN = Plan("sales", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (ZERO, ONE)),))
BATCH = 12


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def land_ranges(lake: LocalLake, attempt: str = "a-1", plan: Plan = PLAN, batch: int = BATCH) -> list[Receipt]:
    """Land both offset ranges, each in three files. Returns their receipts."""
    landing = LandingSettings(row_group_rows=50, target_file_bytes=1)
    limits = FetchLimits()
    work = Assignment("sales", batch, plan.hash, plan.isolation, attempt, landing, limits, 512 << 20)
    logs = {TopicPartition("orders", 0): LOG, TopicPartition("orders", 1): LOG}
    outcomes = run_task(plan.tasks[0], work, Tools(MemoryFetcher(logs), lake, RawFormat()))
    return [o for o in outcomes if isinstance(o, Receipt)]


def test_landed_files_are_proven(lake: LocalLake) -> None:
    receipts = land_ranges(lake)
    assert [len(r.parts) for r in receipts] == [3, 3]
    assert prove(PLAN, BATCH, reversed(receipts), lake) == (receipts, [])


def _change_part(r: Receipt, **changes: Any) -> Receipt:
    return replace(r, parts=(replace(r.parts[0], **changes), *r.parts[1:]))


def _swap_names(r: Receipt) -> Receipt:
    """Returns the receipt with the names of its first two parts swapped."""
    a, b, c = r.parts

    def rename(part: Part, as_of: Part) -> Part:
        return replace(part, name=as_of.name, staged=as_of.staged, path=as_of.path)

    return replace(r, parts=(rename(a, b), rename(b, a), c))


TAMPERED: dict[str, Callable[[Receipt], Receipt]] = {
    "stopped early": lambda r: replace(r, position=r.offset_range.end - 1),
    "a record missing": lambda r: replace(r, counts=replace(r.counts, landed=r.counts.landed - 1)),
    "a record too many": lambda r: replace(r, counts=replace(r.counts, control=1)),
    "a negative class": lambda r: replace(r, counts=replace(r.counts, control=1, compacted=-1)),
    "other classes than rows": lambda r: replace(r, counts=Counts(landed=140, compacted=10)),
    "rows as quarantined": lambda r: replace(r, counts=Counts(quarantined=150)),
    "a part left out": lambda r: replace(r, parts=r.parts[1:], counts=Counts(landed=100, compacted=50)),
    "a part twice": lambda r: replace(r, parts=(r.parts[0], *r.parts)),
    "other bytes": lambda r: _change_part(r, bytes=r.parts[0].bytes + 1),
    "other rows": lambda r: replace(_change_part(r, rows=49), counts=Counts(landed=149, compacted=1)),
    "another kind": lambda r: replace(_change_part(r, kind=PartKind.QUARANTINED), counts=Counts(100, 50)),
    "another path": lambda r: _change_part(r, path="data/sales/elsewhere.parquet"),
    "outside the lake": lambda r: _change_part(r, staged="../" + r.parts[0].staged),
    "another attempt": lambda r: replace(r, attempt="a-2"),
    "names swapped": _swap_names,
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_mismatching_receipt_fails(lake: LocalLake, tamper: Callable[[Receipt], Receipt]) -> None:
    good, other = land_ranges(lake)
    receipts, failures = prove(PLAN, BATCH, [tamper(good), other], lake)
    assert receipts == [other]
    assert [(f.offset_range, f.error, f.fatal) for f in failures] == [(ZERO, "ProofFailed", True)]


def _on_disk(change: Callable[[Path], object]) -> Callable[[LocalLake, Receipt], object]:
    return lambda lake, r: change(Path(lake.locate(r.parts[0].staged)))


def _foreign(lake: LocalLake, r: Receipt) -> Receipt:
    """Returns a receipt of the same rows and paths that an older plan wrote."""
    older = replace(PLAN, cluster="other")
    for path in list(lake.list("_sluice/sales/staging")):
        lake.remove(path)
    return land_ranges(lake, plan=older)[0]


def _other_range(lake: LocalLake, r: Receipt) -> Receipt:
    """Write the other partition's bytes under this offset range's names."""
    mine, theirs = r.parts, land_ranges(lake, "a-9")[1].parts
    for a, b in zip(mine, theirs, strict=True):
        lake.put(a.staged, lake.get(b.staged) or b"")
    parts = tuple(replace(a, bytes=b.bytes, sha256=b.sha256) for a, b in zip(mine, theirs, strict=True))
    return replace(r, parts=parts)


def _same_file_twice(lake: LocalLake, r: Receipt) -> Receipt:
    """Write the first file's bytes under the second's name: rows and size fit, offsets do not."""
    first, second, third = r.parts
    lake.put(second.staged, lake.get(first.staged) or b"")
    again = replace(second, bytes=first.bytes, rows=first.rows, sha256=first.sha256)
    return replace(r, parts=(first, again, third))


@pytest.mark.parametrize(
    "damage",
    [
        _on_disk(Path.unlink),
        _on_disk(lambda p: p.write_bytes(p.read_bytes()[:-1])),
        _on_disk(lambda p: p.write_bytes(b"\0" * p.stat().st_size)),
        _foreign,
        _other_range,
        _same_file_twice,
    ],
)
def test_files_that_differ_from_their_receipt_fail(lake: LocalLake, damage: Any) -> None:
    good, _ = land_ranges(lake)
    damaged = damage(lake, good)
    receipts, failures = prove(PLAN, BATCH, [damaged if isinstance(damaged, Receipt) else good], lake)
    assert receipts == []
    assert [f.error for f in failures] == ["ProofFailed", "ProofFailed"]


def test_receipt_of_another_batch_proves_nothing(lake: LocalLake) -> None:
    assert prove(PLAN, 13, land_ranges(lake), lake)[0] == []


def test_choice_among_receipts_is_deterministic(lake: LocalLake) -> None:
    first = land_ranges(lake, "a-2")
    for path in [p for p in lake.list("_sluice/sales/staging") if p.endswith(".json")]:
        lake.remove(path)
    second = land_ranges(lake, "a-1")
    both: list[Outcome] = [*first, *second]
    assert prove(PLAN, BATCH, both, lake) == prove(PLAN, BATCH, reversed(both), lake) == (second, [])
    Path(lake.locate(second[0].parts[0].staged)).unlink()
    assert prove(PLAN, BATCH, both, lake) == ([first[0], second[1]], [])


def test_failures_are_returned_and_a_missing_answer_is_one(lake: LocalLake) -> None:
    failure = RangeFailure(ZERO, "KafkaUnavailable", "no leader", "run again")
    receipts, failures = prove(PLAN, BATCH, [failure], lake)
    assert receipts == []
    assert failures[0] == failure
    assert (failures[1].offset_range, failures[1].error) == (ONE, "ProofFailed")


def test_a_receipt_beats_a_failure_of_the_same_range(lake: LocalLake) -> None:
    receipts = land_ranges(lake)
    failure = RangeFailure(ZERO, "KafkaUnavailable", "no leader")
    assert prove(PLAN, BATCH, [failure, *receipts], lake) == (receipts, [])
