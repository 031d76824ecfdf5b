"""`sluice dbt sources`: its queries are executed over hours landed from a real Kafka."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import yaml
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

import sluice as package
from sluice.pipelines.operating.dbt_sources import describe_sources, list_untested
from sluice.pipelines.records.rows.row_format import landed_schema
from sluice.pipelines.tables.key_fold import Columns
from sluice.pipelines.util.units import DAY, HOUR, MINUTE, show_instant, show_window
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.cli.conftest import Sluice

YESTERDAY = (now() - HOUR) // DAY * DAY - DAY  # its last hour is closed also just after midnight
TABLES = ["", "table: {iceberg: {name: db.orders}}\n", "table: {delta: {}}\n"]


def read_sources(sluice: Sluice, *arguments: str) -> dict[str, Any]:
    """Returns the only table of the printed file, which must be dbt's."""
    done = sluice("dbt", "sources", *arguments)
    assert done.code == 0, done.err
    (source,) = yaml.safe_load(done.out)["sources"]
    (table,) = source["tables"]
    return dict(table)


def load_windows(query: str, project: Path) -> pa.Table | None:
    """Returns the table of complete windows that a query names, read by the format's own library."""
    if match := re.search(r" from delta\.`(.+)`", query):
        from deltalake import DeltaTable

        rows = DeltaTable(match[1]).to_pyarrow_table()
        assert isinstance(rows, pa.Table)
        return rows
    if match := re.search(r" from (db\.\w+)", query):
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("sluice", type="sql", uri=f"sqlite:///{project / '.sluice/catalog.db'}")
        return catalog.load_table(match[1]).scan().to_arrow()
    return None


