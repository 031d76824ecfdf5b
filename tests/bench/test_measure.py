"""The cost of a process includes its children, running and ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.measure import metering

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="costs are read from /proc")

_BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
_CHILD = "import subprocess, sys; {how}([sys.executable, '-c', {code!r}]{more})\nprint('done', flush=True); input()"


@contextmanager
def run_python(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python that waits for a line, runs the code, prints `done` and waits again."""
    script = f"input()\n{code}"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish_work(process: subprocess.Popen[str]) -> None:
    if process.stdin and process.stdout:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"


@pytest.mark.parametrize(
    "code",
    [
        _BURN.format(seconds=0.3) + "print('done', flush=True); input()",
        _CHILD.format(how="subprocess.run", code=_BURN.format(seconds=0.3), more=""),
    ],
    ids=["itself", "a child that has ended"],
)
def test_cpu_time_includes_child_processes(code: str) -> None:
    with run_python(code) as process, metering(process.pid) as meter:
        finish_work(process)
    cost = meter.cost
    assert cost.cpu is not None
    assert cost.machine_cpu is not None
    assert cost.cpu >= 0.25
    assert cost.machine_cpu >= cost.cpu - 0.1


def test_cpu_time_of_broker_is_measured_separately() -> None:
    burn = _BURN.format(seconds=0.3) + "print('done', flush=True); input()"
    idle = "print('done', flush=True); input()"
    with run_python(burn) as broker, run_python(idle) as peer, metering(peer.pid, (broker.pid,)) as meter:
        finish_work(broker)
        finish_work(peer)
    assert (meter.cost.beside_cpu or 0) >= 0.25
    assert meter.cost.cpu is not None
    assert meter.cost.cpu < 0.25


def test_cpu_time_is_measured_by_kind_of_process() -> None:
    burn = _BURN.format(seconds=0.3) + "print('ready', flush=True); input()"
    child = (
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {burn!r}], stdin=-1, stdout=-1)\n"
        "c.stdout.readline(); print('done', flush=True); input()"
    )
    with run_python(child) as process, metering(process.pid) as meter:
        finish_work(process)
    assert meter.cost.cpus is not None
    assert meter.cost.cpus["worker"] >= 0.25
    assert meter.cost.cpus["driver"] < 0.25


def test_peak_memory_is_measured_by_kind_of_process() -> None:
    hungry = "x = b'x' * 120_000_000; del x; print('ready', flush=True); input()"
    child = (
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {hungry!r}], stdin=-1, stdout=-1)\n"
        "c.stdout.readline(); print('done', flush=True); input()"
    )
    with run_python(child) as process:
        with metering(process.pid) as meter:
            finish_work(process)
        assert meter.cost.peaks["worker"] > 120_000_000
        assert meter.cost.peaks["driver"] < 100_000_000
