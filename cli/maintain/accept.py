"""`sluice accept`: let runs go on after an event that they refuse, with a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Only, Yes
from sluice.cli.terminal import output
from sluice.cli.terminal.output import copyable, facts, good, heading, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import join_first, many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import Start
    from sluice.pipelines.model.kafka import TopicPartition
    from sluice.pipelines.operating.acceptance import Accepted
    from sluice.pipelines.operating.rebuild_ledger import Rebuilt
    from sluice.pipelines.ports import Ports

_BEGINS = ("committed", "start")
_EVENTS = ("lost", "recreated", "truncated", "gone", "cluster", "moved", "corrupt", "damaged", "ledger", "group")


def register(app: typer.Typer) -> None:
    command(app)(accept)


@dataclass(frozen=True, slots=True)
class AcceptOptions:
    """The event and its details, as typed."""

    event: Annotated[str, typer.Argument(metavar="EVENT", help=f"The event: {', '.join(_EVENTS)}.", show_default=False)]
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why you accept it; the ledger keeps the reason.")
    ] = ""
    only: Only = None
    offsets: Annotated[
        str | None,
        typer.Option(
            "--offsets",
            metavar="T:P:START-END",
            help="With corrupt, damaged: the offsets of the batch or file, END exclusive.",
            show_default=False,
        ),
    ] = None
    adopt: Annotated[
        bool, typer.Option("--adopt", metavar=" ", help="With moved: skip the records before the group's offsets.")
    ] = False
    begin: Annotated[
        str | None,
        typer.Option(
            "--begin",
            metavar="committed|start|earliest|TIME",
            help="With group: begin at the committed offsets, or at the feed's `start`. With cluster: at the group's"
            " offsets there, the log starts, or a time. With truncated: at a time or the log starts.",
            show_default=False,
        ),
    ] = None

    from_files: Annotated[
        bool,
        typer.Option("--from-files", metavar=" ", help="With ledger: count files again that Kafka cannot replace."),
    ] = False

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(parsing.parse_partition(text) for text in self.only or ())

    def check(self) -> None:
        """Raises UsageError for an unknown event, a missing reason, or an option of another event."""
        if self.event not in _EVENTS:
            raise UsageError(f"unknown event {self.event!r}", remedy=f"use one of {', '.join(_EVENTS)}")
        if not self.reason.strip():
            raise UsageError(
                "--reason is missing", remedy='add it, for example --reason "INC-311"; the ledger keeps it'
            )
        if (self.event in ("corrupt", "damaged")) is (self.offsets is None):
            raise UsageError(
                "corrupt or damaged, and --offsets go together", remedy="copy the command that the failed run printed"
            )
        if self.adopt and self.event != "moved":
            raise UsageError(f"--adopt together with {self.event}", remedy="leave out --adopt: only moved takes it")
        if self.from_files and self.event != "ledger":
            raise UsageError(f"--from-files together with {self.event}", remedy="leave it out: only ledger takes it")
        if (self.event in ("group", "cluster")) is (self.begin is None) and self.event != "truncated":
            raise UsageError("group or cluster, and --begin go together", remedy=_BEGIN_REMEDIES)
        if self.event == "group" and self.begin not in (None, *_BEGINS):
            raise UsageError(f"unknown --begin {self.begin!r}", remedy=f"use {' or '.join(_BEGINS)}")
        if self.only and (why := _WITHOUT_ONLY.get(self.event)):
            raise UsageError(f"--only together with {self.event}", remedy=f"leave out --only: {why}")

    def parse_start(self) -> Start | None:
        """Returns the start on another cluster; None: the committed offsets. Raises UsageError."""
        from sluice.pipelines.feed.sections import StartKind, parse_start

        if self.begin is None or (self.begin == "committed" and self.event == "cluster"):
            return None
        try:
            start = parse_start(self.begin)
        except ValueError:
            start = None
        if start is None or start.kind is StartKind.FAIL:
            raise UsageError(f"unknown --begin {self.begin!r}", remedy=_BEGIN_REMEDIES)
        return start


_BEGIN_REMEDIES = (
    "--begin committed begins at the group's committed offsets. With group, --begin start begins at the feed's `start`."
    " With cluster, --begin TIME begins at the first record of that time or later, and --begin earliest at the log"
    " starts: records that a mirror copied land twice"
)
_WITHOUT_ONLY = {
    "group": "a group is taken over as a whole",
    "ledger": "all partitions share one ledger",
    "corrupt": "--offsets names the partition",
    "damaged": "--offsets names the partition",
}


def accept(session: Session, feed: FeedName, options: AcceptOptions, dry_run: DryRun = False, yes: Yes = False) -> int:
    """Accept an event in Kafka or the ledger that stops runs.

    lost: retention deleted pending offsets; the ledger records them as lost. recreated, truncated, cluster: the log was
    replaced; the feed starts again in the new one, and landed rows stay. gone: Kafka no longer has a partition; windows
    and commits do without it. moved: another client moved the group's committed offsets; the next commit continues from
    there, or with --adopt the offsets in between are skipped. corrupt: a batch that cannot be read is recorded as lost.
    damaged: the rows of missing or damaged files are given up, and what Kafka still has of them may land again.
    ledger: the ledger lost its newest entries, or all; their files are set aside, never deleted, and their offsets are
    pending again. With --from-files, files whose records Kafka no longer has count again. group: the committed offsets
    belong to another ledger, for example of a lost lake; the feed takes over the group, from its committed offsets or
    from `start`.

    An event that has not happened is refused. A refused run prints the command to use. Before offsets become lost or
    skipped, it asks for confirmation on a terminal; elsewhere it needs --yes.

    $ sluice accept orders lost --reason "retention was an hour, by mistake" --dry-run
    $ sluice accept orders cluster --begin committed --reason "failover to the mirror, INC-40"
    $ sluice accept orders recreated --only orders:0 --reason "INC-311"
    $ sluice accept orders moved --adopt --reason "skipped the load test"
    $ sluice accept orders group --begin start --reason "the lake was lost, INC-20"
    $ sluice accept orders ledger --from-files --reason "the folder _sluice was deleted, INC-21"
    $ sluice accept orders corrupt --offsets orders:0:100-200 --reason "disk of broker 2"
    $ sluice accept orders damaged --offsets orders:4:0-515 --reason "no backup of the lake, INC-31"
    """
    options.check()
    from sluice.pipelines.operating.repairs import Pretended

    definition = session.feed(feed)

    def decide(ports: Ports) -> Accepted:
        with session.terminal.working("querying Kafka"):
            return _accept(definition, ports, options)

    with session.open_ports(definition) as ports:
        if dry_run or not yes:
            foreseen = decide(replace(ports, lake=Pretended(ports.lake)))
            if not dry_run:
                given_up = sum(r.range.span for r in (*foreseen.lost, *foreseen.skipped, *foreseen.retired))
                if given_up:
                    session.terminal.show(*view(definition, foreseen, options.reason, dry_run=True))
                    session.terminal.confirm(f"Give up {many(given_up, 'offset')} of feed {definition.name}?")
        done = foreseen if dry_run else decide(ports)
    session.terminal.show(*view(definition, done, options.reason, dry_run=dry_run))
    session.terminal.print_document(
        done, applied=not dry_run, feed=feed, reason=options.reason, next=done.next or done.entry + 1
    )
    return 0


def _accept(feed: Feed, ports: Ports, options: AcceptOptions) -> Accepted:
    from sluice.pipelines.operating import acceptance as accepting

    reason, partitions = options.reason, options.partitions
    match kind := accepting.AcceptEvent(options.event):
        case accepting.AcceptEvent.LOST:
            return accepting.accept_lost(feed, ports, reason, partitions)
        case accepting.AcceptEvent.MOVED:
            return accepting.accept_moved(feed, ports, reason, partitions, adopting=options.adopt)
        case accepting.AcceptEvent.LEDGER:
            return accepting.accept_ledger(feed, ports, reason, from_files=options.from_files)
        case accepting.AcceptEvent.GROUP:
            return accepting.accept_group(feed, ports, accepting.Begin(options.begin or ""), reason)
        case accepting.AcceptEvent.CORRUPT:
            damaged = parsing.parse_offset_range(options.offsets or "")
            with ports.open_fetcher(feed.isolation) as fetcher:
                return accepting.accept_corrupt(feed, ports, fetcher, damaged, reason)
        case accepting.AcceptEvent.DAMAGED:
            return accepting.accept_damaged(feed, ports, parsing.parse_offset_range(options.offsets or ""), reason)
        case _:
            return accepting.accept_log(feed, ports, kind, reason, partitions, options.parse_start())


# -- for people


def view(feed: Feed, done: Accepted, reason: str, *, dry_run: bool) -> list[RenderableType]:
    title = "To accept" if dry_run else "Accepted"
    out: list[RenderableType] = [heading(f"{title} for {feed.name}: {done.event}", reason)]
    out += [warn(f"{r.key} {r.range} is lost: {many(r.range.span, 'offset')}") for r in done.lost]
    out += [warn(f"{r.key} {r.range} is skipped: {many(r.range.span, 'offset')}") for r in done.skipped]
    if done.retired:
        out.append(warn(f"the rows of {_name_first(f'{r.key} {r.range}' for r in done.retired)} are retired"))
    if done.again:
        ranges = " ".join(f"--offsets {r.key}:{r.range.start}-{r.range.end}" for r in done.again)
        out += ["  what Kafka still has of them lands by:", copyable(f"sluice run {feed.name} {ranges} --replace")]
    elif done.retired:
        out.append(warn("Kafka no longer has any of their records"))
    out += [
        warn(
            f"{i.enters.key} ends at {count(i.enters.offset)}: windows and commits do without it"
            if i.enters.key.is_ended
            else f"{i.enters.key} begins at {count(i.enters.offset)}, as topic id {i.enters.key.incarnation}"
        )
        for i in done.entered
    ]
    out += [
        warn(f"{u.key}: records beyond {count(u.offset)} of the log that it leaves, if there were any, are unknown")
        for u in done.unseen
    ]
    out += [warn(f"{o.key} begins at {count(o.offset)}, {o.why}") for o in done.begun]
    stays, goes_on = "the committed offset {} stays until landing reaches it", "the next commit continues from {}"
    move = stays if done.event == "group" else goes_on
    out += [warn(f"{m.key}: {move.format(count(m.offset))}") for m in done.moved]
    out += _view_rebuilt(feed, done.rebuilt) if done.rebuilt else []
    out += [warn(f"batch {b} was abandoned") for b in done.abandoned]
    out += [warn(f"{r.key} {r.range}: no longer in Kafka; the next run records it as lost") for r in done.gone]
    aside = [("set aside", f"{many(len(done.aside), 'file')} in {done.aside_folder}")] if done.aside else []
    if dry_run:
        return [*out, facts(*aside), output.format_dry_run()]
    return [*out, facts(("ledger entry", str(done.entry)), *aside), good(f"runs can continue: sluice run {feed.name}")]


_name_first = partial(join_first, limit=10, more=" and {:,} more ranges (--json lists all)")


def _view_rebuilt(feed: Feed, rebuilt: Rebuilt) -> list[RenderableType]:
    """Returns the result of --from-files, and what no file tells."""
    out: list[RenderableType] = [
        good(f"{many(len(rebuilt.files), 'file')} with {many(rebuilt.rows, 'row')} count again")
    ]
    if rebuilt.without_row:
        why = "markers, aborted, dropped or compacted records, or those of missing files: which of these is unknown"
        out.append(warn(f"{many(rebuilt.without_row, 'offset')} in their ranges have no row: {why}"))
    if rebuilt.holes:
        offsets = many(sum(h.range.span for h in rebuilt.holes), "offset")
        text = f"{offsets} without a file, and no longer in Kafka: the next run reports a loss of"
        out.append(warn(f"{text} {_name_first(f'{h.key} {h.range}' for h in rebuilt.holes)}"))
    unknown = "erasures, holds, skipped offsets, moved topics, contract results and replays are unknown"
    out.append(warn(f"{unknown}: put holds on again, and erase again what Kafka still has"))
    if feed.table_feeds:
        out.append(warn(f"make the table again: sluice table rebuild {feed.name} --yes"))
    return out
