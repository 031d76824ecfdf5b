"""`sluice plan`: shows the plan of a run. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import window_options
from sluice.cli.options.request_options import WorkOptions
from sluice.cli.shared import other_batches
from sluice.cli.shared import outlook_text as outlooks
from sluice.cli.terminal.output import format_error, good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.errors import SluiceError, choose_exit_code
from sluice.pipelines.model.plans import SEVERAL, Assignor, Plan, Request
from sluice.pipelines.model.receipts import Fate, Met
from sluice.pipelines.util.documents import AsText, Flat
from sluice.pipelines.util.units import join_first, many, show_window

if TYPE_CHECKING:
    from sluice.pipelines.batch.preview import Preview, PreviewedPartition
    from sluice.pipelines.planning.assignment import Comparison

Compare = Annotated[bool, typer.Option("--compare", help="Compare the tasks of each `fetch.assignor`.")]


def register(app: typer.Typer) -> None:
    command(app)(plan)


def plan(session: Session, feed: FeedName, options: WorkOptions, compare: Compare = False) -> int:
    """Preview a run: offsets, tasks and brokers.

    This is a dry run: it writes nothing. Its exit code is that of the run: 3 if a partition is refused, 75 if an open
    transaction holds a window, or another run is at work on it.

    $ sluice plan orders
    $ sluice plan orders --window 2026-11-20T14
    $ sluice plan orders --offsets orders:0:100-200 --offsets orders:1:0-50
    $ sluice plan orders --compare
    """
    from sluice.pipelines.batch import preview as previews

    definition = session.feed(feed)
    typed = options.requests(session, definition)
    requests = typed.requests
    with session.terminal.working("querying Kafka"), session.open_ports(definition) as ports:
        # Several requests are several runs, each planned as if it were the next one.
        previewed = [previews.preview(definition, ports, request) for request in requests]
        compared = [previews.compare(definition, ports, request) if compare else () for request in previewed]
    if options.windows.start or len(requests) != 1:
        session.terminal.show(*(_format_briefly(feed, requests, previewed) if requests else []))
        plans = [PlanResult(feed, *planned) for planned in zip(requests, previewed, compared, strict=True)]
        session.terminal.print_document(feed=feed, plans=plans, open_windows=typed.open_windows)
    else:
        session.terminal.show(
            *view(previewed[0], feed, requests[0]), *_format_comparison(compared[0], definition.fetch.assignor)
        )
        session.terminal.print_document(
            PlanResult(feed, requests[0], previewed[0], compared[0]), open_windows=typed.open_windows
        )
    session.terminal.show(*window_options.open_window_lines(feed, typed.open_windows))
    return choose_exit_code(e for request in previewed for e in problems(request))


@dataclass(frozen=True, slots=True)
class PlanResult:
    feed: str
    request: AsText[Request]
    preview: Flat[Preview]
    assignors: tuple[Comparison, ...]


def problems(preview: Preview) -> list[SluiceError]:
    """Why the run would not land all that was asked for."""
    return [r.error for r in preview.refusals] + ([preview.blocked] if preview.blocked else [])


def view(preview: Preview, feed: str, request: Request) -> list[RenderableType]:
    out = [heading(f"Plan of {feed}", f"{request}, cluster {preview.survey.cluster_id}"), _format_partitions(preview)]
    if preview.plan is not None:
        out += _format_work(preview.plan)
    out += other_batches.view(preview.other_batches, dry_run=True)
    out += [warn(note) for note in (preview.start_not_used, preview.protection) if note]
    out += [Text(f"boundaries: {many(reads, 'read')} of logs", "dim")] if (reads := preview.boundary_reads) else []
    out += [line for error in problems(preview) for line in format_error(error)]
    return [
        *out,
        *_format_verdict(preview),
        *(line for h in preview.held_back for line in outlooks.show_problem(h.message, h.remedy)),
    ]


def _format_briefly(feed: str, requests: Sequence[Request], plans: Sequence[Preview]) -> list[RenderableType]:
    """Several windows, a line each."""
    rows = []
    for request, preview in zip(requests, plans, strict=True):
        plan, wrong = preview.plan, problems(preview)
        problem = wrong[0].message + (f" … and {len(wrong) - 1} more" if len(wrong) > 1 else "") if wrong else ""
        amount = (count(plan.offsets), size(plan.estimated_bytes), str(len(plan.tasks))) if plan else ("0", "–", "0")
        until = f" to {show_window(request.until)}" if request.until else ""
        rows.append((show_window(request.window or 0) + until, *amount, problem))
    names = ("window", "pending", "about", "tasks", "")
    out: list[RenderableType] = [heading(f"Plan of {feed}", f"{many(len(requests), 'run')}, in sequence")]
    out.append(table(names, limit_rows(rows), right="pending about tasks"))
    # A dead run's batch stands in the preview of each run: the one that would deal with it names it.
    by_batch: dict[int, Met] = {}
    for other in (m for s in plans for m in s.other_batches):
        if other.fate is not Fate.LEFT or other.batch not in by_batch:
            by_batch[other.batch] = other
    return [*out, *other_batches.view(list(by_batch.values()), dry_run=True)]


def _format_partitions(preview: Preview) -> RenderableType:
    rows = [
        (
            str(p.state.tp),
            str(p.state.leader),
            count(p.state.log_start),
            count(p.position),
            count(p.state.last_stable_offset),
            count(sum(r.span for r in p.pending)),
            _format_notes(p),
        )
        for p in preview.partitions
    ]
    names = ("partition", "leader", "log start", "position", "last stable", "pending", "")
    return table(names, limit_rows(rows), right="leader log position last pending", optional="leader log")


def _format_notes(p: PreviewedPartition) -> str:
    unstable = p.state.high_watermark - p.state.last_stable_offset
    notes = [p.origin.why] if p.origin and p.origin.new else []
    notes += [f"{count(unstable)} not stable yet"] if unstable else []
    return ", ".join([*notes, *(f"lost {r}" for r in p.lost)])


def _format_work(plan: Plan) -> list[RenderableType]:
    rows = [
        (
            str(t.index),
            "several" if t.leader == SEVERAL else str(t.leader),
            str(len(t.offset_ranges)),
            count(sum(s.span for s in t.offset_ranges)),
            size(t.estimated_bytes),
            join_first((f"{s.tp} {s.range}" for s in t.offset_ranges), 3, " … {:,} more"),
        )
        for t in plan.tasks
    ]
    names = ("task", "leader", "ranges", "offsets", "about", "reads")
    note = f"{many(plan.offsets, 'offset')}, about {size(plan.estimated_bytes)}, plan {plan.hash[:12]}"
    note += f", replacing {many(len(plan.replaces), 'file')}" if plan.request.replace else ""
    return [
        heading("Tasks", note),
        table(names, limit_rows(rows), right="task leader ranges offsets about"),
    ]


def _format_comparison(compared: Sequence[Comparison], own: Assignor) -> list[RenderableType]:
    if not compared:
        return []
    rows = [
        (
            str(c.assignor),
            str(c.tasks),
            size(c.largest),
            f"{c.balance:.2f}×",
            str(c.leaders),
            "–" if c.moved is None else count(c.moved),
            "←" if c.assignor is own else "",
        )
        for c in compared
    ]
    names = ("assignor", "tasks", "largest", "balance", "leaders", "moved", "")
    note = "balance: largest task / mean task; leaders: maximum per task; moved: offset ranges, since the last batch"
    return [heading("Assignors", note), table(names, rows, right="tasks largest balance leaders moved")]


def _format_verdict(preview: Preview) -> list[RenderableType]:
    if problems(preview):
        return (
            [warn(f"a run would land the rest and stop with exit code {choose_exit_code(problems(preview))}")]
            if preview.plan and not preview.blocked
            else []
        )
    if preview.plan is not None:
        return []
    if preview.other_batches:
        return [good("nothing else is pending")]
    return [good(f"nothing {'stable ' if preview.held_back else ''}is pending: a run would land nothing")]
