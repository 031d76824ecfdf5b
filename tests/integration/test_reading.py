"""A window holds the records of a plain consumer for every way to read it, and the examples of docs/reading.md run."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.dataset
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from pyspark.sql import DataFrame, SparkSession

import sluice
from sluice.cli.main import main
from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import show_window
from sluice.reading import Windows
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from sluice.spark_source import SluiceSource
from tests.integration.conftest import Lines
from tests.integration.support import FeedProject, consume_topic, run

HOUR = 3_600_000
ABSURD = (1 << 63) - 1
DOCS = Path(__file__).parents[2] / "docs" / "reading.md"


@dataclass(frozen=True)
class LandedHours:
    """Two landed hours of `orders`; the last record of partition 1 has a timestamp beyond every calendar."""

    feed: Feed
    first: int
    records: tuple[dict[str, Any], ...]
    root: Path

    def format_hour(self, number: int) -> str:
        return show_window(self.first + number * HOUR)

    def expect_rows(self, number: int) -> list[dict[str, Any]]:
        """Returns the records of an hour from a plain consumer; the absurd timestamp belongs to the last hour."""
        hours = [min((r["timestamp"] - self.first) // HOUR, 1) for r in self.records]
        return [r for r, hour in zip(self.records, hours, strict=True) if hour == number]


@pytest.fixture(scope="module")
def landed(kafka: LocalKafka, tmp_path_factory: pytest.TempPathFactory, lake: Lines) -> LandedHours:
    topic, first = f"reading-orders-{secrets.token_hex(4)}", time.time_ns() // 1_000_000 // HOUR * HOUR - 5 * HOUR
    unbounded = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(ABSURD)}
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.create_topics({topic: {"num_partitions": 3, "configs": unbounded}}, wait_for_metadata=True)
    _produce(kafka, topic, first)
    root = tmp_path_factory.mktemp("reading")
    feed = FeedProject(root, kafka, topic, lake()).write_feed()
    for hour in range(4):
        run(feed, Request(RequestKind.WINDOW, window=first + hour * HOUR))
    return LandedHours(feed, first, tuple(consume_topic(kafka, topic)), root)


def _produce(kafka: LocalKafka, topic: str, first: int) -> None:
    """Produce two hours of records, an absurd timestamp, and an aborted transaction (its marker has today's time)."""
    plain = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    _send(plain, topic, first)
    plain.send(topic, b"when?", partition=1, timestamp_ms=ABSURD).get(10)
    plain.close()
    aborting = KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=f"{topic}-aborts")
    aborting.init_transactions()
    aborting.begin_transaction()
    _send(aborting, topic, first)
    aborting.abort_transaction()
    aborting.close()


def _send(producer: KafkaProducer, topic: str, first: int) -> None:
    for i in range(60):
        headers = [("n", b"%d" % i)] if i % 4 == 0 else None
        value = None if i % 9 == 0 else b"value %d" % i
        stamp = first + i * 2 * HOUR // 60
        producer.send(topic, value, key=b"k%d" % i, headers=headers, partition=i % 3, timestamp_ms=stamp)
    producer.flush()


@pytest.mark.each_lake
@pytest.mark.spark
@pytest.mark.slow
def test_window_read_each_way_matches_a_consumer(landed: LandedHours) -> None:
    session = engine.session(landed.feed.spark)
    session.dataSource.register(SluiceSource)
    options = {"feed": "orders", "project": str(landed.root)}
    for number in (0, 1):
        expected = landed.expect_rows(number)
        window = sluice.read("orders", landed.format_hour(number), project=landed.root)
        assert len(expected) > 25
        assert _read_arrow(window.arrow()) == expected
        assert _read_arrow(window.duckdb().order('partition, "offset"').to_arrow_table(), duckdb=True) == expected
        assert _read_spark(window.spark(session)) == _expect_on_spark(expected)
        _check_filters(window, [_get_position(r) for r in expected if r["offset"] >= 5], session)
    both = sluice.read("orders", landed.format_hour(0), to=landed.format_hour(2), project=landed.root)
    assert sorted(_read_arrow(both.arrow()), key=_get_position) == list(landed.records)
    summary = f"{len(both.files)} files, {both.rows:,} rows"
    assert repr(both) == f"Windows(orders, {landed.format_hour(0)} to {landed.format_hour(2)}, {summary})"
    between = {"from": landed.format_hour(0), "to": landed.format_hour(2)}
    assert _read_spark(session.read.format("sluice").options(**options, **between).load()) == _expect_on_spark(
        list(landed.records)
    )
    topic = landed.records[0]["topic"]
    pinned = session.read.format("sluice").options(**options, offsets=f"{topic}:0:3-25, {topic}:1:0-42").load()
    expected_rows = [
        r for r in landed.records if _get_position(r) < (2, 0) and (r["partition"] or 3 <= r["offset"] < 25)
    ]
    assert _read_spark(pinned) == _expect_on_spark(expected_rows)
    quiet = sluice.read("orders", landed.format_hour(3), project=landed.root)
    assert (quiet.paths, quiet.spark(session).count(), quiet.duckdb().fetchall()) == ([], 0, [])
    assert quiet.arrow().schema.equals(both.schema)
    with pytest.raises(WindowIncomplete):
        sluice.read("orders", landed.format_hour(6), project=landed.root)
    incomplete = session.read.format("sluice").options(**options, window=landed.format_hour(6))
    with pytest.raises(Exception, match="WindowIncomplete"):
        incomplete.load().count()


