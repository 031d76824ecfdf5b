"""The engine without Spark, on real processes: tasks land, die, hang and fail; nothing outlives the driver."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from sluice.pipelines.errors import Failed, SetupError
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.plans import Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Outcome, Receipt, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.resources import local_engine
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.local_engine import LocalEngine
from sluice.resources.spark import executor, job_thread, worker_pool
from tests.resources.kafka.tools import wait_until
from tests.resources.log_wiring import LOGS, PLAN, RANGES, LogWiring

ROOT = Path(__file__).parents[2]
SECRET = "not-for-everybody"


@pytest.fixture(autouse=True, scope="module")
def own_pool() -> Iterator[None]:
    yield
    local_engine.end()
    assert list_processes() == []


@pytest.fixture
def wiring(tmp_path: Path) -> LogWiring:
    (tmp_path / "notes").mkdir()
    return LogWiring(tmp_path / "lake", tmp_path / "notes", LOGS)


def run(wiring: LogWiring, attempt: str = "token", *, fresh: bool = False) -> list[Outcome]:
    sent = LocalEngine().run(Job(PLAN, 12, attempt, wiring, fresh=fresh), [0, 1])
    return [o for o in sent if not isinstance(o, TaskTraffic)]


def list_processes(parent: int | None = None) -> list[int]:
    """Returns the pids of a process's pools and their workers, except for zombies. `parent`: the leader of a session;
    None: this process."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command, name = (folder / "cmdline").read_bytes(), (folder / "comm").read_bytes().strip()
        except OSError:
            continue
        is_of_session = name == worker_pool.NAME and int(session) == parent
        is_started = worker_pool.__name__.encode() in command and str(parent or os.getpid()).encode() in command
        if state != "Z" and (is_of_session or is_started):
            pids.append(int(folder.name))
    return sorted(pids)


def list_workers() -> list[int]:
    return [pid for pid in list_processes() if pid != worker_pool._pools[-1]._process.pid]


def start_thread(does: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=does, daemon=True)
    thread.start()
    return thread


def wait_for_begun(wiring: LogWiring, count: int = 1) -> list[int]:
    """Wait until this number of processes began partition 0; return their pids."""
    return wait_until(lambda: (p := [int(n.name) for n in wiring.notes.iterdir()]) and len(p) >= count and p)


def test_tasks_land_and_return_receipts(wiring: LogWiring) -> None:
    lake = LocalLake(wiring.lake)
    receipts, failures = prove(PLAN, 12, run(wiring), lake)
    assert failures == []
    assert [r.offset_range for r in receipts] == list(RANGES)
    files = [lake.locate(p.staged) for r in receipts for p in r.parts]
    query = 'select partition, count(*), min("offset"), max("offset") from read_parquet(?) group by 1 order by 1'
    assert duckdb.connect().execute(query, [files]).fetchall() == [(p, 2000, 0, 1999) for p in range(3)]
    workers = list_workers()
    assert len(workers) == len(PLAN.tasks)
    assert [r.adopted for r in run(wiring, "next") if isinstance(r, Receipt)] == [True] * 3
    assert list_workers() == workers, "workers serve the next job"


def test_task_of_a_stopped_worker_runs_again(wiring: LogWiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_thread, "_INTERRUPT_SECONDS", 0.05)
    stopping = LogWiring(wiring.lake, wiring.notes, LOGS, dies=1, by=signal.SIGSTOP)
    receipts, failures = prove(PLAN, 12, run(stopping), LocalLake(wiring.lake))
    assert failures == []
    assert [r.offset_range for r in receipts] == list(RANGES)
    assert len(list(wiring.notes.iterdir())) == 2


def test_idle_worker_that_ends_uses_up_no_attempt(wiring: LogWiring) -> None:
    run(wiring)
    for pid in list_workers():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(worker.is_idle for worker in local_engine._idle))  # the pool has reported their ends
    other = wiring.lake.with_name("other")
    dying = LogWiring(other, wiring.notes, LOGS, dies=len(list(wiring.notes.iterdir())) + 2)
    assert prove(PLAN, 12, run(dying), LocalLake(other))[1] == []


