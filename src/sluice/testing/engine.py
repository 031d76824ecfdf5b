"""An engine that runs tasks in this process, with the code of Spark executors and a fetcher in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.model.kafka import FetchLimits
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import Outcome
from sluice.pipelines.ports import Fetcher, Job, Lake
from sluice.testing.fetcher import MemoryFetcher
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
        )
        return run_task(task, work, Tools(self.fetcher(), self.lake, self.format(job)))

    def format(self, job: Job) -> Format:
        """Returns the format that decodes records into rows."""
        return job.shape.format(KeptSchemas(self.lake, job.plan.feed))
