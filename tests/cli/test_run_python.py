"""`sluice.run` on a real Kafka and Spark, without Dagster, followed by commands."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import sluice as package
from sluice.pipelines.errors import FeedError, SetupError, UsageError
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.liveness import now
from sluice.resources.local import java
from sluice.resources.local.java import INSTALL_HINT
from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import Sluice

FEED = "kafka: {{bootstrap: '{kafka}'}}\ntopics: {topic}\nstart: earliest\ngroup: g-{topic}\n"
_LISTING = (
    "import json, sys; from sluice.cli.main import main; code = main(sys.argv[2:]);"
    " open(sys.argv[1], 'w').write(json.dumps(sorted(sys.modules))); sys.exit(code)"
)
"""A script that runs a command, and writes the names of the modules that it imported."""


@pytest.mark.slow
def test_run_without_dagster_does_not_import_dagster(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
    topic = f"orders-{secrets.token_hex(4)}"
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka=kafka.bootstrap, topic=topic))
    there = ("--bootstrap", kafka.bootstrap, "--create", "--partitions", "2", "--seed", "7", "--json")
    sent = sluice("produce", "orders", "-n", "1000", *there).document

    def run_apart(*arguments: str) -> tuple[int, str, set[str]]:
        listed = project / "modules.json"
        command = [sys.executable, "-c", _LISTING, str(listed), "run", "orders", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout or done.stderr, set(json.loads(listed.read_text()))

    code, out, imported = run_apart("--no-dagster", "--engine", "processes", "--json")
    ((run,),) = [feed["runs"] for feed in json.loads(out)["feeds"]]
    assert (code, sum(b["landed"] for b in run["batches"])) == (0, sent["committed"])
    assert run["committed"]["status"] == "committed"
    assert not {m.split(".")[0] for m in imported} & {"dagster", "pyspark", "sqlalchemy"}
    assert not (project / ".sluice" / "dagster").exists()

    code, out, _ = run_apart("--no-dagster", "--json", "--window", show_window(now() // HOUR * HOUR))
    assert (code, json.loads(out)["error"]) == (75, "WindowOpen")
    (project / "fleet.yaml").write_text("scheduler: none\n")
    code, out, imported = run_apart("--skip-to", "latest", "--reason", "nothing is pending")
    assert (code, "dagster" in imported) == (0, False)
    (status,) = sluice("status", "orders", "--json").document["feeds"]
    assert (status["lag"], status["uncommitted"]) == (0, 0)
    assert f"run {run['run'][5:13]} without a scheduler" in " ".join(sluice("status", "orders").out.split())
    audit = sluice("audit", "orders", "--rescan", "--json").document
    assert (audit["reconciled"], audit["compared"]) == (True, sent["committed"])


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("default_engine")
def test_each_batch_names_its_engine(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
    topic = f"orders-{secrets.token_hex(4)}"
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka=kafka.bootstrap, topic=topic))
    for options, engine in (((), "Spark local["), (("--engine", "processes"), "processes of this machine")):
        sluice("produce", "orders", "-n", "100", "--bootstrap", kafka.bootstrap, "--create")
        command = [str(Path(sys.executable).with_name("sluice")), "run", "orders", "--no-dagster", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=project)
        assert engine in " ".join(done.stdout.split())
    lake = project / ".sluice" / "lake" / "_sluice" / "orders" / "log"
    entries = [json.loads(path.read_text()) for path in sorted(lake.glob("*.json"))]
    spark, processes = (e["traffic"]["engines"][0] for e in entries if e["kind"] == "publish")
    assert (spark["kind"], spark["application"].startswith("local-")) == ("spark", True)
    assert processes == {"kind": "processes", "master": "", "application": "", "page": ""}
    assert "Spark local[" in " ".join(sluice("status", "orders").out.split())
    sluice("report", "orders", "--output", str(project / "report.html"))
    assert "processes of this machine" in (project / "report.html").read_text()


@pytest.mark.usefixtures("default_engine")
def test_missing_java_is_an_error_with_both_remedies(
    project: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none() -> Path:
        raise SetupError("no Java 17 or newer on this machine", remedy=INSTALL_HINT)

    monkeypatch.setattr(java, "find_java", find_none)
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka="127.0.0.1:9", topic="orders"))
    refused = sluice("run", "orders", "--no-dagster", "--json")
    assert (refused.code, refused.document["message"]) == (2, "no Java 17 or newer on this machine")
    remedy = refused.document["remedy"]
    assert remedy == f"{INSTALL_HINT}; or land without Spark: `engine: processes` in the feed or in fleet.yaml"


@pytest.mark.spark
@pytest.mark.slow
def test_runs_without_dagster_land_records_and_pass_the_audit(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
    topic = f"orders-{secrets.token_hex(4)}"
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka=kafka.bootstrap, topic=topic))
    there = ("--bootstrap", kafka.bootstrap, "--create", "--partitions", "2", "--seed", "7", "--json")
    sent = sluice("produce", "orders", "-n", "3000", "--transactional", "--aborted", "20%", *there).document
    (project / "feeds" / "away.yaml").write_text(
        "kafka: {bootstrap: '127.0.0.1:9', bootstrap_timeout_ms: 300}\ntopics: none\nstart: earliest\n"
    )

    stages = dict[str, list[str]]()
    results = package.run(
        ["away", "orders"], on_progress=lambda feed, progress: stages.setdefault(feed, []).append(progress.stage)
    )
    away, orders = results["away"], results["orders"]
    assert (type(away.error).__name__, away.landed) == ("KafkaUnavailable", None)
    assert orders.error is None
    assert sum(b.counts.landed for b in orders.batches) == sent["committed"]
    assert orders.committed
    assert str(orders.committed.status) == "committed"
    assert {"plan", "prove", "publish", "commit"} <= set(stages["orders"])
    assert not (project / ".sluice" / "dagster").exists()

    again = package.run({"orders": Request(RequestKind.CATCH_UP)})["orders"]
    assert (again.error, again.batches) == (None, ())
    assert again.committed
    assert str(again.committed.status) == "unchanged"
    pending = package.run("orders", show_window(now() // HOUR * HOUR))["orders"]
    assert type(pending.error).__name__ == "WindowOpen"
    assert pending.open_windows

    audit = sluice("audit", "orders", "--rescan", "--json").document
    assert (audit["reconciled"], audit["compared"]) == (True, sent["committed"])
    ran = sluice("run", "orders", "--json")
    assert (ran.code, ran.run["batches"]) == (0, [])
    (status,) = sluice("status", "orders", "--json").document["feeds"]
    assert (status["lag"], status["uncommitted"]) == (0, 0)


def test_invalid_call_runs_nothing(project: Path) -> None:
    with pytest.raises(FeedError):
        package.run(["orders", "none"])
    with pytest.raises(UsageError, match="without `windows`"):
        package.run("orders", to="2026-11-20T14")
    with pytest.raises(UsageError, match="together with windows"):
        package.run({"orders": Request(RequestKind.CATCH_UP)}, "2026-11-20T14")
    with pytest.raises(UsageError, match="'2026-11-20T14' of orders is no request"):
        package.run({"orders": "2026-11-20T14"})  # type: ignore[dict-item]
