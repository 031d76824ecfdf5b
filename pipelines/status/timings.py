"""Where the time of a batch's tasks went, by activity, from their receipts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.pipelines.model.plans import Plan, Task
from sluice.pipelines.model.receipts import Receipt

ACTIVITIES = {
    "wait": "waiting for Kafka",
    "crc": "checksums",
    "decompress": "decompressing",
    "decode": "decoding records",
    "type": "typing JSON",
    "validate": "the contract",
    "encode": "encoding Parquet",
    "write": "writing to the lake",
}
"""A task's activities, in order: the name in receipts, and a description."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Thread time in nanoseconds by activity, and the work done in it. `records` counts the visible ones."""

    ns: dict[str, int] = field(default_factory=dict)
    records: int = 0
    input_bytes: int = 0
    slices: int = 0

    @property
    def total(self) -> int:
        return sum(self.ns.values())

    def __add__(self, other: Spent) -> Spent:
        ns = {a: self.ns.get(a, 0) + other.ns.get(a, 0) for a in (self.ns | other.ns)}
        amounts = (self.records + other.records, self.input_bytes + other.input_bytes, self.slices + other.slices)
        return Spent(ns, *amounts)

    def per_record(self, ns: int) -> float:
        """`ns` for each record; 0 without records."""
        return ns / self.records if self.records else 0.0


def sum_times(receipts: Iterable[Receipt]) -> Spent:
    """The sum of these receipts, without slices that an earlier attempt had finished."""
    return sum(map(_sum_task_times, (r for r in receipts if not r.adopted)), Spent(dict.fromkeys(ACTIVITIES, 0)))


def _sum_task_times(r: Receipt) -> Spent:
    return Spent(r.timings, r.counts.landed + r.counts.quarantined + r.counts.dropped, r.input_bytes, 1)


def by_task(plan: Plan, receipts: Iterable[Receipt]) -> list[tuple[Task, Spent]]:
    """Each task of the plan with what its finished slices took."""
    of = {r.slice: r for r in receipts}
    return [(task, sum_times(of[s] for s in task.slices if s in of)) for task in plan.tasks]
