"""What an Iceberg table says of its files and columns, and which of them it refuses; read by PyIceberg."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog

from sluice.pipelines.vocabulary.errors import PartUnreadable, TableRefused
from sluice.pipelines.vocabulary.tables import TableChange, TableOperation
from sluice.resources.lake_local import LocalLake
from sluice.resources.tables.iceberg import IcebergTable
from tests.pipelines.tables.values import NOON, ROWS, SIGNED, told, write

ROOT = "data/orders"


class Place:
    """An Iceberg table over files that are written by hand."""

    def __init__(self, root: Path) -> None:
        self.lake, self.mark = LocalLake(root / "lake"), 0
        self.catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
        self.table = IcebergTable("db.orders", self.catalog, {"warehouse": str(root / "tables")})

    def write(self, name: str, columns: Mapping[str, str], values: Mapping[str, list[Any]]) -> str:
        return write(self.lake, f"{ROOT}/{name}", columns, values)

    def add(self, columns: Mapping[str, str], *addresses: str) -> None:
        if self.table.look() is None:
            self.table.create(columns, {"sluice.ledger": "x"})
            self.table.look()
        self.mark += 1
        self.table.commit(TableChange(TableOperation.APPEND, self.mark, addresses, (), columns, {}))

    @property
    def iceberg(self) -> Any:
        return load_catalog("sluice", **self.catalog).load_table("db.orders")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_values_of_all_types_are_read_as_they_landed(place: Place) -> None:
    place.add(SIGNED, *(place.write(f"{n}.parquet", SIGNED, ROWS) for n in "ab"))
    read = place.iceberg.scan().to_arrow().to_pydict()
    for column, text in SIGNED.items():
        assert told(read[column]) == str(ROWS[column] * 2), text


def test_each_file_is_described_as_by_pyiceberg(place: Place) -> None:
    """The first of a shape is described by PyIceberg alone, the others by parts of it."""
    place.add(SIGNED, *(place.write(f"{n}.parquet", SIGNED, ROWS) for n in "ab"))
    first, second = ([f.get(k) for k in f if k != "file_path"] for f in place.iceberg.inspect.files().to_pylist())
    assert str(first) == str(second)


def test_a_reader_of_an_hour_opens_the_files_of_that_hour(place: Place) -> None:
    """Without partitions: by what manifests say of each file. The second has one late record."""
    columns, hour = {"at": "timestamp(ms)"}, dt.timedelta(hours=1)
    times = ([NOON, NOON + 0.9 * hour], [NOON + 0.99 * hour, NOON + 1.5 * hour], [NOON + 2 * hour, NOON + 2.5 * hour])
    files = [place.write(f"{n}.parquet", columns, {"at": found}) for n, found in enumerate(times)]
    place.add(columns, *files)
    late = place.iceberg.scan(f"at >= '{(NOON + 2 * hour).isoformat()}'").plan_files()
    assert [t.file.file_path for t in late] == files[2:]


def test_files_of_several_shapes_go_in_together(place: Place) -> None:
    narrow, wide = {"n": "int32"}, {"n": "int64", "s": "string"}
    files = (place.write("a.parquet", narrow, {"n": [1]}), place.write("b.parquet", wide, {"n": [2**40], "s": ["x"]}))
    place.add(wide, *files)
    read = place.iceberg.scan().to_arrow().sort_by("n").to_pylist()
    assert read == [{"n": 1, "s": None}, {"n": 2**40, "s": "x"}]
    with pytest.raises(TableRefused):
        place.add(wide, place.write("c.parquet", {"n": "string"}, {"n": ["x"]}))


def test_a_file_that_is_not_there_or_no_parquet_is_not_added(place: Place) -> None:
    with pytest.raises(PartUnreadable, match=r"gone.parquet is missing") as lost:
        place.add({"n": "int64"}, place.lake.locate(f"{ROOT}/gone.parquet"))
    assert lost.value.gone
    with place.lake.create(f"{ROOT}/torn.parquet") as file:
        file.write(b"PAR1")
    with pytest.raises(PartUnreadable, match="cannot be read"):
        place.add({"n": "int64"}, place.lake.locate(f"{ROOT}/torn.parquet"))
    assert place.iceberg.current_snapshot() is None


def test_a_commit_does_not_look_at_older_snapshots(place: Place) -> None:
    """What a commit takes does not grow with them; and they stay."""
    columns = {"n": "int64"}
    for n in range(4):
        place.add(columns, place.write(f"{n}.parquet", columns, {"n": [n]}))
    found = place.iceberg.metadata
    assert (len(found.snapshots), len(found.snapshot_log), len(found.metadata_log)) == (4, 4, 4)
    assert [s.parent_snapshot_id for s in found.snapshots] == [None, *(s.snapshot_id for s in found.snapshots[:3])]
