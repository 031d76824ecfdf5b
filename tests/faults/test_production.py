"""Sluice as deployed with the files of infra/: hours land by schedule while processes are killed.

`make production-like` runs it. PostgreSQL under Dagster; code server, web server, daemon and `sluice metrics` by the
commands and environment of infra/systemd, by infra/dagster.yaml and infra/workspace.yaml; three brokers with TLS, SCRAM
and ACLs; a standalone Spark with workers without Sluice; a lake on S3. Two feeds land three hours by their schedules.
During this, the process of a run, a broker, and the process that has loaded the code are killed, and the web server is
restarted. Then the checker's verdict on both feeds.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import SCHEDULE_TAG
from sluice.assets.schedules.window_scheduler import ACTIVE, schedule_name
from sluice.assets.specs.asset_specs import landed_key
from sluice.cli.inspect.metrics import PORT
from sluice.pipelines.util.units import HOUR, MINUTE, show_window
from sluice.resources.project import Project
from tests import postgres as servers
from tests.checker.gather import list_writes
from tests.deployment import UNITS, Deployment, run_deployment, wait_for_end, wait_for_worker
from tests.faults.account import Account
from tests.faults.nemeses.engines import Process, Processes
from tests.faults.secured import RANGES, Secured, Systems, run_systems
from tests.resources.kafka.tools import wait_until
from tests.stores import Store

pytestmark = [pytest.mark.production, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
NAMES, HOURS = ("orders", "refunds"), 3
PARTITIONS, RECORDS, RATE = 8, 200, 30
"""Records of a partition in each hour; records a second during faults."""
BROKER = 2
TICK_SECONDS = 420
"""The schedule ticks every five minutes; on a busy machine later."""
LANDED_SECONDS = 900
ONE_CORE = {"spark.cores.max": "1"}
"""One of two cores, so that the runs of both feeds work in parallel."""


@dataclass(frozen=True)
class Site:
    """The systems, the deployment, and the feeds, whose first hour has landed by hand."""

    systems: Systems
    deployment: Deployment
    instance: dg.DagsterInstance
    feeds: Mapping[str, Secured]
    hours: Sequence[str]
    """The pending hours of the schedules."""
    processes: Processes

    def find_code_process(self) -> Process:
        """Returns the process that has loaded the code for the code server."""
        server = self.deployment.processes["code"].pid
        return next(p for p in self.processes.list_alive() if p.parent == server and b"\0grpc\0" in p.command)

    def wait_for_scheduled_run(self, feed: str) -> dg.DagsterRun:
        """Wait for the first run that the feed's schedule requested."""
        filters = dg.RunsFilter(tags={SCHEDULE_TAG: name_schedule(feed)})
        run: dg.DagsterRun = wait_until(lambda: next(iter(self.instance.get_runs(filters)), None), TICK_SECONDS)
        return run

    def wait_for_retry(self, run: str) -> dg.DagsterRun:
        """Wait for Dagster's retry of a run whose process died."""
        filters = dg.RunsFilter(tags={"dagster/parent_run_id": run})
        retry: dg.DagsterRun = wait_until(lambda: next(iter(self.instance.get_runs(filters)), None), 180)
        return retry

    def list_landed(self, feed: str) -> set[str]:
        """Returns the hours that Dagster shows as landed."""
        return set(self.instance.get_materialized_partitions(landed_key(feed)))

    def fetch_metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.deployment.address}:{PORT}/metrics", timeout=60) as answer:
            return str(answer.read().decode())


def name_schedule(feed: str) -> str:
    return schedule_name(f"land_{feed}")


