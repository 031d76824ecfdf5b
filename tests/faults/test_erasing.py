"""Erasures killed before each of their effects: the lake stays consistent, and the next call continues, or a repair.

Each person of the topic is erased once, killed one effect later than the one before. Between kill and continuation,
the window lands again, or files are merged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake.paths import get_erasing_folder
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.feed_tables import compare_tables
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_tables
from tests.checker.facts import Evidence
from tests.checker.invariants import Settings, check
from tests.checker.lake import Folder
from tests.faults.erasers import erase_person, erase_until_killed
from tests.faults.writers import merge
from tests.integration.canaries import read_everything
from tests.integration.support import FeedProject, open_feed_ledger, open_inline_ports, run

pytestmark = pytest.mark.faults
BROKERS = 1
STAMP, HOUR = 1_700_000_000_000, 3_600_000
PEOPLE, EACH = 80, 6
TABLES = {"iceberg": "{iceberg: {name: db.orders}}", "delta": "{delta: {}}"}


def name_person(person: int) -> str:
    return f"person-{person:08d}@example.com"


def produce(kafka: LocalKafka, topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=20)
    for i in range(EACH):
        for person in range(PEOPLE):
            value = {"id": person, "email": name_person(person)} | (
                {"id2": 0} if i else {"email": [name_person(person)]}
            )
            producer.send(topic, json.dumps(value).encode(), None, None, i % 2, STAMP + i % 3 * HOUR)
    producer.close()


def count_people(feed: Feed) -> Counter[int]:
    """Returns the records of each person in landed files and quarantine, by the ledger's files."""
    counts = Counter[int]()
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        receipts = (r for n, e in ledger.entries() if e.kind == "publish" for r in ledger.read().receipts(n, e))
        for part in {p.path: p for r in receipts for p in r.parts}.values():
            path = part.path if ports.lake.size(part.path) is not None else part.staged
            rows = pq.read_table(ports.lake.open(path))
            if "id" in rows.schema.names:
                counts.update(rows.column("id").to_pylist())
            else:
                counts.update(json.loads(v)["id"] for v in rows.column("value").to_pylist())
    return counts


@pytest.mark.parametrize("table", TABLES)
def test_killed_before_each_effect(
    table: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2))
    produce(kafka, project.topic)
    schema = '{id: "int64", email: string, id2: int64}'
    settings = {"format": "json", "schema": schema, "policies": "{quarantine_limit: {share: 1}}"}
    feed = project.write_feed("orders", table=TABLES[table], **settings)
    run(feed)
    path = tmp_path / "feeds" / "orders.yaml"
    folder = Folder(tmp_path / ".sluice" / "lake", "orders")
    erase_person(feed, 0)
    assert count_people(feed) == dict.fromkeys(range(1, PEOPLE), EACH)
    person, killed = 1, True
    while killed:
        killed = erase_until_killed(path, person, person)
        verdict = check(folder, Evidence())
        assert verdict.holds, f"killed before effect {person}: {verdict}"
        others = {p: n for p, n in count_people(feed).items() if p != person}
        assert others == dict.fromkeys(range(person + 1, PEOPLE), EACH)
        text = name_person(person).encode()
        with open_inline_ports(feed) as ports:
            is_sound = not audit(open_feed_ledger(feed, ports), ports.lake).problems
        is_there = any(text in data for _, data in read_everything(tmp_path / ".sluice" / "lake"))
        assert not is_sound or not is_there or count_people(feed)[person] == EACH, "an audit passes over a rest"
        if person % 3 == 1:
            run(feed, Request(RequestKind.WINDOW, window=STAMP - STAMP % HOUR + person % 2 * HOUR, replace=True))
        elif person % 3 == 2:
            merge(feed)
        if person % 4 == 1:  # a repair continues, and is killed as well, before its effect of any number
            erase_until_killed(path, None, person // 4 + 1)
            assert not erase_until_killed(path, None, 0)
            with open_inline_ports(feed) as ports:
                assert not any(ports.lake.list(get_erasing_folder("orders")))
                assert audit(open_feed_ledger(feed, ports), ports.lake).problems == ()
            remaining = count_people(feed)[person]
            assert remaining in (0, EACH), "decided or not"
            assert (
                remaining
                or [name for name, data in read_everything(tmp_path / ".sluice" / "lake") if text in data] == []
            )
        erase_person(feed, person)
        assert count_people(feed) == dict.fromkeys(range(person + 1, PEOPLE), EACH)
        assert [name for name, data in read_everything(tmp_path / ".sluice" / "lake") if text in data] == []
        person += 1
    assert person > 20, "there are more effects than that"
    verdict = check(folder, Evidence(), Settings(healed=True))
    assert verdict.holds, verdict
    with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
        assert audit(open_feed_ledger(feed, ports), ports.lake, hashes=True).problems == ()
        assert all(comparison.same for _, comparison in compare_tables(feed, ports, tables))
