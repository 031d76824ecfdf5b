"""The brokers of infra/compose, without containers: three real brokers with its settings and its signed certificates.

Only the addresses and folders differ: the brokers listen on loopback, each on its own ports, in the test's folders.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaError

from sluice.pipelines.errors import NotAuthorized
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import rights_of
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.tools import Java
from tests.deployment import INFRA
from tests.integration.support import read_rows, run
from tests.resources.kafka.tools import free_port, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.kafka]
SERVICES = yaml.safe_load((INFRA / "compose/compose.yaml").read_text())["services"]
BROKERS = [name for name in SERVICES if name.startswith("kafka-")]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    script = shutil.copy(INFRA / "compose/certificates.sh", tmp_path)
    for _ in range(2):  # the second time all files exist
        subprocess.run([script], check=True)
    return tmp_path / "private"


def build_properties(name: str, private: Path, ports: dict[tuple[str, int], int]) -> str:
    """Build the broker's settings from the environment as its image does: KAFKA_A_B=c becomes a.b=c."""
    lines = {
        key.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for key, value in SERVICES[name]["environment"].items()
        if key.startswith("KAFKA_")
    }
    lines["log.dirs"] = str(private.parent / name)
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    text = re.sub(r"(kafka-\d):(\d+)", lambda m: f"127.0.0.1:{ports[m[1], int(m[2])]}", text)
    text = re.sub(r"://:(\d+)", lambda m: f"://127.0.0.1:{ports[name, int(m[1])]}", text)
    return text.replace("/etc/kafka/secrets", str(private / name))


@contextmanager
def run_brokers(private: Path) -> Iterator[str]:
    """Run all three brokers, and yield their bootstrap addresses."""
    ports = {(name, port): free_port() for name in BROKERS for port in (9093, 9094)}
    java, tools = Java.of_local_kafka(), LocalKafka(private.parent / "tools")
    with ExitStack() as stack:
        for name in BROKERS:
            config = private.parent / f"{name}.properties"
            config.write_text(build_properties(name, private, ports))
            cluster = SERVICES[name]["environment"]["CLUSTER_ID"]
            formatted = tools.tool("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config))
            assert formatted.returncode == 0, formatted.stderr
            log = stack.enter_context((private.parent / f"{name}.log").open("wb"))
            command = [java.java, "-Xmx512m", "-cp", f"{java.jars}/*", "kafka.Kafka", str(config)]
            broker = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(broker.wait, 60)
            stack.callback(broker.kill)
        yield ",".join(f"127.0.0.1:{ports[name, 9093]}" for name in BROKERS)


def build_client_settings(private: Path, user: str) -> dict[str, Any]:
    """Build kafka-python's settings for a user; both users authenticate by certificate."""
    folder = private / user
    key = folder / ("sluice.key" if user == "sluice" else f"{user}.pem")
    files = {"ssl_cafile": str(folder / "ca.pem"), "ssl_certfile": str(folder / f"{user}.pem"), "ssl_keyfile": str(key)}
    return {"security_protocol": "SSL", **files}


def test_other_users_of_the_host_cannot_read_the_keys(private: Path) -> None:
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "ca.key").stat().st_mode) == 0o600
    keys = {p.relative_to(private).as_posix() for p in private.glob("*/*") if "KEY" in p.read_text()}
    assert keys == {"sluice/sluice.key", "admin/admin.pem", *(f"{name}/{name}.pem" for name in BROKERS)}


def test_configured_brokers_admit_only_authorized_clients(private: Path, tmp_path: Path) -> None:
    with run_brokers(private) as bootstrap:
        admin = build_client_settings(private, "admin")
        create_topic(bootstrap, admin)
        with closing(KafkaProducer(bootstrap_servers=bootstrap, acks="all", **admin)) as producer:
            for sent in [producer.send("orders", b"%d" % n) for n in range(100)]:
                sent.get(timeout=60)
        path = tmp_path / "orders.yaml"
        login = {"bootstrap": bootstrap, **build_client_settings(private, "sluice")}
        path.write_text(yaml.safe_dump({"kafka": login, "topics": "orders", "start": "earliest", "group": "g"}))
        feed = load_feed(path, {})
        with pytest.raises(NotAuthorized):
            run(feed)
        grant(bootstrap, admin, feed)
        run(feed)
        assert len(read_rows(feed)) == 100
        anonymous = {**build_client_settings(private, "sluice"), "ssl_certfile": None, "ssl_keyfile": None}
        with pytest.raises(KafkaError):
            KafkaAdminClient(bootstrap_servers=bootstrap, bootstrap_timeout_ms=5000, **anonymous)


def create_topic(bootstrap: str, login: dict[str, Any]) -> None:
    """Create the topic once all three brokers are up: the defaults require a replica on each."""

    def is_complete() -> bool:
        try:
            with closing(KafkaAdminClient(bootstrap_servers=bootstrap, **login)) as admin:
                return len(admin.describe_cluster()["brokers"]) == len(BROKERS)
        except KafkaError:
            return False

    wait_until(is_complete, 180)
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap, **login)) as admin:
        admin.create_topics({"orders": {"num_partitions": 3, "replication_factor": -1}}, wait_for_metadata=True)
        (described,) = admin.describe_topics(["orders"])
    assert {len(p["replica_nodes"]) for p in described["partitions"]} == {3}


def grant(bootstrap: str, login: dict[str, Any], feed: Any) -> None:
    """Grant the rights of `sluice acls` to the principal that the certificate names."""
    from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePattern, ResourceType

    needed = [
        ACL(
            "User:CN=sluice",
            "*",
            ACLOperation[r.operation],
            ACLPermissionType.ALLOW,
            ResourcePattern(ResourceType[r.kind.name], r.name, ACLResourcePatternType[r.pattern.name]),
        )
        for r in rights_of(feed)
        if not r.optional
    ]
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap, **login)) as admin:
        admin.create_acls(needed)
