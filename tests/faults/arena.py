"""Brokers that faults meet. Sluice reaches each through a proxy of its own, everybody else directly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kafka import KafkaAdminClient
from kafka import TopicPartition as Plain

from sluice.resources.local import local_kafka, properties
from sluice.resources.local.local_kafka import LocalKafka
from tests.resources.kafka.proxy import Proxy
from tests.resources.kafka.tools import until

GROUP, TRANSACTION = "__consumer_offsets", "__transaction_state"
COORDINATORS = 5
"""Partitions of each of the two topics."""
_HASTY = {"log.retention.check.interval.ms": "500", "log.initial.task.delay.ms": "500"}
"""Retention looks every five minutes by default."""


@dataclass(frozen=True)
class Arena:
    """`kafka` as producers and the checker reach it; `proxies` by broker."""

    kafka: LocalKafka
    proxies: Mapping[int, Proxy]

    @property
    def behind(self) -> str:
        """The bootstrap addresses for Sluice: whoever starts there is told of the proxies only."""
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies.values())

    @contextmanager
    def admin(self) -> Iterator[KafkaAdminClient]:
        with closing(KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client())) as client:
            yield client

    def create(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None, first: int = 0, replicas: int = 3
    ) -> None:
        """A topic with each partition on so many brokers, or all there are, led in turn, beginning with the `first`."""
        ids = self.kafka.broker_ids
        copies = range(min(replicas, len(ids)))
        assigned = {p: [ids[(first + p + n) % len(ids)] for n in copies] for p in range(partitions)}
        wanted = {"assignments": assigned, "configs": {"retention.ms": "-1", **(config or {})}}
        with self.admin() as admin:
            admin.create_topics({topic: wanted}, wait_for_metadata=True)

    def leaders(self, topic: str) -> dict[int, int]:
        """By partition; −1 where there is none."""
        with self.admin() as admin:
            (described,) = admin.describe_topics([topic])
        return {p["partition_index"]: p["leader_id"] for p in described["partitions"]}

    def coordinator(self, group: str) -> int:
        """The broker that coordinates the group."""
        return self.leaders(GROUP)[place(group)]

    def coordinator_of_transactions(self, transactional_id: str) -> int:
        return self.leaders(TRANSACTION)[place(transactional_id)]

    def heal(self) -> None:
        """All brokers run, all proxies pass everything on, every partition has all replicas in sync."""
        for proxy in self.proxies.values():
            proxy.heal()
        self.kafka.start_broker(*(broker.id for broker in self.kafka.status().brokers if not broker.running))
        until(self._in_sync, 120)

    def controller(self) -> int:
        """The broker that leads the quorum of controllers."""
        with self.admin() as admin:
            (topic,) = admin.describe_metadata_quorum()["topics"]
        return int(topic["partitions"][0]["leader_id"])

    def lead(self, topic: str, leaders: Mapping[int, int]) -> None:
        """Move leadership of each partition to the broker, which has a replica."""
        ids = self.kafka.broker_ids
        wanted = {Plain(topic, p): [b, *(n for n in ids if n != b)] for p, b in leaders.items()}
        with self.admin() as admin:
            admin.alter_partition_reassignments(wanted)
            until(lambda: not admin.list_partition_reassignments())
            admin.elect_leaders(0, {topic: list(leaders)}, raise_errors=False)
        until(lambda: self.leaders(topic).items() >= leaders.items(), 60)

    def _in_sync(self) -> bool:
        with self.admin() as admin:
            described = admin.describe_topics(None)
        return all(
            len(p["isr_nodes"]) == len(p["replica_nodes"]) and p["leader_id"] >= 0
            for topic in described
            for p in topic["partitions"]
        )

    def delete_records(self, topic: str, below: Mapping[int, int]) -> None:
        with self.admin() as admin:
            admin.delete_records({Plain(topic, p): offset for p, offset in below.items()})


def place(name: str, partitions: int = COORDINATORS) -> int:
    """Kafka's `Utils.abs(name.hashCode()) % partitions`: where a group or a transactional id lives; ASCII only.

    `Utils.abs` gives the amount of a negative hash, and 0 for the lowest one, which has none.
    """
    code = 0
    for byte in name.encode("ascii"):
        code = (31 * code + byte) & 0xFFFFFFFF
    amount = min(code, (1 << 32) - code)
    return (amount & 0x7FFFFFFF) % partitions


@contextmanager
def opened(root: Path, brokers: int = 3, settings: Mapping[str, str] | None = None) -> Iterator[Arena]:
    """A cluster of its own in the folder, thrown away at the end. `settings`: server properties on top of ours."""
    taken: list[int] = []

    def listeners(node: properties.Node) -> dict[str, str]:
        own = usual(node)
        port = taken[node.id - 1]
        own["listeners"] += f",CLIENTS://127.0.0.1:{port}"
        own["advertised.listeners"] += f",CLIENTS://127.0.0.1:{proxies[node.id].port}"
        own["listener.security.protocol.map"] += ",CLIENTS:PLAINTEXT"
        return own

    usual = properties.plain_listeners
    with ExitStack() as stack:
        taken += [port for (port,) in local_kafka.free_ports(brokers, of_each=1)]
        proxies = {
            n: stack.enter_context(closing(Proxy(root.parent, lambda port=port: ("127.0.0.1", port))))
            for n, port in enumerate(taken, start=1)
        }
        with patch.object(properties, "plain_listeners", listeners):
            kafka = stack.enter_context(
                LocalKafka(root, brokers=brokers, keep=False, settings={**_HASTY, **(settings or {})})
            )
        yield Arena(kafka, proxies)


def words(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines that somebody wrote; a last one that was cut off is passed over."""
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        if line.startswith(b"{"):
            yield json.loads(line)
