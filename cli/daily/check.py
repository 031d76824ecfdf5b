"""`sluice check`: whether a window is complete, and its late and repeated records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import window_options
from sluice.cli.terminal.output import bad, facts, heading, limit_rows, safe, table, warn
from sluice.cli.terminal.text_layout import count, label_partitions, size
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.units import many, show_about, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import CheckedPartition, WindowCheck
    from sluice.pipelines.status.repeats import Coordinate, Repeats
    from sluice.pipelines.status.window_rows import Outside, WindowRows

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
    str | None,
    typer.Option(
        "--key",
        metavar="COLUMN[,COLUMN]",
        help="The columns that identify a record.",
        show_default="the Kafka key",
    ),
]


def register(app: typer.Typer) -> None:
    command(app)(check)


def check(session: Session, feed: FeedName, window: WindowArgument = None, key: KeyColumns = None) -> int:
    """Show whether a window is complete, and why it has duplicates.

    It counts landed and quarantined records, late records (stamped in an earlier window), and repeated keys with their
    likely causes. It reads the ledger and exactly the window's files. Kafka is asked only why a window that is due is
    not complete. Exit 1 if the window is not complete; 75 if it is not closed, a transaction holds it, or a run is
    active.

    $ sluice check orders
    $ sluice check orders 2026-11-20T14 --key order_id
    $ sluice check orders 2026-11-20T14 --json | jq .late
    """
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


# -- for people


def _view(c: WindowCheck) -> Iterator[RenderableType]:
    yield heading(
        f"{c.feed} {c.standing.window}", f"to {c.settings.name(c.settings.end_of(c.standing.start))}, in arrival order"
    )
    yield from _list_verdict(c)
    yield facts(*_list_figures(c))
    if c.rows:
        yield from _view_repeats(c.rows)
    if c.rows and c.rows.landed_twice:
        yield bad(f"{many(len(c.rows.landed_twice), 'record')} landed twice, such as {c.rows.landed_twice[0]}")
        yield Text(f"  → sluice audit {c.feed} --all", style="bold")
    yield _view_partitions(c)


def _list_verdict(c: WindowCheck) -> Iterator[Text]:
    name = f"window {c.standing.window}"
    if c.complete:
        yield window_options.describe_complete(c.standing, f": {_count_offsets(c)}")
    else:
        yield warn(f"{name} is {'still open' if c.standing.state is Standing.OPEN else 'not complete'}")
    for reason in c.reasons:
        yield Text(f"  {safe(reason.text)}")
        yield Text.assemble(("  → ", "bold"), safe(reason.remedy))
    for text in c.unchecked:
        yield warn(f"not checked in Kafka: {text}")


def _count_offsets(c: WindowCheck) -> str:
    offsets, partitions = (c.standing.offsets or 0) + c.standing.losses.former, {a.key.tp for a in c.partitions}
    return f"{many(offsets, 'offset')} of {many(len(partitions), 'partition')} accounted for"


def _list_figures(c: WindowCheck) -> Iterator[tuple[str, str | Text]]:
    counts, landed = c.counts, [f for f in c.files if f.kind == "landed"]
    files = {f.path: f for f in landed}
    volume = f", {size(sum(f.bytes for f in landed))} in {many(len(files), 'file')}" if files else ""
    yield "landed", f"{many(counts.landed, 'record')}{volume}"
    yield "quarantined", _describe_quarantine(c)
    others = (
        ("control", counts.control),
        ("aborted", counts.aborted),
        ("compacted away", counts.compacted),
        ("dropped", counts.dropped),
        ("erased", counts.erased),
        ("lost", c.account.lost),
        ("skipped", c.account.skipped),
    )
    yield "not landed", ", ".join(f"{count(n)} {name}" for name, n in others if n) or "nothing else"
    if not c.rows:
        yield "late, copies", "unknown: a file is missing or damaged"
        return
    if c.rows.earliest and c.rows.latest:
        yield "timestamps", f"{_show_coordinate(c.rows.earliest)} to {_show_coordinate(c.rows.latest)}"
    if c.rows.untimed:
        yield "no timestamp", many(c.rows.untimed, "record")
    yield "late", _describe_outside(c, c.rows.late, "stamped in an earlier window", "before this one")
    if c.rows.early.records:
        yield "early", _describe_outside(c, c.rows.early, "stamped in a later window", "after this one")
    if c.clocks:
        yield "clocks", c.clocks
    if c.protection:
        yield "protection", c.protection


def _describe_quarantine(c: WindowCheck) -> str:
    if not c.counts.quarantined:
        return "none"
    records: Counter[str] = Counter()
    for group in c.reasons_of_quarantine:
        records[str(group.kind)] += group.records
    kinds = "; ".join(f"{count(n)} {kind}" for kind, n in records.most_common(_NAMED))
    more = f"; {many(len(records) - _NAMED, 'more reason')}" if len(records) > _NAMED else ""
    return f"{many(c.counts.quarantined, 'record')}: {kinds}{more}\nsluice quarantine list {c.feed}"


_NAMED = 3


def _show_coordinate(coordinate: Coordinate) -> str:
    return f"{'–' if coordinate.timestamp is None else show_instant(coordinate.timestamp)} ({coordinate})"


def _describe_outside(c: WindowCheck, o: Outside, stamped: str, side: str) -> str:
    if not o.records:
        return "none"
    hours = ", ".join(f"{w}: {count(n)}" for w, n in [*o.windows.items()][:_NAMED])
    more = ", …" if len(o.windows) > _NAMED else ""
    furthest, median = (show_about(round(1000 * s)) for s in (o.furthest_seconds, o.median_seconds))
    distance = f"up to {furthest} {side} ({o.furthest}), the median is {median}"
    return f"{many(o.records, 'record')} {stamped} ({hours}{more})\n{distance}"


def _view_repeats(rows: WindowRows) -> Iterator[RenderableType]:
    r = rows.repeats
    if not r.records:
        return
    about = "" if r.exact else "about "
    by = ", ".join(r.by) or "the Kafka key"
    yield facts(
        ("keys", _describe_keys(r, about, by)),
        ("updates", _describe_updates(r, about)),
        ("copies", _describe_copies(r, about)),
        *(() if rows.landed_twice else [("landed twice", "never: no offset is in two rows")]),
    )
    for copies in r.copies:
        yield Text(f"    {about}{count(copies.records)} likely: {copies.cause.text}")
        examples = ", ".join(f"{a} = {b}" for a, b in copies.examples)
        yield Text(f"      {examples}", style="dim")
    if r.copies:
        first, second = r.copies[0].examples[0]
        yield Text.assemble(("  → ", "bold"), f"sluice peek {first} -n 1; sluice peek {second} -n 1")


def _describe_keys(r: Repeats, about: str, by: str) -> str:
    keyless = f"; {many(r.records - r.keyed, 'record')} without one" if r.keyed < r.records else ""
    sampled = "" if r.exact else " (a sample of the keys)"
    return f"{about}{count(r.keys)} different by {by} in {many(r.keyed, 'record')}{keyless}{sampled}"


def _describe_updates(r: Repeats, about: str) -> str:
    if not r.updates:
        return "none: no key has two values"
    example = f", such as {r.update[0]} and {r.update[1]}" if r.update else ""
    return f"{about}{count(r.updates)}: further values of a key, no duplicates{example}"


def _describe_copies(r: Repeats, about: str) -> str:
    if not r.copied:
        return "none: no record has key and value of another"
    return f"{about}{many(r.copied, 'record')} with key and value of an earlier one"


def _view_partitions(c: WindowCheck) -> RenderableType:
    labels = label_partitions(a.key for a in c.partitions)
    rows = [_build_row(c, a, labels[a.key]) for a in c.partitions[:_PARTITIONS]]
    names = ("partition", "from", "to", "landed", "quarantined", "other", "pending")
    return table(
        names,
        limit_rows(rows, len(c.partitions)),
        right="from to landed quarantined other pending",
        optional="other quarantined",
    )


_PARTITIONS = 8


def _build_row(c: WindowCheck, a: CheckedPartition, label: str) -> tuple[str, ...]:
    counts = a.account.counts
    numbers = (a.start, a.end, counts.landed, counts.quarantined, a.account.total - counts.records, a.pending)
    return label, *map(count, numbers)
