"""Real clusters for the integration tests, and topics that no two tests share.

The fixtures `kafka`, `kafka3`, `secured` and `zookeeper` mark a test with `kafka`; a cluster starts when the first test
requests it and is deleted at the end with its data. All workers share `kafka`, `registry` and `s3_store`. The other
clusters, which tests stop and change, last for a module: an idle broker takes more than a CPU second a minute.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from sluice.pipelines.model.receipts import ENGINE, EngineKind
from sluice.pipelines.records.compiled import library
from sluice.resources.kafka.connection.zero_copy_transport import ClosingClient
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from tests.clouds import CloudStore, run_azurite, run_google
from tests.shared_servers import SharedServers, share_servers
from tests.stores import Store, share_store
from tests.zookeepers import LocalZooKeeper

# An xdist worker's main module has neither file nor spec. Spark mistakes that for one of its doctests, and ends
# the process when Great Expectations imports it.
if sys.modules["__main__"].__spec__ is None and not hasattr(sys.modules["__main__"], "__file__"):
    sys.modules["__main__"].__spec__ = ModuleSpec("__main__", None)

# Nothing is timed: a busy machine fails no property. `make quick` shows a fifth of the examples: tests.examples.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=20)
settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" not in os.environ and library.find_library() is None:  # sources changed since `make setup`
    subprocess.run([sys.executable, Path(__file__).parents[1] / "infra" / "loops.py"], check=True)
    library.find_library.cache_clear()

# A shell that runs pytest in the background ignores SIGINT, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


class _PatientClient(ClosingClient):
    """A client of kafka-python for tests, which often connect to dead brokers.

    kafka-python leaves a socket to the garbage collector when it finds no broker, or is closed with unsent bytes. Our
    own connections do not, so a socket that Sluice leaves open fails a test. And a transactional producer that lost a
    leader polls without a pause until it has another: one such thread takes a core from all other tests.
    """

    _at_once = 0

    def poll(self, timeout_ms: float | None = None, future: Any = None) -> None:
        began = time.monotonic()
        super().poll(timeout_ms, future)
        self._at_once = self._at_once + 1 if time.monotonic() - began < 0.002 else 0
        if self._at_once > 100:
            time.sleep(0.01)


for _kind in (KafkaAdminClient, KafkaConsumer, KafkaProducer):
    _kind.DEFAULT_CONFIG["kafka_client"] = _PatientClient


# Most tests are about other things than the engine, and start no JVM. Files of main paths use `default_engine`.
os.environ.setdefault(ENGINE, EngineKind.PROCESSES)


@pytest.fixture(scope="module")
def default_engine() -> Iterator[None]:
    """Run feeds of this module on the engine that users get: Spark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENGINE)
        yield


