"""`sluice offsets`: the committed offsets of a feed's group, and moving them by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.kafka.offsets_context import OffsetsContext, OtherGroup, group, open_context, read_offsets
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Only, Yes
from sluice.cli.terminal import output
from sluice.cli.terminal.output import SHOWN_ROWS, facts, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.move_offsets import Done, Move, OffsetTarget, Spot, Stands

Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="The reason; the ledger keeps it.", show_default="the command"),
]


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text)


def _make_option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="offsets")


# -- the commands


@command(group)
def show(session: Session, feed: FeedName) -> int:
    """Show committed offsets, the ledger's offsets, and the effect of the next commit.

    Exit 3 if the next commit would be refused.

    $ sluice offsets show orders
    $ sluice offsets show orders --json | jq '.offsets[] | select(.stands == "moved by somebody")'
    """
    definition = session.feed(feed)
    with session.terminal.working("querying Kafka"), open_context(session, definition, None) as context:
        stands = [_find_stand(context, spot) for spot in context.spots]
    session.terminal.show(*_show_view(context, stands))
    session.terminal.print_document(
        {
            **context.to_document(),
            "offsets": [_build_spot(s.spot) | {"stands": s.stands, "expected": s.expected} for s in stands],
        }
    )
    return 3 if _list_refused(context, stands) else 0


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

        flags = {Aim.EARLIEST: self.to_earliest, Aim.LATEST: self.to_latest, Aim.FRONTIER: self.to_frontier}
        targets: list[OffsetTarget | Path] = [OffsetTarget(aim) for aim, chosen in flags.items() if chosen]
        if self.to_time is not None:
            targets.append(OffsetTarget(Aim.TIME, parsing.instant(self.to_time, feed.window.parse_name)))
        targets += [OffsetTarget(Aim.TIME, _compute_past(self.by_duration))] if self.by_duration is not None else []
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

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(map(parsing.parse_partition, self.only or ()))


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
        committed = {s.tp: s.before for s in context.spots if s.before is not None}
    lines = list(dump_offsets(committed))
    if file is None:
        session.terminal.lines(lines)
    else:
        _write(file, lines)
        session.terminal.show(good(f"{many(len(lines), 'offset')} of group {context.name} in {file}"))
    session.terminal.print_document(
        {
            **context.to_document(),
            "file": file,
            "offsets": [_place(tp) | {"offset": at} for tp, at in committed.items()],
        }
    )


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


# -- requests


def _compute_past(text: str) -> int:
    from sluice.resources.liveness import now

    return max(0, now() - parsing.duration(text))


def _write(path: Path, lines: Sequence[str]) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", remedy="choose a new file") from None


# -- show


@dataclass(frozen=True, slots=True)
class _Stand:
    """How one partition stands, and the committed offset that the ledger expects."""

    spot: Spot
    stands: Stands
    expected: int | None


def _find_stand(context: OffsetsContext, spot: Spot) -> _Stand:
    from sluice.pipelines.operating.move_offsets import expected_offset, stands

    return _Stand(spot, stands(context.state, spot), expected_offset(context.state, spot.key))


def _list_refused(context: OffsetsContext, stands: Sequence[_Stand]) -> list[_Stand]:
    """Returns the partitions whose committed offsets the next commit would refuse."""
    from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
    from sluice.pipelines.operating.move_offsets import Stands

    if context.feed.commit is CommitMode.NONE:
        return []
    fatal = {Stands.STALE, Stands.FOREIGN}
    fatal |= {Stands.MOVED} if context.feed.policies.on_group_moved is OnGroupMoved.REFUSE else set()
    fatal |= set(Stands) - {Stands.AT, Stands.UNPLANNED} if context.is_blocked else set()
    return [s for s in stands if s.stands in fatal and (context.is_blocked or not _is_landing_next(s))]


def _is_landing_next(s: _Stand) -> bool:
    """Returns True if another client moved the offset to the end of the next catch-up, whose commit accepts it."""
    from sluice.pipelines.operating.move_offsets import Stands

    ahead = s.spot.before is not None and s.spot.frontier is not None and s.spot.before > s.spot.frontier
    return s.stands is Stands.MOVED and ahead and s.spot.before == s.spot.kafka.last_stable_offset


def _show_view(context: OffsetsContext, stands: Sequence[_Stand]) -> list[RenderableType]:
    from sluice.pipelines.operating.move_offsets import Stands

    rows = [
        (str(s.spot.tp), *map(count, _list_numbers(s.spot)[1:]), _describe_stand(context, s))
        for s in stands[:SHOWN_ROWS]
    ]
    names = ("partition", "committed", "frontier", "log end", "lag", "")
    moved = [s for s in _list_refused(context, stands) if s.stands is Stands.MOVED and not _is_landing_next(s)]
    return [
        heading(f"Offsets of {context.feed.name}", f"group {context.name}, {context.view.state}"),
        table(names, limit_rows(rows, len(stands)), right="committed frontier log lag"),
        *_list_warnings(context),
        *(_list_remedies(context, moved) if moved else []),
    ]


def _list_numbers(spot: Spot) -> tuple[int | None, ...]:
    kafka = spot.kafka
    lag = None if spot.before is None else max(0, kafka.high_watermark - spot.before)
    return kafka.log_start, spot.before, spot.frontier, kafka.high_watermark, lag


def _describe_stand(context: OffsetsContext, s: _Stand) -> str | Text:
    from sluice.pipelines.operating.move_offsets import Stands

    match s.stands:
        case Stands.ANOTHER:
            return warn(f"not the log in the ledger: see sluice plan {context.feed.name}")
        case Stands.UNPLANNED if s.spot.committed is None:
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
        case Stands.MOVED if _is_landing_next(s):
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


def _list_remedies(context: OffsetsContext, moved: Sequence[_Stand]) -> list[RenderableType]:
    feed = context.feed.name
    ways = [("commit the frontier anyway", f"sluice accept {feed} moved --reason …")]
    if any((s.spot.before or 0) > (s.spot.frontier or 0) for s in moved):
        ways.append(("skip the offsets in between", f"sluice accept {feed} moved --adopt --reason …"))
    ways.append(("restore the frontier", f"sluice offsets reset {feed} --to-frontier --reason …"))
    text = "Landing continues, but the next commit will be refused. Choose one:"
    return [Text(), Text(f"  {text}"), facts(*((f"  {what}", how) for what, how in ways))]


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
    from sluice.pipelines.operating.move_offsets import Aim, OffsetTarget, OwnedGroup, check_ours, move, refusal

    partitions = options.partitions
    with ExitStack() as stack:
        with session.terminal.working("querying Kafka"):
            context = stack.enter_context(open_context(session, feed, options.group))
            target = OffsetTarget(Aim.FILE, offsets=read_offsets(aim, context)) if isinstance(aim, Path) else aim
            moves = _list_moves(context, target, partitions)
            if context.ledger:
                check_ours(context.ledger, moves)
        refused, done = refusal(feed.name, context.view, moves, target), None
        if not options.dry_run and refused is None:
            if not options.yes and moves:
                session.terminal.show(*_view_moves(context, target, moves), *_explain_moves(context, moves))
                session.terminal.confirm(f"Move {many(len(moves), 'offset')} of group {context.name}?")
            reason = options.reason or f"sluice offsets reset {target}"
            done = move(OwnedGroup(context.name, context.groups, feed.name, context.ledger), moves, target, reason)
    if options.dry_run or options.yes or refused:
        session.terminal.show(
            *_view_moves(context, target, moves), *([] if refused else _explain_moves(context, moves))
        )
    if not refused:
        session.terminal.show("", _format_moved(context, moves, done) if done else output.format_dry_run())
    if refused is not None:
        session.terminal.fail(refused)
    session.terminal.print_document(_reset_document(context, target, moves, done, refused))
    return refused.exit_code if refused else 0


def _list_moves(context: OffsetsContext, target: OffsetTarget, only: Sequence[TopicPartition]) -> tuple[Move, ...]:
    from sluice.pipelines.operating.move_offsets import Aim, resolve, spots_concerned
    from sluice.pipelines.planning.origins import check_incarnation

    spots = spots_concerned(target, context.choose(only), all_of_them=bool(only))
    for another in (check_incarnation(context.state, s.kafka, {}) for s in spots):
        if another is not None:
            raise another.error
    times = {s.tp: target.number for s in spots} if target.aim is Aim.TIME else {}
    return resolve(target, spots, context.ports.cluster.offsets_at(times) if times else {}, context.ports.clock())


def _view_moves(context: OffsetsContext, target: OffsetTarget, moves: Sequence[Move]) -> list[RenderableType]:
    rows = [
        (str(m.tp), count(m.spot.before), "→", count(m.after), count(m.spot.frontier), _move_note(context, m))
        for m in moves[:SHOWN_ROWS]
    ]
    names = ("partition", "before", "", "after", "frontier", "")
    out: list[RenderableType] = [
        heading(f"Offsets of group {context.name}, move {target}"),
        table(names, limit_rows(rows, len(moves)), right="before after frontier"),
    ]
    if others := len(context.spots) - len(moves):
        out.append(indent(f"{many(others, 'other partition')} left as {'it is' if others == 1 else 'they are'}"))
    return out


def _format_moved(context: OffsetsContext, moves: Sequence[Move], done: Done) -> Text:
    where = f", recorded as entry {done.entry} of the ledger of {context.feed.name}" if done.entry is not None else ""
    return good(f"{many(len(moves), 'offset')} of group {context.name} moved and read back{where}")


def _move_note(context: OffsetsContext, m: Move) -> str | Text:
    if m.passes:
        return warn(f"{count(m.passes)} beyond the frontier")
    begins = "not landed yet: the feed will begin there" if context.ledger and m.spot.frontier is None else ""
    return "; ".join(note for note in (m.note, begins) if note)


def _explain_moves(context: OffsetsContext, moves: Sequence[Move]) -> list[RenderableType]:
    """Describes the consequence, actual or expected."""
    from sluice.pipelines.feed.sections import CommitMode

    out: list[str] = []
    if any(m.spot.frontier is not None for m in moves):
        name = context.feed.name
        next_commit = ", and the next commit moves them to the frontier again"
        out.append(
            f"Feed {name} reads from its ledger's frontier, not from these offsets; sluice run {name} --from START "
            f"--replace lands windows again{'' if context.feed.commit is CommitMode.NONE else next_commit}."
        )
    return [
        *(_list_warnings(context) if context.feed.commit is CommitMode.NONE else []),
        *([Text(), indent(*out)] if out else []),
    ]


def _reset_document(
    context: OffsetsContext, target: OffsetTarget, moves: Sequence[Move], done: Done | None, refused: SluiceError | None
) -> dict[str, Any]:
    return {
        **context.to_document(),
        "target": str(target),
        "applied": done is not None,
        "entry": done.entry if done else None,
        "offsets": [_build_spot(m.spot) | {"after": m.after, "note": m.note or None} for m in moves],
        "problem": refused.fields() if refused else None,
    }


def _build_spot(spot: Spot) -> dict[str, Any]:
    names = ("log_start", "committed", "frontier", "log_end", "lag")
    numbers = dict(zip(names, _list_numbers(spot), strict=True))
    return _place(spot.tp) | numbers | {"last_stable_offset": spot.kafka.last_stable_offset}


def _place(tp: TopicPartition) -> dict[str, Any]:
    return {"topic": tp.topic, "partition": tp.partition}
