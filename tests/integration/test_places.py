"""Columns of paths, headers and other forms on a real Kafka: DuckDB takes the same out of the raw rows of the topic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject, list_files, query_files, rescan_feed, run
from tests.resources.kafka.tools import wait_until

SCHEMA = {
    "id": "int64 not null",
    "repo": "string not null at repo.full_name",
    "owner": "int64 at repo.owner.id",
    "items": "list<struct<sku:string>>",
    "first": "string at items[0].sku",
    "event": "string header X-Event",
    "trace": "binary not null header trace",
    "balance": "decimal(9,2) from text at bill.balance",
    "day": "date from days at bill.due",
}
COUNT = 1500
WANTED = r"""
    with records as (
        select "offset", value is null as gone, value::json as v,
            list_filter(headers, lambda h: h.key = 'X-Event')[-1].value as event,
            list_filter(headers, lambda h: h.key = 'trace')[-1].value as trace
        from (select * replace (decode(value) as value) from read_parquet($files, hive_partitioning = false))
    ), fields as (
        select *, v->>'$.repo.full_name' as repo, v->'$.repo.owner.id' as owner, v->>'$.bill.balance' as text,
            v->'$.bill.due' as due, json_type(v, '$.repo.owner') as owner_type, json_type(v, '$.bill') as bill_type,
            try_cast(text as decimal(38,9)) as number, try(decode(event)) as event_text
        from records
    )
    select "offset", coalesce((event is null or event_text is not null) and (gone or (
            trace is not null and json_type(v, '$.id') in ('UBIGINT', 'BIGINT') and json_type(v, '$.repo') = 'OBJECT'
            and json_type(v, '$.repo.full_name') = 'VARCHAR' and coalesce(owner_type, 'NULL') in ('OBJECT', 'NULL')
            and coalesce(json_type(owner), 'NULL') in ('UBIGINT', 'BIGINT', 'NULL')
            and coalesce(bill_type, 'NULL') in ('OBJECT', 'NULL')
            and (coalesce(json_type(v, '$.bill.balance'), 'NULL') = 'NULL'
                or json_type(v, '$.bill.balance') = 'VARCHAR' and number is not null and number = round(number, 2)
                and abs(number) < 1e7)
            and coalesce(json_type(due), 'NULL') in ('UBIGINT', 'BIGINT', 'NULL'))), false) as fits,
        try_cast(v->>'$.id' as bigint), repo, try_cast(v->>'$.repo.owner.id' as bigint), v->>'$.items[0].sku',
        event_text, trace,
        try_cast(number as decimal(9,2)), date '1970-01-01' + try_cast(v->>'$.bill.due' as int)
    from fields
"""


def make_value(random: Random, n: int) -> dict[str, Any]:
    """Return a record, about a fifth of which do not fit the schema."""
    owner: Any = random.choice([{"id": n, "login": f"u{n}"}, {"id": n}, {}, None, {"id": None}])
    repo: Any = {"full_name": f"r/{n}", "owner": owner, "stars": n}
    bill: Any = {
        "balance": random.choice(["1.5", "-0.07", "1234567.89", "3", None]),
        "due": random.choice([n, 0, None]),
    }
    if random.random() < 0.1:
        repo = random.choice([None, "text", [], {}, {"full_name": None}, {"full_name": 5}, repo | {"owner": 7}])
    if random.random() < 0.1:
        bill = random.choice(
            [
                {"balance": "NaN"},
                {"balance": "1.234"},
                {"balance": 1.5},
                {"balance": ""},
                {"due": "5"},
                [],
                {"balance": "1e9"},
            ]
        )
    items = [{"sku": f"s{i}", "n": i} for i in range(random.randrange(3))]
    value = {"id": n, "repo": repo, "items": items, "bill": bill, "other": {"n": n}}
    return {k: v for k, v in value.items() if k == "id" or random.random() < 0.98}


def produce(project: FeedProject) -> None:
    random, producer = Random(1), KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=20)
    for n in range(COUNT):
        headers = [("trace", bytes([n % 256]))] if random.random() < 0.97 else []
        headers += [("X-Event", f"e{n % 7}".encode())] if n % 2 else []
        headers += [("X-Event", random.choice([b"last", b"\xff", "grün".encode()]))] if n % 5 == 0 else []
        value = None if n % 50 == 0 else json.dumps(make_value(random, n)).encode()
        producer.send(project.topic, value, key=b"k", partition=0, headers=headers)
    producer.close()


def read_landed(feed: Feed) -> list[tuple[Any, ...]]:
    names = ", ".join(name for name in SCHEMA if name != "items")
    query = f"select kafka_offset, {names} from read_parquet($files, hive_partitioning = false) order by 1"
    return [tuple(row.values()) for row in query_files(feed, query, list_files(feed)).to_pylist()]


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=1))
    produce(project)
    return project


def read_wanted(project: FeedProject) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return the rows that DuckDB makes of the topic's raw rows, and the offsets of records that do not fit."""
    raw = project.write_feed("raw")
    run(raw)
    rows = [tuple(row.values()) for row in query_files(raw, WANTED, list_files(raw)).to_pylist()]
    fitting = [(offset, *values) for offset, fits, *values in sorted(rows) if fits]
    return fitting, [offset for offset, fits, *_ in sorted(rows) if not fits]


