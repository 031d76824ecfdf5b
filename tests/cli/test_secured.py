"""The commands for the project's own secured Kafka: start, grant, renew; and the demo with it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from kafka import KafkaConsumer

from sluice.pipelines.errors import SetupError
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.local.secured import left
from tests.cli.conftest import Sluice
from tests.integration.support import SLUICE

AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


@pytest.fixture
def ours(project: Path) -> Iterator[Path]:
    """A project whose feed names no Kafka; a Kafka that a test started is stopped at the end."""
    (project / "feeds" / "orders.yaml").write_text("topics: orders\nstart: earliest\n")
    yield project
    if (project / ".sluice" / "kafka" / "cluster.json").exists():
        LocalKafka.attach(project / ".sluice" / "kafka").stop()
    LocalRegistry(project / ".sluice" / "registry").stop()


@pytest.mark.kafka
def test_rights_are_missing_until_granted_and_certificates_are_renewed(ours: Path, sluice: Sluice) -> None:
    assert sluice("kafka", "grant", "orders", "--json").code == 2
    result = sluice("kafka", "start", "--secure")
    assert result.code == 0, result.err
    assert "sasl_mechanism" in result.out
    assert sluice("produce", "orders", "-n", "100").code == 0
    refused = sluice("plan", "orders", "--json")
    assert refused.document["error"] in ("NotAuthorized", "UnknownTopic")
    command = find_commands(refused.document["remedy"])[-1]
    assert command == ["kafka", "grant", "*"], refused.document["remedy"]
    granted = sluice(*command, "--json").document
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
@pytest.mark.slow
def test_local_kafka_and_registry_start_by_the_printed_commands(ours: Path, sluice: Sluice) -> None:
    (command,) = find_commands(sluice("plan", "orders", "--json").document["remedy"])
    assert [command] == find_commands(sluice("kafka", "status").out)
    assert sluice(*command).code == 0
    assert list_topics(ours) == set()
    assert sluice("plan", "orders", "--json").document["error"] == "UnknownTopic"
    assert sluice("kafka", "stop").code == 0
    refused = sluice("plan", "orders", "--json").document
    assert (refused["error"], find_commands(refused["remedy"])) == ("KafkaUnavailable", [command])
    assert sluice(*command).code == 0
    assert sluice("produce", "orders", "-n", "20").code == 0
    assert "orders" in list_topics(ours)

    avro = "topics: events\nstart: earliest\nformat: avro\nschema_file: events.avsc\nregistry:\n"
    (ours / "feeds" / "events.yaml").write_text(avro)
    (pull,) = find_commands(sluice("run", "events", "--json").document["remedy"])
    (command,) = find_commands(sluice(*pull, "--json").document["remedy"])
    with pytest.raises(SetupError) as missing:
        _ = LocalRegistry(ours / ".sluice" / "registry").url
    assert [command] == find_commands(missing.value.remedy)
    assert sluice(*command).code == 0
    url = sluice("kafka", "status", "--json").document["registry"]
    with SchemaRegistryClient({"url": url, "timeout": 20}) as client:
        assert client.get_subjects() == []
        client.register_schema("events-value", Schema(json.dumps(AVRO), "AVRO"))
    assert sluice(*pull).code == 0
    assert json.loads((ours / "events.avsc").read_text()) == AVRO
    assert sluice("kafka", "stop").code == 0


@pytest.mark.kafka
def test_sample_events_go_to_the_local_kafka_by_the_printed_command(ours: Path, sluice: Sluice) -> None:
    feed = ours / "feeds" / "orders.yaml"
    feed.write_text("kafka: {bootstrap: '127.0.0.1:9'}\n" + feed.read_text())
    refused = sluice("produce", "orders", "-n", "20", "--json")
    assert refused.document["error"] == "NotLocal"
    assert "leave `kafka` out of the feed" in refused.document["remedy"]
    feed.write_text(feed.read_text().partition("\n")[2])
    assert sluice(*find_commands(refused.document["remedy"])[1]).code == 0
    assert sluice("produce", "orders", "-n", "20").code == 0
    assert "orders" in list_topics(ours)


def find_commands(text: str) -> list[list[str]]:
    return [shlex.split(command) for command in re.findall(r"sluice ([^;,`\n]+)", text)]


def list_topics(project: Path) -> set[str]:
    """Returns the topics that another client lists in the project's own Kafka."""
    with closing(KafkaConsumer(bootstrap_servers=LocalKafka.attach(project / ".sluice" / "kafka").bootstrap)) as client:
        return {topic for topic in client.topics() if not topic.startswith("_")}


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
