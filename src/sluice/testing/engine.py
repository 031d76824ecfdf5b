"""An engine that runs tasks in this process with the code of Spark executors; a clock and liveness that tests set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.kafka import FetchLimits
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import EngineKind, EngineUse, Life, Outcome, Owner, Verdict
from sluice.pipelines.ports import Fetcher, Job, Lake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.lake import MemoryLake

if TYPE_CHECKING:
    from sluice.pipelines.records.rows.row_format import Format

TASK_BYTES = 512 << 20


@dataclass
class MemoryEngine:
    """`ports.Engine` without Spark. `fetcher` creates the fetcher of a task.

    `ran` collects the jobs; `canceled` counts calls of `cancel`. Override `carry_out` to return invented outcomes.
    """

    lake: Lake = field(default_factory=MemoryLake)
    fetcher: Callable[[], Fetcher] = lambda: MemoryFetcher({})
    landing: LandingSettings = field(default_factory=LandingSettings)
    ran: list[Job] = field(default_factory=list)
    canceled: int = 0

    def start(self) -> None: ...

    def describe(self) -> EngineUse:
        return EngineUse(EngineKind.PROCESSES)

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        self.ran.append(job)
        return [outcome for index in tasks for outcome in self.carry_out(job, job.plan.tasks[index])]

    def map(self, feed: str, what: str, call: Callable[[int], str], count: int) -> list[str]:
        return [call(number) for number in range(count)]

    def cancel(self) -> None:
        self.canceled += 1

    def carry_out(self, job: Job, task: Task) -> list[Outcome]:
        """Returns one outcome for each offset range of the task."""
        # Late: it imports the compiled loops, which other engines do not need.
        from sluice.pipelines.landing.task import Assignment, Tools, run_task

        plan = job.plan
        work = Assignment(
            plan.feed,
            job.batch,
            plan.hash,
            plan.isolation,
            job.attempt,
            self.landing,
            FetchLimits(),
            TASK_BYTES,
            job.shape.name,
            dropping=job.shape.dropping,
            erased=job.erased,
        )
        return run_task(task, work, Tools(self.fetcher(), self.lake, self.format(job)))

    def format(self, job: Job) -> Format:
        """Returns the format that decodes records into rows."""
        return job.shape.format(KeptSchemas(self.lake, job.plan.feed))


@dataclass
class MemoryClock:
    """`ports.Clock`: `now` is ms since the epoch. Each call first adds `step`."""

    now: int = 0
    step: int = 0

    def __call__(self) -> int:
        self.now += self.step
        return self.now


@dataclass
class MemoryLiveness:
    """`ports.Liveness` in memory. Owners live unless their token is in `dead`; `suspects` need watching."""

    dead: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    beaten: list[str] = field(default_factory=list)
    heartbeats: dict[str, int] = field(default_factory=dict)
    """Time of the last heartbeat by token (ms)."""
    lake_owners: list[Owner] = field(default_factory=list)
    """Owners with a heartbeat in the lake."""

    @contextmanager
    def send_heartbeats(self, owner: Owner) -> Iterator[None]:
        self.beaten.append(owner.token)
        yield

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        return {o.token: Verdict(self.life(o.token, watch), "set by the test") for o in owners}

    def life(self, token: str, watch: bool) -> Life:
        """Returns the state of the owner with this token."""
        if token in self.suspects:
            return (Life.DEAD if token in self.dead else Life.ALIVE) if watch else Life.UNKNOWN
        return Life.DEAD if token in self.dead else Life.ALIVE

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.lake_owners)

    def last_heartbeat(self, owner: Owner) -> int | None:
        return self.heartbeats.get(owner.token)


def owner(token: str = "token-1", run: str = "run-1") -> Owner:
    """Returns the owner of a batch: the process of a run."""
    return Owner(token, run, "host", 1, 0)
