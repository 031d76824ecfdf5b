"""`sluice status`: the progress of each feed, in its ledger, in its group and in Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag, option
from sluice.cli.shared import other_batches, window_text
from sluice.cli.shared import outlook_text as outlooks
from sluice.cli.terminal.output import bad, facts, format_error, good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, label_partitions
from sluice.pipelines.errors import (
    choose_exit_code,
)
from sluice.pipelines.model.receipts import Life, Scheduler, describe_run, find_scheduler
from sluice.pipelines.operating.feed_status import FeedStatus, list_ledgers_without_files, read_status, try_read_status
from sluice.pipelines.status.window_state import Standing, describe_pending
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import join_first, many, show_about, show_instant

if TYPE_CHECKING:
    from sluice.cli.terminal.output import CommandOutput
    from sluice.pipelines.operating.findings import Finding
    from sluice.pipelines.status.window_state import WindowStanding


def register(app: typer.Typer) -> None:
    command(app)(status)


def status(
    session: Session,
    feed: Annotated[
        str | None,
        typer.Argument(
            metavar="FEED",
            help="Show this feed, by partition.",
            show_default=False,
            autocompletion=completers.complete_feeds,
        ),
    ] = None,
    last: Annotated[
        int, option("--last", "N", "Number of windows to show.", min=1, max=10_000, show_default=True)
    ] = 24,
    everything: Annotated[bool, flag("--all", "List all feeds, also those that do not fit the screen.")] = False,
) -> int:
    """Show the progress of the feeds, those with problems first.

    For each feed: findings with their remedies, frontier, committed offsets, lag in offsets and time, rates,
    the estimated time to catch up, live batches and their owners, and the newest windows as a strip. With FEED, also
    by partition.

    $ sluice status
    $ sluice status orders --last 168
    $ sluice status orders --json
    """
    feeds = {feed: session.feed(feed)} if feed else dict(session.files.feeds)
    with session.terminal.working("reading ledgers, asking Kafka"):
        # Feeds share their connections, and are read in parallel: one without an answer does not delay the others.
        if feed:
            statuses = [read_status(session.open_ports, feeds[feed], last)]
        else:
            with session.share_ports(feeds.values()) as open_ports:
                statuses = map_parallel(lambda f: try_read_status(open_ports, f, last), list(feeds.values()), _PATIENCE)
        others = {} if feed else _without_files(session)
    broken = {} if feed else session.files.broken
    screen = session.terminal
    views = (
        _format_detail(statuses[0], screen)
        if feed
        else _format_overview(statuses, screen, len(session.files.retired), everything=everything)
    )
    screen.show(
        *views,
        *(line for e in broken.values() for line in format_error(e)),
        *(warn(f"ledgers without a feed file in {lake}: {', '.join(names)}") for lake, names in others.items()),
    )
    session.terminal.print_document(feeds=statuses, broken=[*broken.values()], ledgers_without_files=others)
    return choose_exit_code(e for e in (*broken.values(), *(f.error for f in statuses)) if e)


def _without_files(session: Session) -> dict[str, list[str]]:
    """By lake, its ledgers that no feed file of the project is of. A lake that does not answer has none."""
    from sluice.resources.lake import open_lake

    names = {*(f.stored for f in session.files.every.values()), *(path.stem for path in session.files.broken)}
    return list_ledgers_without_files(open_lake, session.files.feeds.values(), names)


# -- for people


def _format_overview(
    statuses: list[FeedStatus], terminal: CommandOutput, retired: int, *, everything: bool = False
) -> list[RenderableType]:
    """Returns the findings by kind, then a row for each feed, worst first.

    What does not fit the screen is counted, healthy feeds first, unless `everything` is requested.
    """
    if not statuses:
        return [Text(f"no feeds but {many(retired, 'retired one')}: sluice feeds list" if retired else "no feeds")]
    findings = list(_list_kinds(statuses, terminal))
    ordered = sorted(statuses, key=lambda f: (-sum(x.severe for x in f.findings), -len(f.findings), f.feed))
    room = len(ordered) if everything else max(_FEWEST, terminal.height - len(findings) - _AROUND)
    names = ("feed", "windows", "lag", "behind", "uncommitted", "last batch", "")
    wide = terminal.width >= _WIDE
    has_last, length = terminal.width >= _NARROW, _strip_length(terminal)
    selected = [True] * 4 + [wide or any(f.uncommitted for f in statuses), has_last, True]
    rows = [[c for c, keep in zip(_build_row(f, terminal), selected, strict=True) if keep] for f in ordered[:room]]
    columns = [n for n, keep in zip(names, selected, strict=True) if keep]
    every = [w for f in ordered[:room] for w in f.windows[-length:]]
    legend = [Text(), window_text.legend(every, fancy=terminal.fancy)] if every else []
    return [
        *findings,
        table(columns, rows, right="lag behind uncommitted", optional="uncommitted last"),
        *(_count_others(ordered[room:])),
        *legend,
    ]


_PATIENCE = 0.05
"""Seconds: a quick feed, in a lake on a local disk, takes half of it on a busy machine."""
_NARROW, _WIDE = 80, 120
"""The widths from which on the overview has a column for the last batch, and more in it."""
_FEWEST, _AROUND = 3, 7
"""The feeds that the overview shows at least, and the lines around them and the findings."""
_NAMED = 3
"""How many further feeds with the same kind of finding are named."""


def _strip_length(terminal: CommandOutput) -> int:
    """Returns the number of windows of each feed in the overview."""
    return 24 if terminal.width >= _NARROW else 12


def _count_others(others: Sequence[FeedStatus]) -> Iterator[Text]:
    if others:
        troubled = sum(bool(f.findings) for f in others)
        healthy = [many(len(others) - troubled, "healthy feed")] if len(others) > troubled else []
        more = [f"{many(troubled, 'more feed')} with findings"] if troubled else []
        yield Text(f"  {' and '.join([*more, *healthy])}: sluice status --all lists them", style="dim")


def _build_row(f: FeedStatus, terminal: CommandOutput) -> tuple[str | Text, ...]:
    age = f.outlook.age if f.outlook else None
    strip = window_text.strip(f.windows[-_strip_length(terminal) :], fancy=terminal.fancy)
    last = _format_batch(f, brief=terminal.width < _WIDE)
    return f.feed, strip, count(f.lag), outlooks.short(age), count(f.uncommitted), last, _state(f)


def _list_kinds(statuses: list[FeedStatus], terminal: CommandOutput) -> Iterator[Text]:
    """Yields one finding of each kind with its remedy, severe kinds first, and the other feeds that have it."""
    kinds: dict[str, list[tuple[str, Finding]]] = {}
    for severe in (True, False):
        for f in statuses:
            for finding in (x for x in f.findings if x.severe is severe):
                kinds.setdefault(finding.kind, []).append((f.feed, finding))
    full = [list(_format_kind(findings, terminal.width, brief=False)) for findings in kinds.values()]
    if sum(-(-len(line) // terminal.width) for lines in full for line in lines) <= terminal.height // 2:
        yield from (line for lines in full for line in lines)
    else:
        room = max(_FEWEST, terminal.height - _AROUND - _FEWEST - 2)
        for findings in list(kinds.values())[:room]:
            yield from _format_kind(findings, terminal.width, brief=True)
        more = f"{many(len(kinds) - room, 'more kind')} of findings; " if len(kinds) > room else ""
        yield Text(f"  {more}→ the remedies: sluice status {next(iter(kinds.values()))[0][0]}", style="dim")
    yield from [Text()] if kinds else []


def _format_kind(findings: Sequence[tuple[str, Finding]], width: int, *, brief: bool) -> Iterator[Text]:
    """Yields the first finding of a kind, and the other feeds that have one. If `brief`: one line, without remedy."""
    feed, first = findings[0]
    others = [name for name in dict.fromkeys(name for name, _ in findings) if name != feed]
    names = f"{', '.join(others[:_NAMED])}{' …' if len(others) > _NAMED else ''}"
    more = f" (also {names}: {len(others)})" if others else ""
    text, remedy = first.text.splitlines()[0], first.remedy.splitlines()[0]
    if brief:
        text, remedy = f"{LABELS.get(first.kind, first.kind)}{more}: {text}", ""
    else:
        text += more
    lines = list(outlooks.show_problem(text, remedy, severe=first.severe, where=f"{feed}: "))[: 1 if brief else 2]
    lines[0].truncate(width if brief else 2 * width, overflow="ellipsis")
    yield from lines


LABELS = {
    "lost": "lost records",
    "retention": "at risk",
    "refused": "batch refused",
    "failed": "records failed",
    "commit": "commits refused",
    "files": "files damaged",
    "changed": "topic changed",
    "absent": "partition gone",
    "topics": "topic missing",
    "cluster": "another cluster",
    "ledger": "lost entries",
    "group": "foreign group",
    "quarantine": "mostly quarantined",
    "transaction": "held back",
    "unfinished": "left by a dead run",
    "lag": "late",
    "partial": "partial",
}
"""The words for each kind of finding that is a feed's state."""


