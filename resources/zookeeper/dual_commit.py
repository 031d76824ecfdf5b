"""Offsets in Kafka and in ZooKeeper at once (`dual_commit`), as old clients kept them during a migration.

Promises: reads return the larger of the two. Commits go to Kafka first and then to ZooKeeper, the same offsets to both;
so after an interruption at any point each store holds accounted offsets, and so does the larger one. A partition whose
stores differ is not `settled`: the next commit writes it again, to both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sluice.pipelines.errors import SluiceError, Unknown
from sluice.pipelines.model.consumer_groups import GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import DeadLetter, Group, Groups, Member, Membership

Committed = Mapping[TopicPartition, CommittedOffset | None]
Offsets = Mapping[TopicPartition, CommittedOffset]
Close = Callable[[], None]


def larger(kafka: CommittedOffset | None, zookeeper: CommittedOffset | None) -> CommittedOffset | None:
    """Return the offset from which the group goes on: Kafka's if both hold the same, unsettled if they differ."""
    if kafka is None or zookeeper is None:
        only = kafka or zookeeper
        return None if only is None else replace(only, settled=False)
    chosen = kafka if kafka.offset >= zookeeper.offset else zookeeper
    return chosen if kafka.offset == zookeeper.offset else replace(chosen, settled=False)


def merged(kafka: Committed, zookeeper: Committed) -> dict[TopicPartition, CommittedOffset | None]:
    return {tp: larger(kafka.get(tp), zookeeper.get(tp)) for tp in {**kafka, **zookeeper}}


class BothGroup:
    """`ports.Group` over both stores.

    Others are checked in both: in ZooKeeper before we read, in Kafka before we commit.
    """

    def __init__(self, kafka: Group, zookeeper: Group, close: Close) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper
        self.close = close

    def committed(self, partitions: Iterable[TopicPartition]) -> Committed:
        wanted = list(partitions)
        return merged(self._kafka.committed(wanted), self._zookeeper.committed(wanted))

    def members(self) -> tuple[Member, ...]:
        return (*self._kafka.members(), *self._zookeeper.members())

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None:
        self._zookeeper.own(partitions, lost)

    @contextlib.contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[BothMembership]:
        with (
            self._zookeeper.join(topics, None) as zookeeper,
            self._kafka.join(topics, transactional_id) as kafka,
        ):
            yield BothMembership(kafka, zookeeper)


class BothMembership:
    """Our membership in both. Offsets that Kafka refuses are not written to ZooKeeper."""

    def __init__(self, kafka: Membership, zookeeper: Membership) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper

    def init_transactions(self) -> None:
        self._kafka.init_transactions()

    def committed(self, partitions: Iterable[TopicPartition]) -> Committed:
        wanted = list(partitions)
        return merged(self._kafka.committed(wanted), self._zookeeper.committed(wanted))

    def partitions_of(self, topic: str) -> int:
        return self._kafka.partitions_of(topic)

    def commit_transaction(self, offsets: Offsets, topic: str = "", letters: Iterable[DeadLetter] = ()) -> None:
        self._then_zookeeper(lambda: self._kafka.commit_transaction(offsets, topic, letters), offsets)

    def commit_plain(self, offsets: Offsets) -> None:
        self._then_zookeeper(lambda: self._kafka.commit_plain(offsets), offsets)

    def _then_zookeeper(self, in_kafka: Close, offsets: Offsets) -> None:
        """Write to ZooKeeper even if Kafka's answer was lost: the offsets are accounted for in either store."""
        unknown: SluiceError | None = None
        try:
            in_kafka()
        except Unknown as error:
            unknown = error
        self._zookeeper.commit_plain(offsets)
        if unknown:
            raise unknown


class BothGroups:
    """`ports.Groups` over both stores. A group is shown from the store that has members, Kafka's first."""

    def __init__(self, kafka: Groups, zookeeper: Groups, close: Close) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper
        self.close = close

    def listed(self) -> tuple[ListedGroup, ...]:
        """Return all groups of Kafka, and ZooKeeper's groups that Kafka does not know."""
        groups = {g.name: g for g in (*self._zookeeper.listed(), *self._kafka.listed())}
        return tuple(groups[name] for name in sorted(groups))

    def view(self, group: str) -> GroupView:
        kafka, zookeeper = self._kafka.view(group), self._zookeeper.view(group)
        return zookeeper if (kafka.free and not zookeeper.free) or not kafka.exists else kafka

    def committed(self, group: str) -> Offsets:
        offsets = merged(self._kafka.committed(group), self._zookeeper.committed(group))
        return {tp: offset for tp, offset in offsets.items() if offset is not None}

    def put(self, group: str, offsets: Offsets) -> None:
        self._kafka.put(group, offsets)
        self._zookeeper.put(group, offsets)
