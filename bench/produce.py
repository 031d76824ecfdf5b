"""Sends record batches that are packed already: the Produce API (version 7) over one plain socket to each leader.

Promises: a batch stands at the offset that it was meant for, or `Failed` is raised; after `flush` all that was sent
has been acknowledged. For a local cluster without security, as the benchmark starts it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from kafka import KafkaAdminClient

from bench.batches import EncodedBatch
from sluice.pipelines.errors import Failed

_PRODUCE, _VERSION, _CLIENT = 0, 7, b"sluice-bench"
_ALL_REPLICAS, _PATIENCE_MS, _PAUSE_MS = -1, 30_000, 100
_UNACKNOWLEDGED = 16
_PARTITION_ANSWER = struct.Struct(">ihqqq")


class TopicProducer:
    """Sends to one topic; use it as a `with`."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        leaders, addresses = _layout(bootstrap, topic, partitions)
        connections = {node: _Connection(addresses[node], topic) for node in set(leaders.values())}
        self._by_partition = {partition: connections[node] for partition, node in leaders.items()}
        self._connections = list(connections.values())

    def send(self, batches: Mapping[int, EncodedBatch]) -> None:
        """One batch for each of these partitions; waits only when too much is unacknowledged. Raises Failed."""
        for connection in self._connections:
            if mine := {p: b for p, b in batches.items() if self._by_partition[p] is connection}:
                connection.send(mine)

    def flush(self) -> None:
        """Wait until everything is acknowledged. Raises Failed."""
        for connection in self._connections:
            connection.settle(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()


def _layout(bootstrap: str, topic: str, partitions: int) -> tuple[dict[int, int], dict[int, tuple[str, int]]]:
    """Each partition's leader, and each broker's address, once all have one: not every broker knows a new topic yet."""
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        for _ in range(_PATIENCE_MS // _PAUSE_MS):
            described = admin.describe_topics([topic])[0]["partitions"]
            brokers = {b["broker_id"]: (b["host"], b["port"]) for b in admin.describe_cluster()["brokers"]}
            leaders = {p["partition_index"]: p["leader_id"] for p in described if p["leader_id"] in brokers}
            if len(leaders) == partitions:
                return leaders, brokers
            time.sleep(_PAUSE_MS / 1000)
    raise Failed(f"{len(leaders)} of {topic}'s {partitions} partitions have a leader", remedy="repeat")


class _Connection:
    """One leader: requests go out ahead of their answers, which come in order."""

    def __init__(self, address: tuple[str, int], topic: str) -> None:
        self._socket = socket.create_connection(address, timeout=_PATIENCE_MS / 1000)
        self._topic = topic.encode()
        self._waiting: deque[dict[int, int]] = deque()

    def send(self, batches: Mapping[int, EncodedBatch]) -> None:
        self._socket.sendall(_request(self._topic, batches))
        self._waiting.append({partition: batch.base for partition, batch in batches.items()})
        self.settle(_UNACKNOWLEDGED)

    def settle(self, allowed: int) -> None:
        """Read answers until at most this many are missing."""
        while len(self._waiting) > allowed:
            _check(self._answer(), self._topic, self._waiting.popleft())

    def close(self) -> None:
        self._socket.close()

    def _answer(self) -> bytes:
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise Failed("the broker closed the connection while records were loaded", remedy="repeat")
            data += piece
        return bytes(data)


def _request(topic: bytes, batches: Mapping[int, EncodedBatch]) -> bytes:
    head = struct.pack(">hhih", _PRODUCE, _VERSION, 0, len(_CLIENT)) + _CLIENT
    body = struct.pack(">hhiih", -1, _ALL_REPLICAS, _PATIENCE_MS, 1, len(topic)) + topic
    parts = [struct.pack(">i", len(batches))]
    for partition, batch in batches.items():
        parts += (struct.pack(">ii", partition, len(batch.data)), batch.data)
    payload = b"".join((head, body, *parts))
    return struct.pack(">i", len(payload)) + payload


def _check(answer: bytes, topic: bytes, bases: Mapping[int, int]) -> None:
    """Raise Failed unless every batch of the request stands at its base offset."""
    begin = 4 + 4 + 2 + len(topic) + 4  # correlation id, one topic, its name, number of partitions
    errors = {p[0]: (p[1], p[2]) for p in _PARTITION_ANSWER.iter_unpack(answer[begin:-4])}
    for partition, base in bases.items():
        code, offset = errors.get(partition, (-1, -1))
        if code or offset != base:
            raise Failed(
                f"records of {topic.decode()}:{partition} were to stand at {base}: error {code}, offset {offset}",
                remedy="repeat; the topic is made again",
            )
