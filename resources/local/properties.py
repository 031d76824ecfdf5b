"""The server properties of the local Kafka's nodes, and Java's way of writing properties.

Paths in them are relative to a node's folder, whose name may be anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

HOST = "127.0.0.1"


class Node(Protocol):
    """Inputs of one node's properties."""

    @property
    def id(self) -> int: ...

    @property
    def port(self) -> int: ...

    @property
    def controller_port(self) -> int: ...


def of_node(node: Node, nodes: Sequence[Node]) -> dict[str, str]:
    """Returns the properties of every node, independent of its listeners."""
    replicas = str(len(nodes))
    in_sync = "2" if len(nodes) > 1 else "1"
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.id),
        "controller.quorum.voters": ",".join(f"{n.id}@{HOST}:{n.controller_port}" for n in nodes),
        "controller.listener.names": "CONTROLLER",
        "log.dirs": "data",
        "auto.create.topics.enable": "false",
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        **_internal_topics(replicas, in_sync),
        # Sample events are stamped in the past: retention would delete them within minutes.
        "log.retention.ms": "-1",
        # Compaction takes 128 MB of heap by default and looks every 15 s.
        "log.cleaner.dedupe.buffer.size": "16777216",
        "log.cleaner.backoff.ms": "1000",
        # A broker that was killed can register again after this time only (9 s by default).
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "500",
        # Brokers that do nothing: a third less CPU than with twice a second for both.
        "metadata.max.idle.interval.ms": "5000",
        "replica.fetch.wait.max.ms": "2000",
        # Do not wait for a group to fill up, nor longer than requested for a dead member or transaction.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "500",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    }


def plain_listeners(node: Node) -> dict[str, str]:
    """One listener for everybody, without encryption or login."""
    return {
        "listeners": f"PLAINTEXT://{HOST}:{node.port},CONTROLLER://{HOST}:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{node.port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }


def _internal_topics(replicas: str, in_sync: str) -> dict[str, str]:
    return {
        "offsets.topic.num.partitions": "5",
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.num.partitions": "5",
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": "5",
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def to_text(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file, which is ASCII."""
    return "".join(f"{_escape(key)}={_escape(value)}\n" for key, value in properties.items())


def _escape(text: str) -> str:
    """One key or value of a Java properties file, which is Latin-1 and ends at a line's end."""
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "".join(c if c.isascii() else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in plain)


def _utf16(character: str) -> Iterator[int]:
    encoded = character.encode("utf-16-be")
    yield from (int.from_bytes(encoded[i : i + 2], "big") for i in range(0, len(encoded), 2))
