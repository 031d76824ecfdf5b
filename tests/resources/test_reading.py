"""Edge cases of reading: the spelling of windows, types in Spark and DuckDB, and the grouping of files."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sluice
from sluice import reading
from sluice.errors import FeedError, SluiceError, UsageError, WindowIncomplete
from sluice.pipelines import errors
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.publishing.published_files import File
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.spark import parts
from sluice.resources.spark import parts as types
from sluice.spark_source import SluiceSource

HOUR = 3_600_000
FEED = "kafka: {bootstrap: '${KAFKA_BOOTSTRAP}'}\ntopics: orders\nstart: earliest\nwindow: 1h\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without a Kafka address, with a broken feed next to a valid one."""
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text(FEED)
    (tmp_path / "feeds" / "broken.yaml").write_text("topics: [")
    return tmp_path


@pytest.mark.parametrize("when", ["1970-01-02T03", "1970-01-02T03:00", 27 * HOUR, datetime(1970, 1, 2, 3, tzinfo=UTC)])
def test_window_is_parsed_from_each_spelling(when: reading.When) -> None:
    assert reading.instant(when) == 27 * HOUR


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window": "hour 3"}, "is not a window"),
        ({"window": datetime(1970, 1, 2)}, "datetime needs its zone"),  # noqa: DTZ001
        ({"window": 10**20}, "is no time in ms"),
        ({"window": -HOUR}, "is no time in ms"),
        ({"window": "1970-01-02T03:30"}, "windows of this feed last 1h"),
        ({"window": "1970-01-02T03", "to": "1970-01-02T03"}, "no whole windows"),
        ({"window": "1970-01-02T03", "to": "1970-01-02T04:30"}, "no whole windows"),
        ({"window": "1970-01-02T03", "kind": "lost"}, "one of landed, quarantined"),
    ],
)
def test_invalid_window_is_refused(project: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        sluice.read("orders", project=project, **arguments)


def test_a_range_up_to_a_wrong_year_ends_at_its_first_incomplete_window(project: Path) -> None:
    """The 70 million windows of the range are not enumerated."""
    with pytest.raises(WindowIncomplete, match="window 2024-05-01T00:00 of feed orders is not complete"):
        sluice.read("orders", "2024-05-01T00", to="9999-12-31T00", project=project)


def test_feed_without_runs_is_incomplete_and_missing_feed_is_an_error(project: Path) -> None:
    with pytest.raises(WindowIncomplete, match="1970-01-02T03:00 of feed orders"):
        sluice.read("orders", "1970-01-02T03", project=project)
    with pytest.raises(FeedError, match="broken"):
        sluice.read("payments", "1970-01-02T03", project=project)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no feed"),
        ({"feed": "orders"}, "what to read is not clear"),
        ({"feed": "orders", "window": "1970-01-02T03", "offsets": "orders:0:1-2"}, "what to read is not clear"),
        ({"feed": "orders", "to": "1970-01-02T03"}, "what to read is not clear"),
        ({"feed": "orders", "windw": "1970-01-02T03"}, "no option windw"),
        ({"feed": "orders", "from": "1970-01-02T03"}, "`from` without `to`"),
    ],
)
def test_spark_source_refuses_options_without_a_clear_selection(
    project: Path, options: dict[str, str], says: str
) -> None:
    source = SluiceSource({**options, "project": str(project)})
    with pytest.raises(UsageError, match=says):
        source.reader(source.schema())


def test_types_that_spark_lacks_are_widened_and_out_of_range_times_are_null() -> None:
    few = pa.array(["a", None, "a"]).dictionary_encode()
    times = pa.array([-1, 2**63 - 1, None], pa.timestamp("ms", "UTC"))
    nested = pa.array([[{"n": 1, "at": 2}], None, []], pa.list_(pa.struct({"n": pa.uint8(), "at": pa.timestamp("ms")})))
    rows = pa.record_batch({"few": few, "big": pa.array([0, 1, 2**64 - 1], pa.uint64()), "at": times, "nested": nested})
    schema = types.spark_schema(rows.schema)
    assert schema.simpleString() == (
        "struct<few:string,big:decimal(20,0),at:timestamp,nested:array<struct<n:smallint,at:timestamp_ntz>>>"
    )
    target = types.arrow_schema(schema.add("later", "string"))
    got = types.conform(rows, target)
    assert got.schema.equals(target)
    assert got.column("few").to_pylist() == ["a", None, "a"]
    assert got.column("at").cast(pa.int64()).to_pylist() == [-1000, None, None]
    assert [int(n) for n in got.column("big").to_pylist()] == [0, 1, 2**64 - 1]
    assert got.column("later").null_count == 3


