"""Many feeds of one Kafka: shared answers, answers to single feeds, and the number of requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.pipelines.errors import KafkaUnavailable, UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import CommittedOffset, Configs, Isolation, TopicPartition
from sluice.pipelines.ports import Cluster
from sluice.resources.kafka.cluster import shared_cluster
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.cluster.shared_cluster import SharedKafka, _Failed
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.group.group import KafkaGroup
from sluice.resources.open_ports import open_ports
from tests.resources.kafka.tools import make_address, open_transaction, produce, wait_until

pytestmark = pytest.mark.kafka
COMMITTED = Isolation.READ_COMMITTED


def make_feed(cluster: Any, topic: str, root: Path, **changes: Any) -> Feed:
    settings = {
        "feed": "f" + topic.replace("-", "_").lower(),
        "topics": topic,
        "group": f"g-{topic}",
        "start": "earliest",
    }
    return Feed.model_validate(settings | {"kafka": {"bootstrap": cluster.bootstrap}} | changes, context={"root": root})


@contextmanager
def share_kafka(feeds: list[Feed]) -> Iterator[SharedKafka]:
    with closing(SharedKafka(feeds[0].kafka, feeds)) as kafka:
        yield kafka


@pytest.fixture
def feeds(kafka, fresh_topic, tmp_path) -> list[Feed]:
    """Four feeds of a two-partition topic each, with three records in the first partition and offset 1 committed."""
    created_feeds = []
    for _ in range(4):
        topic = fresh_topic(2, cluster=kafka)
        produce(kafka, topic, 3)
        feed = make_feed(kafka, topic, tmp_path)
        with closing(KafkaGroup(make_address(kafka), feed.group)) as group, group.join([topic], None) as member:
            member.commit_plain({TopicPartition(topic, 0): CommittedOffset(1, 0, "here")})
        created_feeds.append(feed)
    return created_feeds


@pytest.fixture
def requests(monkeypatch) -> Counter[str]:
    """The numbers of requests to brokers, by kind."""
    requests: Counter[str] = Counter()
    sent = Wire._submit

    async def count_and_submit(wire: Wire, node: Any, request: Any, seconds: float) -> Any:
        requests[type(request).__name__.removesuffix("Request")] += 1
        return await sent(wire, node, request, seconds)

    monkeypatch.setattr(Wire, "_submit", count_and_submit)
    return requests


def test_shared_lookups_match_separate_lookups_in_few_requests(feeds, requests):
    alone = {}
    for feed in feeds:
        with closing(KafkaCluster(feed.kafka)) as cluster, closing(KafkaGroup(feed.kafka, feed.group)) as group:
            states = cluster.partitions([feed.topics.names[0]], COMMITTED)
            alone[feed.name] = (cluster.cluster_id(), states, group.fetch_committed([p.tp for p in states]))
    requests.clear()
    with share_kafka(feeds) as shared_kafka, ThreadPoolExecutor(4) as pool:

        def look(feed: Feed) -> Any:
            with closing(shared_kafka.cluster()) as cluster, closing(shared_kafka.group(feed.group)) as group:
                topic = feed.topics.names[0]
                assert topic in cluster.topics()
                assert cluster.configs([topic]).topics.keys() == {topic}
                states = cluster.partitions([topic], COMMITTED)
                assert cluster.epoch_ends({p.tp: p.leader_epoch for p in states}) == {}
                return cluster.cluster_id(), states, group.fetch_committed([p.tp for p in states])

        answers = dict(zip(alone, pool.map(look, feeds), strict=True))
    assert answers == alone
    once = ("Metadata", "OffsetFetch", "DescribeConfigs", "FindCoordinator", "DescribeLogDirs")
    assert requests == {**dict.fromkeys(once, 1), "ListOffsets": 4}


def test_concurrent_lookups_by_time_are_combined(feeds, requests, monkeypatch):
    times = [{TopicPartition(f.topics.names[0], p): 0 for p in range(2)} for f in feeds]
    times.append(dict(times[0]))  # if two feeds read one topic, the second one asks separately
    with closing(KafkaCluster(feeds[0].kafka)) as cluster:
        alone = [cluster.offsets_at(query) for query in times]
    with share_kafka(feeds) as shared_kafka, ThreadPoolExecutor(5) as pool:
        clusters = [shared_kafka.cluster() for _ in times]
        with shared_kafka._asking:  # a question is being answered
            requests.clear()
            answers = [pool.submit(c.offsets_at, query) for c, query in zip(clusters, times, strict=True)]
            wait_until(lambda: len(shared_kafka._questions) == 5)
            look = Counter(requests)
        assert [t.result(60) for t in answers] == alone
        assert (requests - look)["ListOffsets"] <= 2

        def raise_unavailable(times: object, max_skew: object) -> None:
            raise KafkaUnavailable("one of them has no leader")

        monkeypatch.setattr(shared_kafka._cluster, "offsets_at", raise_unavailable)
        assert clusters[0].offsets_at(times[0]) == alone[0], "each asks separately"


def test_topic_settings_are_requested_separately_when_shared_lookup_fails(feeds, monkeypatch):
    with share_kafka(feeds) as shared_kafka:
        monkeypatch.setattr(shared_kafka, "_take_look", lambda began: _Failed(began, KafkaUnavailable("no broker")))
        topic = feeds[0].topics.names[0]
        assert shared_kafka.cluster().configs([topic]).topics.keys() == {topic}


def test_slow_lookup_serves_all_waiting_feeds(feeds, monkeypatch):
    clock, looks, take = [1000.0], [], SharedKafka._take_look

    def take_long(shared_kafka: SharedKafka, began: float) -> Any:
        clock[0] += 2 * shared_cluster.AGE
        looks.append(began)
        return take(shared_kafka, began)

    monkeypatch.setattr(shared_cluster, "time", SimpleNamespace(clock_gettime=lambda _: clock[0]))
    monkeypatch.setattr(SharedKafka, "_take_look", take_long)
    with share_kafka(feeds) as shared_kafka:
        for feed in feeds:
            assert feed.topics.names[0] in shared_kafka.cluster().topics()
    assert len(looks) == 1


def test_slow_settings_request_serves_all_waiting_feeds(feeds, monkeypatch):
    clock, described, describe = [1000.0], list[list[str]](), KafkaCluster.configs

    def describe_slowly(cluster: KafkaCluster, topics: Iterable[str]) -> Configs:
        clock[0] += 2 * shared_cluster.CONFIGS_AGE
        described.append(sorted(topics))
        return describe(cluster, topics)

    monkeypatch.setattr(
        shared_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0], clock_gettime=lambda _: clock[0])
    )
    monkeypatch.setattr(KafkaCluster, "configs", describe_slowly)
    with share_kafka(feeds) as shared_kafka:
        for feed in feeds:
            assert feed.topics.names[0] in shared_kafka.cluster().configs(feed.topics.names).topics
    assert len(described) == 1


def test_hanging_lookup_of_one_feed_does_not_delay_other_feeds(feeds, monkeypatch):
    hangs, hung = threading.Event(), threading.Event()

    def hang(times: object, max_skew: object) -> None:
        hung.set()
        assert hangs.wait(60)
        raise KafkaUnavailable("its broker does not answer")

    times = [{TopicPartition(f.topics.names[0], 0): 0} for f in feeds]
    with share_kafka(feeds) as shared_kafka, ThreadPoolExecutor(1) as pool:
        clusters = [shared_kafka.cluster() for _ in times]
        monkeypatch.setattr(shared_kafka._cluster, "offsets_at", hang)
        first = pool.submit(clusters[0].offsets_at, times[0])
        assert hung.wait(60)
        assert clusters[1].offsets_at(times[1])
        hangs.set()
        assert first.result(60)
        assert shared_kafka.offsets_at(times[2]) is None, "from then on each asks separately"


def test_single_feed_looks_up_brokers_once_and_commits(kafka, feeds, monkeypatch):
    learned, learn = [], Wire._learn_from

    async def record_and_learn(wire: Wire, *arguments: Any) -> None:
        learned.append(arguments)
        await learn(wire, *arguments)

    monkeypatch.setattr(Wire, "_learn_from", record_and_learn)
    feed = feeds[0]
    (topic,) = feed.topics.names
    with open_ports(feed) as ports:
        tps = [p.tp for p in ports.cluster.partitions([topic], COMMITTED)]
        with ports.group.join([topic], None) as member:
            assert [ports.group.fetch_committed(tps)[tp] for tp in tps] == [CommittedOffset(1, 0, "here"), None]
            member.commit_plain({tps[0]: CommittedOffset(2, 0, "there")})
        assert ports.group.fetch_committed(tps)[tps[0]] == CommittedOffset(2, 0, "there")
        assert ports.cluster.topics().keys() >= {topic}
    assert len(learned) == 1


def test_outdated_answers_are_requested_again(kafka, feeds, monkeypatch):
    feed, topic = feeds[0], feeds[0].topics.names[0]

    def end() -> int:
        return cluster.partitions([topic], COMMITTED)[0].last_stable_offset

    with (
        share_kafka(feeds) as shared_kafka,
        closing(shared_kafka.cluster()) as cluster,
        closing(shared_kafka.cluster()) as other,
    ):
        assert end() == 3
        produce(kafka, topic, 2)
        assert end() == 3
        cluster.forget()
        assert end() == 5
        assert other.partitions([topic], COMMITTED)[0].last_stable_offset == 3
        monkeypatch.setattr(shared_cluster, "AGE", 0.0)
        assert other.partitions([topic], COMMITTED)[0].last_stable_offset == 5
    assert feed.group


def test_member_and_group_read_current_offsets_despite_shared_lookup(kafka, feeds):
    topic = feeds[0].topics.names[0]
    spot = TopicPartition(topic, 0)
    with share_kafka(feeds) as shared_kafka, closing(shared_kafka.group(feeds[0].group)) as group:
        assert group.fetch_committed([spot]) == {spot: CommittedOffset(1, 0, "here")}
        with group.join([topic], f"t-{topic}") as member:
            member.init_transactions()
            assert member.fetch_committed([spot])[spot] == CommittedOffset(1, 0, "here")
            member.commit_transaction({spot: CommittedOffset(2, 0, "there")})
            shared_kafka.look()
            assert member.fetch_committed([spot])[spot] == CommittedOffset(2, 0, "there")
        assert group.fetch_committed([spot])[spot] == CommittedOffset(2, 0, "there")
        assert group.members() == ()


def test_feeds_commit_concurrently_over_shared_connections(kafka, feeds):
    with share_kafka(feeds) as shared_kafka, ThreadPoolExecutor(4) as pool:

        def commit(feed: Feed) -> Any:
            topic = feed.topics.names[0]
            spot = TopicPartition(topic, 0)
            with closing(shared_kafka.group(feed.group)) as group, group.join([topic], f"t-{topic}") as member:
                member.init_transactions()
                member.commit_transaction({spot: CommittedOffset(3, 0, feed.name)})
                return member.fetch_committed([spot])[spot]

        done = list(pool.map(commit, feeds))
    assert done == [CommittedOffset(3, 0, f.name) for f in feeds]


def test_open_transaction_limits_read_committed_lookups_only(kafka, feeds):
    topic = feeds[0].topics.names[0]
    with open_transaction(kafka, topic, 2) as still_open, share_kafka(feeds) as shared_kafka:
        cluster = shared_kafka.cluster()
        stable = cluster.partitions([topic], COMMITTED)[0]
        assert (stable.last_stable_offset, stable.high_watermark) == (3, 5)
        assert cluster.partitions([topic], Isolation.READ_UNCOMMITTED)[0].last_stable_offset == 5
        still_open.abort_transaction()


def test_missing_topic_is_reported_to_its_feed_only(kafka, feeds, tmp_path):
    topicless = make_feed(kafka, "nowhere", tmp_path)
    with share_kafka([*feeds, topicless]) as shared_kafka:
        with pytest.raises(UnknownTopic):
            shared_kafka.cluster().partitions(["nowhere"], COMMITTED)
        topic = feeds[0].topics.names[0]
        assert len(shared_kafka.cluster().partitions([topic], COMMITTED)) == 2


def test_unreachable_kafka_is_contacted_once_for_all_feeds(tmp_path):
    class Nowhere:
        bootstrap = "127.0.0.1:9"

    feeds = [
        make_feed(Nowhere, f"t{n}", tmp_path, kafka={"bootstrap": "127.0.0.1:9", "bootstrap_timeout_ms": 300})
        for n in range(30)
    ]
    errors = []
    with share_kafka(feeds) as shared_kafka:
        for _ in feeds:
            with pytest.raises(KafkaUnavailable) as caught:
                shared_kafka.cluster().topics()
            errors.append(caught.value)
    assert len({e.message for e in errors}) == 1
    assert len({id(e) for e in errors}) == len(errors)


def test_shared_cluster_has_every_method_of_the_port() -> None:
    """The wiring takes either class, so no type checker compares this one with the port."""
    methods = {name for name in vars(Cluster) if not name.startswith("_")}
    assert {name for name in methods if not callable(getattr(shared_cluster.SharedCluster, name, None))} == set()
