"""`sluice offsets`: the committed offsets of a feed's group, and moving them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Only, Yes
from sluice.cli.terminal import output
from sluice.cli.terminal.output import SHOWN_ROWS, copyable, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.group_offsets import (
        MovePlan,
        OffsetBefore,
        OffsetPair,
        OffsetsContext,
        OffsetStanding,
    )
    from sluice.pipelines.operating.move_offsets import Move, OffsetTarget

group = make_group(
    "Show, move, save and restore the committed offsets of a feed's group.",
    "sluice offsets show orders",
    "sluice offsets reset orders --to-frontier --dry-run",
    "sluice offsets export orders > orders.csv",
)

OtherGroup = Annotated[
    str | None,
    option(
        "--group",
        "GROUP",
        "Another group on the feed's Kafka. It must not be a feed's; no ledger records changes.",
        show_default="the feed's",
    ),
]
Reason = Annotated[
    str | None, option("--reason", "TEXT", "The reason; the ledger keeps it.", show_default="the command")
]


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text)


def _make_option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="offsets")


@contextmanager
def open_context(session: Session, feed: Feed, other: str | None = None) -> Iterator[OffsetsContext]:
    from sluice.pipelines.operating.group_offsets import read_context

    with session.open_ports(feed) as ports, session.open_groups(feed) as groups:
        yield read_context(feed, session.files.feeds.values(), ports, groups, other)


# -- the commands


@command(group)
def show(session: Session, feed: FeedName) -> int:
    """Show committed offsets, the ledger's offsets, and the effect of the next commit.

    Exit 3 if the next commit would be refused.

    $ sluice offsets show orders
    $ sluice offsets show orders --json | jq '.offsets[] | select(.stands == "moved by somebody")'
    """
    from sluice.pipelines.operating.group_offsets import list_standings

    with session.terminal.working("querying Kafka"), open_context(session, session.feed(feed)) as context:
        standings = list_standings(context)
    session.terminal.show(*_show_view(context, standings))
    session.terminal.print_document(context.owner, offsets=standings)
    return 3 if any(s.refused for s in standings) else 0


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Where offsets go, as typed: exactly one option."""

    to_earliest: Annotated[bool, _flag("--to-earliest", "To the start of the log.")] = False
    to_latest: Annotated[bool, _flag("--to-latest", "To the end of the log that the feed's isolation reads.")] = False
    to_frontier: Annotated[bool, _flag("--to-frontier", "To the frontier of the feed's ledger.")] = False
    to_time: Annotated[
        str | None, _make_option("--to-time", "TIME", "To the first record at or after 2026-11-20T14:00:00Z.")
    ] = None
    by_duration: Annotated[
        str | None,
        _make_option("--by-duration", "TIME", "To the first record of this time span until now, such as 6h."),
    ] = None
    to_offset: Annotated[int | None, _make_option("--to-offset", "N", "To this offset.")] = None
    shift: Annotated[int | None, _make_option("--shift", "±N", "By N offsets, forward or back.")] = None
    to_file: Annotated[
        Path | None, _make_option("--to-file", "FILE", "To the lines TOPIC,PARTITION,OFFSET of a file.")
    ] = None

    def choose(self, feed: Feed) -> OffsetTarget | Path:
        """Returns the target. Raises UsageError unless there is exactly one."""
        from sluice.pipelines.operating.move_offsets import Aim, OffsetTarget
        from sluice.resources.liveness import now

        flags = {Aim.EARLIEST: self.to_earliest, Aim.LATEST: self.to_latest, Aim.FRONTIER: self.to_frontier}
        targets: list[OffsetTarget | Path] = [OffsetTarget(aim) for aim, chosen in flags.items() if chosen]
        if self.to_time is not None:
            targets.append(OffsetTarget(Aim.TIME, parsing.instant(self.to_time, feed.window.parse_name)))
        if self.by_duration is not None:
            targets.append(OffsetTarget(Aim.TIME, max(0, now() - parsing.duration(self.by_duration))))
        targets += [OffsetTarget(Aim.OFFSET, self.to_offset)] if self.to_offset is not None else []
        targets += [OffsetTarget(Aim.SHIFT, self.shift)] if self.shift is not None else []
        targets += [self.to_file] if self.to_file is not None else []
        if len(targets) != 1:
            raise UsageError(
                f"{len(targets)} targets" if targets else "no target",
                remedy="use one of --to-earliest, --to-latest, --to-frontier, --to-time, --by-duration, --to-offset, "
                "--shift, --to-file",
            )
        return targets[0]


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """The partitions, the group and the confirmation of a move, as typed."""

    only: Only = None
    group: OtherGroup = None
    reason: Reason = None
    dry_run: DryRun = False
    yes: Yes = False