@pytest.mark.parametrize("first", [0, 1])
def test_times_out_of_range_for_spark_are_null_at_any_depth(first: int) -> None:
    late, at = 1 << 62, pa.timestamp("ms", "UTC")
    rows = [
        {"s": {"n": 1, "at": late}, "l": [1, late], "m": {"a": late, "b": 2}},
        {"s": None, "l": None, "m": None},
        {"s": {"n": 2, "at": -3}, "l": [None, -late, 4], "m": {}},
    ]
    columns = {
        "s": pa.array([r["s"] for r in rows], pa.struct([("n", pa.uint8()), pa.field("at", at, nullable=False)])),
        "l": pa.array([r["l"] for r in rows], pa.list_(at)),
        "m": pa.array([r["m"] and [*r["m"].items()] for r in rows], pa.map_(pa.string(), at)),
    }
    batch = pa.record_batch(columns).slice(first)
    target = types.arrow_schema(types.spark_schema(batch.schema))
    got = types.conform(batch, target)
    got.validate(full=True)
    assert got.schema.equals(target)
    numbers = [
        *([{"n": 1, "at": None}, None, {"n": 2, "at": -3000}], [[1000, None], None, [None, None, 4000]]),
        [[("a", None), ("b", 2000)], None, []],
    ]
    shapes = [
        pa.struct([("n", pa.int16()), ("at", pa.int64())]),
        pa.list_(pa.int64()),
        pa.map_(pa.string(), pa.int64()),
    ]
    for column, shape, values in zip(got.columns, shapes, numbers, strict=True):
        assert column.cast(shape).to_pylist() == values[first:]


@pytest.mark.parametrize(
    ("times", "reads"),
    [
        (pa.array([-1, 2208988800000], pa.timestamp("ms", "UTC")), True),
        (pa.array([None, None], pa.timestamp("ms", "UTC")), True),
        (pa.array([-1, 2**63 - 1], pa.timestamp("ms", "UTC")), False),
        (pa.array([1, 2], pa.timestamp("ns")), False),
    ],
)
def test_files_that_spark_cannot_read_are_detected_by_their_footer(
    tmp_path: Path, times: pa.Array, reads: bool
) -> None:
    pq.write_table(pa.table({"nested": [[1], [2]], "at": times}), tmp_path / "x.parquet", store_schema=False)
    assert types.spark_reads(pq.read_metadata(tmp_path / "x.parquet")) is reads


def test_small_files_are_read_together_and_large_ones_by_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "TASK_BYTES", 5000)
    pq.write_table(pa.table({"v": [b"%0900d" % i for i in range(12)]}), tmp_path / "large", row_group_size=2,
                   compression="none", use_dictionary=False, write_statistics=False)  # fmt: skip
    files = [
        _make_file("a", 2000),
        _make_file("b", 2900),
        _make_file("c", 200),
        _make_file("large", 12_000),
        _make_file("d", 1),
    ]
    shares = [share.parts for share in parts.shares(LocalLake(tmp_path), files)]
    assert shares == [
        (("a", None), ("b", None)),
        (("c", None),),
        (("large", (0, 1)),),
        (("large", (2, 3)),),
        (("large", (4, 5)),),
        (("d", None),),
    ]
    assert parts.shares(LocalLake(tmp_path), []) == []


def _make_file(path: str, size: int) -> File:
    return File(0, PartKind.LANDED, path, path, "orders", 0, 0, 1, 1, size, "0" * 64)


def test_duckdb_reads_the_same_times_from_s3_and_disk(tmp_path: Path) -> None:
    """Through Arrow, which rejects times beyond DuckDB's calendar, times are passed as numbers."""
    times = [0, 1_795_183_200_123, -1, None]
    plain = pa.array([*times, 7], pa.timestamp("ms"))
    table = pa.table({'a "b"': plain, "t": pa.array([*times, 2**63 - 1], pa.timestamp("ms", "UTC"))})
    pq.write_table(table, tmp_path / "x")
    with duckdb.connect() as db:
        counted = table.cast(pa.schema([f.with_type(pa.int64()) for f in table.schema]))
        relation = db.from_arrow(counted).project(", ".join(map(reading._time_column_sql, table.schema)))
        expected = db.read_parquet(str(tmp_path / "x"))
        assert (relation.columns, relation.types) == (expected.columns, expected.types)
        assert relation.to_arrow_table().equals(expected.to_arrow_table())


