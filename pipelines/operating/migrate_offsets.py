"""Moving a group's committed offsets from ZooKeeper to Kafka, or back: the same offsets and marks, nothing else.

    1 own the partitions in ZooKeeper          refuse: GroupHeld, by old consumers, a run, or another migration
    2 look for members in Kafka                refuse: GroupHeld
    3 read both stores, make the plan again     refuse: beyond the log, half written, going back
    4 write the offsets missing in the target, and read them back

Guarantees: the source is only read. No partition is put back, or beyond its log. After a kill at any step, the same
command completes the migration: offsets already in the target are unchanged. The ledger needs no entry, since an
offset means the same to it in either store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.errors import CommitFenced, GroupHeld, Refused, SluiceError, Unknown, UsageError
from sluice.pipelines.feed.sections import OffsetStore
from sluice.pipelines.model.kafka import CommittedOffset, PartitionState, TopicPartition
from sluice.pipelines.ports import Group, Groups
from sluice.pipelines.util.documents import Derived, Flat
from sluice.pipelines.util.units import join_first, many

Committed = Mapping[TopicPartition, CommittedOffset | None]
_SHOWN = 5


class MigrationAction(StrEnum):
    """The action for a partition. The last three are refused."""

    MOVE = "to move"
    DONE = "there already"
    NOTHING = "nothing to move"
    BEYOND = "beyond the log"
    BACK = "would go back"
    MISSING = "missing"


REFUSED = (MigrationAction.BEYOND, MigrationAction.BACK, MigrationAction.MISSING)


@dataclass(frozen=True, slots=True)
class OffsetMigration:
    """One partition: its offsets in source and target, and the bounds of its log."""

    tp: Flat[TopicPartition]
    step: MigrationAction
    source: CommittedOffset | None
    target: CommittedOffset | None
    log_start: int
    log_end: int

    @property
    def lost(self) -> Derived[int]:
        """How many offsets after the committed one Kafka no longer has."""
        return max(0, self.log_start - self.source.offset) if self.source else 0


@dataclass(frozen=True, slots=True)
class Migration:
    """Between which stores, and what about each partition."""

    source: OffsetStore
    target: OffsetStore
    rows: tuple[OffsetMigration, ...]

    def of(self, *steps: MigrationAction) -> tuple[OffsetMigration, ...]:
        return tuple(r for r in self.rows if r.step in steps)


@dataclass(frozen=True, slots=True)
class Stores:
    """Both stores of one group. `zookeeper` can own partitions, and commits as their owner."""

    group: str
    zookeeper: Group
    kafka: Groups

    def read_committed(self, store: OffsetStore, partitions: Sequence[TopicPartition]) -> Committed:
        if store is OffsetStore.ZOOKEEPER:
            return self.zookeeper.fetch_committed(partitions)
        offsets = self.kafka.fetch_committed(self.group)
        return {tp: offsets.get(tp) for tp in partitions}


def plan(stores: Stores, source: OffsetStore, logs: Sequence[PartitionState]) -> Migration:
    """Returns the steps for these partitions. Raises Refused for a node of ZooKeeper that holds no offset."""
    target = next(s for s in OffsetStore if s is not source)
    tps = [p.tp for p in logs]
    have, to = stores.read_committed(source, tps), stores.read_committed(target, tps)
    topics = {tp.topic for tp, committed in have.items() if committed is not None}
    rows = (_row(p, have.get(p.tp), to.get(p.tp), half=p.tp.topic in topics) for p in logs)
    return Migration(source, target, tuple(rows))


def _row(
    log: PartitionState, source: CommittedOffset | None, target: CommittedOffset | None, *, half: bool
) -> OffsetMigration:
    def row(step: MigrationAction) -> OffsetMigration:
        return OffsetMigration(log.tp, step, source, target, log.log_start, log.high_watermark)

    if source is None:
        return row(MigrationAction.MISSING if half else MigrationAction.NOTHING)
    if source.offset > log.high_watermark:
        return row(MigrationAction.BEYOND)
    if target is not None and target.offset > source.offset:
        return row(MigrationAction.BACK)
    return row(MigrationAction.DONE if target is not None and target.offset == source.offset else MigrationAction.MOVE)


def refusal(feed: str, group: str, migration: Migration) -> SluiceError | None:
    """The error that this migration would raise now, if any."""
    reasons: list[str] = []
    if beyond := migration.of(MigrationAction.BEYOND):
        where = _format_rows(beyond, lambda r: f"{_at(r.source)}, the log ends at {r.log_end}")
        reasons.append(f"beyond the end of the log: {where}")
    if missing := migration.of(MigrationAction.MISSING):
        reasons.append(
            f"without an offset in {migration.source}, where their topic has others: {_format_rows(missing)}"
        )
    if back := migration.of(MigrationAction.BACK):
        reasons.append(
            f"further on in {migration.target} than in {migration.source}: "
            + _format_rows(back, lambda r: f"{_at(r.target)}, not {_at(r.source)}")
        )
    if not reasons:
        return None
    sound = migration.of(MigrationAction.MOVE, MigrationAction.DONE)
    first = migration.of(*REFUSED)[0]
    log_bound = first.log_end if first.step is MigrationAction.BEYOND else first.log_start
    offset = _at(first.target) if first.step is MigrationAction.BACK else log_bound
    only = " ".join(f"--only {r.tp}" for r in sound[:_SHOWN]) + (" …" if len(sound) > _SHOWN else "")
    others = f"; or move only the others: {only}" if sound else ""
    return Refused(
        f"group {group} is not migrated; {'; '.join(reasons)}",
        remedy=f"correct the offset in the store, such as: sluice offsets reset {feed} --to-offset {offset}"
        f" --only {first.tp}{others}",
        topic=first.tp.topic,
        partition=first.tp.partition,
    )


def _format_rows(rows: Sequence[OffsetMigration], note: Callable[[OffsetMigration], str] | None = None) -> str:
    return join_first((f"{r.tp} ({note(r)})" if note else r.tp for r in rows), _SHOWN)


def _at(committed: CommittedOffset | None) -> int | None:
    return committed.offset if committed else None


def in_use(stores: Stores, mine: Iterable[str] = ()) -> str:
    """Returns a short text on the group's members in either store; empty if there are none."""
    others = [m for m in stores.zookeeper.members() if m.member_id not in set(mine)]
    view = stores.kafka.view(stores.group)
    users = [f"in ZooKeeper {', '.join(m.member_id for m in others[:3])}"] if others else []
    users += [] if view.free else [f"in Kafka {view.who()}, it is {view.state}"]
    return "; ".join(users)


