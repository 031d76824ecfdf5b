"""The processes of a run through Dagster: found by a mark that all of them inherit, and what is done to them.

driver (`sluice run`, or the run that Dagster launched)  →  Spark's JVM  →  its Python daemon  →  Python workers
driver                                                   →  the pool     →  Python workers          without Spark
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import until

MARK = "SLUICE_FAULTS_MARK"
_JVM, _PYTHON = b"org.apache.spark.deploy.SparkSubmit", b"sluice.resources.spark.daemon"
_POOL = b"sluice.resources.worker_pool"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: bytes

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def is_engine(self) -> bool:
        """True for Spark's JVM, its Python daemon, the pool, and workers."""
        return _JVM in self.command or self.is_python

    @property
    def is_python(self) -> bool:
        """True for Spark's Python daemon, the pool, and their workers."""
        return _PYTHON in self.command or _POOL in self.command

    @property
    def sockets(self) -> set[str]:
        """Their inodes."""
        found: set[str] = set()
        with suppress(OSError):
            for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        return found


@dataclass(frozen=True)
class Processes:
    """Whatever was started with `environment`, and all that came of it, whoever is its parent now."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.mark}

    def alive(self) -> list[Process]:
        return [p for n in os.listdir("/proc") if n.isdigit() and (p := self._found(Path("/proc", n)))]

    def jvm(self) -> Process:
        """Spark's JVM, once it is there; before that a shell and a launcher of the same name may be."""
        return until(lambda: next((p for p in self.alive() if _JVM in p.command and b"/java\0" in p.command), None))

    def find_pool(self) -> Process:
        """The process that forks workers, once it is there."""
        driven = until(lambda: [p for p in self.alive() if _POOL in p.command])
        return next(p for p in driven if p.parent not in {other.pid for other in driven})

    def workers(self, arena: Arena) -> list[Process]:
        """The Python workers that read from the arena's brokers now."""
        sockets = _sockets({proxy.port for proxy in arena.proxies.values()})
        return [p for p in self.alive() if p.is_python and p.sockets & sockets]

    def gone(self) -> None:
        """Wait until nothing of it is left. AssertionError with what is."""
        try:
            until(lambda: not self.alive(), 60)
        except AssertionError:
            left = "; ".join(f"{p.pid} of {p.parent}: {p.command[-200:]!r}" for p in self.alive())
            raise AssertionError(f"these outlived their run by a minute: {left}") from None

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Nothing outlives the block."""
        try:
            yield
        finally:
            for process in self.alive():
                process.send(signal.SIGKILL)

    def _found(self, place: Path) -> Process | None:
        with suppress(OSError):
            if f"{MARK}={self.mark}".encode() in place.joinpath("environ").read_bytes().split(b"\0"):
                parent = int(place.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1])
                return Process(int(place.name), parent, place.joinpath("cmdline").read_bytes())
        return None


def _sockets(ports: set[int]) -> set[str]:
    """The inodes of sockets that are connected to these ports of this machine."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {line[9] for line in lines if int(line[2].rpartition(":")[2], 16) in ports and line[3] == "01"}


def held(field: Field, partitions: int, key: int = FETCH) -> None:
    """Hold the requests with the API key at the leaders of the first partitions, from now on."""
    leaders = field.arena.leaders(field.topic)
    for broker in {leaders[p] for p in range(partitions)}:
        field.arena.proxies[broker].hold(key)


def waiting(field: Field, key: int) -> int:
    """How many requests with the API key are held now."""
    return sum(proxy.held.count(key) for proxy in field.arena.proxies.values())


def healed(field: Field) -> None:
    for proxy in field.arena.proxies.values():
        proxy.heal()
    field.account.did("nothing is held any more")
