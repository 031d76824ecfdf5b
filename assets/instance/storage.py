"""Dagster's SQLite files, held open by a run.

For each event that it stores, Dagster opens files, compiles statements again, and has the disk tidy up behind it when
it closes them. A run of one small feed stores some forty events: that was most of its CPU. And to know whether a file's
tables are its newest, it reads all of its migrations, some ninety files, for each file that it opens.

Guarantees: each event is stored in a separate transaction, as durable as with Dagster's own connections. Other
processes read and write the files as before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TextIO

import dagster as dg
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Insert, create_engine
from sqlalchemy import text as sql

from sluice.assets.instance import internals
from sluice.pipelines.errors import SetupError
from sluice.pipelines.util.locks import locking
from sluice.resources.project import Project

_BUSY_SECONDS = 30
"""How long a statement waits for another process's, as in Dagster."""


class _ReadOnce(ScriptDirectory):
    """Migrations. Dagster's own are read once for a process, which never changes them."""

    _dagsters: ScriptDirectory | None = None

    @classmethod
    def from_config(cls, config: Config) -> ScriptDirectory:
        if not (config.get_main_option("script_location") or "").startswith("dagster:"):
            return ScriptDirectory.from_config(config)
        cls._dagsters = cls._dagsters or ScriptDirectory.from_config(config)
        return cls._dagsters


def read_migrations_once() -> None:
    """From now on, Dagster reads its migrations once in this process, where it holds a file against them."""
    if internals.find_private("ScriptDirectory") is not None:
        sys.modules[f"dagster.{internals.PRIVATE['ScriptDirectory']}"].ScriptDirectory = _ReadOnce  # type: ignore[attr-defined]


_EVENTS = "index_connection", "conn_string_for_shard", "has_table", "run_connection"
_COLUMNS = "_has_asset_key_col_on_connection"
_INSERTS = "prepare_insert_event", "_event_to_row"
_ASSETS = "_store_asset_event"
_CHECKS = "_update_asset_check_evaluation", "_store_runless_asset_check_evaluation"
_TABLES = "SqlEventLogStorage"
_RUNS = "connect", "_conn_string"
"""What `kept_open` uses of the storages of Dagster."""


@contextmanager
def kept_open(instance: dg.DagsterInstance, run: str | None = None) -> Iterator[None]:
    """Until the block ends, this process holds one connection to each file that the run writes to, or a tick: those of
    all runs. An instance that keeps them elsewhere, or in another way, is left as it is."""
    with ExitStack() as stack:
        events: Any = instance.event_log_storage
        runs: Any = instance.run_storage
        if internals.keeps_events_here(instance) and "index_connection" not in vars(events) and _has(events, *_EVENTS):
            _keep_index(events, stack)
            if run is not None:
                _keep_run(events, run, stack)
                _insert_evaluations(events, run, stack)
        if internals.keeps_runs_here(instance) and "connect" not in vars(runs) and _has(runs, *_RUNS):
            _replace(stack, runs, "connect", stack.enter_context(_open_engine(runs._conn_string)).begin)
        yield


def _has(storage: object, *names: str) -> bool:
    return all(hasattr(storage, name) for name in names)


def _keep_index(events: Any, stack: ExitStack) -> None:
    with events.index_connection():  # Dagster opens it for the first time: it may have to make it
        connect = stack.enter_context(_open_file(events.conn_string_for_shard("index")))
    _replace(stack, events, "index_connection", connect)
    _replace(stack, events, "has_table", lru_cache(events.has_table))  # requested for each check; all tables exist here
    if _has(events, _COLUMNS):  # as has_table, for each event of an asset
        _replace(stack, events, _COLUMNS, _remember_columns(getattr(events, _COLUMNS)))
    if _has(events, *_INSERTS):
        _replace(stack, events, _INSERTS[0], _prepare_once(*(getattr(events, name) for name in _INSERTS)))
    if _has(events, _ASSETS):
        note = stack.enter_context(internals.remember_stored(events))
        _replace(stack, events, _ASSETS, _note_each(getattr(events, _ASSETS), note))
    _serialize_once(events)


def _note_each(
    store: Callable[[Connection, dg.EventLogEntry, int], None], note: Callable[[dg.EventLogEntry, int], None]
) -> Callable[[Connection, dg.EventLogEntry, int], None]:
    def store_and_note(connection: Connection, event: dg.EventLogEntry, storage_id: int) -> None:
        store(connection, event, storage_id)
        note(event, storage_id)

    return store_and_note


