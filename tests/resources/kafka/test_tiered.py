"""Reads from tiered storage (KIP-405): an answer without bytes is not a hole in the log."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kafka.admin import ConfigResource, ConfigResourceType

from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.model.kafka import Isolation, OffsetAtTime, TopicPartition
from sluice.pipelines.ports import FetchFailed
from sluice.pipelines.util.locks import locking
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.local import java
from sluice.resources.local.local_kafka import VERSION, LocalKafka
from tests.resources.kafka.tools import (
    build_range,
    consume_records,
    describe,
    fetch,
    make_address,
    open_admin,
    open_producer,
    produce,
    unpack_records,
    wait_until,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
SEGMENT = 1 << 20
TIERED = {
    "remote.storage.enable": "true",
    "segment.bytes": str(SEGMENT),
    "local.retention.bytes": "1",
}
WAIT, QUOTA = "remote.fetch.max.wait.ms", "remote.log.manager.fetch.max.bytes.per.second"


def load_tier() -> Path:
    """Returns the folder of Kafka's test jar with a tier in a local folder; fetched once from Maven Central."""
    folder = java.cache() / f"kafka-tier-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locking(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            _fetch_tier(folder)
    return folder


def _fetch_tier(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        Path(scratch, "ivy.xml").write_text(
            '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
            '<info organisation="sluice" module="tier"/>'
            '<configurations><conf name="default"/></configurations><dependencies>'
            f'<dependency org="org.apache.kafka" name="kafka-storage" rev="{VERSION}" transitive="false"'
            ' conf="default->default">'
            '<artifact name="kafka-storage" type="jar" ext="jar" m:classifier="test"/></dependency>'
            "</dependencies></ivy-module>"
        )
        code, output = java._ivy(scratch, lambda: None)
        assert code == 0, output
        Path(scratch, "jars").rename(folder)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    root = tmp_path_factory.mktemp("tiered")
    settings = {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.manager.class.name": "org.apache.kafka.server.log.remote.storage.LocalTieredStorage",
        "remote.log.storage.manager.class.path": f"{load_tier()}/*",
        "remote.log.storage.manager.impl.prefix": "rsm.config.",
        "rsm.config.dir": str(root / "tier"),
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
        "rlmm.config.remote.log.metadata.topic.num.partitions": "1",
        "remote.log.manager.task.interval.ms": "500",
        "log.retention.check.interval.ms": "500",
        "log.initial.task.delay.ms": "500",
    }
    (root / "tier").mkdir()
    with LocalKafka(root / "kafka", keep=False, settings=settings) as cluster:
        yield cluster


@contextmanager
def delay_tier(cluster: LocalKafka) -> Iterator[None]:
    """Limit the broker's wait for its tier to 1 ms, which is rarely enough, for the first two seconds."""

    def restore() -> None:
        time.sleep(2)
        set_broker(cluster, WAIT, None)

    set_broker(cluster, WAIT, "1")
    with ThreadPoolExecutor() as threads:
        restoring = threads.submit(restore)
        yield
        restoring.result()


def set_broker(cluster: LocalKafka, key: str, value: str | None) -> None:
    """Change a broker's setting; None: back to the default."""
    with open_admin(cluster) as client:
        change = ("DELETE", None) if value is None else value
        client.alter_configs([ConfigResource(ConfigResourceType.BROKER, "1", {key: change})])


def await_tier(cluster: LocalKafka, topic: str, partitions: int = 1) -> None:
    """Wait until only active segments are left on the broker's disk."""
    folder = cluster._root / "node-1" / "data"
    wait_until(lambda: all(len([*(folder / f"{topic}-{p}").glob("*.log")]) == 1 for p in range(partitions)), 60)


def test_fetch_waits_for_slow_tier_within_its_patience(tiered, fresh_topic):
    topic = fresh_topic(cluster=tiered, config=TIERED)
    produce(tiered, topic, 3000, size=1000)
    await_tier(tiered, topic)
    (state,) = describe(tiered, topic)
    piece = build_range(state, 0, 3000)
    wanted = consume_records(tiered, piece)
    assert (state.log_start, len(wanted)) == (0, 3000)
    assert state.log_bytes == pytest.approx(sum(len(record[2] or b"") for record in wanted), rel=0.3)
    with delay_tier(tiered):
        assert unpack_records(fetch(tiered, [piece]), [piece])[0] == wanted
    set_broker(tiered, QUOTA, "1000")
    (failed,) = [item for item in fetch(tiered, [piece], patience=0.0) if isinstance(item, FetchFailed)]
    set_broker(tiered, QUOTA, None)
    assert isinstance(failed.error, KafkaUnavailable)
    assert "tiered storage is slow" in str(failed.error)
    assert WAIT in failed.error.remedy


def test_lookup_by_time_reads_behind_markers_in_a_slow_tier(tiered, fresh_topic):
    """A marker is stamped by the broker's clock: a look-up by time finds it first and reads on behind it."""
    topic, began = fresh_topic(partitions=3, cluster=tiered, config=TIERED), time.time_ns() // 1_000_000 - 86_400_000
    partitions = [TopicPartition(topic, p) for p in range(3)]
    with open_producer(tiered, transactional_id=f"tier-{topic}", batch_size=1_000) as producer:
        producer.init_transactions()
        for hour in range(4):
            producer.begin_transaction()
            for n in range(400):
                for p in range(3):
                    stamp = began + hour * 3_600_000 + n
                    producer.send(topic, bytes([n % 256]) * 1000, partition=p, timestamp_ms=stamp)
            producer.commit_transaction()
    await_tier(tiered, topic, 3)
    with closing(KafkaCluster(make_address(tiered))) as cluster, delay_tier(tiered):
        cluster.partitions([topic], Isolation.READ_UNCOMMITTED)
        for hour in range(1, 4):
            at = began + hour * 3_600_000
            assert cluster.offsets_at(dict.fromkeys(partitions, at)) == dict.fromkeys(
                partitions, OffsetAtTime(hour * 401, at)
            ), hour
