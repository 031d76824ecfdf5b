"""Files and columns of Iceberg tables: their statistics, their types, and refusals; read by PyIceberg."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import EqualTo, GreaterThanOrEqual, In, IsNull, LessThanOrEqual
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, Transform

from sluice.pipelines.errors import PartUnreadable, TableRefused
from sluice.pipelines.model.tables import TableChange, TableOperation
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.tables.iceberg import IcebergTable
from sluice.resources.tables.outcomes import Outcomes
from tests.pipelines.tables.values import (
    AFTER,
    BEFORE,
    GROWN,
    INNER,
    NOON,
    OUTER,
    ROWS,
    SIGNED,
    WrittenTable,
    format_values,
    write_as_landing,
)

ROOT = "data/orders"


class OrdersTable(WrittenTable):
    def __init__(self, root: Path) -> None:
        self.catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
        table = IcebergTable("db.orders", self.catalog, {"warehouse": str(root / "tables")})
        super().__init__(LocalLake(root / "lake"), table)

    @property
    def iceberg(self) -> Any:
        return load_catalog("sluice", **self.catalog).load_table("db.orders")


@pytest.fixture
def orders(tmp_path: Path) -> OrdersTable:
    return OrdersTable(tmp_path)


def test_values_of_all_types_are_read_unchanged(orders: OrdersTable) -> None:
    orders.add(SIGNED, *(orders.write(f"{n}.parquet", SIGNED, ROWS) for n in "ab"))
    read = orders.iceberg.scan().to_arrow().to_pydict()
    for column, text in SIGNED.items():
        assert format_values(read[column]) == str(ROWS[column] * 2), text


def test_members_at_every_depth_are_added_before_their_first_file(orders: OrdersTable) -> None:
    orders.add(OUTER, orders.write("one.parquet", OUTER, BEFORE))
    orders.add(INNER, orders.write("two.parquet", INNER, AFTER))
    assert sorted(orders.iceberg.scan().to_arrow().to_pylist(), key=lambda r: r["n"]) == GROWN
    for test in (EqualTo("s.a.c", "c"), EqualTo("s.a.b", 2)):
        assert orders.iceberg.scan(test).to_arrow()["n"].to_pylist() == [2]
    assert orders.iceberg.scan(IsNull("s.a.c")).to_arrow()["n"].to_pylist() == [1]


def test_file_metadata_matches_pyiceberg(orders: OrdersTable) -> None:
    """PyIceberg describes the first file of a shape on its own; parts of PyIceberg describe the others."""
    orders.add(SIGNED, *(orders.write(f"{n}.parquet", SIGNED, ROWS) for n in "ab"))
    first, second = ([f.get(k) for k in f if k != "file_path"] for f in orders.iceberg.inspect.files().to_pylist())
    assert str(first) == str(second)


@pytest.mark.parametrize(("narrow", "wide"), [("decimal(9,2)", "decimal(12,2)"), ("decimal(12,2)", "decimal(25,2)")])
def test_file_with_narrower_decimal_is_added_with_its_bounds(tmp_path: Path, narrow: str, wide: str) -> None:
    orders = OrdersTable(tmp_path)
    values = {"x": [Decimal("-1.50"), None, Decimal("2.00")]}
    orders.add({"x": wide}, write_as_landing(orders.lake, f"{ROOT}/a.parquet", {"x": narrow}, values))
    (file,) = orders.iceberg.inspect.files().to_pylist()
    metrics = file["readable_metrics"]["x"]
    assert (metrics["lower_bound"], metrics["upper_bound"], metrics["null_value_count"]) == (*values["x"][::2], 1)
    assert orders.iceberg.scan(EqualTo("x", Decimal("2.00"))).to_arrow()["x"].to_pylist() == [Decimal("2.00")]


def test_names_in_order_exclude_files_and_hide_no_row(orders: OrdersTable) -> None:
    """Longer names than Iceberg's bounds have, also beyond the characters of two bytes."""
    columns = {"name": "string", "key": "binary"}
    names = [f"ö-order-{n:04}-{chr(0x1F600) * 3}{n % 7}" for n in range(4000)]
    for at in (0, 2000):
        values = {"name": names[at : at + 2000], "key": [name.encode() for name in names[at : at + 2000]]}
        orders.add(columns, write_as_landing(orders.lake, f"{ROOT}/{at}.parquet", columns, values, 500))
    for at in (0, 499, 500, 1999, 2000, 3999):
        for test in (EqualTo("name", names[at]), EqualTo("key", names[at].encode())):
            scan = orders.iceberg.scan(test)
            assert len(list(scan.plan_files())) == 1
            assert scan.to_arrow()["name"].to_pylist() == [names[at]]


FLAT = {c: text for c, text in SIGNED.items() if "<" not in text}


