"""Runs as users start them, `sluice run` with Dagster, on Spark and on workers without it: their processes are killed,
stopped, interrupted.

In mid-landing, surely: the leaders of some or all partitions keep their answers until the fault is done.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import dagster as dg
import pytest

from sluice.assets.instance.instance import open_instance
from sluice.resources.project import Project
from tests.faults.account import SEED
from tests.faults.field import Field, Running
from tests.faults.nemeses.engines import Processes, healed, held, waiting
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1
PARTITIONS = 3
INTERRUPTED = 130
CORES = os.cpu_count() or 1


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Those of the run; nothing of them may be left in the end."""
    found = Processes()
    with found.killed():
        yield found


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


@pytest.fixture(params=["local", "spark"])
def engine(request: pytest.FixtureRequest, field: Field) -> str:
    """The engine of the field's feed."""
    if request.param == "spark":
        field.settings["spark"] = f"{{master: 'local[{CORES},3]'}}"
    return str(request.param)


def begun(field: Field, processes: Processes, partitions: int = PARTITIONS) -> Running:
    """A run in mid-landing: its workers wait for records of the first partitions; the others may have landed."""
    held(field, partitions)
    running = field.start_cli(environment=processes.environment)
    until(lambda: running.process.poll() is not None or waiting(field, FETCH) >= min(partitions, CORES), 900)
    assert running.process.poll() is None, running.wait()
    field.account.did(f"a run lands; {partitions} of {PARTITIONS} leaders keep their records")
    return running


@pytest.mark.usefixtures("engine")
def test_python_worker_killed_in_mid_task(field: Field, processes: Processes, draw: random.Random) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes)
        before = processes.workers(field.arena)
        victim = draw.choice(before)
        victim.send(signal.SIGKILL)
        field.account.did(f"Python worker {victim.pid} of {len(before)} was killed (SIGKILL)")
        until(lambda: {p.pid for p in processes.workers(field.arena)} - {p.pid for p in before}, 60)
        healed(field)
        assert field.ended(running).clean, "the task is tried again"
        processes.gone()
        field.recovered()
    field.proven()


@pytest.mark.usefixtures("engine")
def test_python_worker_killed_at_every_try(field: Field, processes: Processes) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes, 1)
        killed: set[int] = set()
        while running.process.poll() is None:
            for victim in processes.workers(field.arena):
                victim.send(signal.SIGKILL)
                killed.add(victim.pid)
            time.sleep(0.2)
        field.account.did(f"every Python worker that read was killed (SIGKILL): {len(killed)}")
        ran = field.ended(running)
        assert (ran.code, ran.error) == (1, "BatchIncomplete"), ran
        processes.gone()
        healed(field)
        field.recovered()
    field.proven()


def test_pool_of_workers_killed_in_mid_landing(field: Field, processes: Processes) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes, 1)
        processes.find_pool().send(signal.SIGKILL)
        field.account.did("the process that forks workers was killed (SIGKILL)")
        ran = field.ended(running)
        assert (ran.code, ran.error) == (1, "Failed"), ran
        assert "forks workers was killed by SIGKILL" in ran.noise
        processes.gone()
        healed(field)
        field.recovered()
    field.proven()


@pytest.mark.parametrize("engine", ["spark"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_jvm_of_spark_killed_in_mid_landing(field: Field, processes: Processes) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes, 1)
        processes.jvm().send(signal.SIGKILL)
        field.account.did("Spark's JVM was killed (SIGKILL)")
        ran = field.ended(running)
        assert (ran.code, ran.error) == (1, "Failed"), ran
        assert "JVM was killed by SIGKILL" in ran.noise
        processes.gone()
        healed(field)
        field.recovered()
    field.proven()


@pytest.mark.usefixtures("engine")
def test_run_killed_in_mid_landing(field: Field, processes: Processes) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes, 1)
        running.process.kill()
        field.account.did("the run's own process was killed (SIGKILL)")
        field.ended(running)
        processes.gone()
        field.account.did("nothing of it is left")
        healed(field)
        field.recovered()
    field.proven()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_run_asked_to_end_in_mid_landing(field: Field, processes: Processes, number: signal.Signals) -> None:
    with field.producing():
        field.normal(1)
        running = begun(field, processes, 1)
        os.killpg(running.process.pid, number)
        field.account.did(f"its terminal's processes were sent {number.name}")
        ran = field.ended(running)
        assert ran.code == INTERRUPTED, ran
        assert "Traceback" not in ran.noise, ran.noise
        with open_instance(Project(field.root)) as instance:
            assert [r.status for r in instance.get_runs()] == [dg.DagsterRunStatus.CANCELED]
        processes.gone()
        healed(field)
        field.recovered()
    field.proven()


def test_engine_stopped_in_mid_landing_and_continued(
    field: Field, processes: Processes, draw: random.Random, engine: str
) -> None:
    what = draw.choice(["JVM", "Python worker"] if engine == "spark" else ["Python worker"])
    with field.producing():
        field.normal(1)
        running = begun(field, processes)
        victim = processes.jvm() if what == "JVM" else draw.choice(processes.workers(field.arena))
        victim.send(signal.SIGSTOP)
        field.account.did(f"its {what} was stopped (SIGSTOP)")
        healed(field)
        meanwhile = field.run()
        assert (meanwhile.code, meanwhile.error) == (1, "PlanBusy"), meanwhile
        victim.send(signal.SIGCONT)
        field.account.did("it goes on (SIGCONT)")
        assert field.ended(running).clean
        processes.gone()
        field.recovered()
    field.proven()
