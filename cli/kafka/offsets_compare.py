"""`sluice offsets before` and `diff`: where a feed's offsets were at a time, and how they differ from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.kafka.offsets_context import OffsetsContext, OtherGroup, group, open_context, read_offsets
from sluice.cli.options import parsing
from sluice.cli.options.request_options import Only
from sluice.cli.terminal.output import good, heading, limit_rows, table
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.pipelines.util.units import many, show_instant


def register(_: typer.Typer) -> None:
    """The commands hang on `sluice offsets`, which is registered elsewhere."""


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

    It also shows the group's committed offset. Nothing changes: to move offsets, use sluice offsets reset --to-time.

    $ sluice offsets before orders 2026-11-20T14:00:00Z
    $ sluice offsets before orders 2026-11-20T14 --json | jq -r '.offsets[] | [.topic, .partition, .offset] | @csv'
    """
    definition = session.feed(feed)
    at = parsing.instant(time, definition.window.parse_name)
    with session.terminal.working("querying Kafka"), open_context(session, definition, other) as context:
        spots = context.choose(tuple(map(parsing.parse_partition, only or ())))
        hits = context.ports.cluster.offsets_at({s.tp: at for s in spots})
    rows = [_Before(s.tp, hits[s.tp], s.kafka.log_start, s.kafka.high_watermark, s.before) for s in spots]
    session.terminal.show(*_format_before(context, at, rows))
    session.terminal.print_document({**context.to_document(), "time": at, "offsets": [r.to_document() for r in rows]})


@dataclass(frozen=True, slots=True)
class _Before:
    """One partition: `hit` is its first record of the time or later, None where there is none."""

    tp: TopicPartition
    hit: OffsetAtTime | None
    log_start: int
    log_end: int
    committed: int | None

    @property
    def offset(self) -> int:
        return self.log_end if self.hit is None else self.hit.offset

    @property
    def note(self) -> str:
        if self.hit is None:
            return "no record since: the end"
        if self.hit.by_marker:
            return "approximate: near transaction markers"
        return "the log begins later" if self.offset == self.log_start else ""

    def to_document(self) -> dict[str, Any]:
        return {
            "topic": self.tp.topic,
            "partition": self.tp.partition,
            "offset": self.offset,
            "timestamp": self.hit.timestamp if self.hit else None,
            "committed": self.committed,
            "note": self.note,
        }


def _format_before(context: OffsetsContext, at: int, rows: Sequence[_Before]) -> list[RenderableType]:
    cells = [
        (
            str(r.tp),
            count(r.offset),
            show_instant(r.hit.timestamp) if r.hit else "–",
            count(r.committed),
            "–" if r.committed is None else f"{r.committed - r.offset:+,}",
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
    source_name: Annotated[
        str,
        typer.Option(
            "--with", metavar="FILE|GROUP", help="A file of offsets, or the name of a group.", show_default=False
        ),
    ],
    other: OtherGroup = None,
) -> int:
    """Compare the committed offsets of a feed's group with those of a file or another group.

    If a file of that name exists, its lines TOPIC,PARTITION,OFFSET are read; otherwise it is a group. Exit 0 if the
    offsets are equal, 1 if they differ.

    $ sluice offsets export orders --file monday.csv
    $ sluice offsets diff orders --with monday.csv
    $ sluice offsets diff orders --with legacy-loader
    """
    definition = session.feed(feed)
    with session.terminal.working("querying Kafka"), open_context(session, definition, other) as context:
        ours = {s.tp: s.before for s in context.spots if s.before is not None}
        theirs = _read_theirs(context, source_name)
    rows = [(tp, ours.get(tp), theirs.get(tp)) for tp in sorted({*ours, *theirs})]
    differ = [row for row in rows if row[1] != row[2]]
    session.terminal.show(*_diff_view(context, source_name, rows, differ))
    documents = [{"topic": tp.topic, "partition": tp.partition, "offset": a, "other": b} for tp, a, b in rows]
    session.terminal.print_document(
        {**context.to_document(), "with": source_name, "same": not differ, "offsets": documents}
    )
    return 1 if differ else 0


def _read_theirs(context: OffsetsContext, source: str) -> Mapping[TopicPartition, int]:
    """Raises UsageError if the argument is neither a file nor a group with offsets."""
    if Path(source).exists():
        return read_offsets(Path(source), context)
    if not (committed := context.groups.fetch_committed(source)):
        raise UsageError(
            f"{source!r} is neither a file nor a group with committed offsets",
            remedy="choose a file of sluice offsets export, or a group of sluice groups list",
        )
    mine = {s.tp for s in context.spots}
    return {tp: at.offset for tp, at in committed.items() if tp in mine}


def _diff_view(
    context: OffsetsContext, source: str, rows: Sequence[_Pair], differ: Sequence[_Pair]
) -> list[RenderableType]:
    title = heading(f"Offsets of {context.feed.name}", f"group {context.name}, compared with {source}")
    if not differ:
        return [title, good(f"the same in {many(len(rows), 'partition')}")]
    cells = [(str(tp), count(a), count(b), _format_gap(a, b)) for tp, a, b in differ]
    return [
        title,
        table(("partition", "committed", "the other", "it is"), limit_rows(cells), right="committed the"),
        Text(f"  the same in {len(rows) - len(differ)} of {many(len(rows), 'partition')}"),
    ]


_Pair = tuple[TopicPartition, int | None, int | None]


def _format_gap(ours: int | None, theirs: int | None) -> str:
    if ours is None or theirs is None:
        return "only here" if theirs is None else "only there"
    return f"{count(theirs - ours)} ahead" if theirs > ours else f"{count(ours - theirs)} behind"