class _InsertedRow:
    """A statement of SQLAlchemy's that was made once, with its values. To make it again takes five times as long as to
    execute it."""

    def __init__(self, statement: Insert, row: Mapping[str, Any]) -> None:
        self._statement, self._row = statement, row

    def _execute_on_connection(self, connection: Connection, parameters: object, options: object) -> Any:
        return connection.execute(self._statement, self._row)


def _prepare_once(
    prepare: Callable[[dg.EventLogEntry], Insert], build_row: Callable[[dg.EventLogEntry], Mapping[str, Any]]
) -> Callable[[dg.EventLogEntry], Insert | _InsertedRow]:
    """Returns `prepare`, which makes the statement that stores an event, making it once."""
    statements: list[Insert] = []

    def build(event: dg.EventLogEntry) -> Insert | _InsertedRow:
        if not statements:
            statement = prepare(event)
            statements.append(statement.table.insert())
            return statement
        return _InsertedRow(statements[0], build_row(event))

    return build


def _remember_columns(has_column: Callable[[Connection, str], bool]) -> Callable[[Connection, str], bool]:
    columns: dict[str, bool] = {}

    def read(connection: Connection, name: str) -> bool:
        if name not in columns:
            columns[name] = has_column(connection, name)
        return columns[name]

    return read


class _Serializer:
    """Dagster's serializer for its tables, which store an event of an asset twice: its text is made once.

    The second time the event is part of a record. Whether its text is part of the record's is tried with the first one.
    """

    def __init__(self, serialize: Callable[[Any], str]) -> None:
        self._serialize = serialize
        self._last: tuple[Any, str] = None, ""
        self._is_part: bool | None = None

    def __call__(self, value: Any) -> str:
        if isinstance(value, dg.EventLogEntry):
            event, text = self._last
            if event is not value:
                text = self._serialize(value)
                self._last = value, text
            return text
        if isinstance(value, dg.EventLogRecord) and self._is_part is not False:
            text = self(value.event_log_entry)
            joined = f'{{"__class__": "EventLogRecord", "event_log_entry": {text}, "storage_id": {value.storage_id}}}'
            if self._is_part is None:
                self._is_part = joined == self._serialize(value)
            if self._is_part:
                return joined
        return self._serialize(value)


_ROW_OF_RUN = sql("select 1 from asset_check_executions where run_id = :run limit 1")


def _insert_evaluations(events: Any, run: str, stack: ExitStack) -> None:
    """Insert the first evaluation of each check and partition at once, in a run for which Dagster planned none.
    Dagster itself tries to update a planned one first."""
    if not _has(events, *_CHECKS):
        return
    update, insert = (getattr(events, name) for name in _CHECKS)
    inserted = set[tuple[object, ...]]()

    @cache
    def is_planned() -> bool:
        with events.index_connection() as connection:
            return connection.execute(_ROW_OF_RUN, {"run": run}).first() is not None

    def store(event: dg.EventLogEntry, storage_id: int | None) -> None:
        evaluation: Any = event.dagster_event.event_specific_data if event.dagster_event else None
        key = evaluation.asset_key, evaluation.check_name, evaluation.partition
        if event.run_id != run or is_planned() or key in inserted:
            update(event, storage_id)
            return
        insert(event, storage_id)
        inserted.add(key)

    _replace(stack, events, _CHECKS[0], store)


def _serialize_once(events: Any) -> None:
    """From now on, this process makes the text of an event once."""
    module = next((sys.modules[c.__module__] for c in type(events).__mro__ if c.__name__ == _TABLES), None)
    serialize = getattr(module, "serialize_value", None)
    if serialize is not None and not isinstance(serialize, _Serializer):
        module.serialize_value = _Serializer(serialize)  # type: ignore[union-attr]


def _keep_run(events: Any, run: str, stack: ExitStack) -> None:
    others = events.run_connection
    with others(run):
        connect = stack.enter_context(_open_file(events.conn_string_for_shard(run)))

    def of_run(run_id: str | None = None) -> AbstractContextManager[Connection]:
        return connect() if run_id == run else others(run_id)

    _replace(stack, events, "run_connection", of_run)


def _replace(stack: ExitStack, storage: object, name: str, by: object) -> None:
    setattr(storage, name, by)
    stack.callback(delattr, storage, name)


