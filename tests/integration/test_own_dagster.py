"""The projects in examples/, over a real Kafka: as a folder of definitions, and by `dg`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from kafka import KafkaProducer

import sluice
from sluice.pipelines.util.units import show_window
from sluice.resources import open_ports
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import Inline

EXAMPLES = Path(__file__).parents[2] / "examples"
HOUR = 3_600_000
VALUE = b'{"order_id": "%d", "amount": 2.50, "currency": "EUR"}'


@pytest.fixture
def hour(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Ten orders in an hour that is over, and the environment that the examples read; the key of that hour."""
    topic = fresh_topic(partitions=2, name="shop")
    now = time.time_ns() // 1_000_000
    start = now - now % HOUR - 3 * HOUR
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for i in range(10):
            producer.send(topic, VALUE % i, partition=i % 2, timestamp_ms=start + i)
    for name, value in {"KAFKA_BOOTSTRAP": kafka.bootstrap, "ORDERS_TOPIC": topic, "ORDERS_GROUP": topic}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return show_window(start)


def test_definitions_with_an_asset_of_ones_own(tmp_path: Path, hour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_ports, "SparkEngine", lambda *_: Inline())
    project = shutil.copytree(EXAMPLES / "dagster_project", tmp_path / "dagster_project")
    spec = importlib.util.spec_from_file_location("example_definitions", project / "definitions.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        before = dg.evaluate_automation_conditions(module.defs, instance)
        landed = module.defs.resolve_job_def("land_orders").execute_in_process(instance=instance, partition_key=hour)
        assert landed.success
        due = dg.evaluate_automation_conditions(module.defs, instance, cursor=before.cursor)
        assert hour in due.get_requested_partitions(dg.AssetKey("revenue"))
        job = module.defs.resolve_implicit_job_def_def_for_assets([dg.AssetKey("revenue")])
        made = job.execute_in_process(instance=instance, partition_key=hour, asset_selection=[dg.AssetKey("revenue")])
        (event,) = made.get_asset_materialization_events()
    metadata = event.step_materialization_data.materialization.metadata
    assert metadata["orders"].value == 10
    assert metadata["revenue"].value == {"EUR": 25.0}


def dg_of(project: Path, environ: dict[str, str], *words: str) -> str:
    """What `dg` prints in the project's folder, where it must succeed."""
    command = [str(Path(sys.executable).parent / "dg"), *words]
    environ = {**environ, "PYTHONPATH": str(project / "src")}
    done = subprocess.run(command, cwd=project, env=environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_dg_finds_checks_and_scaffolds_the_component(tmp_path: Path) -> None:
    """Without Kafka, and without its address."""
    project = shutil.copytree(EXAMPLES / "dg_project", tmp_path / "dg_project")
    environ = {k: v for k, v in os.environ.items() if k != "KAFKA_BOOTSTRAP"}

    def run(*words: str) -> str:
        return dg_of(project, environ, *words)

    assert "sluice.dagster.FeedsComponent" in run("list", "components")
    run("scaffold", "defs", "sluice.dagster.FeedsComponent", "more", "--topic", "shop.refunds")
    assert (project / "feeds" / "shop_refunds.yaml").exists()
    made = project / "src/shop/defs/more/defs.yaml"
    assert "FeedsComponent" in made.read_text()
    run("check", "yaml")
    made.unlink()  # it shows the same folder as the other component
    run("check", "defs")


@pytest.mark.spark
@pytest.mark.slow
def test_dg_launch_lands_an_hour(tmp_path: Path, hour: str) -> None:
    project = shutil.copytree(EXAMPLES / "dg_project", tmp_path / "dg_project")
    dg_of(project, dict(os.environ), "launch", "--assets", "orders/landed,orders/committed", "--partition", hour)
    monday = sluice.read("orders", hour, project=project)
    assert monday.rows == 10
    assert not (project / ".sluice" / "dagster").exists(), "DAGSTER_HOME names another"
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        landed = instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))
    assert hour in landed
