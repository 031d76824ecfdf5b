"""The Spark engine: one Spark per process, a queue of tasks for each number of a range, receipts back.

    context.parallelize(range(n), n).mapPartitions(executor.run, …)
    session.range(0, n, 1, n).mapInArrow(executor.in_arrow, …)              on Spark Connect, which has no context

Works on a local master (the default: all cores, each task tried three times), on any other, and on Spark Connect
(`sc://…`). Spark's SQL, its slowest part to start, starts only when a reader needs it. Promises: a task whose process
dies is retried and adopts its finished work; a run that ends early cancels its Spark job; a failed job gives its reason
in one line; if Spark's JVM was killed, the job fails and the next one starts another JVM.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar, cast

from sluice.pipelines.errors import Failed, SetupError
from sluice.pipelines.feed.sections import LAUNCHING, MASK, SparkSettings
from sluice.pipelines.model.receipts import EngineKind, EngineUse, Outcome, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.pipelines.util import logs, scratch, units
from sluice.resources.local import java
from sluice.resources.observe import tracing
from sluice.resources.spark import executor, executors, jvm, spark_errors
from sluice.resources.spark.daemon import POOL, WORKERS_ENVIRONMENT
from sluice.resources.spark.executors import get_master, is_connect, is_local, tries
from sluice.resources.spark.job_thread import in_thread, wait_for_all
from sluice.resources.spark.worker_pool import ADOPTED, GOES_ON, fork_pool, get_pool

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

    from sluice.resources.spark.preflight import ExecutorPorts, Preflight

_log = logging.getLogger(f"{logs.OURS}.engine")
_LOOPBACK = "127.0.0.1"
_WATCH_SECONDS = 0.25
_CANCEL_SECONDS = 5.0
"""How long an interrupt waits for its job's end; the end of the process would end it as well."""
_START_SECONDS = 60.0
_CONNECT_TRIES, _CONNECT_PAUSE_MS = 8, 4000
"""How often Spark Connect's client retries a silent server: for about 20 seconds."""
_ENDING_SECONDS = 2.0
"""Seconds to wait for the JVM's exit: a killed JVM's connections break before it is gone."""
_OURS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.daemon.module": "sluice.resources.spark.daemon",
    "spark.scheduler.mode": "FAIR",  # several feeds land at once: one with many tasks must not delay the others
    **{f"spark.executorEnv.{name}": value for name, value in WORKERS_ENVIRONMENT.items()},
}
# Its ports are on this machine alone, and require a secret made for this session.
_HERE = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.authenticate": "true",
    jvm.OPTIONS: jvm.FLAGS,
}
_SOCKET = 100
"""Limit on the bytes of a socket's path; next, the name that PySpark gives a socket in its folder."""
_SOCKET_NAME = "/.00000000-0000-0000-0000-000000000000.sock"
_lock = threading.Lock()
_looked: set[str] = set()
"""Applications whose executors were already checked."""
_printed: list[int] = []
"""The file descriptor that the JVM of this process's context prints to, for a context whose executors are elsewhere."""
_PRINTED_BYTES = 100_000
_begun: list[SparkSettings] = []
"""The settings with which this process last began Spark; empty before the first start."""
_slow_starts: list[bool] = []
"""For each JVM that this process started without an archive of classes: whether its tasks run here."""
T = TypeVar("T")


