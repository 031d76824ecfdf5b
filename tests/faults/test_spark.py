"""`sluice run` with Dagster, on Spark and in processes without it: processes are killed, stopped, interrupted.

To make sure that a fault occurs in mid-landing, the leaders of some or all partitions hold their answers until then.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import dagster as dg
import pytest

from sluice.assets.instance.instance import open_instance
from sluice.resources.project import Project
from tests.faults.account import SEED
from tests.faults.field import Field, Running
from tests.faults.nemeses.engines import Process, Processes, count_held, hold_requests, release_requests
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1
PARTITIONS = 3
INTERRUPTED = 130
CORES = os.cpu_count() or 1


@pytest.fixture
def processes() -> Iterator[Processes]:
    """The processes of the run. All are killed at the end."""
    processes = Processes()
    with processes.kill_at_exit():
        yield processes


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


@pytest.fixture(params=["processes", "spark"])
def engine(request: pytest.FixtureRequest, field: Field) -> str:
    """The engine of the field's feed."""
    field.settings["engine"] = str(request.param)
    return str(request.param)


def start_in_mid_landing(field: Field, processes: Processes, partitions: int = PARTITIONS) -> Running:
    """Start a run whose workers wait for records of the first partitions. The others may have landed."""
    hold_requests(field, partitions)
    running = field.start_cli(environment=processes.environment)
    wait_until(lambda: running.process.poll() is not None or count_held(field, FETCH) >= min(partitions, CORES), 900)
    assert running.process.poll() is None, running.wait()
    field.account.log(f"a run lands; {partitions} of {PARTITIONS} leaders keep their records")
    return running


@pytest.mark.usefixtures("engine")
def test_python_worker_killed_during_a_task(field: Field, processes: Processes, draw: random.Random) -> None:
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes)
        before = processes.list_workers(field.arena)
        victim = draw.choice(before)
        victim.send(signal.SIGKILL)
        field.account.log(f"Python worker {victim.pid} of {len(before)} was killed (SIGKILL)")
        wait_until(lambda: {p.pid for p in processes.list_workers(field.arena)} - {p.pid for p in before}, 60)
        release_requests(field)
        assert field.wait_for_run(running).clean, "the task is tried again"
        processes.wait_until_gone()
        field.run_until_clean()
    field.verify()


@pytest.mark.usefixtures("engine")
def test_python_worker_killed_at_every_attempt(field: Field, processes: Processes) -> None:
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes, 1)
        killed: set[int] = set()
        while running.process.poll() is None:
            for victim in processes.list_workers(field.arena):
                victim.send(signal.SIGKILL)
                killed.add(victim.pid)
            time.sleep(0.2)
        field.account.log(f"every Python worker that read was killed (SIGKILL): {len(killed)}")
        run = field.wait_for_run(running)
        assert (run.code, run.error) == (1, "BatchIncomplete"), run
        processes.wait_until_gone()
        release_requests(field)
        field.run_until_clean()
    field.verify()


@pytest.mark.parametrize("engine", ["processes"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_worker_pool_killed_during_landing(field: Field, processes: Processes) -> None:
    kill_in_mid_landing(field, processes, processes.find_pool, "the process that forks workers", "forks workers")


@pytest.mark.parametrize("engine", ["spark"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_worker_pool_of_spark_killed_during_landing(field: Field, processes: Processes) -> None:
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes, 1)
        workers = processes.list_workers(field.arena)
        for victim in (processes.find_pool(), *workers):
            victim.send(signal.SIGKILL)
        field.account.log(f"the process that forked Spark's daemon was killed (SIGKILL), and {len(workers)} workers")
        release_requests(field)
        assert field.wait_for_run(running).clean, "Spark starts a daemon without the pool"
        processes.wait_until_gone()
        field.run_until_clean()
    field.verify()


@pytest.mark.parametrize("engine", ["spark"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_spark_jvm_killed_during_landing(field: Field, processes: Processes) -> None:
    kill_in_mid_landing(field, processes, processes.find_jvm, "Spark's JVM", "JVM")


def kill_in_mid_landing(field: Field, processes: Processes, find: Callable[[], Process], name: str, error: str) -> None:
    """Kill one process of a run that lands; the run fails and names it, and the next runs land all."""
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes, 1)
        find().send(signal.SIGKILL)
        field.account.log(f"{name} was killed (SIGKILL)")
        run = field.wait_for_run(running)
        assert (run.code, run.error) == (1, "Failed"), run
        assert f"{error} was killed by SIGKILL" in run.stderr
        processes.wait_until_gone()
        release_requests(field)
        field.run_until_clean()
    field.verify()


@pytest.mark.usefixtures("engine")
def test_run_killed_during_landing(field: Field, processes: Processes) -> None:
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes, 1)
        running.process.kill()
        field.account.log("the run's own process was killed (SIGKILL)")
        field.wait_for_run(running)
        processes.wait_until_gone()
        field.account.log("nothing of it is left")
        release_requests(field)
        field.run_until_clean()
    field.verify()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_run_terminated_or_interrupted_during_landing(
    field: Field, processes: Processes, number: signal.Signals
) -> None:
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes, 1)
        os.killpg(running.process.pid, number)
        field.account.log(f"its terminal's processes were sent {number.name}")
        run = field.wait_for_run(running)
        assert run.code == INTERRUPTED, run
        assert "Traceback" not in run.stderr, run.stderr
        with open_instance(Project(field.root)) as instance:
            assert [r.status for r in instance.get_runs()] == [dg.DagsterRunStatus.CANCELED]
        processes.wait_until_gone()
        release_requests(field)
        field.run_until_clean()
    field.verify()


def test_engine_stopped_during_landing_and_continued(
    field: Field, processes: Processes, draw: random.Random, engine: str
) -> None:
    victim_name = draw.choice(["JVM", "Python worker"] if engine == "spark" else ["Python worker"])
    with field.run_producers():
        field.run_baseline(1)
        running = start_in_mid_landing(field, processes)
        victim = processes.find_jvm() if victim_name == "JVM" else draw.choice(processes.list_workers(field.arena))
        victim.send(signal.SIGSTOP)
        field.account.log(f"its {victim_name} was stopped (SIGSTOP)")
        release_requests(field)
        rival = field.run()
        assert (rival.code, rival.error) == (1, "PlanBusy"), rival
        victim.send(signal.SIGCONT)
        field.account.log("it goes on (SIGCONT)")
        assert field.wait_for_run(running).clean
        processes.wait_until_gone()
        field.run_until_clean()
    field.verify()
