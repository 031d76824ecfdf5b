"""Where the time of a run went: its stages, as whoever started it waited for them, its tasks by activity, and what
brokers took to answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.terminal.number_format import count, seconds, size
from sluice.cli.terminal.output import heading, table
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.traffic import SHARES, BrokerTraffic, Traffic, all_brokers, bound_us
from sluice.pipelines.status.broker_traffic import TopicTraffic, by_topic
from sluice.pipelines.status.timings import Spent, by_task, sum_times
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.batch.result import BatchResult

_TASKS_SHOWN = 20
_BROKERS_SHOWN = 20
_TOPICS_SHOWN = 20


def view(batches: Sequence[BatchResult], stages: Mapping[str, float]) -> list[RenderableType]:
    """For people. `stages` are seconds, in order."""
    return [*_stages(stages), *_tasks(batches, stages), *_brokers(batches), *_topics(batches)]


def document(batches: Sequence[BatchResult]) -> dict[str, Any]:
    """For programs: nanoseconds by task and activity, of all tasks, and for each record; what was asked of brokers."""
    whole = sum_times(r for b in batches for r in b.receipts)
    return {
        "tasks": [
            {"batch": b.batch, "task": t.index, "leader": t.leader} | _amounts(s) for b, t, s in _by_task(batches)
        ],
        **_amounts(whole),
        "ns_per_record": {a: round(whole.per_record(ns), 1) for a, ns in whole.ns.items()},
        "brokers": [_broker_document(b) for b in traffic(batches).brokers],
        "topics": [asdict(t) for t in _by_topic(batches)],
    }


def traffic(batches: Iterable[BatchResult]) -> Traffic:
    """What all of them asked of brokers."""
    return sum((b.traffic for b in batches), Traffic())


def _by_topic(batches: Sequence[BatchResult]) -> tuple[TopicTraffic, ...]:
    return by_topic((r for b in batches for r in b.receipts), traffic(batches))


def _broker_document(b: BrokerTraffic) -> dict[str, Any]:
    said = asdict(b)
    del said["latency"]
    shares = {name: round(b.latency.percentile_ms(share), 3) for name, share in SHARES.items()}
    latency = shares | {"max": b.latency.max_us / 1e3, "total": b.latency.total_us / 1e3, "answers": b.latency.count}
    buckets = [{"below_ms": bound_us(i) / 1e3, "answers": n} for i, n in sorted(b.latency.counts.items())]
    return said | {"latency_ms": latency, "latency_buckets": buckets}


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
    ran, whole = list(_by_task(batches)), sum_times(r for b in batches for r in b.receipts)
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


def _brokers(batches: Sequence[BatchResult]) -> list[RenderableType]:
    found = traffic(batches).brokers
    if not found:
        return []
    rows = [_broker_row(f"{b.node} {b.address}".strip(), b) for b in found[:_BROKERS_SHOWN]]
    if more := found[_BROKERS_SHOWN:]:
        rows.append(_broker_row(many(len(more), "more broker"), all_brokers(more)))
    if len(found) > 1:
        rows.append(_broker_row("all", all_brokers(found)))
    columns = ["broker", "fetches", "size", *SHARES, "waiting", "held", "throttled", "moved", "errors"]
    said = "p50, p95, p99 of answers in ms; waiting for them, held by our own side, throttled: in seconds"
    shown_last = "errors size p95 held moved"
    return [heading("What brokers were asked", said), table(columns, rows, " ".join(columns[1:]), shown_last)]


def _broker_row(name: str, b: BrokerTraffic) -> list[str | Text]:
    return [
        name,
        count(b.requests),
        size(b.bytes),
        *(_ms(b.latency.percentile_ms(share)) for share in SHARES.values()),
        f"{b.latency.total_us / 1e6:.2f}",
        f"{b.held_us / 1e6:.2f}",
        f"{b.throttle_ms / 1e3:.2f}",
        count(b.moved),
        count(sum(b.errors.values())),
    ]


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms < 10 else f"{ms:,.0f}"


def _topics(batches: Sequence[BatchResult]) -> list[RenderableType]:
    found = _by_topic(batches)
    rows = [[t.topic, count(t.records), size(t.bytes), count(t.behind)] for t in found[:_TOPICS_SHOWN]]
    if more := found[_TOPICS_SHOWN:]:
        rows.append([many(len(more), "more topic"), count(sum(t.records for t in more)), "", ""])
    columns = ["topic", "records", "size", "behind"]
    said = "behind: offsets from the end of what was read to the end of the log"
    return [heading("What was read", said), table(columns, rows, right=" ".join(columns[1:]))] if rows else []


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""