class SparkEngine:
    """`ports.Engine` over Spark. Its workers start with the first `run`."""

    def __init__(
        self, settings: SparkSettings, ports: Callable[[], ExecutorPorts] | None = None, per_broker: int | None = None
    ) -> None:
        """`ports`: builds the ports that remote executors must reach; called when they are checked. `per_broker`: how
        many tasks of a job may read from one broker at once."""
        self._settings, self._ports, self._per_broker = settings, ports, per_broker
        self._cancelled = threading.Event()
        self._starved = threading.Event()
        self._ended = spark_errors.Ended(_jvm_printed)

    def start(self) -> None:
        """Start Spark if this process has none.

        With remote executors, also wait for them, check that they reach everything that tasks will read and write, and
        start their workers. Raises SetupError.
        """
        self._wait_for(self._begun)

    def describe(self) -> EngineUse:
        """Return the master, and of a running context its application and the address of its UI or event log."""
        master = get_master(self._settings)
        with _lock:  # PySpark names a context before it is complete
            running = None if is_connect(self._settings) else _running()
        if running is None:
            return EngineUse(EngineKind.SPARK, master)
        application, page = str(running.applicationId), running.uiWebUrl or ""
        settings: Any = running._jsc.getConf()  # that of Python copies all settings, by a hundred calls to Java
        if not page and settings.get("spark.eventLog.enabled", "false") == "true":
            page = f"{settings.get('spark.eventLog.dir', '/tmp/spark-events')}/{application}"
        return EngineUse(EngineKind.SPARK, master, application, page)

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome | TaskTraffic]:
        """Return an outcome for each offset range of the tasks (positions in the plan), and each task's traffic,
        unordered.

        Raises SetupError if Spark does not start, Failed if its job failed or was cancelled. If some tasks' processes
        died on every try, the ranges that they had finished are still returned, the others as failures.
        """
        if not tasks:
            return []
        timed = tracing.current_step() is not None
        work = executor.TaskWork.of(job, tasks, tries(self._settings), self._per_broker, timed=timed)
        sent = self._wait_for(lambda: self._with_jobs(lambda jobs: self._land(jobs, work)))
        return tracing.trace_tasks(job.plan, job.batch, sent)

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> list[str]:
        """Return the result of the call for each number, in no particular order.

        Raises as `run`; nothing is salvaged. Raises SetupError if Spark may run a call twice at the same time.
        """
        work = _Work(feed, what, partial(executor.call, call), count)

        def collect() -> list[str]:
            spark = self._spark()  # a context, or a session of Spark Connect
            name, default = "spark.speculation", "false"
            settings = spark.conf if hasattr(spark, "conf") else spark._jsc.getConf()
            value = settings.get(name, default)
            if str(value).lower() == "true":
                raise SetupError(
                    f"with spark.speculation Spark carries tasks out twice at once, and {what} would be in its own way",
                    remedy="leave spark.speculation out of the feed's spark and of the cluster's settings, or do it"
                    " --here, without Spark",
                )
            return self._with_jobs(lambda jobs: self._map(jobs, work))

        return self._wait_for(collect) if count else []

    def _wait_for(self, call: Callable[[], T]) -> T:
        done = in_thread(call)
        try:
            wait_for_all([done])
        except BaseException:
            self.cancel()
            wait([done], _CANCEL_SECONDS)
            raise
        return done.result()

    def _begun(self) -> None:
        spark = self._spark()
        if is_local(self._settings) or is_connect(self._settings):
            return
        executors.wait(spark, self._settings, self._cancelled.is_set, self._ended)
        if self._ports and spark.applicationId not in _looked:
            self._ask_executors(spark, self._ports()).check()
            _looked.add(spark.applicationId)
        with self._watch_jobs(spark):
            _start_workers(spark, spark.applicationId)

    def _ask_executors(self, spark: SparkContext, ports: ExecutorPorts) -> Preflight:
        """Return the executors' answers, with a warning about executors that ended during the check.

        Raises SetupError if the master ended the application.
        """
        from sluice.resources.spark import preflight  # late, like Kafka's client in it: a local Spark is not checked

        try:
            with self._watch_jobs(spark):
                result = preflight.preflight(spark, ports, executors.python(self._settings))
        except Exception as error:
            if spark_errors.is_ended(str(error)) and not self._cancelled.is_set():
                reason, way = executors.given_up(self._settings, self._ended)
                raise SetupError(reason, remedy=way) from None
            raise
        ended_reason, remedy = self._ended.summarize()
        if not ended_reason or not result.answers:
            return result
        return replace(
            result, findings=(*result.findings, preflight.ExecutorProblem(ended_reason, remedy, fatal=False))
        )

    @contextmanager
    def _watch_jobs(self, spark: SparkContext) -> Iterator[None]:
        """End jobs in the block when this engine is cancelled, or all executors were lost and none came.

        Spark itself would wait without end. Raises Failed in the second case.
        """
        jobs, done = _ContextJobs(spark, self._settings, self._ended), threading.Event()
        jobs.begin("sluice: asking the executors")
        threading.Thread(target=self._watch, args=(jobs, done), name="sluice-cancel", daemon=True).start()
        try:
            yield
        finally:
            done.set()
        if self._starved.is_set():
            raise _no_executors(self._settings, self._ended)

    def preflight(self) -> Preflight:
        """Start Spark and check its executors. Findings raise nothing.

        Raises SetupError if there are no executors. On this machine there is nothing to check.
        """
        if is_local(self._settings) or is_connect(self._settings) or self._ports is None:
            from sluice.resources.spark.preflight import Preflight

            self.start()
            return Preflight((), ())
        ports = self._ports

        def probe() -> Preflight:
            spark = self._spark()
            executors.wait(spark, self._settings, self._cancelled.is_set, self._ended)
            return self._ask_executors(spark, ports())

        return self._wait_for(probe)

    def _spark(self) -> Any:
        return session(self._settings) if is_connect(self._settings) else context(self._settings)

    def _with_jobs(self, call: Callable[[_Jobs], T]) -> T:
        """Call it with jobs that end when this engine is cancelled, or is without executors for too long."""
        spark = self._spark()
        jobs = (
            _ConnectJobs(spark, self._settings)
            if is_connect(self._settings)
            else _ContextJobs(spark, self._settings, self._ended)
        )
        done = threading.Event()
        threading.Thread(target=self._watch, args=(jobs, done), name="sluice-cancel", daemon=True).start()
        try:
            return call(jobs)
        finally:
            done.set()
            jobs.close()

    def _way_out(self, error: str) -> str:
        """Return the remedy for a host, of the cluster or this one, that Spark's error names; empty if none."""
        if is_local(self._settings):
            return _room(error)
        ways = [spark_errors.ROOM_THERE] if spark_errors.full(error) else []
        return "; ".join([*ways, spark_errors.EXCLUSION] if spark_errors.is_excluded(error) else ways)

    def cancel(self) -> None:
        """End the Spark job of this engine: `run` raises Failed. Any thread may call it, at any time."""
        self._cancelled.set()

    def _watch(self, jobs: _Jobs, done: threading.Event) -> None:
        fed = time.monotonic()
        while not done.wait(_WATCH_SECONDS):
            if jobs.executors():
                fed = time.monotonic()
            if time.monotonic() - fed > self._settings.start_timeout / 1000:
                self._starved.set()
            if (self._cancelled.is_set() or self._starved.is_set()) and _jvm_ended() is None:
                with suppress(Exception):  # the job may just have ended
                    jobs.cancel()  # repeatedly: it may not have been submitted yet

    def _land(self, jobs: _Jobs, work: executor.TaskWork) -> list[executor.Sent]:
        try:
            return _outcomes(jobs, work)
        except Exception as error:  # noqa: BLE001 - Spark has no common error over classic, Py4J and Connect
            if ended := self._ended_by(error, ADOPTED):
                raise ended from None
            try:
                return _outcomes(jobs, replace(work, salvage=spark_errors.cause(error)))
            except Exception:  # noqa: BLE001 - the first error has the cause
                raise self._make_failure(error) from None

    def _map(self, jobs: _Jobs, work: _Work) -> list[str]:
        try:
            return [answer for _, answer in jobs.rows(work)]
        except Exception as error:  # noqa: BLE001 - as above
            raise self._ended_by(error, GOES_ON) or self._make_failure(error) from None

    def _ended_by(self, error: Exception, again: str) -> Failed | None:
        """Return the external cause that ended a job; None if it failed by itself. `again`: the effect of another
        run."""
        if self._cancelled.is_set():
            return Failed("the Spark job was cancelled", remedy=again)
        if (code := _jvm_ended(_ENDING_SECONDS)) is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            return Failed(
                f"Spark's JVM {how} under the job",
                remedy=f"{again}. If the system's log shows that memory ran out, give the machine more or the feed a"
                " `spark.master` with fewer cores",
            )
        if self._starved.is_set():
            return _no_executors(self._settings, self._ended, again)
        if spark_errors.is_ended(str(error)) and not is_local(self._settings):
            reason, remedy = executors.given_up(self._settings, self._ended)
            return Failed(reason, remedy=f"{remedy}; {again}")
        if is_connect(self._settings) and (unreachable := executors.unreachable(self._settings)):
            return Failed(
                f"Spark Connect's server at {self._settings.master} was lost under the job: {unreachable}",
                remedy=f"start it, then {again}",
            )
        return None

    def _make_failure(self, error: Exception) -> Failed:
        return Failed(
            f"the Spark job failed: {spark_errors.cause(error)}",
            remedy=self._way_out(str(error))
            or "the same Python environment must be on driver and executors; run again when it is fixed",
        )