@pytest.fixture(autouse=True, scope="module")
def own_spark() -> Iterator[None]:
    """A module's Spark has its own settings: the next module starts another."""
    yield
    if "pyspark" in sys.modules and (running := sys.modules["pyspark"].SparkContext._active_spark_context):
        running.stop()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # PySpark's own outlives its session


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, and exempt its million lasting objects from later ones.

    It took a fifth of the collection's CPU time in each worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_CLUSTERS = {"kafka", "kafka3", "secured", "fresh_topic", "zookeeper", "own_server"}
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
# Workers share brokers: each has its own numbers.
_numbers = itertools.count(1 + 10_000 * int(_WORKER.removeprefix("gw") or 0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of Kafka, and put files of slow or many tests first: no worker runs a long one alone at the end."""
    weights = Counter[Path]()
    for item in items:
        if _CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("kafka")
        weights[item.path] += 20 if any(map(item.get_closest_marker, ("slow", "spark"))) else 1
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    own = tmp_path_factory.getbasetemp()
    with share_servers((own.parent if _WORKER else own) / "shared") as servers:
        yield servers


@pytest.fixture(scope="session")
def kafka(shared_servers: SharedServers) -> LocalKafka:
    """One broker for all workers: leave its topics and groups alone unless they are yours."""
    root = shared_servers.folder / "kafka"

    def attach() -> LocalKafka | None:
        return cluster if (root / "cluster.json").exists() and (cluster := LocalKafka.attach(root)).running else None

    return shared_servers.start("kafka", lambda: LocalKafka(root, keep=False), attach)


@pytest.fixture(scope="session")
def registry(shared_servers: SharedServers) -> LocalRegistry:
    """A real registry for all workers: each test uses its own subjects."""
    server = LocalRegistry(shared_servers.folder / "registry", keep=False)
    return shared_servers.start("registry", lambda: server, lambda: server if server.running else None)


@pytest.fixture(scope="module")
def kafka3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """Three brokers for a module; a test that kills one starts it again."""
    with LocalKafka(tmp_path_factory.mktemp("kafka3"), brokers=3, keep=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """One secured broker for a module; a test that changes its certificates restores them."""
    lax = {"ssl.allow.san.changes": "true"}  # tests give a broker a certificate with another host's name
    with LocalKafka(tmp_path_factory.mktemp("secured"), keep=False, secure=True, settings=lax) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalZooKeeper]:
    """One ZooKeeper for a module: leave its groups alone unless they are yours."""
    server = LocalZooKeeper(tmp_path_factory.mktemp("zookeeper")).start()
    yield server
    server.throw_away()


@pytest.fixture(scope="session")
def s3_store(shared_servers: SharedServers) -> Store:
    """A bucket for all workers; each lake in it has a unique prefix."""
    return share_store(shared_servers)


@pytest.fixture(scope="session")
def azure_store() -> Iterator[CloudStore]:
    """A container of Azurite for the whole session; each lake in it has a unique prefix."""
    with run_azurite() as container:
        yield container


@pytest.fixture(scope="session")
def google_store() -> Iterator[CloudStore]:
    """A bucket of fake-gcs-server for the whole session; each lake in it has a unique prefix."""
    with run_google() as bucket:
        yield bucket


def _restore_leaders(admin: KafkaAdminClient, topic: str, leaders: Mapping[int, int]) -> None:
    """Wait until the first replica leads each partition: one that was down when the topic was created returns as a
    follower."""
    until = time.monotonic() + 60
    while misled := _find_misled(admin, topic, leaders):
        assert time.monotonic() < until, f"{topic}: led by {misled}, not {leaders}"
        admin.elect_leaders(0, {topic: sorted(misled)}, raise_errors=False)
        time.sleep(0.5)


def _find_misled(admin: KafkaAdminClient, topic: str, leaders: Mapping[int, int]) -> dict[int, int]:
    (description,) = admin.describe_topics([topic])
    current = {p["partition_index"]: p["leader_id"] for p in description["partitions"]}
    return {p: leader for p, leader in current.items() if leader != leaders[p]}


@pytest.fixture
def fresh_topic(request: pytest.FixtureRequest) -> Callable[..., str]:
    """A function that creates a topic of a unique name and returns it once every partition has a leader.

    fresh_topic(partitions=3, config={"cleanup.policy": "compact"}, cluster=kafka3, name="orders")

    Without `cluster` it is created on `kafka`; records are never deleted by age unless `config` sets it.
    """

    def create(
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        cluster: LocalKafka | None = None,
        name: str = "topic",
        assignments: Mapping[int, list[int]] | None = None,
    ) -> str:
        where: LocalKafka = cluster or request.getfixturevalue("kafka")
        unique = f"{name}-{next(_numbers)}"
        wanted = {"configs": {"retention.ms": "-1", **(config or {})}}
        shape = {"assignments": dict(assignments)} if assignments else {"num_partitions": partitions}
        with KafkaAdminClient(bootstrap_servers=where.bootstrap, **where.client()) as admin:
            admin.create_topics({unique: wanted | shape}, wait_for_metadata=True)
            if assignments:
                _restore_leaders(admin, unique, {p: replicas[0] for p, replicas in assignments.items()})
        return unique

    return create