def held_error(group: str, by: str) -> GroupHeld:
    return GroupHeld(
        f"group {group} is in use: {by}",
        remedy="stop its consumers, and wait for a run or a migration to end. One that was killed is gone when its "
        "session ends",
    )


def migrate(feed: str, stores: Stores, source: OffsetStore, logs: Sequence[PartitionState]) -> Migration:
    """Do it, by the numbered steps above. Returns the plan as it was carried out.

    Raises GroupHeld, Refused, CommitFenced (somebody wrote at the same time: repeat), UsageError (nothing to migrate).
    """
    tps = [p.tp for p in logs]
    stores.zookeeper.own(lambda: tps, lambda: None)
    if not (view := stores.kafka.view(stores.group)).free:
        raise held_error(stores.group, f"in Kafka {view.who()}, it is {view.state}")
    topics = sorted({tp.topic for tp in tps})
    with stores.zookeeper.join(topics, None) as owner:
        owner.fetch_committed(tps)  # a write to ZooKeeper depends on it
        migration = plan(stores, source, logs)
        if refused := refusal(feed, stores.group, migration):
            raise refused
        if not migration.of(MigrationAction.MOVE, MigrationAction.DONE):
            raise UsageError(
                f"group {stores.group} has no offsets in {source} of what {feed} reads", remedy="see sluice groups list"
            )
        moves = {r.tp: r.source for r in migration.of(MigrationAction.MOVE) if r.source is not None}
        if moves:
            with contextlib.suppress(Unknown):  # reading back decides
                if migration.target is OffsetStore.ZOOKEEPER:
                    owner.commit_plain(moves)
                else:
                    stores.zookeeper.own(lambda: tps, lambda: None)  # still ours
                    stores.kafka.put(stores.group, moves)
            _read_back(stores, migration.target, moves)
    return migration


def _read_back(stores: Stores, target: OffsetStore, moves: Mapping[TopicPartition, CommittedOffset]) -> None:
    stored = stores.read_committed(target, list(moves))
    for tp, meant in moves.items():
        if _at(stored.get(tp)) != meant.offset:
            raise CommitFenced(
                f"{tp}: tried to write {meant.offset} to {target}, which now holds {_at(stored.get(tp))}",
                remedy="run the command again: offsets already written stay. See which program commits for this group",
                topic=tp.topic,
                partition=tp.partition,
            )


def describe_migration(migration: Migration) -> str:
    """The outcome of a migration in a few words."""
    moved, there = len(migration.of(MigrationAction.MOVE)), len(migration.of(MigrationAction.DONE))
    also = f", {there} there already" if there else ""
    return f"{many(moved, 'offset')} moved from {migration.source} to {migration.target}{also}"