def begin(settings: SparkSettings, needed: Callable[[], bool] = lambda: True) -> None:
    """Start a local Spark and its workers in the background if `needed`, which is called there.

    Its JVM starts at once and ends if nothing needs it; the pool of its workers loads if it is needed. After an error,
    logged for `--debug`, the first use of Spark starts it. A remote Spark starts only then. A Spark that this process
    started with other settings, for a run that is over, ends first.
    """
    if is_local(settings):
        if _begun and _begun[-1] != settings:
            end()
        _begun[:] = [settings]
        fork_pool()

        def start() -> None:
            try:
                with _lock:  # a thread that starts Spark may have begun a JVM already
                    if _running() is None and jvm.fits(settings.conf):
                        jvm.begin()
                if needed():
                    get_pool().load(spark=True)
                    spark = context(settings)
                    _start_workers(spark, spark.applicationId)
                else:
                    jvm.end()
            except Exception:  # noqa: BLE001 - the first use reports it
                _log.debug("Spark did not start in the background", exc_info=True)

        threading.Thread(target=start, name="sluice-spark", daemon=True).start()


def end() -> None:
    """End this process's Spark, if it has one: the next one starts with the settings of its feed."""
    with _lock:
        if (running := _running()) is not None:
            running.stop()
            _forget_jvm()


