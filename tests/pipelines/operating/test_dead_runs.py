"""What dead runs left, and what the next one does about it: finished, given up, or named with the ways out; never a
word too few, and nothing of a run that is only suspected to be dead.
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
    """The process is gone."""


class Dies(MemoryEngine):
    """A run that is killed while tasks work; what `finishes` of them finished stays."""

    finishes = True

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        if self.finishes:
            super().run(job, tasks)
        raise Killed


class FindsLost(MemoryEngine):
    """Kafka does not hold any more what is to be read."""

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        return [RangeFailure(s, OffsetsLost.__name__, "gone", fatal=True) for s in job.plan.offset_ranges]


class Refuses(MemoryEngine):
    """Tasks of which one finds what nobody can land."""

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        raise QuarantineExceeded("too much is in quarantine", remedy="fix it")


Heard = dict[int, Met]
CATCH_UP = Request(RequestKind.CATCH_UP)


def again(start: int, end: int) -> Request:
    return Request(RequestKind.OFFSETS, (AskedRange("orders", 0, start, end),), replace=True)


def killed(world: World, request: Request, finishes: bool = True) -> Batch:
    """The batch that a killed run left."""
    engine = Dies(world.lake, world.topic.fetcher, world.feed.landing)
    engine.finishes = finishes
    with pytest.raises(Killed):
        land(world.feed, replace(world.edges(), engine=engine), request, owner("killed"), lambda p: None)
    world.liveness.dead.add("killed")
    (batch,) = world.ledger.read().live()
    return batch


def ran(
    world: World, request: Request, engine: type[MemoryEngine] = MemoryEngine, by: str = "next"
) -> tuple[Landed, Heard]:
    """What a run landed, and what it said of other runs' batches last."""
    heard: Heard = {}

    def report(p: Progress) -> None:
        heard.update({p.met.batch: p.met} if p.met else {})

    tasks = engine(world.lake, world.topic.fetcher, world.feed.landing)
    try:
        return land(world.feed, replace(world.edges(), engine=tasks), request, owner(by), report), heard
    finally:
        world.liveness.dead.add(by)


