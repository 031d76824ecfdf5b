"""DAGs of `sluice.airflow` in real Airflow environments, headless, on a real Kafka: `make airflow`.

Each environment has its own Python (`SLUICE_AIRFLOW`: their folders, separated by colons). Each test has a
project, a topic and a lake; `sluice audit --rescan` compares the lake with Kafka at its end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.pipelines.util.units import DAY, HOUR, show_window
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import CommandResult, Sluice
from tests.cli.conftest import project as project
from tests.cli.conftest import sluice as sluice
from tests.integration.support import consume_topic
from tests.resources.kafka.tools import free_port

pytestmark = [pytest.mark.airflow, pytest.mark.usefixtures("default_engine")]
ENVIRONMENTS = [Path(p).resolve() for p in os.environ.get("SLUICE_AIRFLOW", "").split(":") if p]
RECORDS = 6000
SECONDS = 500
ROOT = Path(__file__).parents[2]
OTHER = """
import sys
from unittest.mock import patch
from tests.faults import points
from sluice.cli.main import main

def wait(trap, when, effect):
    if (when, effect) == ("before", "publish"):
        print("waiting", flush=True)
        sys.stdin.readline()

with patch.object(points._Trap, "trigger", wait), points.interrupt_at("before publish"):
    sys.exit(main(sys.argv[1:]))
"""

DAGS = """
import datetime, os, signal, sys

if os.environ.get("KILL"):
    sys.path.append(os.environ["TESTS"])
    from tests.faults.points import interrupt_at

    sys.trap = interrupt_at(os.environ["KILL"], signal.Signals(int(os.environ["SIGNAL"])))  # no context ends it
    sys.trap.__enter__()
from sluice.airflow import CommitOperator, LandWindowOperator, WindowCompleteSensor, make_dags, make_asset

try:
    from airflow.sdk import DAG
except ImportError:
    from airflow.models.dag import DAG

HOURS = os.environ["HOURS"].split()
FIRST = datetime.datetime.fromisoformat(HOURS[0] + ":00+00:00")
globals().update(
    make_dags(
        os.environ["SLUICE_PROJECT"],
        default_args={"retries": 0},
        start_date=FIRST,
        catchup=True,
        is_paused_upon_creation=False,
    )
)
START = {"schedule": None, "start_date": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)}
with DAG("two_steps", **START):
    land = LandWindowOperator(task_id="land", feed="orders", window=HOURS[0], commit=False)
    land >> CommitOperator(task_id="commit", feed="orders")
with DAG("waiting", **START):
    WindowCompleteSensor(task_id="wait", feed="orders", window=HOURS[0], poke_interval=1)
with DAG("mapped", **START):
    LandWindowOperator.partial(task_id="land", feed="orders", skip_when_complete=True).expand(window=HOURS)
with DAG("replaced", **START):
    LandWindowOperator(task_id="land", feed="orders", window=HOURS[0], replace=True)
with DAG("wrong_window", **START):
    LandWindowOperator(task_id="land", feed="orders", window="yesterday")
with DAG("wrong_connection", **START):
    LandWindowOperator(task_id="land", feed="orders", window=HOURS[0], sluice_conn_id="elsewhere")
with DAG("feed_gone", **START):
    LandWindowOperator(task_id="land", feed="clicks", window=HOURS[0])
with DAG("daily", **START | {"schedule": "@daily", "catchup": False}):
    LandWindowOperator(task_id="land", feed="orders")
with DAG("day", **START):
    LandWindowOperator(task_id="land", feed="orders", window="{{ ds }}")
"""

WINDOWS = """
import datetime, json
from types import SimpleNamespace

try:
    from airflow.sdk import DAG, CronDataIntervalTimetable, CronTriggerTimetable
    from airflow.serialization.encoders import coerce_to_core_timetable as to_core
