"""Publishers of a table in processes of their own, which may be killed, and readers that import nothing of ours.

A table lies in a folder, or in a store that publishers reach through a proxy: what happens at one of their requests is
the proxy's doing. Its catalog is a file of SQLite, or whatever a course names.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from sluice.pipelines.errors import SluiceError
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.lake.s3_lake import S3Lake
from tests.pipelines.landed_world import A, B, World, pieces
from tests.resources.lake.s3_faults import Proxy
from tests.stores import Store
from tests.table_readers import fetch_file

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "deltalake"])
Rows = set[tuple[int, int]]


@dataclass(frozen=True)
class Ended:
    """What became of a publisher: what it raised, by its class and in words; or that it was killed."""

    added: int = 0
    error: str = ""
    said: str = ""
    killed: bool = False


class Publisher:
    """One that brings a table up once it is told to `go`."""

    def __init__(self, root: Path, *how: Any) -> None:
        self._pipe, end = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_publish, args=(root, end, *how), daemon=True)
        self.process.start()
        end.close()
        assert self._pipe.recv() == "ready"

    def go(self) -> Publisher:
        self._pipe.send("go")
        return self

    def kill(self) -> None:
        self.process.kill()

    def ended(self) -> Ended:
        try:
            found = Ended(*self._pipe.recv())
        except EOFError:
            found = Ended(killed=True)
        self.process.join()
        return found


def _publish(root: Path, pipe: Connection, dies: str = "", repair: bool = False) -> None:
    """In the other process. `dies`: `before` or `after` its commit takes effect."""
    from sluice.pipelines.feed.load import load_feed
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.tables.sync import sync
    from sluice.resources.lake import open_lake
    from sluice.resources.liveness import now
    from sluice.resources.open_ports import open_tables

    feed = load_feed(root / "feeds" / "orders.yaml", {})
    lake = open_lake(feed)
    if dies:
        _die_at_commit(dies)
    with open_tables(feed, lake) as tables:
        pipe.send("ready")
        pipe.recv()
        try:
            pipe.send((sync(Ledger(lake, "orders", now), lake, tables, repair=repair).added,))
        except SluiceError as error:
            pipe.send((0, type(error).__name__, str(error)))


def _die_at_commit(when: str) -> None:
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    def dying(commit: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if when == "after":
                commit(*given, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    SqlCatalog.commit_table = dying(SqlCatalog.commit_table)  # type: ignore[method-assign]
    DeltaTable.create_write_transaction = dying(DeltaTable.create_write_transaction)  # type: ignore[method-assign]


class Course(World):
    """A feed that lands by hand, whose table publishers bring up; `wanted` is what has landed."""

    def __init__(self, root: Path, kind: str, store: Store | None = None, front: Proxy | None = None, uri: str = ""):
        self.root, self.kind, self.store = root, kind, store
        self.uri = uri or f"sqlite:///{root}/catalog.db"
        table = {"iceberg": f"{{iceberg: {{name: db.orders, catalog: {{type: sql, uri: '{self.uri}'}}}}}}"}
        more = f"table: {table.get(kind, '{delta: {}}')}\n"
        if store and front:
            lines = store.lines()
            self.address, endpoint = lines["lake"], store.settings.endpoint or ""
            more += "".join(f"{k}: {v}\n" for k, v in lines.items()).replace(endpoint, front.endpoint)
            super().__init__(root, more, lake=S3Lake(self.address, store.settings))
        else:
            self.address = str(root / "lake")
            super().__init__(root, f"{more}lake: {root}/lake\n", lake=LocalLake(root / "lake"))
        self.wanted: Rows = set()

    def grow(self, *ranges: tuple[Any, int, int]) -> None:
        """Land these."""
        self.land(*ranges)
        self.wanted |= {(key.partition, o) for key, start, end in ranges for o in range(start, end)}

    def publisher(self, *how: Any) -> Publisher:
        return Publisher(self.root, *how)

    def publish(self, *how: Any) -> Ended:
        return self.publisher(*how).go().ended()

    def bring_up(self, *how: Any, newest: int = 4) -> None:
        """A publisher that nothing troubles; afterwards the table is what landed. `newest`: as `check` has it."""
        ended = self.publish(*how)
        assert (ended.error, ended.killed) == ("", False), ended
        self.check(whole=True, newest=newest)

    def add_pending(self, number: int) -> None:
        """Something to add, and every third time something to replace."""
        start = 200 + number * 20
        self.grow((A, start, start + 20))
        if number % 3 == 1:
            self.grow(*pieces(B, 5, start, start + 20))
            self.compact()

    # -- read by others

    def newest(self) -> Any:
        """The newest snapshot's id, or version; None where there is no table."""
        if (table := self.iceberg() if self.kind == "iceberg" else self.delta()) is None:
            return None
        return table.metadata.current_snapshot_id if self.kind == "iceberg" else table.version()

    def check(self, *, whole: bool = False, newest: int = 4) -> None:  # type: ignore[override]
        """The newest snapshots have each row once, and none that did not land; with `whole`, the newest has all."""
        snapshots, files = self._iceberg(newest) if self.kind == "iceberg" else self._delta(newest)
        assert snapshots or not whole
        for found in snapshots:
            rows = [*zip(*found.to_pydict().values(), strict=True)]
            assert len(rows) == len({*rows}), "a row is there twice"
            assert self.wanted.issuperset(rows)
        if whole:
            assert sorted(zip(*snapshots[-1].to_pydict().values(), strict=True)) == sorted(self.wanted)
            assert sorted(self._by_duckdb(files)) == sorted(self.wanted)

    def iceberg(self) -> Any:
        """The table, by PyIceberg; None where there is none."""
        from pyiceberg.catalog import load_catalog

        access = {}
        if self.store:
            s = self.store.settings
            access = {"s3.endpoint": s.endpoint or "", "s3.region": s.region or ""}
            access |= {"s3.access-key-id": "local", "s3.secret-access-key": "local"}
        access |= {"type": "sql", "uri": self.uri, "warehouse": f"{self.address}/tables"}
        with closing(load_catalog("sluice", **access)) as catalog:
            there = catalog.namespace_exists("db") and catalog.table_exists("db.orders")
            return catalog.load_table("db.orders") if there else None

    def delta(self, version: int | None = None) -> Any:
        """The table, by deltalake; None where there is none."""
        from deltalake import DeltaTable

        access = None
        if self.store:
            s = self.store.settings
            access = {"aws_endpoint_url": s.endpoint or "", "aws_region": s.region or "", "allow_http": "true"}
            access |= {"aws_access_key_id": "local", "aws_secret_access_key": "local", "aws_conditional_put": "etag"}
        address = f"{self.address}/data/orders"
        there = DeltaTable.is_deltatable(address, storage_options=access)
        return DeltaTable(address, version, storage_options=access) if there else None

    def _iceberg(self, newest: int) -> tuple[list[pa.Table], list[str]]:
        if (table := self.iceberg()) is None:
            return [], []
        some = ("partition", "offset")
        ids = [s.snapshot_id for s in table.metadata.snapshots[-newest:]]
        found = [table.scan(snapshot_id=i, selected_fields=some).to_arrow().select(some) for i in ids]
        return found, [t.file.file_path for t in table.scan().plan_files()]

    def _delta(self, newest: int) -> tuple[list[pa.Table], list[str]]:
        if (table := self.delta()) is None:
            return [], []
        last, some = table.version(), ["partition", "offset"]
        versions = range(max(0, last + 1 - newest), last + 1)
        return [self.delta(v).to_pyarrow_table(columns=some) for v in versions], table.file_uris()

    def _by_duckdb(self, files: Sequence[str]) -> list[tuple[int, int]]:
        local = [fetch_file(f, self.root / f"fetched-{n}.parquet", self.store) for n, f in enumerate(files)]
        found = duckdb.connect().execute(f'select partition, "offset" from read_parquet({local})').fetchall()
        return [(p, o) for p, o in found]


@contextmanager
def ending(*some: Publisher) -> Iterator[None]:
    """Whatever happens, these do not outlive the block."""
    try:
        yield
    finally:
        for one in some:
            one.kill()
            one.process.join()
