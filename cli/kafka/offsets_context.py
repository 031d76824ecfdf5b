"""Context of the commands of `sluice offsets`: group, options, and a feed's offsets by its ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.app.invocation import Session, make_group
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Ledger, State
    from sluice.pipelines.model.consumer_groups import GroupView
    from sluice.pipelines.operating.move_offsets import Spot
    from sluice.pipelines.ports import Groups, Ports

group = make_group(
    "Show, move, save and restore the committed offsets of a feed's group.",
    "sluice offsets show orders",
    "sluice offsets reset orders --to-frontier --dry-run",
    "sluice offsets export orders > orders.csv",
)

OtherGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="GROUP",
        help="Another group on the feed's Kafka. It must not be a feed's; no ledger records changes.",
        show_default="the feed's",
    ),
]


@dataclass(frozen=True)
class OffsetsContext:
    """Everything a command works on. `ledger` is None for a group that no feed owns."""

    feed: Feed
    name: str
    ports: Ports
    groups: Groups
    ledger: Ledger | None
    state: State
    view: GroupView
    spots: tuple[Spot, ...]

    @property
    def is_blocked(self) -> bool:
        """Returns True if the feed commits and its group has other members."""
        from sluice.pipelines.feed.sections import CommitMode
        from sluice.pipelines.operating.describe_group import list_strangers

        ours = self.ledger is not None and self.feed.commit is not CommitMode.NONE
        alone = self.view.free or (self.view.members and not list_strangers(self.feed, self.view))
        return ours and not alone

    def choose(self, only: Sequence[TopicPartition]) -> tuple[Spot, ...]:
        """All, or those named. Raises UsageError for one that is not there."""
        here = {s.tp: s for s in self.spots}
        if unknown := next((tp for tp in only if tp not in here), None):
            raise UsageError(
                f"feed {self.feed.name} does not read partition {unknown}",
                remedy=f"choose from {', '.join(map(str, list(here)[:5])) or 'nothing'}{' …' if len(here) > 5 else ''}",
            )
        return tuple(here[tp] for tp in dict.fromkeys(only)) if only else self.spots

    def to_document(self) -> dict[str, Any]:
        return {"feed": self.feed.name if self.ledger else None, "group": self.name, "state": self.view.state}


@contextmanager
def open_context(session: Session, feed: Feed, other: str | None) -> Iterator[OffsetsContext]:
    from sluice.pipelines.batch.survey import open_ledger
    from sluice.pipelines.ledger import State
    from sluice.pipelines.operating.describe_group import map_owners

    name = other or feed.group
    if name != feed.group and (owner := map_owners(feed, session.files.feeds.values()).get(name)):
        raise UsageError(
            f"--group {name} belongs to feed {owner.name}", remedy=f"use feed {owner.name} instead of {feed.name}"
        )
    with session.open_ports(feed) as ports, session.open_groups(feed) as groups:
        ledger = open_ledger(feed, ports) if name == feed.group else None
        state = ledger.read() if ledger else State()
        yield OffsetsContext(
            feed, name, ports, groups, ledger, state, groups.view(name), _list_spots(feed, ports, groups, name, state)
        )


def _list_spots(feed: Feed, ports: Ports, groups: Groups, name: str, state: State) -> tuple[Spot, ...]:
    """The partitions that the feed reads; of another group those that it has offsets in, if it has any."""
    from sluice.pipelines.feed.topic_selection import match
    from sluice.pipelines.operating.move_offsets import Spot
    from sluice.pipelines.planning.origins import find_key

    visible = ports.cluster.topics()
    committed = groups.fetch_committed(name)
    topics = {tp.topic for tp in committed} & set(visible) if name != feed.group else set()
    partitions = ports.cluster.partitions(sorted(topics or match(feed.topics, visible)), feed.isolation)
    keys = [find_key(state, p) for p in partitions]
    return tuple(
        Spot(p, key, committed.get(p.tp), state.frontier(key) if key in state.origins else None)
        for p, key in zip(partitions, keys, strict=True)
    )


def read_offsets(path: Path, context: OffsetsContext) -> dict[TopicPartition, int]:
    """Returns the offsets in a file. Raises UsageError with file and line."""
    from sluice.pipelines.operating.move_offsets import FILE_BYTES, parse_offsets

    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", remedy="choose a readable file of lines TOPIC,PARTITION,OFFSET"
        ) from None
    if len(data) > FILE_BYTES:
        raise UsageError(
            f"{path} is larger than {FILE_BYTES >> 20} MiB", remedy="choose a file of lines TOPIC,PARTITION,OFFSET"
        )
    return parse_offsets(data, str(path), context.name, {s.tp for s in context.spots})
