"""The process from which `local_engine` forks its workers, with a task's imports done.

    python -P -m sluice.resources.spark.worker_pool DRIVER DESCRIPTOR [PATH]

The pool runs Python in one thread, so its forks are safe (Arrow's jemalloc has a thread of its own, and handlers for
forks). A driver that still has one thread forks it, too, which shares its imports (`fork_pool`); another starts it.
DESCRIPTOR is one end of a socket pair. Each message on it carries one
end of another pair: the pool forks a worker that serves it. Sockets are SOCK_SEQPACKET: a message arrives whole or not
at all, also from a worker that is killed. With PATH, the pool also listens there for Spark's daemon (`spark.daemon`),
which sends its streams, and forks that daemon in its place.

Promises: a worker dies when the driver shuts its socket, when the pool dies (PR_SET_PDEATHSIG), and when the driver
dies (a pidfd, or the end of its sockets). The status of a worker that died is the last message on its socket. Requests
and results travel on these sockets only, never in arguments or environments.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import math
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from sluice.pipelines.errors import Failed, SetupError
from sluice.pipelines.util import scratch
from sluice.resources.spark.daemon import SPARK_MODULES, WORKERS_ENVIRONMENT, load_modules

PIECE = 32 << 10
"""Bytes of a message; longer ones travel in pieces."""
MORE, CONTEXT, CALL, NUMBER = b"m", b"e", b"c", b"n"
"""The first byte of a message to a worker: more pieces follow; its environment and path; a call; a number for it."""
ROW, DONE, FAILED, DIED = b"r", b"d", b"f", b"x"
"""The first byte of a message from it: a row; the number's end; its error; the exit status of the worker."""
Rows = Callable[[Iterable[int], int], Iterator[tuple[str, str]]]
"""Carries numbers out that were tried so often before; yields rows: kind and JSON."""
_SET_PARENT_DEATH_SIGNAL, _SET_NAME = 1, 15
_MALLOC_OPTIONS = {-3: "MALLOC_MMAP_THRESHOLD_", -1: "MALLOC_TRIM_THRESHOLD_"}
MODULE = "sluice.resources.spark.worker_pool"
NAME = b"sluice-pool"
"""The name of the pool and of its workers in lists of processes."""
ADOPTED = "run again: finished offset ranges are adopted"
GOES_ON = "run again: it goes on where it ended"
MEMORY = "if the system's log shows that memory ran out, give the machine more or lower `tuning.task_memory`"
_ENDING_SECONDS = 2.0
"""Seconds to wait for the exit of a pool whose sockets have ended."""
_LOOK_SECONDS = 0.01
_IDLE_MS = 60_000
"""How long a worker waits for its next number, as Spark's do."""
_LINE = 500
_ADDRESS_BYTES = 100
_STREAM_SECONDS = 5.0
"""Limit on the time until a daemon of Spark has sent its streams."""


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Send one message, in pieces if it is long."""
    for at in range(0, max(len(body) - PIECE, 0), PIECE):
        channel.sendall(MORE + body[at : at + PIECE])
    channel.sendall(kind + body[max(len(body) - 1, 0) // PIECE * PIECE :])


def receive(channel: socket.socket) -> tuple[bytes, bytes]:
    """Return the kind of the next message and its body. The kind is empty at the end of the socket."""
    body = bytearray()
    while piece := channel.recv(PIECE + 1):
        if piece[:1] == DIED:
            return DIED, piece[1:]  # in place of the rest of a longer one
        body += piece[1:]
        if piece[:1] != MORE:
            return piece[:1], bytes(body)
    return b"", b""


def describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


@dataclass
class _Forked:
    """A process forked from this one; as much of Popen as is used here."""

    pid: int
    returncode: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        with self.lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # another part of this process has taken its status
                    pid, status = self.pid, 0
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, seconds: float = math.inf) -> int:
        until = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(MODULE, seconds)
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class PoolProcess:
    """The pool of this process, as its driver sees it."""

    def __init__(self, *, forked: bool = False) -> None:
        """`forked`: fork it from this process; it loads nothing until `load`."""
        self._driver, self._lock = os.getpid(), threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the pool
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = f"{scratch.get_root()}/{secrets.token_hex(4)}.pool"
        # empty if it is too long for a socket
        self.address = path if len(os.fsencode(path)) <= _ADDRESS_BYTES else ""
        self._process: subprocess.Popen[bytes] | _Forked
        with theirs:
            if forked:
                self._process = self._fork(theirs)
                return
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(self._driver), number, self.address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                env=os.environ | WORKERS_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def _fork(self, theirs: socket.socket) -> _Forked:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return _Forked(pid)
        try:
            with open(os.devnull, "r+") as nowhere:
                for number, stream in enumerate((nowhere, nowhere, self._errors)):
                    os.dup2(stream.fileno(), number)
            control = theirs.detach()
            for descriptor in map(int, os.listdir("/proc/self/fd")):  # others would outlive their ends in the driver
                if descriptor > 2 and descriptor != control:
                    with suppress(OSError):
                        os.close(descriptor)
            logging.getLogger().handlers.clear()
            os.environ.update(WORKERS_ENVIRONMENT)
            with suppress(AttributeError):  # another C library than glibc, which has read its variables at its start
                for option, name in _MALLOC_OPTIONS.items():
                    ctypes.CDLL(None).mallopt(option, int(WORKERS_ENVIRONMENT[name]))
            main(self._driver, control, self.address, load=False)
        except BaseException:  # noqa: BLE001 - it must not run the driver's code
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    @property
    def is_usable(self) -> bool:
        """True if it lives and this process has started it, not a process that this one was forked from."""
        return self._driver == os.getpid() and self._process.poll() is None

    def load(self, *, spark: bool = False) -> None:
        """Ask the pool to import the modules of tasks, and of Spark's workers. Does not wait."""
        with suppress(OSError), self._lock:
            self._control.send(b"s" if spark else b"l")

    def fork(self, channel: socket.socket) -> None:
        """Ask for a worker that serves the channel. Raises SetupError, Failed."""
        try:
            with self._lock:
                socket.send_fds(self._control, [b"w"], [channel.fileno()])
        except OSError:
            self.check()
            raise

    def check(self) -> None:
        """Raise the error of a pool that has ended: Failed if it was killed, SetupError if it could not start."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_ENDING_SECONDS)
            if code < 0:
                raise Failed(f"the process that forks workers {describe_exit(code)}", remedy=f"{ADOPTED}; {MEMORY}")
            raise SetupError(
                f"the process that forks workers did not start: {self._read_last_line() or f'it ended with {code}'}",
                remedy="see whether this Python environment is whole: sluice doctor",
            )

    def _read_last_line(self) -> str:
        """Return the last line that the process wrote, at most 300 characters."""
        text = b""
        with suppress(ValueError):  # another thread has ended this pool
            self._errors.seek(0)
            text = self._errors.read()
        lines = text.decode("utf-8", "replace").split("\n")
        return next((line[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End the process and its workers, unless another process started it."""
        self._control.close()
        self._errors.close()
        if self.is_usable:
            self._process.kill()
            self._process.wait()


