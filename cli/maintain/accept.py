"""`sluice accept`: let runs go on after an event that they refuse, with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Only, Yes
from sluice.cli.terminal import output
from sluice.cli.terminal.number_format import count
from sluice.cli.terminal.output import facts, good, heading, warn
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger.entries import KeyRange
    from sluice.pipelines.operating.acceptance import Accepted
    from sluice.pipelines.ports import Ports

_BEGINS = ("committed", "start")
_EVENTS = ("lost", "recreated", "truncated", "cluster", "moved", "corrupt", "ledger", "group")


def register(app: typer.Typer) -> None:
    command(app)(accept)


def accept(
    session: Session,
    feed: FeedName,
    event: Annotated[
        str, typer.Argument(metavar="EVENT", help=f"What happened: {', '.join(_EVENTS)}.", show_default=False)
    ],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why you accept it; the ledger keeps the reason.")
    ] = "",
    only: Only = None,
    offsets: Annotated[
        str | None,
        typer.Option(
            "--offsets", metavar="T:P:START-END", help="With corrupt: where the batch is.", show_default=False
        ),
    ] = None,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", metavar=" ", help="With moved: skip the records that the group's offsets pass over."),
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option(
            "--begin",
            metavar="committed|start",
            help="With group: from where the group stands, or as `start` says.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Accept what happened to Kafka, or to the ledger, so that runs go on.

    lost: retention deleted pending offsets; they become a named loss. recreated, truncated, cluster: the log is a
    different one now; the feed starts again in it, and what landed stays. moved: somebody moved the group's committed
    offsets; the next commit goes on from there, or with --adopt the offsets in between are skipped. corrupt: a batch
    that cannot be read becomes a loss. ledger: the ledger lost its newest entries; their files are set aside, never
    deleted, and their offsets are pending again. group: the committed offsets belong to another ledger, of a lake
    that was lost perhaps; the feed takes the group over, from where it stands or from its start.

    An event that has not happened is refused. A refused run prints the command to type. Before offsets are given up as
    lost or skipped, it asks for confirmation on a terminal; elsewhere it needs --yes.

    $ sluice accept orders lost --reason "retention was an hour, by mistake" --dry-run
    $ sluice accept orders recreated --only orders:0 --reason "INC-311"
    $ sluice accept orders moved --adopt --reason "skipped the load test"
    $ sluice accept orders group --begin start --reason "the lake was lost, INC-20"
    $ sluice accept orders corrupt --offsets orders:0:100-200 --reason "disk of broker 2"
    """
    _check(event, reason, only, offsets, begin, adopting=adopt)
    from sluice.pipelines.operating.repairs import Pretended

    definition = session.feed(feed)

    def decide(edges: Ports) -> Accepted:
        with session.terminal.working("asking Kafka"):
            return _accept(definition, edges, event, reason, only, offsets, begin, adopting=adopt)

    with session.open_ports(definition) as edges:
        if dry_run or not yes:
            foreseen = decide(replace(edges, lake=Pretended(edges.lake)))
            if not dry_run:
                _confirm(session, definition, foreseen, reason)
        done = foreseen if dry_run else decide(edges)
    session.terminal.show(*view(definition, done, reason, dry_run=dry_run))
    session.terminal.print_document({"applied": not dry_run, **build_document(definition, done, reason)})
    return 0


def _confirm(session: Session, feed: Feed, foreseen: Accepted, reason: str) -> None:
    """Ask before offsets are given up. Raises UsageError if nobody can answer, and Failed if the answer is no."""
    given_up = sum(r.range.span for r in (*foreseen.lost, *foreseen.skipped))
    if given_up:
        session.terminal.show(*view(feed, foreseen, reason, dry_run=True))
        session.terminal.confirm(f"Give up {many(given_up, 'offset')} of feed {feed.name}?")


def _check(
    event: str, reason: str, only: list[str] | None, offsets: str | None, begin: str | None, *, adopting: bool
) -> None:
    if event not in _EVENTS:
        raise UsageError(f"{event!r} is no event", remedy=f"accept one of: {', '.join(_EVENTS)}")
    if not reason.strip():
        raise UsageError("accepting needs a reason", remedy='say why: --reason "…"; the ledger keeps the reason')
    if (event == "corrupt") is (offsets is None):
        raise UsageError(
            "--offsets belongs to corrupt, and corrupt needs it", remedy="the run that failed prints the whole command"
        )
    if adopting and event != "moved":
        raise UsageError("--adopt belongs to moved", remedy="leave it out")
    if (event == "group") is (begin is None):
        raise UsageError(
            "--begin belongs to group, and group needs it",
            remedy="--begin committed goes on from where the group stands, --begin start as the feed's `start` says",
        )
    if begin not in (None, *_BEGINS):
        raise UsageError(f"--begin {begin!r} is neither {' nor '.join(_BEGINS)}", remedy="choose one of the two")
    if only and event == "group":
        raise UsageError("--only together with group", remedy="a group is taken over as a whole: leave it out")
    if only and event == "ledger":
        raise UsageError("--only together with ledger", remedy="a ledger is one for all partitions: leave it out")
    if only and event == "corrupt":
        raise UsageError("--only together with --offsets", remedy="--offsets names the place: leave --only out")


