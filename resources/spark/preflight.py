"""Checks, before anything is read, that every executor can do the work of its tasks.

    findings(here, answers)      pure: the problems in the executors' answers, each with its remedy
    failed(error)                the same, if their Python could not even answer
    preflight(session, ports)    ask them

A job sends each executor a function by value, which imports nothing of ours at first, and returns its Python, its
machine, its releases and clock, and whether it reaches every broker and the lake. It takes some seconds, once for an
application.
"""

from __future__ import annotations

import inspect
import pickle
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import SetupError
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.extras import VERSION
from sluice.pipelines.util.units import join_first
from sluice.resources.kafka.connection.connection_settings import FILES, KafkaAccess
from sluice.resources.spark import executor_probe, spark_errors

SECONDS = 20.0
"""How long an executor tries to reach Kafka and the lake."""
CLOCK_MS = 60_000
"""Clocks may differ by this; S3 refuses requests at fifteen minutes."""
_CONNECT_SECONDS = 5.0
_SAME = ("sluice", "pyspark")
"""Packages whose release must be the driver's."""
_LIKE = ("pyarrow", "numpy", "kafka-python", "pydantic")
"""Packages whose release should be the driver's."""
"""Kafka settings of a feed that name a file, which each host has for itself."""
_SENT = "let the pack be sent (`spark: {environment: pack}`, the default)"


@dataclass(frozen=True, slots=True)
class ExecutorAnswer:
    """One executor's answer.

    `skew`: how far its clock is certainly off the driver's, in ms. `imports`, `lake` and the values of `kafka` (by
    address) are failures, empty if there was none.
    """

    host: str
    python: str
    machine: str
    releases: Mapping[str, str] = field(default_factory=dict)
    skew: int = 0
    imports: str = ""
    kafka: Mapping[str, str] = field(default_factory=dict)
    lake: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorProblem:
    """One problem, its place, and the remedy. `fatal`: no task could succeed there."""

    message: str
    remedy: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Preflight:
    """The question and its result."""

    answers: tuple[ExecutorAnswer, ...]
    findings: tuple[ExecutorProblem, ...]

    def check(self) -> None:
        """Raise SetupError for fatal findings."""
        if fatal := [f for f in self.findings if f.fatal]:
            message = "\n    ".join(f.message for f in fatal)
            raise SetupError(message, remedy="; ".join(dict.fromkeys(f.remedy for f in fatal)))


@dataclass(frozen=True, slots=True)
class ExecutorPorts:
    """The ports that executors try.

    `visible_path`: a path that the driver sees in the lake; another lake of the same name lacks it.
    """

    access: KafkaAccess
    store: Lake
    visible_path: str = ""

    @classmethod
    def of(cls, access: KafkaAccess, lake: Lake) -> ExecutorPorts:
        return cls(access, lake, next(iter(lake.list("_sluice")), ""))

    @property
    def bootstrap(self) -> str:
        return self.access.bootstrap

    def kafka(self) -> dict[str, str]:
        """Return the problem of each address, with the real client and a connection to every broker.

        Raises the client's errors, and FileNotFoundError for a file that the feed names.
        """
        files = {k: v for k, v in self.access.client_settings().items() if k in FILES}
        if away := [f"{path} ({name})" for name, path in files.items() if not Path(path).is_file()]:
            raise FileNotFoundError(f"there is no {' and no '.join(away)}")
        from sluice.resources.kafka.cluster.cluster import KafkaCluster  # late: it takes the extra `kafka`

        with closing(KafkaCluster(self.access)) as cluster:
            return {address: _probe(address) for address in cluster.addresses()}

    def load_loops(self) -> None:
        """Load the compiled loops. Raises SetupError if there are none for this processor."""
        import sluice.pipelines.records.kafka_batches.decode  # noqa: F401

    def lake(self) -> str:
        """Return the problem of the lake; empty if there is none. Raises the store's errors."""
        if self.visible_path and self.store.get(self.visible_path) is None:
            return f"{self.store.uri} does not hold {self.visible_path}, which the driver sees"
        next(iter(self.store.list("_sluice")), None)
        return ""


