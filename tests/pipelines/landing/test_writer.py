"""The Parquet sink: written rows read back unchanged, and a file appears complete or not."""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import LakeFull, ProofFailed
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import MAX_FOLDERS, PartTarget, PartWriter
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part
from sluice.pipelines.records.rows.row_format import HEADERS, RawFormat
from sluice.resources.lake.local_lake import LocalLake

RANGE = OffsetRange("orders.v1", 3, "topic-id", 100, 10_000)
TARGET = PartTarget("sales", 12, "hash", "a-1", RANGE)
STAGING = "_sluice/sales/staging"


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    return LocalLake(tmp_path)


def make_chunk(offsets: Sequence[int], **columns: Sequence[Any]) -> pa.RecordBatch:
    """Returns a decoder's chunk with these offsets; other columns have the given or simple values."""
    n = len(offsets)
    arrays = {
        "key": pa.array(columns.get("key", [b"k"] * n), pa.binary()),
        "value": pa.array(columns.get("value", [b"v%d" % o for o in offsets]), pa.binary()),
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array(columns.get("timestamp", offsets), pa.timestamp("ms", "UTC")),
        "timestampType": pa.array(columns.get("timestampType", [0] * n), pa.int32()),
        "headers": pa.array(columns.get("headers", [None] * n), HEADERS),
    }
    return pa.RecordBatch.from_pydict(arrays)


def make_rows(offsets: Sequence[int], **columns: Sequence[Any]) -> pa.RecordBatch:
    return next(RawFormat().convert(RANGE, make_chunk(offsets, **columns))).landed


def open_writer(lake: Any, row_group_bytes: int = 1 << 20, target: PartTarget = TARGET, **settings: Any) -> PartWriter:
    return PartWriter(lake, target, RawFormat.schema, LandingSettings(**settings), row_group_bytes)


def land(lake: LocalLake, *batches: pa.RecordBatch, **settings: Any) -> tuple[Part, ...]:
    w = open_writer(lake, **settings)
    write_all(w, batches)
    return w.close()


def write_all(w: PartWriter, batches: Sequence[pa.RecordBatch]) -> None:
    for batch in batches:
        w.write(batch)


def list_staged(lake: LocalLake) -> list[str]:
    return list(lake.list(STAGING))


