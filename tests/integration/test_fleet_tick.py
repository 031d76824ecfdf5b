"""The requests of a tick over 200 feeds with nothing pending, on a real Kafka and a local S3 server."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kafka import KafkaProducer

from bench.counting import Counting
from sluice.assets.factory import windows_of
from sluice.assets.instance.instance import open_instance
from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.window_scheduler import FleetScheduler
from sluice.assets.specs.feed_files import read_feeds, recall_feeds
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.util.units import DAY
from sluice.resources.local import events
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_s3 import LocalS3
from sluice.resources.project import Project
from tests.integration.support import SLUICE

pytestmark = [pytest.mark.soak, pytest.mark.kafka, pytest.mark.spark, pytest.mark.usefixtures("default_engine")]

FEEDS, PARTITIONS, RECORDS = 200, 3, 60
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Servers:
    """A Kafka behind a counting proxy, and a store that counts its own requests."""

    kafka: Counting
    store: LocalS3

    @property
    def requests(self) -> tuple[Counter[str], Counter[str]]:
        """The numbers of requests to Kafka and to S3 until now, by kind."""
        return Counter(self.kafka.seen), self.store.requests()


@contextmanager
def run_servers(folder: Path) -> Iterator[Servers]:
    def find_broker() -> tuple[str, int]:
        host, port = LocalKafka.attach(folder).bootstrap.rsplit(":", 1)
        return host, int(port)

    with ExitStack() as stack:
        counting = stack.enter_context(closing(Counting(find_broker)))
        address = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{counting.port}"}
        stack.enter_context(LocalKafka(folder, keep=False, settings=address))
        yield Servers(counting, stack.enter_context(LocalS3()))


def build_project(root: Path, servers: Servers) -> Project:
    """Write feeds of one topic, each with its own group, on the shared schedule."""
    bootstrap = f"127.0.0.1:{servers.kafka.port}"
    events.create(KafkaSettings(bootstrap=bootstrap), ["orders"], PARTITIONS)
    s3 = {
        "endpoint": servers.store.endpoint,
        "region": servers.store.settings.region,
        "access_key_id": "local",
        "secret_access_key": "local",
    }
    (root / "feeds").mkdir(parents=True)
    for number in range(FEEDS):
        settings = {
            "kafka": {"bootstrap": bootstrap},
            "topics": "orders",
            "group": f"fleet-{number}",
            "start": "earliest",
            "window": "1d",
        }
        path = root / "feeds" / f"orders_{number:03}.yaml"
        path.write_text(json.dumps(settings | {"lake": servers.store.lake, "s3": s3}))
    return Project(root)


def produce(servers: Servers) -> None:
    """Produce records of the day before yesterday."""
    stamp = time.time_ns() // 1_000_000 - 2 * DAY
    with closing(KafkaProducer(bootstrap_servers=f"127.0.0.1:{servers.kafka.port}")) as producer:
        for number in range(PARTITIONS * RECORDS):
            producer.send("orders", b"x", partition=number % PARTITIONS, timestamp_ms=stamp)
        producer.flush()


def run_all(project: Project) -> Mapping[str, object]:
    command = [*SLUICE, "run", "--all", "--project", str(project.root), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return dict(json.loads(process.stdout))


def test_tick_makes_at_most_two_s3_and_no_kafka_requests_per_feed(tmp_path: Path) -> None:
    with run_servers(tmp_path / "kafka") as servers:
        project = build_project(tmp_path / "shop", servers)
        produce(servers)
        document = run_all(project)
        landed = [sum(b["landed"] for run in feed["runs"] for b in run["batches"]) for feed in document["feeds"]]  # type: ignore[attr-defined]
        assert landed == [PARTITIONS * RECORDS] * FEEDS
        files = read_feeds(project, {})
        windows = windows_of(files.feeds, recall_feeds(files)[0])
        with open_instance(project) as instance:
            session = RunSession(project)
            for tick in (FleetScheduler(session, windows, SHARED), quiet := FleetScheduler(session, windows, SHARED)):
                kafka, s3 = servers.requests
                assert tick.list_requests(instance) == {}
                assert tick.news == []
                assert tick.checked == FEEDS
                now = servers.requests
                kafka_requests, s3_requests = now[0] - kafka, now[1] - s3
                print(f"a tick of {FEEDS} feeds: Kafka {dict(kafka_requests)}, S3 {dict(s3_requests)}")
            assert tick is quiet
            assert not kafka_requests
            assert sum(s3_requests.values()) <= 2 * FEEDS, s3_requests
