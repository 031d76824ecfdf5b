"""A real run reports to an OpenTelemetry collector and an OpenLineage server: the messages it sends over HTTP.

The reports of a run that lands are tested in `tests/cli/test_end_to_end.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from kafka import KafkaProducer

from sluice.cli.main import main
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.observe import lineage, tracing
from tests.collectors import SECRET, build_environment, run_listener
from tests.integration.support import FeedProject, produce_values, run
from tests.resources.kafka.tools import free_port


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2, name="told"))
    project.write_feed(description="Orders of the shop")
    return project


def run_sluice(project: FeedProject, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("sluice")), *arguments, "--json"]
    variables = os.environ | build_environment(address)
    return subprocess.run(command, cwd=project.root, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.spark
@pytest.mark.soak
def test_run_continues_without_a_collector(project: FeedProject) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for number in range(200):
        producer.send(project.topic, b"an order", partition=number % 2)
    producer.close()
    process = run_sluice(project, f"http://127.0.0.1:{free_port()}", "run", "orders")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["feeds"][0]["runs"][0]["batches"][0]["landed"] == 200
    assert "Traceback" not in process.stderr
    assert SECRET not in process.stdout + process.stderr


def test_failed_run_reports_its_cause(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write_feed(topics="none-such", description="Orders of the shop")
    monkeypatch.chdir(project.root)
    # patch.dict also removes the variables that OpenLineage's client adds: later runs in this process would use them.
    with run_listener() as listener, patch.dict(os.environ, build_environment(listener.address)):
        assert main(["run", "orders", "--json"]) == 1
    error = json.loads(capfd.readouterr().out)["feeds"][0]["runs"][0]["error"]
    started, failed = listener.list_events()
    assert (started["eventType"], failed["eventType"]) == ("START", "FAIL")
    assert failed["job"]["facets"]["documentation"]["description"] == "Orders of the shop"
    assert failed["run"]["facets"]["errorMessage"]["message"].startswith(f"{error}: ")
    (step,) = (s for s in listener.list_spans() if not s.parent_span_id)
    assert step.status.code == 2
    assert {a.key: a.value.string_value for a in step.attributes}["error.type"] == error
    assert not listener.has_received(SECRET.encode())


@pytest.mark.parametrize(
    ("environ", "traced"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
    ],
)
def test_traces_are_sent_to_the_configured_endpoint(environ: dict[str, str], traced: bool) -> None:
    assert tracing.is_configured(environ) is traced


@pytest.mark.parametrize(
    ("environ", "configured"),
    [
        ({}, False),
        ({"OPENLINEAGE_URL": "http://x"}, True),
        ({"OPENLINEAGE_CONFIG": "lineage.yml"}, True),
        ({"OPENLINEAGE__TRANSPORT__TYPE": "console"}, True),
        ({"OPENLINEAGE_DISABLED": "true", "OPENLINEAGE_URL": "http://x"}, False),
    ],
)
def test_lineage_is_sent_to_the_configured_endpoint(environ: dict[str, str], configured: bool) -> None:
    assert lineage.is_configured(environ) is configured


def test_traces_are_sampled_evenly() -> None:
    """Ratio samplers use the lower half of the trace id."""
    fractions = [tracing.trace_of(str(n)) % 2**64 / 2**64 for n in range(1000)]
    assert 0.4 < sum(x < 0.5 for x in fractions) / len(fractions) < 0.6


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("", []),
        ("{delta: {}}", []),
        ("{delta: {}, current: true}", [("file", "{root}/.sluice/lake/tables/orders_current")]),
        ("{iceberg: {name: db.orders}}", [("sqlite:///{root}/.sluice/catalog.db", "db.orders")]),
        (
            "{iceberg: {name: db.a, catalog: {type: rest, uri: 'http://me:pw@c:19120/i?token=x'}}, current: db.b}",
            [("http://c:19120/i", "db.a"), ("http://c:19120/i", "db.b")],
        ),
        ("{iceberg: {name: db.a, catalog: {type: glue}}}", [("glue", "db.a")]),
    ],
)
def test_lineage_has_the_tables_of_a_landing(project: FeedProject, table: str, expected: list[tuple[str, str]]) -> None:
    settings = {"table": table, "changes": "{format: upsert}"} if table else {}
    feed = project.write_feed(**settings)
    produce_values(project, 4)
    landed = run(feed)
    _, outputs = lineage.list_datasets(feed, landed)
    names = [(o.namespace, o.name) for o in outputs]
    assert names[0] == lineage.lake_name(feed)
    assert names[1:] == [(space.format(root=project.root), name.format(root=project.root)) for space, name in expected]


def test_lineage_names_of_a_lake_on_s3(project: FeedProject) -> None:
    feed = project.write_feed(lake="s3://bucket/some/where", s3="{access_key_id: a, secret_access_key: b}")
    assert lineage.lake_name(feed) == ("s3://bucket", "some/where/data/orders")
