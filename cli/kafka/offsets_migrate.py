"""`sluice offsets migrate`: a group's committed offsets from ZooKeeper to Kafka, or back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.kafka.offsets import group
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Only, Yes
from sluice.cli.terminal import output
from sluice.cli.terminal.output import SHOWN_ROWS, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import CommittedOffset, PartitionState, TopicPartition
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import OffsetStore
    from sluice.pipelines.operating.migrate_offsets import Migration, OffsetMigration


def register(_: typer.Typer) -> None:
    """The command hangs on `sluice offsets`, which is registered elsewhere."""


@command(group)
def migrate(
    session: Session,
    feed: FeedName,
    into: Annotated[str, option("--into", "STORE", "Target of the copy: zookeeper or kafka.")],
    only: Only = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Copy the committed offsets of a feed's group from ZooKeeper to Kafka, or back.

    It asks for confirmation on a terminal; elsewhere it needs --yes. The group must have no consumers, neither old ones
    nor members in Kafka. Old consumers that start during the migration wait. No offset moves backwards, or beyond the
    end of its log. After an interruption, run it again: offsets that were copied stay.

    ZooKeeper's address is the feed's `offsets: {connect: …}`. After the migration, change `offsets.store` in the feed.

    $ sluice offsets migrate orders --into kafka --dry-run
    $ sluice offsets migrate orders --into kafka --yes --json | jq .moved
    """
    from sluice.pipelines.operating import migrate_offsets as migrating

    definition, source = session.feed(feed), _find_other_store(into)
    done = False
    with session.open_ports(definition) as ports, session.open_stores(definition) as stores:
        with session.terminal.working("querying Kafka and ZooKeeper"):
            logs = _list_logs(definition, ports.cluster, tuple(map(parsing.parse_partition, only or ())))
            plan = migrating.plan(stores, source, logs)
            refused = migrating.refusal(definition.name, definition.group, plan)
            # Consumers that run now would move offsets during the copy.
            if refused is None and (used := migrating.in_use(stores)):
                refused = migrating.held_error(definition.group, used)
        # One refused partition refuses all: a group must not continue from two stores.
        sound = not plan.of(*migrating.REFUSED)
        ask = sound and not (dry_run or yes) and bool(plan.of(migrating.MigrationAction.MOVE))
        if ask:
            session.terminal.show(*_format_table(definition, plan, done))
            moves = many(len(plan.of(migrating.MigrationAction.MOVE)), "offset")
            session.terminal.confirm(f"Copy {moves} of group {definition.group} to {plan.target}?")
        if sound and not dry_run:
            with session.terminal.working("copying offsets"):
                # It plans again under its lock: offsets may have moved while somebody read the question.
                plan, refused = migrating.migrate(definition.name, stores, source, logs), None
            done = True
    if not ask:
        session.terminal.show(*_format_table(definition, plan, done))
    session.terminal.show(*_format_result(definition, plan, done))
    if refused is not None:
        session.terminal.fail(refused)
    session.terminal.print_document(
        feed=feed,
        group=definition.group,
        from_=plan.source,
        to=plan.target,
        applied=done,
        moved=len(plan.of(migrating.MigrationAction.MOVE)) if done else 0,
        offsets=plan.rows,
        problem=refused,
    )
    return refused.exit_code if refused else 0


def _find_other_store(text: str) -> OffsetStore:
    """Returns the store to copy from: the one that `text` does not name. Raises UsageError for an unknown name."""
    from sluice.pipelines.feed.sections import OffsetStore

    if text not in tuple(OffsetStore):
        raise UsageError(f"no store {text!r}", remedy=f"one of {', '.join(OffsetStore)}")
    return next(store for store in OffsetStore if store != text)


def _list_logs(feed: Feed, cluster: Any, only: Sequence[TopicPartition]) -> tuple[PartitionState, ...]:
    """All partitions that the feed reads, or those named. Raises UsageError for one that it does not."""
    from sluice.pipelines.batch.survey import list_topics

    partitions = {p.tp: p for p in cluster.partitions(list_topics(feed, cluster), feed.isolation)}
    if unknown := next((tp for tp in only if tp not in partitions), None):
        raise UsageError(
            f"{unknown} is not a partition that feed {feed.name} reads",
            remedy=f"list its partitions: sluice offsets show {feed.name}",
        )
    return tuple(partitions[tp] for tp in dict.fromkeys(only)) if only else tuple(partitions.values())


def _format_table(feed: Feed, plan: Migration, done: bool) -> list[RenderableType]:
    rows = [
        (
            str(r.tp),
            count(_at(r.source)),
            count(_at(r.target)),
            count(r.log_end),
            _note(r, done),
        )
        for r in plan.rows[:SHOWN_ROWS]
    ]
    names = ("partition", f"in {plan.source}", f"in {plan.target}", "log end", "")
    return [
        heading(f"Offsets of group {feed.group}, from {plan.source} to {plan.target}"),
        table(names, limit_rows(rows, len(plan.rows)), right="in log", optional="log"),
    ]


def _format_result(feed: Feed, plan: Migration, done: bool) -> list[RenderableType]:
    from sluice.pipelines.operating.migrate_offsets import REFUSED, MigrationAction, describe_migration

    if plan.of(*REFUSED):
        return []
    if not done:
        moves = many(len(plan.of(MigrationAction.MOVE)), "offset")
        return [Text(), output.format_dry_run(f"{moves} would move; nothing was changed")]
    out: list[RenderableType] = [Text(), good(f"{describe_migration(plan)}, and read back")]
    if feed.offsets.store is not plan.target:
        out.append(
            indent(f"The feed still reads and commits in {feed.offsets.store}: set offsets.store to {plan.target}.")
        )
    return out


def _note(row: OffsetMigration, done: bool) -> str | Text:
    from sluice.pipelines.operating.migrate_offsets import REFUSED, MigrationAction

    if row.step in REFUSED:
        return warn(str(row.step))
    if row.lost:
        return warn(f"{many(row.lost, 'offset')} no longer in Kafka: the next run records the loss")
    return "moved" if done and row.step is MigrationAction.MOVE else str(row.step)


def _at(committed: CommittedOffset | None) -> int | None:
    return committed.offset if committed else None