def _state(status: FeedStatus) -> Text:
    outlook = status.outlook
    worst = next((f for f in status.findings if f.severe or f.kind in LABELS), None)
    if status.live and not (worst and (worst.severe or worst.kind == "unfinished")):
        lives = [m.verdict.life for m in status.met.values()]
        if alive := lives.count(Life.ALIVE):
            return Text(f"{many(alive, 'batch', 'batches')} at work", style="cyan")
        return warn("by a run that may be dead")
    if worst:
        return (bad if worst.severe else warn)(LABELS.get(worst.kind, worst.kind))
    if status.error:
        return warn(status.error.message.splitlines()[0])
    if status.last_batch is None:
        return Text("nothing landed yet", style="dim")
    if outlook and outlook.falls_behind:
        return warn("falling behind")
    if outlook and outlook.lag and outlook.eta is not None:
        return Text(f"{show_about(outlook.eta)} to land")
    if status.held_back:
        return warn(f"{count(sum(h.offsets for h in status.held_back))} held back")
    return good("caught up") if status.lag == 0 else Text("")


def _format_batch(status: FeedStatus, *, brief: bool = False) -> str:
    batch = status.last_batch
    if batch is None:
        return "–"
    landed = many(batch.rows, "row") if batch.published is not None else str(batch.status)
    if brief:
        return f"{batch.id}, {landed}"
    scheduler = find_scheduler(batch.owner.run)
    by = "" if scheduler is Scheduler.DAGSTER else f", {describe_run(batch.owner.run)}"
    return f"{batch.id}, {landed}, {show_instant(batch.planned_at // 1000 * 1000)}{by}"