except ImportError:
    from airflow.models.dag import DAG
    from airflow.timetables.interval import CronDataIntervalTimetable
    from airflow.timetables.trigger import CronTriggerTimetable
    to_core = lambda timetable: timetable
try:
    from airflow.sdk import CronPartitionTimetable
except ImportError:
    CronPartitionTimetable = None
import pendulum
from airflow.timetables.base import DataInterval, TimeRestriction
from sluice.airflow.dags import make_timetable
from sluice.airflow.hooks import build_request
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.sections import WindowSettings
from sluice.running import list_requested

def describe(length, context, window=None):
    feed = SimpleNamespace(window=WindowSettings.model_validate(length))
    try:
        request = build_request(feed, window, context)
    except UsageError as error:
        return error.message
    windows = list_requested(feed, request)
    return [feed.window.name(windows[0]), feed.window.name(feed.window.end_of(windows[-1])), len(windows)]

def make_context(timetable, after):
    dag = DAG("x", schedule=timetable, start_date=datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc))
    core = to_core(timetable)
    limits = TimeRestriction(earliest=pendulum.parse(after), latest=None, catchup=True)
    if hasattr(core, "next_dagrun_info_v2"):
        info = core.next_dagrun_info_v2(last_dagrun_info=None, restriction=limits)
    else:
        info = core.next_dagrun_info(last_automated_data_interval=None, restriction=limits)
    interval = info.data_interval
    names = ("partition_key", "partition_date", "run_after")
    run = SimpleNamespace(**{name: getattr(info, name, None) for name in names})
    context = {"dag": dag, "dag_run": run}
    if interval:
        context |= {"data_interval_start": interval.start, "data_interval_end": interval.end}
    return context

out = {}
for zone in ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"):
    for day in ("03-07", "03-08", "03-28", "03-29", "10-24", "10-25", "10-31", "11-01"):
        day = f"2026-{day}"
        after = f"{day}T12:00:00"
        for kind in (CronDataIntervalTimetable, CronTriggerTimetable, CronPartitionTimetable):
            if kind is not None:
                extra = {"key_format": "%Y-%m-%d"} if kind is CronPartitionTimetable else {}
                context = make_context(kind("0 0 * * *", timezone=zone, **extra), after)
                out[f"{kind.__name__} {zone} {day}"] = describe("1h", context)
                for feed_zone in ("Europe/Berlin", "Asia/Kolkata"):
                    days = describe({"length": "1d", "timezone": feed_zone}, context)
                    out[f"days {feed_zone} {kind.__name__} {zone} {day}"] = days
                if zone == "Europe/Berlin" and day == "2026-10-24":
                    made = make_context(make_timetable({("0 0 * * *", zone)}), after)
                    out["made"] = describe({"length": "1d", "timezone": zone}, made)
