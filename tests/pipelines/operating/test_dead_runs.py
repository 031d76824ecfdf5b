"""Batches of dead runs are finished, given up, or reported with the commands that resolve them.

The next run reports each of them, and touches none of a run that is only suspected to be dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import OffsetsLost, PlanBusy, QuarantineExceeded
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, BatchStatus
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.model.kafka import Isolation, Key
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Fate, Met, Outcome, Progress, RangeFailure
from sluice.pipelines.ports import Job
from sluice.testing.engine import MemoryEngine, owner
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World, feed

__all__ = ["feed"]
KEY = Key("orders", 0, "id-1")


class Killed(BaseException):
    """Stands for a kill of the process."""


class Dies(MemoryEngine):
    """A run that is killed while its tasks work; with `finishes`, their receipts are staged first."""

    finishes = True

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        if self.finishes:
            super().run(job, tasks)
        raise Killed


class FindsLost(MemoryEngine):
    """An engine whose tasks find that Kafka deleted the records to read."""

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        return [RangeFailure(s, OffsetsLost.__name__, "gone", fatal=True) for s in job.plan.offset_ranges]


class Refuses(MemoryEngine):
    """An engine whose tasks fail because too many records are bad."""

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        raise QuarantineExceeded("too much is in quarantine", remedy="fix it")


MetBatches = dict[int, Met]
CATCH_UP = Request(RequestKind.CATCH_UP)


def make_request(start: int, end: int) -> Request:
    return Request(RequestKind.OFFSETS, (AskedRange("orders", 0, start, end),), replace=True)


def kill_run(world: World, request: Request, finishes: bool = True) -> Batch:
    """Kill a run of this request. Returns the batch that it leaves."""
    engine = Dies(world.lake, world.topic.make_fetcher, world.feed.landing)
    engine.finishes = finishes
    with pytest.raises(Killed):
        land(world.feed, replace(world.make_ports(), engine=engine), request, owner("killed"), lambda p: None)
    world.liveness.dead.add("killed")
    (batch,) = world.ledger.read().live()
    return batch


def run_next(
    world: World, request: Request, engine: type[MemoryEngine] = MemoryEngine, by: str = "next"
) -> tuple[Landed, MetBatches]:
    """Run this request. Returns its landing, and its last report of each batch of another run."""
    met: MetBatches = {}

    def report(p: Progress) -> None:
        met.update({p.met.batch: p.met} if p.met else {})

    tasks = engine(world.lake, world.topic.make_fetcher, world.feed.landing)
    try:
        return land(world.feed, replace(world.make_ports(), engine=tasks), request, owner(by), report), met
    finally:
        world.liveness.dead.add(by)


@pytest.fixture
def landed(feed: Feed) -> World:
    """A feed of which four offsets have landed."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START] * 4, False)
    world.land(CATCH_UP).check()
    return world


def test_catch_up_finishes_dead_replacement_without_pending_overlap(landed: World) -> None:
    """Regression: the run succeeded without a report of the batch, which kept blocking all other runs."""
    batch = kill_run(landed, make_request(0, 2))
    done, met_batches = run_next(landed, CATCH_UP)
    done.check()
    met = met_batches[batch.id]
    assert (met.fate, met.ways, met.verdict.why) == (Fate.TAKEN_OVER, (), "set by the test")
    assert str(met).startswith(f"batch {batch.id} (offsets orders:0:0-2, replacing) is unfinished, and run run-1")
    (result,) = done.batches
    assert (result.batch, result.foreign, result.adopted_offset_ranges) == (batch.id, True, 1)
    assert landed.ledger.read().live() == ()
    assert batch.plan is not None
    assert set(landed.ledger.read().replaced) == set(batch.plan.replaces)


def test_pending_offsets_land_before_batches_of_dead_runs(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2))
    landed.topic.write(PARTITIONS[0], [START], False)
    done, _ = run_next(landed, CATCH_UP)
    assert [b.foreign for b in done.batches] == [False, True]
    assert done.batches[1].batch == batch.id


def test_dead_replacement_is_abandoned_when_kafka_lost_its_records(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2), finishes=False)
    done, met_batches = run_next(landed, CATCH_UP, FindsLost)
    done.check()
    assert (met_batches[batch.id].fate, met_batches[batch.id].why) == (Fate.GIVEN_UP, "orders:0:0-4: gone")
    assert landed.ledger.read().batches[batch.id].status is BatchStatus.ABANDONED


def test_staged_replacement_is_finished_after_kafka_deleted_its_records(landed: World) -> None:
    """Regression: all its receipts were staged, but no run could publish them, because its records were gone."""
    batch = kill_run(landed, make_request(0, 2))
    landed.topic.log_start = 1
    done, met_batches = run_next(landed, make_request(0, 2))
    done.check()
    assert (met_batches[batch.id].fate, done.batches[0].adopted_offset_ranges, done.refusals) == (
        Fate.TAKEN_OVER,
        1,
        (),
    )
    assert landed.ledger.read().live() == ()