@pytest.fixture
def site(tmp_path: Path, s3_store: Store, account: Account, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    programs = servers.find_programs()
    assert programs is not None, "no PostgreSQL here: infra/postgres.sh installs one"
    processes = Processes()
    with ExitStack() as stack:
        systems = stack.enter_context(run_systems(tmp_path, s3_store, monkeypatch))
        postgres = stack.enter_context(servers.run_server(programs))
        account.log("three secured brokers, a standalone Spark, S3 and PostgreSQL are up")
        deployment = Deployment(tmp_path, tmp_path / "dagster-home", processes.environment)
        monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", postgres.build_address(postgres.create_database()))
        for name in ("DAGSTER_HOME", "SLUICE_PROJECT"):
            monkeypatch.setenv(name, deployment.build_environment()[name])
        feeds = {name: systems.add_feed(name, PARTITIONS, account, **ONE_CORE) for name in NAMES}
        hours = _produce_hours(feeds)
        for field in feeds.values():
            assert field.wait_for_run(
                field.start_cli("--window", hours[0]), about=f"{field.name}: the first hour"
            ).clean
        stack.enter_context(processes.kill_at_exit())
        instance = stack.enter_context(open_instance(Project(tmp_path)))
        stack.enter_context(run_deployment(deployment, *UNITS))
        account.log(f"{', '.join(UNITS)} run by infra/systemd's commands and infra/dagster.yaml")
        yield Site(systems, deployment, instance, feeds, hours[1:], processes)


def _produce_hours(feeds: Mapping[str, Secured]) -> Sequence[str]:
    """Produce records in past hours, the first of them for a run by hand. Returns the windows."""
    now = int(time.time() * 1000)
    newest = (now - 10 * MINUTE) // HOUR * HOUR - HOUR
    begins = [newest - n * HOUR for n in reversed(range(HOURS + 1))]
    for field in feeds.values():
        for begin in begins:
            field.send(begin + HOUR // 2 - now, RECORDS)
        field.account.log(f"{field.name}: {len(begins) * field.partitions * RECORDS:,} records in {len(begins)} hours")
    return [show_window(begin) for begin in begins]


def test_three_hours_land_on_schedule_while_processes_are_killed(site: Site, account: Account) -> None:
    orders, service = site.feeds["orders"], site.deployment
    for name in NAMES:
        assert not site.list_landed(name) & set(site.hours)
        service.switch_on(name_schedule(name))
    account.log("both schedules were switched on by the web server")
    with ExitStack() as stack:
        for field in site.feeds.values():
            stack.enter_context(field.run_producers(RATE))
        run = site.wait_for_scheduled_run("orders").run_id
        account.log("the schedule asked for a run of orders")
        process = wait_for_worker(site.instance, run)
        wait_until(lambda: orders.count_staged() >= RANGES, 300)
        os.kill(process, signal.SIGKILL)
        account.log("the run's process was killed (SIGKILL) amid its landing")
        service.end("web")
        assert wait_for_end(site.instance, run) is dg.DagsterRunStatus.FAILURE, service.read_logs()
        retry = site.wait_for_retry(run).run_id
        wait_for_worker(site.instance, retry)
        account.log("the daemon had it tried again, with no web server there")
        site.systems.kafka.kill_broker(BROKER)
        account.log(f"broker {BROKER} of three was killed (SIGKILL)")
        service.start("web")
        wait_until(service.is_answering, 300)
        account.log("the web server is there again")
        site.find_code_process().send(signal.SIGKILL)
        account.log("the process that had loaded the code was killed (SIGKILL); the code server starts another")
        wait_until(
            lambda: service.check_alive() and all(set(site.hours) <= site.list_landed(n) for n in NAMES), LANDED_SECONDS
        )
        account.log(f"{HOURS} hours of both feeds landed by schedule, with two brokers")
        assert wait_for_end(site.instance, retry) is dg.DagsterRunStatus.SUCCESS, service.read_logs()
        service.end("daemon")  # or it might land an hour that ends now, in parallel with the last run
        wait_until(lambda: not site.instance.get_runs(dg.RunsFilter(statuses=ACTIVE)), 300)
        orders.arena.heal()
        account.log(f"broker {BROKER} is there again, and in sync")
    for field in site.feeds.values():
        field.observed_entries += list_writes(field.folder)
        field.wait_until_stable()
        assert field.wait_for_run(field.start_cli(), about=f"{field.name}: a run to catch up").clean
        field.verify()
        wait_until(lambda name=field.name: f'sluice_up{{feed="{name}"}} 1' in site.fetch_metrics(), 120)
    site.systems.check_no_secrets(account, service.home)
