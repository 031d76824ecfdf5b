"""Where the time of a run went: its stages by wall-clock time, its tasks by activity, and brokers' responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import count, seconds, size
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import SHARES, BrokerTraffic, Traffic, sum_brokers
from sluice.pipelines.status.batch_facts import BatchFacts, TopicTraffic, WorkTime, by_task
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.batch.result import BatchResult

_TASKS_SHOWN = 20
_BROKERS_SHOWN = 20
_TOPICS_SHOWN = 20


def facts_of(batches: Sequence[BatchResult], contract: Contract | None = None) -> BatchFacts:
    """Returns the facts of batches together. `contract` is the one that their rows were checked against."""
    receipts, results = [r for b in batches for r in b.receipts], [r for b in batches for r in b.results]
    return BatchFacts(receipts, sum((b.traffic for b in batches), Traffic()), contract, results)


def view(batches: Sequence[BatchResult], stages: Mapping[str, float]) -> list[RenderableType]:
    """For people. `stages` are seconds, in order."""
    facts = facts_of(batches)
    total = sum(stages.values())
    rows = [[name, f"{took:.2f}", _share(took, total)] for name, took in stages.items()]
    return [
        heading("Waiting", seconds(total)),
        table(["stage", "seconds", "share"], [*rows, ["all", f"{total:.2f}", ""]], right="seconds share"),
        *_format_tasks(batches, facts, stages),
        *_format_brokers(facts),
        *_format_topics(facts),
    ]


@dataclass(frozen=True)
class TaskProfile:
    batch: int
    task: int
    leader: int
    work: Flat[WorkTime]


@dataclass(frozen=True)
class RunProfile:
    """Nanoseconds by task and activity, of all tasks, and for each record; the traffic with brokers."""

    tasks: list[TaskProfile]
    work: Flat[WorkTime]
    brokers: tuple[BrokerTraffic, ...]
    topics: tuple[TopicTraffic, ...]


def build_profile(batches: Sequence[BatchResult]) -> RunProfile:
    facts = facts_of(batches)
    tasks = [TaskProfile(b.batch, t.index, t.leader, s) for b, t, s in _by_task(batches)]
    return RunProfile(tasks, facts.task_time, facts.traffic.brokers, facts.topics)


def _by_task(batches: Iterable[BatchResult]) -> Iterator[tuple[BatchResult, Task, WorkTime]]:
    """The tasks that finished something, batch by batch."""
    return ((b, task, s) for b in batches for task, s in by_task(b.plan, b.receipts) if s.offset_ranges)


def _format_tasks(
    batches: Sequence[BatchResult], facts: BatchFacts, stages: Mapping[str, float]
) -> list[RenderableType]:
    tasks, work = list(_by_task(batches)), facts.task_time
    if not work.total:
        return []
    longest = max(s.total for _, _, s in tasks) / 1e9
    rest = max(stages.get("land", 0.0) - longest, 0.0)
    note = f"seconds; the longest task worked {longest:.2f}, scheduling and the start of workers took {rest:.2f}"
    rows = [_build_row(str(task.index), s) for _, task, s in tasks[:_TASKS_SHOWN]]
    if more := tasks[_TASKS_SHOWN:]:
        rows.append(_build_row(many(len(more), "more task"), sum((s for _, _, s in more), WorkTime())))
    activities = list(work.ns)
    rows += [
        _build_row("all", work),
        ["share", "", "", *(_share(ns, work.total) for ns in work.ns.values()), ""],
        ["ns a record", "", "", *(f"{work.per_record(ns):,.0f}" for ns in (*work.ns.values(), work.total))],
    ]
    columns = ["task", "ranges", "records", *activities, "in all"]
    return [heading("Time of tasks", note), table(columns, rows, right=" ".join([*columns[1:], "in"]))]


def _build_row(name: str, s: WorkTime) -> list[str | Text]:
    return [name, count(s.offset_ranges), count(s.records), *(f"{ns / 1e9:.3f}" for ns in (*s.ns.values(), s.total))]


def _format_brokers(facts: BatchFacts) -> list[RenderableType]:
    brokers = facts.traffic.brokers
    if not brokers:
        return []
    rows = [_build_broker_row(f"{b.node} {b.address}".strip(), b) for b in brokers[:_BROKERS_SHOWN]]
    if more := brokers[_BROKERS_SHOWN:]:
        rows.append(_build_broker_row(many(len(more), "more broker"), sum_brokers(more)))
    if len(brokers) > 1:
        rows.append(_build_broker_row("all", facts.all_brokers))
    columns = ["broker", "fetches", "size", *SHARES, "waiting", "held", "throttled", "moved", "errors"]
    note = "p50, p95, p99 of answers in ms; waiting, held by the client, and throttled in seconds"
    shown_last = "errors size p95 held moved"
    return [heading("Requests to brokers", note), table(columns, rows, " ".join(columns[1:]), shown_last)]


def _build_broker_row(name: str, b: BrokerTraffic) -> list[str | Text]:
    return [
        name,
        count(b.requests),
        size(b.bytes),
        *(f"{ms:.1f}" if ms < 10 else f"{ms:,.0f}" for ms in map(b.latency.percentile_ms, SHARES.values())),
        f"{b.latency.total_us / 1e6:.2f}",
        f"{b.held_us / 1e6:.2f}",
        f"{b.throttle_ms / 1e3:.2f}",
        count(b.moved),
        count(sum(b.errors.values())),
    ]


def _format_topics(facts: BatchFacts) -> list[RenderableType]:
    topics = facts.topics
    rows = [[t.topic, count(t.records), size(t.bytes), count(t.behind)] for t in topics[:_TOPICS_SHOWN]]
    if more := topics[_TOPICS_SHOWN:]:
        rows.append([many(len(more), "more topic"), count(sum(t.records for t in more)), "", ""])
    columns = ["topic", "records", "size", "behind"]
    note = "behind: offsets from the last one read to the end of the log"
    return [heading("Reads", note), table(columns, rows, right=" ".join(columns[1:]))] if rows else []


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total else ""
