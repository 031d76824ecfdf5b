"""Dagster as a service: infra/dagster.yaml on a real PostgreSQL; code server, web server and daemon apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.instance.instance import open_instance
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests import postgres as servers
from tests.deployment import Deployment, ended, served, worker
from tests.resources.kafka.tools import produce, until

pytestmark = [pytest.mark.soak, pytest.mark.spark]


def test_a_run_is_queued_killed_tried_again_and_the_account_closes(
    kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The web server goes away in between; the daemon alone sees to the run's second try."""
    programs = servers.programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    topic = fresh_topic(partitions=3)
    for partition in range(3):
        produce(kafka, topic, 500, partition)
    root = tmp_path / "project"
    (root / "feeds").mkdir(parents=True)
    feed = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\n"
    (root / "feeds" / "orders.yaml").write_text(feed)
    with servers.started(programs) as postgres:
        monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", postgres.address(postgres.database()))
        deployment = Deployment(root, tmp_path / "dagster", {})
        for name in ("DAGSTER_HOME", "SLUICE_PROJECT"):
            monkeypatch.setenv(name, deployment.environment()[name])
        project = Project(root)
        with served(deployment, "code", "web", "daemon") as service, open_instance(project) as instance:
            run = service.launch("catch_up_orders")
            os.kill(worker(instance, run), signal.SIGKILL)
            service.end("web")
            assert ended(instance, run) is dg.DagsterRunStatus.FAILURE, service.logs()
            of_it = dg.RunsFilter(tags={"dagster/parent_run_id": run})
            (again,) = until(lambda: instance.get_runs(of_it), 180)
            assert ended(instance, again.run_id) is dg.DagsterRunStatus.SUCCESS, service.logs()
            service.start("web")
            until(service.answers, 180)
            last = service.launch("catch_up_orders")
            assert ended(instance, last) is dg.DagsterRunStatus.SUCCESS, service.logs()
        account = subprocess.run(
            [Path(sys.executable).with_name("sluice"), "audit", "orders", "--strict", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert account.returncode == 0, account.stdout + account.stderr
        assert json.loads(account.stdout), "it said something"
