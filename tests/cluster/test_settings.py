"""Settings of a feed or machine for tasks on a cluster: a user's module, a rack, a limit for each broker.

Three brokers in three racks. Sluice authenticates with tokens, which a user's class makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from bench.spark_cluster import LocalSpark
from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.resources.local import properties
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from tests.cluster.conftest import RACK, configure_spark, land_feed, produce
from tests.integration.support import consume_topic, read_rows
from tests.resources.kafka.tools import free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
SETTINGS = {
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    # Settings are equal for all brokers; the differences are in a file in each broker's folder.
    "config.providers": "file",
    "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
    "broker.rack": "${file:rack.properties:rack}",
    "listener.name.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
    "listener.name.tokens.oauthbearer.sasl.jaas.config": f"{OAUTH} required;",
}
PROVIDER = '''"""Tokens that nobody signed (RFC 7515, appendix A.5)."""

import base64
import json
import time

from kafka.net.sasl.oauth import AbstractTokenProvider


class Provider(AbstractTokenProvider):
    def token(self):
        now = int(time.time())
        parts = ({"alg": "none"}, {"sub": "ingest", "iat": now, "exp": now + 600})
        return "".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") + "." for p in parts)
'''


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user's package on this process's path."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "company").mkdir()
    (folder / "company" / "__init__.py").write_text("")
    (folder / "company" / "tokens.py").write_text(PROVIDER)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalKafka, str]]:
    """The brokers, and the addresses of their listeners for tokens."""
    root = tmp_path_factory.mktemp("racks") / "kafka"
    ports = {broker: free_port() for broker in (1, 2, 3)}
    for broker in ports:
        (root / f"node-{broker}").mkdir(parents=True)
        (root / f"node-{broker}" / "rack.properties").write_text(f"rack=rack-{broker}\n")
    original_listeners = properties.plain_listeners

    def add_listener(node: properties.Node) -> dict[str, str]:
        listeners_of_node = original_listeners(node)
        address = f",TOKENS://127.0.0.1:{ports[node.id]}"
        listeners_of_node["listeners"] += address
        listeners_of_node["advertised.listeners"] += address
        listeners_of_node["listener.security.protocol.map"] += ",TOKENS:SASL_PLAINTEXT"
        return listeners_of_node

    with (
        patch.object(properties, "plain_listeners", add_listener),
        LocalKafka(root, brokers=3, keep=False, settings=SETTINGS) as cluster,
    ):
        yield cluster, ",".join(f"127.0.0.1:{port}" for port in ports.values())


def write_feed(root: Path, lines: dict[str, str]) -> Feed:
    path = root / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
    return load_feed(path, {})


@pytest.mark.usefixtures("company")
@pytest.mark.parametrize("how", ["named in the feed", "packed by hand"])
def test_user_module_rack_and_broker_limit_reach_executors(
    racks: tuple[LocalKafka, str], cluster: LocalSpark, fresh_topic: Callable[..., str], tmp_path: Path, how: str
) -> None:
    kafka, bootstrap = racks
    topic = fresh_topic(cluster=kafka, assignments={0: [1, 2, 3], 1: [2, 3, 1], 2: [3, 1, 2], 3: [1, 3, 2]})
    produce(kafka, topic, 4000)
    more = {"modules": "[company.tokens]"}
    if how == "packed by hand":
        archive = tmp_path / "pack.tar.gz"
        assert main(["pack", "--with", "company.tokens", "--output", str(archive)]) == 0
        more = {"environment": str(archive)}
    (tmp_path / "events").mkdir()
    events = {"enabled": "true", "dir": f"file:{tmp_path}/events", "compress": "false", "rolling.enabled": "false"}
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    login |= {"bootstrap": bootstrap, "sasl_oauth_token_provider": "company.tokens:Provider"}
    feed = write_feed(
        tmp_path,
        {
            "kafka": json.dumps(login),
            "topics": topic,
            "start": "earliest",
            "group": f"g-{topic}",
            "limits": "{slice_bytes: 8KiB, task_bytes: 16KiB}",
            "fetch": "{tasks_per_broker: 1}",
            **configure_spark(cluster, conf={f"spark.eventLog.{k}": v for k, v in events.items()}, **more),
        },
    )
    (batch,) = land_feed(feed).batches
    engine.end()
    assert read_rows(feed) == consume_topic(kafka, topic)
    assert len(batch.plan.tasks) > 3
    assert count_tasks(tmp_path / "events") == [3], "one for each broker that leads"
    answered = {b.node: b.requests - b.empty for b in batch.traffic.brokers}
    assert {node for node, records in answered.items() if records} == {int(RACK[-1])}, "the leaders only send us on"


def count_tasks(folder: Path) -> list[int]:
    """Returns the number of Spark tasks of each batch, by Spark's event log."""
    (log,) = (p for p in folder.iterdir() if not p.name.startswith("."))
    jobs = [e for e in map(json.loads, log.read_text().splitlines()) if e["Event"] == "SparkListenerJobStart"]
    batches = [j for j in jobs if "batch" in j["Properties"].get("spark.job.description", "")]
    return [sum(stage["Number of Tasks"] for stage in j["Stage Infos"]) for j in batches]
