"""What a tick of 200 feeds asks when nothing is pending, on a real Kafka and a server that speaks S3."""

from __future__ import annotations

import json
import subprocess
import sys
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

pytestmark = [pytest.mark.soak, pytest.mark.kafka, pytest.mark.spark]

FEEDS, PARTITIONS, RECORDS = 200, 3, 60
SLUICE = (sys.executable, "-c", "import sys; from sluice.cli.entry import main; sys.exit(main())")
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Servers:
    """A Kafka behind a port that counts, and a store that counts by itself."""

    kafka: Counting
    store: LocalS3

    @property
    def asked(self) -> tuple[Counter[str], Counter[str]]:
        """The requests that Kafka and S3 have had."""
        return Counter(self.kafka.seen), self.store.requests()


@contextmanager
def counted(place: Path) -> Iterator[Servers]:
    def broker() -> tuple[str, int]:
        host, port = LocalKafka.attach(place).bootstrap.rsplit(":", 1)
        return host, int(port)

    with ExitStack() as stack:
        counting = stack.enter_context(closing(Counting(broker)))
        address = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{counting.port}"}
        stack.enter_context(LocalKafka(place, keep=False, settings=address))
        yield Servers(counting, stack.enter_context(LocalS3()))


def project_of(root: Path, servers: Servers) -> Project:
    """Feeds of one topic, each with its own group, on the schedule that feeds share."""
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
        said = {
            "kafka": {"bootstrap": bootstrap},
            "topics": "orders",
            "group": f"fleet-{number}",
            "start": "earliest",
            "window": "1d",
        }
        path = root / "feeds" / f"orders_{number:03}.yaml"
        path.write_text(json.dumps(said | {"lake": servers.store.lake, "s3": s3}))
    return Project(root)


def produce(servers: Servers) -> None:
    """Records of the day before yesterday."""
    stamp = time.time_ns() // 1_000_000 - 2 * DAY
    with closing(KafkaProducer(bootstrap_servers=f"127.0.0.1:{servers.kafka.port}")) as producer:
        for number in range(PARTITIONS * RECORDS):
            producer.send("orders", b"x", partition=number % PARTITIONS, timestamp_ms=stamp)
        producer.flush()


def ran(project: Project) -> Mapping[str, object]:
    command = [*SLUICE, "run", "--all", "--project", str(project.root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_a_tick_of_200_feeds_asks_s3_twice_a_feed_and_kafka_nothing(tmp_path: Path) -> None:
    with counted(tmp_path / "kafka") as servers:
        project = project_of(tmp_path / "shop", servers)
        produce(servers)
        said = ran(project)
        landed = [sum(b["landed"] for run in feed["runs"] for b in run["batches"]) for feed in said["feeds"]]  # type: ignore[attr-defined]
        assert landed == [PARTITIONS * RECORDS] * FEEDS
        files = read_feeds(project, {})
        windows = windows_of(files.feeds, recall_feeds(files)[0])
        with open_instance(project) as instance:
            session = RunSession(project)
            for tick in (FleetScheduler(session, windows, SHARED), quiet := FleetScheduler(session, windows, SHARED)):
                kafka, s3 = servers.asked
                assert tick.list_requests(instance) == []
                assert tick.news == []
                assert tick.checked == FEEDS
                now = servers.asked
                of_kafka, of_s3 = now[0] - kafka, now[1] - s3
                print(f"a tick of {FEEDS} feeds: Kafka {dict(of_kafka)}, S3 {dict(of_s3)}")
            assert tick is quiet
            assert not of_kafka
            assert sum(of_s3.values()) <= 2 * FEEDS, of_s3
