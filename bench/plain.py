"""Plain scripts that `bench.waits` compares with: `python -m bench.plain NAME ARGUMENT…`. Each prints JSON.

A script imports only the packages that it uses, as its start counts, and reads or writes all columns, as Sluice does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOUR = 3_600_000


def list_files(folder: str) -> list[str]:
    return sorted(map(str, Path(folder).rglob("*.parquet")))


def check_window(folder: str) -> Any:
    """Offsets by partition, rows by offset and by content: what `sluice check` says about a window's rows."""
    import duckdb

    duckdb.read_parquet(list_files(folder), hive_partitioning=False).create_view("landed")
    query = (
        "SELECT kafka_partition, min(kafka_offset), max(kafka_offset) + 1, count(*), count(DISTINCT kafka_offset),"
        " count(DISTINCT hash(order_id, customer, ts, amount, currency, items, country, channel, status))"
        " FROM landed GROUP BY 1 ORDER BY 1"
    )
    rows: Any = duckdb.sql(query)
    return [row[:4] if row[3] == row[4] == row[5] else row for row in rows.fetchall()]


def read_polars(folder: str) -> Any:
    import polars

    frame = polars.read_parquet(list_files(folder), hive_partitioning=False)
    return [frame.height, frame["items"].sum()]


def read_duckdb(folder: str) -> Any:
    import duckdb

    rows = duckdb.read_parquet(list_files(folder), hive_partitioning=False).to_arrow_table()
    return [rows.num_rows, sum(rows["items"].to_pylist())]


def read_arrow(folder: str) -> Any:
    import pyarrow.compute as pc
    import pyarrow.dataset

    rows = pyarrow.dataset.dataset(list_files(folder)).to_table()
    return [rows.num_rows, pc.sum(rows["items"]).as_py()]


def land_topic(bootstrap: str, topic: str, out: str) -> Any:
    """Read a topic to its end; write a file for each hour of a partition. Compares and proves nothing."""
    import polars as pl
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    settings = {"bootstrap.servers": bootstrap, "group.id": "plain", "enable.auto.commit": False}
    consumer, rows = Consumer(settings), dict[Any, list[Any]]()
    ends = {}
    for partition in consumer.list_topics(topic).topics[topic].partitions:
        ends[partition] = consumer.get_watermark_offsets(TopicPartition(topic, partition))[1]
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in ends])
    missing = sum(ends.values())
    while missing:
        for message in consumer.consume(min(missing, 100_000), 1.0):
            rows.setdefault((message.partition(), message.timestamp()[1] // HOUR), []).append(message)
            missing -= 1
    items = 0
    for (partition, hour), messages in rows.items():
        values = pl.read_ndjson(b"\n".join(m.value() for m in messages))
        items += int(values["items"].sum())
        columns = {
            "key": [m.key() for m in messages],
            "offset": [m.offset() for m in messages],
            "timestamp": [m.timestamp()[1] for m in messages],
        }
        folder = Path(out, str(hour))
        folder.mkdir(parents=True, exist_ok=True)
        values.with_columns(**{k: pl.Series(v) for k, v in columns.items()}).write_parquet(
            folder / f"{partition}.parquet", compression="zstd", compression_level=1
        )
    return [sum(map(len, rows.values())), items]


def look_up(folder: str, name: str) -> Any:
    """The rows with one value of a text column, by DuckDB; the median of 15, in a process that stands."""
    import duckdb

    files, seconds = list_files(folder), []
    value = duckdb.read_parquet(files, hive_partitioning=False).limit(1, 1234).fetchall()[0]
    relation = duckdb.read_parquet(files, hive_partitioning=False)
    text = value[relation.columns.index(name)]
    for _ in range(15):
        began = time.process_time()
        rows = relation.filter(f"{name} = '{text}'").fetchall()
        seconds.append(time.process_time() - began)
    return {"rows": len(rows), "cpu": sorted(seconds)[7]}


def load_location(feeds: str) -> Any:
    """Returns the snapshot of as many partitioned assets; each has a check, a job and a schedule."""
    import dagster as dg

    hours = dg.HourlyPartitionsDefinition("2026-11-01-00:00")

    def define(name: str) -> list[Any]:
        @dg.asset(name="landed", key_prefix=name, partitions_def=hours)
        def land() -> None: ...

        @dg.asset_check(asset=land, name="complete")
        def check() -> Any:
            return dg.AssetCheckResult(passed=True)

        job = dg.define_asset_job(f"land_{name}", [land], partitions_def=hours)
        return [land, check, job, dg.build_schedule_from_partitioned_job(job)]

    definitions = [define(f"feed_{n:04}") for n in range(int(feeds))]
    assets, checks, jobs, schedules = ([parts[i] for parts in definitions] for i in range(4))
    return _take_snapshot(dg.Definitions(assets, jobs=jobs, schedules=schedules, asset_checks=checks))


def load_ours() -> Any:
    from sluice.assets.definitions import defs

    return _take_snapshot(defs)


def _take_snapshot(definitions: Any) -> Any:
    import dagster as dg
    from dagster._core.remote_representation.external_data import RepositorySnap

    repository = definitions.get_repository_def()
    snapshot = RepositorySnap.from_def(repository)
    return {"bytes": len(dg.serialize_value(snapshot)), "jobs": len(repository.get_all_jobs())}


def read_ours(kind: str, feed: str, start: str, to: str) -> Any:
    """Rows by `sluice.read`, counted as the plain scripts do."""
    import sluice

    windows = sluice.read(feed, start, to=to)
    if kind == "polars":
        frame = windows.polars().collect()
        return [frame.height, frame["items"].sum()]
    if kind == "arrow":
        import pyarrow.compute as pc

        rows = windows.arrow()
        return [rows.num_rows, pc.sum(rows["items"]).as_py()]
    rows = windows.duckdb().to_arrow_table()
    return [rows.num_rows, sum(rows["items"].to_pylist())]


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        check_window,
        read_polars,
        read_duckdb,
        read_arrow,
        land_topic,
        look_up,
        load_location,
        load_ours,
        read_ours,
    )
}


def main(words: list[str]) -> None:
    print(json.dumps(PROGRAMS[words[0]](*words[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
