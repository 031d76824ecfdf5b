"""`sluice check`: whether a window is complete, and its late and repeated records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import bad, facts, good, heading, limit_rows, safe, table, warn
from sluice.cli.terminal.text_layout import count, label_partitions
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import CheckedPartition, WindowCheck
    from sluice.pipelines.operating.event_hours import EventHour
    from sluice.pipelines.status.repeats import Repeats

WindowArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[WINDOW]",
        help="The window's start in UTC, such as 2026-11-20T14.",
        show_default="the newest one that is due",
        autocompletion=completers.complete_windows,
    ),
]
KeyColumns = Annotated[
    str | None, option("--key", "COLUMN[,COLUMN]", "The columns that identify a record.", show_default="the Kafka key")
]


def register(app: typer.Typer) -> None:
    command(app)(check)


def check(
    session: Session,
    feed: FeedName,
    window: WindowArgument = None,
    key: KeyColumns = None,
    event_hour: Annotated[
        str | None,
        option(
            "--event-hour",
            "HOUR",
            "Instead of a window: the windows with records stamped in this hour or on this day (UTC).",
        ),
    ] = None,
    event_time: Annotated[
        str | None, option("--event-time", "COLUMN", "With --event-hour: the time.", show_default="Kafka's timestamp")
    ] = None,
) -> int:
    """Show whether a window is complete, and why it has duplicates.

    It counts landed and quarantined records, late records (stamped in an earlier window), and repeated keys with their
    likely causes, and shows excerpts of quarantined values. It reads the ledger and exactly the window's files. Kafka
    is asked only why a window that is due is not complete. Exit 1 if the window is not complete; 75 if it is not
    closed, a transaction holds it, or a run is active. With --event-hour, exit 1 if a due window from the hour on is
    not complete.

    $ sluice check orders
    $ sluice check orders 2026-11-20T14 --key order_id
    $ sluice check orders 2026-11-20T14 --json | jq .late
    $ sluice check orders --event-hour 2026-11-20T14
    """
    if event_hour:
        if window or key:
            raise UsageError("--event-hour together with a window or --key", remedy="leave one of them out")
        return _check_event_hour(session, feed, event_hour, event_time or "")
    if event_time:
        raise UsageError("--event-time without --event-hour", remedy="add --event-hour 2026-11-20T14")
    from sluice.pipelines.operating.check_window import check_window
    from sluice.reading import find_one

    by = tuple(name.strip() for name in (key or "").split(",") if name.strip())
    definition = session.find_dataset(feed)
    start = None if window is None else find_one(definition, window)
    with session.open_ports(definition) as ports, session.terminal.progress() as meter:
        result = check_window(definition, ports, start, by, meter)
    session.terminal.show(*_view(result))
    session.terminal.print_document(result)
    return result.exit_code


def _check_event_hour(session: Session, feed: str, hour: str, column: str) -> int:
    from sluice.pipelines.operating.event_hours import find_event_hour

    dataset = session.find_dataset(feed)
    with session.open_ports(dataset) as ports, session.terminal.progress() as meter:
        result = find_event_hour(dataset, ports, hour, column, meter)
    session.terminal.show(*_view_event_hour(result))
    session.terminal.print_document(result)
    return result.exit_code


# -- for people


def _view_event_hour(e: EventHour) -> Iterator[RenderableType]:
    yield heading(f"{e.feed} event hour {e.event_hour}", f"by {e.column}")
    yield Text(f"  {many(e.rows, 'row')} in {many(len(e.windows), 'window')}: {e.late:,} late, {e.early:,} early")
    lines = [(w.window or "outside windows", count(w.rows), count(w.quarantined), f"{w.first}") for w in e.windows]
    if lines:
        yield table(("window", "rows", "quarantined", "first record"), lines, right="rows quarantined")
    if e.expired:
        yield warn(f"rows of {many(len(e.expired), 'expired window')} are gone and not counted: {e.expired[0]} …")
    if e.complete_before:
        yield bad(f"window {e.complete_before} is not complete: it may have more of them")
        yield Text.assemble(("  → ", "bold"), f"sluice check {e.feed} {e.complete_before}")
    else:
        yield good("every due window is complete; later ones may bring more late rows")


def _view(c: WindowCheck) -> Iterator[RenderableType]:
    from sluice.pipelines.operating.check_text import describe_refusals, describe_verdict, list_figures, list_reasons

    yield heading(
        f"{c.feed} {c.standing.window}", f"to {c.settings.name(c.settings.end_of(c.standing.start))}, in arrival order"
    )
    kind, verdict = describe_verdict(c)
    yield {"good": good, "warn": warn, "bad": bad}[kind](verdict)
    for reason in list_reasons(c):
        yield Text(f"  {safe(reason.text)}")
        yield Text.assemble(("  → ", "bold"), safe(reason.remedy))
    for text in c.unchecked:
        yield warn(f"not checked in Kafka: {text}")
    yield facts(*list_figures(c))
    for why, records in describe_refusals(c):
        yield Text(f"    {safe(why)}")
        for r in records:
            before, wrong, after = map(safe, r.pieces)
            position = f"      {r.position}  {r.absence}"
            yield Text.assemble((position, "dim"), before, (wrong, "bold red"), after)
    if c.rows:
        yield from _view_copies(c.rows.repeats)
    labels = label_partitions(a.key for a in c.partitions)
    rows = [_build_row(c, a, labels[a.key]) for a in c.partitions[:_PARTITIONS]]
    names = ("partition", "from", "to", "landed", "quarantined", "other", "pending")
    yield table(
        names,
        limit_rows(rows, len(c.partitions)),
        right="from to landed quarantined other pending",
        optional="other quarantined",
    )


def _view_copies(r: Repeats) -> Iterator[RenderableType]:
    from sluice.pipelines.operating.check_text import describe_copies

    for cause, examples in describe_copies(r):
        yield Text(f"    {cause}")
        yield Text(f"      {examples}", style="dim")
    if r.copies:
        first, second = r.copies[0].examples[0]
        yield Text.assemble(("  → ", "bold"), f"sluice peek {first} -n 1; sluice peek {second} -n 1")


_PARTITIONS = 8


def _build_row(c: WindowCheck, a: CheckedPartition, label: str) -> tuple[str, ...]:
    counts = a.account.counts
    numbers = (a.start, a.end, counts.landed, counts.quarantined, a.account.total - counts.records, a.pending)
    return label, *map(count, numbers)
