"""The projects in examples/, over a real Kafka: as a folder of definitions, and by `dg`."""

# No `from __future__ import annotations` here: Dagster reads the annotations of inputs themselves, not as text.

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from kafka import KafkaProducer

import sluice
import sluice.dagster
from sluice.pipelines.model.receipts import ENGINE, EngineKind
from sluice.pipelines.util.units import parse_window, show_window
from sluice.resources import local_engine
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from tests.integration.support import InlineEngine

pytestmark = pytest.mark.usefixtures("default_engine")

EXAMPLES = Path(__file__).parents[2] / "examples"
HOUR = 3_600_000
VALUE = b'{"order_id": "%d", "amount": 2.50, "currency": "EUR", "country": "DE"}'
PAGE = (Path(__file__).parents[2] / "docs" / "dagster.md").read_text()


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture
def hour(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a closed hour with ten orders; sets the environment that the examples read."""
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


def test_user_asset_is_requested_after_its_hour_lands(
    tmp_path: Path, hour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "LocalEngine", lambda *_: InlineEngine())
    project = shutil.copytree(EXAMPLES / "dagster_project", tmp_path / "dagster_project")
    defs = load_definitions(project)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        before = dg.evaluate_automation_conditions(defs, instance)
        assert land_hour(defs, instance, hour).success
        due = dg.evaluate_automation_conditions(defs, instance, cursor=before.cursor)
        assert hour in due.get_requested_partitions(dg.AssetKey("revenue"))
        job = defs.resolve_implicit_job_def_def_for_assets([dg.AssetKey("revenue")])
        result = job.execute_in_process(instance=instance, partition_key=hour, asset_selection=[dg.AssetKey("revenue")])
        (event,) = result.get_asset_materialization_events()
    metadata = event.step_materialization_data.materialization.metadata
    assert metadata["orders"].value == 10
    assert metadata["revenue"].value == {"EUR": 25.0}


def load_definitions(project: Path) -> dg.Definitions:
    """Load the definitions of a copy of the example."""
    spec = importlib.util.spec_from_file_location("example_definitions", project / "definitions.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    definitions: dg.Definitions = module.defs
    return definitions


def land_hour(defs: dg.Definitions, instance: dg.DagsterInstance, hour: str) -> dg.ExecuteInProcessResult:
    """Land an hour as Dagster's asset page does."""
    keys = [dg.AssetKey(["orders", name]) for name in ("landed", "committed")]
    job = defs.resolve_implicit_job_def_def_for_assets(keys)
    assert job
    return job.execute_in_process(instance=instance, partition_key=hour, asset_selection=keys)


def build_other_location(feeds: Path) -> dg.Definitions:
    """Build a code location that depends on another location's feed, with an asset for each type of input."""
    orders = sluice.dagster.feed_spec("orders", feeds)
    rows = {"rows": dg.AssetIn(orders.key)}
    of_hour = dg.asset(ins=rows, partitions_def=orders.partitions_def)
    two_hours = dg.TimeWindowPartitionMapping(start_offset=-1)

    @of_hour
    def in_windows(rows: Any) -> str:
        return f"{type(rows).__name__} {rows.rows}"

    @of_hour
    def in_pandas(rows: pd.DataFrame) -> str:
        return f"{type(rows).__name__} {len(rows)}"

    @of_hour
    def in_polars(rows: pl.LazyFrame) -> str:
        return f"{type(rows).__name__} {rows.collect().height}"

    @of_hour
    def in_memory(rows: pl.DataFrame) -> str:
        return f"{type(rows).__name__} {rows.height}"

    @of_hour
    def in_arrow(rows: pa.Table) -> str:
        return f"{type(rows).__name__} {rows.num_rows}"

    @of_hour
    def in_duckdb(rows: duckdb.DuckDBPyRelation) -> str:
        return f"{type(rows).__name__} {len(rows.fetchall())}"

    @dg.asset(ins={"rows": dg.AssetIn(orders.key, partition_mapping=two_hours)}, partitions_def=orders.partitions_def)
    def of_two_hours(rows: dict[str, pa.Table]) -> str:
        return " ".join(f"{key} {table.num_rows}" for key, table in rows.items())

    @of_hour
    def in_text(rows: str) -> None: ...

    @dg.asset(partitions_def=orders.partitions_def, deps=[orders.key])
    def by_resource(context: dg.AssetExecutionContext, feeds: sluice.dagster.SluiceResource) -> str:
        hour = context.partition_key
        (again,) = feeds.run("orders", hour).values()
        checked, status = feeds.check("orders", hour), feeds.status("orders", windows=2)
        assert (again.error, checked.complete, status.lag) == (None, True, 0)
        return f"rows {feeds.read('orders', hour).rows}"

    assets = [
        in_windows,
        in_pandas,
        in_polars,
        in_memory,
        in_arrow,
        in_duckdb,
        of_two_hours,
        in_text,
        by_resource,
    ]
    resources = {
        "sluice_io_manager": sluice.dagster.SluiceIOManager(feeds=str(feeds)),
        "feeds": sluice.dagster.SluiceResource(feeds=str(feeds)),
    }
    return dg.Definitions([orders, *assets], resources=resources)


def test_another_code_location_reads_an_hour(tmp_path: Path, hour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of definitions over one instance; the second one has the feed's asset as an external spec only."""
    monkeypatch.setattr(engine, "SparkEngine", lambda *_: InlineEngine())
    project = shutil.copytree(EXAMPLES / "dagster_project", tmp_path / "dagster_project")
    first, second = load_definitions(project), build_other_location(project / "feeds")
    later = show_window(parse_window(hour) + HOUR)

    def make(name: str, instance: dg.DagsterInstance, partition: str = hour) -> dg.ExecuteInProcessResult:
        key = dg.AssetKey(name)
        job = second.resolve_implicit_job_def_def_for_assets([key])
        assert job
        return job.execute_in_process(
            instance=instance, partition_key=partition, asset_selection=[key], raise_on_error=False
        )

    def get_error(done: dg.ExecuteInProcessResult) -> str:
        (failed,) = (e for e in done.all_events if e.is_step_failure)
        error = failed.step_failure_data.error
        return str(error.cause if error and error.cause else error)

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert "window" in get_error(make("in_windows", instance)), "the hour has not landed"
        for partition in (hour, later):
            assert land_hour(first, instance, partition).success
        expected = {
            "in_windows": "Windows 10",
            "in_pandas": "DataFrame 10",
            "in_polars": "LazyFrame 10",
            "in_memory": "DataFrame 10",
            "in_arrow": "Table 10",
            "in_duckdb": "DuckDBPyRelation 10",
            "by_resource": "rows 10",
        }
        results = {name: make(name, instance) for name in expected}
        assert {name: done.output_for_node(name) for name, done in results.items() if done.success} == expected
        assert make("of_two_hours", instance, later).output_for_node("of_two_hours") == f"{hour} 10 {later} 0"
        assert "annotate it as one of" in get_error(make("in_text", instance))


ONE_BY_ONE = """import json, sys
from dagster_dg_cli.cli import ENV_PREFIX, cli
for words in json.loads(sys.argv[1]):
    if code := cli(words, auto_envvar_prefix=ENV_PREFIX, standalone_mode=False):
        sys.exit(code)
    print("<end>", flush=True)"""


def run_dg(project: Path, environ: dict[str, str], *words: str) -> str:
    """Run `dg` in the project's folder, and expect success. Returns its output."""
    return _read_output([str(Path(sys.executable).parent / "dg"), *words], project, environ)


def run_dg_one_by_one(project: Path, environ: dict[str, str], *commands: Sequence[str]) -> list[str]:
    """Run several `dg` commands in one process, which imports Dagster once. Returns the output of each."""
    output = _read_output([sys.executable, "-c", ONE_BY_ONE, json.dumps(commands)], project, environ)
    return output.split("<end>")[:-1]


def _read_output(command: Sequence[str], project: Path, environ: dict[str, str]) -> str:
    environ = {**environ, "PYTHONPATH": str(project / "src")}
    done = subprocess.run(command, cwd=project, env=environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_dg_lists_checks_and_scaffolds_the_component(tmp_path: Path) -> None:
    """Runs without Kafka and without its address."""
    project = shutil.copytree(EXAMPLES / "dg_project", tmp_path / "dg_project")
    environ = {k: v for k, v in os.environ.items() if k != "KAFKA_BOOTSTRAP"}

    listed, *_ = run_dg_one_by_one(
        project,
        environ,
        ("list", "components"),
        ("check", "defs"),  # before the other component: both show the same folder
        ("scaffold", "defs", "sluice.dagster.FeedsComponent", "more", "--topic", "shop.refunds"),
        ("check", "yaml"),
    )
    assert "sluice.dagster.FeedsComponent" in listed
    assert (project / "feeds" / "shop_refunds.yaml").exists()
    assert "FeedsComponent" in (project / "src/shop/defs/more/defs.yaml").read_text()


@pytest.mark.spark
@pytest.mark.slow
def test_dg_launch_lands_an_hour(tmp_path: Path, hour: str) -> None:
    project = shutil.copytree(EXAMPLES / "dg_project", tmp_path / "dg_project")
    run_dg(project, dict(os.environ), "launch", "--assets", "orders/landed,orders/committed", "--partition", hour)
    window = sluice.read("orders", hour, project=project)
    assert window.rows == 10
    assert not (project / ".sluice" / "dagster").exists(), "DAGSTER_HOME names another"
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        landed = instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))
    assert hour in landed


def list_steps(topic: str) -> list[list[str]]:
    """Returns the page's first commands between the installation and `dg dev`, for another topic."""
    lines = find_blocks("console")[0].replace("--topic orders", f"--topic {topic}").splitlines()
    _, _, *steps, last = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    assert (len(steps), last) == (3, ["dg", "dev"])
    return steps


@pytest.mark.slow
def test_steps_of_the_page_land_an_hour_and_run_the_asset_downstream(
    tmp_path: Path, hour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a project of `dg` without feeds to the revenue of an hour, by the commands and code of docs/dagster.md."""
    monkeypatch.setenv(ENGINE, EngineKind.PROCESSES)
    topic, project = os.environ["ORDERS_TOPIC"], shutil.copytree(EXAMPLES / "dg_project", tmp_path / "dg_project")
    for own in (project / "feeds", project / "src/shop/defs/ingest"):
        shutil.rmtree(own)
    revenue = project / "src/shop/defs/revenue.py"
    revenue.unlink()
    init, *words = list_steps(topic)
    _read_output([str(Path(sys.executable).parent / init[0]), *init[1:], "--group", topic], project, dict(os.environ))
    launch = shlex.split(find_blocks("console")[1].removeprefix("$ ").replace("2026-11-20T14:00", hour))
    steps = [step[1:] for step in (*words, launch)]
    assert [step[0] for step in steps] == ["scaffold", "check", "launch"]
    run_dg_one_by_one(project, dict(os.environ), *steps)
    revenue.write_text(f"import dagster as dg\n\nimport sluice.dagster\n\n{find_blocks('python')[1]}")
    run_dg(project, dict(os.environ), "launch", "--assets", "revenue", "--partition", hour)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert hour in instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))
        assert hour in instance.get_materialized_partitions(dg.AssetKey(["revenue"]))


def test_python_examples_of_the_page_run(tmp_path: Path, hour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example by itself, in a project with the feed `orders`, with one hour landed."""
    monkeypatch.setattr(local_engine, "LocalEngine", lambda *_: InlineEngine())
    monkeypatch.setattr(engine, "SparkEngine", lambda *_: InlineEngine())
    project = shutil.copytree(EXAMPLES / "dagster_project", tmp_path / "dagster_project")
    monkeypatch.chdir(project)
    (project / "us").mkdir()
    shutil.copytree(project / "feeds", project / "us" / "feeds")

    def run_example(text: str) -> dict[str, Any]:
        names = {"dg": dg, "pandas": pd, "sluice": sluice}
        exec(compile(text.replace("[...]", "[]").replace("{...}", "{}"), "docs/dagster.md", "exec"), names)
        return names

    merged, downstream, elsewhere, translated, subclassed, component = map(run_example, find_blocks("python"))
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert land_hour(merged["defs"], instance, hour).success
        for defs in (dg.Definitions.merge(merged["defs"], dg.Definitions([downstream["revenue"]])), elsewhere["defs"]):
            key = dg.AssetKey("revenue")
            job = defs.resolve_implicit_job_def_def_for_assets([key])
            assert job
            done = job.execute_in_process(instance=instance, partition_key=hour, asset_selection=[key])
            if defs is not elsewhere["defs"]:
                assert [(country, float(sum_)) for country, sum_ in done.output_for_node("revenue")] == [("DE", 25.0)]
    graph = merged["defs"].resolve_asset_graph()
    assert {key.path[-1] for key in graph.get_all_asset_keys() - graph.executable_asset_keys} == {"quarantined"}
    assert "cannot run by itself" in (graph.get(dg.AssetKey(["orders", "quarantined"])).description or "")
    landed = translated["defs"].resolve_asset_graph().get(dg.AssetKey(["raw", "orders", "landed"]))
    assert translated["orders"].landed == landed.key
    assert (landed.group_name, landed.owners) == ("ingest", ["team:data"])
    defs = sluice.dagster.feed_definitions("feeds", translator=subclassed["Ours"]())
    assert defs.resolve_asset_graph().get(dg.AssetKey(["orders", "committed"])).group_name == "offsets"
    assert issubclass(component["Feeds"], dg.Component)
    for call in re.findall(r"`(feed_definitions\(.*?\))`", PAGE):
        sensors = eval(f"sluice.dagster.{call}").sensors
        assert [s.name for s in sensors] == ["watch_us"], call