def _accept(
    feed: Feed,
    edges: Ports,
    event: str,
    reason: str,
    only: list[str] | None,
    offsets: str | None,
    begin: str | None,
    *,
    adopting: bool,
) -> Accepted:
    from sluice.pipelines.operating import acceptance as accepting
    from sluice.resources.spark.executor import Wiring

    narrowed = tuple(parsing.parse_partition(text) for text in only or ())
    match kind := accepting.AcceptEvent(event):
        case accepting.AcceptEvent.LOST:
            return accepting.accept_lost(feed, edges, reason, narrowed)
        case accepting.AcceptEvent.MOVED:
            return accepting.accept_moved(feed, edges, reason, narrowed, adopting=adopting)
        case accepting.AcceptEvent.LEDGER:
            return accepting.accept_ledger(feed, edges, reason)
        case accepting.AcceptEvent.GROUP:
            return accepting.accept_group(feed, edges, accepting.Begin(begin or ""), reason)
        case accepting.AcceptEvent.CORRUPT:
            with Wiring.of(feed).open(feed.isolation, feed.shape) as tools:
                damaged = parsing.parse_offset_range(offsets or "")
                return accepting.accept_corrupt(feed, edges, tools.fetcher, damaged, reason)
        case _:
            return accepting.accept_log(feed, edges, kind, reason, narrowed)


# -- for people


def view(feed: Feed, done: Accepted, reason: str, *, dry_run: bool) -> list[RenderableType]:
    title = "To accept" if dry_run else "Accepted"
    out: list[RenderableType] = [heading(f"{title} for {feed.name}: {done.event}", reason)]
    out += [warn(f"{r.key} {r.range} is lost: {many(r.range.span, 'offset')}") for r in done.lost]
    out += [warn(f"{r.key} {r.range} is skipped: {many(r.range.span, 'offset')}") for r in done.skipped]
    out += [
        warn(f"{i.enters.key} begins at {count(i.enters.offset)}, as topic id {i.enters.key.incarnation}")
        for i in done.entered
    ]
    out += [warn(f"{o.key} begins at {count(o.offset)}, {o.why}") for o in done.begun]
    out += [warn(f"{m.key}: {_describe_move(done, m.offset)}") for m in done.moved]
    out += [warn(f"batch {b} was given up: what it read counts for nothing") for b in done.abandoned]
    out += [
        warn(f"{r.key} {r.range}: Kafka does not hold it any more; the next run names it as lost") for r in done.gone
    ]
    aside = [("set aside", f"{many(len(done.aside), 'file')} in {_aside(feed, done)}")] if done.aside else []
    if dry_run:
        return [*out, facts(*aside), output.format_dry_run()]
    return [*out, facts(("ledger entry", str(done.number)), *aside), good(f"runs go on: sluice run {feed.name}")]


def _describe_move(done: Accepted, offset: int) -> str:
    if done.event == "group":
        return f"the committed offset {count(offset)} stays until landing has reached it"
    return f"the next commit goes on from {count(offset)}"


# -- for programs


def build_document(feed: Feed, done: Accepted, reason: str) -> dict[str, Any]:
    return {
        "feed": feed.name,
        "event": str(done.event),
        "reason": reason,
        "entry": done.number,
        "lost": [_range(r) for r in done.lost],
        "skipped": [_range(r) for r in done.skipped],
        "entered": [
            {
                "topic": i.enters.key.topic,
                "partition": i.enters.key.partition,
                "left": i.leaves.incarnation,
                "entered": i.enters.key.incarnation,
                "origin": i.enters.offset,
            }
            for i in done.entered
        ],
        "moved": [{"topic": m.key.topic, "partition": m.key.partition, "offset": m.offset} for m in done.moved],
        "begun": [
            {"topic": o.key.topic, "partition": o.key.partition, "origin": o.offset, "why": o.why} for o in done.begun
        ],
        "abandoned": list(done.abandoned),
        "next": done.next or done.number + 1,
        "aside": list(done.aside),
        "gone": [_range(r) for r in done.gone],
    }


def _aside(feed: Feed, done: Accepted) -> str:
    from sluice.pipelines.lake.paths import aside_path

    return aside_path(feed.name, done.next, "")


def _range(r: KeyRange) -> dict[str, Any]:
    return {"topic": r.key.topic, "partition": r.key.partition, "start": r.range.start, "end": r.range.end}