def test_pool_survives_two_end_events_of_one_worker_and_reports_the_next() -> None:
    """The process ends and the driver shuts its socket before the pool sees either."""
    pool, job = worker_pool.get_pool(), pickle.dumps(partial(executor.call, _name_process))
    first, second = local_engine._Worker(pool), local_engine._Worker(pool)
    first_pid, second_pid = (int(w.carry_out(job, 0, 0)[0][1].split()[0]) for w in (first, second))
    os.kill(pool._process.pid, signal.SIGSTOP)
    try:
        os.kill(first_pid, signal.SIGKILL)
        wait_until(lambda: first_pid not in list_processes())
        first.close()
    finally:
        os.kill(pool._process.pid, signal.SIGCONT)
    os.kill(second_pid, signal.SIGKILL)
    wait_until(lambda: not second.is_idle)
    second.close()


def test_idle_worker_adopts_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TEST_FIRST", "1")
    before = LocalEngine().map("sales", "test", _name_process, 1)
    monkeypatch.delenv("SLUICE_TEST_FIRST")
    monkeypatch.setenv("SLUICE_TEST_SECOND", "2")
    after = LocalEngine().map("sales", "test", _name_process, 1)
    assert before[0].split()[0] == after[0].split()[0], "the same worker"
    assert [row[0].split()[1:] for row in (before, after)] == [["SLUICE_TEST_FIRST"], ["SLUICE_TEST_SECOND"]]


def _name_process(_: int) -> str:
    return " ".join([str(os.getpid()), *(n for n in sorted(os.environ) if n.startswith("SLUICE_TEST_"))])


def test_idle_workers_end_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(worker_pool, "_IDLE_MS", 1)
    with ours, theirs:
        worker_pool._serve(theirs)


@pytest.mark.parametrize("fresh", [True, False])
def test_task_is_retried_after_its_process_dies(wiring: LogWiring, fresh: bool) -> None:
    dying = LogWiring(wiring.lake, wiring.notes, LOGS, dies=2)
    receipts, failures = prove(PLAN, 12, run(dying, fresh=fresh), LocalLake(wiring.lake))
    assert failures == []
    assert len(list(wiring.notes.iterdir())) == 3, "two processes died, the third landed"
    assert len(receipts) == 3


def test_retry_adopts_finished_work_of_the_previous_attempt(wiring: LogWiring) -> None:
    task = (Task(0, 1, (RANGES[1], RANGES[2], RANGES[0])),)
    plan = Plan("sales", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, task)
    dying = LogWiring(wiring.lake, wiring.notes, LOGS, dies=1)
    sent = LocalEngine().run(Job(plan, 12, "token", dying, fresh=True), [0])
    adopted = {r.offset_range.partition: r.adopted for r in sent if isinstance(r, Receipt)}
    assert adopted.keys() == {0, 1, 2}
    assert not adopted[0]
    assert prove(plan, 12, [s for s in sent if not isinstance(s, TaskTraffic)], LocalLake(wiring.lake))[1] == []


def test_task_that_dies_on_each_attempt_is_salvaged_and_other_tasks_land(wiring: LogWiring) -> None:
    dying = LogWiring(wiring.lake, wiring.notes, LOGS, dies=99)
    receipts, failures = prove(PLAN, 12, run(dying), LocalLake(wiring.lake))
    assert [(f.offset_range, f.error, f.fatal) for f in failures] == [(RANGES[0], "Failed", True)]
    assert failures[0].message == "not finished when its task failed: its worker was killed by SIGKILL"
    assert [r.offset_range for r in receipts] == list(RANGES[1:])
    assert len(list(wiring.notes.iterdir())) == 3


def test_failed_job_reports_its_cause_in_one_line(wiring: LogWiring) -> None:
    with pytest.raises(Failed) as e:
        run(LogWiring(wiring.lake, wiring.notes, LOGS, broken=True))
    assert e.value.message == "the tasks failed: ModuleNotFoundError: No module named 'elsewhere'"