_pools: list[PoolProcess] = []
_lock = threading.Lock()


def get_pool() -> PoolProcess:
    """Return the pool of this process. Starts it if there is none; does not wait for it."""
    with _lock:
        if not _pools or not _pools[-1].is_usable:
            end()
            _pools.append(PoolProcess())
        return _pools[-1]


def fork_pool() -> None:
    """Fork the pool from this process if it has one thread; otherwise `get_pool` starts one."""
    from sluice.resources.kafka.connection import connections  # noqa: F401 - the run and its workers need it

    with suppress(OSError), _lock:
        if not _pools and len(os.listdir("/proc/self/task")) == 1:
            _pools.append(PoolProcess(forked=True))


@atexit.register
def end() -> None:
    """End this process's pool, if it has one."""
    while _pools:
        _pools.pop().end()


class _Pool:
    """Forks workers, ends them, and reports how they ended."""

    def __init__(self, control: socket.socket, driver: int, address: str) -> None:
        self._control, self._driver, self._loaded = control, driver, False
        self._daemons = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if address:
            self._daemons.bind(address)
            self._daemons.listen()
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        """By the descriptor of its socket, each worker's pid; the pool keeps the socket open to write the status."""
        self._poll = select.poll()

    def serve(self) -> None:
        """Fork workers until the driver ends or closes its end."""
        # A signal ends no `poll`: its handler writes into a pipe, which `poll` waits for like for sockets.
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        requests, daemons = self._control.fileno(), self._daemons.fileno()
        for descriptor in (requests, woken, daemons):
            self._poll.register(descriptor, select.POLLIN)
        ends = _watch(self._driver)
        if ends is not None:
            self._poll.register(ends, select.POLLIN)
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == woken:
                        os.read(woken, PIECE)
                        self._report_ended()
                    elif descriptor == daemons:
                        self._fork_daemon()
                    elif descriptor in self._workers:
                        # The driver has shut the worker's socket. `_report_ended` forgets the worker.
                        self._poll.unregister(descriptor)
                        with suppress(OSError):
                            os.kill(self._workers[descriptor][0], signal.SIGKILL)
                    elif descriptor == ends or (descriptor == requests and not self._fork()):
                        return  # any other is of a worker whose end was just reported
        # Workers that outlive the driver would write parts for a run that is dead.
        finally:
            for pid, _ in self._workers.values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def load(self) -> None:
        """Import what tasks need, once."""
        if not self._loaded:
            load_modules()
            self._loaded = True

    def _fork(self) -> bool:
        """Fork a worker for the socket in the next message. Returns False if there is no message."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if message in (b"l", b"s"):
            self.load()
            load_modules(SPARK_MODULES if message == b"s" else ())
            return True
        if not message or not descriptors:
            return False
        channel = socket.socket(fileno=descriptors[0])
        self.load()
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                channel.send(FAILED + f"no process for a worker: {error.strerror}".encode(), socket.MSG_DONTWAIT)
            channel.close()
            return True
        if pid == 0:
            self._run_child(partial(_serve, channel))
        self._workers[channel.fileno()] = pid, channel
        self._poll.register(channel.fileno(), 0)  # 0: only the driver's shutdown of it wakes the pool
        return True

    def _fork_daemon(self) -> None:
        """Fork Spark's daemon for a process that sends its streams, environment, path and arguments."""
        connection, _ = self._daemons.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(_STREAM_SECONDS)
            message, streams, _, _ = socket.recv_fds(connection, 1, 3)
            try:
                body = b"".join(iter(partial(connection.recv, PIECE), b""))
                if not message or len(streams) < 3:
                    return
                self.load()
                load_modules(SPARK_MODULES)
                if os.fork() == 0:
                    # By SIGTERM the daemon ends its workers, too; killed, it leaves those that wait for Kafka.
                    self._run_child(partial(_run_daemon, connection, streams, *json.loads(body)), signal.SIGTERM)
            finally:
                for stream in streams:
                    os.close(stream)

    def _run_child(self, body: Callable[[], None], end: signal.Signals = signal.SIGKILL) -> NoReturn:
        """Call it in the forked process, without the pool's sockets. The process ends with it, or gets the signal at
        the pool's end."""
        try:
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, end, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            self._daemons.close()
            for _, other in self._workers.values():
                other.close()  # or its driver's end would not notice its end
            body()
        except BaseException:  # noqa: BLE001 - the driver is gone, or the status reports it
            os._exit(1)
        os._exit(0)

    def _report_ended(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                descriptor = next((d for d, (p, _) in self._workers.items() if p == pid), None)
                if descriptor is None:
                    continue
                _, channel = self._workers.pop(descriptor)
                with suppress(KeyError):
                    self._poll.unregister(descriptor)
                with suppress(OSError):
                    channel.send(DIED + str(os.waitstatus_to_exitcode(status)).encode(), socket.MSG_DONTWAIT)
                channel.close()


def _run_daemon(
    connection: socket.socket,
    streams: Sequence[int],
    environment: Mapping[str, str],
    path: Sequence[str],
    argv: list[str],
) -> None:
    """Run Spark's daemon on these streams until its JVM closes the first of them.

    The sender of the streams gets a byte on `connection` when the daemon starts, and its end when the daemon ends.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)  # where sys.stdin, sys.stdout and sys.stderr are open
        os.close(stream)
    sys.argv = argv
    _set_context(environment, path)
    connection.sendall(b"f")
    from pyspark.daemon import manager

    manager()


def _watch(driver: int) -> int | None:
    """Return a descriptor that is readable once the driver has ended; None where the system has none."""
    if os.getppid() != driver:
        sys.exit()
    with suppress(OSError, AttributeError):
        return os.pidfd_open(driver)
    return None


def _serve(channel: socket.socket) -> None:
    """Carry out numbers until the driver shuts the channel, one fails, or none comes for a minute."""
    rows: Rows | None = None
    pickled = b""
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    while waiting.poll(_IDLE_MS) and (message := receive(channel))[0]:
        kind, body = message
        if kind == CONTEXT:
            _set_context(*pickle.loads(body))
        elif kind == CALL:
            pickled, rows = body, None
        else:
            try:
                rows = rows or pickle.loads(pickled)
                position, tried = map(int, body.split())
                for name, text in rows((position,), tried):
                    send(channel, ROW, f"{name}\n{text}".encode())
            except Exception as error:  # noqa: BLE001 - the driver tries again, in another worker
                send(channel, FAILED, describe(error).encode("utf-8", "replace"))
                return
            send(channel, DONE)


def _set_context(environment: Mapping[str, str], path: Sequence[str]) -> None:
    """Take over the driver's environment and path of modules."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    sys.path[:] = path


def describe(error: BaseException) -> str:
    """Return the error's class and the first line of its text, at most 500 characters."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{': ' if line else ''}{line}"[:_LINE]


def main(driver: int, descriptor: int, address: str, *, load: bool = True) -> None:
    """Serve the driver. An interrupt of the terminal is the driver's: the pool ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_SET_NAME, NAME, 0, 0, 0)
    pool = _Pool(socket.socket(fileno=descriptor), driver, address)
    if load:
        pool.load()
    pool.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
