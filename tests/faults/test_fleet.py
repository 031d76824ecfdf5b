"""One run over many feeds: killed at random times, canceled, two at once, with feeds among them that cannot land.

Each feed has its own topic, producers and verdict: what happens to one, or to the run, loses or doubles nothing.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sluice.assets.runs.run_config import fleet_job
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.util.units import HOUR, show_window
from tests.checker.gather import seen
from tests.checker.producers import Noting
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import SLUICE, Field, Run, Running
from tests.faults.nemeses import desk as dagster_ui
from tests.faults.nemeses.engines import healed, held, waiting
from tests.faults.nemeses.lakes import disk_full, mounted
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1

NAMES = ("orders", "refunds", "returns")
RATE, KILLS = 40, 4
HUGE_PARTITIONS, HUGE_HOURS = 40, 15
BACKFILLED = 3
AWAY = "{bootstrap: '127.0.0.1:9', bootstrap_timeout_ms: 500}"


@pytest.fixture
def fleet(arena: Arena, account: Account, tmp_path: Path) -> list[Field]:
    """Three feeds of one project, and a file that is no feed."""
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "broken.yaml").write_text("topics: [\n")
    found = []
    for number, name in enumerate(NAMES):
        topic = f"fleet-{name}-{account.fault.partition('[')[0].replace('_', '-')}"[:80]
        arena.create(topic, 2, first=number)
        found.append(Field(arena, tmp_path, topic, 2, account, name=name))
        found[-1].feed()
    return found


@contextmanager
def producing(fleet: list[Field]) -> Iterator[None]:
    with ExitStack() as stack:
        for field in fleet:
            stack.enter_context(field.producing(RATE))
        yield


def started(fleet: list[Field], number: list[int] = [0]) -> Running:  # noqa: B006 - counts on
    number[0] += 1
    root = fleet[0].root
    command = [*SLUICE, "run", "--all", "--project", str(root), "--json"]
    return Running.alone(command, root / f"fleet-{number[0]}.out")


def ended(fleet: list[Field], running: Running, about: str) -> Run:
    ran = running.wait()
    for field in fleet:
        field.observed += seen(field.folder)
    fleet[0].account.count("runs killed" if ran.code < 0 else "clean runs" if failed(ran) == [] else "runs failed")
    how = f"was ended by {signal.Signals(-ran.code).name}" if ran.code < 0 else f"ended; failed: {failed(ran)}"
    fleet[0].account.did(f"{about} {how}, after {ran.seconds:.1f} s")
    return ran


def failed(ran: Run) -> list[str]:
    """The feeds that a run over all said to have failed. The file that is no feed is told beside them, always."""
    assert ran.code >= 0, ran
    (document,) = (line for line in ran.said if "failed" in line)
    assert [e["error"] for e in document["broken"]] == ["FeedError"], document["broken"]
    return list(document["failed"])


def test_the_run_over_many_feeds_is_killed_at_random_times(fleet: list[Field]) -> None:
    draw = random.Random(SEED)
    with producing(fleet):
        assert failed(ended(fleet, started(fleet), "a run over all feeds")) == []  # it makes Dagster's home
        whole = ended(fleet, started(fleet), "a run over all feeds")
        assert failed(whole) == [], whole
        killed = 0
        for _ in range(3 * KILLS):
            running = started(fleet)
            time.sleep(draw.uniform(0.4, 1.0) * whole.seconds)
            os.killpg(running.process.pid, signal.SIGKILL)
            killed += ended(fleet, running, "a run over all feeds").code < 0  # else it had ended before
            if killed == KILLS:
                break
        assert killed == KILLS
        again = ended(fleet, started(fleet), "the run after them")
        assert failed(again) == [], again
    for field in fleet:
        field.proven()


def test_two_runs_over_many_feeds_at_once(fleet: list[Field]) -> None:
    with producing(fleet):
        assert failed(ended(fleet, started(fleet), "a run by itself")) == []  # it makes Dagster's home
        for _ in range(2):
            both = [started(fleet) for _ in range(2)]
            for running in both:
                ran = ended(fleet, running, "one of two runs at once")
                assert "Traceback" not in ran.noise, ran.noise
        again = ended(fleet, started(fleet), "a run by itself")
        assert failed(again) == [], again
    for field in fleet:
        field.proven()


def test_a_cluster_that_is_away_for_one_of_many_feeds(fleet: list[Field]) -> None:
    away_for(fleet, NAMES[1:2])


def test_a_cluster_that_is_away_for_most_of_many_feeds(fleet: list[Field]) -> None:
    away_for(fleet, NAMES[:2])


def away_for(fleet: list[Field], names: Sequence[str]) -> None:
    """A run while these feeds find no Kafka: the others land, and the run after it lands what was pending."""
    lost = [field for field in fleet if field.name in names]
    with producing(fleet):
        assert failed(ended(fleet, started(fleet), "a run over all feeds")) == []
        for field in lost:
            replace(field, settings={"kafka": AWAY}).feed()
        ran = ended(fleet, started(fleet), f"a run without a Kafka for {', '.join(names)}")
        assert failed(ran) == [*names], ran
        for field in lost:
            field.feed()
        assert failed(ended(fleet, started(fleet), "the run after it")) == []
    for field in fleet:
        field.proven()


def test_a_disk_that_is_full_for_one_of_many_feeds(fleet: list[Field], tmp_path: Path) -> None:
    """Its lake has a small file system to itself. The others land, and it goes on when there is room."""
    place = tmp_path / "disk"
    block = mounted(place)
    try:
        block.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    fleet[1] = fleet[1].with_settings(lake=str(place / "lake"))
    fleet[1].feed()
    with producing(fleet):
        assert failed(ended(fleet, started(fleet), "a run over all feeds")) == []
        with disk_full(fleet[1]):
            ran = ended(fleet, started(fleet), f"a run while there is no room for {fleet[1].name}")
            assert failed(ran) == [fleet[1].name], ran
        assert failed(ended(fleet, started(fleet), "the run after it")) == []
    for field in fleet:
        field.proven()
    block.__exit__(None, None, None)


def test_a_feed_whose_plan_is_huge_beside_small_ones(fleet: list[Field], arena: Arena, account: Account) -> None:
    """It holds up no other: they have committed before it publishes."""
    topic = f"{fleet[0].topic}-huge"
    arena.create(topic, HUGE_PARTITIONS)
    huge = Field(arena, fleet[0].root, topic, HUGE_PARTITIONS, account, name="archive")
    path = huge.noted("past")
    for hour in range(HUGE_HOURS):
        producer = Noting(path, f"archive-{hour}", arena.kafka.bootstrap, ahead_ms=-(HUGE_HOURS - hour) * HOUR)
        for partition in range(HUGE_PARTITIONS):
            producer.send(topic, partition, 1)
        producer.close()
    account.did(
        f"{huge.name} has pending {HUGE_PARTITIONS * HUGE_HOURS} offset ranges, in {HUGE_HOURS} windows, each a file"
    )
    huge.settings["landing"] = "{shared_files: false}"  # in shared ones they would be no more work than the others
    huge.feed()
    with producing(fleet):
        time.sleep(1)
        ran = ended([*fleet, huge], started(fleet), "a run over all feeds")
        assert failed(ran) == [], ran
        published = first(huge, "publish")
        assert all(first(small, "commit") < published for small in fleet), "they wait for nobody"
    for field in (*fleet, huge):
        field.proven()


def first(field: Field, kind: str) -> int:
    """When (ms) the first entry of that kind was written."""
    return next(int(e["at"]) for e in field.folder.entries().values() if e["kind"] == kind)


def test_a_run_over_many_feeds_is_canceled_in_dagster(fleet: list[Field]) -> None:
    """What has landed stays; what was not reached stays pending."""
    (fleet[0].root / "fleet.yaml").write_text("feeds_at_once: 1\n")
    with producing(fleet):
        time.sleep(2)
        with dagster_ui.opened(fleet[0].root) as desk:
            run = desk.launch(fleet_job(SHARED))
            worker = desk.worker(run)
            until(lambda: committed(fleet) or desk.status(run).value in ENDED, 120)
            held(fleet[-1], 2, FETCH)
            until(lambda: waiting(fleet[-1], FETCH) or desk.status(run).value in ENDED, 120)
            done = committed(fleet)
            assert 0 < len(done) < len(fleet), desk.log(run)
            desk.terminate(run)
            assert desk.ended(run) is dg.DagsterRunStatus.CANCELED, desk.log(run)
            until(lambda: not desk.left_by(worker), 60)
            fleet[0].account.did(f"a run was canceled when {', '.join(done)} had landed; none of its processes is left")
            healed(fleet[-1])
            assert committed(fleet)[: len(done)] == done
        assert failed(ended(fleet, started(fleet), "the run after it")) == []
    assert committed(fleet) == list(NAMES)
    for field in fleet:
        field.proven()


def test_a_backfill_of_many_feeds_in_dagster(fleet: list[Field]) -> None:
    """One run over some hours of all of them. One finds no Kafka: it alone is red, and lands when it is executed
    again."""
    now = int(time.time() * 1000)
    closed = WindowSettings().last_boundary(now)  # whatever the minute is
    hours = range(closed - BACKFILLED * HOUR, closed, HOUR)
    windows = [show_window(hour) for hour in hours]
    for field in fleet:
        path = field.noted("past")
        for hour in hours:
            with closing(Noting(path, show_window(hour), field.arena.kafka.bootstrap, ahead_ms=hour - now)) as producer:
                for partition in range(field.partitions):
                    producer.send(field.topic, partition, 20)
    broken = fleet[1]
    replace(broken, settings={"kafka": AWAY}).feed()
    with dagster_ui.opened(fleet[0].root) as desk:
        (record,) = desk.backfilled(desk.backfill(NAMES, windows))
        run = record.dagster_run
        assert run.status is dg.DagsterRunStatus.FAILURE, desk.log(run.run_id)
        fleet[0].account.did(f"a backfill of {len(windows)} windows of {len(fleet)} feeds was one run; one feed failed")
        assert [green(desk, field) for field in fleet] == [set(windows), set(), set(windows)]
        assert committed(fleet) == [f.name for f in fleet if f is not broken]
        broken.feed()
        again, steps = desk.again(run.run_id)
        assert all(step.startswith(broken.name) for step in steps), steps
        assert desk.ended(again) is dg.DagsterRunStatus.SUCCESS, desk.log(again)
        fleet[0].account.did("that feed alone was executed again, and succeeded")
        assert green(desk, broken) == set(windows)
    assert failed(ended(fleet, started(fleet), "the run after it")) == []
    for field in fleet:
        field.proven()


def green(desk: dagster_ui.Desk, field: Field) -> set[str]:
    return set(desk.instance.get_materialized_partitions(landed_key(field.name)))


ENDED = ("SUCCESS", "FAILURE", "CANCELED")


def committed(fleet: list[Field]) -> list[str]:
    """The feeds whose offsets some run has committed."""
    return [f.name for f in fleet if any(e["kind"] == "commit" for e in _entries(f))]


def _entries(field: Field) -> list[dict[str, Any]]:
    return list(field.folder.entries().values())