@cache
def _start_workers(spark: SparkContext, application: str) -> None:
    """Run a task on each core, whose worker imports what tasks need before landing starts. Once for an application."""
    tasks = spark.defaultParallelism
    with suppress(Exception):  # if nothing runs there, the batch reports why
        spark.parallelize(range(tasks), tasks).foreachPartition(executor.prepare)


def has_slow_start() -> bool:
    """Return whether this process started a local Spark's JVM without the archive of its classes."""
    return any(_slow_starts)


@dataclass(frozen=True, slots=True)
class _Work:
    """A job: `call` runs in a worker, in each task with a number below `count`. `what`: its description in messages."""

    feed: str
    what: str
    call: executor.Runs
    count: int


def _outcomes(jobs: _Jobs, work: executor.TaskWork) -> list[executor.Sent]:
    job = _Work(work.feed, f"batch {work.batch}", partial(executor.run, work), len(work.queues))
    return [executor.sent_in(*row) for row in jobs.rows(job)]


class _Jobs(Protocol):
    """The jobs of one call alone; `cancel` cancels only these."""

    def rows(self, work: _Work) -> list[executor.Row]: ...

    def cancel(self) -> None: ...

    def executors(self) -> bool:
        """Return whether there is any executor, as far as known."""
        ...

    def close(self) -> None: ...


