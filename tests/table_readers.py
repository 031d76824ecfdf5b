"""Independent readers of a feed's tables: PyIceberg, deltalake, and DuckDB over the files that a snapshot names.

None of them uses our code. boto3 downloads files from S3, since DuckDB reads S3 only with an extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from tests.stores import Store

Row = tuple[Any, ...]
_HOW = "union_by_name = true, hive_partitioning = false"


class Reader(Protocol):
    """A reader of one table. A snapshot is an id in Iceberg, a version in Delta Lake."""

    def list_snapshots(self) -> list[int]:
        """Returns the readable snapshots, oldest first."""

    def read_rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        """Returns the rows of these columns, sorted."""

    def list_files(self, snapshot: int) -> list[str]:
        """Returns the addresses of the files that the snapshot names."""

    def read_operation(self, snapshot: int) -> str:
        """Returns the operation that the commit recorded; empty if it recorded none."""


@dataclass(frozen=True)
class IcebergReader:
    """`catalog` and `access` are PyIceberg's properties; with `newest`, only the newest snapshot is read."""

    name: str
    catalog: Mapping[str, str]
    access: Mapping[str, str] = field(default_factory=dict)
    newest: bool = False

    def _load_table(self) -> Any:
        with self.open_catalog() as catalog:
            return catalog.load_table(self.name)

    def drop(self) -> None:
        with self.open_catalog() as catalog:
            catalog.drop_table(self.name)

    def open_catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return closing(load_catalog("sluice", **{**self.catalog, **self.access}))

    def list_snapshots(self) -> list[int]:
        metadata = self._load_table().metadata
        return [metadata.current_snapshot_id] if self.newest else [s.snapshot_id for s in metadata.snapshots]

    def read_rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        scan = self._load_table().scan(snapshot_id=None if self.newest else snapshot, selected_fields=tuple(columns))
        return _sort_rows(scan.to_arrow(), columns)

    def list_files(self, snapshot: int) -> list[str]:
        scan = self._load_table().scan(snapshot_id=None if self.newest else snapshot)
        return [t.file.file_path for t in scan.plan_files()]

    def read_operation(self, snapshot: int) -> str:
        return str(self._load_table().metadata.snapshot_by_id(snapshot).summary.operation.value)


@dataclass(frozen=True)
class DeltaReader:
    """Reads the table in the folder at an address."""

    address: str
    options: Mapping[str, str] | None = None

    def _open_table(self, version: int | None = None) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.address, version, storage_options=dict(self.options) if self.options else None)

    def list_snapshots(self) -> list[int]:
        return sorted(c["version"] for c in self._open_table().history() if c["operation"] != "CREATE TABLE")

    def read_rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        table = self._open_table(snapshot)
        return _sort_rows(table.to_pyarrow_table(columns=list(columns)), columns)

    def list_files(self, snapshot: int) -> list[str]:
        return list(self._open_table(snapshot).file_uris())

    def read_operation(self, snapshot: int) -> str:
        (commit,) = (c for c in self._open_table().history() if c["version"] == snapshot)
        return str(commit.get("sluice.operation", ""))


def read_by_duckdb(files: Sequence[str], columns: Sequence[str], store: Store | None = None) -> list[Row]:
    """Returns the same rows as read by DuckDB from the files of a table."""
    if not files:
        return []
    with TemporaryDirectory() as folder:
        paths = [fetch_file(f, Path(folder, f"{n}.parquet"), store) for n, f in enumerate(files)]
        names = ", ".join(f'"{c}"' for c in columns)
        query = f"select {names} from read_parquet($files, {_HOW}) order by all"
        return duckdb.connect().execute(query, {"files": paths}).fetchall()


def fetch_file(address: str, path: Path, store: Store | None) -> str:
    """Returns the path of a local copy of a file: of a local file, its own path."""
    if not address.startswith("s3://"):
        return address
    assert store is not None
    bucket, _, key = address.removeprefix("s3://").partition("/")
    with closing(store.open_client()) as client:
        client.download_file(bucket, key, str(path))
    return str(path)


def get_iceberg_access(store: Store | None) -> dict[str, str]:
    """Returns PyIceberg's properties to reach a store."""
    return {f"s3.{name.replace('_', '-')}": value for name, value in (store.access if store else {}).items()}


def get_delta_access(store: Store | None) -> dict[str, str] | None:
    """Returns deltalake's options to reach a store; None for a folder."""
    if store is None:
        return None
    names = {"endpoint": "endpoint_url"}
    return {f"aws_{names.get(name, name)}": value for name, value in store.access.items()} | {"allow_http": "true"}


def _sort_rows(rows: pa.Table, columns: Sequence[str]) -> list[Row]:
    return sorted(zip(*(rows.column(c).to_pylist() for c in columns), strict=True), key=_with_nulls_last)


def _with_nulls_last(row: Row) -> Row:
    return tuple((v is None, v) for v in row)