hourly = make_context(CronTriggerTimetable("0 * * * *", timezone="UTC"), "2026-11-20T14:00:00")
out["hourly"], out["hourly, days"] = describe("1h", hourly), describe("1d", hourly)
out["date"] = describe("1h", hourly, "2026-11-20")
out["every 15 minutes"] = describe("15m", hourly)
unscheduled = DAG("y", schedule=None)
by_hand = SimpleNamespace(run_after=pendulum.parse("2026-11-20T14:05:00"))
out["no schedule"] = describe("1h", {"dag": unscheduled, "dag_run": by_hand})
keyed = SimpleNamespace(partition_key="2026-11-20T14:00")
out["key alone"] = describe("1h", {"dag": unscheduled, "dag_run": keyed})
print("WINDOWS", json.dumps(out))
"""


@dataclass
class Airflow:
    """An Airflow environment with its own home."""

    bin: Path
    home: Path
    project: Path
    hours: list[str]

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",  # an executor of 2.10 calls `airflow`
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.home / "dags"),
            "SLUICE_PROJECT": str(self.project),
            "HOURS": " ".join(self.hours),
            "AIRFLOW_CONN_ELSEWHERE": '{"conn_type": "sluice", "extra": {"project": "/nowhere"}}',
        }

    def begin(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.bin / "airflow", *words],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def begin_test(self, dag: str, hour: int = 0, **environ: str) -> subprocess.Popen[str]:
        """Start a headless run of the DAG, due at the begin of this hour."""
        return self.begin("dags", "test", dag, f"{self.hours[hour]}:00+00:00", **environ)

    def call(self, *words: str) -> str:
        """Return the output of a command, which must end in time."""
        return end(self.begin(*words))

    def test(self, dag: str, hour: int = 0) -> str:
        """Return the log of a headless run of the DAG, due at the begin of this hour."""
        return end(self.begin_test(dag, hour))

    @contextmanager
    def run_services(self) -> Iterator[None]:
        """Run the scheduler, the triggerer, and the other processes of Airflow 3, on loopback."""
        port, secret = free_port(), secrets.token_hex(32)
        url = f"http://127.0.0.1:{port}"
        environ = self.environ | {
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__SECRET_KEY": secret,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secret,
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__CORE__PARALLELISM": "2",
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "120",
        }
        services = [["scheduler", "--skip-serve-logs"], ["triggerer", "--skip-serve-logs"]]
        if not self.is_old:
            # Tasks fail while no API server listens.
            services = [["api-server", "--host", "127.0.0.1", "--port", str(port)], ["dag-processor"], *services]
        with ExitStack() as running:
            for words in services:
                log = running.enter_context((self.home / f"{words[0]}.log").open("w"))
                command = [self.bin / "airflow", *words]
                process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
                running.callback(_end_session, process)
                if words[0] == "api-server":
                    _wait_for(lambda: _is_listening(port))
            yield

    def count_runs(self, dag: str = "land_orders") -> Mapping[str, int]:
        """Return the runs of the DAG by state."""
        with closing(sqlite3.connect(self.home / "airflow.db", timeout=60)) as database:
            query = "select state, count(*) from dag_run where dag_id = ? group by 1"
            return dict(database.execute(query, [dag]))

    @property
    def is_old(self) -> bool:
        """True for Airflow 2."""
        return not [*self.bin.parent.glob("lib/python*/site-packages/airflow/sdk")]

    def kill_next_run(self, sign: signal.Signals, before: set[Path]) -> set[Path]:
        """Kill the process of the next run when it has a plan. Returns the heartbeats there are."""
        owners = ".sluice/lake/_sluice/orders/owners/*.json"
        _wait_for(lambda: {*self.project.glob(owners)} - before, every=0.02)
        beats = {*self.project.glob(owners)}
        for path in beats - before:
            os.kill(json.loads(path.read_text())["pid"], sign)
        return beats


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def _end_session(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end(process: subprocess.Popen[str]) -> str:
    """Return the output of a process, which must end in time."""
    try:
        return process.communicate(timeout=SECONDS)[0]
    finally:
        _kill_session(process)


def _kill_session(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(params=ENVIRONMENTS, ids=lambda p: p.name)
def airflow(
    request: pytest.FixtureRequest, tmp_path: Path, project: Path, kafka: LocalKafka, sluice: Sluice
) -> Airflow:
    """Airflow with a project whose topic has records of some hours, all closed but the last."""
    topic = f"orders-{secrets.token_hex(4)}"
    (project / "feeds" / "orders.yaml").write_text(
        f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\ngroup: g-{topic}\n"
        "window: {length: 1h, grace: 1s}\n"
    )
    there = ("--bootstrap", kafka.bootstrap, "--create", "--partitions", "3", "--seed", "7", "--spread", "5h")
    assert sluice("produce", "orders", "-n", str(RECORDS), *there).code == 0
    (tmp_path / "home" / "dags").mkdir(parents=True)
    (tmp_path / "home" / "dags" / "feeds.py").write_text(DAGS)
    last = now() // HOUR * HOUR
    environment = Airflow(
        request.param / "bin", tmp_path / "home", project, [show_window(last - n * HOUR) for n in (4, 3, 2)]
    )
    environment.call("db", "migrate")
    return environment


def audit(sluice: Sluice) -> CommandResult:
    """The audit of the lake against Kafka, which must agree."""
    result = sluice("audit", "orders", "--rescan", "--json")
    assert result.code == 0, result.out
    assert result.document["reconciled"]
    return result


def count_compared(sluice: Sluice) -> int:
    """The rows that the audit compared with Kafka's records: those that no earlier audit compared."""
    return int(audit(sluice).document["compared"])


