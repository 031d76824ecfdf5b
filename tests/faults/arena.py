"""The cluster of the fault suite. Sluice reaches each broker through a proxy, all other clients directly."""

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
from tests.resources.kafka.tools import wait_until

GROUP, TRANSACTION = "__consumer_offsets", "__transaction_state"
COORDINATORS = 5
"""Partitions of each of the two topics."""
_FAST_RETENTION = {"log.retention.check.interval.ms": "500", "log.initial.task.delay.ms": "500"}
"""By default retention checks every five minutes."""


@dataclass(frozen=True)
class Arena:
    """A cluster with a proxy before each broker. Producers and the checker use `kafka` directly."""

    kafka: LocalKafka
    proxies: Mapping[int, Proxy]

    @property
    def proxied_bootstrap(self) -> str:
        """The bootstrap addresses for Sluice. Metadata from there names only the proxies."""
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies.values())

    @contextmanager
    def connect_admin(self) -> Iterator[KafkaAdminClient]:
        with closing(KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap, **self.kafka.client())) as client:
            yield client

    def create(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None, first: int = 0, replicas: int = 3
    ) -> None:
        """Create a topic whose leaders alternate among the brokers, beginning with the one at index `first`.

        `replicas` is capped at the number of brokers.
        """
        ids = self.kafka.broker_ids
        copies = range(min(replicas, len(ids)))
        assignments = {p: [ids[(first + p + n) % len(ids)] for n in copies] for p in range(partitions)}
        spec = {"assignments": assignments, "configs": {"retention.ms": "-1", **(config or {})}}
        with self.connect_admin() as admin:
            admin.create_topics({topic: spec}, wait_for_metadata=True)

    def find_leaders(self, topic: str) -> dict[int, int]:
        """Returns the leader of each partition, −1 for none."""
        with self.connect_admin() as admin:
            (description,) = admin.describe_topics([topic])
        return {p["partition_index"]: p["leader_id"] for p in description["partitions"]}

    def find_coordinator(self, group: str) -> int:
        """Returns the broker that coordinates the group."""
        return self.find_leaders(GROUP)[compute_partition(group)]

    def find_transaction_coordinator(self, transactional_id: str) -> int:
        return self.find_leaders(TRANSACTION)[compute_partition(transactional_id)]

    def heal(self) -> None:
        """Restart brokers, reset proxies, and wait until every partition has all replicas in sync."""
        for proxy in self.proxies.values():
            proxy.heal()
        self.kafka.start_broker(*(broker.id for broker in self.kafka.status().brokers if not broker.running))
        wait_until(self._is_in_sync, 120)

    def find_controller(self) -> int:
        """Returns the broker that leads the controller quorum."""
        with self.connect_admin() as admin:
            (topic,) = admin.describe_metadata_quorum()["topics"]
        return int(topic["partitions"][0]["leader_id"])

    def move_leaders(self, topic: str, leaders: Mapping[int, int]) -> None:
        """Move leadership of each partition to a broker that has a replica."""
        ids = self.kafka.broker_ids
        replicas = {Plain(topic, p): [b, *(n for n in ids if n != b)] for p, b in leaders.items()}
        with self.connect_admin() as admin:
            admin.alter_partition_reassignments(replicas)
            wait_until(lambda: not admin.list_partition_reassignments())
            admin.elect_leaders(0, {topic: list(leaders)}, raise_errors=False)
        wait_until(lambda: self.find_leaders(topic).items() >= leaders.items(), 60)

    def _is_in_sync(self) -> bool:
        with self.connect_admin() as admin:
            topics = admin.describe_topics(None)
        return all(
            len(p["isr_nodes"]) == len(p["replica_nodes"]) and p["leader_id"] >= 0
            for topic in topics
            for p in topic["partitions"]
        )

    def delete_records(self, topic: str, below: Mapping[int, int]) -> None:
        with self.connect_admin() as admin:
            admin.delete_records({Plain(topic, p): offset for p, offset in below.items()})


def compute_partition(name: str, partitions: int = COORDINATORS) -> int:
    """Returns the coordinator partition of a group or transactional id: `Utils.abs(name.hashCode()) % partitions`.

    Kafka's `Utils.abs` returns 0 for the lowest integer, which has no positive counterpart. ASCII names only.
    """
    code = 0
    for byte in name.encode("ascii"):
        code = (31 * code + byte) & 0xFFFFFFFF
    magnitude = min(code, (1 << 32) - code)
    return (magnitude & 0x7FFFFFFF) % partitions


@contextmanager
def run_arena(root: Path, brokers: int = 3, settings: Mapping[str, str] | None = None) -> Iterator[Arena]:
    """Run a cluster in the folder and delete it at the end. `settings` override the suite's server properties."""
    ports: list[int] = []

    def build_listeners(node: properties.Node) -> dict[str, str]:
        lines = original_listeners(node)
        port = ports[node.id - 1]
        lines["listeners"] += f",CLIENTS://127.0.0.1:{port}"
        lines["advertised.listeners"] += f",CLIENTS://127.0.0.1:{proxies[node.id].port}"
        lines["listener.security.protocol.map"] += ",CLIENTS:PLAINTEXT"
        return lines

    original_listeners = properties.plain_listeners
    with ExitStack() as stack:
        ports += [port for (port,) in local_kafka.free_ports(brokers, of_each=1)]
        proxies = {
            n: stack.enter_context(closing(Proxy(root.parent, lambda port=port: ("127.0.0.1", port))))
            for n, port in enumerate(ports, start=1)
        }
        with patch.object(properties, "plain_listeners", build_listeners):
            kafka = stack.enter_context(
                LocalKafka(root, brokers=brokers, keep=False, settings={**_FAST_RETENTION, **(settings or {})})
            )
        yield Arena(kafka, proxies)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file's lines. Skips other lines and an incomplete last line."""
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        if line.startswith(b"{"):
            yield json.loads(line)
