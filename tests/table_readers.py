"""A feed's tables as others read them: PyIceberg, deltalake, and DuckDB over the files that a snapshot names.

Nothing of ours reads here. An address on S3 is fetched by boto3, since DuckDB's own reader of S3 is an extension.
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
    """One table. A snapshot is what its format calls so: an id, or a version."""

    def snapshots(self) -> list[int]:
        """Those that can be read, oldest first."""

    def rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        """The rows of these columns, sorted."""

    def files(self, snapshot: int) -> list[str]:
        """The addresses of the files that the snapshot names."""

    def operation(self, snapshot: int) -> str:
        """What the commit did to rows; empty where it did nothing."""


@dataclass(frozen=True)
class IcebergReader:
    """`catalog` and `access` are PyIceberg's properties; with `newest`, only the newest snapshot is looked at."""

    name: str
    catalog: Mapping[str, str]
    access: Mapping[str, str] = field(default_factory=dict)
    newest: bool = False

    def _table(self) -> Any:
        with self._opened() as catalog:
            return catalog.load_table(self.name)

    def drop(self) -> None:
        with self._opened() as catalog:
            catalog.drop_table(self.name)

    def _opened(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return closing(load_catalog("sluice", **{**self.catalog, **self.access}))

    def snapshots(self) -> list[int]:
        metadata = self._table().metadata
        return [metadata.current_snapshot_id] if self.newest else [s.snapshot_id for s in metadata.snapshots]

    def rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        found = self._table().scan(snapshot_id=None if self.newest else snapshot, selected_fields=tuple(columns))
        return _sorted(found.to_arrow(), columns)

    def files(self, snapshot: int) -> list[str]:
        found = self._table().scan(snapshot_id=None if self.newest else snapshot)
        return [t.file.file_path for t in found.plan_files()]

    def operation(self, snapshot: int) -> str:
        return str(self._table().metadata.snapshot_by_id(snapshot).summary.operation.value)


@dataclass(frozen=True)
class DeltaReader:
    """The table in the folder at an address."""

    address: str
    options: Mapping[str, str] | None = None

    def _at(self, version: int | None = None) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.address, version, storage_options=dict(self.options) if self.options else None)

    def snapshots(self) -> list[int]:
        return sorted(c["version"] for c in self._at().history() if c["operation"] != "CREATE TABLE")

    def rows(self, snapshot: int, columns: Sequence[str]) -> list[Row]:
        table = self._at(snapshot)
        return _sorted(table.to_pyarrow_table(columns=list(columns)), columns)

    def files(self, snapshot: int) -> list[str]:
        return list(self._at(snapshot).file_uris())

    def operation(self, snapshot: int) -> str:
        (said,) = (c for c in self._at().history() if c["version"] == snapshot)
        return str(said.get("sluice.operation", ""))


def by_duckdb(files: Sequence[str], columns: Sequence[str], store: Store | None = None) -> list[Row]:
    """The same rows by DuckDB, which knows no table: it is given files."""
    if not files:
        return []
    with TemporaryDirectory() as folder:
        here = [fetch_file(f, Path(folder, f"{n}.parquet"), store) for n, f in enumerate(files)]
        named = ", ".join(f'"{c}"' for c in columns)
        query = f"select {named} from read_parquet($files, {_HOW}) order by all"
        return duckdb.connect().execute(query, {"files": here}).fetchall()


def fetch_file(address: str, path: Path, store: Store | None) -> str:
    """Returns the path of a local copy of a file; a file outside of stores is its own."""
    if not address.startswith("s3://"):
        return address
    assert store is not None
    bucket, _, key = address.removeprefix("s3://").partition("/")
    with closing(store.open_client()) as client:
        client.download_file(bucket, key, str(path))
    return str(path)


def iceberg_access(store: Store | None) -> dict[str, str]:
    """PyIceberg's properties to reach a store."""
    return {f"s3.{name.replace('_', '-')}": value for name, value in (store.access if store else {}).items()}


def delta_access(store: Store | None) -> dict[str, str] | None:
    """deltalake's options to reach a store; None for a folder."""
    if store is None:
        return None
    called = {"endpoint": "endpoint_url"}
    return {f"aws_{called.get(name, name)}": value for name, value in store.access.items()} | {"allow_http": "true"}


def _sorted(rows: pa.Table, columns: Sequence[str]) -> list[Row]:
    return sorted(zip(*(rows.column(c).to_pylist() for c in columns), strict=True), key=_with_nulls_last)


def _with_nulls_last(row: Row) -> Row:
    return tuple((v is None, v) for v in row)
