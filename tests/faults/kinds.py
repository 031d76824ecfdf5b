"""Kinds of feeds: raw and typed, both layouts, both publish policies, with and without a contract, dead letters and
transactions. The seed chooses the combinations.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Plain

from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.facts import write_lines
from tests.faults.account import SEED
from tests.faults.field import Field
from tests.integration.support import consume_topic
from tests.resources.kafka.tools import wait_until
from tests.table_readers import DeltaReader, IcebergReader, Reader, Row, read_by_duckdb

HOUR_MS, HOURS = 3_600_000, 3
SESSION_MS, TRANSACTION_MS = 3_000, 5_000
SMALL_TASK, OVERSIZED = "{task_memory: 300MiB}", 17 << 20
"""Tuning for tasks that take batches of 16 MiB, and the bytes of a value beyond that."""
CONTRACT_MIN = 5
CONTRACT = {
    "name": "orders",
    "expectations": [
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "sequence", "min_value": CONTRACT_MIN}},
        {
            "type": "expect_column_values_to_match_regex",
            "kwargs": {"column": "producer", "regex": "^t", "mostly": 0.9},
            "severity": "warning",
        },
    ],
    "meta": {"great_expectations_version": "1.24.1"},
}
TYPED = {"format": "json", "schema": "{producer: string not null, sequence: int64 not null}"}


@dataclass(frozen=True)
class Kind:
    """The settings that differ between feeds.

    `typed`: with a contract, which sends values that are no JSON object, and some that are, into quarantine.
    `shared`: small offset ranges share files.
    """

    commit: str
    typed: bool
    letters: bool
    publish: str
    layout: str
    shared: bool = False

    def __str__(self) -> str:
        words = [self.commit, "typed" if self.typed else "raw", "with dead letters" if self.letters else ""]
        return ", ".join([*filter(None, words), self.publish, f"by {self.layout}", *["in shared files"] * self.shared])


def draw_kinds() -> list[Kind]:
    """Returns three kinds that cover every setting."""
    draw = random.Random(f"kinds of {SEED}")
    commits = [("transactional", True, True), ("transactional", False, False), ("plain", True, False)]
    policies, layouts = ["by_partition", "all_or_nothing"], ["window", "record_time"]
    for names in (policies, layouts):
        names.append(draw.choice(names))
        draw.shuffle(names)
    return [Kind(*c, publish, layout) for c, publish, layout in zip(commits, policies, layouts, strict=True)]


def apply_kind(field: Field, kind: Kind) -> None:
    """Give the feed the settings of the kind, with short session and transaction timeouts."""
    client = {"bootstrap": field.arena.proxied_bootstrap}
    client |= {"session_timeout_ms": SESSION_MS, "transaction_timeout_ms": TRANSACTION_MS}
    settings: dict[str, Any] = {"kafka": client, "commit": kind.commit, "publish": kind.publish}
    settings["landing"] = {"layout": kind.layout, "shared_files": kind.shared}
    if kind.typed:
        settings |= TYPED | {"policies": {"quarantine_limit": {"share": 1}}}
        contract = field.root / "feeds" / f"{field.name}.contract.json"
        contract.parent.mkdir(exist_ok=True)
        contract.write_text(json.dumps(CONTRACT))
    if kind.letters:
        settings["dead_letters"] = {"topic": f"{field.topic}-dlq"}
        field.arena.create(f"{field.topic}-dlq", 2)
    field.settings |= {k: v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
    field.account.log(f"the feed: {kind}")


def split_feed(field: Field) -> tuple[str, ...]:
    """Split the feed by a field: two typed outputs with tables, one of them under the contract, and a raw one.
    Tombstones are in both typed ones. Returns the outputs."""
    typed = {"schema": yaml.safe_load(TYPED["schema"])}
    catalog = {"type": "sql", "uri": f"sqlite:///{field.root}/catalog.db"}
    tables: list[dict[str, Any]] = [{"iceberg": {"name": "db.odd", "catalog": catalog}}, {"delta": {}}]
    into = {name: typed | {"table": table} for name, table in zip(("odd", "even"), tables, strict=True)}
    field.fields = [*({"kind": name} for name in into), {"tombstone": True}]
    rule = {"by": {"field": "kind"}, "into": into, "otherwise": "raw", "tombstones": "all"}
    contract = field.root / "feeds" / f"{field.name}.contract.json"
    contract.rename(contract.with_name(f"{field.name}.odd.contract.json"))
    field.settings |= {"split": json.dumps(rule)}
    del field.settings["schema"]
    return (*into, "otherwise")


def check_tables(field: Field) -> None:
    """Assert that each output's table has the records that a plain consumer reads, and that no snapshot has another."""
    catalog = {"type": "sql", "uri": f"sqlite:///{field.root}/catalog.db"}
    readers: dict[str, Reader] = {
        "odd": IcebergReader("db.odd", catalog),
        "even": DeltaReader(f"{field.folder.root}/data/{field.name}/even"),
    }
    columns, expected = ("kafka_partition", "kafka_offset", "producer", "sequence"), defaultdict[str, list[Row]](list)
    for record in consume_topic(field.arena.kafka, field.topic):
        if record["value"] is None:
            for of_output in readers:
                expected[of_output].append((record["partition"], record["offset"], None, None))
            continue
        with suppress(ValueError, KeyError, TypeError):
            value = json.loads(record["value"])
            output, who, sequence = value["kind"], value["producer"], value["sequence"]
            if output == "even" or sequence >= CONTRACT_MIN:
                expected[output].append((record["partition"], record["offset"], who, sequence))
    for output, reader in readers.items():
        rows, snapshots = sorted(expected[output]), reader.list_snapshots()
        assert rows
        assert reader.read_rows(snapshots[-1], columns) == rows
        assert read_by_duckdb(reader.list_files(snapshots[-1]), columns) == rows
        for snapshot in snapshots:
            older = reader.read_rows(snapshot, columns)
            assert len(older) == len({row[:2] for row in older}), "a row is there twice"
            assert {*rows}.issuperset(older)
        field.account.log(f"table of {output}: {len(rows):,} rows, {len(snapshots)} snapshots")


