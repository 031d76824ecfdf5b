"""Tables that other clients changed: check, audit and sync print one remedy, and the remedy ends in a right table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from sluice.pipelines.audit.strict_audit import table_problems
from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.tables.check import comparison
from sluice.pipelines.tables.sync import rebuild
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.open_ports import open_tables
from tests.pipelines.landed_world import A, B, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld

SYNC, REPAIR, REBUILD = (
    f"sluice table {command}" for command in ("sync orders", "sync orders --repair", "rebuild orders")
)
Change = Callable[[TableWorld], object]


def _set_format_version_3(world: IcebergWorld) -> None:
    """Write what Spark's `ALTER TABLE … SET TBLPROPERTIES ('format-version'='3')` changes; PyIceberg cannot."""
    path = Path(world.iceberg.metadata_location.removeprefix("file://"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format-version": 3, "next-row-id": 0}))


def _partition(world: IcebergWorld) -> None:
    with world.iceberg.update_spec() as change:
        change.add_identity("partition")


def _drop_column(world: IcebergWorld) -> None:
    with world.iceberg.update_schema() as change:
        change.delete_column("value")


def _rename_column(world: IcebergWorld) -> None:
    with world.iceberg.update_schema() as change:
        change.rename_column("value", "theirs")


def _write_version(world: DeltaWorld, *actions: dict[str, object]) -> None:
    path = world.root / f"lake/data/orders/_delta_log/{world.delta.version() + 1:020}.json"
    path.write_text("".join(json.dumps(action) + "\n" for action in actions))


def _turn_on_commit_timestamps(world: DeltaWorld) -> None:
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["inCommitTimestamp"]}
    _write_version(world, {"commitInfo": {"timestamp": 1, "inCommitTimestamp": 1}}, {"protocol": protocol})


def _remove_newest_metadata(world: IcebergWorld) -> str:
    path = Path(world.iceberg.metadata_location.removeprefix("file://"))
    path.unlink()
    return path.name


CHANGES: dict[str, tuple[type[TableWorld], Change, str, str]] = {
    "format version 3": (IcebergWorld, _set_format_version_3, "format version 3", REBUILD),
    "partitioned": (IcebergWorld, _partition, "partitioned by partition", REBUILD),
    "column dropped": (IcebergWorld, _drop_column, "value of its columns were dropped", SYNC),
    "column renamed": (IcebergWorld, _rename_column, "column value was renamed to theirs", REPAIR),
    "names unset": (IcebergWorld, lambda w: w.drop_property("schema.name-mapping.default"), "name mapping", SYNC),
    "file twice": (IcebergWorld, lambda w: w.list_again(w.list_table_files()[0]), "1 file is listed twice", REPAIR),
    "mark forged": (IcebergWorld, lambda w: w.put_mark(99999), "mark was set to entry 99998", SYNC),
    "mark forged in a log": (DeltaWorld, lambda w: w.put_mark(99999), "mark was set to entry 99998", SYNC),
    "mark forged backwards": (DeltaWorld, lambda w: w.put_mark(1), "mark was set to entry 0", SYNC),
    "commit timestamps": (DeltaWorld, _turn_on_commit_timestamps, "inCommitTimestamp", REBUILD),
    "append-only": (DeltaWorld, lambda w: w.put_property("delta.appendOnly", "true"), "append-only", REBUILD),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_remedy_is_printed_and_works(name: str, tmp_path: Path) -> None:
    kind, change, text, remedy = CHANGES[name]
    world = kind(tmp_path)
    world.land(*split_offsets(A, 50))
    world.sync()
    change(world)
    _check_remedy(world, text, remedy)
    if remedy != SYNC:
        with pytest.raises(TableDiffers, match=text) as refusal:
            world.sync()
        assert refusal.value.remedy.endswith(remedy)
        if remedy == REBUILD:
            with pytest.raises(TableDiffers) as refusal:
                world.sync(repair=True)
            assert refusal.value.remedy.endswith(remedy)
    world.land(*split_offsets(B, 50))
    _follow(world, remedy)
    _check_right(world)


@pytest.mark.parametrize("metadata", ["newest", "log"])
def test_missing_metadata_is_named_and_the_table_made_again(tmp_path: Path, metadata: str) -> None:
    world = IcebergWorld(tmp_path) if metadata == "newest" else DeltaWorld(tmp_path)
    for start in (0, 50):
        world.land((A, start, start + 50))
        world.sync()
    if isinstance(world, IcebergWorld):
        name = _remove_newest_metadata(world)
    else:
        (path,) = (tmp_path / "lake/data/orders/_delta_log").glob("*1.json")
        path.unlink()
        name = path.name
    for ask in (world.sync, lambda: comparison(world.reopen_ledger(), world.lake, world.open_table())):
        with pytest.raises(TableDiffers) as refusal:
            ask()
        assert refusal.value.remedy == REBUILD
        assert name in refusal.value.message or metadata == "log"
    _follow(world, REBUILD)
    _check_right(world)


def _check_remedy(world: TableWorld, text: str, remedy: str) -> None:
    compared = comparison(world.reopen_ledger(), world.lake, world.open_table())
    assert text in compared.describe()
    assert (compared.right, compared.find_remedy("orders")) == (False, remedy)
    assert {p.remedy for p in table_problems(world.reopen_ledger(), world.lake, FeedTables(world.open_table()))} == {
        remedy
    }


def _follow(world: TableWorld, remedy: str) -> None:
    if remedy != REBUILD:
        world.sync(repair=remedy == REPAIR)
        return
    with open_tables(world.feed, world.lake) as tables:
        rebuild(world.ledger, world.lake, tables)


def _check_right(world: TableWorld) -> None:
    world.check_same()
    assert comparison(world.reopen_ledger(), world.lake, world.open_table()).right
    assert world.read().column("value").null_count == 0
    world.land((A, 200, 250))
    world.sync()
    world.check_same()
    assert world.run_audit().problems == ()
