"""The engine on a real Spark: tasks land, die, hang and fail, and the driver gets an outcome for each offset range."""

from __future__ import annotations

import io
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from py4j.java_gateway import GatewayClient
from pyspark.sql.functions import lit

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.model.plans import to_json
from sluice.pipelines.model.receipts import BrokerTraffic, Latency, Outcome, RangeFailure, Receipt, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.pipelines.util import logs
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.spark import engine as spark
from sluice.resources.spark import executor, executors, job_thread
from sluice.resources.spark.engine import SparkEngine
from sluice.resources.spark.executors import is_local
from tests.resources.kafka.tools import wait_until
from tests.resources.log_wiring import LOG, LOGS, PLAN, RANGES, LogWiring

ROOT = Path(__file__).parents[3]
SECRET = "not-for-everybody"


@pytest.fixture(scope="module")
def settings() -> Iterator[SparkSettings]:
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the wiring by its module's name, as they do with modules of a project.
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield SparkSettings(master="local[2,3]", conf={"spark.hadoop.fs.s3a.secret.key": SECRET})


@pytest.fixture
def wiring(tmp_path: Path) -> LogWiring:
    (tmp_path / "notes").mkdir()
    return LogWiring(tmp_path / "lake", tmp_path / "notes", LOGS)


def run(settings: SparkSettings, wiring: LogWiring, attempt: str = "token") -> list[Outcome]:
    sent = SparkEngine(settings).run(Job(PLAN, 12, attempt, wiring), [0, 1])
    return [o for o in sent if not isinstance(o, TaskTraffic)]


@pytest.mark.spark
def test_tasks_land_and_return_receipts(settings: SparkSettings, wiring: LogWiring) -> None:
    lake = LocalLake(wiring.lake)
    receipts, failures = prove(PLAN, 12, run(settings, wiring), lake)
    assert failures == []
    assert [r.offset_range for r in receipts] == list(RANGES)
    files = [lake.locate(p.staged) for r in receipts for p in r.parts]
    query = 'select partition, count(*), min("offset"), max("offset") from read_parquet(?) group by 1 order by 1'
    assert duckdb.connect().execute(query, [files]).fetchall() == [(p, 2000, 0, 1999) for p in range(3)]
    _check_columns_in_spark(settings, files)
    assert [r.adopted for r in run(settings, wiring, "next") if isinstance(r, Receipt)] == [True] * 3


def _check_columns_in_spark(settings: SparkSettings, files: list[str]) -> None:
    frame = spark.session(settings).read.parquet(*files)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    columns = ("key", "value", "offset", "unix_millis(timestamp) as timestamp", "timestampType", "headers")
    rows = frame.where("partition = 1").orderBy("offset").selectExpr(*columns).collect()
    records = [r.asDict(recursive=True) for r in rows]
    assert [r | {"key": bytes(r["key"]), "value": bytes(r["value"])} for r in records] == LOG.visible(0, LOG.end)


@pytest.mark.spark
def test_task_is_retried_after_its_process_dies(settings: SparkSettings, wiring: LogWiring) -> None:
    dying = LogWiring(wiring.lake, wiring.notes, LOGS, dies=2)
    receipts, failures = prove(PLAN, 12, run(settings, dying), LocalLake(wiring.lake))
    assert failures == []
    assert len(list(wiring.notes.iterdir())) == 3, "two processes died, the third landed"
    assert len(receipts) == 3


@pytest.mark.spark
def test_results_of_other_tasks_survive_a_task_that_always_fails(settings: SparkSettings, wiring: LogWiring) -> None:
    dying = LogWiring(wiring.lake, wiring.notes, LOGS, dies=99)
    receipts, failures = prove(PLAN, 12, run(settings, dying), LocalLake(wiring.lake))
    assert [(f.offset_range, f.error, f.fatal) for f in failures] == [(RANGES[0], "Failed", True)]
    assert "worker exited" in failures[0].message
    assert "\n" not in failures[0].message
    assert {r.offset_range for r in receipts} <= set(RANGES[1:])


@pytest.mark.spark
def test_failed_job_reports_its_cause_in_one_line(settings: SparkSettings, wiring: LogWiring) -> None:
    with pytest.raises(Failed) as e:
        run(settings, LogWiring(wiring.lake, wiring.notes, LOGS, broken=True))
    assert e.value.message == "the Spark job failed: ModuleNotFoundError: No module named 'elsewhere'"


@pytest.mark.spark
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads command lines where Linux has them")
def test_secret_reaches_spark_but_no_command_line(settings: SparkSettings) -> None:
    assert spark.session(settings).conf.get("spark.hadoop.fs.s3a.secret.key") == SECRET
    lines = [_read_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(b"org.apache.spark.deploy.SparkSubmit" in line for line in lines)
    assert not any(SECRET.encode() in line for line in lines)


@pytest.mark.spark
def test_workers_use_the_measured_memory_allocator(settings: SparkSettings) -> None:
    ask = spark.context(settings).parallelize([0], 1).map(lambda _: pa.default_memory_pool().backend_name)
    assert ask.collect() == ["system"]


@pytest.mark.spark
def test_local_spark_is_inaccessible_to_other_users(settings: SparkSettings) -> None:
    conf = spark.session(settings).conf
    assert conf.get("spark.authenticate") == "true"
    assert conf.get("spark.driver.bindAddress") == conf.get("spark.driver.host") == "127.0.0.1"
    folder = Path(str(conf.get("spark.python.unix.domain.socket.dir")))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.glob(".*.sock")), "JVM and Python talk through files that nobody else may open"