class _ContextJobs:
    """Jobs of a context, as a group."""

    def __init__(self, spark: SparkContext, settings: SparkSettings, ended: spark_errors.Ended) -> None:
        self._spark, self._group = spark, f"sluice-{uuid.uuid4()}"
        self._local, self._ended = is_local(settings), ended

    def begin(self, what: str) -> None:
        """Put the later jobs of this thread into this group."""
        self._spark.setJobGroup(self._group, what)

    def rows(self, work: _Work) -> list[executor.Row]:
        self.begin(f"sluice: feed {work.feed}, {work.what}")
        self._spark.setLocalProperty("spark.scheduler.pool", work.feed)  # within a pool, jobs wait for each other
        return list(_numbers(self._spark, work.count).mapPartitions(work.call).collect())

    def cancel(self) -> None:
        self._spark.cancelJobGroup(self._group)

    def executors(self) -> bool:
        if self._local:
            return True
        self._ended.look(self._spark)
        with suppress(Exception):  # if the context has just ended, the waiting call reports more
            return executors.count(self._spark) > 0
        return True

    def close(self) -> None: ...


@lru_cache(64)
def _numbers(spark: SparkContext, count: int) -> RDD[int]:
    """Return the numbers below `count`, one for each task; cached, since Spark first writes them to a file."""
    return spark.parallelize(range(count), count)


class _ConnectJobs:
    """Jobs of Spark Connect, in a session of their own."""

    def __init__(self, spark: SparkSession, settings: SparkSettings) -> None:
        self._spark = open_another(spark, settings)
        _shorten_waits(self._spark)
        executors.add_to(self._spark, settings)

    def rows(self, work: _Work) -> list[executor.Row]:
        numbers = self._spark.range(0, work.count, 1, work.count)
        rows = numbers.mapInArrow(executors.Carried(partial(executor.in_arrow, work.call)), executor.SCHEMA).collect()
        return [(row["kind"], row["body"]) for row in rows]

    def cancel(self) -> None:
        self._spark.interruptAll()

    def executors(self) -> bool:
        return True  # its server knows

    def close(self) -> None:
        self._spark.stop()  # the server keeps nothing; and at this process's end a pending call would never return


def _shorten_waits(spark: SparkSession) -> None:
    """Limit the client's retries: by default it silently retries an unreachable server for ten minutes.

    Its message after these few tries is raised as an error.
    """
    warnings.filterwarnings("ignore", r"\[RETRIES_EXCEEDED\]", UserWarning)
    from pyspark.sql.connect.client.retries import DefaultPolicy

    spark.client.set_retry_policies([DefaultPolicy(max_retries=_CONNECT_TRIES, max_backoff=_CONNECT_PAUSE_MS)])


def context(settings: SparkSettings) -> SparkContext:
    """Return the process's Spark context, started with the settings if none runs.

    Raises SetupError. Not for Connect.
    """
    with _lock:
        if running := _running():
            return running
        executors.check_answers(settings)
        with _bound_memory(settings):
            return _capturing_output(settings, partial(_context, settings))


@contextmanager
def _bound_memory(settings: SparkSettings) -> Iterator[None]:
    """Kill the JVM if the start takes longer than `start_timeout` plus a JVM's own start.

    On this machine there is no limit.
    """
    late = threading.Timer(_START_SECONDS + settings.start_timeout / 1000, _kill_jvm)
    late.daemon = True
    if not is_local(settings):
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _kill_jvm() -> None:
    if process := _jvm_process():
        process.kill()


def session(settings: SparkSettings) -> SparkSession:
    """Return the process's Spark session, for its SQL, started with the settings if there is none.

    Raises SetupError.
    """
    from pyspark.sql import SparkSession

    if not is_connect(settings):
        context(settings)
    else:
        executors.check_answers(settings)
    with _lock:
        return SparkSession.getActiveSession() or _capturing_output(settings, lambda _: _session(settings))


