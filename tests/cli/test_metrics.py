"""The output of `sluice metrics`, read by Prometheus' own parser: stdout, file, push gateway, and server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sluice.cli.daily import status
from sluice.cli.inspect import metrics
from sluice.pipelines.model.figures import FAMILIES, MetricKind
from sluice.pipelines.model.kafka import Configs, TopicConfig
from tests.assets.world import CATCH_UP, HOUR, P1, SECRET, World, in_hour
from tests.cli.conftest import Invoke, Sluice
from tests.resources.kafka.tools import free_port

ROOT = Path(__file__).parents[2]
Figures = dict[str, dict[tuple[str, ...], float]]


def parse_figures(text: str) -> Figures:
    """Return the values by name and by labels, in the order of their family. Fails on an invalid line."""
    figures: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ours = FAMILIES[sample.name]
            assert (str(ours.kind), ours.help) == (family.type, family.documentation)
            assert set(sample.labels) == set(ours.labels)
            figures.setdefault(sample.name, {})[tuple(sample.labels[n] for n in ours.labels)] = sample.value
    return figures


def test_metric_names_follow_prometheus_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"sluice_[a-z][a-z_]*", name)
        assert name.endswith("_total") == (family.kind is MetricKind.COUNTER)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|count|bucket|sum)(_|$)", name), "base units"
        assert family.help.endswith(".")
        assert len({*family.labels}) == len(family.labels)


def test_metrics_report_lag_windows_and_batches_of_a_feed(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    figures = parse_figures(invoke(metrics.metrics).text)
    assert figures["sluice_up"] == {("orders",): 1}
    assert figures["sluice_lag_offsets"] == {("orders", "orders"): 150}
    assert figures["sluice_pending_age_seconds"]["orders",] == pytest.approx(5 * 3600, abs=120)
    windows = [w["state"].replace(" ", "_") for w in invoke(status.status, "orders").document["feeds"][0]["windows"]]
    counted = {state: n for (_, state), n in figures["sluice_windows"].items() if n}
    assert counted == {state: windows.count(state) for state in windows}
    assert figures["sluice_batches_total"] == {("orders", "published"): 1, ("orders", "abandoned"): 0}
    rows = world.state().batches[max(world.state().batches)].rows
    assert rows == 50
    assert figures["sluice_landed_rows_total"]["orders",] == rows
    assert sum(figures["sluice_last_batch_offsets"].values()) == 50
    assert figures["sluice_last_batch_bytes"]["orders",] > 0
    assert figures["sluice_uncommitted_offsets"]["orders",] == 50
    assert figures["sluice_lost_offsets"]["orders",] == 0
    assert "sluice_retention_left_seconds" not in figures


def test_metrics_in_json_have_named_labels(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    document = invoke(metrics.metrics, text=False).document
    (up,) = [f for f in document["figures"] if f["name"] == "sluice_up"]
    assert up == {"name": "sluice_up", "labels": {"feed": "orders"}, "value": 1.0}
    assert SECRET not in json.dumps(document)


def test_offsets_at_risk_and_lost_offsets_are_exported(world: World, invoke: Invoke) -> None:
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    world.land_unrecorded(in_hour(0))
    figures = parse_figures(invoke(metrics.metrics).text)
    assert figures["sluice_retention_at_risk_offsets"]["orders", "orders"] > 0
    assert 0 < figures["sluice_retention_left_seconds"]["orders", "orders"] < 4 * 3600
    world.cluster.states[P1] = replace(world.cluster.states[P1], log_start=60)
    assert parse_figures(invoke(metrics.metrics).text)["sluice_lost_offsets"]["orders",] == 35


def test_runs_are_counted_by_error(world: World, invoke: Invoke) -> None:
    world.run(in_hour(0))
    world.group.offsets[P1] = replace(world.group.offsets[P1], offset=3, metadata="")  # somebody moved them
    outcome = world.run(CATCH_UP)
    assert outcome.error is not None
    runs = parse_figures(invoke(metrics.metrics).text)["sluice_runs"]
    assert runs == {("orders", "success", ""): 1, ("orders", "failure", type(outcome.error).__name__): 1}


def test_feed_with_unreachable_kafka_is_down_and_metrics_are_exported(project: Path, sluice: Sluice) -> None:
    (project / "feeds" / "broken.yaml").write_text("topics: [")
    result = sluice("metrics")
    assert result.code == 0, result.err
    figures = parse_figures(result.out)
    assert figures["sluice_up"] == {("orders",): 0}
    assert figures["sluice_broken_feed_files"] == {(): 1}


def test_unset_variable_in_dagster_yaml_is_reported_and_metrics_are_exported(project: Path, sluice: Sluice) -> None:
    home = project / ".sluice" / "dagster"
    home.mkdir(parents=True)
    (home / "dagster.yaml").write_text("storage:\n  sqlite:\n    base_dir: {env: SLUICE_NOT_SET}\n")
    output = sluice("metrics")
    assert output.code == 0, output.err
    assert "dagster.yaml cannot be used: $SLUICE_NOT_SET is not set" in output.err
    assert parse_figures(output.out)["sluice_up"] == {("orders",): 0}


def test_metrics_file_is_replaced_without_leftovers(project: Path, sluice: Sluice) -> None:
    path = project / "sluice.prom"
    path.write_text("old")
    result = sluice("metrics", "--output", str(path))
    assert result.code == 0, result.err
    assert parse_figures(path.read_text())["sluice_up"] == {("orders",): 0}
    assert [p.name for p in project.iterdir() if p.name.startswith("sluice.prom")] == ["sluice.prom"]
    assert sluice("metrics", "--output", str(project / "none" / "x.prom")).code == 2


@pytest.fixture
def logins() -> list[str | None]:
    """The `Authorization` headers that the gateway received."""
    return []


@pytest.fixture
def gateway(logins: list[str | None]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The address of a fake push gateway, and its requests: method, path, body."""
    requests: list[tuple[str, str, str]] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.command, self.path, body))
            logins.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


