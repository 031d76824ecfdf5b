"""The brokers of infra/compose, without containers: three real ones by its settings and by what its script signs.

What differs is where they are: on loopback, each on ports of its own, with folders of the test's own.
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
from tests.integration.support import rows, run
from tests.resources.kafka.tools import free_port, until

pytestmark = [pytest.mark.soak, pytest.mark.kafka]
SERVICES = yaml.safe_load((INFRA / "compose/compose.yaml").read_text())["services"]
BROKERS = [name for name in SERVICES if name.startswith("kafka-")]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    script = shutil.copy(INFRA / "compose/certificates.sh", tmp_path)
    for _ in range(2):  # the second time all is there
        subprocess.run([script], check=True)
    return tmp_path / "private"


def properties(name: str, private: Path, ports: dict[tuple[str, int], int]) -> str:
    """The broker's settings as its image makes them of the environment: KAFKA_A_B=c is a.b=c."""
    lines = {
        key.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for key, value in SERVICES[name]["environment"].items()
        if key.startswith("KAFKA_")
    }
    lines["log.dirs"] = str(private.parent / name)
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    text = re.sub(r"(kafka-\d):(\d+)", lambda m: f"127.0.0.1:{ports[m[1], int(m[2])]}", text)
    text = re.sub(r"://:(\d+)", lambda m: f"://127.0.0.1:{ports[name, int(m[1])]}", text)
    return text.replace("/etc/kafka/secrets", str(private / "brokers"))


@contextmanager
def brokers(private: Path) -> Iterator[str]:
    """All three: the addresses that clients are given."""
    ports = {(name, port): free_port() for name in BROKERS for port in (9093, 9094)}
    java, tools = Java.of_local_kafka(), LocalKafka(private.parent / "tools")
    with ExitStack() as stack:
        for name in BROKERS:
            config = private.parent / f"{name}.properties"
            config.write_text(properties(name, private, ports))
            cluster = SERVICES[name]["environment"]["CLUSTER_ID"]
            formatted = tools.tool("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config))
            assert formatted.returncode == 0, formatted.stderr
            log = stack.enter_context((private.parent / f"{name}.log").open("wb"))
            command = [java.java, "-Xmx512m", "-cp", f"{java.jars}/*", "kafka.Kafka", str(config)]
            broker = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(broker.wait, 60)
            stack.callback(broker.kill)
        yield ",".join(f"127.0.0.1:{ports[name, 9093]}" for name in BROKERS)


def client(private: Path, user: str) -> dict[str, Any]:
    """kafka-python's settings for a user: both come by certificate."""
    one = private / ("sluice" if user == "sluice" else "brokers")
    key = one / ("sluice.key" if user == "sluice" else f"{user}.pem")
    files = {"ssl_cafile": str(one / "ca.pem"), "ssl_certfile": str(one / f"{user}.pem"), "ssl_keyfile": str(key)}
    return {"security_protocol": "SSL", **files}


def test_nobody_else_on_the_host_gets_at_the_keys(private: Path) -> None:
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "ca.key").stat().st_mode) == 0o600
    assert {p.name for p in (private / "sluice").iterdir()} == {"ca.pem", "sluice.pem", "sluice.key"}


def test_brokers_by_these_settings_let_in_who_has_a_right(private: Path, tmp_path: Path) -> None:
    with brokers(private) as bootstrap:
        admin = client(private, "admin")
        topic(bootstrap, admin)
        with closing(KafkaProducer(bootstrap_servers=bootstrap, acks="all", **admin)) as producer:
            for sent in [producer.send("orders", b"%d" % n) for n in range(100)]:
                sent.get(timeout=60)
        path = tmp_path / "orders.yaml"
        login = {"bootstrap": bootstrap, **client(private, "sluice")}
        path.write_text(yaml.safe_dump({"kafka": login, "topics": "orders", "start": "earliest", "group": "g"}))
        feed = load_feed(path, {})
        with pytest.raises(NotAuthorized):
            run(feed)
        grant(bootstrap, admin, feed)
        run(feed)
        assert len(rows(feed)) == 100
        nobody = {**client(private, "sluice"), "ssl_certfile": None, "ssl_keyfile": None}
        with pytest.raises(KafkaError):
            KafkaAdminClient(bootstrap_servers=bootstrap, bootstrap_timeout_ms=5000, **nobody)


def topic(bootstrap: str, login: dict[str, Any]) -> None:
    """Once all three brokers are there: the defaults ask for a copy on each."""

    def all_there() -> bool:
        try:
            with closing(KafkaAdminClient(bootstrap_servers=bootstrap, **login)) as asked:
                return len(asked.describe_cluster()["brokers"]) == len(BROKERS)
        except KafkaError:
            return False

    until(all_there, 180)
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap, **login)) as made:
        made.create_topics({"orders": {"num_partitions": 3, "replication_factor": -1}}, wait_for_metadata=True)
        (described,) = made.describe_topics(["orders"])
    assert {len(p["replica_nodes"]) for p in described["partitions"]} == {3}


def grant(bootstrap: str, login: dict[str, Any], feed: Any) -> None:
    """What `sluice acls` says, to the principal that the certificate names."""
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