@pytest.mark.parametrize("column", FLAT, ids=FLAT.values())
def test_filter_on_a_landed_value_returns_its_row(orders: OrdersTable, column: str) -> None:
    nulls = {c: [None] for c in SIGNED}
    orders.add(
        SIGNED,
        write_as_landing(orders.lake, f"{ROOT}/one.parquet", SIGNED, ROWS, 1),
        write_as_landing(orders.lake, f"{ROOT}/two.parquet", SIGNED, nulls),
    )
    table = orders.iceberg
    for value in ROWS[column]:
        if value is not None and value == value:
            for test in (EqualTo, GreaterThanOrEqual, LessThanOrEqual):
                assert table.scan(test(column, _make_literal(value))).to_arrow().num_rows >= 1, (value, test)
            assert table.scan(In(column, [_make_literal(value)])).to_arrow().num_rows >= 1
    assert table.scan(IsNull(column)).to_arrow().num_rows == 1 + ROWS[column].count(None)


def _make_literal(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.datetime) else value


def test_millisecond_bounds_are_in_manifests_but_not_in_parquet(orders: OrdersTable) -> None:
    """Iceberg's Java reads the former as microseconds, and the latter correctly."""
    columns = {"ms": "timestamp(ms)", "s": "epoch(s)", "us": "timestamp(us)", "n": "int64"}
    stamps = {"ms": [NOON.replace(microsecond=0), None], "s": [None, None], "us": [NOON, NOON], "n": [1, 2]}
    address = write_as_landing(orders.lake, f"{ROOT}/a.parquet", columns, stamps)
    chunks = pq.read_metadata(address).row_group(0)
    bounded = {c.path_in_schema for c in map(chunks.column, range(4)) if c.is_stats_set}
    assert bounded == {"us", "n"}
    orders.add(columns, address)
    (file,) = orders.iceberg.inspect.files().to_pylist()
    metrics = {name: file["readable_metrics"][name] for name in ("ms", "s", "us")}
    assert {n: (m["lower_bound"], m["upper_bound"], m["null_value_count"]) for n, m in metrics.items()} == {
        "ms": (NOON.replace(microsecond=0), NOON.replace(microsecond=0), 1),
        "s": (None, None, 2),
        "us": (NOON, NOON, 0),
    }
    assert orders.table.misread() == ()
    old = orders.write("old.parquet", columns, stamps)
    orders.add(columns, old)
    orders.table.look()
    assert orders.table.misread() == (old,)


@pytest.mark.parametrize("stamp", [253_402_300_800_000, 1_764_000_000_000_000, 1 << 62, -1, -(1 << 63), (1 << 63) - 1])
def test_file_with_extreme_timestamp_is_added(orders: OrdersTable, stamp: int) -> None:
    """Stamps of the year 10000, microseconds taken for milliseconds, and times too large for microseconds."""
    columns = {"n": "int64", "at": "timestamp(ms)"}
    for name, stamps in (("a", [0, stamp]), ("b", [0, 1])):
        values = pa.array(stamps).cast(pa.timestamp("ms", "UTC"))
        orders.add(
            columns, write_as_landing(orders.lake, f"{ROOT}/{name}.parquet", columns, {"n": [1, 2], "at": values})
        )
    assert orders.iceberg.scan(selected_fields=("n",)).to_arrow().num_rows == 4
    files = {t.file.file_path[-9:]: t.file for t in orders.iceberg.scan().plan_files()}
    low, high = sorted((0, 1000 * stamp))
    fits = low >= -(1 << 63) and high < 1 << 63
    ends = [
        int.from_bytes(b[2], "little", signed=True)
        for b in (files["a.parquet"].lower_bounds, files["a.parquet"].upper_bounds)
        if 2 in b
    ]
    assert ends == ([low, high] if fits else [])


def test_scan_of_an_hour_opens_only_files_of_that_hour(orders: OrdersTable) -> None:
    """The table has no partitions: manifests give the bounds of each file. The second file has one late record."""
    columns, hour = {"at": "timestamp(ms)"}, dt.timedelta(hours=1)
    times = ([NOON, NOON + 0.9 * hour], [NOON + 0.99 * hour, NOON + 1.5 * hour], [NOON + 2 * hour, NOON + 2.5 * hour])
    files = [orders.write(f"{n}.parquet", columns, {"at": stamps}) for n, stamps in enumerate(times)]
    orders.add(columns, *files)
    late = orders.iceberg.scan(f"at >= '{(NOON + 2 * hour).isoformat()}'").plan_files()
    assert [t.file.file_path for t in late] == files[2:]


def test_files_with_different_schemas_are_added_together(orders: OrdersTable) -> None:
    narrow, wide = {"n": "int32"}, {"n": "int64", "s": "string"}
    files = (orders.write("a.parquet", narrow, {"n": [1]}), orders.write("b.parquet", wide, {"n": [2**40], "s": ["x"]}))
    orders.add(wide, *files)
    read = orders.iceberg.scan().to_arrow().sort_by("n").to_pylist()
    assert read == [{"n": 1, "s": None}, {"n": 2**40, "s": "x"}]
    with pytest.raises(TableRefused):
        orders.add(wide, orders.write("c.parquet", {"n": "string"}, {"n": ["x"]}))