_CONF = (
    "from sluice.pipelines.feed.sections import SparkSettings; from sluice.resources.spark import engine; "
    "conf = engine._conf(SparkSettings())"
)


def test_socket_folder_is_removed_with_the_process() -> None:
    ask = f"{_CONF}; print(conf['spark.python.unix.domain.socket.dir'])"
    process = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert not Path(process.stdout.strip()).exists()


def test_too_long_socket_path_falls_back_to_tcp(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    ask = f"{_CONF}; print(engine._sockets(conf['spark.local.dir']))"
    environment = os.environ | {"TMPDIR": str(deep)}
    process = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, env=environment)
    assert process.stdout == "{}\n"
    assert not list(deep.iterdir())


def _read_command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.spark
def test_engine_is_described_while_another_thread_starts_it(settings: SparkSettings) -> None:
    spark.end()
    starting = spark.in_thread(lambda: spark.context(settings))
    while not starting.done():
        use = SparkEngine(settings).describe()
    assert use.application in ("", starting.result().applicationId)
    assert SparkEngine(settings).describe().application == starting.result().applicationId


@pytest.mark.spark
def test_description_costs_few_calls_to_java(settings: SparkSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    spark.context(settings)
    commands = list[str]()
    send = GatewayClient.send_command

    def note_and_send(client: GatewayClient, command: str, *arguments: bool) -> object:
        commands.append(command)
        return send(client, command, *arguments)

    monkeypatch.setattr(GatewayClient, "send_command", note_and_send)
    assert SparkEngine(settings).describe().application
    assert len([c for c in commands if not c.startswith("m\n")]) < 20  # others free objects in Java


@pytest.mark.spark
def test_values_of_numpy_still_reach_java(settings: SparkSettings) -> None:
    spark.context(settings)
    frame = spark.session(settings).range(1).select(lit(np.int64(-3)), lit(np.array([1.5, 2.5])))
    assert [tuple(row) for row in frame.collect()] == [(-3, [1.5, 2.5])]


@pytest.mark.spark
def test_spark_starts_while_another_thread_imports_numpy(
    settings: SparkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.end()
    monkeypatch.setitem(sys.modules, "numpy", types.ModuleType("numpy"))  # as it is before its first import ends
    SparkEngine(settings).start()
    spark.end()


@pytest.mark.spark
def test_failed_start_in_the_background_is_logged(settings: SparkSettings, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise ZeroDivisionError("a mistake of ours")

    caplog.set_level(logging.DEBUG, logs.OURS)
    spark.begin(settings, fail)
    wait_until(lambda: "Spark did not start in the background" in caplog.text)
    assert "a mistake of ours" in caplog.text
    SparkEngine(settings).start()


@pytest.mark.spark
def test_task_of_a_stopped_worker_runs_again(
    settings: SparkSettings, wiring: LogWiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_thread, "_INTERRUPT_SECONDS", 0.05)
    stopping = LogWiring(wiring.lake, wiring.notes, LOGS, dies=1, by=signal.SIGSTOP)
    receipts, failures = prove(PLAN, 12, run(settings, stopping), LocalLake(wiring.lake))
    assert failures == []
    assert len(receipts) == 3


@pytest.mark.spark
def test_killed_jvm_fails_its_job_and_next_job_starts_a_new_jvm(settings: SparkSettings, wiring: LogWiring) -> None:
    hanging = Job(PLAN, 12, "token", LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True))

    def kill_once_begun() -> None:
        while not list(wiring.notes.iterdir()):
            time.sleep(0.01)
        spark._jvm_process().kill()

    killer = threading.Thread(target=kill_once_begun)
    killer.start()
    with pytest.raises(Failed) as e:
        SparkEngine(settings).run(hanging, [0, 1])
    killer.join()
    assert e.value.message == "Spark's JVM was killed by SIGKILL under the job"
    assert e.value.remedy.startswith("run again")
    assert len(prove(PLAN, 12, run(settings, wiring), LocalLake(wiring.lake))[0]) == 3


@pytest.mark.spark
def test_next_job_starts_a_new_context_after_the_master_ended_the_old(
    settings: SparkSettings, wiring: LogWiring
) -> None:
    spark.session(settings)
    before = spark._jvm_process()
    spark.context(settings)._jsc.sc().stop()
    assert len(prove(PLAN, 12, run(settings, wiring), LocalLake(wiring.lake))[0]) == 3
    assert before.poll() is not None, "and leaves no JVM behind"
    assert spark.session(settings).range(3).count() == 3


@pytest.mark.spark
def test_cancelling_ends_the_job(settings: SparkSettings, wiring: LogWiring) -> None:
    engine = SparkEngine(settings)
    job = Job(PLAN, 12, "token", LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True))

    def cancel_once_begun() -> None:
        while not list(wiring.notes.iterdir()):
            time.sleep(0.01)
        engine.cancel()

    canceller = threading.Thread(target=cancel_once_begun)
    canceller.start()
    with pytest.raises(Failed, match="cancelled"):
        engine.run(job, [0, 1])
    canceller.join()


@pytest.mark.spark
def test_interrupt_reaches_the_waiting_thread_and_ends_the_job(settings: SparkSettings, wiring: LogWiring) -> None:
    hanging = Job(PLAN, 12, "token", LogWiring(wiring.lake, wiring.notes, LOGS, hangs=True))

    def interrupt_once_begun() -> None:
        while not list(wiring.notes.iterdir()):
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # not the thread that waits

    interrupter = threading.Thread(target=interrupt_once_begun, daemon=True)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        SparkEngine(settings).run(hanging, [0, 1])
    interrupter.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "PySpark has one of its own"
    wait_until(lambda: not spark.session(settings).sparkContext.statusTracker().getActiveJobsIds())
    assert len(prove(PLAN, 12, run(settings, wiring), LocalLake(wiring.lake))[0]) == 3


def _run_code(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stderr


_START = (
    "from sluice.resources.local import java; from sluice.resources.spark import engine as spark\n"
    "from sluice.pipelines.feed.sections import SparkSettings\n"
)


@pytest.mark.spark
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads command lines where Linux has them")
def test_unknown_setting_reaches_spark_but_no_command_line() -> None:
    output = _run_code(
        _START
        + "import sys; key = 'spark.hadoop.fs.azure.account.key.a'\n"
        + "conf = {'spark.driver.memory': '701m', key: 'CANARY', 'spark.unknown': 'CANARY'}\n"
        + "session = spark.session(SparkSettings(master='local[1]', conf=conf))\n"
        + "line = open(f'/proc/{spark._jvm_process().pid}/cmdline').read()\n"
        + "print('memory', '701m' in line, 'command line', 'CANARY' in line, file=sys.stderr)\n"
        + "print('value', session.conf.get(key), session.conf.get('spark.redaction.regex'), file=sys.stderr)\n"
    )
    assert "memory True command line False" in output
    assert r"value CANARY (?i)secret|password|token|access[.]?key|spark\.hadoop\.fs\.azure\.account\.key\.a" in output


@pytest.mark.spark
def test_failed_spark_start_is_a_clear_error() -> None:
    errors = _run_code(_START + "spark.session(SparkSettings(conf={'spark.driver.memory': 'plenty'}))")
    assert "SetupError: Spark did not start on this machine" in errors
    assert "plenty" in errors, "the JVM's output is in the error"


@pytest.mark.parametrize(("full", "setting"), [(True, "SPARK_LOCAL_DIRS"), (False, "JAVA_HOME")])
def test_failed_start_remedy_depends_on_full_temporary_folder(full: bool, setting: str) -> None:
    output = f"java.nio.file.FileSystemException: /tmp/x: {'No space left on device' if full else 'File exists'}"
    error = spark._not_started(SparkSettings(), OSError("Connection refused"), io.BytesIO(output.encode()))
    assert output in error.message
    assert setting in error.remedy


def test_missing_java_is_a_clear_error() -> None:
    errors = _run_code(
        _START
        + "from sluice.pipelines.errors import SetupError\n"
        + "def home(): raise SetupError('no Java', remedy='install one')\n"
        + "java.java_home = home; spark.session(SparkSettings())"
    )
    assert errors.strip().endswith("SetupError: no Java\n  → install one")


def test_job_without_tasks_needs_no_spark(wiring: LogWiring) -> None:
    assert SparkEngine(SparkSettings(master="spark://nowhere:1")).run(Job(PLAN, 12, "token", wiring), []) == []


@pytest.mark.parametrize(
    ("master", "conf", "tries", "local"),
    [
        (None, {}, 3, True),
        ("local", {}, 1, True),
        ("local[4]", {}, 1, True),
        ("local[*, 5]", {}, 5, True),
        ("spark://host:7077", {}, 4, False),
        ("yarn", {"spark.task.maxFailures": "2"}, 2, False),
        ("sc://host:15002", {}, 4, False),
    ],
)
def test_task_attempts_and_locality_depend_on_the_master(
    master: str | None, conf: dict[str, str], tries: int, local: bool
) -> None:
    settings = SparkSettings(master=master, conf=conf)
    assert (executors.tries(settings), is_local(settings)) == (tries, local)


def test_outcomes_round_trip_as_rows() -> None:
    failure = RangeFailure(RANGES[0], "KafkaUnavailable", "no “leader”\n", "run again", fatal=True)
    assert executor.sent_in("RangeFailure", to_json(failure)) == failure
    traffic = TaskTraffic((BrokerTraffic(1, "b1:9092", 2, latency=Latency.of(5000)),), {"orders:0": 7})
    assert executor.sent_in("TaskTraffic", to_json(traffic)) == traffic
    with pytest.raises(ValueError, match="nothing that a task sends"):
        executor.sent_in("Guess", "{}")
