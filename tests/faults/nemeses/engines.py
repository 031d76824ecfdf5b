"""The processes of a run through Dagster, which share a mark in the inherited environment, and faults in them.

driver (`sluice run`, or the run that Dagster launched)  →  Spark's JVM
driver                                                   →  the pool     →  Spark's daemon  →  Python workers
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

from sluice.resources.spark import worker_pool
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import wait_until

MARK = "SLUICE_FAULTS_MARK"
_JVM, _PYTHON = b"org.apache.spark.deploy.SparkSubmit", b"sluice.resources.spark.daemon"
_POOL = b"\0" + worker_pool.NAME + b"\n"
"""The name of the process, which follows its command line: a forked pool has that of the driver."""


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
        """The inodes of its sockets."""
        inodes: set[str] = set()
        with suppress(OSError):
            for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        return inodes


@dataclass(frozen=True)
class Processes:
    """The processes started with `environment`, and their descendants, whatever their parent."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.mark}

    def list_alive(self) -> list[Process]:
        return [p for n in os.listdir("/proc") if n.isdigit() and (p := self._read_process(Path("/proc", n)))]

    def find_jvm(self) -> Process:
        """Wait for Spark's JVM and return it. A shell and a launcher of the same name may precede it."""
        return wait_until(
            lambda: next((p for p in self.list_alive() if _JVM in p.command and b"/java\0" in p.command), None)
        )

    def find_pool(self) -> Process:
        """Wait for the process that forks workers and return it."""
        processes = wait_until(lambda: [p for p in self.list_alive() if _POOL in p.command])
        return next(p for p in processes if p.parent not in {other.pid for other in processes})

    def list_workers(self, arena: Arena) -> list[Process]:
        """Returns the Python workers that read from the arena's brokers now."""
        sockets = _list_sockets({proxy.port for proxy in arena.proxies.values()})
        return [p for p in self.list_alive() if p.is_python and p.sockets & sockets]

    def wait_until_gone(self) -> None:
        """Wait until no process remains. AssertionError names the remaining ones."""
        try:
            wait_until(lambda: not self.list_alive(), 60)
        except AssertionError:
            remaining = "; ".join(f"{p.pid} of {p.parent}: {p.command[-200:]!r}" for p in self.list_alive())
            raise AssertionError(f"these outlived their run by a minute: {remaining}") from None

    @contextmanager
    def kill_at_exit(self) -> Iterator[None]:
        """Kill all processes at the end of the block."""
        try:
            yield
        finally:
            for process in self.list_alive():
                process.send(signal.SIGKILL)

    def _read_process(self, folder: Path) -> Process | None:
        with suppress(OSError):
            if f"{MARK}={self.mark}".encode() in folder.joinpath("environ").read_bytes().split(b"\0"):
                parent = int(folder.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1])
                command = b"\0".join(folder.joinpath(name).read_bytes() for name in ("cmdline", "comm"))
                return Process(int(folder.name), parent, command)
        return None


def _list_sockets(ports: set[int]) -> set[str]:
    """Returns the inodes of sockets that are connected to these ports of this machine."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {line[9] for line in lines if int(line[2].rpartition(":")[2], 16) in ports and line[3] == "01"}


def hold_requests(field: Field, partitions: int, key: int = FETCH) -> None:
    """Hold requests with the API key at the leaders of the first partitions until `release_requests`.

    Of fetches, only those of tasks: a plan's own, which read stamps and the last landed batch, pass.
    """
    leaders = field.arena.find_leaders(field.topic)
    for broker in {leaders[p] for p in range(partitions)}:
        field.arena.proxies[broker].hold(key, committed=True)


def count_held(field: Field, key: int) -> int:
    """Returns the number of held requests with the API key."""
    return sum(proxy.held.count(key) for proxy in field.arena.proxies.values())


def release_requests(field: Field) -> None:
    for proxy in field.arena.proxies.values():
        proxy.heal()
    field.account.log("nothing is held any more")
