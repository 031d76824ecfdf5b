"""A run keeps Dagster's files open: it opens few, however much it stores, and others see its events at once."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import alembic.util
import dagster as dg
import pytest
from dagster._core.definitions.asset_checks.asset_check_evaluation import AssetCheckEvaluationPlanned
from dagster._core.storage.event_log import sql_event_log
from sqlalchemy import text as sql

from sluice.assets.instance import internals
from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.storage import kept_open
from tests.assets.conftest import ON_FILES
from tests.assets.test_many_feeds import NAMES, Fleet, fleet  # noqa: F401 - a fixture
from tests.assets.world import World

pytestmark = ON_FILES
KEY = dg.AssetKey("shown")


class SqliteEventLogStorage:
    """A storage of another Dagster version."""


class SqliteRunStorage: ...


def test_storages_of_other_dagster_versions_are_unchanged() -> None:
    instance: Any = SimpleNamespace(event_log_storage=SqliteEventLogStorage(), run_storage=SqliteRunStorage())
    with kept_open(instance, "a-run"):
        assert (vars(instance.event_log_storage), vars(instance.run_storage)) == ({}, {})


class OpenCounter:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = 0
        connect = sqlite3.dbapi2.connect

        def connect_and_count(*arguments: object, **options: object) -> sqlite3.Connection:
            self.files += 1
            return connect(*arguments, **options)  # type: ignore[arg-type, call-overload, no-any-return]

        monkeypatch.setattr(sqlite3.dbapi2, "connect", connect_and_count)


def test_additional_feeds_of_a_run_open_no_more_files(
    fleet: Fleet,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = OpenCounter(monkeypatch)
    assert [o.error for o in fleet.land(*NAMES[:2]).values()] == [None] * 2
    two, counter.files = counter.files, 0
    assert [o.error for o in fleet.land(*NAMES).values()] == [None] * 3
    assert counter.files == two


def test_migrations_are_loaded_for_new_files_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_instance(world.project) as ours, kept_open(ours, "a-run"):
        pass
    names, load = list[str](), alembic.util.load_python_file

    def load_and_record(folder: object, name: object) -> object:
        names.append(str(name))
        return load(folder, name)  # type: ignore[arg-type]

    monkeypatch.setattr(alembic.util, "load_python_file", load_and_record)
    with open_instance(world.project) as ours, kept_open(ours, "another-run"):
        pass
    assert len(names) == len({*names}), "each is read once, to stamp the new run's file"


def test_other_instances_read_events_during_and_after_the_run(world: World) -> None:
    with open_instance(world.project) as ours, open_instance(world.project) as other:
        with kept_open(ours, "a-run"), kept_open(ours, "a-run"):  # nested uses open the files once
            ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="one"))
            assert other.get_materialized_partitions(KEY) == {"one"}
            other.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="two"))
            assert ours.get_materialized_partitions(KEY) == {"one", "two"}
        ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="three"))
        assert other.get_materialized_partitions(KEY) == {"one", "two", "three"}


def test_threads_that_outlive_the_run_store_their_events(world: World) -> None:
    entered, goes_on = threading.Event(), threading.Event()

    def read(log: Any) -> int:
        with log.index_connection() as connection:
            entered.set()
            assert goes_on.wait(60)
            return int(connection.execute(sql("select count(*) from event_logs")).scalar_one())

    def store(instance: dg.DagsterInstance) -> None:
        instance.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="late"))

    with open_instance(world.project) as ours, ThreadPoolExecutor() as threads:
        ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="early"))
        release = threading.Timer(0.2, goes_on.set)  # while the end of the run waits
        with kept_open(ours, "a-run"):
            reading = threads.submit(read, ours.event_log_storage)
            assert entered.wait(60)
            storing = threads.submit(store, ours)
            release.start()
        assert reading.result(60) >= 1
        storing.result(60)
        assert ours.get_materialized_partitions(KEY) == {"early", "late"}


def test_event_is_serialized_once_and_readable_by_dagster(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list[object]()
    serialize = sql_event_log.serialize_value

    def count(value: object) -> str:
        texts.append(value)
        return serialize(value)  # type: ignore[arg-type]

    monkeypatch.setattr(sql_event_log, "serialize_value", count)
    with open_instance(world.project) as ours, kept_open(ours, "a-run"), open_instance(world.project) as other:
        for partition in ("one", "two", "three"):
            metadata = {"quoted": '"' + partition, "rows": 3}
            ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition=partition, metadata=metadata))
        entries = [e for e in texts if isinstance(e, dg.EventLogEntry)]
        assert len(entries) == 3, "once for each event"
        assert len([e for e in texts if isinstance(e, dg.EventLogRecord)]) <= 1, "once in a process"
        newest = other.fetch_materializations(KEY, limit=1).records[0]
        assert newest.event_log_entry == entries[-1]
        (by_asset,) = other.get_asset_records([KEY])
        assert by_asset.asset_entry.last_materialization_record == newest


def test_events_have_same_rows_as_stored_by_dagster(world: World) -> None:
    with open_instance(world.project) as ours:
        ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="dagster's"))
        with kept_open(ours, "a-run"):
            for partition in ("first", "second"):
                ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition=partition, tags={"a": "b"}))
        log: Any = ours.event_log_storage
        with closing(sqlite3.connect(log.path_for_shard("index"))) as index:
            select = (
                "select run_id, dagster_event_type, step_key, asset_key, partition, timestamp, event from event_logs"
            )
            rows = index.execute(f"{select} order by id").fetchall()
        assert len({row[:4] for row in rows}) == 1
        assert [row[4] for row in rows] == ["dagster's", "first", "second"]
        for *_, partition, stamp, text in rows:
            event = dg.deserialize_value(text, dg.EventLogEntry)
            assert event.get_dagster_event().partition == partition
            assert datetime.fromisoformat(f"{stamp}+00:00").timestamp() == pytest.approx(event.timestamp, abs=1e-5)


def test_evaluations_have_same_rows_as_stored_by_dagster(world: World) -> None:
    """A run has one row for each check and partition, with the result of its last evaluation."""

    def build(partition: str | None, *, passed: bool) -> dg.AssetCheckEvaluation:
        return dg.AssetCheckEvaluation(KEY, "fresh", passed, metadata={}, partition=partition)

    def plan(ours: dg.DagsterInstance, run: str) -> None:
        event = dg.DagsterEvent(
            dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED.value,
            "job",
            event_specific_data=AssetCheckEvaluationPlanned(asset_key=KEY, check_name="fresh"),
        )
        ours.report_dagster_event(event, run)

    def evaluate(ours: dg.DagsterInstance, run: str) -> None:
        internals.evaluate(ours, run, build(None, passed=False))
        internals.evaluate(ours, run, build(None, passed=True))
        internals.evaluate(ours, run, build("one", passed=False))
        internals.evaluate(ours, "earlier", build("one", passed=False))

    with open_instance(world.project) as ours:
        plan(ours, "earlier")
        for planned in (True, False):
            for run in ("kept", "dagster's"):
                with kept_open(ours, f"{run}-{planned}") if run == "kept" else nullcontext():
                    if planned:
                        plan(ours, f"{run}-{planned}")
                    evaluate(ours, f"{run}-{planned}")
        log: Any = ours.event_log_storage
        with closing(sqlite3.connect(log.path_for_shard("index"))) as index:
            columns = "asset_key, check_name, partition, execution_status, evaluation_event is null"
            select = f"select {columns} from asset_check_executions where run_id = ? order by id"
            rows = {
                run: index.execute(select, [run]).fetchall()
                for (run,) in index.execute("select distinct run_id from asset_check_executions").fetchall()
            }
    assert rows["kept-True"] == rows["dagster's-True"]
    assert rows["kept-False"] == rows["dagster's-False"]
    assert [row[2:4] for row in rows["kept-False"]] == [(None, "SUCCEEDED"), ("one", "FAILED")]


def test_checks_name_newest_materialization_without_fetching(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_instance(world.project) as ours:
        ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="before"))
        with kept_open(ours, "a-run"):
            for partition in ("one", "two", "one"):
                ours.report_runless_asset_event(dg.AssetMaterialization(KEY, partition=partition))
            with monkeypatch.context() as patched:
                patched.setattr(dg.DagsterInstance, "fetch_materializations", None)
                here = internals.targets(ours, KEY, ["one", "two"]), internals.newest(ours, KEY)
            everything = internals.targets(ours, KEY, ["one", "two", "before", "never"])
        assert (internals.targets(ours, KEY, ["one", "two"]), internals.newest(ours, KEY)) == here
        assert internals.targets(ours, KEY, ["one", "two", "before", "never"]) == everything
        assert sorted(everything) == ["before", "one", "two"]
