"""Publishers of a table are killed at any moment, two at a time, while batches land and files are merged under them.

The table is read by PyIceberg or deltalake, and by DuckDB, and held against what landed; nothing of ours judges it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from sluice.resources.lake_local import LocalLake
from tests.pipelines.landed_world import A, B, World, pieces

pytestmark = pytest.mark.faults

TABLES = {
    "iceberg": "table: {iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}}\n",
    "delta": "table: {delta: {}}\n",
}
SYNC = """
import sys
from pathlib import Path
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.tables.sync import sync
from sluice.resources.clock import now
from sluice.resources.edges import open_table
from sluice.resources.lake_local import LocalLake

root = Path(sys.argv[1])
feed, lake = load_feed(root / "feeds" / "orders.yaml", {}), LocalLake(root / "lake")
table = open_table(feed, lake)
table.look()
print("ready", flush=True)
sys.stdin.readline()
sync(Ledger(lake, "orders", now), lake, table)
print("done", flush=True)
"""


def begin(root: Path) -> subprocess.Popen[str]:
    """A publisher that has loaded everything, and waits for a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    made = subprocess.Popen([sys.executable, "-c", SYNC, str(root)], text=True, **pipes)  # type: ignore[call-overload]
    assert made.stdout.readline().strip() == "ready", made.stderr.read()
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", TABLES)
def test_publishers_killed_at_any_moment_leave_each_row_once(kind: str, tmp_path: Path) -> None:
    pytest.importorskip({"iceberg": "pyiceberg", "delta": "deltalake"}[kind])
    chance = random.Random(int(os.environ.get("SLUICE_FAULTS_SEED", "1")))
    world = World(tmp_path, TABLES[kind], lake=LocalLake(tmp_path / "lake"))
    wanted: set[tuple[int, int]] = set()
    for number in range(12):
        for key in (A, B):
            start = number * 50
            world.land(*pieces(key, 10, start, start + 50))
            wanted |= {(key.partition, o) for o in range(start, start + 50)}
        if number == 6:
            world.compact()
        rivals = [begin(tmp_path) for _ in range(2)]
        for rival in rivals:
            rival.stdin.write("go\n")  # type: ignore[union-attr]
            rival.stdin.flush()  # type: ignore[union-attr]
        time.sleep(chance.uniform(0.0, 1.5))
        for rival in rivals:
            rival.send_signal(signal.SIGKILL)
            rival.communicate()
        check(kind, tmp_path, wanted, whole=False)
    last = begin(tmp_path)
    out, error = last.communicate("go\n")
    assert out.strip() == "done", error
    check(kind, tmp_path, wanted, whole=True)


def check(kind: str, root: Path, wanted: set[tuple[int, int]], *, whole: bool) -> None:
    """Every snapshot has each row once, and none that did not land; with `whole`, the newest has all."""
    snapshots, files = (of_iceberg if kind == "iceberg" else of_delta)(root)
    if not snapshots:
        assert not whole
        return
    for found in snapshots:
        rows = [*zip(*found.select(["partition", "offset"]).to_pydict().values(), strict=True)]
        assert len(rows) == len({*rows}), "a row is there twice"
        assert wanted.issuperset(rows)
    if whole:
        query = f'select partition, "offset" from read_parquet({files})'
        read = duckdb.connect().execute(query).fetchall()
        assert sorted(read) == sorted(wanted)


def of_iceberg(root: Path) -> tuple[list[pa.Table], list[str]]:
    """The rows of every snapshot, and the files of the newest."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("sluice", type="sql", uri=f"sqlite:///{root}/catalog.db")
    if not catalog.namespace_exists("db") or not catalog.table_exists("db.orders"):
        return [], []
    table = catalog.load_table("db.orders")
    found = [table.scan(snapshot_id=s.snapshot_id).to_arrow() for s in table.metadata.snapshots]
    return found, [t.file.file_path for t in table.scan().plan_files()]


def of_delta(root: Path) -> tuple[list[pa.Table], list[str]]:
    from deltalake import DeltaTable

    address = str(root / "lake" / "data" / "orders")
    if not DeltaTable.is_deltatable(address):
        return [], []
    table = DeltaTable(address)
    found = [DeltaTable(address, version).to_pyarrow_table() for version in range(table.version() + 1)]
    return found, table.file_uris()