def _check_filters(window: Windows, expected: list[tuple[int, int]], session: SparkSession) -> None:
    """Check that each way to read returns these positions when it filters for offsets from 5 on."""
    names = ["partition", "offset"]
    by_dataset = window.dataset().to_table(columns=names, filter=pyarrow.dataset.field("offset") >= 5)
    frame = window.pandas(names)
    by_pandas = frame[frame["offset"] >= 5]
    by_polars = window.polars().filter(polars.col("offset") >= 5).select(names).collect()
    assert by_polars.rows() == expected
    assert [*zip(*by_dataset.to_pydict().values(), strict=True)] == expected
    assert [*by_pandas.itertuples(index=False, name=None)] == expected
    by_duckdb = window.duckdb().filter('"offset" >= 5').project('partition, "offset"')
    assert sorted(by_duckdb.fetchall()) == expected
    by_spark = window.spark(session).filter("offset >= 5").select(names)
    assert sorted(tuple(r) for r in by_spark.collect()) == expected


def _get_position(row: dict[str, Any]) -> tuple[int, int]:
    return row["partition"], row["offset"]


def _read_arrow(table: pa.Table, *, duckdb: bool = False) -> list[dict[str, Any]]:
    """Read rows with the timestamp in ms; DuckDB's infinity replaces timestamps beyond its calendar."""
    column = table.schema.get_field_index("timestamp")
    stamps = table.column(column).cast(pa.timestamp("us", "UTC"), safe=False) if duckdb else table.column(column)
    stamps = stamps.cast(pa.int64())
    rows: list[dict[str, Any]] = table.set_column(column, "timestamp", stamps).to_pylist()
    if duckdb:
        rows = [r | {"timestamp": ABSURD if r["timestamp"] >= ABSURD // 1000 else r["timestamp"] // 1000} for r in rows]
    return rows


def _read_spark(frame: DataFrame) -> list[dict[str, Any]]:
    names = [n for n in frame.columns if n != "timestamp"]
    rows = frame.orderBy("partition", "offset").selectExpr(*names, "unix_millis(timestamp) as timestamp").collect()
    return [_convert_row(r.asDict(recursive=True)) for r in rows]


def _convert_row(row: dict[str, Any]) -> dict[str, Any]:
    texts = {n: None if row[n] is None else bytes(row[n]) for n in ("key", "value")}
    headers = [{"key": h["key"], "value": bytes(h["value"])} for h in row["headers"] or ()] or None
    return row | texts | {"headers": headers}


def _expect_on_spark(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r | {"timestamp": None if r["timestamp"] == ABSURD else r["timestamp"]} for r in rows]


@pytest.mark.spark
@pytest.mark.slow
def test_examples_of_the_reading_page_run(landed: LandedHours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(landed.root)
    monkeypatch.setenv("SLUICE_PROJECT", str(landed.root))
    blocks = re.findall(r"```(sh|python)\n(.*?)```", _fill_in_page(landed, DOCS.read_text()), re.DOTALL)
    code = "".join(text for language, text in blocks if language == "python")
    exec(compile(code, str(DOCS), "exec"), {})
    for line in _list_commands(blocks):
        assert main(shlex.split(line)[1:]) == 0, line


def _fill_in_page(landed: LandedHours, text: str) -> str:
    """Replace the page's hours 14, 15, … by the landed hours, and its topic and project by the test's."""
    dated = re.sub(r"2026-11-20T(\d\d)(?![:\d])", lambda m: landed.format_hour(int(m[1]) - 14), text)
    with_topic = re.sub(r"orders:(\d)", rf"{landed.records[0]['topic']}:\1", dated)
    return with_topic.replace("/srv/ingest", str(landed.root))


def _list_commands(blocks: list[tuple[str, str]]) -> Iterator[str]:
    return (line for language, text in blocks if language == "sh" for line in text.splitlines())
