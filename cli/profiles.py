"""Where the time of a run went: its stages, as whoever started it waited for them, and its tasks by activity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.numbers import count, seconds
from sluice.cli.terminal import heading, table
from sluice.pipelines.vocabulary.plans import Task
from sluice.pipelines.vocabulary.units import many
from sluice.pipelines.watching.timings import Spent, by_task, spent

if TYPE_CHECKING:
    from sluice.pipelines.batch.result import BatchResult

_TASKS_SHOWN = 20


def view(batches: Sequence[BatchResult], stages: Mapping[str, float]) -> list[RenderableType]:
    """For people. `stages` are seconds, in order."""
    return [*_stages(stages), *_tasks(batches, stages)]


def document(batches: Sequence[BatchResult]) -> dict[str, Any]:
    """For programs: nanoseconds by task and activity, of all tasks, and for each record."""
    whole = spent(r for b in batches for r in b.receipts)
    return {
        "tasks": [
            {"batch": b.batch, "task": t.index, "leader": t.leader} | _amounts(s) for b, t, s in _by_task(batches)
        ],
        **_amounts(whole),
        "ns_per_record": {a: round(whole.per_record(ns), 1) for a, ns in whole.ns.items()},
    }


def _amounts(s: Spent) -> dict[str, Any]:
    return {"slices": s.slices, "records": s.records, "input_bytes": s.input_bytes, "ns": s.ns}


def _by_task(batches: Iterable[BatchResult]) -> Iterator[tuple[BatchResult, Task, Spent]]:
    """The tasks that finished something, batch by batch."""
    return ((b, task, s) for b in batches for task, s in by_task(b.plan, b.receipts) if s.slices)


def _stages(stages: Mapping[str, float]) -> list[RenderableType]:
    whole = sum(stages.values())
    rows = [[name, f"{took:.2f}", _share(took, whole)] for name, took in stages.items()]
    return [
        heading("What was waited for", seconds(whole)),
        table(["stage", "seconds", "share"], [*rows, ["all", f"{whole:.2f}", ""]], right="seconds share"),
    ]


def _tasks(batches: Sequence[BatchResult], stages: Mapping[str, float]) -> list[RenderableType]:
    ran, whole = list(_by_task(batches)), spent(r for b in batches for r in b.receipts)
    if not whole.total:
        return []
    longest = max(s.total for _, _, s in ran) / 1e9
    rest = max(stages.get("land", 0.0) - longest, 0.0)
    said = f"seconds; the longest task worked {longest:.2f}, Spark's scheduling and its workers' start took {rest:.2f}"
    rows = [_row(str(task.index), s) for _, task, s in ran[:_TASKS_SHOWN]]
    if more := ran[_TASKS_SHOWN:]:
        rows.append(_row(many(len(more), "more task"), sum((s for _, _, s in more), Spent())))
    activities = list(whole.ns)
    rows += [
        _row("all", whole),
        ["share", "", "", *(_share(ns, whole.total) for ns in whole.ns.values()), ""],
        ["ns a record", "", "", *(f"{whole.per_record(ns):,.0f}" for ns in (*whole.ns.values(), whole.total))],
    ]
    columns = ["task", "slices", "records", *activities, "in all"]
    return [heading("Where the time of tasks went", said), table(columns, rows, right=" ".join([*columns[1:], "in"]))]


def _row(name: str, s: Spent) -> list[str | Text]:
    return [name, count(s.slices), count(s.records), *(f"{ns / 1e9:.3f}" for ns in (*s.ns.values(), s.total))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""
