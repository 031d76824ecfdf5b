"""The commands for the project's own secured Kafka: start, grant, renew; and the demo with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import left
from tests.cli.conftest import Sluice

SLUICE = [sys.executable, "-c", "import sys; from sluice.cli.entry import main; sys.exit(main())"]


@pytest.fixture
def ours(project: Path) -> Iterator[Path]:
    """A project whose feed names no Kafka; a Kafka that a test started is stopped at the end."""
    (project / "feeds" / "orders.yaml").write_text("topics: orders\nstart: earliest\n")
    yield project
    if (project / ".sluice" / "kafka" / "cluster.json").exists():
        LocalKafka.attach(project / ".sluice" / "kafka").stop()


@pytest.mark.kafka
def test_rights_are_missing_until_granted_and_certificates_are_renewed(ours: Path, sluice: Sluice) -> None:
    assert sluice("kafka", "grant", "orders", "--json").code == 2
    result = sluice("kafka", "start", "--secure")
    assert result.code == 0, result.err
    assert "sasl_mechanism" in result.out
    assert sluice("produce", "orders", "-n", "100").code == 0
    refused = sluice("plan", "orders", "--json")
    assert refused.document["error"] in ("NotAuthorized", "UnknownTopic")
    assert "sluice kafka grant" in refused.document["remedy"]
    granted = sluice("kafka", "grant", "orders", "--json").document
    assert {r["kind"] for r in granted["rights"]} == {"topic", "group", "transactional-id", "cluster"}
    assert sluice("plan", "orders", "--json").document["offsets"] == 100
    secure = ours / ".sluice" / "kafka" / "secure"
    before = {p.name: p.read_bytes() for p in secure.glob("*.pem")}
    assert sluice("kafka", "renew", "--json").code == 0
    after = {p.name: p.read_bytes() for p in secure.glob("*.pem")}
    assert {name for name in after if after[name] != before[name]} == {"broker-1.pem", "admin.pem", "sluice.pem"}
    assert left(after["broker-1.pem"]) > left(before["broker-1.pem"])
    assert sluice("plan", "orders", "--json").document["offsets"] == 100
    assert sluice("kafka", "stop").code == 0
    assert sluice("kafka", "renew").code == 0, "a stopped Kafka starts with the new certificates"


@pytest.mark.kafka
def test_unsecured_kafka_starts_without_feeds_and_refuses_grant_and_renew(ours: Path, sluice: Sluice) -> None:
    (ours / "feeds").rename(ours / "later")
    assert sluice("kafka", "status", "--json").code == 1
    assert sluice("kafka", "start").code == 0
    (ours / "later").rename(ours / "feeds")
    assert sluice("kafka", "status", "--json").document["answering"]
    for command in (["grant", "orders"], ["renew"]):
        result = sluice("kafka", *command, "--json")
        assert (result.code, result.document["error"]) == (2, "SetupError"), command
        assert result.document["remedy"]


@pytest.mark.soak
@pytest.mark.kafka
def test_secured_demo_passes_with_the_least_rights(tmp_path: Path) -> None:
    command = [*SLUICE, "demo", "--secure", "--records", "20000", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    project = Path(json.loads(done.stdout)["project"])
    kafka = LocalKafka.attach(project / ".sluice" / "kafka")
    assert kafka.secured is not None
    assert not any(b.running for b in kafka.status().brokers)
