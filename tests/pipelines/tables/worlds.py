"""Feeds that land by hand in a real folder, with a table of each format that its own library reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.lake.paths import is_ignored
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Table
from sluice.pipelines.publishing import published_files as files
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.open_ports import open_table
from tests.pipelines.landed_world import HOUR, START, World

Summary = dict[str, Any]


class TableWorld(World):
    """A feed with a table of either format. A `snapshot` is a snapshot's id in Iceberg, and a version in Delta."""

    line: str

    def __init__(self, root: Path) -> None:
        super().__init__(root, self.line, lake=LocalLake(root / "lake"))
        self.root = root

    def open_table(self) -> Table:
        return open_table(self.feed, self.lake)

    def sync(self, **options: Any) -> Synced:
        return sync(self.reopen_ledger(), self.lake, FeedTables(self.open_table()), **options)

    def read_offsets(self, snapshot: int | None = None) -> list[tuple[int, int]]:
        """Returns (partition, offset) of the table's rows, read by the format's own library."""
        rows = self.read(snapshot)
        return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))

    def read_landed(self, kind: PartKind = PartKind.LANDED) -> list[tuple[int, int]]:
        """Returns (partition, offset) of landed or quarantined rows, by the ledger."""
        hours = [START, START + HOUR, START + 2 * HOUR]
        listed = files.list_files(self.feed, self.lake, hours, kind, partial=True)
        tables = [pq.read_table(f.address, columns=["partition", "offset"], partitioning=None) for f in listed]
        return sorted(zip(*pa.concat_tables(tables).to_pydict().values(), strict=True))

    def check_same(self) -> None:
        """Check that the table has the landed rows: by its library, by DuckDB over its files, and by our comparison."""
        assert self.read_offsets() == self.read_landed()
        query = f'select partition, "offset" from read_parquet({self.list_table_files()}) order by all'
        rows = duckdb.connect().execute(query).fetchall()
        assert rows == self.read_landed()
        table, ledger = self.open_table(), self.reopen_ledger()
        assert compare(ledger, self.lake, table, table.look(), ledger.read()).same

    # -- per format

    def read(self, snapshot: int | None = None) -> pa.Table:
        raise NotImplementedError

    def list_table_files(self) -> list[str]:
        raise NotImplementedError

    def list_snapshots(self) -> list[tuple[int, int, Summary]]:
        """Returns id, time (ms) and summary of each snapshot that changed files, oldest first."""
        raise NotImplementedError

    def list_operations(self) -> list[str]:
        raise NotImplementedError

    def get_properties(self) -> dict[str, str]:
        raise NotImplementedError

    def put_property(self, name: str, value: str) -> None:
        raise NotImplementedError

    def drop_property(self, name: str) -> None:
        raise NotImplementedError

    def put_mark(self, mark: int) -> None:
        raise NotImplementedError

    def append(self, rows: pa.Table) -> None:
        raise NotImplementedError

    def list_again(self, file: str) -> None:
        """Add one of our files again with wrong statistics, as other writers may."""
        raise NotImplementedError

    def delete(self, where: str) -> None:
        raise NotImplementedError

    def roll_back(self, snapshot: int) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        raise NotImplementedError

    def get_commit_method(self) -> tuple[Any, str]:
        """Returns the class of the format's library, and the name of its method that commits."""
        raise NotImplementedError

    @property
    def snapshot(self) -> int:
        return self.list_snapshots()[-1][0]

    def run_audit(self) -> AuditReport:
        return audit(self.reopen_ledger(), self.lake, hashes=True)

    def count_rows(self) -> dict[int, int]:
        """Returns the number of rows of each snapshot, including those that others committed."""
        raise NotImplementedError

    def list_parts(self) -> list[str]:
        return [path for path in self.list_files() if not is_ignored(path)]


