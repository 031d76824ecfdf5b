"""The executor's side of a batch: builds ports from the shipped wiring, runs tasks, returns outcomes as rows.

The driver ships one `TaskWork` to every Python worker; a worker gets numbers of queues of tasks, builds its own Kafka
and lake ports from the wiring, and sends back one JSON text for each offset range and one for its traffic, never data.
A queue is one task of Spark's and runs tasks of the plan one after the other; a broker with a limit has as many queues
as may read from it.
Everything here pickles by its module's name. Secrets travel inside `KafkaSettings` and `S3Settings`, which mask them in
every repr; credentials that boto3 finds by itself are found again on each executor, and do not travel.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.model.kafka import FetchLimits, Isolation, Range
from sluice.pipelines.model.plans import OffsetRange, Task, to_json
from sluice.pipelines.model.receipts import Outcome, RangeFailure, Receipt, TaskTime, TaskTraffic
from sluice.pipelines.ports import Fetcher, Job, Lake
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.shape import Shape
from sluice.resources.lake import open_lake
from sluice.resources.registry import writers_of

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.landing.task import Tools

RACK = "SLUICE_RACK"
"""The environment variable that names the machine's rack (`client.rack`, KIP-392)."""
Row = tuple[str, str]
"""An outcome, a traffic or a time on its way to the driver: its kind and its JSON."""
Runs = Callable[[Iterable[int]], Iterator[Row]]
"""A function that Spark calls in a Python worker."""
SCHEMA = "kind string, body string"
_SAID = "said"
Sent = Outcome | TaskTraffic | TaskTime
_KINDS: dict[str, Any] = {c.__name__: c for c in (Receipt, RangeFailure, TaskTraffic, TaskTime)}
_make_adapter = cache(TypeAdapter[Sent])


class Opens(Protocol):
    """Opens the wiring in a worker: settings, and ports that are closed when the block ends."""

    @property
    def landing(self) -> LandingSettings: ...

    @property
    def limits(self) -> FetchLimits: ...

    @property
    def memory(self) -> int:
        """Return the bytes that one task may take."""
        ...

    def open(self, isolation: Isolation, shape: Shape) -> AbstractContextManager[Tools]: ...


@dataclass(frozen=True, slots=True)
class Wiring:
    """A feed's ports as executors build them: Kafka, and a lake that every executor reaches."""

    kafka: KafkaSettings
    lake: Lake
    landing: LandingSettings
    limits: FetchLimits
    rack: str
    memory: int
    writers: WriterSchemas | None = None

    @classmethod
    def of(cls, feed: Feed) -> Wiring:
        limits, rack = feed.fetch.limits(), feed.fetch.rack or ""
        lake = open_lake(feed)
        return cls(feed.kafka, lake, feed.landing, limits, rack, feed.task_memory, writers_of(feed, lake))

    @contextmanager
    def open(self, isolation: Isolation, shape: Shape) -> Iterator[Tools]:
        """Yield the ports, without opening a connection."""
        from sluice.pipelines.landing.task import Tools

        with self.open_fetcher(isolation) as fetcher:
            yield Tools(fetcher, self.lake, shape.format(self.writers))

    def open_fetcher(self, isolation: Isolation) -> AbstractContextManager[Fetcher]:
        """Returns a fetcher that reads from replicas in the machine's rack, if it names one."""
        from sluice.resources.kafka.fetch.fetch import KafkaFetcher

        return closing(KafkaFetcher(self.kafka, isolation, rack=os.environ.get(RACK) or self.rack))


@dataclass(frozen=True, slots=True)
class TaskWork:
    """The shipped work: the batch's task list and the tasks' common settings. `tries`: how often a task may run."""

    feed: str
    batch: int
    plan_hash: str
    isolation: Isolation
    attempt: str
    wiring: Opens
    shape: Shape
    tasks: tuple[Task, ...]
    queues: tuple[Queue, ...]
    """The tasks' positions, grouped into Spark's tasks."""
    tries: int
    timed: bool = False
    """True if tasks report when they began and ended."""
    fresh: bool = False
    """True if nothing has worked on the batch before."""
    salvage: str = ""
    """The reason why the tasks failed: then read nothing, and only report which offset ranges were finished before."""
    erased: Mapping[OffsetRange, tuple[Range, ...]] = field(default_factory=dict)
    """The offsets whose records do not land, by offset range."""

    @classmethod
    def of(
        cls, job: Job, tasks: Iterable[int], tries: int, per_broker: int | None = None, *, timed: bool = False
    ) -> TaskWork:
        """`per_broker`: how many tasks may read from one broker at once."""
        plan = job.plan
        chosen = tuple(plan.tasks[i] for i in tasks)
        return cls(
            plan.feed,
            job.batch,
            plan.hash,
            plan.isolation,
            job.attempt,
            job.wiring,
            job.shape,
            chosen,
            queues([task.leader for task in chosen], per_broker),
            tries,
            timed,
            job.fresh,
            erased=job.erased,
        )