def query_loaded_at(table: dict[str, Any], project: Path) -> int | None:
    """Returns the newest complete window's end (ms), as dbt reads it: a time without a zone is in UTC."""
    query = table["config"]["loaded_at_query"]
    with duckdb.connect() as connection:
        connection.execute("set TimeZone = 'UTC'")
        if (rows := load_windows(query, project)) is not None:
            connection.register("complete_windows", rows)
            query = re.sub(" from .*", " from complete_windows", query)
        (row,) = connection.execute(f"select epoch_ms(({query}))").fetchall()
    return None if row[0] is None else int(row[0])


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=["files", "iceberg", "delta"])
def test_freshness_is_the_end_of_the_newest_complete_window(
    project: Path, kafka: LocalKafka, sluice: Sluice, table: str
) -> None:
    topic = f"dbt-{secrets.token_hex(4)}"
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for number in range((now() - YESTERDAY) // (HOUR // 4)):
        for partition in (0, 1):
            time = YESTERDAY + number * HOUR // 4
            producer.send(topic, b"%d" % number, partition=partition, timestamp_ms=time)
    producer.close()
    head = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: {show_instant(YESTERDAY)}\n"
    (project / "feeds" / "orders.yaml").write_text(f"{head}group: g-{topic}\nengine: local\n{table}")
    of_hour = [show_window(YESTERDAY + n * HOUR) for n in range(24)]

    def land(*arguments: str) -> int | None:
        done = sluice("run", "orders", "--no-dagster", *arguments)
        assert done.code == 0, done.err
        described = read_sources(sluice)
        return query_loaded_at(described, project)

    if not table:
        assert query_loaded_at(read_sources(sluice), project) is None
    assert land("--window", of_hour[2]) == YESTERDAY + 3 * HOUR
    assert land("--window", of_hour[6]) == YESTERDAY + 7 * HOUR
    assert land("--window", of_hour[4]) == YESTERDAY + 7 * HOUR, "an older window does not set it back"
    assert land("--offsets", f"{topic}:0:40-44") == YESTERDAY + 7 * HOUR, "one of two partitions is not the hour"
    assert not package.check("orders", of_hour[10]).complete
    threshold = read_sources(sluice)["config"]["freshness"]["error_after"]
    assert threshold == {"count": 70, "period": "minute"}, "the hour and the grace period"
    begun = now()
    assert begun - (YESTERDAY + 7 * HOUR) > 70 * MINUTE, "dbt reports an error"
    newest = land()
    assert newest is not None
    assert newest % HOUR == 0
    assert begun - newest < 70 * MINUTE, "dbt reports a pass: the newest window that was due is complete"
    assert package.check("orders", show_window(newest - HOUR)).complete
    with pytest.raises(package.errors.WindowIncomplete):
        package.read("orders", show_window(newest))
    if not table:
        location = read_sources(sluice)["config"]["meta"]["external_location"]
        assert duckdb.sql(f"select count(*) from {location}").fetchall() == [(2 * number + 2,)]
        before = YESTERDAY + 12 * HOUR
        done = sluice("expire", "orders", "--before", show_window(before), "--reason", "a test", "--yes")
        assert done.code == 0, done.err
        assert query_loaded_at(read_sources(sluice), project) == newest


TYPED = """\
kafka: {bootstrap: 127.0.0.1:9}
topics: orders
start: earliest
format: json
description: Orders with {{ braces }} and "quotes"
descriptions: {id: the key, kafka_offset: position}
schema: {id: int64 not null, "net price": "decimal(12,2)", currency: string, tags: "list<struct<a:int64>>", day: date}
"""
CONTRACT = """{"name": "orders", "meta": {"great_expectations_version": "1.24.1"}, "expectations": [
{"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "currency", "value_set": ["EUR", "no"]}},
{"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "currency", "value_set": ["it's", "EUR"]}},
{"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "net price", "value_set": ["0.10", 2]},
 "severity": "warning"},
{"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "id", "value_set": [1], "mostly": 0.9}},
{"type": "expect_column_values_to_be_unique", "kwargs": {"column": "id"}},
{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "id"}},
{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "currency"}},
{"type": "expect_column_values_to_be_between", "kwargs": {"column": "id", "min_value": 0}}]}"""


def test_columns_have_types_descriptions_and_the_tests_that_dbt_can_run(project: Path, sluice: Sluice) -> None:
    (project / "feeds" / "orders.yaml").write_text(TYPED)
    (project / "feeds" / "orders.contract.json").write_text(CONTRACT)
    table = read_sources(sluice)
    assert table["description"] == '{{ "Orders with {{ braces }} and \\"quotes\\"" }}', "a literal of Jinja"
    columns = {c["name"]: c for c in table["columns"]}
    live = {"where": "kafka_tombstone is not true"}
    assert columns["id"] == {
        "name": "id",
        "data_type": "bigint",
        "description": "the key",
        "quote": True,
        "data_tests": [{"not_null": {"config": live}}, {"unique": {"config": {"severity": "warn"}}}],
    }
    accepted = {"arguments": {"values": ["EUR", "no"]}}
    assert columns["currency"]["data_tests"] == [{"accepted_values": accepted}, {"not_null": {"config": live}}]
    accepted = {"arguments": {"values": ["0.10", "2"], "quote": False}, "config": {"severity": "warn"}}
    assert columns["net price"]["data_tests"] == [{"accepted_values": accepted}]
    types = {name: columns[name]["data_type"] for name in ("net price", "tags", "day", "kafka_timestamp")}
    assert types == {
        "net price": "decimal(12,2)",
        "tags": 'struct("a" bigint)[]',
        "day": "date",
        "kafka_timestamp": "timestamp with time zone",
    }
    with duckdb.connect() as connection:
        every = ", ".join(f'"{name}" {c["data_type"]}' for name, c in columns.items())
        connection.execute(f"create table orders ({every})")
    feed = Project.find(project).feeds()["orders"]
    assert list_untested(feed) == [
        'currency is one of "it\'s", "EUR"',
        "id is 1, in at least 90% of rows",
        "id is at least 0",
    ]
    assert all(f"# orders, not tested: {one}" in sluice("dbt", "sources").out for one in list_untested(feed))


CHANGES = "format: json\nschema: {id: int64, day: date, tags: list<string>}\n"


def test_current_rows_are_a_source_of_their_own(project: Path, sluice: Sluice) -> None:
    """The described columns are those of the table that a sync makes."""
    head = "kafka: {bootstrap: 127.0.0.1:9}\ntopics: orders\nstart: earliest\n"
    iceberg = "table: {iceberg: {name: db.a}, current: now.b}\n"
    settings = {
        "changed": f"{CHANGES}changes: {{format: debezium, key: id, order_by: source.lsn}}\n{iceberg}",
        "put": f"{CHANGES}changes: {{format: upsert}}\ntable: {{delta: {{}}, current: true}}\n",
        "raw": "changes: {format: upsert}\ntable: {delta: {}, current: true}\n",
    }
    for name, lines in settings.items():
        (project / "feeds" / f"{name}.yaml").write_text(head + lines)
    document = sluice("dbt", "sources", *settings, "--database", "lake", "--json").document
    names = {s["name"]: [t["name"] for t in s["tables"]] for s in document["sources"]}
    assert names == {
        "db": ["changed"],
        "now": ["changed__current"],
        "delta": ["put", "put__current", "raw", "raw__current"],
    }
    tables = {t["name"]: t for s in document["sources"] for t in s["tables"]}
    changed, put = tables["changed__current"], tables["put__current"]
    assert (changed["identifier"], document["sources"][1]["database"]) == ("b", "lake")
    assert put["identifier"] == f"{project}/.sluice/lake/tables/put_current"
    tests = {c["name"]: c["data_tests"] for c in changed["columns"] if "data_tests" in c}
    assert tests == {"id": ["not_null", "unique"]}
    columns = {name: {c["name"]: c["data_type"] for c in t["columns"]} for name, t in tables.items()}
    for name in settings:
        feed = Project.find(project).feeds()[name]
        assert feed.changes is not None
        landed = landed_schema(feed.landed_columns)
        types = {f.name: spell_arrow_type(f.type) for f in landed}
        assert set(columns[f"{name}__current"]) == set(Columns.of(feed.changes, types).rows)
    assert columns["changed__current"]["day"] == "date"
    assert columns["put__current"]["tags"] == "array<string>"


def spell_arrow_type(t: pa.DataType) -> str:
    """Returns a type as the ledger spells it."""
    plain = t.value_type if pa.types.is_dictionary(t) else t
    if pa.types.is_struct(plain):
        return f"struct<{', '.join(f'{f.name}:{spell_arrow_type(f.type)}' for f in plain)}>"
    if pa.types.is_list(plain):
        return f"list<{spell_arrow_type(plain.value_type)}>"
    words = {"date32[day]": "date", "timestamp[ms, tz=UTC]": "timestamp(ms)"}
    return words.get(str(plain), str(plain))


def test_sources_have_the_schemas_of_their_tables(project: Path, sluice: Sluice) -> None:
    head = "kafka: {bootstrap: 127.0.0.1:9}\ntopics: orders\nstart: earliest\n"
    tables = {"raw": "", "ice": "table: {iceberg: {name: db.a}}\n", "del": "table: {delta: {}}\n"}
    for name, table in tables.items():
        (project / "feeds" / f"{name}.yaml").write_text(head + table)
    (project / "feeds" / "github.yaml").write_text(
        f"{head}format: json\nsplit:\n  by: {{header: event}}\n  otherwise: raw\n  into:\n"
        "    push: {schema: {id: int64}, table: {iceberg: {name: db.b}}}\n"
        "    fork: {schema: {id: int64}}\n"
    )
    document = sluice("dbt", "sources", "raw", "ice", "del", "github", "--database", "lake", "--json").document
    lake = project / ".sluice" / "lake"
    names = {s["name"]: [t["name"] for t in s["tables"]] for s in document["sources"]}
    of_files = ["raw", "github__fork", "github__otherwise"]
    assert names == {"sluice": of_files, "db": ["ice", "github__push"], "delta": ["del"]}
    by_name = {t["name"]: t | {"source": s} for s in document["sources"] for t in s["tables"]}
    assert by_name["ice"]["config"]["loaded_at_query"] == "select max(window_end) from lake.db.a_windows"
    assert (by_name["ice"]["identifier"], by_name["ice"]["source"]["database"]) == ("a", "lake")
    assert by_name["del"]["identifier"] == f"{lake}/data/del"
    assert f"{lake}/data/github/fork/**/*.parquet" in by_name["github__fork"]["config"]["meta"]["external_location"]
    output = project / "sources.yml"
    assert sluice("dbt", "sources", "raw", "--output", str(output)).code == 0
    assert yaml.safe_load(output.read_text()) == describe_sources([Project.find(project).feeds()["raw"]])
    assert sluice("dbt", "sources", "raw", "--output", str(project / "none" / "x.yml")).code == 2
    assert sluice("dbt", "sources", "absent").code == 2