@contextmanager
def _open_engine(url: str) -> Iterator[Engine]:
    """Keep one connection open for the block. A caller gets another while it is in use, and after the block."""
    engine = create_engine(url, pool_size=1, max_overflow=-1, connect_args={"timeout": _BUSY_SECONDS})
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _open_file(url: str) -> Iterator[Callable[[], AbstractContextManager[Connection]]]:
    """Yields the function that gives the file's one connection, in a transaction that ends with the block. Callers wait
    for each other.

    The file is closed when no thread is in a transaction: SQLite crashes otherwise. A transaction that hangs keeps it
    open. A thread that connects afterwards gets a connection of its own.
    """
    lock = Lock()
    engine = create_engine(url, pool_size=1, max_overflow=-1, connect_args={"timeout": _BUSY_SECONDS})
    connection = engine.connect()

    @contextmanager
    def connect() -> Iterator[Connection]:
        with lock:
            if not connection.closed:
                with connection.begin():
                    yield connection
                return
        with engine.begin() as own:
            yield own

    try:
        yield connect
    finally:
        if lock.acquire(timeout=_BUSY_SECONDS):
            connection.close()
            engine.dispose()
            lock.release()


class _Captured(NamedTuple):
    """The places of a step's output besides Dagster's files, as its event of the capture has them."""

    external_url: str | None = None
    external_stdout_url: str | None = None
    external_stderr_url: str | None = None
    shell_cmd: object = None


def open_quietly(home: Path) -> dg.DagsterInstance:
    """Opens the instance in that folder. If it has Dagster's own local logs, these do not repeat on the terminal.

    Processes open it in turn: of two that create SQLite files at once, Dagster leaves files that no process can open.
    """
    with locking(home / "sluice.lock", required=False):
        instance = dg.DagsterInstance.from_config(str(home))
    logs: Any = instance.compute_log_manager
    if hasattr(logs, "get_captured_local_path"):
        logs.capture_logs = partial(_capture_quietly, logs)
    return instance


@contextmanager
def _capture_quietly(logs: Any, log_key: Sequence[str]) -> Iterator[_Captured]:
    """Write stdout and stderr to the files in which Dagster's local logs are."""
    out, err, complete = (Path(logs.get_captured_local_path(log_key, end)) for end in ("out", "err", "complete"))
    for path in (out, err):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with _redirect(sys.stdout, str(out)), _redirect(sys.stderr, str(err)):
        yield _Captured()
    complete.touch()


@contextmanager
def _redirect(stream: TextIO, path: str) -> Iterator[None]:
    """Write to the end of the file what this process, and those that it starts, write to the stream.

    A stream without a descriptor, as a test may set one, stays as it is.
    """
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        yield
        return
    with Path(path).open("ab") as file, os.fdopen(os.dup(descriptor), "wb") as original:
        stream.flush()
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(original.fileno(), descriptor)


_CHUNK = 100


@dataclass(frozen=True, slots=True)
class RunLog:
    """The log of a run that has ended: its files, and their size in bytes."""

    run: str
    job: str
    files: tuple[Path, ...]
    bytes: int


def old_logs(instance: dg.DagsterInstance, project: Project, before: datetime) -> Iterator[RunLog]:
    """The logs of runs that ended before that time. Raises SetupError if the instance keeps its history elsewhere."""
    if not internals.keeps_events_here(instance):
        raise SetupError(
            "Dagster keeps its history in a database here, not in files of each run",
            remedy="its rows are removed there: sluice docs dagster",
        )
    run_ids = internals.run_logs(instance)
    for at in range(0, len(run_ids), _CHUNK):
        of = dg.RunsFilter(run_ids=run_ids[at : at + _CHUNK], statuses=[*internals.ENDED], updated_before=before)
        for run in instance.get_runs(of):
            outputs = (p for p in (project.dagster_home / "storage" / run.run_id).rglob("*") if p.is_file())
            files = (*internals.files_of_run(instance, run.run_id), *outputs)
            yield RunLog(run.run_id, internals.name_job(run), files, sum(_get_size(f) for f in files))


def remove(instance: dg.DagsterInstance, log: RunLog) -> None:
    """Remove the log. Idempotent."""
    for path in log.files:
        path.unlink(missing_ok=True)
    instance.compute_log_manager.delete_logs(prefix=[log.run])


def _get_size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