def test_file_matches_the_columns_of_the_spark_kafka_source(lake: LocalLake) -> None:
    (part,) = land(
        lake,
        make_rows(
            [100, 101, 105],
            key=[b"a", None, b""],
            value=[b"\x00\xff", b"", None],
            timestamp=[0, -1, 1 << 62],
            timestampType=[0, 1, -1],
            headers=[[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, [{"key": "", "value": b""}]],
        ),
    )
    with lake.open(part.staged) as f:
        table = pq.read_table(f)
    assert [(f.name, f.type) for f in table.schema] == [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
    rows = table.set_column(5, "timestamp", table["timestamp"].cast(pa.int64())).to_pylist()
    first = {"key": b"a", "value": b"\x00\xff", "topic": "orders.v1", "partition": 3, "offset": 100, "timestamp": 0}
    headers = [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    assert rows[0] == first | {"timestampType": 0, "headers": headers}
    assert [(r["key"], r["value"], r["timestamp"], r["timestampType"]) for r in rows[1:]] == [
        (None, b"", -1, 1),
        (b"", None, 1 << 62, -1),
    ]
    assert [r["headers"] for r in rows[1:]] == [None, [{"key": "", "value": b""}]]


def test_duckdb_reads_the_same(lake: LocalLake) -> None:
    headers = [[{"key": "h", "value": b"1"}], None]
    (part,) = land(lake, make_rows([100, 101], key=[b"a", None], headers=headers))
    query = 'select key, value, topic, partition, epoch_ms(timestamp), headers from read_parquet(?) order by "offset"'
    assert duckdb.connect().execute(query, [lake.locate(part.staged)]).fetchall() == [
        (b"a", b"v100", "orders.v1", 3, 100, headers[0]),
        (None, b"v101", "orders.v1", 3, 101, None),
    ]


def test_names_in_order_have_bounds(lake: LocalLake) -> None:
    names = [b"order-%06d" % n for n in range(6000)]
    groups = [range(at, at + 2000) for at in (0, 2000, 4000)]
    batches = [make_rows(g, key=names[g.start : g.stop], value=[names[n] * 9 for n in g]) for g in groups]
    target = replace(TARGET, offset_range=replace(TARGET.offset_range, start=0, end=6000))
    w = open_writer(lake, target=target, row_group_rows=2000)
    write_all(w, batches)
    (part,) = w.close()
    path = lake.locate(part.staged)
    query = "select path_in_schema, stats_min_value, stats_max_value from parquet_metadata(?) where path_in_schema in"
    bounds = duckdb.connect().execute(f"{query} ('key', 'value') order by 1, row_group_id", [path]).fetchall()
    assert bounds == [
        *(("key", names[g.start].decode(), names[g.stop - 1].decode()) for g in groups),
        *[("value", None, None)] * 3,
    ], "a long value has none: each page would repeat two"
    rows = duckdb.read_parquet(path)
    for at in (0, 1999, 2000, 5999):
        assert rows.filter(f"key = 'order-{at:06}'::blob").project('"offset"').fetchall() == [(at,)]


def test_documented_query_separates_the_lives_of_a_topic(lake: LocalLake) -> None:
    """The same offset of two lives is in two files."""
    lives = ("27YBcOddSAqT4E4khZ-qSQ", "27YBcOddSAqT4E4khZ-qSQ#1")
    for number, life in enumerate(lives):
        (part,) = land(
            lake, make_rows([100, 101]), target=replace(TARGET, offset_range=replace(RANGE, incarnation=life))
        )
        lake.show(part.staged, f"data/orders/{number}.parquet")
        lake.remove(part.staged)
    text = (Path(__file__).parents[3] / "docs" / "reading.md").read_text()
    (query,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    root = lake.locate("data").removesuffix("/data")
    rows = duckdb.sql(query.replace(".sluice/lake", root)).select('topic_id, "offset"').fetchall()
    assert sorted(rows) == [(life, offset) for life in lives for offset in (100, 101)]


def test_footer_of_a_part_names_its_origin(lake: LocalLake) -> None:
    (part,) = land(lake, make_rows([100]))
    with lake.open(part.staged) as f:
        metadata = pq.ParquetFile(f).metadata.metadata
    assert metadata == {
        b"sluice.format_version": b"1",
        b"sluice.feed": b"sales",
        b"sluice.topic_id": b"topic-id",
        b"sluice.range": b"orders.v1:3:100-10000",
        b"sluice.batch": b"12",
        b"sluice.plan_hash": b"hash",
        b"sluice.times": b'{"timestamp":[100,100,0]}',
    }


def test_description_matches_the_part(lake: LocalLake) -> None:
    (part,) = land(lake, make_rows([100, 101]), make_rows([200]))
    assert part.name == "orders.v1-3-100-10000-b12.parquet"
    assert part.path == f"data/sales/{part.name}"
    assert list_staged(lake) == [part.staged]
    assert (part.rows, part.bytes) == (3, lake.size(part.staged))
    assert part.sha256 == hash_part(lake, part)


def hash_part(lake: LocalLake, part: Part) -> str:
    import hashlib

    return hashlib.sha256(lake.get(part.staged) or b"").hexdigest()


@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_equal_rows_give_equal_bytes(lake: LocalLake, compression: str) -> None:
    rows = [make_rows(range(100, 3000)), make_rows(range(3000, 3100))]
    other = PartTarget("sales", 12, "hash", "a-2", RANGE)
    first = land(lake, *rows, compression=compression)
    second = land(lake, *rows, compression=compression, target=other)
    assert [p.sha256 for p in first] == [p.sha256 for p in second]
    assert {p.staged for p in first}.isdisjoint(p.staged for p in second)


def test_row_groups_are_bounded_by_rows_and_by_bytes(lake: LocalLake) -> None:
    batches = [make_rows(range(i, i + 100)) for i in range(100, 1100, 100)]
    assert list_row_groups(lake, land(lake, *batches, row_group_rows=300)) == [300, 300, 300, 100]
    other = PartTarget("sales", 12, "hash", "a-2", RANGE)
    assert list_row_groups(lake, land(lake, *batches, row_group_bytes=2 * batches[0].nbytes, target=other)) == [200] * 5


def list_row_groups(lake: LocalLake, parts: Sequence[Part]) -> list[int]:
    with lake.open(parts[0].staged) as f:
        metadata = pq.ParquetFile(f).metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def test_a_range_is_cut_into_files_by_size(lake: LocalLake) -> None:
    batches = [make_rows(range(i, i + 100)) for i in range(100, 600, 100)]
    parts = land(lake, *batches, row_group_rows=100, target_file_bytes=1)
    stem = "orders.v1-3-100-10000-b12"
    assert [p.name for p in parts] == [f"{stem}.parquet", *(f"{stem}-{i}.parquet" for i in range(1, 5))]
    assert [p.rows for p in parts] == [100] * 5
    assert list_staged(lake) == sorted(p.staged for p in parts)


def test_no_rows_make_no_file(lake: LocalLake) -> None:
    assert land(lake) == land(lake, make_rows([])) == ()
    assert list_staged(lake) == []


@pytest.mark.parametrize("batches", [([100, 100],), ([101, 100],), ([100, 101], [101]), ([99],), ([10_000],)])
def test_offsets_must_increase_within_the_range(lake: LocalLake, batches: Sequence[Sequence[int]]) -> None:
    w = open_writer(lake)
    for offsets in batches[:-1]:
        w.write(make_rows(offsets))
    with pytest.raises(ProofFailed) as e:
        w.write(make_rows(batches[-1]))
    assert (e.value.topic, e.value.partition) == ("orders.v1", 3)
    w.abandon()
    assert list_staged(lake) == []


def test_abandoning_leaves_nothing(lake: LocalLake) -> None:
    w = open_writer(lake, row_group_rows=10, target_file_bytes=500)
    for i in range(100, 1000, 10):
        w.write(make_rows(range(i, i + 10)))
    assert list_staged(lake)  # full files are staged already
    w.abandon()
    w.abandon()
    del w
    gc.collect()
    assert list_staged(lake) == []
    assert [p for p in lake.root.rglob("*") if p.is_file()] == []


class FullDisk(LocalLake):
    """A lake that takes `room` writes, and then has no space left."""

    room = 3

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        with super().create(path) as file:
            real, remaining = file.write, [self.room]

            def write(data: Any) -> int:
                remaining[0] -= 1
                if remaining[0] < 0:
                    raise OSError(errno.ENOSPC, "no space left")
                return real(data)

            yield _With(file, write)  # type: ignore[misc]


class _With:
    def __init__(self, file: BinaryIO, write: Any) -> None:
        self._file, self.write = file, write


@pytest.mark.parametrize("room", range(4))
def test_full_disk_leaves_nothing_and_is_reported(tmp_path: Path, room: int) -> None:
    lake = FullDisk(tmp_path)
    lake.room = room
    w = open_writer(lake, row_group_rows=10)
    with pytest.raises(LakeFull):
        write_all(w, [make_rows(range(i, i + 10)) for i in range(100, 1000, 10)])
    w.abandon()
    del w
    gc.collect()
    assert [p for p in lake.root.rglob("*") if p.is_file()] == []


def test_bad_rows_leave_nothing(lake: LocalLake) -> None:
    w = open_writer(lake, row_group_rows=1)
    w.write(make_rows([100]))
    with pytest.raises(pa.ArrowException):
        w.write(make_rows([101]).drop_columns(["key"]).append_column("key", pa.array([1])))
    w.abandon()
    assert [p for p in lake.root.rglob("*") if p.is_file()] == []


HOUR = 3_600_000
FOLDER = paths.window_folder(None, HOUR, paths.PREFIX)
BY_TIME = replace(TARGET, offset_range=replace(RANGE, by_time=HOUR, folder=FOLDER))


def read_by_folder(lake: LocalLake, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Returns the offsets in each folder."""
    folders: dict[str, list[int]] = {}
    for part in parts:
        with lake.open(part.staged) as f:
            offsets = pq.read_table(f, columns=["offset"])["offset"].to_pylist()
        folders.setdefault(part.path.removeprefix("data/sales/").rpartition("/")[0], []).extend(offsets)
    return folders


def test_rows_by_record_time_are_in_their_hours(lake: LocalLake) -> None:
    w = open_writer(lake, target=BY_TIME)
    # -1: no timestamp; 2040 is a year like any other; 292278994 is none.
    w.write(make_rows(range(100, 106), timestamp=[5, HOUR, 7, -1, 2_209_032_000_000, 2**63 - 1]))
    parts = w.close()
    assert read_by_folder(lake, parts) == {
        "kafka_window_date=1970-01-01/kafka_window_hour=00": [100, 102],
        "kafka_window_date=1970-01-01/kafka_window_hour=01": [101],
        "kafka_window_date=2040-01-01/kafka_window_hour=12": [104],
        FOLDER: [103, 105],
    }
    assert sum(p.rows for p in parts) == 6
    assert [paths.parse_part(p.name).sequence for p in parts] == [0, 1, 2, 3]


def test_unbounded_timestamps_make_a_bounded_number_of_files(lake: LocalLake) -> None:
    w = open_writer(lake, target=BY_TIME, row_group_rows=100)
    for at in range(100, 400, 50):
        w.write(make_rows(range(at, at + 50), timestamp=[o * HOUR for o in range(at, at + 50)]))
    parts = w.close()
    assert len(parts) == MAX_FOLDERS + 1
    assert sorted(o for offsets in read_by_folder(lake, parts).values() for o in offsets) == list(range(100, 400))


def test_abandoned_writer_by_record_time_leaves_nothing(lake: LocalLake) -> None:
    w = open_writer(lake, target=BY_TIME, row_group_rows=2)
    w.write(make_rows([100, 101], timestamp=[5, HOUR]))
    w.abandon()
    assert list_staged(lake) == []
