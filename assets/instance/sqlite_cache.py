"""Dagster's SQLite files, held open by a run.

For each event that it stores, Dagster opens files, compiles statements again, and has the disk tidy up behind it when
it closes them. A run of one small feed stores some forty events: that was most of its CPU. And to know whether a file's
tables are its newest, it reads all of its migrations, some ninety files, for each file that it opens.

This uses Dagster's internals, as `internals` does. Promises: what is stored is stored as before, each event by a
transaction of its own, on disk when it is said to be. Other processes read and write the files as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import dagster as dg
from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._core.storage import sql
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.runs import SqliteRunStorage
from sqlalchemy import Connection, Engine, create_engine

_BUSY_SECONDS = 30
"""How long a statement waits for another process's, as in Dagster."""


class _ReadOnce(ScriptDirectory):
    """Migrations. Dagster's own are read once for a process, which never changes them."""

    _dagsters: ScriptDirectory | None = None

    @classmethod
    def from_config(cls, config: Config) -> ScriptDirectory:
        if config.get_main_option("script_location") != sql.ALEMBIC_SCRIPTS_LOCATION:
            return ScriptDirectory.from_config(config)
        cls._dagsters = cls._dagsters or ScriptDirectory.from_config(config)
        return cls._dagsters


def read_migrations_once() -> None:
    """From now on, Dagster reads its migrations once in this process, where it holds a file against them."""
    sql.ScriptDirectory = _ReadOnce  # type: ignore[attr-defined]


@contextmanager
def kept_open(instance: dg.DagsterInstance, run: str | None = None) -> Iterator[None]:
    """Until the block ends, this process holds one connection to each file that the run writes to, or a tick: those of
    all runs. An instance that keeps them elsewhere is left as it is."""
    with ExitStack() as stack:
        events, runs = instance.event_log_storage, instance.run_storage
        if isinstance(events, SqliteEventLogStorage) and "index_connection" not in vars(events):
            _keep_index(events, stack)
            if run is not None:
                _keep_run(events, run, stack)
        if isinstance(runs, SqliteRunStorage) and "connect" not in vars(runs):
            _replace(stack, runs, "connect", stack.enter_context(_opened(runs._conn_string, nullcontext())).connected)
        yield


def _keep_index(events: SqliteEventLogStorage, stack: ExitStack) -> None:
    with events.index_connection():  # Dagster opens it for the first time: it may have to make it
        index = stack.enter_context(_opened(events.conn_string_for_shard("index"), Lock()))
    _replace(stack, events, "index_connection", index.connected)
    _replace(stack, events, "has_table", lru_cache(events.has_table))  # requested for each check; all tables exist here


def _keep_run(events: SqliteEventLogStorage, run: str, stack: ExitStack) -> None:
    others = events.run_connection
    with others(run):
        own = stack.enter_context(_opened(events.conn_string_for_shard(run), Lock()))

    def of_run(run_id: str | None = None) -> AbstractContextManager[Connection]:
        return own.connected() if run_id == run else others(run_id)

    _replace(stack, events, "run_connection", of_run)


def _replace(stack: ExitStack, storage: object, name: str, by: object) -> None:
    setattr(storage, name, by)
    stack.callback(delattr, storage, name)


@dataclass
class _File:
    """A file, held open by one connection."""

    engine: Engine
    lock: AbstractContextManager[object]

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection, in a transaction that ends with the block."""
        with self.lock, self.engine.connect() as connection, connection.begin():
            yield connection


@contextmanager
def _opened(url: str, lock: AbstractContextManager[object]) -> Iterator[_File]:
    """`lock`: whoever connects waits for it. Who connects while the one connection is in use gets another."""
    engine = create_engine(url, pool_size=1, max_overflow=-1, connect_args={"timeout": _BUSY_SECONDS})
    try:
        yield _File(engine, lock)
    finally:
        engine.dispose()
