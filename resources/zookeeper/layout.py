"""The old high-level consumer's layout in ZooKeeper: paths and contents of its nodes.

    /consumers/<group>/ids/<consumer>                  a member of the group (ephemeral): subscription as JSON
    /consumers/<group>/owners/<topic>/<partition>      the partition's reader (ephemeral): the name of a stream
    /consumers/<group>/offsets/<topic>/<partition>     the next offset to read, as decimal text
    /consumers/<group>/sluice/<topic>/<partition>      ours: the metadata that Kafka would keep with an offset

An offset node has no room for metadata, so Sluice keeps its mark in a separate node, written in the same transaction of
ZooKeeper. Both nodes then have the same `mzxid`, and a mark counts only while they do: an offset that another client
has written since has none.

Pure functions; `tree` reads and writes. Layout: Kafka 0.8.2 to 2.x, ZookeeperConsumerConnector and ZkUtils.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.util.grouping import group_by

CONSUMERS = "/consumers"
_OFFSET = re.compile(rb"\s*([0-9]{1,19})\s*")
_BIGGEST = (1 << 63) - 1


def group_path(group: str) -> str:
    return f"{CONSUMERS}/{group}"


def ids_path(group: str) -> str:
    return f"{CONSUMERS}/{group}/ids"


def owner_path(group: str, tp: TopicPartition) -> str:
    return f"{CONSUMERS}/{group}/owners/{tp.topic}/{tp.partition}"


def offset_path(group: str, tp: TopicPartition) -> str:
    return f"{CONSUMERS}/{group}/offsets/{tp.topic}/{tp.partition}"


def mark_path(group: str, tp: TopicPartition) -> str:
    return f"{CONSUMERS}/{group}/sluice/{tp.topic}/{tp.partition}"


def parse_offset(data: bytes) -> int | None:
    """Return the offset in a node; None if its text is no offset."""
    match = _OFFSET.fullmatch(data)
    return int(match[1]) if match and int(match[1]) <= _BIGGEST else None


def dump_offset(offset: int) -> bytes:
    return str(offset).encode()


def dump_mark(committed: CommittedOffset) -> bytes:
    document = {"offset": committed.offset, "epoch": committed.leader_epoch, "metadata": committed.metadata}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_mark(offset: int, data: bytes) -> CommittedOffset:
    """Return the offset with the data of the mark's node, or without any if that cannot be read."""
    try:
        document = json.loads(data)
        if document["offset"] == offset:
            return CommittedOffset(offset, int(document["epoch"]), str(document["metadata"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    return CommittedOffset(offset)


@dataclass(frozen=True, slots=True)
class Consumer:
    """One consumer of the group.

    `topics`: the topics that it names, with its number of streams for each. Empty for a pattern, or if its registration
    cannot be read: then it may read any topic.
    """

    id: str
    topics: Mapping[str, int]

    @property
    def host(self) -> str:
        """The machine in an id made by the old consumer itself: `<group>_<host>-<ms>-<hex>`."""
        match = re.fullmatch(r".*_(.+)-[0-9]{10,}-[0-9a-f]{1,8}", self.id)
        return match[1].removeprefix(OURS) if match else ""

    @property
    def ours(self) -> bool:
        """True if a run of Sluice registered it."""
        return f"_{OURS}" in self.id

    def reads(self, topics: Iterable[str]) -> bool:
        """Return whether it may read any of the topics."""
        return not self.topics or not self.topics.keys().isdisjoint(topics)


OURS = "!sluice-"
"""The start of our consumers' ids, after the group. It sorts before every host name, see `registration`."""


def consumer_id(group: str, host: str, now: int, unique: str) -> str:
    """Return a new id, in the format of the old consumer."""
    return f"{group}_{OURS}{host}-{now}-{unique}"


def registration(partitions: Iterable[TopicPartition], now: int) -> bytes:
    """Return the registration of a run that wants all these partitions: a stream of each topic for each partition.

    Old consumers share a topic by range over all registered streams, sorted by id; or by round robin all topics at
    once, for which each must have the same streams. Ours sort first and are as many as there are partitions of all
    topics, so by their own arithmetic every partition is ours, and a consumer that comes during our run waits quietly
    until our registration is gone.
    """
    wanted = set(partitions)
    streams = dict.fromkeys(sorted({tp.topic for tp in wanted}), len(wanted))
    document = {"version": 1, "subscription": streams, "pattern": "static", "timestamp": str(now)}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_consumer(name: str, data: bytes) -> Consumer:
    try:
        document = json.loads(data)
        if document.get("pattern", "static") == "static":
            return Consumer(name, {str(t): int(n) for t, n in document["subscription"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return Consumer(name, {})


def owners(consumer: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bytes]:
    """Return the stream that owns each partition, by the old consumers' range: the n-th in order of names."""
    out: dict[TopicPartition, bytes] = {}
    for tps in group_by(sorted(set(partitions)), lambda tp: tp.topic).values():
        streams = sorted(f"{consumer}-{n}" for n in range(len(tps)))
        out |= {tp: stream.encode() for tp, stream in zip(tps, streams, strict=True)}
    return out
