"""The Groups port over the old consumers' layout in ZooKeeper: every group of one tree.

Promises: reading disturbs nobody and registers nothing. `put` writes only while nobody is registered and nobody owns a
partition, all partitions in one transaction that depends on the versions it read.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice.pipelines.errors import GroupHeld
from sluice.pipelines.model.consumer_groups import ZOOKEEPER, Broker, GroupMember, GroupState, GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connection_settings import CLIENT_ID
from sluice.resources.zookeeper import layout
from sluice.resources.zookeeper.layout import Consumer
from sluice.resources.zookeeper.tree import Changed, Tree, chunks, writes

NO_BROKER = -1


class ZooKeeperGroups:
    """All groups of one tree. Opens no connection before the first request."""

    def __init__(self, connect: str) -> None:
        self._tree = Tree(connect)

    def close(self) -> None:
        self._tree.close()

    def listed(self) -> tuple[ListedGroup, ...]:
        """Return every group that has a node, sorted by name."""
        views = (self.view(name) for name in self._tree.children(layout.CONSUMERS))
        return tuple(ListedGroup(v.name, v.kind, v.state, v.protocol_type, NO_BROKER) for v in views)

    def view(self, group: str) -> GroupView:
        """Return one group as it is now: Stable with registered consumers, Empty without, Dead if it has no node."""
        broker = Broker(NO_BROKER, self._tree.address)
        consumers = self._tree.consumers(group)
        if not consumers and not self._tree.exists(layout.group_path(group)):
            return GroupView(group, ZOOKEEPER, GroupState.DEAD, "consumer", "", broker, ())
        owned: dict[str, list[TopicPartition]] = {c.id: [] for c in consumers}
        for tp, stream in self._tree.owners(group, self._ownable(group)).items():
            owned.setdefault(stream.rpartition("-")[0] or stream, []).append(tp)
        by_id = {c.id: c for c in consumers}
        members = tuple(
            _member(by_id.get(name) or Consumer(name, {}), sorted(tps)) for name, tps in sorted(owned.items())
        )
        state = GroupState.STABLE if members else GroupState.EMPTY
        return GroupView(group, ZOOKEEPER, state, "consumer", "", broker, members)

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return all offsets of the group, with our mark if nobody has written since.

        Raises Refused for a node that holds no offset.
        """
        stored = self._tree.offsets(group, self._tree.with_offsets(group))
        return {tp: offset.committed for tp, offset in stored.items() if offset.committed is not None}

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Write offsets with their metadata.

        Raises GroupHeld if anybody is in the group, or writes its offsets at the same moment; Unknown if no answer
        came.
        """
        stored = self._tree.offsets(group, offsets)
        if not (view := self.view(group)).free:
            raise _conflict(group, view.who())
        for path in (layout.offset_path, layout.mark_path):
            self._tree.ensure(path(group, tp).rpartition("/")[0] for tp in offsets)
        for chunk in chunks(writes(group, offsets, stored)):
            try:
                self._tree.transact(chunk, f"putting the offsets of group {group} into ZooKeeper")
            except Changed as changed:
                raise _conflict(group, f"{changed.path}: {changed.what} at the same moment") from None

    def _ownable(self, group: str) -> list[TopicPartition]:
        root = f"{layout.group_path(group)}/owners"
        names = ((t, p) for t in self._tree.children(root) for p in self._tree.children(f"{root}/{t}"))
        return [TopicPartition(t, int(p)) for t, p in names if p.isascii() and p.isdigit()]


def _member(consumer: Consumer, owned: list[TopicPartition]) -> GroupMember:
    client = CLIENT_ID if consumer.ours else consumer.id
    return GroupMember(consumer.id, client, consumer.host or "an unknown host", None, tuple(owned))


def _conflict(group: str, by: str) -> GroupHeld:
    return GroupHeld(
        f"group {group} in ZooKeeper is in use: {by}",
        remedy=f"stop its consumers and repeat; see who: sluice groups describe {group}",
    )
