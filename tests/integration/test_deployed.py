"""Dagster as a service: infra/dagster.yaml on a real PostgreSQL, with separate code server, web server and daemon."""

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
from sluice.assets.runs.run_config import catch_up_config
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests import postgres as servers
from tests.deployment import Deployment, run_deployment, wait_for_end, wait_for_worker
from tests.resources.kafka.tools import produce, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.spark]


def test_killed_queued_run_is_retried_and_the_audit_passes(
    kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The web server stops in between; the daemon alone retries the run."""
    programs = servers.find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    topic = fresh_topic(partitions=3)
    for partition in range(3):
        produce(kafka, topic, 500, partition)
    root = tmp_path / "project"
    (root / "feeds").mkdir(parents=True)
    feed = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\n"
    (root / "feeds" / "orders.yaml").write_text(feed)
    with servers.run_server(programs) as postgres:
        monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", postgres.build_address(postgres.create_database()))
        deployment = Deployment(root, tmp_path / "dagster", {})
        for name in ("DAGSTER_HOME", "SLUICE_PROJECT"):
            monkeypatch.setenv(name, deployment.build_environment()[name])
        project = Project(root)
        with run_deployment(deployment, "code", "web", "daemon") as service, open_instance(project) as instance:
            request = catch_up_config("orders", Request(RequestKind.CATCH_UP))
            run = service.launch("catch_up", request)
            os.kill(wait_for_worker(instance, run), signal.SIGKILL)
            service.end("web")
            assert wait_for_end(instance, run) is dg.DagsterRunStatus.FAILURE, service.read_logs()
            children = dg.RunsFilter(tags={"dagster/parent_run_id": run})
            (retry,) = wait_until(lambda: instance.get_runs(children), 180)
            assert wait_for_end(instance, retry.run_id) is dg.DagsterRunStatus.SUCCESS, service.read_logs()
            service.start("web")
            wait_until(service.is_answering, 180)
            last = service.launch("catch_up", request)
            assert wait_for_end(instance, last) is dg.DagsterRunStatus.SUCCESS, service.read_logs()
        audit = subprocess.run(
            [Path(sys.executable).with_name("sluice"), "audit", "orders", "--strict", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert audit.returncode == 0, audit.stdout + audit.stderr
        assert json.loads(audit.stdout), "the audit prints its document"