def test_missing_or_invalid_parquet_file_is_not_added(orders: OrdersTable) -> None:
    with pytest.raises(PartUnreadable, match=r"gone.parquet is missing") as caught:
        orders.add({"n": "int64"}, orders.lake.locate(f"{ROOT}/gone.parquet"))
    assert caught.value.gone
    with orders.lake.create(f"{ROOT}/torn.parquet") as file:
        file.write(b"PAR1")
    with pytest.raises(PartUnreadable, match="cannot be read"):
        orders.add({"n": "int64"}, orders.lake.locate(f"{ROOT}/torn.parquet"))
    assert orders.iceberg.current_snapshot() is None


def test_commits_keep_older_snapshots(orders: OrdersTable) -> None:
    """The cost of a commit does not grow with their number, and they stay."""
    columns = {"n": "int64"}
    for n in range(4):
        orders.add(columns, orders.write(f"{n}.parquet", columns, {"n": [n]}))
    metadata = orders.iceberg.metadata
    assert (len(metadata.snapshots), len(metadata.snapshot_log), len(metadata.metadata_log)) == (4, 4, 4)
    assert [s.parent_snapshot_id for s in metadata.snapshots] == [
        None,
        *(s.snapshot_id for s in metadata.snapshots[:3]),
    ]


@pytest.mark.parametrize(
    ("column", "by"),
    [("us", DayTransform()), ("n", IdentityTransform()), ("s", BucketTransform(4))],
    ids=["day", "identity", "bucket"],
)
def test_append_to_externally_partitioned_table_is_refused(
    tmp_path: Path, column: str, by: Transform[Any, Any]
) -> None:
    """Somebody partitioned the table: a file has rows of several partitions, but a manifest has one value per file."""
    orders = OrdersTable(tmp_path)
    columns = {"us": "timestamp(us)", "n": "int64", "s": "string"}
    values = {"us": [NOON, None], "n": [1, None], "s": ["a", None]}
    first, second = (orders.write(f"{n}.parquet", columns, values) for n in "ab")
    orders.add(columns, first)
    with orders.iceberg.update_spec() as change:
        change.add_field(column, by, "theirs")
    with pytest.raises(TableRefused, match="was partitioned by theirs"):
        orders.add(columns, second)
    orders.table.look()
    orders.table.commit(TableChange(TableOperation.DELETE, 9, (), (first,), columns, {}))
    with orders.iceberg.update_spec() as change:
        change.remove_field("theirs")
    orders.add(columns, first, second)
    for test in (EqualTo("us", NOON.isoformat()), EqualTo("n", 1), EqualTo("s", "a"), IsNull(column)):
        assert orders.iceberg.scan(test).to_arrow().num_rows == 2, test


@pytest.mark.parametrize(("old", "new"), [("n", "o"), ("s", "t"), ("s.a.b", "z")])
def test_append_after_column_rename_is_refused(tmp_path: Path, old: str, new: str) -> None:
    orders = OrdersTable(tmp_path)
    orders.add(OUTER, orders.write("one.parquet", OUTER, BEFORE))
    with orders.iceberg.update_schema() as change:
        change.rename_column(old, new)
    now = ".".join([*old.split(".")[:-1], new])
    address = orders.write("two.parquet", INNER, AFTER)
    before = orders.iceberg.scan().to_arrow()
    with pytest.raises(TableRefused, match=f"column {old}.* was renamed to {now}, "):
        orders.add(INNER, address)
    assert orders.iceberg.scan().to_arrow().equals(before)
    with orders.iceberg.update_schema() as change:
        change.rename_column(now, old.split(".")[-1])
    orders.add(INNER, address)
    assert sorted(orders.iceberg.scan().to_arrow().to_pylist(), key=lambda r: r["n"]) == GROWN


def test_dropped_column_is_restored_with_next_file(tmp_path: Path) -> None:
    orders = OrdersTable(tmp_path)
    orders.add(OUTER, orders.write("one.parquet", OUTER, BEFORE))
    with orders.iceberg.update_schema() as change:
        change.delete_column("n")
    orders.add(INNER, orders.write("two.parquet", INNER, AFTER))
    assert sorted(orders.iceberg.scan().to_arrow().to_pylist(), key=lambda r: r["n"]) == GROWN
    assert orders.iceberg.scan(EqualTo("n", 1)).to_arrow().num_rows == 1


def test_removed_name_mapping_is_restored_with_next_file(tmp_path: Path) -> None:
    orders = OrdersTable(tmp_path)
    columns = {"a": "int64", "b": "string"}
    first, second = (orders.write(f"{n}.parquet", columns, {"a": [n], "b": [str(n)]}) for n in (1, 2))
    orders.add(columns, first)
    with orders.iceberg.transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    orders.add(columns, second)
    assert sorted(r["b"] for r in orders.iceberg.scan().to_arrow().to_pylist()) == ["1", "2"]


def test_remedy_omits_settings_for_errors_not_caused_by_settings() -> None:
    outcomes = Outcomes("table db.orders", "catalog")
    for error in (OverflowError("date value out of range"), KeyError("x"), TypeError("x")):
        assert "settings in the feed" not in outcomes.translate(error).remedy
    assert "settings in the feed" in outcomes.translate(RuntimeError("x")).remedy
