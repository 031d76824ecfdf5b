"""A feed that lands by hand in a real folder, with a table of each format, read by the format's own library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.lake.paths import is_table_log
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Table
from sluice.pipelines.publishing import published_files as files
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.open_ports import open_table
from tests.pipelines.landed_world import HOUR, START, World

Said = dict[str, Any]


class TableWorld(World):
    """What both formats share. `snapshot` means what a reader of the format names: a snapshot's id, or a version."""

    line: str

    def __init__(self, root: Path) -> None:
        super().__init__(root, self.line, lake=LocalLake(root / "lake"))
        self.root = root

    def table(self) -> Table:
        return open_table(self.feed, self.lake)

    def sync(self, **how: Any) -> Synced:
        return sync(self.fresh_ledger(), self.lake, FeedTables(self.table()), **how)

    def offsets(self, snapshot: int | None = None) -> list[tuple[int, int]]:
        """(partition, offset) of the table's rows, read by the format's own library."""
        rows = self.read(snapshot)
        return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))

    def landed_rows(self, kind: PartKind = PartKind.LANDED) -> list[tuple[int, int]]:
        """The same of what landed, or of what is in quarantine, by the ledger."""
        hours = [START, START + HOUR, START + 2 * HOUR]
        found = files.list_files(self.fresh_ledger(), self.lake, hours, self.feed.window, kind, partial=True)
        read = [pq.read_table(f.address, columns=["partition", "offset"], partitioning=None) for f in found]
        return sorted(zip(*pa.concat_tables(read).to_pydict().values(), strict=True))

    def check_same(self) -> None:
        """The table is what landed: by its library, by DuckDB over the snapshot's files, by our own comparison."""
        assert self.offsets() == self.landed_rows()
        query = f'select partition, "offset" from read_parquet({self.files()}) order by all'
        found = duckdb.connect().execute(query).fetchall()
        assert found == self.landed_rows()
        table, ledger = self.table(), self.fresh_ledger()
        assert compare(ledger, self.lake, table, table.look(), ledger.read()).same

    # -- each format's own

    def read(self, snapshot: int | None = None) -> pa.Table:
        raise NotImplementedError

    def files(self) -> list[str]:
        raise NotImplementedError

    def said(self) -> list[tuple[int, int, Said]]:
        """What each snapshot that changed files says of itself, oldest first: its id, its time (ms), its summary."""
        raise NotImplementedError

    def operations(self) -> list[str]:
        raise NotImplementedError

    def properties(self) -> dict[str, str]:
        raise NotImplementedError

    def put_property(self, name: str, value: str) -> None:
        raise NotImplementedError

    def put_mark(self, mark: int) -> None:
        raise NotImplementedError

    def append(self, rows: pa.Table) -> None:
        raise NotImplementedError

    def list_again(self, file: str) -> None:
        """Let the table say something wrong of one of our files, as others may."""
        raise NotImplementedError

    def delete(self, where: str) -> None:
        raise NotImplementedError

    def roll_back(self, snapshot: int) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        raise NotImplementedError

    def commits_by(self) -> tuple[Any, str]:
        """The class of the format's library and its method by which a commit takes effect."""
        raise NotImplementedError

    @property
    def snapshot(self) -> int:
        return self.said()[-1][0]

    def audited(self) -> AuditReport:
        return audit(self.fresh_ledger(), self.lake, hashes=True)

    def counts(self) -> dict[int, int]:
        """How many rows each snapshot has, also of what others committed."""
        raise NotImplementedError

    def parts(self) -> list[str]:
        return [path for path in self.visible() if not is_table_log(path)]


class IcebergWorld(TableWorld):
    line = "table: {iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}}\n"

    @property
    def iceberg(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("sluice", type="sql", uri=f"sqlite:///{self.root}/catalog.db").load_table("db.orders")

    def read(self, snapshot: int | None = None) -> pa.Table:
        return self.iceberg.scan(snapshot_id=snapshot).to_arrow()

    def files(self) -> list[str]:
        return [t.file.file_path for t in self.iceberg.scan().plan_files()]

    def said(self) -> list[tuple[int, int, Said]]:
        found = self.iceberg.metadata.snapshots
        return [(s.snapshot_id, s.timestamp_ms, s.summary.additional_properties) for s in found]

    def counts(self) -> dict[int, int]:
        return {s.snapshot_id: len(self.offsets(s.snapshot_id)) for s in self.iceberg.metadata.snapshots}

    def operations(self) -> list[str]:
        return [str(s.summary.operation.value) for s in self.iceberg.metadata.snapshots]

    def properties(self) -> dict[str, str]:
        return dict(self.iceberg.properties)

    def put_property(self, name: str, value: str) -> None:
        with self.iceberg.transaction() as change:
            change.set_properties({name: value})

    def put_mark(self, mark: int) -> None:
        self.put_property("sluice.mark", str(mark))

    def append(self, rows: pa.Table) -> None:
        self.iceberg.append(rows)

    def list_again(self, file: str) -> None:
        self.iceberg.add_files([file], check_duplicate_files=False)

    def delete(self, where: str) -> None:
        self.iceberg.delete(where)

    def commits_by(self) -> tuple[Any, str]:
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

    def files(self) -> list[str]:
        return list(self.delta.file_uris())

    def said(self) -> list[tuple[int, int, Said]]:
        ours = (c for c in reversed(self.delta.history()) if "sluice.operation" in c)
        return [(c["version"], c["timestamp"], c) for c in ours]

    def operations(self) -> list[str]:
        return [c["sluice.operation"] for _, _, c in self.said()]

    def properties(self) -> dict[str, str]:
        return dict(self.delta.metadata().configuration)

    def put_property(self, name: str, value: str) -> None:
        self.delta.alter.set_table_properties({name: value}, raise_if_not_exists=False)

    def put_mark(self, mark: int) -> None:
        from deltalake import CommitProperties, Transaction

        found = self.delta
        marks = CommitProperties(app_transactions=[Transaction(f"sluice/{self.state().ledger_id}", mark)])
        found.create_write_transaction([], mode="append", schema=found.schema(), commit_properties=marks)

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

    def overwrite(self, rows: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(self.delta, rows, mode="overwrite")

    def delete_with_change_data(self, where: str) -> None:
        self.put_property("delta.enableChangeDataFeed", "true")
        self.delete(where)

    def counts(self) -> dict[int, int]:
        log = (int(p.stem) for p in (self.root / "lake/data/orders/_delta_log").glob("*.json"))
        return {version: len(self.offsets(version)) for version in log}

    def commits_by(self) -> tuple[Any, str]:
        from deltalake import DeltaTable

        return DeltaTable, "create_write_transaction"

    def roll_back(self, snapshot: int) -> None:
        self.delta.restore(snapshot)

    def drop(self) -> None:
        shutil.rmtree(self.root / "lake" / "data" / "orders" / "_delta_log")