def test_metrics_are_pushed_to_the_gateway(
    project: Path, sluice: Sluice, gateway: tuple[str, list[tuple[str, str, str]]]
) -> None:
    address, requests = gateway
    assert sluice("metrics", "--push", address, "--job", "shop").code == 0
    ((method, path, body),) = requests
    assert (method, path) == ("PUT", "/metrics/job/shop")
    assert parse_figures(body)["sluice_up"] == {("orders",): 0}


def test_unreachable_gateway_is_an_error(project: Path, sluice: Sluice) -> None:
    result = sluice("metrics", "--push", "http://127.0.0.1:9")
    assert result.code == 1
    assert "the push gateway http://127.0.0.1:9 did not take the figures" in result.err
    assert "Traceback" not in result.err


def test_gateway_credentials_are_read_from_the_environment(
    project: Path,
    sluice: Sluice,
    gateway: tuple[str, list[tuple[str, str, str]]],
    logins: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sluice("metrics", "--push", gateway[0]).code == 0
    monkeypatch.setenv("SLUICE_PUSH_USER", "shop")
    monkeypatch.setenv("SLUICE_PUSH_PASSWORD", SECRET)
    result = sluice("metrics", "--push", gateway[0])
    assert result.code == 0
    assert SECRET not in result.out + result.err
    assert logins == [None, "Basic " + b64encode(f"shop:{SECRET}".encode()).decode()]
    result = sluice("metrics", "--push", "http://127.0.0.1:9")
    assert result.code == 1
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize("sink", [[], ["--serve"]])
def test_interval_of_zero_is_refused(sink: list[str], sluice: Sluice, project: Path) -> None:
    answer = sluice("metrics", "--every", "0s", *sink)
    assert (answer.code, "--every 0s is no pause" in answer.err) == (2, True)


@pytest.mark.parametrize("address", ["http://shop:{}@127.0.0.1:9", "shop:{}@gateway", "http://127.0.0.1:9?token={}"])
@pytest.mark.parametrize("more", [[], ["--every", "1h"], ["--json"]])
def test_secret_in_the_gateway_address_is_refused_and_not_shown(
    project: Path, sluice: Sluice, address: str, more: list[str]
) -> None:
    result = sluice("metrics", "--push", address.format(SECRET), *more)
    assert result.code == 2
    assert "SLUICE_PUSH_PASSWORD" in result.out + result.err
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize("address", ["http://127.0.0.1:shop", "http://127.0.0.1/a b", "http://[::1"])
def test_invalid_gateway_address_is_an_error(project: Path, sluice: Sluice, address: str) -> None:
    result = sluice("metrics", "--push", address)
    assert result.code == 1
    assert "did not take the figures" in " ".join(result.err.split())


def test_server_and_file_together_are_a_usage_error(project: Path, sluice: Sluice) -> None:
    assert sluice("metrics", "--serve", "--output", "x").code == 2


def test_server_listens_on_loopback_until_interrupted(project: Path) -> None:
    port, sluice = free_port(), Path(sys.executable).with_name("sluice")
    command = [str(sluice), "metrics", "--serve", "--port", str(port), "--json"]
    served = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert served.stdout is not None
        address = json.loads(served.stdout.readline())["address"]
        assert address == f"http://127.0.0.1:{port}/metrics"
        with urlopen(address, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert parse_figures(answer.read().decode())["sluice_up"] == {("orders",): 0}
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 130
        if served.stdout:
            served.stdout.close()


# -- documentation, dashboard and alert rules


def test_docs_page_lists_every_metric_of_the_code() -> None:
    rows = re.findall(r"^\| `(sluice_\w+)` \| (.*?) \| (.*?) \|$", (ROOT / "docs/metrics.md").read_text(), re.M)
    assert rows == [(f.name, ", ".join(f.labels), f.help.rstrip(".")) for f in FAMILIES.values()]


def list_queries() -> Iterator[object]:
    rules = yaml.safe_load((ROOT / "infra/prometheus/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield pytest.param(rule["expr"], id=rule["alert"])
    board = json.loads((ROOT / "infra/prometheus/dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], id=panel["title"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield pytest.param(variable["query"], id=f"variable {variable['name']}")


@pytest.mark.parametrize("query", list(list_queries()))
def test_queries_use_existing_metrics_and_labels(query: str) -> None:
    names = re.findall(r"\bsluice_\w+", query)
    assert names
    for name, labels in re.findall(r"\b(sluice_\w+)(?:\{([^}]*)\})?", query):
        assert name in FAMILIES
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) <= set(FAMILIES[name].labels)
    for by in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", query):
        allowed = {label for name in names for label in FAMILIES[name].labels}
        assert {label.strip() for label in by.split(",")} <= allowed


def test_every_alert_has_severity_summary_and_remedy() -> None:
    rules = yaml.safe_load((ROOT / "infra/prometheus/alerts.yaml").read_text())
    for rule in (r for g in rules["groups"] for r in g["rules"]):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert "sluice " in rule["annotations"]["remedy"]
