"""Dead letters on a real Kafka: committed together with the offsets, each once, for a read_committed consumer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.errors import UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject, commit_feed, consume_topic, fetch_committed, open_inline_ports, run
from tests.resources.kafka.tools import wait_until

ROOT = Path(__file__).parents[2]
STAMP = 1_700_000_000_000
GOOD = json.dumps({"order_id": "a", "items": 1}).encode()
BAD = {
    b"not json": ("decode", "not_json", ""),
    b'{"order_id": "a", "items": "many"}': ("schema", "wrong_type", "items"),
    b'{"items": 3}': ("schema", "missing", "order_id"),
    b'{"order_id": "\xff\xfe"}': ("decode", "invalid_utf8", ""),
}
KILLED = """
import os, sys
from pathlib import Path
from sluice.resources.kafka.produce.sender import KafkaSender
from tests.integration import test_letters as here
KafkaSender._end = lambda *_: os._exit(9)
here.commit_feed(here.shorten_session(here.load(sys.argv[1])))
"""


def load(path: str) -> Feed:
    from sluice.pipelines.feed.load import load_feed

    return load_feed(Path(path), {})


def shorten_session(feed: Feed) -> Feed:
    """Shorten the session timeout, so that the group is free soon after a kill."""
    return feed.model_copy(update={"kafka": feed.kafka.model_copy(update={"session_timeout_ms": 2000})})


def produce(project: FeedProject, values: list[bytes | None]) -> None:
    """Produce the values round-robin into three partitions, each with a forged Sluice header."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for n, value in enumerate(values):
        headers = [("trace", b"%d" % n), ("sluice.offset", b"-1")]
        producer.send(project.topic, value, b"k%d" % n, headers, n % 3, STAMP + n)
    producer.close()


def read_sluice_headers(letter: dict[str, Any]) -> dict[str, str]:
    """Returns the headers that Sluice added; they follow the record's own, and win over a forged one."""
    return {h["key"]: h["value"].decode() for h in letter["headers"] if h["key"].startswith("sluice.")}


def describe_letter(letter: dict[str, Any]) -> tuple[Any, ...]:
    headers = read_sluice_headers(letter)
    record_headers = [(h["key"], h["value"]) for h in letter["headers"][:2]]
    position = (int(headers["sluice.partition"]), int(headers["sluice.offset"]))
    return *position, letter["timestamp"], letter["key"], letter["value"], record_headers


def describe_record(record: dict[str, Any]) -> tuple[Any, ...]:
    record_headers = [(h["key"], h["value"]) for h in record["headers"]]
    return record["partition"], record["offset"], record["timestamp"], record["key"], record["value"], record_headers


def test_each_letter_is_committed_once_together_with_offsets(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=3))
    letter_topic = f"{project.topic}.dlq"
    feed = shorten_session(
        project.write_feed(
            format="json",
            schema="{order_id: string not null, items: int32}",
            dead_letters=f"{{topic: {letter_topic}}}",
            policies="{quarantine_limit: {share: 1}}",
        )
    )
    produce(project, [GOOD, *BAD, None, GOOD] * 20)
    assert run(feed).batches[0].counts.quarantined == 80
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        with pytest.raises(UnknownTopic, match=rf"`{letter_topic}`(?s:.)*create the topic"):
            commit_feed(feed)
        assert letter_topic not in admin.list_topics()
        admin.create_topics({letter_topic: {"num_partitions": 2}}, wait_for_metadata=True)
    assert fetch_committed(project.kafka, feed.group, project.topic, 3) == [None] * 3

    # Killed after all is sent and before the commit: only a read_uncommitted consumer sees the letters.
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "feeds/orders.yaml")], cwd=ROOT, check=False)
    assert killed.returncode == 9
    assert len(consume_topic(kafka, letter_topic, committed=False)) == 80
    assert consume_topic(kafka, letter_topic) == []

    result = commit_feed(feed)
    assert (result.status, result.dead_letters, result.dead_letters_to) == (CommitStatus.COMMITTED, 80, letter_topic)
    assert fetch_committed(project.kafka, feed.group, project.topic, 3) == [m.after for m in result.offsets]
    letters = wait_until(lambda: consume_topic(kafka, letter_topic))
    bad = [r for r in consume_topic(kafka, project.topic) if r["value"] in BAD]
    assert sorted(map(describe_letter, letters), key=lambda t: t[:2]) == sorted(
        map(describe_record, bad), key=lambda t: t[:2]
    )
    assert all(r["partition"] == int(read_sluice_headers(r)["sluice.partition"]) % 2 for r in letters)
    counts = Counter(
        (r["value"], *(read_sluice_headers(r)[f"sluice.{name}"] for name in ("stage", "reason", "field")))
        for r in letters
    )
    assert counts == {(value, *reasons): 20 for value, reasons in BAD.items()}
    assert {(read_sluice_headers(r)["sluice.topic"], read_sluice_headers(r)["sluice.feed"]) for r in letters} == {
        (project.topic, "orders")
    }
    per_partition = [
        [
            int(read_sluice_headers(r)["sluice.offset"])
            for r in letters
            if read_sluice_headers(r)["sluice.partition"] == p
        ]
        for p in "012"
    ]
    assert per_partition == [sorted(offsets) for offsets in per_partition]

    assert commit_feed(feed).status is CommitStatus.UNCHANGED
    produce(project, [b"again", GOOD])
    run(feed)
    assert commit_feed(feed).dead_letters == 1
    assert len(wait_until(lambda: len(r := consume_topic(kafka, letter_topic)) > 80 and r)) == 81
    with open_inline_ports(feed) as ports:
        assert ports.group.members() == ()