def _format_detail(status: FeedStatus, terminal: CommandOutput) -> list[RenderableType]:
    labels = label_partitions(p.key for p in status.partitions)
    rows = [
        (
            *(
                labels[p.key],
                count(p.origin),
                count(p.frontier),
                count(p.committed),
                count(p.last_stable_offset),
                count(p.lag),
            ),
            outlooks.short(p.age) if p.lag else "",
            "; ".join(
                filter(
                    None,
                    (_format_above(p.landed_above_frontier), f"{count(p.unstable)} not stable" if p.unstable else ""),
                )
            ),
        )
        for p in status.partitions
    ]
    names = ("partition", "origin", "frontier", "committed", "last stable", "lag", "behind", "")
    outlook = status.outlook
    age, unstable = outlook.age if outlook else None, sum(p.unstable for p in status.partitions)
    out: list[RenderableType] = [heading(status.feed, outlooks.behind(status.lag, age, unstable))]
    # Overdue transactions are among the findings.
    young = [h for h in status.held_back if not h.overdue]
    problems = [
        *(line for f in status.findings for line in outlooks.show_problem(f.text, f.remedy, severe=f.severe)),
        *(line for h in young for line in outlooks.show_problem(h.message, h.remedy)),
    ]
    out += [*problems, Text()] if problems else []
    out += [
        table(names, limit_rows(rows), right="origin frontier committed last lag behind", optional="origin"),
        facts(
            *(outlooks.pace(outlook) if outlook else ()),
            ("last batch", _format_batch(status)),
            *([("engine", str(status.engine))] if status.engine else []),
            *(("live batch", str(m)) for m in status.met.values() if m.verdict.life is Life.ALIVE),
            *(outlooks.list_expiries(outlook) if outlook else ()),
            *(("on hold", f"{h}; see sluice hold {status.feed}") for h in status.holds),
        ),
        *other_batches.view(m for m in status.met.values() if m.verdict.life is Life.UNKNOWN),
    ]
    if status.windows:
        out += _format_windows(status, terminal)
    if status.start_not_used:
        out.append(warn(status.start_not_used))
    return out


def _format_above(ranges: tuple[tuple[int, int], ...]) -> str:
    """The first few ranges that have landed beyond the frontier."""
    return f"and {join_first((f'[{a}, {b})' for a, b in ranges), 3, ', {:,} more')}" if ranges else ""


def _format_windows(status: FeedStatus, terminal: CommandOutput) -> list[RenderableType]:
    """The strip, and a line for each of the newest windows that wait for something."""
    waiting = [w for w in status.windows if w.state not in _NO_WORD]
    return [
        heading("Windows", window_text.title(status.settings, status.windows)),
        *window_text.calendar(status.windows, status.settings, fancy=terminal.fancy, width=terminal.width),
        *(Text("  ") + _format_standing(status, w) for w in waiting[-_TOLD:]),
    ]


_NO_WORD = (Standing.LANDED, Standing.RETIRED, Standing.OPEN, Standing.PENDING)
"""States that a sign in the strip says everything about."""


def _format_standing(status: FeedStatus, w: WindowStanding) -> Text:
    if w.state is Standing.FAILED and w.batch in status.refused:
        return bad(f"window {w.window}: refused batch {w.batch}; {describe_pending(w.pending)}")
    line = window_text.verdict(w)
    if w.state in (Standing.PARTIAL, Standing.FROM_ORIGIN):
        line.append(f"\n    → to complete it: sluice run {status.feed} --window {w.window}", style="default")
    return line


_TOLD = 5
"""How many windows get a line of their own."""