@command(group)
def reset(session: Session, feed: FeedName, target: TargetOptions, options: MoveOptions) -> int:
    """Move the committed offsets of a feed's group by hand.

    It asks for confirmation on a terminal; elsewhere it needs --yes. The group must have no members. The feed's ledger
    records the change before Kafka does.

    The feed reads from the ledger's frontier, not from committed offsets. Moving them back makes it read nothing again
    (use sluice run FEED --from START --replace), and the next commit moves them to the frontier. Offsets beyond the
    frontier are refused: sluice run FEED --skip-to skips records and records that in the ledger.

    $ sluice offsets reset orders --to-frontier --dry-run
    $ sluice offsets reset orders --to-time 2026-11-20T14:00:00Z --only orders:0 --reason "replay for billing" --yes
    $ sluice offsets reset orders --shift -100
    """
    definition = session.feed(feed)
    return _reset(session, definition, target.choose(definition), options)


@command(group)
def export(
    session: Session,
    feed: FeedName,
    file: Annotated[Path | None, _make_option("--file", "FILE", "Write to this new file instead of stdout.")] = None,
    other: OtherGroup = None,
) -> None:
    """Write the committed offsets, one line TOPIC,PARTITION,OFFSET each.

    kafka-consumer-groups --reset-offsets --from-file and sluice offsets import read this format.

    $ sluice offsets export orders > orders.csv
    $ sluice offsets export orders --group legacy-loader --file legacy.csv
    """
    from sluice.pipelines.operating.move_offsets import dump_offsets

    definition = session.feed(feed)
    with session.terminal.working("querying Kafka"), open_context(session, definition, other) as context:
        committed = context.committed
    lines = list(dump_offsets(committed))
    if file is None:
        session.terminal.lines(lines)
    else:
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}", remedy="choose a new file") from None
        session.terminal.show(good(f"{many(len(lines), 'offset')} of group {context.name} in {file}"))
    offsets = [tp._asdict() | {"offset": at} for tp, at in committed.items()]
    session.terminal.print_document(context.owner, file=file, offsets=offsets)


@command(group, name="import")
def import_(
    session: Session,
    feed: FeedName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Lines TOPIC,PARTITION,OFFSET.", show_default=False)],
    options: MoveOptions,
) -> int:
    """Move committed offsets to those of a file.

    The rules are those of sluice offsets reset. A feed that has not run yet begins at its group's committed offsets:
    import them to take over from another consumer.

    $ sluice offsets import orders orders.csv --dry-run
    $ sluice offsets import orders legacy.csv --reason "takes over from legacy-loader" --yes
    """
    return _reset(session, session.feed(feed), file, options)


# -- comparisons


@command(group)
def before(
    session: Session,
    feed: FeedName,
    time: Annotated[
        str,
        typer.Argument(
            metavar="TIME", help="A time, 2026-11-20T14:00:00Z, or the start of a window.", show_default=False
        ),
    ],
    only: Only = None,
    other: OtherGroup = None,
) -> None:
    """Show the offset of the first record at or after a time, for each partition.

    It also shows the group's committed offset. Nothing changes: to move offsets, use sluice offsets reset.

    $ sluice offsets before orders 2026-11-20T14:00:00Z
    $ sluice offsets before orders 2026-11-20T14 --json | jq -r '.offsets[] | [.topic, .partition, .offset] | @csv'
    """
    from sluice.pipelines.operating.group_offsets import list_offsets_before

    definition = session.feed(feed)
    at = parsing.instant(time, definition.window.parse_name)
    with session.terminal.working("querying Kafka"), open_context(session, definition, other) as context:
        rows = list_offsets_before(context, at, tuple(map(parsing.parse_partition, only or ())))
    session.terminal.show(*_format_before(context, at, rows))
    session.terminal.print_document(context.owner, time=at, offsets=rows)


def _format_before(context: OffsetsContext, at: int, rows: Sequence[OffsetBefore]) -> list[RenderableType]:
    cells = [
        (
            str(r.spot.tp),
            count(r.offset),
            show_instant(r.hit.timestamp) if r.hit else "–",
            count(r.spot.committed),
            "–" if r.spot.committed is None else f"{r.spot.committed - r.offset:+,}",
            r.note,
        )
        for r in rows
    ]
    names = ("partition", "offset", "stamped", "committed", "beyond it", "")
    return [
        heading(f"Offsets of {context.feed.name} before {show_instant(at)}", f"group {context.name}"),
        table(names, limit_rows(cells), right="offset committed beyond", optional="stamped"),
    ]


