"""`sluice.run` on a real Kafka and Spark, without Dagster, and the command line afterwards."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import sluice as package
from sluice.pipelines.errors import FeedError, UsageError
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import Sluice

FEED = "kafka: {{bootstrap: '{kafka}'}}\ntopics: {topic}\nstart: earliest\ngroup: g-{topic}\n"


@pytest.mark.spark
@pytest.mark.slow
def test_two_runs_without_dagster_and_an_audit(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
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


def test_a_wrong_call_runs_nothing(project: Path) -> None:
    with pytest.raises(FeedError):
        package.run(["orders", "none"])
    with pytest.raises(UsageError, match="without `windows`"):
        package.run("orders", to="2026-11-20T14")
    with pytest.raises(UsageError, match="together with windows"):
        package.run({"orders": Request(RequestKind.CATCH_UP)}, "2026-11-20T14")