def test_workers_use_the_measured_memory_allocator() -> None:
    assert LocalEngine().map("sales", "test", _name_allocator, 2) == ["system"] * 2


def _name_allocator(_: int) -> str:
    return str(pa.default_memory_pool().backend_name)


def test_secrets_reach_workers_only_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_pool.get_pool()
    monkeypatch.setenv("SLUICE_TEST_SECRET", SECRET)
    (answer,) = LocalEngine().map("sales", "test", _show_process, 1)
    assert answer == f"{SECRET}, texts to all: False"


def _show_process(_: int) -> str:
    texts = [Path("/proc/self", name).read_bytes() for name in ("cmdline", "environ")]
    open_to_all = any(SECRET.encode() in text for text in texts)
    return f"{os.environ['SLUICE_TEST_SECRET']}, texts to all: {open_to_all}"


def test_long_messages_arrive_complete() -> None:
    sizes = (0, 1, worker_pool.PIECE - 1, worker_pool.PIECE, worker_pool.PIECE + 1, 5 * worker_pool.PIECE)
    answers = LocalEngine().map("sales", "test", _Long(sizes), len(sizes))
    assert Counter(map(len, answers)) == Counter(sizes)


class _Long:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.ballast = sizes, bytes(300_000)

    def __call__(self, number: int) -> str:
        return "x" * self.sizes[number]


def test_cancelling_kills_the_workers(wiring: LogWiring) -> None:
    hanging = LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True)
    engine = LocalEngine()
    canceller = start_thread(lambda: (wait_for_begun(hanging), engine.cancel()))
    with pytest.raises(Failed, match="the tasks were cancelled"):
        engine.run(Job(PLAN, 12, "token", hanging), [0, 1])
    canceller.join()
    wait_until(lambda: not set(list_workers()) & set(wait_for_begun(hanging)))
    with pytest.raises(Failed, match="the tasks were cancelled"):
        engine.run(Job(PLAN, 12, "token", wiring), [0, 1])
    assert len(prove(PLAN, 12, run(wiring), LocalLake(wiring.lake))[0]) == 3


