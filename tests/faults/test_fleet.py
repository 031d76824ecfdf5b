"""One run over many feeds: killed at random times, canceled, two at once, with feeds that cannot land.

Each feed has its own topic, producers and verdict: faults of one feed or of the run lose and double nothing.
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

from sluice.assets.runs.run_config import FAILED_TAG, fleet_job
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.util.units import HOUR, show_window
from tests.checker.gather import list_writes
from tests.checker.producers import Noting
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import Field, Run, Running
from tests.faults.nemeses import desk as dagster_ui
from tests.faults.nemeses.engines import count_held, hold_requests, release_requests
from tests.faults.nemeses.lakes import fill_disk, mount_tmpfs
from tests.integration.support import SLUICE
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1

NAMES = ("orders", "refunds", "returns")
RATE, KILLS = 40, 4
HUGE_PARTITIONS, HUGE_HOURS = 40, 15
BACKFILLED = 3
AWAY = "{bootstrap: '127.0.0.1:9', bootstrap_timeout_ms: 500}"


@pytest.fixture
def fleet(arena: Arena, account: Account, tmp_path: Path) -> list[Field]:
    """Three feeds of one project, and an invalid feed file."""
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "broken.yaml").write_text("topics: [\n")
    fields = []
    for number, name in enumerate(NAMES):
        topic = f"fleet-{name}-{account.fault.partition('[')[0].replace('_', '-')}"[:80]
        arena.create(topic, 2, first=number)
        fields.append(Field(arena, tmp_path, topic, 2, account, name=name))
        fields[-1].write_feed()
    return fields


@contextmanager
def run_producers(fleet: list[Field]) -> Iterator[None]:
    with ExitStack() as stack:
        for field in fleet:
            stack.enter_context(field.run_producers(RATE))
        yield


def start_run(fleet: list[Field], number: list[int] = [0]) -> Running:  # noqa: B006 - a counter
    number[0] += 1
    root = fleet[0].root
    command = [*SLUICE, "run", "--all", "--project", str(root), "--json"]
    return Running.spawn(command, root / f"fleet-{number[0]}.out")


def finish_run(fleet: list[Field], running: Running, about: str) -> Run:
    run = running.wait()
    for field in fleet:
        field.observed_entries += list_writes(field.folder)
    fleet[0].account.count("runs killed" if run.code < 0 else "clean runs" if list_failed(run) == [] else "runs failed")
    outcome = f"was ended by {signal.Signals(-run.code).name}" if run.code < 0 else f"ended; failed: {list_failed(run)}"
    fleet[0].account.log(f"{about} {outcome}, after {run.seconds:.1f} s")
    return run


def list_failed(run: Run) -> list[str]:
    """Returns the failed feeds of a run over all. The invalid feed file must be reported in addition."""
    assert run.code >= 0, run
    (document,) = (line for line in run.lines if "failed" in line)
    assert [e["error"] for e in document["broken"]] == ["FeedError"], document["broken"]
    return list(document["failed"])


def test_the_run_over_many_feeds_is_killed_at_random_times(fleet: list[Field]) -> None:
    draw = random.Random(SEED)
    with run_producers(fleet):
        assert list_failed(finish_run(fleet, start_run(fleet), "a run over all feeds")) == []  # it makes Dagster's home
        complete = finish_run(fleet, start_run(fleet), "a run over all feeds")
        assert list_failed(complete) == [], complete
        killed = 0
        for _ in range(3 * KILLS):
            running = start_run(fleet)
            time.sleep(draw.uniform(0.4, 1.0) * complete.seconds)
            os.killpg(running.process.pid, signal.SIGKILL)
            killed += finish_run(fleet, running, "a run over all feeds").code < 0  # else it had ended before
            if killed == KILLS:
                break
        assert killed == KILLS
        last_run = finish_run(fleet, start_run(fleet), "the run after them")
        assert list_failed(last_run) == [], last_run
    for field in fleet:
        field.verify()


def test_two_runs_over_many_feeds_at_once(fleet: list[Field]) -> None:
    with run_producers(fleet):
        assert list_failed(finish_run(fleet, start_run(fleet), "a run by itself")) == []  # it makes Dagster's home
        for _ in range(2):
            rivals = [start_run(fleet) for _ in range(2)]
            for running in rivals:
                run = finish_run(fleet, running, "one of two runs at once")
                assert "Traceback" not in run.stderr, run.stderr
        last_run = finish_run(fleet, start_run(fleet), "a run by itself")
        assert list_failed(last_run) == [], last_run
    for field in fleet:
        field.verify()


def test_cluster_unreachable_for_one_of_many_feeds(fleet: list[Field]) -> None:
    lose_kafka_for(fleet, NAMES[1:2])


def test_cluster_unreachable_for_most_of_many_feeds(fleet: list[Field]) -> None:
    lose_kafka_for(fleet, NAMES[:2])


def lose_kafka_for(fleet: list[Field], names: Sequence[str]) -> None:
    """Run while these feeds reach no Kafka: the others land. The next run lands the pending records."""
    affected = [field for field in fleet if field.name in names]
    with run_producers(fleet):
        assert list_failed(finish_run(fleet, start_run(fleet), "a run over all feeds")) == []
        for field in affected:
            replace(field, settings={"kafka": AWAY}).write_feed()
        run = finish_run(fleet, start_run(fleet), f"a run without a Kafka for {', '.join(names)}")
        assert list_failed(run) == [*names], run
        for field in affected:
            field.write_feed()
        assert list_failed(finish_run(fleet, start_run(fleet), "the run after it")) == []
    for field in fleet:
        field.verify()


def test_disk_full_for_one_of_many_feeds(fleet: list[Field], tmp_path: Path) -> None:
    """Its lake has a separate, small file system. The other feeds land, and it continues when there is room."""
    disk = tmp_path / "disk"
    mount = mount_tmpfs(disk)
    try:
        mount.__enter__()
    except OSError as error:
        pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
    fleet[1] = fleet[1].with_settings(lake=str(disk / "lake"))
    fleet[1].write_feed()
    with run_producers(fleet):
        assert list_failed(finish_run(fleet, start_run(fleet), "a run over all feeds")) == []
        with fill_disk(fleet[1]):
            run = finish_run(fleet, start_run(fleet), f"a run while there is no room for {fleet[1].name}")
            assert list_failed(run) == [fleet[1].name], run
        assert list_failed(finish_run(fleet, start_run(fleet), "the run after it")) == []
    for field in fleet:
        field.verify()
    mount.__exit__(None, None, None)


def test_feed_with_a_huge_plan_delays_no_other_feed(fleet: list[Field], arena: Arena, account: Account) -> None:
    """It delays no other feed: they commit before it publishes."""
    topic = f"{fleet[0].topic}-huge"
    arena.create(topic, HUGE_PARTITIONS)
    huge = Field(arena, fleet[0].root, topic, HUGE_PARTITIONS, account, name="archive")
    path = huge.add_notes("past")
    for hour in range(HUGE_HOURS):
        producer = Noting(path, f"archive-{hour}", arena.kafka.bootstrap, ahead_ms=-(HUGE_HOURS - hour) * HOUR)
        for partition in range(HUGE_PARTITIONS):
            producer.send(topic, partition, 1)
        producer.close()
    account.log(
        f"{huge.name} has pending {HUGE_PARTITIONS * HUGE_HOURS} offset ranges, in {HUGE_HOURS} windows, each a file"
    )
    huge.settings["landing"] = "{shared_files: false}"  # shared files would make it as fast as the others
    huge.write_feed()
    with run_producers(fleet):
        time.sleep(1)
        run = finish_run([*fleet, huge], start_run(fleet), "a run over all feeds")
        assert list_failed(run) == [], run
        published = find_first(huge, "publish")
        assert all(find_first(small, "commit") < published for small in fleet), "they wait for nobody"
    for field in (*fleet, huge):
        field.verify()


def find_first(field: Field, kind: str) -> int:
    """Returns the time (ms) of the first ledger entry of that kind."""
    return next(int(e["at"]) for e in field.folder.read_entries().values() if e["kind"] == kind)


def test_a_run_over_many_feeds_is_canceled_in_dagster(fleet: list[Field]) -> None:
    """Landed feeds stay landed, the others stay pending."""
    (fleet[0].root / "fleet.yaml").write_text("feeds_at_once: 1\n")
    with run_producers(fleet):
        time.sleep(2)
        with dagster_ui.run_desk(fleet[0].root) as desk:
            run = desk.launch(fleet_job(SHARED))
            worker = desk.find_worker(run)
            wait_until(lambda: list_committed(fleet) or desk.get_status(run).value in ENDED, 120)
            hold_requests(fleet[-1], 2, FETCH)
            wait_until(lambda: count_held(fleet[-1], FETCH) or desk.get_status(run).value in ENDED, 120)
            landed = list_committed(fleet)
            assert 0 < len(landed) < len(fleet), desk.read_log(run)
            desk.terminate(run)
            assert desk.wait_for_run(run) is dg.DagsterRunStatus.CANCELED, desk.read_log(run)
            wait_until(lambda: not desk.list_remaining(worker), 60)
            fleet[0].account.log(
                f"a run was canceled when {', '.join(landed)} had landed; none of its processes is left"
            )
            release_requests(fleet[-1])
            assert list_committed(fleet)[: len(landed)] == landed
        assert list_failed(finish_run(fleet, start_run(fleet), "the run after it")) == []
    assert list_committed(fleet) == list(NAMES)
    for field in fleet:
        field.verify()


def test_a_failed_run_over_many_feeds_is_executed_again_in_dagster(fleet: list[Field]) -> None:
    """From its failure: the feeds only that failed."""
    broken = fleet[1]
    with run_producers(fleet):
        time.sleep(2)
        replace(broken, settings={"kafka": AWAY}).write_feed()
        with dagster_ui.run_desk(fleet[0].root) as servers:
            run = servers.launch(fleet_job(SHARED))
            assert servers.wait_for_run(run) is dg.DagsterRunStatus.FAILURE, servers.read_log(run)
            (failed,) = servers.instance.get_runs(dg.RunsFilter(run_ids=[run]))
            assert failed.tags[FAILED_TAG] == broken.name, servers.read_log(run)
            assert list_committed(fleet) == [f.name for f in fleet if f is not broken]
            commits = count_commits(fleet)
            broken.write_feed()
            retry, _ = servers.retry(run)
            assert servers.wait_for_run(retry) is dg.DagsterRunStatus.SUCCESS, servers.read_log(retry)
            fleet[0].account.log(f"the run was executed again, and landed {broken.name} alone")
            assert count_commits(fleet) == commits | {broken.name: 1}
    assert list_failed(finish_run(fleet, start_run(fleet), "the run after it")) == []
    for field in fleet:
        field.verify()


def count_commits(fleet: list[Field]) -> dict[str, int]:
    return {f.name: sum(e["kind"] == "commit" for e in _read_entries(f)) for f in fleet}


def test_a_backfill_of_many_feeds_in_dagster(fleet: list[Field]) -> None:
    """One run over some hours of all feeds. The feed without Kafka fails alone, and lands when it is re-executed."""
    now = int(time.time() * 1000)
    closed = WindowSettings().last_boundary(now)  # at any minute of the hour
    hours = range(closed - BACKFILLED * HOUR, closed, HOUR)
    windows = [show_window(hour) for hour in hours]
    for field in fleet:
        path = field.add_notes("past")
        for hour in hours:
            with closing(Noting(path, show_window(hour), field.arena.kafka.bootstrap, ahead_ms=hour - now)) as producer:
                for partition in range(field.partitions):
                    producer.send(field.topic, partition, 20)
    broken = fleet[1]
    replace(broken, settings={"kafka": AWAY}).write_feed()
    with dagster_ui.run_desk(fleet[0].root) as desk:
        (record,) = desk.wait_for_backfill(desk.launch_backfill(NAMES, windows))
        run = record.dagster_run
        assert run.status is dg.DagsterRunStatus.FAILURE, desk.read_log(run.run_id)
        fleet[0].account.log(f"a backfill of {len(windows)} windows of {len(fleet)} feeds was one run; one feed failed")
        assert [list_materialized(desk, field) for field in fleet] == [set(windows), set(), set(windows)]
        assert list_committed(fleet) == [f.name for f in fleet if f is not broken]
        broken.write_feed()
        retry, steps = desk.retry(run.run_id)
        assert all(step.startswith(broken.name) for step in steps), steps
        assert desk.wait_for_run(retry) is dg.DagsterRunStatus.SUCCESS, desk.read_log(retry)
        fleet[0].account.log("that feed alone was executed again, and succeeded")
        assert list_materialized(desk, broken) == set(windows)
    assert list_failed(finish_run(fleet, start_run(fleet), "the run after it")) == []
    for field in fleet:
        field.verify()


def list_materialized(desk: dagster_ui.Desk, field: Field) -> set[str]:
    return set(desk.instance.get_materialized_partitions(landed_key(field.name)))


ENDED = ("SUCCESS", "FAILURE", "CANCELED")


def list_committed(fleet: list[Field]) -> list[str]:
    """Returns the feeds with committed offsets."""
    return [f.name for f in fleet if any(e["kind"] == "commit" for e in _read_entries(f))]


def _read_entries(field: Field) -> list[dict[str, Any]]:
    return list(field.folder.read_entries().values())
