"""A standalone Spark on this machine, from pyspark's own jars: a master, and workers whose Python has nothing of ours.

    with LocalSpark(folder, workers=2) as cluster:
        SparkSettings(master=cluster.master, conf=cluster.conf)

For the benchmark of a cluster and for tests. Promises: everything listens on loopback only; executors see neither our
packages nor our environment, but a Python of our release with its standard library, and Spark's; processes end with
the block; the files of an application, above all the unpacked pack, are soon removed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from sluice.pipelines.errors import SetupError
from sluice.resources.local import java
from sluice.resources.local.java import spark_jars
from sluice.resources.local.local_kafka import free_ports

HOST = "127.0.0.1"
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_SECONDS = 60.0
"""Limit on the time in which a daemon that starts adds nothing to its log."""
_END_SECONDS = 10.0
_POLL = 0.05
_CLEANUP = {"enabled": "true", "interval": 20, "appDataTtl": 30}
"""Seconds between two looks, and since the last file of an application that has ended."""
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass
class Daemon:
    """A master or a worker: its process and output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """As a machine dies. Executors of a killed worker end by themselves."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class LocalSpark:
    """A master and workers of `cores` and `memory` each, while the block lasts. Raises SetupError."""

    folder: Path
    workers: int = 2
    cores: int = 1
    memory: str = "1g"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of workers and executors."""
    python: Path | None = None
    """The executors' interpreter; without it, a new environment of ours that is empty."""
    running: list[Daemon] = field(default_factory=list)
    """The workers, in order of their start."""
    head: Daemon | None = None
    _port: int = 0
    _page: int = 0

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self._port}"

    @property
    def conf(self) -> dict[str, str]:
        """Settings of a driver on this machine, which then listens on loopback only."""
        return {
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.memory": "512m",
            "spark.master.ui.port": str(self._page),
        }

    def __enter__(self) -> LocalSpark:
        self.folder.mkdir(parents=True, exist_ok=True)
        ((self._port, self._page),) = free_ports(1, 2)
        try:
            self.start_master()
            for _ in range(self.workers):
                self.start_worker()
            self._wait_for_workers()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def start_master(self) -> Daemon:
        """Start the master, at the port of the one before if there was one."""
        where = ["--host", HOST, "--port", str(self._port), "--webui-port", str(self._page)]
        self.head = self._start("master", _MASTER, *where)
        self._wait_until(lambda: _is_listening(self._port), self.head)
        return self.head

    def start_worker(self) -> Daemon:
        """Start one more worker."""
        number = len(self.running) + 1
        work = self.folder / f"worker-{number}"
        size = ["--cores", str(self.cores), "--memory", self.memory]
        where = ["--host", HOST, "--webui-port", "0", "--work-dir", str(work)]
        self.running.append(self._start(f"worker-{number}", _WORKER, *where, *size, self.master))
        return self.running[-1]

    def start_connect(self) -> str:
        """Start a Spark Connect server with executors in its own process; return its address."""
        ((port,),) = free_ports(1, 1)
        options = {"spark.connect.grpc.binding.address": HOST, "spark.connect.grpc.binding.port": port}
        words = [word for item in options.items() for word in ("--conf", f"{item[0]}={item[1]}")]
        submit = "org.apache.spark.deploy.SparkSubmit"
        server = self._start(
            "connect", submit, "--master", f"local[{self.cores},3]", "--class", _CONNECT, *words, "spark-internal"
        )
        self.running.append(server)
        self._wait_until(lambda: _is_listening(port), server)
        return f"sc://{HOST}:{port}"

    def read_output(self) -> str:
        """Return the output of all executors."""
        files = sorted(self.folder.glob("worker-*/app-*/*/stderr"))
        return "\n".join(f"== {file.relative_to(self.folder)}\n{file.read_text(errors='replace')}" for file in files)

    def count_registered(self) -> int:
        """Return the number of workers that the master has registered, dead ones included."""
        log = self.folder / "master.log"
        return log.read_text(errors="replace").count("Registering worker") if log.exists() else 0

    def _wait_for_workers(self) -> None:
        for worker in self.running:
            self._wait_until(lambda: self.count_registered() >= len(self.running), worker)

    def _start(self, name: str, main: str, *arguments: str) -> Daemon:
        log = self.folder / f"{name}.log"
        home = spark_jars().parent
        with log.open("ab") as out:
            command = [str(home / "bin" / "spark-class"), main, *arguments]
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent,
            )
        return Daemon(process, log)

    def _make_environment(self) -> dict[str, str]:
        """A bare machine's: nothing of this process's Python, and another home folder."""
        python = self.python or self._make_bare_python()
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {
            "PATH": os.pathsep.join([str(python.parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "JAVA_HOME": str(java.java_home()),
            "SPARK_HOME": str(spark_jars().parent),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "768m",
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "SPARK_WORKER_OPTS": " ".join(f"-Dspark.worker.cleanup.{k}={v}" for k, v in _CLEANUP.items()),
            **self.environment,
        }

    def _make_bare_python(self) -> Path:
        """The interpreter of an environment without packages, by the name that drivers ask for."""
        folder = self.folder / "python"
        if not folder.exists():
            venv.EnvBuilder(symlinks=True).create(folder)
        return folder / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"

    def _wait_until(self, done: Callable[[], bool], daemon: Daemon) -> None:
        deadline, size = time.monotonic() + _START_SECONDS, -1
        while not done():
            if size != (size := daemon.log.stat().st_size):
                deadline = time.monotonic() + _START_SECONDS
            if daemon.process.poll() is not None or time.monotonic() > deadline:
                tail = daemon.log.read_text(errors="replace").strip().splitlines()[-3:]
                raise SetupError(f"{daemon.log.stem} does not start: {' '.join(tail)}", remedy=f"see {daemon.log}")
            time.sleep(_POLL)

    def _end(self) -> None:
        for daemon in [*self.running, *([self.head] if self.head else [])]:
            with suppress(OSError):
                daemon.end()


def _end_with_parent() -> None:
    """Where Linux runs: ask that this process be ended with the one that started it, however that one ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _is_listening(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0
