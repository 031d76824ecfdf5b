"""`sluice status`: the progress of each feed, in its ledger, in its group and in Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.options import window_options
from sluice.cli.shared import other_batches
from sluice.cli.shared import outlook_text as outlooks
from sluice.cli.terminal.output import bad, facts, format_error, good, heading, limit_rows, safe, table, warn
from sluice.cli.terminal.text_layout import count, label_partitions
from sluice.pipelines.errors import (
    BatchRefused,
    ContractBroken,
    QuarantineExceeded,
    SchemaDrifted,
    SluiceError,
    choose_exit_code,
)
from sluice.pipelines.model.receipts import Life, Met, Scheduler, describe_run, find_scheduler
from sluice.pipelines.operating.feed_status import FeedStatus, read_status, try_read_status
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.documents import document_of
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import many, show_about, show_duration, show_instant, show_window

if TYPE_CHECKING:
    from sluice.cli.terminal.output import CommandOutput
    from sluice.pipelines.ledger import Batch
    from sluice.pipelines.planning.held_back import HeldBack
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
        int, typer.Option("--last", metavar="N", min=1, max=10_000, help="Number of windows to show.")
    ] = 24,
) -> int:
    """Show the progress of the feeds.

    For each feed: records at risk of deletion by Kafka, frontier, committed offsets, lag in offsets and time, rates,
    the estimated time to catch up, live batches and their owners, and the newest windows as a strip. With FEED, also
    by partition.

    $ sluice status
    $ sluice status orders --last 168
    $ sluice status orders --json
    """
    feeds = {feed: session.feed(feed)} if feed else dict(session.files.feeds)
    with session.terminal.working("reading ledgers, asking Kafka"):
        if feed:
            statuses = [read_status(session.open_ports, feeds[feed], last)]
        else:
            with session.shared_edges(feeds.values()) as open_ports:
                statuses = map_parallel(lambda f: try_read_status(open_ports, f, last), list(feeds.values()), _PATIENCE)
        others = {} if feed else _without_files(session)
    broken = {} if feed else session.files.broken
    session.terminal.show(
        *(_format_detail(statuses[0], session.terminal) if feed else _format_overview(statuses, session.terminal)),
        *(line for e in broken.values() for line in format_error(e)),
        *(warn(f"ledgers without a feed file in {lake}: {', '.join(names)}") for lake, names in others.items()),
    )
    session.terminal.print_document(
        {
            "feeds": [build_document(f) for f in statuses],
            "broken": [e.fields() for e in broken.values()],
            "ledgers_without_files": others,
        }
    )
    return choose_exit_code(e for e in (*broken.values(), *(f.error for f in statuses)) if e)


def _without_files(session: Session) -> dict[str, list[str]]:
    """By lake, its ledgers that no feed file of the project is of. A lake that does not answer has none."""
    from sluice.pipelines.ledger.log import list_feeds_without_files
    from sluice.resources.lake import open_lake

    names = {*session.files.feeds, *(path.stem for path in session.files.broken)}
    out = dict[str, list[str]]()
    for feed in {f.lake: f for f in session.files.feeds.values()}.values():
        with suppress(SluiceError):
            out[str(feed.lake)] = list_feeds_without_files(open_lake(feed), names)
    return {lake: others for lake, others in out.items() if others}


# -- for people


def _format_overview(statuses: list[FeedStatus], terminal: CommandOutput) -> list[RenderableType]:
    if not statuses:
        return [Text("no feeds")]
    names = ("feed", "windows", "lag", "behind", "uncommitted", "last batch", "")
    wide = terminal.width >= _WIDE
    selected = [True] * 4 + [wide or any(f.uncommitted for f in statuses)] + [True] * 2
    rows = [[c for c, keep in zip(_build_row(f, terminal), selected, strict=True) if keep] for f in statuses]
    columns = [n for n, keep in zip(names, selected, strict=True) if keep]
    every = [w for f in statuses for w in f.windows[-_STRIP:]]
    legend = [Text(), window_options.legend(every, fancy=terminal.fancy)] if every else []
    return [
        *_list_alarms(statuses),
        table(columns, rows, right="lag behind uncommitted", optional="uncommitted last"),
        *legend,
    ]


_PATIENCE = 0.05
"""Seconds: a quick feed, in a lake on a local disk, takes half of it on a busy machine."""
_STRIP = 24
"""Windows of each feed in the overview."""
_WIDE = 120
"""The width from which on the overview says more about the last batch."""


def _build_row(f: FeedStatus, terminal: CommandOutput) -> tuple[str | Text, ...]:
    age = f.outlook.age if f.outlook else None
    strip = window_options.strip(f.windows[-_STRIP:], fancy=terminal.fancy)
    last = _format_batch(f.last, brief=terminal.width < _WIDE)
    return f.feed, strip, count(f.lag), outlooks.short(age), count(f.uncommitted), last, _state(f)


def _list_alarms(statuses: list[FeedStatus]) -> Iterator[Text]:
    """The worst finding of each feed in trouble; beyond a limit, only their number."""
    troubled = [
        (f.feed, alarms) for f in statuses if (alarms := _list_feed_alarms(f, [h for h in f.held if h.overdue]))
    ]
    troubled.sort(key=lambda t: t[1][0].colour != "red")
    for feed, alarms in troubled[:_TROUBLED]:
        yield from alarms[0].lines(1, f"{feed}: ")
    if len(troubled) > _TROUBLED:
        yield Text(f"  {many(len(troubled) - _TROUBLED, 'feed')} more in trouble", style="dim")
    yield from [Text()] if troubled else []


_TROUBLED = 8
"""How many feeds the overview gives lines to."""


def _list_feed_alarms(f: FeedStatus, held_back: Sequence[HeldBack]) -> list[outlooks.Alarm]:
    return [*outlooks.alarms(f.feed, f.outlook, f.losses, held_back)] if f.outlook else []


def _state(status: FeedStatus) -> Text:
    outlook = status.outlook
    if status.error:
        return warn(status.error.message.splitlines()[0])
    if outlook and (status.losses or outlook.at_risk):
        return bad("lost records") if status.losses else warn("at risk")
    if status.refused:
        return bad(f"refused: {_BY[type(next(iter(status.refused.values())))]}")
    if any(h.overdue for h in status.held):
        return warn("held back")
    if status.live:
        return _format_living(status)
    if status.last is None:
        return Text("nothing landed yet", style="dim")
    if outlook and outlook.falls_behind:
        return warn("falling behind")
    if outlook and outlook.lag and outlook.eta is not None:
        return Text(f"{show_about(outlook.eta)} to land")
    if status.held:
        return warn(f"{count(sum(h.offsets for h in status.held))} held back")
    return good("caught up") if status.lag == 0 else Text("")


def _format_living(status: FeedStatus) -> Text:
    lives = [m.verdict.life for m in status.met.values()]
    if alive := lives.count(Life.ALIVE):
        return Text(f"{many(alive, 'batch', 'batches')} at work", style="cyan")
    return warn("left by a dead run" if Life.DEAD in lives else "by a run that may be dead")


_BY = {QuarantineExceeded: "quarantine limit", ContractBroken: "contract", SchemaDrifted: "drift"}


def _format_batch(batch: Batch | None, *, brief: bool = False) -> str:
    if batch is None:
        return "–"
    landed = f"{count(batch.rows)} rows" if batch.published is not None else str(batch.status)
    if brief:
        return f"{batch.id}, {landed}"
    scheduler = find_scheduler(batch.owner.run)
    by = "" if scheduler is Scheduler.DAGSTER else f", {describe_run(batch.owner.run)}"
    return f"{batch.id}, {landed}, {show_instant(batch.planned_at // 1000 * 1000)}{by}"


def _format_detail(status: FeedStatus, terminal: CommandOutput) -> list[RenderableType]:
    labels = label_partitions(p.key for p in status.partitions)
    rows = [
        (
            *(labels[p.key], count(p.origin), count(p.frontier), count(p.committed), count(p.end), count(p.lag)),
            outlooks.short(p.age) if p.lag else "",
            "; ".join(filter(None, (_format_above(p.holes), f"{count(p.unstable)} not stable" if p.unstable else ""))),
        )
        for p in status.partitions
    ]
    names = ("partition", "origin", "frontier", "committed", "last stable", "lag", "behind", "")
    outlook = status.outlook
    age, unstable = outlook.age if outlook else None, sum(p.unstable for p in status.partitions)
    out: list[RenderableType] = [heading(status.feed, outlooks.behind(status.lag, age, unstable))]
    if alarms := _list_feed_alarms(status, status.held):
        out += [*(line for alarm in alarms for line in alarm.lines()), Text()]
    out += [*outlooks.settings_denied(outlook)] if outlook else []
    for batch, why in status.refused.items():
        out += [*_format_refusal(status.feed, batch, why), Text()]
    out += [
        table(names, limit_rows(rows), right="origin frontier committed stable lag behind", optional="origin"),
        facts(
            *(outlooks.pace(outlook) if outlook else ()),
            ("last batch", _format_batch(status.last)),
            *([("engine", str(status.engine))] if status.engine else []),
            *(("live batch", _at_work(b, status.met[b.id])) for b in status.live if b.id not in status.refused),
            *(outlooks.list_expiries(outlook) if outlook else ()),
        ),
        *other_batches.view(
            m for b, m in status.met.items() if m.verdict.life is not Life.ALIVE and b not in status.refused
        ),
    ]
    if status.windows:
        out += _format_windows(status, terminal)
    if status.start_not_used:
        out.append(warn(status.start_not_used))
    if status.error:
        out.append(warn(f"{status.error.message}\n  → {status.error.remedy}"))
    return out


def _format_refusal(feed: str, batch: int, why: BatchRefused) -> Iterator[Text]:
    """Describes a refused batch: the reason and the remedy."""
    yield bad(f"batch {batch} was refused and stays staged: {why.message}")
    if isinstance(why, QuarantineExceeded):
        yield Text.assemble(("  → ", "bold"), f"list them by reason: sluice quarantine list {feed}")
    yield Text.assemble(("  → ", "bold"), safe(why.remedy))
    yield Text.assemble(
        ("  → ", "bold"), f"then: sluice run {feed}; or abandon it: sluice repair {feed} --abandon {batch}"
    )


def _at_work(b: Batch, standing: Met) -> str:
    verdict = standing.verdict
    stands = (
        f"at work: {verdict.why}"
        if verdict.life is Life.ALIVE
        else {Life.DEAD: "dead"}.get(verdict.life, str(verdict.life))
    )
    return f"{b.id}: {b.request}, {count(b.reserved_span)} offsets, {b.owner.describe()}, {stands}"


def _format_above(ranges: tuple[tuple[int, int], ...]) -> str:
    """The first few ranges that have landed beyond the frontier."""
    text = ", ".join(f"[{start}, {end})" for start, end in ranges[:3])
    more = f", {len(ranges) - 3} more" if len(ranges) > 3 else ""
    return f"and {text}{more}" if ranges else ""


def _format_windows(status: FeedStatus, terminal: CommandOutput) -> list[RenderableType]:
    """The strip, and a line for each of the newest windows that wait for something."""
    waiting = [w for w in status.windows if w.standing not in _NO_WORD]
    return [
        heading("Windows", window_options.title(status.length, status.windows)),
        *window_options.calendar(status.windows, status.length, fancy=terminal.fancy, width=terminal.width),
        *(Text("  ") + _format_standing(status, w) for w in waiting[-_TOLD:]),
    ]


_NO_WORD = (Standing.LANDED, Standing.RETIRED, Standing.OPEN, Standing.PENDING)
"""States that a sign in the strip says everything about."""


def _format_standing(status: FeedStatus, w: WindowStanding) -> Text:
    if w.standing is Standing.FAILED and w.batch in status.refused:
        return bad(f"window {show_window(w.window)}: refused batch {w.batch}; {window_options.show_pending(w.pending)}")
    line = window_options.verdict(w)
    if w.standing is Standing.PARTIAL:
        line.append(
            f"\n    → to complete it: sluice run {status.feed} --window {show_window(w.window)}", style="default"
        )
    return line


_TOLD = 5
"""How many windows get a line of their own."""


# -- for programs


def build_document(status: FeedStatus) -> dict[str, Any]:
    return document_of(status, "feed lag uncommitted") | {
        "partitions": [
            document_of(
                p,
                "topic=key.topic partition=key.partition topic_id=key.topic_id origin frontier committed"
                " last_stable_offset=end lag lag_seconds unstable landed_above_frontier=holes",
            )
            for p in status.partitions
        ],
        "window": show_duration(status.length),
        "windows": [window_options.build_document(w) for w in status.windows],
        "outlook": outlooks.build_document(status.outlook, status.losses) if status.outlook else None,
        "held_back": [h.document() for h in status.held],
        "start_not_used": status.start_not_used,
        "engine": document_of(status.engine, "kind master") if status.engine else None,
        "live_batches": [_build_live(status, b) for b in status.live],
        "last_batch": _build_batch(status.last) if status.last else None,
        "problem": status.error.fields() if status.error else None,
    }


def _build_liveness(status: FeedStatus, b: Batch) -> dict[str, Any]:
    """How many seconds ago the owner last gave a sign, and why the batch was refused."""
    return {
        "heartbeat_seconds": status.heartbeats[b.id] / 1000 if b.id in status.heartbeats else None,
        "refused": status.refused[b.id].fields() if b.id in status.refused else None,
    }


def _build_live(status: FeedStatus, b: Batch) -> dict[str, Any]:
    """The batch, the verdict on its run, and the commands to use if the run is dead."""
    (standing,) = other_batches.build_document([status.met[b.id]])
    owner = {name: standing[name] for name in ("owner_is", "evidence", "ways")}
    return _build_batch(b) | _build_liveness(status, b) | owner


def _build_batch(b: Batch) -> dict[str, Any]:
    return {
        **document_of(b, "batch=id status"),
        "request": str(b.request),
        **document_of(b, "plan=hash planned_at offsets=reserved_span rows failed_offset_ranges=failed"),
        "owner": document_of(b.owner, "run host pid"),
    }