def write_placed_feed(project: FeedProject, **settings: Any) -> Feed:
    limit = "{quarantine_limit: {share: 1.0}}"
    return project.write_feed(
        "placed", **{"format": "json", "schema": json.dumps(SCHEMA), "policies": limit} | settings
    )


@pytest.mark.parametrize("engine", ["processes", pytest.param("spark", marks=pytest.mark.spark)])
def test_columns_of_places_equal_those_that_duckdb_extracts(project: FeedProject, engine: str) -> None:
    fitting, others = read_wanted(project)
    assert len(fitting) > 800
    assert len(others) > 150
    feed = write_placed_feed(project, engine=engine)
    if engine == "spark":
        assert main(["run", "placed", "--project", str(project.root), "--no-dagster"]) == 0
    else:
        run(feed)
    assert read_landed(feed) == fitting
    query = 'select "offset" from read_parquet($files, hive_partitioning = false) order by 1'
    assert query_files(feed, query, list_quarantined(feed)).column(0).to_pylist() == others
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), len(fitting))


def list_quarantined(feed: Feed) -> list[str]:
    return list(open_lake(feed).list(f"quarantine/{feed.name}"))


def test_a_place_that_no_record_has_is_printed_by_run(project: FeedProject, capfd: pytest.CaptureFixture[str]) -> None:
    absent = {"id": "int64", "a": "string at repo.fullname", "b": "string header X-event", "c": 'string from "re.po"'}
    write_placed_feed(project, schema=json.dumps(absent | {"plain": "string"}))
    assert main(["run", "placed", "--project", str(project.root), "--no-dagster"]) == 0
    printed = " ".join("".join(capfd.readouterr()).split())
    for name, text in (*absent.items(),)[1:]:
        assert f"{name} ({text}) is in no record" in printed
    assert "plain" not in printed


def test_republished_rows_of_places_land_as_the_same_rows(
    project: FeedProject, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    feed, target = write_placed_feed(project), fresh_topic(partitions=1)
    run(feed)
    before = read_landed(feed)
    command = ["republish", "placed", "--topic", target, "--keep-partitions", "--yes", "--id", "again", "--json"]
    assert main([*command, "--offsets", f"{project.topic}:0:0-{COUNT}", "--project", str(project.root)]) == 0
    assert json.loads(capfd.readouterr().out)["records"] == len(before)
    again = FeedProject(project.root / "again", project.kafka, target)
    again.root.mkdir()
    landed = write_placed_feed(again)
    wait_until(lambda: run(landed) and len(read_landed(landed) if list_files(landed) else []) == len(before))
    assert [row[1:] for row in read_landed(landed)] == [row[1:] for row in before]
    assert not list_quarantined(landed)
    extra = "select _extra from read_parquet($files, hive_partitioning = false) order by kafka_offset"
    texts = [query_files(f, extra, list_files(f)).column(0).to_pylist() for f in (feed, landed)]
    assert [[json.loads(t or "{}") for t in rows] for rows in texts[:1]] == [[json.loads(t or "{}") for t in texts[1]]]
