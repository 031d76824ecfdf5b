"""A real ZooKeeper on loopback, from the jars that pyspark carries, and the old consumers' tree in it."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.resources.local import java
from sluice.resources.local.process import Process, spawn

_LOG4J = """<Configuration status="WARN">
  <Appenders><Console name="err" target="SYSTEM_ERR"><PatternLayout pattern="[%d] %p %m (%c)%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="err"/></Root></Loggers>
</Configuration>
"""


@dataclass
class LocalZooKeeper:
    """One server with its own folder and port. Its data survives a stop and a start."""

    root: Path
    port: int = 0
    process: Process | None = None

    @property
    def connect(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, seconds: float = 60) -> LocalZooKeeper:
        self.root.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        (self.root / "log4j2.xml").write_text(_LOG4J)
        (self.root / "zoo.cfg").write_text(
            f"tickTime=500\ndataDir={self.root / 'data'}\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\nmaxClientCnxns=0\nminSessionTimeout=1000\nmaxSessionTimeout=60000\n"
        )
        command: list[str | Path] = [
            *(java.find_java(), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *(f"-Dlog4j2.configurationFile={self.root / 'log4j2.xml'}", "-cp", f"{java.spark_jars()}/*"),
            *("org.apache.zookeeper.server.quorum.QuorumPeerMain", self.root / "zoo.cfg"),
        ]
        self.process = spawn(command, self.root, self.root / "zookeeper.log")
        until = time.monotonic() + seconds
        while not _is_answering(self.port):
            if not self.process.alive or time.monotonic() > until:
                raise AssertionError((self.root / "zookeeper.log").read_text()[-2000:])
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.end(5)
            self.process = None

    def throw_away(self) -> None:
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    @contextlib.contextmanager
    def open_client(self) -> Iterator[Any]:
        """Open a plain client, such as another tool uses."""
        client = _make_client(self.connect)
        client.start(timeout=20)
        try:
            yield client
        finally:
            client.stop()
            client.close()

    def put(self, group: str, topic: str, offsets: Mapping[int, str]) -> None:
        """Write offsets as text, as old consumers do; existing values are overwritten."""
        with self.open_client() as client:
            for partition, text in offsets.items():
                path = f"/consumers/{group}/offsets/{topic}/{partition}"
                client.ensure_path(path)
                client.set(path, text.encode())

    def read_offsets(self, group: str, topic: str) -> dict[int, str]:
        """Returns the offsets as text, by partition."""
        root = f"/consumers/{group}/offsets/{topic}"
        with self.open_client() as client:
            if client.exists(root) is None:
                return {}
            return {int(p): client.get(f"{root}/{p}")[0].decode() for p in client.get_children(root)}

    def list_children(self, path: str) -> list[str]:
        with self.open_client() as client:
            return sorted(client.get_children(path)) if client.exists(path) else []


def _make_client(connect: str) -> Any:
    from kazoo.client import KazooClient

    return KazooClient(hosts=connect, timeout=5)


def _is_answering(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass
    except OSError:
        return False
    client = _make_client(f"127.0.0.1:{port}")
    try:
        client.start(timeout=5)
    except Exception:  # noqa: BLE001 - it listens before it serves
        return False
    finally:
        client.stop()
        client.close()
    return True


def free_port() -> int:
    """Returns a free port below the range of outgoing connections, as `LocalKafka` does."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