def test_complete_hour_is_not_landed_again(airflow: Airflow, sluice: Sluice) -> None:
    log = airflow.test("land_orders", hour=1)
    assert "state=success" in log, log
    assert count_compared(sluice) > 0
    before = sluice("status", "orders", "--json").document["feeds"][0]["last_batch"]
    log = airflow.test("land_orders", hour=1)
    assert "was complete before" in log, log
    assert "state=success" in log
    status = sluice("status", "orders", "--json").document["feeds"][0]
    assert status["last_batch"]["owner"]["run"].startswith("airflow:land_orders.land:manual__")
    assert (status["last_batch"], status["uncommitted"]) == (before, 0)


def test_hours_are_mapped_and_replaced_on_request(airflow: Airflow, sluice: Sluice) -> None:
    log = airflow.test("two_steps")
    assert "state=success" in log, log
    assert count_compared(sluice) > 0
    log = airflow.test("mapped")
    assert "state=success" in log, log
    assert "was complete before" in log, "that of `two_steps`"
    assert count_compared(sluice) > 0
    log = airflow.test("replaced")
    assert "state=success" in log, log
    audit(sluice)


def test_windows_of_runs_are_those_of_their_timetable(airflow: Airflow) -> None:
    """Check days of 23, 24 and 25 hours, intervals without length, and zones of half hours."""
    command = [airflow.bin / "python", "-c", WINDOWS]
    done = subprocess.run(command, env=airflow.environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("WINDOWS ")), None)
    assert line, (done.stdout, done.stderr)
    windows = json.loads(line.removeprefix("WINDOWS "))
    for kind, shift in (("CronDataIntervalTimetable", 1), ("CronTriggerTimetable", 0), ("CronPartitionTimetable", 1)):
        for name, landed in windows.items():
            label, _, rest = name.partition(" ")
            if label != kind:
                continue
            zone, day = rest.split(" ")
            midnight = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone))
            begin, end = midnight + timedelta(days=shift), midnight + timedelta(days=shift + 1)
            expected = [at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M") for at in (begin, end)]
            hours = (end.timestamp() - begin.timestamp()) / 3600
            if zone != "Asia/Kolkata":
                assert landed == [*expected, hours], name
            elif kind == "CronPartitionTimetable":
                assert "where no windows of 1h begin and end" in landed, name
            else:
                assert landed[2] == 24, name
            for feed_zone in ("Europe/Berlin", "Asia/Kolkata"):
                days = windows[f"days {feed_zone} {name}"]
                if zone == feed_zone:
                    assert days == [f"{begin:%Y-%m-%d}", f"{end:%Y-%m-%d}", 1], name
                elif kind == "CronPartitionTimetable":
                    assert f"where no windows of 1d in {feed_zone} begin and end" in days, name
                else:
                    assert days[2] == 1, name
    assert windows["made"] in (["2026-10-24", "2026-10-25", 1], ["2026-10-25", "2026-10-26", 1])
    assert windows["hourly"] == ["2026-11-20T13:00", "2026-11-20T14:00", 1]
    assert windows["hourly, days"] == ["2026-11-19T00:00", "2026-11-20T00:00", 1]
    assert windows["date"] == ["2026-11-20T00:00", "2026-11-21T00:00", 24]
    assert windows["every 15 minutes"] == ["2026-11-20T13:00", "2026-11-20T14:00", 4]
    assert windows["no schedule"] == ["2026-11-20T13:00", "2026-11-20T14:00", 1]
    assert windows["key alone"] == ["2026-11-20T14:00", "2026-11-20T15:00", 1]


@pytest.mark.parametrize("dag", ["daily", "day"])
def test_daily_run_lands_all_hours_of_its_day(dag: str, airflow: Airflow, sluice: Sluice) -> None:
    topic = f"days-{secrets.token_hex(4)}"
    path = airflow.project / "feeds" / "orders.yaml"
    path.write_text(
        re.sub(r"topics: .*", f"topics: {topic}", re.sub(r"group: .*", f"group: g-{topic}", path.read_text()))
    )
    bootstrap = path.read_text().split("'")[1]
    there = ("--bootstrap", bootstrap, "--create", "--partitions", "1", "--seed", "7", "--spread", "60h")
    assert sluice("produce", "orders", "-n", str(RECORDS), *there).code == 0
    today = now() // DAY * DAY
    log = end(airflow.begin("dags", "test", dag, f"{show_window(today - (DAY if dag == 'day' else 0))}:00+00:00"))
    assert "state=success" in log, log
    yesterday = show_window(today - DAY)[:10]
    assert len(sluice("files", "orders", "--window", yesterday).out.split()) == 24
    assert sluice("wait", "orders", "--window", yesterday).code == 0


@pytest.mark.parametrize(
    ("dag", "message"),
    [
        ("wrong_window", "'yesterday' is not a window: write its start in UTC, such as 2026-11-20T14"),
        ("wrong_connection", "no folder `feeds/` in /nowhere or above it → run sluice in your project's folder"),
        ("feed_gone", "no feed 'clicks' in"),
    ],
)
def test_misconfigured_task_fails_and_reports_reason(dag: str, message: str, airflow: Airflow, sluice: Sluice) -> None:
    log = airflow.test(dag)
    assert message in log, log
    assert "state=failed" in log
    assert sluice("status", "orders", "--json").document["feeds"][0]["last_batch"] is None


@pytest.mark.parametrize(
    ("point", "sign"),
    [("before publish", signal.SIGTERM), ("after show", signal.SIGKILL), ("after publish", signal.SIGKILL)],
)
def test_next_run_completes_hour_of_killed_run(
    point: str, sign: signal.Signals, airflow: Airflow, sluice: Sluice
) -> None:
    killed = airflow.begin_test("land_orders", hour=1, KILL=point, SIGNAL=str(int(sign)), TESTS=str(ROOT))
    log = end(killed)
    assert killed.returncode == -sign or "KeyboardInterrupt" in log, log  # Airflow may handle SIGTERM
    assert "state=success" not in log
    log = airflow.test("land_orders", hour=1)
    assert "state=success" in log, log
    if point == "before publish":
        (documented,) = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/airflow.md").read_text(), re.M | re.S)
        lines = [re.sub("[0-9]+", "[0-9]+", re.escape(line)).replace("…", "[^\n]*") for line in documented.splitlines()]
        assert re.search("[^\n]*\n.*".join(lines), log, re.S), log
    assert count_compared(sluice) > 0


def test_concurrent_runs_of_an_hour_land_it_once(airflow: Airflow, sluice: Sluice) -> None:
    """Each has its own database: Airflow's has a race at a DAG's first run."""
    other = replace(airflow, home=airflow.home.with_name("other"))
    shutil.copytree(airflow.home, other.home, ignore=shutil.ignore_patterns("airflow.cfg"))
    both = [airflow.begin_test("land_orders", hour=1), other.begin_test("two_steps")]
    logs = [end(process) for process in both]
    assert any("state=success" in log for log in logs), logs
    for log in logs:
        assert "state=success" in log or "PlanBusy: batch " in log, log
    assert count_compared(sluice) > 0


def test_sensor_waits_for_window_landed_by_other_scheduler(airflow: Airflow, sluice: Sluice) -> None:
    waiting = airflow.begin_test("waiting")
    lines = list[str]()
    assert waiting.stdout
    for line in waiting.stdout:
        lines.append(line)
        if f"waiting for {airflow.hours[0]} of orders" in line:
            break
    else:
        raise AssertionError(lines)
    assert sluice("run", "orders", "--window", airflow.hours[0], "--no-dagster").code == 0
    log = end(waiting)
    assert "state=success" in log, (lines, log)


def test_blocked_run_names_other_scheduler(airflow: Airflow, sluice: Sluice) -> None:
    """A run without Airflow waits before it publishes the hour."""
    command = [sys.executable, "-c", OTHER, "run", "orders", "--window", airflow.hours[0], "--no-dagster"]
    other = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert other.stdout
        assert other.stdout.readline() == "waiting\n"
        log = airflow.test("land_orders", hour=1)
        assert "PlanBusy: batch " in log, log
        assert "without a scheduler" in log
        assert f"(pid {other.pid} on " in log
        other.communicate("\n", timeout=SECONDS)
        assert other.returncode == 0
    finally:
        _kill_session(other)
    assert count_compared(sluice) > 0


def test_scheduler_lands_hours_and_completes_cleared_tasks(airflow: Airflow, sluice: Sluice) -> None:
    """The tasks of two of the hours are killed."""
    with airflow.run_services():
        beats = airflow.kill_next_run(signal.SIGKILL, set())
        airflow.kill_next_run(signal.SIGTERM, beats)
        _wait_for(lambda: airflow.count_runs().get("success", 0) >= 2)
        assert airflow.count_runs()["failed"] == 2
        airflow.call("tasks", "clear", "--yes", "--task-regex", "land", "--only-failed", "land_orders")
        _wait_for(lambda: [*airflow.count_runs()] == ["success"])
        assert count_compared(sluice) > 0


def _wait_for(condition: Callable[[], object], every: float = 0.5) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(every)


def test_documented_maintenance_merges_and_expires(airflow: Airflow, sluice: Sluice) -> None:
    page = (ROOT / "docs" / "airflow.md").read_text()
    (code,) = re.findall(r"```python\n(from datetime[^`]*BashOperator.*?)```", page, re.DOTALL)
    if airflow.is_old:
        code = code.replace("airflow.providers.standard.operators.bash import", "airflow.operators.bash import")
        code = code.replace("airflow.sdk import", "airflow.models.dag import")
    (airflow.home / "dags" / "maintenance.py").write_text(code.replace("/srv/sluice", str(airflow.project)))
    with (airflow.project / "feeds" / "orders.yaml").open("a") as feed:
        feed.write("retention: 3h\n")
    assert sluice("run", "orders", "--no-dagster").code == 0

    def count_files() -> int:
        listed = sluice("files", "orders", "--window", airflow.hours[1], "--json").document["files"]
        return len({f["address"] for f in listed})

    assert count_files() == 3
    log = airflow.test("maintain_feeds")
    assert "state=success" in log, log
    assert count_files() == 1
    windows = sluice("status", "orders", "--json").document["feeds"][0]["windows"]
    states = {w["window"]: w["state"] for w in windows}
    assert [states[hour] for hour in airflow.hours] == ["retired", "landed", "landed"]
    audit(sluice)


REPORT = """
import json, os
from pathlib import Path

import duckdb

try:
    from airflow.sdk import DAG, task
except ImportError:
    from airflow.decorators import task
    from airflow.models import DAG

with DAG("hourly_report", schedule=None):

    @task
    def write(dag_run=None):
        hour, files = dag_run.conf["hour"], os.environ["SLUICE_PROJECT"] + "/.sluice/lake/data/orders/**/*.parquet"
        query = '''select partition, "offset" from read_parquet(?) where strftime(timestamp, '%Y-%m-%dT%H:00') = ?
            order by all'''
        report = Path(os.environ["AIRFLOW_HOME"]) / "report.json"
        written = report.with_suffix(".new")
        written.write_text(json.dumps([hour, duckdb.execute(query, [files, hour]).fetchall()]))
        written.rename(report)

    write()
"""
"""A report by record time, of the rows in the lake."""


def test_documented_correction_adds_late_rows_to_the_report(
    airflow: Airflow, kafka: LocalKafka, sluice: Sluice
) -> None:
    """Compare the report of an hour with the records that a plain consumer reads, before and after a late record."""
    page = (ROOT / "docs" / "reading.md").read_text()
    (code,) = re.findall(r"```py\n(from datetime[^`]*correct_reports.*?)```", page, re.DOTALL)
    if airflow.is_old:
        code = code.replace("airflow.providers.standard.operators.trigger_dagrun", "airflow.operators.trigger_dagrun")
        old = "from airflow.decorators import task\nfrom airflow.models import DAG, Variable"
        code = code.replace("from airflow.sdk import DAG, Variable, task", old)
    for name, text in (("correct", code), ("report", REPORT)):
        (airflow.home / "dags" / f"{name}.py").write_text(text)
    (airflow.home / "dags" / "feeds.py").unlink()
    topic, first = f"late-{secrets.token_hex(4)}", now() // HOUR * HOUR - 4 * HOUR
    path = airflow.project / "feeds" / "orders.yaml"
    text = re.sub(r"topics: .*", f"topics: {topic}", path.read_text())
    path.write_text(re.sub(r"group: .*", f"group: g-{topic}", text))
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.create_topics({topic: {"num_partitions": 1}}, wait_for_metadata=True)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)

    def send(*minutes: int) -> None:
        for minute in minutes:
            producer.send(topic, b"%d" % minute, timestamp_ms=first + minute * 60_000).get(30)

    def expect_report() -> list[object]:
        records = [r for r in consume_topic(kafka, topic) if r["timestamp"] // HOUR == first // HOUR]
        return [show_window(first), [[r["partition"], r["offset"]] for r in records]]

    def read_report() -> object:
        report = airflow.home / "report.json"
        return json.loads(report.read_text()) if report.exists() else None

    def correct(times: int) -> None:
        airflow.call("dags", "trigger", "correct_reports")
        _wait_for(lambda: airflow.count_runs("correct_reports").get("success", 0) >= times)

    send(1, 30, 59, 61)
    assert sluice("run", "orders", "--window", show_window(first), "--no-dagster").code == 0
    with airflow.run_services():
        for dag in ("hourly_report", "correct_reports"):
            _wait_for(lambda dag=dag: "is_paused" in airflow.call("dags", "unpause", dag, "--yes"), every=2)
        conf = json.dumps({"hour": show_window(first)})
        airflow.call("dags", "trigger", "hourly_report", "--conf", conf)
        correct(1)
        _wait_for(lambda: read_report() == expect_report())
        assert len(expect_report()[1]) == 3
        send(45)
        assert sluice("run", "orders", "--no-dagster").code == 0
        assert read_report() != expect_report()
        correct(airflow.count_runs("correct_reports")["success"] + 1)
        _wait_for(lambda: read_report() == expect_report())
        assert len(expect_report()[1]) == 4
        correct(airflow.count_runs("correct_reports")["success"] + 1)
        _wait_for(lambda: [*airflow.count_runs("hourly_report")] == ["success"])
        assert airflow.count_runs("hourly_report") == {"success": 2}, "the noted number is not reported again"
    producer.close()


def test_provider_is_listed_by_airflow(airflow: Airflow) -> None:
    listed = json.loads(airflow.call("providers", "list", "--output", "json").strip().splitlines()[-1])
    assert "kafka-sluice" in {p["package_name"] for p in listed}