def open_another(spark: SparkSession, settings: SparkSettings) -> SparkSession:
    """Return a new session of the same Spark, without this one's views and settings."""
    if not is_connect(settings) or hasattr(type(spark), "newSession"):
        return spark.newSession()
    from pyspark.sql.connect.session import SparkSession as ConnectSession  # PySpark 4.0 and 4.1 have no newSession

    return cast("SparkSession", ConnectSession(str(settings.master)))


def _running() -> SparkContext | None:
    """Return the running context; forget the remains of one that has ended, for any reason."""
    if sys.modules.get("pyspark") is None:
        return None  # the JVM starts before PySpark is loaded, which takes a while
    from pyspark import SparkContext

    active = SparkContext._active_spark_context
    if _jvm_ended() is not None or active is None or active._jsc.sc().isStopped():
        _forget_jvm()
    return SparkContext._active_spark_context


def _jvm_ended(seconds: float = 0) -> int | None:
    """Return the exit code of this process's JVM if it has ended, or does so within the seconds."""
    process = _jvm_process()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds) if process else None
    return None


def _jvm_process() -> subprocess.Popen[bytes] | None:
    """Return the JVM that was started last; None if there was none, as with Spark Connect."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _forget_jvm() -> None:
    """Drop PySpark's references to a JVM whose own `stop` may fail.

    A JVM without a context ends: PySpark would reuse it, as it was launched, and leave a new one idle.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if (process := _jvm_process()) and process.stdin:
        process.stdin.close()
        _jvm_ended(_ENDING_SECONDS)
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _no_executors(settings: SparkSettings, ended: spark_errors.Ended, again: str = ADOPTED) -> Failed:
    reason, remedy = ended.summarize()
    return Failed(
        f"every executor of {settings.master} was lost, and no other came"
        f" within {units.show_duration(settings.start_timeout)}" + (f"; {reason}" if reason else ""),
        remedy=f"{remedy or 'see whether master and workers run'}; then {again}",
    )


def _capturing_output(settings: SparkSettings, start: Callable[[BinaryIO], T]) -> T:
    """Call `start` with a file for the output of a JVM, in place of the terminal. Raises SetupError."""
    with tempfile.TemporaryFile() as output:
        try:
            return start(output)
        except SetupError:
            raise
        except Exception as error:  # noqa: BLE001 - as many kinds as there are ways to start Spark
            raise _not_started(settings, error, output) from None


def _context(settings: SparkSettings, output: BinaryIO) -> SparkContext:
    # For Spark's launcher.
    executors.check_installed(settings)
    os.environ["JAVA_HOME"] = str(java.java_home())
    if is_local(settings):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = _LOOPBACK
    else:
        os.environ["PYSPARK_PYTHON"] = executors.python(settings)
    conf = {"spark.master": get_master(settings), "spark.app.name": "sluice"} | _conf(settings)
    if not is_local(settings):
        conf |= executors.conf(settings, conf)
        while _printed:  # this JVM's output stays readable, that of the one before it goes
            os.close(_printed.pop())
        _printed.append(os.dup(output.fileno()))
    begun = jvm.take(settings.conf) if is_local(settings) else None
    gateway = begun.connect() if begun else None
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if gateway is None:
        _slow_starts.append(is_local(settings))
        # The JVM's launch settings are in its command line, which everybody can read: the others follow later.
        public = [(k, v) for k, v in conf.items() if k not in settings.conf or LAUNCHING.fullmatch(k)]
        popen = {"stdout": output, "stderr": output}
        gateway = launch_gateway(SparkConf().setAll(public), popen)  # type: ignore[no-untyped-call]
    _NumpyConverter.put_in_place()
    try:
        return SparkContext(conf=SparkConf().setAll(list(conf.items())), gateway=gateway)
    finally:
        if begun:
            with begun.output as printed:
                output.write(_read_end(printed.fileno()))
            output.flush()