@pytest.fixture
def landed(feed: Feed) -> World:
    """Four offsets that landed."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START] * 4, False)
    world.land(CATCH_UP).check()
    return world


def test_a_catch_up_finishes_a_dead_replacing_that_nothing_pending_overlaps(landed: World) -> None:
    """It ended well without a word of it, and the batch stayed in the way of everybody else."""
    batch = killed(landed, again(0, 2))
    done, heard = ran(landed, CATCH_UP)
    done.check()
    met = heard[batch.id]
    assert (met.fate, met.ways, met.verdict.why) == (Fate.TAKEN_OVER, (), "set by the test")
    assert str(met).startswith(f"batch {batch.id} (offsets orders:0:0-2, replacing) is unfinished, and run run-1")
    (result,) = done.batches
    assert (result.batch, result.foreign, result.adopted) == (batch.id, True, 1)
    assert landed.ledger.read().live() == ()
    assert batch.plan is not None
    assert set(landed.ledger.read().replaced) == set(batch.plan.replaces)


def test_what_is_pending_comes_first_and_what_dead_runs_left_then(landed: World) -> None:
    batch = killed(landed, again(0, 2))
    landed.topic.write(PARTITIONS[0], [START], False)
    done, _ = ran(landed, CATCH_UP)
    assert [b.foreign for b in done.batches] == [False, True]
    assert done.batches[1].batch == batch.id


def test_a_dead_replacing_that_kafka_does_not_hold_any_more_is_given_up(landed: World) -> None:
    batch = killed(landed, again(0, 2), finishes=False)
    done, heard = ran(landed, CATCH_UP, FindsLost)
    done.check()
    assert (heard[batch.id].fate, heard[batch.id].why) == (Fate.GIVEN_UP, "orders:0:0-4: gone")
    assert landed.ledger.read().batches[batch.id].status is BatchStatus.ABANDONED


def test_the_same_replacing_goes_on_though_kafka_does_not_hold_what_it_reads_any_more(landed: World) -> None:
    """All of it was finished; it was refused since its records are gone, and nobody could publish it."""
    batch = killed(landed, again(0, 2))
    landed.topic.log_start = 1
    done, heard = ran(landed, again(0, 2))
    done.check()
    assert (heard[batch.id].fate, done.batches[0].adopted, done.refusals) == (Fate.TAKEN_OVER, 1, ())
    assert landed.ledger.read().live() == ()


def test_a_replacing_that_is_refused_again_does_not_stop_a_catch_up(landed: World) -> None:
    batch = killed(landed, again(0, 2))
    done, heard = ran(landed, CATCH_UP, Refuses)
    done.check()
    met = heard[batch.id]
    assert (met.fate, met.why) == (Fate.LEFT, "too much is in quarantine")
    assert [command for command, _ in met.ways] == [
        "sluice run orders --offsets orders:0:0-2 --replace",
        f"sluice repair orders --abandon {batch.id}",
    ]
    (result,) = done.batches
    assert (result.refused, result.number) == ("too much is in quarantine", None)


def test_what_ended_with_a_report_why_is_not_tried_again_and_again(landed: World) -> None:
    batch = killed(landed, again(0, 2))
    landed.lake.put(paths.batch_page_path("orders", batch.id, "killed"), b"<html>")
    for heartbeats, fate in (({}, Fate.LEFT), ({"killed": 7}, Fate.TAKEN_OVER)):
        landed.liveness.heartbeats = heartbeats
        _, heard = ran(landed, CATCH_UP, by=f"next-{len(heartbeats)}")
        assert heard[batch.id].fate is fate


@pytest.mark.parametrize(
    "request_",
    [Request(RequestKind.WINDOW, window=START // HOUR * HOUR), again(2, 4), replace(CATCH_UP, only=PARTITIONS[1:])],
)
def test_who_was_asked_for_something_else_names_it_and_the_ways_out(feed: Feed, request_: Request) -> None:
    world = World(feed)
    for _ in range(2):
        world.topic.write(PARTITIONS[0], [START] * 2, False)
        world.land(CATCH_UP).check()
    world.now += 2 * HOUR
    batch = killed(world, again(0, 2))
    done, heard = ran(world, request_)
    done.check()
    assert (heard[batch.id].fate, len(heard[batch.id].ways)) == (Fate.LEFT, 2)
    assert [b.id for b in world.ledger.read().live()] == [batch.id]


def test_nothing_of_a_run_that_is_only_suspected_is_touched(landed: World) -> None:
    batch = killed(landed, again(0, 2))
    landed.liveness.suspects, landed.liveness.dead = {"killed"}, set()
    done, heard = ran(landed, CATCH_UP)
    assert (done.batches, heard) == ((), {})
    assert [b.id for b in landed.ledger.read().live()] == [batch.id]
    with pytest.raises(
        PlanBusy, match=r"is at work: run run-1 .* lives: set by the test; it reserves orders:0:0-4"
    ) as busy:
        ran(landed, again(0, 1))
    assert busy.value.remedy.startswith("wait for it to end, or cancel it where it runs (host)")


def test_any_run_gives_up_what_a_dead_one_was_writing_again(landed: World) -> None:
    s = OffsetRange(*KEY, 0, 4)
    plan = Plan("orders", landed.topic.id, Request(RequestKind.COMPACT), Isolation.READ_COMMITTED, (Task(0, -1, (s,)),))
    landed.ledger.append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner("killed")))
    landed.liveness.dead.add("killed")
    _, heard = ran(landed, replace(CATCH_UP, only=PARTITIONS[1:]))
    (met,) = heard.values()
    assert (met.fate, met.why) == (Fate.GIVEN_UP, "the run that wrote these parts again died; they are as they were")
    assert landed.ledger.read().live() == ()


def test_a_dry_run_says_what_the_run_would_do_about_the_dead_and_is_not_stopped_by_them(landed: World) -> None:
    batch = killed(landed, again(0, 2))
    said = {request: preview(landed.feed, landed.edges(), request) for request in (CATCH_UP, again(0, 1), again(0, 2))}
    assert [(p.blocked, p.met[0].batch, p.met[0].fate) for p in said.values()] == [
        (None, batch.id, Fate.TAKEN_OVER)
    ] * 3
    other = preview(landed.feed, landed.edges(), replace(CATCH_UP, only=PARTITIONS[1:]))
    assert (other.met[0].fate, len(other.met[0].ways)) == (Fate.LEFT, 2)
    landed.liveness.dead.clear()
    alive = preview(landed.feed, landed.edges(), again(0, 1))
    assert isinstance(alive.blocked, PlanBusy)
    assert alive.met == ()


def test_a_dead_replacing_in_the_way_that_is_given_up_does_not_fail_what_is_landed_instead(feed: Feed) -> None:
    """What was pending landed by a plan of its own, and the run failed by what it had given up."""
    world = World(feed)
    world.topic.write(PARTITIONS[0], [START] * 2, False)
    batch = killed(world, replace(again(0, 2)), finishes=False)
    engine = type("Once", (MemoryEngine,), {"run": lambda self, job, tasks: _once(self, job, tasks, batch.id)})
    done, heard = ran(world, CATCH_UP, engine)
    done.check()
    assert (heard[batch.id].fate, [b.number is None for b in done.batches]) == (Fate.GIVEN_UP, [True, False])


def _once(tasks: MemoryEngine, job: Job, indexes: Sequence[int], lost: int) -> list[Outcome]:
    return (FindsLost.run if job.batch == lost else MemoryEngine.run)(tasks, job, indexes)  # type: ignore[arg-type]