@command(group)
def diff(
    session: Session,
    feed: FeedName,
    source_name: Annotated[str, option("--with", "FILE|GROUP", "A file of offsets, or the name of a group.")],
    other: OtherGroup = None,
) -> int:
    """Compare the committed offsets of a feed's group with those of a file or another group.

    If a file of that name exists, its lines TOPIC,PARTITION,OFFSET are read; otherwise it is a group. Exit 0 if the
    offsets are equal, 1 if they differ.

    $ sluice offsets export orders --file monday.csv
    $ sluice offsets diff orders --with monday.csv
    $ sluice offsets diff orders --with legacy-loader
    """
    from sluice.pipelines.operating.group_offsets import compare_offsets

    definition = session.feed(feed)
    with session.terminal.working("querying Kafka"), open_context(session, definition, other) as context:
        rows = compare_offsets(context, source_name)
    differ = [row for row in rows if row.offset != row.other]
    session.terminal.show(*_diff_view(context, source_name, rows, differ))
    session.terminal.print_document(context.owner, with_=source_name, same=not differ, offsets=rows)
    return 1 if differ else 0


def _diff_view(
    context: OffsetsContext, source: str, rows: Sequence[OffsetPair], differ: Sequence[OffsetPair]
) -> list[RenderableType]:
    title = heading(f"Offsets of {context.feed.name}", f"group {context.name}, compared with {source}")
    if not differ:
        return [title, good(f"the same in {many(len(rows), 'partition')}")]
    cells = []
    for r in differ:
        if r.offset is None or r.other is None:
            gap = "only here" if r.other is None else "only there"
        else:
            gap = f"{count(abs(r.other - r.offset))} {'ahead' if r.other > r.offset else 'behind'}"
        cells.append((str(r.tp), count(r.offset), count(r.other), gap))
    return [
        title,
        table(("partition", "committed", "the other", "it is"), limit_rows(cells), right="committed the"),
        Text(f"  the same in {len(rows) - len(differ)} of {many(len(rows), 'partition')}"),
    ]


# -- show


def _show_view(context: OffsetsContext, standings: Sequence[OffsetStanding]) -> list[RenderableType]:
    from sluice.pipelines.operating.move_offsets import Stands

    rows = [
        (
            str(s.spot.tp),
            *map(count, (s.spot.committed, s.spot.frontier, s.spot.log_end, s.spot.lag)),
            _describe_stand(context, s),
        )
        for s in standings[:SHOWN_ROWS]
    ]
    names = ("partition", "committed", "frontier", "log end", "lag", "")
    moved = [s for s in standings if s.refused and s.stands is Stands.MOVED and not s.lands_next]
    return [
        heading(f"Offsets of {context.feed.name}", f"group {context.name}, {context.view.state}"),
        table(names, limit_rows(rows, len(standings)), right="committed frontier log lag"),
        *_list_warnings(context),
        *(_list_remedies(context, moved) if moved else []),
    ]


def _describe_stand(context: OffsetsContext, s: OffsetStanding) -> str | Text:
    from sluice.pipelines.operating.move_offsets import Stands

    match s.stands:
        case Stands.ANOTHER:
            return warn(f"not the log in the ledger: see sluice plan {context.feed.name}")
        case Stands.UNPLANNED if s.spot.commit is None:
            return f"not landed yet: begins at `start: {context.feed.start}`"
        case Stands.UNPLANNED:
            return "not landed yet: the feed begins here"
        case Stands.GONE:
            return "deleted or expired; the next commit restores it"
        case Stands.BEHIND:
            return "the next commit moves it to the frontier"
        case Stands.BY_HAND:
            return "moved with sluice offsets; the next commit moves it on"
        case Stands.WAITS:
            return "committed by entries that the ledger lost; stays until landing reaches it"
        case Stands.MOVED if s.lands_next:
            return warn(
                f"moved by another client to the next batch (the ledger expects {count(s.expected)}): a catch-up that"
                " ends there keeps it; with more records, its commit is refused"
            )
        case Stands.MOVED:
            return warn(f"moved by another client: the ledger expects {count(s.expected)}")
        case Stands.STALE:
            return warn("its commit mark is not in the ledger, which lost entries")
        case Stands.FOREIGN:
            return warn(f"committed by another ledger: see sluice plan {context.feed.name}")
    return str(s.stands)


def _list_remedies(context: OffsetsContext, moved: Sequence[OffsetStanding]) -> list[RenderableType]:
    from sluice.pipelines.committing.commit import list_remedies

    feed, ends = context.feed.name, {s.spot.tp: s.spot.log_end for s in moved}
    offsets = {s.spot.key: (s.spot.frontier or 0, s.spot.committed or 0) for s in moved}
    ways = [*list_remedies(feed, offsets, ends), f"restore the frontier: sluice offsets reset {feed} --to-frontier"]
    text = "Landing continues, but the next commit will be refused. Choose one:"
    lines = (line for what, _, way in (w.rpartition(": ") for w in ways) for line in (f"  {what}:", copyable(way)))
    return [Text(), Text(f"  {text}"), *lines]


