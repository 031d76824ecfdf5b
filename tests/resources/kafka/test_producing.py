"""Dead letters are sent to a real topic in the transaction of the offsets: all or none, in order and unchanged."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as Plain

from sluice.pipelines.errors import CommitFenced, KafkaUnavailable, UnknownTopic, UsageError
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import DeadLetter
from sluice.pipelines.records.rows.row_format import escape_key
from sluice.resources.kafka.group import membership
from sluice.resources.kafka.group.group import KafkaGroup
from sluice.resources.kafka.group.membership import KafkaMembership
from sluice.resources.kafka.protocol import group_api, messages
from sluice.resources.kafka.protocol.group_api import TRANSACTION
from tests.resources.kafka.tools import make_address, wait_until

PRODUCE, ADD_PARTITIONS = 0, 24
"""API keys."""

STAMP = 1_700_000_000_000


def make_letter(n, partition=0, **changes):
    plain = {
        "partition": partition,
        "timestamp": STAMP + n,
        "key": b"k%d" % n,
        "value": b"v%d" % n,
        "headers": (("n", b"%d" % n), ("none", None), ("é", b"\xff\x00")),
        "source": f"orders:0:{n}",
    }
    return DeadLetter(**plain | changes)


def read(kafka, topic, isolation="read_committed"):
    """Returns the records that a plain consumer reads, by partition."""
    with closing(
        KafkaConsumer(
            bootstrap_servers=kafka.bootstrap, isolation_level=isolation, auto_offset_reset="earliest", check_crcs=True
        )
    ) as consumer:
        tps = [Plain(topic, p) for p in sorted(consumer.partitions_for_topic(topic))]
        consumer.assign(tps)
        ends = consumer.end_offsets(tps)
        out = {tp.partition: [] for tp in tps}
        while any(consumer.position(tp) < ends[tp] for tp in tps):
            for tp, records in consumer.poll(200).items():
                out[tp.partition] += records
        return out


@pytest.fixture
def spot(fresh_topic):
    """The partition whose offsets are committed."""
    return TopicPartition(fresh_topic(name="orders"), 0)


@pytest.fixture
def group(kafka, spot):
    with closing(KafkaGroup(make_address(kafka), f"g-{spot.topic}", session=6.0, transaction=10.0)) as kafka_group:
        yield kafka_group


def as_sent(records):
    return [(r.timestamp, r.key, r.value, tuple(r.headers)) for r in records]


def as_meant(letters):
    return [(m.timestamp, m.key, m.value, m.headers) for m in letters]


def test_dead_letters_are_committed_in_order_and_unchanged(kafka, group, spot, fresh_topic, monkeypatch):
    monkeypatch.setattr(membership, "CHUNK_BYTES", 20_000)
    topic = fresh_topic(partitions=3)
    odd = make_letter(0, 2, key=None, value=None, headers=(), timestamp=-1)
    first = [odd, *(make_letter(n, n % 3) for n in range(1, 1000))]
    second = [make_letter(n, 1, value=b"x" * 1000) for n in range(1000, 1100)]
    with group.join([spot.topic], f"t-{topic}") as member:
        assert member.partitions_of(topic) == 3
        member.init_transactions()
        for number, letters in enumerate((first, second)):
            member.commit_transaction({spot: CommittedOffset(number)}, topic, iter(letters))
        member.commit_transaction({spot: CommittedOffset(2)}, topic, [])
        assert member.fetch_committed([spot]) == {spot: CommittedOffset(2)}
    records = wait_until(lambda: sum(map(len, (r := read(kafka, topic)).values())) == 1100 and r)
    for partition in range(3):
        expected = [m for m in first + second if m.partition == partition]
        assert as_sent(records[partition]) == as_meant(expected)


def test_failed_transaction_commits_nothing_and_next_transaction_succeeds(kafka, group, spot, fresh_topic):
    topic = fresh_topic()

    def yield_and_fail():
        yield make_letter(1)
        yield make_letter(2, value=b"x" * 900_000)
        raise RuntimeError("the lake is gone")

    with group.join([spot.topic], f"t-{topic}") as member:
        member.init_transactions()
        with pytest.raises(RuntimeError):
            member.commit_transaction({spot: CommittedOffset(1)}, topic, yield_and_fail())
        with pytest.raises(UsageError, match="not started"):
            member.commit_transaction({spot: CommittedOffset(1)})
        assert member.fetch_committed([spot]) == {spot: None}
        member.init_transactions()
        member.commit_transaction({spot: CommittedOffset(2)}, topic, [make_letter(3)])
    assert len(wait_until(lambda: read(kafka, topic, "read_uncommitted")[0])) == 2
    assert [r.key for r in wait_until(lambda: read(kafka, topic)[0])] == [b"k3"]


def test_newer_committer_fences_partly_sent_transaction(kafka, group, spot, fresh_topic, monkeypatch):
    monkeypatch.setattr(membership, "CHUNK_BYTES", 1000)
    topic = fresh_topic()
    with (
        closing(KafkaGroup(make_address(kafka), f"other-{topic}")) as other,
        other.join([spot.topic], f"t-{topic}") as rival,
    ):

        def yield_and_fence():
            yield from (make_letter(n) for n in range(100))
            rival.init_transactions()
            yield from (make_letter(n) for n in range(100, 200))

        with group.join([spot.topic], f"t-{topic}") as member:
            member.init_transactions()
            with pytest.raises(CommitFenced, match=r"PRODUCER_FENCED|INVALID_PRODUCER_EPOCH"):
                member.commit_transaction({spot: CommittedOffset(1)}, topic, yield_and_fence())
            rival.commit_transaction({spot: CommittedOffset(2)}, topic, [make_letter(7)])
            assert member.fetch_committed([spot]) == {spot: None}
    assert [r.key for r in wait_until(lambda: read(kafka, topic)[0])] == [b"k7"]


def test_missing_and_internal_topics_are_refused(group, spot):
    with group.join([spot.topic], "t-none") as member:
        for name in ("no-such-topic", "__consumer_offsets"):
            with pytest.raises(UnknownTopic, match=f"`{name}`.*(?s:.)*create the topic"):
                member.partitions_of(name)


@pytest.mark.parametrize(
    ("config", "wrong", "reason"),
    [
        ({"max.message.bytes": "5000"}, {"value": b"x" * 6000}, "MESSAGE_SIZE_TOO_LARGE(?s:.)*max.message.bytes"),
        ({"cleanup.policy": "compact"}, {"key": None}, "INVALID_RECORD(?s:.)*cleanup.policy"),
        (
            {"message.timestamp.after.max.ms": "1000"},
            {"timestamp": STAMP * 2},
            "INVALID_TIMESTAMP(?s:.)*message.timestamp.type",
        ),
    ],
)
def test_record_that_topic_rejects_is_named(kafka, group, spot, fresh_topic, config, wrong, reason):
    topic = fresh_topic(config=config)
    letters = [make_letter(n, **({"value": b"x" * 500} | (wrong if n == 77 else {}))) for n in range(100)]
    with group.join([spot.topic], f"t-{topic}") as member:
        member.init_transactions()
        with pytest.raises(UsageError, match=f"orders:0:77 (?s:.)*{reason}"):
            member.commit_transaction({spot: CommittedOffset(1)}, topic, letters)
        assert member.fetch_committed([spot]) == {spot: None}
        member.init_transactions()
        # A chunk that is too large is sent in halves.
        member.commit_transaction({spot: CommittedOffset(2)}, topic, letters[:77] + letters[78:])
    assert len(wait_until(lambda: read(kafka, topic)[0])) == 99


def test_transaction_timeout_names_setting_to_raise(kafka, spot, fresh_topic, monkeypatch):
    monkeypatch.setattr(membership, "CHUNK_BYTES", 100)
    topic = fresh_topic()
    with (
        closing(KafkaGroup(make_address(kafka), f"g-{topic}", session=6.0, transaction=1.0)) as hasty,
        hasty.join([spot.topic], f"t-{topic}") as member,
    ):
        member.init_transactions()
        endless = iter(lambda: make_letter(1), None)
        with pytest.raises(UsageError, match=r"(?s)dead letters were sent.*transaction_timeout_ms"):
            member.commit_transaction({spot: CommittedOffset(1)}, topic, endless)
        assert member.fetch_committed([spot]) == {spot: None}
    assert read(kafka, topic)[0] == []


def test_committer_paused_after_sending_letters_is_fenced(kafka, group, spot, fresh_topic, monkeypatch):
    """The transaction did not time out because of the letters, so the error names no setting."""
    topic, clock, adding = fresh_topic(), SimpleNamespace(monotonic=time.monotonic), KafkaMembership._add_offsets

    async def add_offsets_late(member, offsets, producer):
        await member._coordinators.ask(
            TRANSACTION, f"t-{topic}", partial(group_api.ask_producer, f"t-{topic}", 9000), messages.top_error
        )
        clock.monotonic = lambda: time.monotonic() + 3600
        await adding(member, offsets, producer)

    monkeypatch.setattr(membership, "time", clock)
    monkeypatch.setattr(KafkaMembership, "_add_offsets", add_offsets_late)
    with group.join([spot.topic], f"t-{topic}") as member:
        member.init_transactions()
        with pytest.raises(CommitFenced):
            member.commit_transaction({spot: CommittedOffset(1)}, topic, [make_letter(1)])
        assert member.fetch_committed([spot]) == {spot: None}


@pytest.mark.faults
@pytest.mark.parametrize("key", [PRODUCE, ADD_PARTITIONS])
def test_lost_responses_do_not_duplicate_records(behind, fresh_topic, monkeypatch, key):
    monkeypatch.setattr(membership, "CHUNK_BYTES", 2000)
    topic, source = fresh_topic(partitions=2, cluster=behind.cluster), fresh_topic(cluster=behind.cluster)
    letters = [make_letter(n, n % 2) for n in range(200)]
    with (
        closing(KafkaGroup(make_address(behind.cluster), f"g-{topic}", session=6.0)) as group,
        group.join([source], f"t-{topic}") as member,
    ):
        member.init_transactions()
        behind.proxy.lose = {key: 2}
        member.commit_transaction({TopicPartition(source, 0): CommittedOffset(1)}, topic, letters)
    assert behind.proxy.lose == {key: 0}
    records = wait_until(lambda: sum(map(len, (r := read(behind.cluster, topic)).values())) == 200 and r)
    assert [as_sent(records[p]) for p in (0, 1)] == [as_meant(letters[p::2]) for p in (0, 1)]


@pytest.mark.faults
def test_nothing_is_committed_while_leader_does_not_respond(behind, fresh_topic):
    topic, source = fresh_topic(cluster=behind.cluster), fresh_topic(cluster=behind.cluster)
    spot = TopicPartition(source, 0)
    with (
        closing(KafkaGroup(make_address(behind.cluster), f"g-{topic}", session=6.0, transaction=3.0)) as group,
        group.join([source], f"t-{topic}") as member,
    ):
        member.init_transactions()
        behind.proxy.lose = {PRODUCE: 999}
        with pytest.raises((UsageError, KafkaUnavailable)):
            member.commit_transaction({spot: CommittedOffset(1)}, topic, [make_letter(1)])
        behind.proxy.lose = {}
        assert member.fetch_committed([spot]) == {spot: None}
    assert read(behind.cluster, topic)[0] == []


def test_dead_letter_keeps_bytes_of_header_keys() -> None:
    raw = (b"A\xffB", b"plain", b"sluice.hex:41")
    sent = make_letter(0, headers=tuple((escape_key(k), b"x") for k in raw))
    (batch,) = membership._encode([sent])
    data = bytes(batch.encode())
    assert all(bytes([2 * len(k)]) + k + b"\x02x" in data for k in raw)
    assert data.count(b"sluice.hex:") == 1
