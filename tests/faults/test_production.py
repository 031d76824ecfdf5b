"""Sluice as it is deployed, by what infra/ ships: hours land by schedule while things are killed.

`make production-like` runs it. PostgreSQL under Dagster; code server, web server, daemon and `sluice metrics` by the
commands and environment of infra/systemd, by infra/dagster.yaml and infra/workspace.yaml; three brokers with TLS, SCRAM
and ACLs; a standalone Spark whose workers are bare; a lake on S3. Two feeds land three hours by their schedules.
Meanwhile the process of a run is killed, the web server ended and started again, a broker killed, and the process that
has loaded the code. Then the checker's verdict on both feeds.
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

from sluice.assets.factory import land_job
from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import SCHEDULE_TAG
from sluice.assets.schedules.window_scheduler import ACTIVE, schedule_name
from sluice.assets.specs.asset_specs import landed_key
from sluice.cli.inspect.metrics import PORT
from sluice.pipelines.util.units import HOUR, MINUTE, show_window
from sluice.resources.project import Project
from tests import postgres as servers
from tests.checker.gather import seen
from tests.deployment import UNITS, Deployment, ended, served, worker
from tests.faults.account import Account
from tests.faults.nemeses.engines import Process, Processes
from tests.faults.secured import RANGES, Secured, Systems, systems
from tests.resources.kafka.tools import until
from tests.stores import Store

pytestmark = [pytest.mark.production, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
NAMES, HOURS = ("orders", "refunds"), 3
PARTITIONS, RECORDS, RATE = 8, 200, 30
"""Records of a partition in each hour; records a second while faults happen."""
BROKER = 2
TICK_SECONDS = 420
"""The schedule looks every five minutes; a busy machine's daemon comes later."""
LANDED_SECONDS = 900
ONE_CORE = {"spark.cores.max": "1"}
"""Of two workers' two: the runs of both feeds are at work side by side."""


@dataclass(frozen=True)
class Site:
    """All of it, and the feeds whose first hour has landed by hand."""

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
        return next(p for p in self.processes.alive() if p.parent == server and b"\0grpc\0" in p.command)

    def scheduled(self, feed: str) -> dg.DagsterRun:
        """The first run that the feed's schedule asked for."""
        of_it = dg.RunsFilter(tags={SCHEDULE_TAG: schedule(feed)})
        run: dg.DagsterRun = until(lambda: next(iter(self.instance.get_runs(of_it)), None), TICK_SECONDS)
        return run

    def second_try(self, run: str) -> dg.DagsterRun:
        """The run that Dagster made of one whose process died."""
        of_it = dg.RunsFilter(tags={"dagster/parent_run_id": run})
        again: dg.DagsterRun = until(lambda: next(iter(self.instance.get_runs(of_it)), None), 180)
        return again

    def landed(self, feed: str) -> set[str]:
        """The hours that Dagster shows as landed."""
        return set(self.instance.get_materialized_partitions(landed_key(feed)))

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.deployment.address}:{PORT}/metrics", timeout=60) as answer:
            return str(answer.read().decode())


def schedule(feed: str) -> str:
    return schedule_name(land_job(feed))


@pytest.fixture
def site(tmp_path: Path, s3_store: Store, account: Account, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    programs = servers.programs()
    assert programs is not None, "no PostgreSQL here: infra/postgres.sh installs one"
    processes = Processes()
    with ExitStack() as stack:
        made = stack.enter_context(systems(tmp_path, s3_store, monkeypatch))
        postgres = stack.enter_context(servers.started(programs))
        account.did("three secured brokers, a standalone Spark, S3 and PostgreSQL are up")
        deployment = Deployment(tmp_path, tmp_path / "dagster-home", processes.environment)
        monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", postgres.address(postgres.database()))
        for name in ("DAGSTER_HOME", "SLUICE_PROJECT"):
            monkeypatch.setenv(name, deployment.environment()[name])
        feeds = {name: made.feed(name, PARTITIONS, account, **ONE_CORE) for name in NAMES}
        hours = _produced(feeds)
        for field in feeds.values():
            assert field.ended(field.start_cli("--window", hours[0]), about=f"{field.name}: the first hour").clean
        stack.enter_context(processes.killed())
        instance = stack.enter_context(open_instance(Project(tmp_path)))
        stack.enter_context(served(deployment, *UNITS))
        account.did(f"{', '.join(UNITS)} run by infra/systemd's commands and infra/dagster.yaml")
        yield Site(made, deployment, instance, feeds, hours[1:], processes)


def _produced(feeds: Mapping[str, Secured]) -> Sequence[str]:
    """Records in hours that are over, the first of them for a run by hand: the windows' names."""
    now = int(time.time() * 1000)
    newest = (now - 10 * MINUTE) // HOUR * HOUR - HOUR
    begins = [newest - n * HOUR for n in reversed(range(HOURS + 1))]
    for field in feeds.values():
        for begin in begins:
            field.send(begin + HOUR // 2 - now, RECORDS)
        field.account.did(f"{field.name}: {len(begins) * field.partitions * RECORDS:,} records in {len(begins)} hours")
    return [show_window(begin) for begin in begins]


def test_three_hours_land_by_schedule_while_things_are_killed(site: Site, account: Account) -> None:
    orders, service = site.feeds["orders"], site.deployment
    for name in NAMES:
        assert not site.landed(name) & set(site.hours)
        service.switch_on(schedule(name))
    account.did("both schedules were switched on by the web server")
    with ExitStack() as stack:
        for field in site.feeds.values():
            stack.enter_context(field.producing(RATE))
        run = site.scheduled("orders").run_id
        account.did("the schedule asked for a run of orders")
        process = worker(site.instance, run)
        until(lambda: orders.staged() >= RANGES, 300)
        os.kill(process, signal.SIGKILL)
        account.did("the run's process was killed (SIGKILL) amid its landing")
        service.end("web")
        assert ended(site.instance, run) is dg.DagsterRunStatus.FAILURE, service.logs()
        again = site.second_try(run).run_id
        worker(site.instance, again)
        account.did("the daemon had it tried again, with no web server there")
        site.systems.kafka.kill_broker(BROKER)
        account.did(f"broker {BROKER} of three was killed (SIGKILL)")
        service.start("web")
        until(service.answers, 300)
        account.did("the web server is there again")
        site.find_code_process().send(signal.SIGKILL)
        account.did("the process that had loaded the code was killed (SIGKILL); the code server starts another")
        until(lambda: service.all_live() and all(set(site.hours) <= site.landed(n) for n in NAMES), LANDED_SECONDS)
        account.did(f"{HOURS} hours of both feeds landed by schedule, with two brokers")
        assert ended(site.instance, again) is dg.DagsterRunStatus.SUCCESS, service.logs()
        service.end("daemon")  # or it might land an hour that ends now beside the last run
        until(lambda: not site.instance.get_runs(dg.RunsFilter(statuses=ACTIVE)), 300)
        orders.arena.heal()
        account.did(f"broker {BROKER} is there again, and in sync")
    for field in site.feeds.values():
        field.observed += seen(field.folder)
        field.settled()
        assert field.ended(field.start_cli(), about=f"{field.name}: a run to catch up").clean
        field.proven()
        until(lambda name=field.name: f'sluice_up{{feed="{name}"}} 1' in site.metrics(), 120)
    site.systems.no_secrets(account, service.home)
