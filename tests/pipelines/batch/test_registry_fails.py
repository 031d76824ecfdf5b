"""A schema registry that hangs or refuses ends a landing early: one request, and records that need it stay pending."""

from __future__ import annotations

import copy
import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sluice.pipelines.batch import land
from sluice.pipelines.errors import BatchIncomplete
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.records.rows.row_format import Format
from sluice.pipelines.records.rows.wire_format import AVRO, RegisteredSchema
from sluice.resources.registry import confluent, writers_of
from sluice.resources.registry.confluent import LATE_TRIES, TRIES
from sluice.testing.engine import MemoryEngine
from sluice.testing.logs import LogBatch, LogRecord
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, World

SCHEMA = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
KEPT, OTHER = 1, 2
HOURS = 36
CATCH_UP = Request(RequestKind.CATCH_UP)


def hang(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(4096):
            pass


def drip(connection: socket.socket) -> None:
    """Send an answer byte by byte, so that no read of one byte times out."""
    with suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        connection.settimeout(0.01)
        while True:
            with suppress(TimeoutError):
                connection.recv(4096)
            connection.sendall(b" ")


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def answer(status: int) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 %d Something\r\nContent-Length: 0\r\n\r\n" % status)

    return send


@dataclass
class Server:
    """Handles each connection with `behave`, and counts the requests."""

    behave: Callable[[socket.socket], None]
    requests: int = 0

    def serve(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                self.requests += 1
                Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection:
            self.behave(connection)


class Engine(MemoryEngine):
    """Gives each task a copy of the schema reader, as Spark does."""

    writers: KeptSchemas

    def format(self, job: Job) -> Format:
        return job.shape.format(copy.copy(self.writers))


class Registered(World):
    """A feed of Avro records whose schemas are in a registry; the lake has one of them."""

    def __init__(self, path: Path, port: int) -> None:
        schema = path / "r.avsc"
        schema.write_text(json.dumps(SCHEMA))
        (path / "orders.yaml").write_text(
            "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\nformat: avro\n"
            f"schema_file: {schema}\nregistry: {{url: 'http://127.0.0.1:{port}', timeout: 100ms}}\n"
        )
        super().__init__(load_feed(path / "orders.yaml", {}))
        KeptSchemas(self.lake, "orders").keep(RegisteredSchema(KEPT, AVRO, (json.dumps(SCHEMA),)))
        self.engines: list[Engine] = []

    def make_ports(self, drops: frozenset[int] = frozenset()) -> Ports:
        engine = Engine(self.lake, self.topic.make_fetcher, self.feed.landing)
        engine.writers = writers_of(self.feed, self.lake)  # type: ignore[assignment]
        self.engines.append(engine)
        return replace(super().make_ports(drops), engine=engine)

    def fill(self, schema: Callable[[int], int]) -> None:
        """Write a record to each partition in each hour, with that hour's schema id."""
        for hour in range(HOURS):
            value = b"\0" + struct.pack(">I", schema(hour)) + b"\x0e"
            for tp in PARTITIONS:
                self.topic.batches[tp].append(LogBatch((LogRecord(b"k", value, self.now + hour * HOUR),)))
        self.now += (HOURS + 1) * HOUR


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], tuple[Registered, Server]]]:
    monkeypatch.setattr(confluent, "_PAUSE", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start_server(behave: Callable[[socket.socket], None]) -> tuple[Registered, Server]:
            server = Server(behave)
            Thread(target=server.serve, args=(listening,), daemon=True).start()
            return Registered(tmp_path, listening.getsockname()[1]), server

        yield start_server
        listening.shutdown(socket.SHUT_RDWR)


FAILING: list[tuple[Callable[[socket.socket], None], int, str, str]] = [
    (hang, LATE_TRIES, "no answer in time", "run again when it answers"),
    (drip, LATE_TRIES, "no answer in time", "run again when it answers"),
    (reset, TRIES, "cannot be asked", "run again when it answers"),
    (answer(500), TRIES, "HTTP 500", "run again when it answers"),
    (answer(503), TRIES, "HTTP 503", "run again when it answers"),
    (answer(429), TRIES, "HTTP 429", "run again when it answers"),
    (answer(401), 1, "refused the login", "check registry.username and password"),
    (answer(403), 1, "no right", "check registry.username and password"),
]


@pytest.mark.parametrize(("behave", "requests", "why", "remedy"), FAILING)
def test_failing_registry_is_contacted_once(
    start: Any, behave: Callable[[socket.socket], None], requests: int, why: str, remedy: str
) -> None:
    world, server = start(behave)
    world.fill(lambda hour: OTHER)
    landed = world.land(CATCH_UP)
    assert server.requests == requests
    assert len(landed.failures) == len(PARTITIONS) * HOURS
    with pytest.raises(BatchIncomplete) as error:
        landed.check()
    assert len(error.value.message.splitlines()) == 2
    assert f"and {len(PARTITIONS) * HOURS - 1} more: the schema registry" in error.value.message
    assert why in error.value.message
    assert remedy in error.value.remedy
    assert list(world.lake.list("data")) == []


def test_ranges_without_new_schemas_land_and_others_stay_pending(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(land, "BATCH_RANGES", 8)
    world, server = start(hang)
    world.fill(lambda hour: KEPT if hour < 6 else OTHER)
    landed = world.land(CATCH_UP)
    assert server.requests == LATE_TRIES
    assert len(world.engines[-1].ran) == 2  # of nine batches: no further one is begun
    assert len(landed.failures) == 4
    server.behave = answer(404)
    again = world.land(CATCH_UP)
    assert again.failures == ()
    assert sum(b.counts.landed for b in (*landed.batches, *again.batches)) == 12
    assert sum(b.counts.quarantined for b in again.batches) == 60


def test_later_landing_contacts_the_registry_again(start: Any) -> None:
    world, server = start(hang)
    world.fill(lambda hour: OTHER)
    world.land(CATCH_UP)
    world.land(CATCH_UP)
    assert server.requests == 2 * LATE_TRIES