def test_duckdb_compares_nanosecond_times_after_truncation(tmp_path: Path) -> None:
    """Both by DuckDB's own reader and through Arrow, digits below a microsecond are cut off as for Spark."""
    stamps = [1, 1_700_000_000_123_456_789, None, -1, -1_700_000_000_123_456_789, 2**63 - 1]
    table = pa.table({'a "b"': pa.array(range(6)), "t": pa.array(stamps).cast(pa.timestamp("ns", "UTC"))})
    pq.write_table(table, tmp_path / "x", store_schema=False)
    cut = table.column("t").cast(pa.timestamp("us", "UTC"), safe=False).cast(pa.int64()).to_pylist()
    with duckdb.connect() as db:
        for rows, column in (
            (db.read_parquet(str(tmp_path / "x")), reading._cut_to_microseconds),
            (db.from_arrow(table), reading._time_column_sql),
        ):
            relation = rows.project(", ".join(map(column, table.schema)))
            assert [str(kind) for kind in relation.types] == ["BIGINT", "TIMESTAMP WITH TIME ZONE"]
            numbers = [us for (us,) in relation.project("epoch_us(t)").fetchall()]
            assert numbers == [*cut[:-1], None], "DuckDB's infinity is the last nanosecond"
            later = relation.filter("t > timestamptz '2023-11-14 22:13:20+00' and isfinite(t)")
            assert later.project('"a ""b"""').fetchall() == [(1,)]
            same = relation.filter("t = timestamptz '2023-11-14 22:13:20.123456+00'").project("date_trunc('hour', t)")
            assert len(same.fetchall()) == 1
            assert len(relation.filter("t = 'infinity'").fetchall()) == 1


@pytest.mark.parametrize("small", [True, False])
def test_polars_and_arrow_read_small_files_as_they_read_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Whole and natively, or by a dataset: the types and values are those that were written, in the files' order."""
    us, nested = pa.timestamp("us", "UTC"), pa.struct([("a", pa.list_(pa.decimal128(5, 1))), ("b", pa.string())])
    rows = {
        "ms": pa.array([0, 2**62, None], pa.timestamp("ms", "UTC")),
        "us": pa.array([-1, 2**62, None], us),
        "ns": pa.array([-1, 2**62, None], pa.timestamp("ns", "UTC")),
        "day": pa.array([0, -1, None], pa.date32()),
        "number": pa.array([-1, 2**31 - 1, None], pa.int32()),
        "amount": pa.array([Decimal("-1.25"), Decimal("99999.75"), None], pa.decimal128(12, 2)),
        "wide": pa.array([Decimal(10**37), Decimal(-1), None], pa.decimal128(38, 0)),
        "flag": pa.array([True, False, None]),
        "bytes": pa.array([b"\xff", b"", None]),
        "nested": pa.array([{"a": [Decimal("1.5"), None], "b": "x"}, None, {"a": [], "b": None}], nested),
        "headers": pa.array([[("k", b"v")], [], None], pa.map_(pa.string(), pa.binary())),
    }
    table = pa.table(rows)
    files = []
    for number in range(3):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table.slice(number), path, store_schema=False, store_decimal_as_integer=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(File("", PartKind.LANDED, str(path), path.name, "t", 0, number, 9, 3 - number, 9, digest))
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text(FEED)
    feed = load_feed(tmp_path / "feeds" / "orders.yaml", {"KAFKA_BOOTSTRAP": "127.0.0.1:9"})
    windows = reading.Windows(feed, (0,), PartKind.LANDED, tuple(files), pq.read_schema(files[0].address))
    monkeypatch.setattr(reading, "SMALL_BYTES", reading.SMALL_BYTES if small else 0)
    written = pa.concat_tables([table.slice(number) for number in range(3)])
    plain = windows.arrow().select([name for name in rows if name != "headers"])
    assert plain.equals(written.select(plain.column_names).cast(plain.schema))
    assert windows.arrow()["headers"].to_pylist() == written["headers"].to_pylist()
    assert windows.arrow().equals(windows.dataset().to_table())
    assert windows.polars().collect().equals(polars.from_arrow(windows.dataset().to_table()))


def test_public_names_of_the_package_are_importable() -> None:
    assert all(getattr(sluice, name) for name in sluice.__all__)
    assert sluice.errors.WindowIncomplete is WindowIncomplete
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SluiceError)}
    assert len(defined) > 40
    assert defined <= vars(sluice.errors).keys()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = sluice.nothing_of_the_kind
