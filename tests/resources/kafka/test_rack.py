"""Fetches from the closest replica (KIP-392), and from the leader when it is down: three brokers in three racks."""

from __future__ import annotations

from contextlib import closing

import pytest

from sluice.pipelines.model.kafka import FetchLimits, Isolation
from sluice.resources.kafka.fetch.broker_sessions import BrokerSession
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.local.local_kafka import LocalKafka
from tests.resources.kafka.tools import build_ranges, describe, fetch, make_address, produce, unpack_records

pytestmark = [pytest.mark.kafka, pytest.mark.soak]
SMALL = FetchLimits(4, request_bytes=64 << 10, partition_bytes=32 << 10, ahead_bytes=128 << 10)


@pytest.fixture(scope="module")
def racks(tmp_path_factory):
    root = tmp_path_factory.mktemp("racks") / "kafka"
    settings = {
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
        # All brokers share these settings; each reads its rack from a file in its folder.
        "config.providers": "file",
        "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
        "broker.rack": "${file:rack.properties:rack}",
    }
    for broker in (1, 2, 3):
        (root / f"node-{broker}").mkdir(parents=True)
        (root / f"node-{broker}" / "rack.properties").write_text(f"rack=rack-{broker}\n")
    with LocalKafka(root, brokers=3, keep=False, settings=settings) as cluster:
        yield cluster


def test_nearest_replica_is_read_until_it_fails(racks, fresh_topic, monkeypatch):
    topic = fresh_topic(cluster=racks, assignments={0: [1, 2, 3], 1: [2, 3, 1]})
    for partition in range(2):
        produce(racks, topic, 5000, partition, size=300)
    assert [state.rack for state in describe(racks, topic)] == ["rack-1", "rack-2"]
    nodes = []
    serve = BrokerSession._exchange
    monkeypatch.setattr(
        BrokerSession, "_exchange", lambda lane, granted: nodes.append(lane._node) or serve(lane, granted)
    )
    pieces = build_ranges(racks, topic)
    records = unpack_records(fetch(racks, pieces, SMALL, rack="rack-3"), pieces)
    assert [len(records[index]) for index in range(2)] == [5000, 5000]
    assert (nodes.count(1), nodes.count(2)) == (1, 1), "each leader is asked once, and sends us on"
    with closing(KafkaFetcher(make_address(racks), Isolation.READ_COMMITTED, rack="rack-3")) as fetcher:
        stream = fetcher.stream(pieces, SMALL)
        items = [next(stream)]
        racks.kill_broker(3)
        items += stream
    assert unpack_records(items, pieces) == records