def _list_warnings(context: OffsetsContext) -> list[RenderableType]:
    from sluice.pipelines.feed.sections import CommitMode

    name = context.feed.name
    if context.ledger is None:
        return []
    if context.feed.commit is CommitMode.NONE:
        return [
            Text(),
            warn(f"{name} has `commit: none`: Sluice reads this group's start position and never commits"),
        ]
    if not context.is_blocked:
        return []
    who = f"{context.view.who()}: no commit until they leave; see sluice groups describe {context.name}"
    return [Text(), warn(f"the group has other members, {who}")]


# -- reset


def _reset(session: Session, feed: Feed, aim: OffsetTarget | Path, options: MoveOptions) -> int:
    from sluice.pipelines.operating.group_offsets import plan_moves, read_offsets
    from sluice.pipelines.operating.move_offsets import Aim, OffsetTarget, OwnedGroup, move

    with ExitStack() as stack:
        with session.terminal.working("querying Kafka"):
            context = stack.enter_context(open_context(session, feed, options.group))
            target = OffsetTarget(Aim.FILE, offsets=read_offsets(aim, context)) if isinstance(aim, Path) else aim
            plan = plan_moves(context, target, tuple(map(parsing.parse_partition, options.only or ())))
        moves, refused, done = plan.moves, plan.refused, None
        # The plan is shown before the question, and once only.
        if not options.dry_run and refused is None:
            if not options.yes and moves:
                session.terminal.show(*_view_moves(context, plan), *_explain_moves(context, moves))
                session.terminal.confirm(f"Move {many(len(moves), 'offset')} of group {context.name}?")
            reason = options.reason or f"sluice offsets reset {target}"
            done = move(OwnedGroup(context.name, context.groups, feed.name, context.ledger), moves, target, reason)
    if options.dry_run or options.yes or refused:
        session.terminal.show(*_view_moves(context, plan), *([] if refused else _explain_moves(context, moves)))
    if refused is not None:
        session.terminal.fail(refused)
    elif done is None:
        session.terminal.show("", output.format_dry_run())
    else:
        where = "" if done.entry is None else f", recorded as entry {done.entry} of the ledger of {feed.name}"
        moved = f"{many(len(moves), 'offset')} of group {context.name} moved and read back{where}"
        session.terminal.show("", good(moved))
    session.terminal.print_document(
        context.owner,
        target=str(target),
        applied=done is not None,
        entry=done.entry if done else None,
        offsets=moves,
        problem=refused,
    )
    return refused.exit_code if refused else 0


def _view_moves(context: OffsetsContext, plan: MovePlan) -> list[RenderableType]:
    moves = plan.moves
    rows = [
        (str(m.tp), count(m.spot.committed), "→", count(m.after), count(m.spot.frontier), _move_note(context, m))
        for m in moves[:SHOWN_ROWS]
    ]
    names = ("partition", "before", "", "after", "frontier", "")
    out: list[RenderableType] = [
        heading(f"Offsets of group {context.name}, move {plan.target}"),
        table(names, limit_rows(rows, len(moves)), right="before after frontier"),
    ]
    if others := len(context.spots) - len(moves):
        out.append(indent(f"{many(others, 'other partition')} left as {'it is' if others == 1 else 'they are'}"))
    return out


def _move_note(context: OffsetsContext, m: Move) -> str | Text:
    if m.passes:
        return warn(f"{count(m.passes)} beyond the frontier")
    begins = "not landed yet: the feed will begin there" if context.ledger and m.spot.frontier is None else ""
    return "; ".join(note for note in (m.note, begins) if note)


def _explain_moves(context: OffsetsContext, moves: Sequence[Move]) -> list[RenderableType]:
    """Describes the consequence, actual or expected."""
    from sluice.pipelines.feed.sections import CommitMode

    planned, out = [m for m in moves if m.spot.frontier is not None], list[RenderableType]()
    if planned:
        commits = context.feed.commit is not CommitMode.NONE
        next_commit = ", and the next commit moves them to the frontier again" if commits else ""
        text = f"Feed {context.feed.name} reads from its ledger's frontier, not from these offsets{next_commit}."
        out += [Text(), indent(text)]
    if back := [f"{m.tp}:{m.after}-{m.spot.frontier}" for m in planned if m.after < (m.spot.frontier or 0)]:
        again = " ".join(f"--offsets {r}" for r in back)
        out += [indent("To land them again:"), copyable(f"sluice run {context.feed.name} {again} --replace")]
    return [*(_list_warnings(context) if context.feed.commit is CommitMode.NONE else []), *out]