class _NumpyConverter:
    """PySpark's converter of numpy's values to Java's, asked about these only.

    PySpark asks it about each argument, and its first answer imports pandas and gRPC where they are installed. Here the
    names of classes decide: while another thread imports numpy, it has no attributes.
    """

    def __init__(self, inner: Any) -> None:
        self._inner, self.convert = inner, inner.convert

    def can_convert(self, value: object) -> bool:
        return any(c.__module__ == "numpy" for c in type(value).__mro__) and bool(self._inner.can_convert(value))

    @classmethod
    def put_in_place(cls) -> None:
        from py4j.protocol import INPUT_CONVERTER

        INPUT_CONVERTER[:] = [cls(c) if type(c).__name__.startswith("Numpy") else c for c in INPUT_CONVERTER]


def _jvm_printed() -> str:
    """Return the end of the JVM's output."""
    return _read_end(_printed[-1]).decode("utf-8", "replace") if _printed else ""


def _read_end(descriptor: int) -> bytes:
    """Return the end of a file that a JVM prints to. Read without a seek: the JVM writes at the file's position."""
    return os.pread(descriptor, _PRINTED_BYTES, max(0, os.fstat(descriptor).st_size - _PRINTED_BYTES))


def _session(settings: SparkSettings) -> SparkSession:
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    if is_connect(settings):
        from sluice.resources.spark.parts import is_spark_4  # late: it takes a while

        if not is_spark_4():
            raise SetupError(
                "Spark Connect needs PySpark 4.0 or newer",
                remedy="install it, as on the server; or set `spark.master` of the feed to spark://… or yarn",
            )
        builder = builder.remote(settings.master)
    for key, value in settings.conf.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    if is_connect(settings):
        _shorten_waits(spark)
    return spark


def _not_started(settings: SparkSettings, error: Exception, output: BinaryIO) -> SetupError:
    output.seek(max(0, output.seek(0, os.SEEK_END) - 10_000))
    lines = output.read().decode("utf-8", "replace").splitlines()
    telling = [line.strip() for line in lines if re.search(r"xception|[Ee]rror|[Ii]nvalid|refused", line)][:3]
    where = settings.master or "this machine"
    fits = "`spark.master` and `spark.conf` of the feed, and the Java in JAVA_HOME, must fit this PySpark"
    if is_connect(settings):
        fits = "Spark Connect needs its server up, `spark.master` right, and `pip install 'pyspark[connect]'` here"
    return SetupError(
        "\n    ".join(
            [f"Spark did not start on {where}: {spark_errors.cause(error)}", *(line[:300] for line in telling)]
        ),
        remedy=_room(*lines) or fits,
    )


def _room(*texts: str) -> str:
    """Return the remedy if the texts report a full disk: Spark's own, not the lake's."""
    way = "free space in Spark's temporary folder (SPARK_LOCAL_DIRS or TMPDIR, else /tmp), then run again"
    return way if spark_errors.full(*texts) else ""


def _conf(settings: SparkSettings) -> dict[str, str]:
    hidden = [re.escape(key) for key, value in settings.model_dump()["conf"].items() if value == MASK]
    redacted = {"spark.redaction.regex": "|".join(["(?i)secret|password|token|access[.]?key", *hidden])}
    # The driver's files lie in this process's own folder: they go with it or, if it is killed, with the next one.
    folder = str(scratch.get_root())
    options = f'{jvm.FLAGS} -Djava.io.tmpdir="{folder}"' if '"' not in folder else jvm.FLAGS
    own = {jvm.OPTIONS: options, "spark.local.dir": folder}
    if is_local(settings):  # its workers are forked by the pool of this process
        own = _HERE | own | _sockets(folder) | {f"spark.executorEnv.{POOL}": get_pool().address}
    return _OURS | redacted | own | settings.conf


def _sockets(folder: str) -> dict[str, str]:
    """Return settings for sockets between JVM and Python, in a folder that no other user may enter.

    Over TCP each task's start waits 40 ms because of Nagle's algorithm and delayed acknowledgements.
    """
    if len(os.fsencode(folder + _SOCKET_NAME)) > _SOCKET:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}
