"""The time that tasks spent: sums of receipts' timings by activity and by task."""

from __future__ import annotations

from dataclasses import replace

from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.status.batch_facts import ACTIVITIES, WorkTime, by_task, sum_times

RANGES = tuple(OffsetRange("orders", p, "id", 0, 100) for p in range(3))
PLAN = Plan(
    "sales",
    "c",
    Request(RequestKind.CATCH_UP),
    Isolation.READ_COMMITTED,
    (Task(0, 1, RANGES[:2]), Task(1, 2, RANGES[2:])),
)


def make_receipt(s: OffsetRange, **ns: int) -> Receipt:
    counts = Counts(landed=70, quarantined=20, dropped=5, control=5)
    return Receipt(s, 100, counts, (), "a", input_bytes=1000, timings=ns)


def test_activity_times_are_summed_in_order_of_work() -> None:
    times = sum_times([make_receipt(RANGES[0], write=3, wait=1), make_receipt(RANGES[1], wait=10, crc=5)])
    assert list(times.ns) == list(ACTIVITIES)
    assert {a: ns for a, ns in times.ns.items() if ns} == {"wait": 11, "crc": 5, "write": 3}
    assert (times.total, times.records, times.input_bytes, times.offset_ranges) == (19, 190, 2000, 2)
    assert times.per_record(times.total) == 0.1


def test_adopted_receipts_add_no_time() -> None:
    assert not sum_times([replace(make_receipt(RANGES[0], wait=1), adopted=True)]).offset_ranges


def test_unknown_activity_is_kept() -> None:
    assert sum_times([make_receipt(RANGES[0], dance=4)]).ns["dance"] == 4


def test_task_time_includes_only_ranges_of_the_task() -> None:
    times_by_task = by_task(PLAN, [make_receipt(RANGES[2], wait=7), make_receipt(RANGES[0], wait=1)])
    assert [(task.index, s.total, s.offset_ranges) for task, s in times_by_task] == [(0, 1, 1), (1, 7, 1)]


def test_time_per_record_is_zero_without_records() -> None:
    assert WorkTime({"wait": 5}).per_record(5) == 0
