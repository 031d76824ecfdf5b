"""Records with fields called `date`, `hour` and `minute`: other tools read the folder, and filter by both.

The folder's keys are those of windows, the fields are the record's; no reader may confuse them.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import SchemaEntry
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing import LandedMessages, Message, land

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
BEGIN = datetime.datetime(2026, 11, 20, 23, tzinfo=datetime.UTC)
DATE, OWN = datetime.date(1999, 12, 31), "date = date '1999-12-31' and hour = 77 and minute = 5"
FEED = """
kafka: {{bootstrap: 'a:1'}}
topics: orders
start: earliest
format: json
schema: {{id: int64, date: date, hour: int32, minute: int32}}
window: {window}
landing: {{layout: {layout}}}
"""


def make_records(length: int, windows: int = 3) -> list[Message]:
    """Returns two records for each window, with the same fields within a window."""
    begin = int(BEGIN.timestamp() * 1000) // length * length
    return [
        Message(json.dumps(make_fields(i // 2) | {"id": i}).encode(), time=begin + i // 2 * length + i % 2)
        for i in range(2 * windows)
    ]


def make_fields(window: int) -> dict[str, Any]:
    return {"date": "1999-12-31", "hour": 77, "minute": 5} if window == 1 else {"date": None, "hour": 1, "minute": 6}


@pytest.fixture(params=["window", "record_time"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def land_records(folder: Path, layout: str, window: str = "1h", length: int = HOUR) -> LandedMessages:
    feed = folder / "feeds" / "orders.yaml"
    feed.parent.mkdir()
    feed.write_text(FEED.format(window=window, layout=layout))
    return land(feed, make_records(length), lake=folder / "lake")


def list_folders(root: Path) -> set[str]:
    return {p.parent.relative_to(root).as_posix() for p in root.rglob("*.parquet")}


@pytest.mark.parametrize(
    ("window", "length", "first"),
    [
        ("15m", 15 * MINUTE, "kafka_window_date=2026-11-20/kafka_window_hour=23/kafka_window_minute=00"),
        ("1h", HOUR, "kafka_window_date=2026-11-20/kafka_window_hour=23"),
        ("1d", DAY, "kafka_window_date=2026-11-20"),
    ],
)
def test_folders_have_keys_that_cannot_be_field_names(
    tmp_path: Path, layout: str, window: str, length: int, first: str
) -> None:
    land_records(tmp_path, layout, window, length)
    there = list_folders(tmp_path / "lake" / "data" / "orders")
    assert first in there
    assert len(there) == 3
    keys = {level.partition("=")[0] for folder in there for level in folder.split("/")}
    assert keys == {level.partition("=")[0] for level in first.split("/")}


def test_duckdb_filters_by_fields_and_folder_keys(tmp_path: Path, layout: str) -> None:
    land_records(tmp_path, layout)
    files = f"read_parquet('{tmp_path}/lake/data/orders/**/*.parquet', hive_partitioning = true)"

    def select_ids(where: str) -> list[int]:
        return [row[0] for row in duckdb.sql(f"select id from {files} where {where} order by id").fetchall()]

    assert select_ids(OWN) == [2, 3]
    assert select_ids("kafka_window_date = date '2026-11-20' and kafka_window_hour = 23") == [0, 1]
    assert select_ids(f"kafka_window_date = date '2026-11-21' and kafka_window_hour = 0 and {OWN}") == [2, 3]
    assert duckdb.sql(f"select distinct date from {files} where date is not null").fetchall() == [(DATE,)]
    plain = f"'{tmp_path}/lake/data/orders/**/*.parquet'"
    assert duckdb.sql(f"select id from {plain} where hour = 77 and kafka_window_hour = 0 order by id").fetchall() == [
        (2,),
        (3,),
    ]


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet"])
def test_polars_filters_by_fields_and_folder_keys(tmp_path: Path, layout: str, pattern: str) -> None:
    land_records(tmp_path, layout)
    frame = pl.scan_parquet(f"{tmp_path}/lake/data/orders{pattern}", hive_partitioning=True)

    def select_ids(*where: pl.Expr) -> list[int]:
        return frame.filter(*where).select("id").collect()["id"].sort().to_list()

    of_window = (pl.col("kafka_window_date") == datetime.date(2026, 11, 20), pl.col("kafka_window_hour") == 23)
    assert select_ids(pl.col("date") == DATE, pl.col("hour") == 77, pl.col("minute") == 5) == [2, 3]
    assert select_ids(*of_window) == [0, 1]
    assert select_ids(*of_window, pl.col("hour") == 77) == []


def test_pyarrow_and_pandas_filter_by_fields_and_folder_keys(tmp_path: Path, layout: str) -> None:
    land_records(tmp_path, layout)
    root = f"{tmp_path}/lake/data/orders"
    by_field = [("date", "=", DATE), ("hour", "=", 77)]
    by_key = [("kafka_window_date", "=", "2026-11-20"), ("kafka_window_hour", "=", 23)]
    for filters, expected in ((by_field, [2, 3]), (by_key, [0, 1])):
        assert sorted(pq.read_table(root, filters=filters)["id"].to_pylist()) == expected
        assert sorted(pd.read_parquet(root, filters=filters)["id"]) == expected
    dataset = ds.dataset(root, format="parquet", partitioning="hive")
    assert sorted(dataset.to_table(filter=ds.field("hour") == 77)["id"].to_pylist()) == [2, 3]
    assert sorted(dataset.to_table(filter=ds.field("kafka_window_hour") == 0)["id"].to_pylist()) == [2, 3]
    assert len(pd.read_parquet(root)) == 6


@pytest.mark.slow
@pytest.mark.spark
def test_spark_filters_by_fields_and_folder_keys(tmp_path: Path, layout: str) -> None:
    from sluice.pipelines.feed.sections import SparkSettings
    from sluice.resources.spark.engine import session

    land_records(tmp_path, layout)
    frame = session(SparkSettings(master="local[1]")).read.parquet(f"{tmp_path}/lake/data/orders")

    def select_ids(where: str) -> list[int]:
        return sorted(row.id for row in frame.where(where).collect())

    assert select_ids(OWN) == [2, 3]
    assert select_ids("kafka_window_date = date '2026-11-20' and kafka_window_hour = 23") == [0, 1]
    assert select_ids(f"kafka_window_hour = 0 and {OWN}") == [2, 3]
    assert frame.schema["date"].dataType.simpleString() == "date"
    plan = frame.where("kafka_window_hour = 23")._jdf.queryExecution().toString()
    assert "PartitionFilters: [isnotnull(kafka_window_hour" in plan


def begin_as_formerly(folder: Path, feed: Feed) -> None:
    """A ledger that began before keys had a prefix."""
    ledger = Ledger(LocalLake(folder / "lake"), feed.name, lambda: 0, cluster="sluice-testing")
    columns = feed.columns.texts() if feed.columns else None
    ledger.append(lambda s: SchemaEntry(shape=feed.shape.name, columns=columns))


def test_old_lake_keeps_its_folders_and_a_run_names_overridden_fields(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "orders.yaml"
    path.write_text(FEED.format(window="1h", layout=layout))
    begin_as_formerly(tmp_path, load_feed(path, {}))
    of_old = land(path, make_records(HOUR), lake=tmp_path / "lake")
    assert list_folders(tmp_path / "lake" / "data" / "orders") == {
        "date=2026-11-20/hour=23",
        "date=2026-11-21/hour=00",
        "date=2026-11-21/hour=01",
    }
    assert "2 columns named like a key of this feed's folders (date, hour)" in of_old.result.overridden
    assert of_old.rows.num_rows == 6
    assert land(path, make_records(HOUR)).result.overridden == ""