def test_replacement_refused_again_does_not_stop_catch_up(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2))
    done, met_batches = run_next(landed, CATCH_UP, Refuses)
    done.check()
    met = met_batches[batch.id]
    assert (met.fate, met.why) == (Fate.LEFT, "too much is in quarantine")
    assert [command for command, _ in met.ways] == [
        "sluice run orders --offsets orders:0:0-2 --replace",
        f"sluice repair orders --abandon {batch.id}",
    ]
    (result,) = done.batches
    assert (result.refused, result.number) == ("too much is in quarantine", None)


def test_batch_of_run_that_ended_with_a_report_is_not_retried(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2))
    landed.lake.put(paths.batch_page_path("orders", batch.id, "killed"), b"<html>")
    for heartbeats, fate in (({}, Fate.LEFT), ({"killed": 7}, Fate.TAKEN_OVER)):
        landed.liveness.heartbeats = heartbeats
        _, met_batches = run_next(landed, CATCH_UP, by=f"next-{len(heartbeats)}")
        assert met_batches[batch.id].fate is fate


@pytest.mark.parametrize(
    "request_",
    [
        Request(RequestKind.WINDOW, window=START // HOUR * HOUR),
        make_request(2, 4),
        replace(CATCH_UP, only=PARTITIONS[1:]),
    ],
)
def test_run_with_other_request_reports_dead_batch_and_remedies(feed: Feed, request_: Request) -> None:
    world = World(feed)
    for _ in range(2):
        world.topic.write(PARTITIONS[0], [START] * 2, False)
        world.land(CATCH_UP).check()
    world.now += 2 * HOUR
    batch = kill_run(world, make_request(0, 2))
    done, met_batches = run_next(world, request_)
    done.check()
    assert (met_batches[batch.id].fate, len(met_batches[batch.id].ways)) == (Fate.LEFT, 2)
    assert [b.id for b in world.ledger.read().live()] == [batch.id]


def test_batch_of_suspected_run_is_not_touched(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2))
    landed.liveness.suspects, landed.liveness.dead = {"killed"}, set()
    done, met_batches = run_next(landed, CATCH_UP)
    assert (done.batches, met_batches) == ((), {})
    assert [b.id for b in landed.ledger.read().live()] == [batch.id]
    with pytest.raises(
        PlanBusy, match=r"is at work: run run-1 .* lives: set by the test; it reserves orders:0:0-4"
    ) as busy:
        run_next(landed, make_request(0, 1))
    assert busy.value.remedy.startswith("wait for it to end, or cancel it where it runs (host)")


def test_any_run_abandons_the_compaction_of_a_dead_run(landed: World) -> None:
    s = OffsetRange(*KEY, 0, 4)
    plan = Plan("orders", landed.topic.id, Request(RequestKind.COMPACT), Isolation.READ_COMMITTED, (Task(0, -1, (s,)),))
    landed.ledger.append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner("killed")))
    landed.liveness.dead.add("killed")
    _, met_batches = run_next(landed, replace(CATCH_UP, only=PARTITIONS[1:]))
    (met,) = met_batches.values()
    assert (met.fate, met.why) == (Fate.GIVEN_UP, "the run that wrote these parts again died; they are as they were")
    assert landed.ledger.read().live() == ()


def test_dry_run_reports_fate_of_dead_batches_and_is_not_blocked(landed: World) -> None:
    batch = kill_run(landed, make_request(0, 2))
    previews = {
        request: preview(landed.feed, landed.make_ports(), request)
        for request in (CATCH_UP, make_request(0, 1), make_request(0, 2))
    }
    assert [(p.blocked, p.other_batches[0].batch, p.other_batches[0].fate) for p in previews.values()] == [
        (None, batch.id, Fate.TAKEN_OVER)
    ] * 3
    other = preview(landed.feed, landed.make_ports(), replace(CATCH_UP, only=PARTITIONS[1:]))
    assert (other.other_batches[0].fate, len(other.other_batches[0].ways)) == (Fate.LEFT, 2)
    landed.liveness.dead.clear()
    alive = preview(landed.feed, landed.make_ports(), make_request(0, 1))
    assert isinstance(alive.blocked, PlanBusy)
    assert alive.other_batches == ()


def test_run_succeeds_after_abandoning_a_blocking_dead_replacement(feed: Feed) -> None:
    """Regression: pending offsets landed in another batch, and the run failed because of the batch that it gave up."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START] * 2, False)
    batch = kill_run(world, replace(make_request(0, 2)), finishes=False)
    engine = type("Once", (MemoryEngine,), {"run": lambda self, job, tasks: _run_once(self, job, tasks, batch.id)})
    done, met_batches = run_next(world, CATCH_UP, engine)
    done.check()
    assert (met_batches[batch.id].fate, [b.number is None for b in done.batches]) == (Fate.GIVEN_UP, [True, False])


def _run_once(tasks: MemoryEngine, job: Job, indexes: Sequence[int], lost: int) -> list[Outcome]:
    return (FindsLost.run if job.batch == lost else MemoryEngine.run)(tasks, job, indexes)  # type: ignore[arg-type]
