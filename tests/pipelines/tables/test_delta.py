"""Files and columns of Delta tables: their statistics, their types, and refusals; read by deltalake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

pytest.importorskip("deltalake")

from deltalake import DeltaTable, QueryBuilder, Schema
from deltalake.transaction import AddAction

from sluice.pipelines.errors import (
    CatalogUnavailable,
    LakeUnavailable,
    PartUnreadable,
    TableDiffers,
    TableMoved,
    TableRefused,
)
from sluice.pipelines.model.tables import TableChange, TableOperation
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.schema import arrow_type
from sluice.pipelines.schema.wider import parse_type
from sluice.resources.lake import open_store
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.tables.delta import DeltaLakeTable
from sluice.resources.tables.delta_types import delta_field
from tests.pipelines.landed_world import A, B, split_offsets
from tests.pipelines.tables.values import (
    AFTER,
    BEFORE,
    COLUMNS,
    GROWN,
    INNER,
    NOON,
    OUTER,
    ROWS,
    WrittenTable,
    format_values,
    write,
    write_as_landing,
)
from tests.pipelines.tables.worlds import DeltaWorld
from tests.stores import Store
from tests.table_readers import get_delta_access

ROOT = "data/orders"


class OrdersTable(WrittenTable):
    def __init__(self, root: Path) -> None:
        super().__init__(lake := LocalLake(root), DeltaLakeTable(lake, ROOT, {}))

    def reopen_table(self) -> DeltaLakeTable:
        return DeltaLakeTable(self.lake, ROOT, {})

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(self.lake.locate(ROOT))


@pytest.fixture
def orders(tmp_path: Path) -> OrdersTable:
    return OrdersTable(tmp_path)


def test_values_of_all_types_are_read_unchanged(orders: OrdersTable) -> None:
    orders.add(COLUMNS, orders.write("one.parquet", COLUMNS, ROWS))
    read = orders.delta.to_pyarrow_table().to_pydict()
    for column, text in COLUMNS.items():
        assert format_values(read[column]) == str(ROWS[column]), text
    types = {f["name"]: f["type"] for f in json.loads(orders.delta.schema().to_json())["fields"]}
    assert [types[c] for c in ("c0", "c2", "c3", "c11", "c13")] == [
        *("byte", "short", "integer", "decimal(38,4)", "timestamp"),
    ]


def test_readers_prune_files_by_statistics_in_log(orders: OrdersTable) -> None:
    columns = {"n": "int64", "at": "timestamp(us)", "s": "string", "none": "int32"}
    row = {"n": [3, 1], "at": [NOON, NOON], "s": ["b", "a"], "none": [None, None]}
    orders.add(columns, orders.write("one.parquet", columns, row))
    action = pa.table(orders.delta.get_add_actions(flatten=True)).to_pylist()[0]
    assert (action["num_records"], action["min.n"], action["max.n"], action["null_count.none"]) == (2, 1, 3, 2)
    assert not {"min.s", "max.s", "null_count.s"} & action.keys()
    assert action["min.at"] <= NOON <= action["max.at"]
    assert orders.delta.to_pyarrow_table(filters=[("n", ">", 3)]).num_rows == 0
    assert orders.delta.to_pyarrow_table(filters=[("at", "=", NOON)]).num_rows == 2


ODD = "a#b?c%d [e]'f+g=h:i@j*ü"
"""A name with characters that have a meaning in URLs."""


def _commit_twice(lake: Lake, table: DeltaLakeTable) -> tuple[set[str], list[int]]:
    """Make two commits of two rows. Returns the lake's folders that have a log, and the table's numbers."""
    columns = {"n": "int64"}
    assert table.look() is None
    table.create(columns, {"sluice.ledger": "x"})
    for mark in (1, 2):
        assert table.look() is not None
        address = write(lake, f"{ROOT}/date=2026-11-20/{mark}.parquet", columns, {"n": [mark, -mark]})
        table.commit(TableChange(TableOperation.APPEND, mark, (address,), (), columns, {}))
        assert address in table.files()
    assert table.look() is not None
    logs = {path.rpartition("/")[0] for path in lake.list("") if "_delta_log" in path}
    return logs, sorted(table.rows(["n"])["n"].to_pylist())


def test_table_works_in_folder_with_special_characters(tmp_path: Path) -> None:
    lake = LocalLake(tmp_path / ODD)
    assert _commit_twice(lake, DeltaLakeTable(lake, ROOT, {})) == ({f"{ROOT}/_delta_log"}, [-2, -1, 1, 2])
    assert [p.name for p in tmp_path.iterdir()] == [ODD]
    assert DeltaTable((tmp_path / ODD / ROOT).as_uri()).to_pyarrow_table().num_rows == 4


def test_table_works_below_s3_prefix_with_special_characters(s3_store: Store) -> None:
    root = s3_store.make_address()
    lake, around = open_store(f"{root}/{ODD}", s3_store.settings), open_store(root, s3_store.settings)
    options = {**(get_delta_access(s3_store) or {}), "aws_conditional_put": "etag"}
    assert _commit_twice(lake, DeltaLakeTable(lake, ROOT, options)) == ({f"{ROOT}/_delta_log"}, [-2, -1, 1, 2])
    assert {path.partition("/")[0] for path in around.list("")} == {ODD}


FLAT = {c: text for c, text in COLUMNS.items() if "<" not in text}
EDGES: dict[str, tuple[str, list[Any]]] = {
    "year 10000": ("timestamp(ms)", [253_402_300_800_000]),
    "microseconds as milliseconds": ("timestamp(ms)", [1_764_000_000_000_000]),
    "the last microsecond": ("timestamp(us)", [(1 << 63) - 1]),
    "before year 1": ("timestamp(us)", [-62_135_596_800_000_001]),
    "int64": ("int64", [-(1 << 63), (1 << 63) - 1]),
    "the last day": ("date", [2_932_896]),
    "a day of the year 10000": ("date", [2_932_897]),
    "before 1970": ("timestamp(ms)", [-1]),
}


def _count_matches(delta: DeltaTable, column: str, value: Any) -> dict[str, int]:
    """Returns how many rows each way of filtering finds for a value that is in the table."""
    counts = {op: delta.to_pyarrow_table(filters=[(column, op, value)]).num_rows for op in ("=", ">=", "<=")}
    counts["in"] = delta.to_pyarrow_table(filters=[(column, "in", [value])]).num_rows
    counts["pandas"] = len(delta.to_pandas(filters=[(column, "=", value)]))
    rows = delta.to_pyarrow_dataset()  # DuckDB finds it by its name
    same = f'"{column}" = (SELECT "{column}" FROM rows WHERE "{column}" IS NOT NULL LIMIT 1)'
    counts["duckdb"] = duckdb.sql(f"SELECT 1 FROM rows WHERE {same}").to_arrow_table().num_rows if rows else 0
    return counts


@pytest.mark.parametrize("column", FLAT, ids=FLAT.values())
def test_filter_on_a_landed_value_returns_its_row(orders: OrdersTable, column: str) -> None:
    """Landed files have bounds for some columns only. The second file has only nulls."""
    nulls = {c: [None] for c in COLUMNS}
    orders.add(
        COLUMNS,
        write_as_landing(orders.lake, f"{ROOT}/one.parquet", COLUMNS, ROWS, 1),
        write_as_landing(orders.lake, f"{ROOT}/two.parquet", COLUMNS, nulls),
    )
    for value in ROWS[column]:
        if value is not None and value == value:
            assert min(_count_matches(orders.delta, column, value).values()) >= 1, value
    lacking = ds.field(column).is_null()
    assert orders.delta.to_pyarrow_dataset().to_table(filter=lacking).num_rows == 1 + ROWS[column].count(None)
    query = QueryBuilder().register("rows", orders.delta)
    assert pa.table(query.execute(f'SELECT 1 FROM rows WHERE "{column}" IS NULL').read_all()).num_rows == (
        1 + ROWS[column].count(None)
    )


@pytest.mark.parametrize("edge", EDGES)
def test_value_at_limit_of_type_is_added_and_matched_by_filter(orders: OrdersTable, edge: str) -> None:
    text, stored = EDGES[edge]
    columns = {"n": "int64", "x": text}
    values = pa.array(stored, pa.int32() if text == "date" else pa.int64()).cast(arrow_type(parse_type(text)))
    orders.add(columns, write_as_landing(orders.lake, f"{ROOT}/a.parquet", columns, {"n": stored, "x": values}))
    rows = orders.delta.to_pyarrow_dataset()
    for value, scalar in zip(stored, values.cast(rows.schema.field("x").type), strict=True):
        assert rows.to_table(filter=ds.field("x") >= scalar).num_rows >= 1
        assert rows.to_table(filter=ds.field("n") == value).num_rows == 1


def test_repair_updates_old_table_without_changing_rows(orders: OrdersTable) -> None:
    """Its files have bounds for some columns only; no file names the later column, and no property names the rest."""
    columns = {"n": "int64", "s": "string", "at": "timestamp(ms)"}
    fields = [delta_field(*column) for column in (columns | {"later": "int32"}).items()]
    schema = Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    DeltaTable.create(
        orders.lake.locate(ROOT), schema, configuration={"sluice.ledger": "x"}, raise_if_key_not_exists=False
    )
    for name, n in (("a", 1), ("b", 2)):
        write_as_landing(
            orders.lake, f"{ROOT}/{name}.parquet", columns, {"n": [n], "s": [name], "at": [NOON.replace(microsecond=0)]}
        )
        stats = {"numRecords": 1, "minValues": {"n": n}, "maxValues": {"n": n}, "nullCount": {"n": 0}}
        size = orders.lake.size(f"{ROOT}/{name}.parquet")
        action = AddAction(f"{name}.parquet", size, {}, 0, True, json.dumps(stats))
        orders.delta.create_write_transaction([action], mode="append", schema=orders.delta.schema())
    assert orders.delta.to_pyarrow_table(filters=[("s", "=", "a")]).num_rows == 0

    before = orders.table.look()
    assert before is not None
    assert len(orders.table.misread()) == 2
    assert orders.table.repair({})
    after = orders.table.look()
    assert after is not None
    assert (after.rows, after.files, after.mark) == (before.rows, before.files, before.mark)
    assert (orders.table.misread(), orders.table.repair({})) == ((), False)
    for column, value in (("s", "a"), ("n", 2), ("at", NOON.replace(microsecond=0))):
        assert min(_count_matches(orders.delta, column, value).values()) >= 1
    rows = orders.delta.to_pyarrow_dataset()
    assert rows.to_table(filter=ds.field("later").is_null()).num_rows == 2
    changed = [a["add"]["dataChange"] for a in _read_actions(orders, before.snapshot or 0) if "add" in a]
    assert changed == [False, False]


def _read_actions(orders: OrdersTable, after: int) -> list[dict[str, Any]]:
    logs = sorted(p for p in orders.lake.list(f"{ROOT}/_delta_log") if p.endswith(".json"))
    lines = [line for p in logs if int(p[-25:-5]) > after for line in (orders.lake.get(p) or b"").splitlines()]
    return [json.loads(line) for line in lines]


def test_file_names_in_table_match_the_lake(orders: OrdersTable) -> None:
    """Topics are encoded with `~`, and folders of windows have `=` in their names."""
    name = "date=2026-11-20/hour=14/~my~~orders-0-0-2-b1.parquet"
    address = orders.write(name, {"n": "int64"}, {"n": [1, 2]})
    orders.add({"n": "int64"}, address)
    head = orders.table.look()
    assert head is not None
    assert (head.rows, head.files, list(orders.table.files())) == (2, 1, [address])
    assert orders.delta.to_pyarrow_table().num_rows == 2
    orders.table.commit(TableChange(TableOperation.DELETE, 2, (), (address,), {"n": "int64"}, {}))
    assert orders.delta.to_pyarrow_table().num_rows == 0
    assert orders.reopen_table().look() is not None


def test_new_columns_and_members_are_added_before_their_first_file(orders: OrdersTable) -> None:
    first = {"n": "int64", "s": "struct<a:int64>"}
    orders.add(first, orders.write("one.parquet", first, {"n": [1], "s": [{"a": 1}]}))
    more = {"n": "int64", "s": "struct<a:int64, b:string>", "m": "string"}
    orders.add(more, orders.write("two.parquet", more, {"n": [2], "s": [{"a": 2, "b": "x"}], "m": ["y"]}))
    rows = sorted(orders.delta.to_pyarrow_table().to_pylist(), key=lambda r: r["n"])
    assert rows == [{"n": 1, "s": {"a": 1, "b": None}, "m": None}, {"n": 2, "s": {"a": 2, "b": "x"}, "m": "y"}]
    head = orders.table.look()
    assert head is not None
    assert (head.mark, head.own_mark) == (2, 2)


def test_members_at_every_depth_are_added_before_their_first_file(orders: OrdersTable) -> None:
    orders.add(OUTER, orders.write("one.parquet", OUTER, BEFORE))
    orders.add(INNER, orders.write("two.parquet", INNER, AFTER))
    assert sorted(orders.delta.to_pyarrow_table().to_pylist(), key=lambda r: r["n"]) == GROWN
    query = QueryBuilder().register("t", orders.delta)
    for condition, number in (("s['a']['c'] = 'c'", 2), ("s['a']['b'] = 1", 1), ("s['a']['c'] is null", 1)):
        rows = pa.table(query.execute(f"select n from t where {condition}").read_all())
        assert rows["n"].to_pylist() == [number], condition


def test_unsupported_widening_is_refused_with_column_name(orders: OrdersTable) -> None:
    orders.add({"n": "int32"}, orders.write("one.parquet", {"n": "int32"}, {"n": [1]}))
    with pytest.raises(TableRefused, match="n is integer in it and would become long"):
        orders.add({"n": "int64"}, orders.write("two.parquet", {"n": "int64"}, {"n": [2]}))
    assert orders.delta.to_pyarrow_table().num_rows == 1


def test_commit_on_stale_version_is_refused(orders: OrdersTable) -> None:
    one, two = (orders.write(f"{n}.parquet", {"n": "int64"}, {"n": [n]}) for n in (1, 2))
    orders.add({"n": "int64"}, one)
    stale = orders.reopen_table()
    stale.look()
    orders.add({"n": "int64"}, two)
    with pytest.raises(TableMoved):
        stale.commit(TableChange(TableOperation.APPEND, 2, (two,), (), {"n": "int64"}, {}))
    with pytest.raises(TableMoved):
        stale.tell("2026-11-20T15:00:00Z")
    assert sorted(orders.delta.to_pyarrow_table()["n"].to_pylist()) == [1, 2]


class Interrupted(LocalLake):
    """A lake that calls `interrupt` once, right after files were listed."""

    interrupt: Callable[[], object] | None = None

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        names = [*super().list(prefix, after)]
        happens, self.interrupt = self.interrupt, None
        if happens:
            happens()
        return iter(names)


def test_versions_expired_by_other_publisher_are_not_damage(orders: OrdersTable) -> None:
    first = orders.write("first.parquet", {"n": "int64"}, {"n": [1]})
    second = orders.write("second.parquet", {"n": "int64"}, {"n": [2]})
    orders.add({"n": "int64"}, first)
    orders.table.commit(TableChange(TableOperation.OVERWRITE, 2, (second,), (first,), {"n": "int64"}, {}))
    lake = Interrupted(orders.lake.root)
    mine, other = DeltaLakeTable(lake, ROOT, {}), orders.reopen_table()
    mine.look()
    other.look()
    lake.interrupt = lambda: other.expire(1 << 60)
    with pytest.raises(TableMoved):
        mine.find_named([first])
    mine.look()
    assert mine.find_named([first, second]) == {second}


class Refusing(LocalLake):
    """A lake that refuses to remove one file, after it has removed another, as a distant store may."""

    def __init__(self, root: Path, refused: str) -> None:
        super().__init__(root)
        self.refused, self.removed = refused, Event()

    def remove(self, path: str) -> None:
        if path == self.refused:
            self.removed.wait(1)
            raise LakeUnavailable(f"{path} stays", remedy="run again")
        super().remove(path)
        self.removed.set()


@pytest.mark.parametrize("stays", ["00000000000000000000.json", "00000000000000000003.checkpoint.parquet"])
def test_failed_expiry_does_not_hide_named_files(orders: OrdersTable, stays: str) -> None:
    first, second, third, fourth = (orders.write(f"{n}.parquet", {"n": "int64"}, {"n": [n]}) for n in (1, 2, 3, 4))
    orders.add({"n": "int64"}, first)
    orders.table.commit(TableChange(TableOperation.OVERWRITE, 2, (second,), (first,), {"n": "int64"}, {}))
    orders.add({"n": "int64"}, third)
    orders.delta.create_checkpoint()
    orders.add({"n": "int64"}, fourth)
    orders.add({"n": "int64"}, orders.write("5.parquet", {"n": "int64"}, {"n": [5]}))
    lake = Refusing(orders.lake.root, f"{ROOT}/_delta_log/{stays}")
    table = DeltaLakeTable(lake, ROOT, {})
    table.look()
    with pytest.raises(LakeUnavailable):
        table.expire(1 << 60)
    table.look()
    assert table.find_named([second, third, fourth]) == {second, third, fourth}
    lake.refused = ""
    table.expire(1 << 60)
    table.look()
    assert table.find_named([first, second, third, fourth]) == {second, third, fourth}


def test_missing_log_file_is_reported_as_damage(orders: OrdersTable) -> None:
    orders.add({"n": "int64"}, orders.write("first.parquet", {"n": "int64"}, {"n": [1]}))
    orders.add({"n": "int64"}, orders.write("second.parquet", {"n": "int64"}, {"n": [2]}))
    orders.lake.remove(f"{ROOT}/_delta_log/{1:020d}.json")
    with pytest.raises(TableDiffers):
        orders.reopen_table().look()


def test_missing_file_is_not_added(orders: OrdersTable) -> None:
    with pytest.raises(PartUnreadable, match="is missing"):
        orders.add({"n": "int64"}, orders.lake.locate(f"{ROOT}/gone.parquet"))


def test_merged_files_are_committed_without_data_change(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    world.land(*split_offsets(A, 20), *split_offsets(B, 20))
    world.sync()
    world.compact()
    world.sync()
    log = sorted((tmp_path / "lake" / "data" / "orders" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in log[-1].read_text().splitlines()]
    changes = [a[kind]["dataChange"] for a in actions for kind in ("add", "remove") if kind in a]
    assert changes == [False] * 24


def test_unreachable_store_is_reported(tmp_path: Path) -> None:
    options = {"aws_endpoint_url": "http://127.0.0.1:9", "allow_http": "true", "aws_region": "x", "max_retries": "0"}
    keys = {"aws_access_key_id": "who", "aws_secret_access_key": "secret"}

    class Away(LocalLake):
        def locate(self, path: str) -> str:
            return f"s3://bucket/{path}"

    with pytest.raises(CatalogUnavailable, match="the log of table data/orders does not answer"):
        DeltaLakeTable(Away(tmp_path), ROOT, options | keys).look()


def test_commits_after_one_another_carry_the_newest_mark(tmp_path: Path) -> None:
    """Also without a look in between: else the second one would make the mark of the first look forged."""
    world = DeltaWorld(tmp_path)
    world.land(*split_offsets(A, 50))
    world.sync()
    table = world.open_table()
    head = table.look()
    assert head is not None
    table.commit(TableChange(TableOperation.APPEND, head.mark + 1))
    table.tell("2026-11-20T14:00:00Z")
    now = world.open_table().look()
    assert now is not None
    assert (now.mark, now.forged) == (head.mark + 1, None)
