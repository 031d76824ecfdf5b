"""A real Prometheus with the configuration of infra/: it scrapes the output of `sluice metrics`, loads the alert rules,
and answers the query of each dashboard panel. Skipped if neither PATH nor SLUICE_TEST_PROMETHEUS has the program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from sluice.cli.inspect import metrics
from sluice.pipelines.model.kafka import Configs, TopicConfig
from tests.assets.world import HOUR, World, in_hour
from tests.cli.conftest import Invoke
from tests.cli.test_metrics import ROOT
from tests.resources.kafka.tools import free_port, wait_until

INFRA = ROOT / "infra/prometheus"
BOARD = json.loads((INFRA / "dashboard.json").read_text())
NOTHING_YET = {"Quarantine by reason"}
"""Panels without a value in this world."""


def test_prometheus_answers_every_panel_and_loads_every_rule(world: World, invoke: Invoke, tmp_path: Path) -> None:
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which(os.environ.get("SLUICE_TEST_PROMETHEUS") or "prometheus", path=folders)
    if program is None:
        pytest.skip("no Prometheus here: infra/prometheus.sh gets one")
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    world.run(in_hour(0))
    (tmp_path / "metrics").write_text(invoke(metrics.metrics).text)
    with serve_folder(tmp_path) as target, run_prometheus(program, tmp_path, target) as server:
        wait_until(lambda: query_api(server, "query", query="sluice_up")["result"], 60)
        answers = {panel: query_api(server, "query", query=query) for panel, query in list_panels()}
        wait_until(lambda: query_api(server, "query", query="rate(sluice_landed_rows_total[1h])")["result"], 60)
        silent = {panel for panel, query in list_panels() if not query_api(server, "query", query=query)["result"]}
        rules = [r for g in query_api(server, "rules")["groups"] for r in g["rules"]]
    assert answers.keys() >= {panel["title"] for panel in BOARD["panels"] if panel["type"] != "row"}
    assert silent == NOTHING_YET
    alerts = yaml.safe_load((INFRA / "alerts.yaml").read_text())
    assert {r["name"] for r in rules} == {r["alert"] for g in alerts["groups"] for r in g["rules"]}
    assert {r["health"] for r in rules} <= {"ok", "unknown"}, rules


def test_promtool_accepts_the_scrape_of_a_run_and_the_rules(world: World, invoke: Invoke) -> None:
    promtool = shutil.which("promtool", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if promtool is None:
        pytest.skip("no promtool here: infra/prometheus.sh gets one")
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    world.run(in_hour(0))
    scraped = invoke(metrics.metrics).text
    for words, text in ((["metrics"], scraped), (["rules", str(INFRA / "alerts.yaml")], "")):
        done = subprocess.run([promtool, "check", *words], input=text.encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alert_fires_when_nothing_is_scraped(tmp_path: Path) -> None:
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    promtool = shutil.which("promtool", path=folders)
    if promtool is None:
        pytest.skip("no promtool here: infra/prometheus.sh gets one")
    shutil.copy(INFRA / "alerts.yaml", tmp_path)
    scraped = [('up{job="sluice", instance="a"}', "1x60"), ('sluice_look_timestamp_seconds{instance="a"}', "0+60x60")]
    ended = [('up{job="sluice", instance="a"}', "0x60")]
    cases = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in present],
            "alert_rule_test": [{"eval_time": "30m", "alertname": "SluiceMetricsMissing", "exp_alerts": expected}],
        }
        for present, expected in ((scraped, []), ([], [alert()]), (ended, [alert(job="sluice", instance="a"), alert()]))
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": cases}))
    done = subprocess.run([promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alert(**labels: str) -> dict[str, Any]:
    rules = yaml.safe_load((INFRA / "alerts.yaml").read_text())["groups"][0]["rules"]
    rule = next(r for r in rules if r["alert"] == "SluiceMetricsMissing")
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}


def list_panels() -> Iterator[tuple[str, str]]:
    """Yield each panel's title and query, with `.*` for the variable `feed`, as Grafana inserts for all feeds."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$feed", ".*")


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the folder over HTTP, with its file `metrics`. Yields host and port."""

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = {"": "text/plain; version=0.0.4"}  # noqa: RUF012

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def run_prometheus(program: str, folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus with the scrape job of infra/, which scrapes the target each second. Yields its address."""
    config = yaml.safe_load((INFRA / "scrape.yaml").read_text())
    (job,) = config["scrape_configs"]
    job |= {"scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(INFRA / "alerts.yaml", folder)
    address = f"127.0.0.1:{free_port()}"
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([program, *arguments, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _is_ready(address, server, folder / "log"), 60)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _is_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text(errors="replace")
    try:
        with urlopen(f"http://{address}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def query_api(address: str, endpoint: str, **parameters: str) -> Any:
    """Return the `data` of a response of Prometheus' HTTP API. Its errors are raised as HTTPError."""
    with urlopen(f"http://{address}/api/v1/{endpoint}?{urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]