def _probe(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- answers


def here() -> ExecutorAnswer:
    """Return the answer of this process, as if it were an executor."""
    releases = {"sluice": VERSION} | {name: version(name) for name in ("pyspark", *_LIKE)}
    return ExecutorAnswer(socket.gethostname(), platform.python_version(), platform.machine(), releases)


def findings(driver: ExecutorAnswer, answers: Iterable[ExecutorAnswer]) -> tuple[ExecutorProblem, ...]:
    """Return the problems, fatal ones first. One finding names all hosts that have it."""
    hosts_by_finding: dict[tuple[str, str, bool], list[str]] = {}
    for answer in answers:
        for message, remedy, fatal in _of(driver, answer):
            hosts = hosts_by_finding.setdefault((message, remedy, fatal), [])
            if answer.host not in hosts:
                hosts.append(answer.host)
    grouped = [
        ExecutorProblem(f"executors on {join_first(hosts, 3)} {s}", r, f)
        for (s, r, f), hosts in hosts_by_finding.items()
    ]
    return tuple(sorted(grouped, key=lambda finding: not finding.fatal))


def _of(driver: ExecutorAnswer, answer: ExecutorAnswer) -> Iterator[tuple[str, str, bool]]:
    if _minor(answer.python) != _minor(driver.python):
        yield _other_python(_minor(answer.python), _minor(driver.python))
        return
    if answer.machine != driver.machine:
        message = f"are {answer.machine} machines, the driver is {driver.machine}"
        yield message, "a pack serves one kind of machine: run the driver on theirs, or install Sluice there", True
        return
    if answer.imports:
        yield f"cannot import what tasks need: {answer.imports}", f"{_SENT}, or install Sluice on every host", True
        return
    yield from _other_releases(driver, answer)
    for address, why in answer.kafka.items():
        if why:
            yield f"do not reach Kafka{' at ' if address else ''}{address}: {why}", _way_to_kafka(why), True
    if answer.lake:
        remedy = "a cluster needs a lake that every host reaches: a bucket, or a folder that all of them mount alike"
        yield f"do not reach the lake: {answer.lake}", remedy, True
    if abs(answer.skew) > CLOCK_MS:
        ahead = "ahead of" if answer.skew > 0 else "behind"
        message = f"have a clock {abs(answer.skew) // 1000} s {ahead} the driver's"
        yield message, "set the clocks right (NTP): stores refuse requests of another time", False


def _way_to_kafka(why: str) -> str:
    if why.startswith(FileNotFoundError.__name__):
        return "put the files that the feed's `kafka:` section names at the same path on every host"
    if ModuleNotFoundError.__name__ in why:
        return "let the module be sent: name it in the feed, `spark: {modules: [NAME]}`"
    remedy = "open the way from every worker to every broker, by the addresses that the brokers advertise"
    return f"{remedy} (advertised.listeners)"


def _other_releases(driver: ExecutorAnswer, answer: ExecutorAnswer) -> Iterator[tuple[str, str, bool]]:
    for name, ours in driver.releases.items():
        theirs = answer.releases.get(name, "")
        if theirs != ours:
            remedy = _SENT if name != "pyspark" else "use one release of Spark on the cluster and here"
            fatal = name in _SAME and (name == "sluice" or _minor(theirs) != _minor(ours))
            yield f"have {name} {theirs or 'unknown'}, the driver {ours}", remedy, fatal


def _other_python(theirs: str, ours: str) -> tuple[str, str, bool]:
    remedy = f"install Python {ours} there and name it: `spark: {{python: /path/to/python{ours}}}`"
    return f"run Python {theirs}, the driver {ours}", remedy, True


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def explain_failure(error: str, python: str) -> ExecutorProblem:
    """Return why no executor answered, from Spark's error; `python`: the requested interpreter."""
    address = spark_errors.host(error)
    reason, remedy = _why(error, python)
    if spark_errors.is_excluded(error):
        reason, remedy = (
            f"{reason}; Spark has excluded every executor that there was",
            f"{remedy}; {spark_errors.EXCLUSION}",
        )
    return ExecutorProblem(f"executors{f' on {address}' if address else ''} {reason}", remedy)


def _why(error: str, python: str) -> tuple[str, str]:
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if other := re.search(r"in worker[^0-9]*\(?(\d+)[., ]+(\d+)\)?[^0-9]*driver", error):
        reason, remedy, _ = _other_python(f"{other[1]}.{other[2]}", ours)
        return reason, remedy
    if spark_errors.full(error):
        return "have no space left on their disks", spark_errors.ROOM_THERE
    if re.search(r"Cannot run program|No such file or directory", error) and python in error:
        remedy = f"install Python {ours} there, or name theirs: `spark: {{python: /path/to/python{ours}}}`"
        return f"have no {python}", remedy
    if missing := re.search(r"No module named '?([\w.]+)", error):
        return f"have no module {missing[1]}", f"{_SENT}, or install Sluice on every host"
    return f"do not answer: {spark_errors.telling(error)[:300] or 'no reason given'}", spark_errors.PRINTED


# -- questions


def build_probe(text: str, question: Mapping[str, Any]) -> Callable[[Iterable[int]], Iterator[dict[str, Any]]]:
    """Return the function that Spark calls there.

    It has no name in a module, so it travels by value, and refers to nothing of ours.
    """

    def look(numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        import time

        scope: dict[str, Any] = {}
        exec(text, scope)
        for _ in numbers:
            yield scope["answer"](question)
            time.sleep(0.2)  # so that one executor does not take all

    return look


def look(ports: ExecutorPorts) -> Callable[[Iterable[int]], Iterator[dict[str, Any]]]:
    """Return the function that executors run."""
    question = {"releases": [*_SAME, *_LIKE], "ports": pickle.dumps(ports), "seconds": SECONDS}
    return build_probe(inspect.getsource(executor_probe), question)


def answers(rows: Iterable[Mapping[str, Any]], began: int, ended: int) -> tuple[ExecutorAnswer, ...]:
    """Return one answer for each executor's Python; `began` and `ended` are the job's (ms, the driver's clock)."""
    by_executor: dict[tuple[str, int], ExecutorAnswer] = {}
    for one in rows:
        clock = one["clock"]
        skew = clock - ended if clock > ended else min(0, clock - began)
        plain = {k: v for k, v in one.items() if k not in ("process", "clock")}
        by_executor.setdefault((one["host"], one["process"]), ExecutorAnswer(**plain, skew=skew))
    return tuple(by_executor.values())


def preflight(spark: Any, ports: ExecutorPorts, python: str) -> Preflight:
    """Ask the executors of a running context (a SparkContext).

    Findings raise nothing: see `check`. Raises Spark's error if the application is ended.
    """
    count, began = max(2, spark.defaultParallelism), _now()
    try:
        rows = spark.parallelize(range(count), count).mapPartitions(look(ports)).collect()
    except Exception as error:
        if spark_errors.is_ended(str(error)):
            raise
        return Preflight((), (explain_failure(str(error), python),))
    heard = answers(rows, began, _now())
    return Preflight(heard, findings(here(), heard))


def _now() -> int:
    return time.time_ns() // 1_000_000