@pytest.mark.parametrize("receiver", ["the waiting thread", "another thread"])
def test_interrupt_reaches_the_waiting_thread_and_kills_the_workers(wiring: LogWiring, receiver: str) -> None:
    hanging = LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True)
    find = threading.get_ident if receiver == "another thread" else lambda: threading.main_thread().ident or 0
    interrupter = start_thread(lambda: (wait_for_begun(hanging), signal.pthread_kill(find(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        run(hanging)
    interrupter.join()
    wait_until(lambda: not set(list_workers()) & set(wait_for_begun(hanging)))
    assert len(prove(PLAN, 12, run(wiring), LocalLake(wiring.lake))[0]) == 3


def test_killed_pool_fails_its_job_and_next_job_starts_a_new_pool(wiring: LogWiring) -> None:
    hanging = LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True)
    killer = start_thread(lambda: (wait_for_begun(hanging), worker_pool._pools[-1]._process.kill()))
    with pytest.raises(Failed) as e:
        run(hanging)
    killer.join()
    assert e.value.message == "the process that forks workers was killed by SIGKILL"
    wait_until(lambda: not list_processes())
    assert len(prove(PLAN, 12, run(wiring), LocalLake(wiring.lake))[0]) == 3


def test_failed_pool_start_is_a_clear_error(wiring: LogWiring, monkeypatch: pytest.MonkeyPatch) -> None:
    local_engine.end()
    monkeypatch.setattr(worker_pool, "MODULE", "sluice.resources.elsewhere")
    with pytest.raises(SetupError, match=r"did not start: .*No module named sluice.resources.elsewhere"):
        run(wiring)


def test_pool_ended_by_another_thread_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MODULE", "sluice.resources.elsewhere")
    pool = worker_pool.PoolProcess()
    pool._process.wait()
    pool.end()
    with pytest.raises(SetupError, match="did not start: it ended with 1"):
        pool.check()


_DRIVER = """
import sys
from pathlib import Path
if sys.argv[3:] == ["pool"]:
    from sluice.resources.spark import worker_pool
    worker_pool.fork_pool()  # before imports that start threads
    assert isinstance(worker_pool._pools[0]._process, worker_pool._Forked)
from tests.resources.test_local_engine import *
hanging = LogWiring(Path(sys.argv[1]), Path(sys.argv[2]), LOGS, hangs=True)
if sys.argv[3:] == ["process"]:
    import multiprocessing
    worker_pool.get_pool()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
run(hanging)
"""


@pytest.mark.parametrize("forks", [(), ("process",), ("pool",)], ids=["alone", "with a forked process", "forked pool"])
def test_workers_end_with_a_killed_driver(wiring: LogWiring, forks: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-c", _DRIVER, str(wiring.lake), str(wiring.notes), *forks]
    with subprocess.Popen(arguments, cwd=ROOT, start_new_session=True) as driver:
        wait_for_begun(wiring)
        assert len(list_processes(driver.pid)) >= 2
        driver.kill()
        driver.wait()
        wait_until(lambda: not list_processes(driver.pid))
        try:
            os.killpg(driver.pid, signal.SIGKILL)
        except ProcessLookupError:
            assert forks != ("process",)


@pytest.mark.parametrize("forks", [(), ("pool",)], ids=["started", "forked"])
def test_terminal_interrupt_is_handled_by_the_driver(wiring: LogWiring, forks: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-c", _DRIVER, str(wiring.lake), str(wiring.notes), *forks]
    with subprocess.Popen(arguments, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True) as driver:
        wait_for_begun(wiring)
        os.killpg(driver.pid, signal.SIGINT)
        errors = driver.communicate()[1]
    assert errors.strip().endswith("KeyboardInterrupt")
    assert list_processes(driver.pid) == []


def test_jobs_of_several_feeds_alternate(wiring: LogWiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "_turns", local_engine._Turns(1))
    order: list[str] = []

    def land(feed: str, calls: int) -> None:
        order.extend(LocalEngine().map(feed, "ask", _Slow(feed, wiring.notes), calls))

    many = start_thread(lambda: land("many", 8))
    wait_until(lambda: list(wiring.notes.iterdir()))
    land("few", 1)
    done = [n.name.partition("-")[2] for n in sorted(wiring.notes.iterdir(), key=lambda n: n.stat().st_mtime_ns)]
    many.join()
    assert "few" in done[:4], "the second feed does not wait for all tasks of the first"


class _Slow:
    def __init__(self, feed: str, notes: Path) -> None:
        self.feed, self.notes = feed, notes

    def __call__(self, number: int) -> str:
        (self.notes / f"{number}-{self.feed}").touch()
        time.sleep(0.05)
        return self.feed


def test_job_without_tasks_needs_no_pool(wiring: LogWiring) -> None:
    assert LocalEngine().run(Job(PLAN, 12, "token", wiring), []) == []
    assert LocalEngine().map("sales", "test", _name_allocator, 0) == []


_FORKED = """
import json
from sluice.resources.spark import worker_pool
worker_pool.fork_pool()
from sluice.resources.local_engine import LocalEngine
from tests.resources import test_local_engine as tests
answers = [LocalEngine().map("sales", "test", call, 1)[0] for call in (tests._name_allocator, tests._list_files)]
worker_pool._pools[0]._process.kill()
worker_pool._pools[0]._process.wait()
try:
    worker_pool._pools[0].check()
except Exception as error:
    answers.append(str(error).splitlines()[0])
print(json.dumps(answers))
"""


def _list_files(_: int) -> str:
    files = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the folder itself
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return json.dumps(files)


def test_forked_pool_is_like_a_started_one(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors, (tmp_path / "inherited").open("w") as inherited:
        done = subprocess.run(
            [sys.executable, "-c", _FORKED],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[inherited.fileno()],
        )
    allocator, files, error = json.loads(done.stdout)
    assert allocator == "system"
    assert json.loads(files)[:2] == ["/dev/null", "/dev/null"]
    assert str(tmp_path) not in files
    assert error == "the process that forks workers was killed by SIGKILL"
