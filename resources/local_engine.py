"""The engine without Spark: workers of this machine, forked from a pool process (`worker_pool`), run the tasks.

    driver ── a socket for each worker ── workers          one thread of the driver waits for each worker at work
       └───── a socket that asks for them ── pool

`open_ports` chooses it for feeds of `engine: processes`. As many workers as cores are at work at once
in a process; feeds that land at once take turns. Idle workers stay a minute for the next job. Promises, as Spark's: a
task whose worker dies or raises is tried `TRIES` times in all, each time in another worker, which adopts finished
offset ranges. A task that fails each time is salvaged: its finished ranges return as receipts, the others as failures;
other tasks go on. An engine that is cancelled kills its workers. No process outlives the driver.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from sluice.pipelines.errors import Failed
from sluice.pipelines.model.receipts import EngineKind, EngineUse, Outcome, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.resources.observe import tracing
from sluice.resources.spark import executor, worker_pool
from sluice.resources.spark.daemon import WORKERS_ENVIRONMENT
from sluice.resources.spark.executors import TRIES
from sluice.resources.spark.job_thread import in_thread, wait_for_all
from sluice.resources.spark.worker_pool import (
    ADOPTED,
    DIED,
    DONE,
    FAILED,
    GOES_ON,
    MEMORY,
    ROW,
    PoolProcess,
    Rows,
    describe_exit,
    get_pool,
)

_CANCEL_SECONDS = 5.0


class LocalEngine:
    """`ports.Engine` over workers of this machine. They start with the first `run`."""

    def __init__(self, per_broker: int | None = None) -> None:
        """`per_broker`: how many tasks of a job may read from one broker at once."""
        self._per_broker = per_broker
        self._cancelled, self._lock = False, threading.RLock()  # an interrupted thread may cancel
        self._jobs: set[_Job] = set()

    def start(self) -> None:
        """Start the pool if this process has none. Does not wait for it."""
        get_pool()

    def describe(self) -> EngineUse:
        return EngineUse(EngineKind.PROCESSES)

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome | TaskTraffic]:
        """Return an outcome for each offset range of the tasks (positions in the plan), and each task's traffic,
        unordered.

        Raises SetupError if no worker starts, Failed if it was cancelled or a task can neither run nor be salvaged.
        """
        if not tasks:
            return []
        timed = tracing.current_step() is not None
        work = executor.TaskWork.of(job, tasks, TRIES, self._per_broker, timed=timed)
        salvage = lambda reason: partial(executor.run, replace(work, salvage=reason))  # noqa: E731
        one = _Job(partial(executor.run, work), len(work.queues), "the tasks", ADOPTED, salvage)
        sent = [executor.sent_in(*row) for row in self._carry_out(one)]
        return tracing.trace_tasks(job.plan, job.batch, sent)

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> list[str]:
        """Return the result of the call for each number, in no particular order.

        Raises as `run`; nothing is salvaged.
        """
        job = _Job(partial(executor.call, call), count, f"{what} of {feed}", GOES_ON)
        return [answer for _, answer in self._carry_out(job)]

    def cancel(self) -> None:
        """Kill the workers of this engine: `run` raises Failed. Any thread may call it, at any time."""
        with self._lock:
            self._cancelled = True
            for job in self._jobs:
                job.end()

    def _carry_out(self, job: _Job) -> list[executor.Row]:
        with self._lock:
            self._jobs.add(job)
            if self._cancelled:
                job.end()
        try:
            return job.carry_out()
        finally:
            with self._lock:
                self._jobs.discard(job)


class _Cancelled(Failed):
    """The job was ended: by its engine, or after an error of another lane."""


class _WorkerFailed(Exception):
    """A worker died, or raised, under a number."""


class _Job:
    """One call for each number below `count`, in as many lanes as cores."""

    def __init__(
        self, rows: Rows, count: int, what: str, again: str, salvage: Callable[[str], Rows] | None = None
    ) -> None:
        """`salvage`: returns the call in place of one that failed on each try for a reason."""
        self._pickled, self._count, self._salvage = pickle.dumps(rows), count, salvage
        self._what, self._again = what, again
        self._numbers, self._lock = iter(range(count)), threading.RLock()
        self._workers: set[_Worker] = set()
        self.ended = threading.Event()

    def carry_out(self) -> list[executor.Row]:
        """Return the rows of all numbers. The first error ends the rest, and is raised. An interrupt ends all."""
        lanes = [in_thread(self._run_lane) for _ in range(min(_turns.cores, self._count))]
        try:
            wait_for_all(lanes)
        except BaseException:
            self.end()
            wait(lanes, _CANCEL_SECONDS)
            raise
        errors = [error for lane in lanes if (error := lane.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, _Cancelled)), errors[0])
        return [row for lane in lanes for row in lane.result()]

    def end(self) -> None:
        """Kill all workers: their lanes raise _Cancelled."""
        with self._lock:
            self.ended.set()
            for worker in self._workers:
                worker.shut()
        _turns.notify()

    def _run_lane(self) -> list[executor.Row]:
        """Carry out one number after the other, by one worker as long as it lives."""
        rows = list[executor.Row]()
        lane = _Lane(self._start_worker, self._end_worker)
        try:
            while (number := self._take_number()) is not None:
                with _turns.take(self):
                    rows += self._carry_out(lane, number)
        except BaseException:
            self.end()
            raise
        finally:
            lane.close()
        return rows

    def _take_number(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _carry_out(self, lane: _Lane, number: int) -> list[executor.Row]:
        """Return the rows of the number's first try that succeeds, or else of its salvage. Raises Failed."""
        try:
            return lane.carry_out(self._pickled, number)
        except _WorkerFailed as error:
            reason = str(error)
        if self._salvage:
            with suppress(_WorkerFailed):  # the first reason tells more
                return lane.carry_out(pickle.dumps(self._salvage(reason)), number)
        raise Failed(f"{self._what} failed: {reason}", remedy=f"{self._again}; {MEMORY}")

    def _start_worker(self) -> _Worker:
        with self._lock:
            if self.ended.is_set():
                raise _Cancelled("the tasks were cancelled", remedy=self._again)
            worker = _take_idle(pool := get_pool()) or _Worker(pool)
            self._workers.add(worker)
        return worker

    def _end_worker(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
            if worker.is_idle and len(_idle) < _turns.cores:
                _idle.append(worker)
            else:
                worker.close()


class _Lane:
    """Tries numbers in one worker, and in a new one after each failure."""

    def __init__(self, start: Callable[[], _Worker], end: Callable[[_Worker], None]) -> None:
        self._start_worker, self._end_worker = start, end
        self._worker: _Worker | None = None

    def carry_out(self, pickled: bytes, number: int) -> list[executor.Row]:
        """Return the rows of the first try that succeeds. Raises the _WorkerFailed of the last one."""
        if self._worker is not None and not self._worker.is_idle:
            self.close()  # it ended while it waited, which is no try of this number
        for tried in range(TRIES):
            self._worker = self._worker or self._start_worker()
            try:
                return self._worker.carry_out(pickled, number, tried)
            except _WorkerFailed:
                self.close()
                if tried == TRIES - 1:
                    raise
        raise AssertionError("no try")

    def close(self) -> None:
        if self._worker is not None:
            self._end_worker(self._worker)
            self._worker = None


class _Worker:
    """A worker process, as its driver sees it. One thread uses it; any may `shut` it."""

    def __init__(self, pool: PoolProcess) -> None:
        self.pool, self._context, self._call = pool, b"", b""
        self._is_shut, self._has_finished = False, False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pool.fork(theirs)

    def carry_out(self, pickled: bytes, number: int, tried: int) -> list[executor.Row]:
        """Return the rows of a number. Raises _WorkerFailed, and SetupError or Failed if the pool is gone."""
        rows, self._has_finished = list[executor.Row](), False
        with suppress(OSError):  # the worker ended before it took everything
            self._send(pickled, number, tried)
        kind, body = b"", b""
        with suppress(OSError):
            while (message := worker_pool.receive(self._channel))[0] == ROW:
                name, _, text = message[1].decode().partition("\n")
                rows.append((name, text))
            kind, body = message
        if kind == DONE:
            self._has_finished = True
            return rows
        if kind == FAILED:
            raise _WorkerFailed(body.decode())
        if kind == DIED:
            raise _WorkerFailed(f"its worker {describe_exit(int(body))}")
        if not self._is_shut:
            self.pool.check()
        raise _WorkerFailed("its worker ended")

    @property
    def is_idle(self) -> bool:
        """True if it lives and waits for a number."""
        if self._is_shut or not self._has_finished:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return not poll.poll(0)

    def _send(self, pickled: bytes, number: int, tried: int) -> None:
        context = pickle.dumps((dict(os.environ) | WORKERS_ENVIRONMENT, sys.path))
        if self._context != context:
            worker_pool.send(self._channel, worker_pool.CONTEXT, context)
            self._context = context
        if self._call != pickled:
            worker_pool.send(self._channel, worker_pool.CALL, pickled)
            self._call = pickled
        worker_pool.send(self._channel, worker_pool.NUMBER, f"{number} {tried}".encode())

    def shut(self) -> None:
        """Have the pool kill the process; the thread that waits for it goes on."""
        self._is_shut = True
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._channel.close()

    def release(self) -> None:
        """Close this process's end. The worker ends, unless the process that this one was forked from has it, too."""
        self._channel.close()


class _Turns:
    """Lets as many lanes work at once as there are cores. The job with the fewest at work is the next."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._changed, self._at_work = threading.Condition(), Counter[_Job]()
        self._waiting: dict[object, _Job] = {}

    @contextmanager
    def take(self, job: _Job) -> Iterator[None]:
        """Wait for a turn, which ends with the block. Raises _Cancelled if the job ends first."""
        ticket = object()
        with self._changed:
            self._waiting[ticket] = job
            self._changed.wait_for(lambda: job.ended.is_set() or self._find_next() is ticket)
            del self._waiting[ticket]
            self._changed.notify_all()
            if job.ended.is_set():
                raise _Cancelled("the tasks were cancelled", remedy=ADOPTED)
            self._at_work[job] += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work[job] -= 1
                self._at_work += Counter()  # forgets those without work
                self._changed.notify_all()

    def notify(self) -> None:
        """Have waiting lanes see that their job has ended."""
        with self._changed:
            self._changed.notify_all()

    def _find_next(self) -> object | None:
        if self._at_work.total() >= self.cores or not self._waiting:
            return None
        return min(self._waiting, key=lambda ticket: self._at_work[self._waiting[ticket]])


_turns = _Turns(os.cpu_count() or 1)
_idle: list[_Worker] = []
"""Workers that wait for a next job."""


def _take_idle(pool: PoolProcess) -> _Worker | None:
    """Return a worker of the pool that waits for a job, if there is one. Ends those that are of no use."""
    with suppress(IndexError):
        while worker := _idle.pop():
            if worker.pool is pool and worker.is_idle:
                return worker
            worker.release()
    return None


def begin(needed: Callable[[], bool] = lambda: True) -> None:
    """Start the pool in the background if `needed`, which is called there. Errors are left to the first use."""
    worker_pool.fork_pool()

    def start() -> None:
        with suppress(Exception):
            if needed():
                get_pool().load()

    threading.Thread(target=start, name="sluice-pool", daemon=True).start()


@atexit.register
def end() -> None:
    """End this process's pool, if it has one."""
    while _idle:
        _idle.pop().release()
    worker_pool.end()