def run(work: TaskWork, numbers: Iterable[int], tried: int | None = None) -> Iterator[Row]:
    """Run the tasks at these positions of `work.queues`; yield a row for each outcome and each traffic.

    An engine calls it in a worker. `tried`: how often these tasks were tried before; None: Spark knows.
    """
    tried = _count_spark_tries() if tried is None else tried
    for number in numbers:
        for position in work.queues[number]:
            task, began = work.tasks[position], time.time_ns()
            for sent in _carried_out(work, task, tried):
                yield type(sent).__name__, to_json(sent)
            if work.timed:
                yield (
                    TaskTime.__name__,
                    to_json(TaskTime(task.index, began, time.time_ns(), tried, socket.gethostname(), os.getpid())),
                )


def call(called: Callable[[int], str], numbers: Iterable[int], tried: int = 0) -> Iterator[Row]:
    """Run `called` for each number; yield one row with its result. An engine calls it in a worker."""
    for number in numbers:
        yield _SAID, called(number)


def in_arrow(run: Runs, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run it where Spark passes and takes Arrow's batches (`mapInArrow`)."""
    import pyarrow as pa  # late: a command that only wires a feed needs no Arrow

    from sluice.pipelines.schema.arrays import text_array

    for batch in numbers:
        rows = list(run(batch.column(0).to_pylist()))
        columns = [text_array([row[i] for row in rows]) for i in range(2)]
        yield pa.RecordBatch.from_arrays(columns, names=["kind", "body"])


def prepare(numbers: Iterable[int]) -> None:
    """Import the modules of tasks. Spark calls it before a first batch."""
    import sluice.pipelines.landing.task  # noqa: F401


def _carried_out(work: TaskWork, task: Task, tried: int) -> list[Outcome | TaskTraffic]:
    # Imported late: workers need the compiled loops, code that only wires a feed does not.
    from sluice.pipelines.landing.task import Assignment, run_task, salvage_task

    wiring, attempt = work.wiring, f"{work.attempt}-{secrets.token_hex(4)}"
    assignment = Assignment(
        work.feed,
        work.batch,
        work.plan_hash,
        work.isolation,
        attempt,
        wiring.landing,
        wiring.limits,
        wiring.memory,
        work.shape.name,
        fresh=work.fresh and not tried,
        dropping=work.shape.dropping,
        erased=work.erased,
    )
    with wiring.open(work.isolation, work.shape) as tools:
        if work.salvage:
            return [*salvage_task(task, assignment, tools, work.salvage)]
        outcomes = run_task(task, assignment, tools, last_try=tried >= work.tries - 1)
        traffic = tools.fetcher.traffic()
        return [*outcomes, traffic] if traffic.brokers else [*outcomes]


def _count_spark_tries() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return int(context.attemptNumber()) if context else 0


def sent_in(kind: str, body: str) -> Sent:
    """Decode a row. Raises ValueError for a row that `run` did not write."""
    if kind not in _KINDS:
        raise ValueError(f"nothing that a task sends: {kind}")
    adapter: TypeAdapter[Sent] = _make_adapter(_KINDS[kind])
    return adapter.validate_json(body)


Queue = tuple[int, ...]
"""Positions in a batch's list of tasks."""


def queues(leaders: Sequence[int], bound: int | None = None) -> tuple[Queue, ...]:
    """Put each position of `leaders` (a task's broker) in one queue, with at most `bound` queues for a broker.

    Brokers take turns, so that the first tasks do not all ask the first broker. Tasks that read from several brokers
    count as those of one broker more.

    >>> queues([1, 1, 2])
    ((0,), (2,), (1,))
    >>> queues([1, 1, 1, 2], bound=2)
    ((0, 2), (3,), (1,))
    """
    by_leader: dict[int, list[int]] = {}
    for position, leader in enumerate(leaders):
        by_leader.setdefault(leader, []).append(position)
    shared: list[list[Queue]] = []
    for positions in by_leader.values():
        count = min(bound or len(positions), len(positions))
        shared.append([tuple(positions[i::count]) for i in range(count)])
    return tuple(filter(None, chain.from_iterable(zip_longest(*shared, fillvalue=()))))