class IcebergWorld(TableWorld):
    line = "table: {iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}}\n"

    @property
    def iceberg(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("sluice", type="sql", uri=f"sqlite:///{self.root}/catalog.db").load_table("db.orders")

    def read(self, snapshot: int | None = None) -> pa.Table:
        return self.iceberg.scan(snapshot_id=snapshot).to_arrow()

    def list_table_files(self) -> list[str]:
        return [t.file.file_path for t in self.iceberg.scan().plan_files()]

    def list_snapshots(self) -> list[tuple[int, int, Summary]]:
        snapshots = self.iceberg.metadata.snapshots
        return [(s.snapshot_id, s.timestamp_ms, s.summary.additional_properties) for s in snapshots]

    def count_rows(self) -> dict[int, int]:
        return {s.snapshot_id: len(self.read_offsets(s.snapshot_id)) for s in self.iceberg.metadata.snapshots}

    def list_operations(self) -> list[str]:
        return [str(s.summary.operation.value) for s in self.iceberg.metadata.snapshots]

    def get_properties(self) -> dict[str, str]:
        return dict(self.iceberg.properties)

    def put_property(self, name: str, value: str) -> None:
        with self.iceberg.transaction() as change:
            change.set_properties({name: value})

    def drop_property(self, name: str) -> None:
        with self.iceberg.transaction() as change:
            change.remove_properties(name)

    def put_mark(self, mark: int) -> None:
        self.put_property("sluice.mark", str(mark))

    def append(self, rows: pa.Table) -> None:
        self.iceberg.append(rows)

    def list_again(self, file: str) -> None:
        self.iceberg.add_files([file], check_duplicate_files=False)

    def delete(self, where: str) -> None:
        self.iceberg.delete(where)

    def get_commit_method(self) -> tuple[Any, str]:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog, "commit_table"

    def roll_back(self, snapshot: int) -> None:
        self.iceberg.manage_snapshots().rollback_to_snapshot(snapshot).commit()

    def drop(self) -> None:
        self.iceberg.catalog.drop_table("db.orders")


class DeltaWorld(TableWorld):
    line = "table: {delta: {}}\n"

    @property
    def delta(self) -> Any:
        return self.at(None)

    def at(self, version: int | None) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(str(self.root / "lake" / "data" / "orders"), version)

    def read(self, snapshot: int | None = None) -> pa.Table:
        return self.at(snapshot).to_pyarrow_table()

    def list_table_files(self) -> list[str]:
        return list(self.delta.file_uris())

    def list_snapshots(self) -> list[tuple[int, int, Summary]]:
        ours = (c for c in reversed(self.delta.history()) if "sluice.operation" in c)
        return [(c["version"], c["timestamp"], c) for c in ours]

    def list_operations(self) -> list[str]:
        return [c["sluice.operation"] for _, _, c in self.list_snapshots()]

    def get_properties(self) -> dict[str, str]:
        return dict(self.delta.metadata().configuration)

    def put_property(self, name: str, value: str) -> None:
        self.delta.alter.set_table_properties({name: value}, raise_if_not_exists=False)

    def drop_property(self, name: str) -> None:
        """Write the version that Spark's `ALTER TABLE … UNSET` writes; deltalake cannot."""
        table, log = self.delta, self.root / "lake/data/orders/_delta_log"
        actions = [json.loads(line) for p in sorted(log.glob("*.json")) for line in p.read_text().splitlines()]
        metadata = [a["metaData"] for a in actions if "metaData" in a][-1]
        del metadata["configuration"][name]
        (log / f"{table.version() + 1:020}.json").write_text(json.dumps({"metaData": metadata}) + "\n")

    def put_mark(self, mark: int, about: dict[str, str] | None = None) -> None:
        from deltalake import CommitProperties, Transaction

        table = self.delta
        marks = CommitProperties(about, app_transactions=[Transaction(f"sluice/{self.state().ledger_id}", mark)])
        table.create_write_transaction([], mode="append", schema=table.schema(), commit_properties=marks)

    def append(self, rows: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(self.delta, rows, mode="append")

    def list_again(self, file: str) -> None:
        from deltalake.transaction import AddAction

        table, path = self.delta, file.partition("/data/orders/")[2]
        wrong = AddAction(path, (self.root / "lake/data/orders" / path).stat().st_size, {}, 0, True, '{"numRecords":1}')
        table.create_write_transaction([wrong], mode="append", schema=table.schema())

    def delete(self, where: str) -> None:
        self.delta.delete(where)

    def replace_rows(self, rows: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(self.delta, rows, mode="overwrite")

    def delete_with_change_data(self, where: str) -> None:
        self.put_property("delta.enableChangeDataFeed", "true")
        self.delete(where)

    def count_rows(self) -> dict[int, int]:
        log = (int(p.stem) for p in (self.root / "lake/data/orders/_delta_log").glob("*.json"))
        return {version: len(self.read_offsets(version)) for version in log}

    def get_commit_method(self) -> tuple[Any, str]:
        from deltalake import DeltaTable

        return DeltaTable, "create_write_transaction"

    def roll_back(self, snapshot: int) -> None:
        self.delta.restore(snapshot)

    def drop(self) -> None:
        shutil.rmtree(self.root / "lake" / "data" / "orders" / "_delta_log")