def produce_history(field: Field) -> None:
    """Produce a few records to each partition in each of the past hours, whose windows are over."""
    now, notes, sequence = int(time.time() * 1000), [], 0
    with closing(KafkaProducer(bootstrap_servers=field.arena.kafka.bootstrap, acks="all")) as producer:
        for hour in range(HOURS, 0, -1):
            for partition in range(field.partitions):
                who = {"producer": "h", "sequence": sequence}
                more = field.fields[sequence % len(field.fields)] if field.fields else {}
                key, value = None, json.dumps(who | more, indent=1).encode()
                if more.get("tombstone"):
                    key, value = value, None
                stamp = now - hour * HOUR_MS
                sent = producer.send(field.topic, value, key, partition=partition, timestamp_ms=stamp).get(60)
                notes.append(who | {"topic": field.topic, "partition": partition, "offset": sent.offset})
                sequence += 1
    write_lines(field.add_notes("history"), (n | {"outcome": "acknowledged", "transaction": None} for n in notes))


def produce_oversized(field: Field, sequence: int) -> None:
    """Produce a batch to each partition, of some kilobytes, that expands beyond the memory of `SMALL_TASK`."""
    notes = []
    settings = {"compression_type": "zstd", "max_request_size": 1 << 30, "linger_ms": 0}
    with closing(KafkaProducer(bootstrap_servers=field.arena.kafka.bootstrap, acks="all", **settings)) as producer:
        for partition in range(field.partitions):
            who = {"producer": "oversized", "sequence": sequence * field.partitions + partition}
            value = json.dumps({**who, "padding": "0" * OVERSIZED}).encode()
            sent = producer.send(field.topic, value, partition=partition).get(60)
            notes.append(who | {"topic": field.topic, "partition": partition, "offset": sent.offset})
    write_lines(field.add_notes("oversized"), (n | {"outcome": "acknowledged", "transaction": None} for n in notes))


def check_letters(field: Field) -> None:
    """Assert that the committed dead letters are the quarantined records, each once."""
    letters = Counter(list_letters(field.arena.kafka, f"{field.topic}-dlq"))
    quarantined = set(list_quarantined(field.folder.root / "quarantine"))
    field.account.log(f"{letters.total():,} dead letters for {len(quarantined):,} records in quarantine")
    assert quarantined
    assert {x: n for x, n in letters.items() if n > 1} == {}, "letters that were sent twice"
    assert quarantined - set(letters) == set(), "in quarantine without a dead letter"
    assert set(letters) - quarantined == set(), "letters of records that are not in quarantine"


def list_letters(kafka: LocalKafka, topic: str) -> Iterator[tuple[int, int]]:
    """Yields partition and offset of the record of each committed dead letter in the topic."""
    settings = {"isolation_level": "read_committed", "group_id": None}
    with closing(KafkaConsumer(bootstrap_servers=kafka.bootstrap, **settings)) as reader:
        partitions = [Plain(topic, p) for p in sorted(wait_until(lambda: reader.partitions_for_topic(topic)))]
        reader.assign(partitions)
        ends = reader.end_offsets(partitions)
        reader.seek_to_beginning(*partitions)
        while any(reader.position(p) < end for p, end in ends.items()):
            for records in reader.poll(timeout_ms=500).values():
                for record in records:
                    headers = dict(record.headers)
                    yield int(headers["sluice.partition"]), int(headers["sluice.offset"])


def list_quarantined(folder: Path, reason: str = "") -> Iterator[tuple[int, int]]:
    """Yields partition and offset of each record in the quarantine files of a folder, or of those with the reason."""
    for path in folder.rglob("*.parquet"):
        rows = pq.ParquetFile(path).read(["partition", "offset", "reason"]).to_pylist()
        yield from ((r["partition"], r["offset"]) for r in rows if reason in ("", r["reason"]))
