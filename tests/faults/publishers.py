"""Publishers of a table in separate processes, which may be killed, and independent readers of the table.

A table lies in a folder, or in a store that publishers reach through a proxy, which injects faults into their requests.
Its catalog is a SQLite file, or the one that a course names.
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
from sluice.resources.lake import open_store
from sluice.resources.lake.local_lake import LocalLake
from tests.pipelines.landed_world import A, B, World, split_offsets
from tests.resources.lake.s3_faults import Proxy
from tests.stores import Store
from tests.table_readers import fetch_file

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "deltalake"])
Rows = set[tuple[int, int]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a publisher: class name and message of its error, or that it was killed."""

    added: int = 0
    error: str = ""
    message: str = ""
    killed: bool = False


class Publisher:
    """A process that brings a table up to date after `go`."""

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

    def wait(self) -> Outcome:
        try:
            outcome = Outcome(*self._pipe.recv())
        except EOFError:
            outcome = Outcome(killed=True)
        self.process.join()
        return outcome


def _publish(root: Path, pipe: Connection, dies: str = "", repair: bool = False) -> None:
    """Bring the table up to date, in the publisher's process. `dies`: it dies `before` or `after` its commit."""
    from sluice.pipelines.feed.load import load_feed
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.tables.sync import sync
    from sluice.resources.lake import open_lake
    from sluice.resources.liveness import now
    from sluice.resources.open_ports import open_tables

    feed = load_feed(root / "feeds" / "orders.yaml", {})
    lake = open_lake(feed)
    if dies:
        _patch_commits(dies)
    with open_tables(feed, lake) as tables:
        pipe.send("ready")
        pipe.recv()
        try:
            pipe.send((sync(Ledger(lake, "orders", now), lake, tables, repair=repair).added,))
        except SluiceError as error:
            pipe.send((0, type(error).__name__, str(error)))


def _patch_commits(when: str) -> None:
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    def kill_around(commit: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if when == "after":
                commit(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    SqlCatalog.commit_table = kill_around(SqlCatalog.commit_table)  # type: ignore[method-assign]
    DeltaTable.create_write_transaction = kill_around(DeltaTable.create_write_transaction)  # type: ignore[method-assign]


class Course(World):
    """A feed that the test lands itself, and its table, which publishers bring up. `expected` has the landed rows."""

    def __init__(self, root: Path, kind: str, store: Store | None = None, front: Proxy | None = None, uri: str = ""):
        self.root, self.kind, self.store = root, kind, store
        self.uri = uri or f"sqlite:///{root}/catalog.db"
        table = {"iceberg": f"{{iceberg: {{name: db.orders, catalog: {{type: sql, uri: '{self.uri}'}}}}}}"}
        more = f"table: {table.get(kind, '{delta: {}}')}\n"
        if store and front:
            lines = store.build_feed_settings()
            self.address, endpoint = lines["lake"], store.settings.endpoint or ""
            more += "".join(f"{k}: {v}\n" for k, v in lines.items()).replace(endpoint, front.endpoint)
            super().__init__(root, more, lake=open_store(self.address, store.settings))
        else:
            self.address = str(root / "lake")
            super().__init__(root, f"{more}lake: {root}/lake\n", lake=LocalLake(root / "lake"))
        self.expected: Rows = set()

    def grow(self, *ranges: tuple[Any, int, int]) -> None:
        """Land offset ranges."""
        self.land(*ranges)
        self.expected |= {(key.partition, o) for key, start, end in ranges for o in range(start, end)}

    def start_publisher(self, *how: Any) -> Publisher:
        return Publisher(self.root, *how)

    def publish(self, *how: Any) -> Outcome:
        return self.start_publisher(*how).go().wait()

    def bring_up(self, *how: Any, newest: int = 4) -> None:
        """Run a publisher without faults, then check that the table has all landed rows. `newest`: as in `check`."""
        outcome = self.publish(*how)
        assert (outcome.error, outcome.killed) == ("", False), outcome
        self.check(complete=True, newest=newest)

    def add_pending(self, number: int) -> None:
        """Land rows to add, and at every third call compact, which gives rows to replace."""
        start = 200 + number * 20
        self.grow((A, start, start + 20))
        if number % 3 == 1:
            self.grow(*split_offsets(B, 5, start, start + 20))
            self.compact()

    # -- independent readers

    def find_newest(self) -> Any:
        """Returns the newest snapshot's id or version, None without a table."""
        if (table := self.load_iceberg() if self.kind == "iceberg" else self.load_delta()) is None:
            return None
        return table.metadata.current_snapshot_id if self.kind == "iceberg" else table.version()

    def check(self, *, complete: bool = False, newest: int = 4) -> None:  # type: ignore[override]
        """Check that the newest snapshots have only landed rows, each once; with `complete`, the last has all."""
        snapshots, files = self._scan_iceberg(newest) if self.kind == "iceberg" else self._scan_delta(newest)
        assert snapshots or not complete
        for snapshot in snapshots:
            rows = [*zip(*snapshot.to_pydict().values(), strict=True)]
            assert len(rows) == len({*rows}), "a row is there twice"
            assert self.expected.issuperset(rows)
        if complete:
            assert sorted(zip(*snapshots[-1].to_pydict().values(), strict=True)) == sorted(self.expected)
            assert sorted(self._read_by_duckdb(files)) == sorted(self.expected)

    def load_iceberg(self) -> Any:
        """Load the table with PyIceberg. Returns None if there is none."""
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

    def load_delta(self, version: int | None = None) -> Any:
        """Load the table with deltalake. Returns None if there is none."""
        from deltalake import DeltaTable

        access = None
        if self.store:
            s = self.store.settings
            access = {"aws_endpoint_url": s.endpoint or "", "aws_region": s.region or "", "allow_http": "true"}
            access |= {"aws_access_key_id": "local", "aws_secret_access_key": "local", "aws_conditional_put": "etag"}
        address = f"{self.address}/data/orders"
        there = DeltaTable.is_deltatable(address, storage_options=access)
        return DeltaTable(address, version, storage_options=access) if there else None

    def _scan_iceberg(self, newest: int) -> tuple[list[pa.Table], list[str]]:
        if (table := self.load_iceberg()) is None:
            return [], []
        columns = ("partition", "offset")
        ids = [s.snapshot_id for s in table.metadata.snapshots[-newest:]]
        tables = [table.scan(snapshot_id=i, selected_fields=columns).to_arrow().select(columns) for i in ids]
        return tables, [t.file.file_path for t in table.scan().plan_files()]

    def _scan_delta(self, newest: int) -> tuple[list[pa.Table], list[str]]:
        if (table := self.load_delta()) is None:
            return [], []
        last, columns = table.version(), ["partition", "offset"]
        versions = range(max(0, last + 1 - newest), last + 1)
        return [self.load_delta(v).to_pyarrow_table(columns=columns) for v in versions], table.file_uris()

    def _read_by_duckdb(self, files: Sequence[str]) -> list[tuple[int, int]]:
        local = [fetch_file(f, self.root / f"fetched-{n}.parquet", self.store) for n, f in enumerate(files)]
        rows = duckdb.connect().execute(f'select partition, "offset" from read_parquet({local})').fetchall()
        return [(p, o) for p, o in rows]


@contextmanager
def kill_at_exit(*publishers: Publisher) -> Iterator[None]:
    """Kill the publishers at the end of the block."""
    try:
        yield
    finally:
        for publisher in publishers:
            publisher.kill()
            publisher.process.join()
