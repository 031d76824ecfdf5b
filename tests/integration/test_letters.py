"""Dead letters on a real Kafka: with the offsets or not at all, each once, as a plain consumer of what is committed
sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Plain

from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.errors import UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import Place, commit_feed, consumed, edges, run
from tests.resources.kafka.tools import until

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
here.commit_feed(here.hasty(here.load(sys.argv[1])))
"""


def load(path: str) -> Feed:
    from sluice.pipelines.feed.load import load_feed

    return load_feed(Path(path), {})


def hasty(feed: Feed) -> Feed:
    """Its group is free soon after it was killed."""
    return feed.model_copy(update={"kafka": feed.kafka.model_copy(update={"session_timeout_ms": 2000})})


def produce(place: Place, values: list[bytes | None]) -> None:
    """One after the other into three partitions, each with a header that pretends to be ours."""
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for n, value in enumerate(values):
        headers = [("trace", b"%d" % n), ("sluice.offset", b"-1")]
        producer.send(place.topic, value, b"k%d" % n, headers, n % 3, STAMP + n)
    producer.close()


def held(place: Place, feed: Feed) -> list[int | None]:
    consumer = KafkaConsumer(bootstrap_servers=place.kafka.bootstrap, group_id=feed.group, enable_auto_commit=False)
    try:
        return [consumer.committed(Plain(place.topic, p)) for p in range(3)]
    finally:
        consumer.close()


def said(letter: dict[str, Any]) -> dict[str, str]:
    """Our headers: they come last."""
    return {h["key"]: h["value"].decode() for h in letter["headers"] if h["key"].startswith("sluice.")}


def told(letter: dict[str, Any]) -> tuple[Any, ...]:
    ours = said(letter)
    theirs = [(h["key"], h["value"]) for h in letter["headers"][:2]]
    where = (int(ours["sluice.partition"]), int(ours["sluice.offset"]))
    return *where, letter["timestamp"], letter["key"], letter["value"], theirs


def meant(record: dict[str, Any]) -> tuple[Any, ...]:
    theirs = [(h["key"], h["value"]) for h in record["headers"]]
    return record["partition"], record["offset"], record["timestamp"], record["key"], record["value"], theirs


def test_letters_and_offsets_are_there_together_and_each_letter_once(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    place = Place(tmp_path, kafka, fresh_topic(partitions=3))
    letters = f"{place.topic}.dlq"
    feed = hasty(
        place.feed(
            format="json",
            schema="{order_id: string not null, items: int32}",
            dead_letters=f"{{topic: {letters}}}",
            policies="{quarantine_limit: {share: 1}}",
        )
    )
    produce(place, [GOOD, *BAD, None, GOOD] * 20)
    assert run(feed).batches[0].counts.quarantined == 80
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        with pytest.raises(UnknownTopic, match=rf"`{letters}`(?s:.)*create the topic"):
            commit_feed(feed)
        assert letters not in admin.list_topics()
        admin.create_topics({letters: {"num_partitions": 2}}, wait_for_metadata=True)
    assert held(place, feed) == [None] * 3

    # Killed when all is sent and nothing is committed: it was there for those alone who read what is not committed.
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "feeds/orders.yaml")], cwd=ROOT, check=False)
    assert killed.returncode == 9
    assert len(consumed(kafka, letters, committed=False)) == 80
    assert consumed(kafka, letters) == []

    result = commit_feed(feed)
    assert (result.status, result.letters, result.letters_to) == (CommitStatus.COMMITTED, 80, letters)
    assert held(place, feed) == [m.after for m in result.offsets]
    found = until(lambda: consumed(kafka, letters))
    bad = [r for r in consumed(kafka, place.topic) if r["value"] in BAD]
    assert sorted(map(told, found), key=lambda t: t[:2]) == sorted(map(meant, bad), key=lambda t: t[:2])
    assert all(r["partition"] == int(said(r)["sluice.partition"]) % 2 for r in found)
    why = Counter((r["value"], *(said(r)[f"sluice.{name}"] for name in ("stage", "reason", "field"))) for r in found)
    assert why == {(value, *reasons): 20 for value, reasons in BAD.items()}
    assert {(said(r)["sluice.topic"], said(r)["sluice.feed"]) for r in found} == {(place.topic, "orders")}
    in_order = [[int(said(r)["sluice.offset"]) for r in found if said(r)["sluice.partition"] == p] for p in "012"]
    assert in_order == [sorted(offsets) for offsets in in_order]

    assert commit_feed(feed).status is CommitStatus.UNCHANGED
    produce(place, [b"again", GOOD])
    run(feed)
    assert commit_feed(feed).letters == 1
    assert len(until(lambda: len(r := consumed(kafka, letters)) > 80 and r)) == 81
    with edges(feed) as opened:
        assert opened.group.members() == ()
