"""The hook of a project, the windows of a DAG run, and the asset of a feed; the only module that differs by version.

A connection of type `sluice` has the project's folder in its extra: `{"project": "/srv/sluice"}`. Without the default
connection, it is the folder `project` of the task; without one, `sluice` finds it by `$SLUICE_PROJECT`, or from the
current folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from airflow.sdk import Asset, BaseHook, BaseOperator, BaseOperatorLink, BaseSensorOperator
    from airflow.sdk.execution_time.xcom import XCom
except ImportError:  # Airflow 2
    from airflow.datasets import Dataset as Asset
    from airflow.hooks.base import BaseHook
    from airflow.models import BaseOperator, XCom
    from airflow.models.baseoperatorlink import BaseOperatorLink
    from airflow.sensors.base import BaseSensorOperator
try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
except ImportError:  # before 3.2
    from airflow.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from airflow.exceptions import AirflowNotFoundException
from pendulum import instance

from sluice.pipelines.errors import TRANSIENT, BatchIncomplete, SluiceError, UsageError
from sluice.pipelines.model.plans import Request
from sluice.pipelines.model.receipts import Scheduler
from sluice.pipelines.util.units import show_window
from sluice.resources.project import Project
from sluice.running import request_windows

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import WindowSettings

__all__ = [
    "AirflowException",
    "AirflowSkipException",
    "BaseOperator",
    "BaseOperatorLink",
    "BaseSensorOperator",
    "SluiceHook",
    "XCom",
    "as_airflow_error",
    "build_request",
    "make_asset",
    "name_run",
]

Context = Mapping[str, Any]
_RETRIED = (*TRANSIENT, BatchIncomplete)
"""Errors after which another attempt may succeed: it adopts finished offset ranges."""


class SluiceHook(BaseHook):
    """The project of a connection."""

    conn_name_attr = "sluice_conn_id"
    default_conn_name = "sluice_default"
    conn_type = "sluice"
    hook_name = "Sluice"

    def __init__(self, sluice_conn_id: str = default_conn_name, project: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sluice_conn_id, self.project = sluice_conn_id, project

    def get_conn(self) -> Project:
        """Returns the project. Raises UsageError without a folder `feeds/`, AirflowNotFoundException."""
        try:
            folder = self.get_connection(self.sluice_conn_id).extra_dejson.get("project")
        except AirflowNotFoundException:
            if self.sluice_conn_id != self.default_conn_name:
                raise
            return Project.find(Path(self.project) if self.project else None)
        if not isinstance(folder, str) or not folder:
            raise UsageError(
                f"connection {self.sluice_conn_id} names no project",
                remedy='set its extra: {"project": "/srv/sluice"}, the folder with feeds/',
            )
        return Project.find(Path(folder))

    def test_connection(self) -> tuple[bool, str]:
        """Returns whether all feed files are valid, and a message for the web page of the connection."""
        try:
            feeds = self.get_conn().feeds()
        except SluiceError as error:
            return False, f"{error.message} → {error.remedy}"
        return True, f"{len(feeds)} feeds: {', '.join(sorted(feeds))}"

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Returns the fields of the web form: only the extra."""
        hidden = ["host", "schema", "login", "password", "port"]
        return {"hidden_fields": hidden, "relabeling": {}, "placeholders": {"extra": '{"project": "/srv/sluice"}'}}


def make_asset(feed: str, sluice_conn_id: str = SluiceHook.default_conn_name) -> Any:
    """Returns the asset (Airflow 2: dataset) of a feed, for `schedule` of DAGs that read it."""
    return Asset(f"sluice://{sluice_conn_id}/{feed}")


def name_run(context: Context) -> str:
    """Returns the run id for the ledger: `airflow:DAG.TASK:RUN`."""
    ti = context["ti"]
    index = f"[{ti.map_index}]" if getattr(ti, "map_index", -1) >= 0 else ""
    return f"{Scheduler.AIRFLOW}:{ti.dag_id}.{ti.task_id}{index}:{ti.run_id}"


def build_request(feed: Feed, window: str | None, context: Context, *, replace: bool = False) -> Request:
    """Returns the request for `window`, or for the DAG run's windows. Raises UsageError.

    Those are, in this order: the windows from the run's partition date to the next one, in the timetable's zone, or
    those that a partition key without a date names; the windows that begin in its data interval; those that ended
    between the last run of its schedule and the one before, without a schedule the last one that ended.
    """
    settings, run = feed.window, context.get("dag_run")
    key, date = getattr(run, "partition_key", None), getattr(run, "partition_date", None)
    if window:
        return request_windows(_parse_key(settings, window), settings, replace=replace)
    if key:
        return request_windows(_find_partition(settings, key, date, context), settings, replace=replace)
    first, end = context.get("data_interval_start"), context.get("data_interval_end")
    if first is not None and end is not None and first < end:
        return request_windows(_list_begun(settings, _to_ms(first), _to_ms(end)), settings, replace=replace)
    due = first or getattr(run, "run_after", None)
    if due is None:
        raise UsageError("the DAG run has no data interval", remedy="set `window` of the task, such as 2026-11-20T14")
    begin, until = (settings.start_of(_to_ms(at)) for at in _find_period(context, due))
    return request_windows(settings.list_starts(min(begin, settings.before(until)), until), settings, replace=replace)


def _list_begun(settings: WindowSettings, start: int, end: int) -> Sequence[int]:
    first, after = settings.end_of(start - 1), settings.end_of(end - 1)
    if first >= after:
        raise UsageError(
            f"no window of the feed begins in the data interval from {show_window(start)} to {show_window(end)} UTC",
            remedy="schedule the DAG at least as rarely as the feed's windows, or set `window` of the task",
        )
    return settings.list_starts(first, after)


def _find_partition(settings: WindowSettings, key: str, date: datetime | None, context: Context) -> Sequence[int]:
    """Returns the windows of the run's partition, which ends where the next one of its timetable begins."""
    timetables, zone = _list_timetables(context), settings.timezone or "UTC"
    if date is None and (zones := {str(t._timezone) for t in timetables if hasattr(t, "_timezone")} - {zone}):
        raise UsageError(
            f"partition {key} has no date, and its timetable is in {', '.join(sorted(zones))}",
            remedy=f"set `window` of the task, in {zone}",
        )
    if date is None or not timetables:
        return _parse_key(settings, key)
    start, end = _to_ms(date), min(_to_ms(t._get_next(instance(date))) for t in timetables)
    if not (settings.is_start(start) and settings.is_start(end)):
        raise UsageError(
            f"partition {key} is from {show_window(start)} to {show_window(end)} in UTC, where no windows of"
            f" {settings.words} begin and end",
            remedy="give the timetable a zone and times at which windows begin, or set `window` of the task",
        )
    return settings.list_starts(start, end)


def _find_period(context: Context, due: datetime) -> tuple[datetime, datetime]:
    """Returns the last time of the DAG's schedule up to `due`, after the one before; without a schedule `due` twice."""
    timetables = _list_timetables(context)
    if not timetables:
        if getattr(getattr(context.get("dag"), "timetable", None), "periodic", False):
            raise UsageError(
                "the DAG run has no data interval, and its timetable no times that Sluice knows",
                remedy="give it data intervals (CronDataIntervalTimetable), or set `window` of the task",
            )
        return due, due
    last = max(t._align_to_prev(instance(due)) for t in timetables)
    return max(t._get_prev(last) for t in timetables), last


def _list_timetables(context: Context) -> list[Any]:
    """Returns Airflow's timetables by cron expression or by time span in the DAG's schedule."""
    timetable = getattr(context.get("dag"), "timetable", None)
    try:
        from airflow.serialization.encoders import coerce_to_core_timetable
    except ImportError:  # Airflow 2
        core = timetable
    else:
        core = coerce_to_core_timetable(timetable) if timetable is not None else None
    return [t for t in getattr(core, "_timetables", [core]) if hasattr(t, "_get_prev")]


def _parse_key(settings: WindowSettings, key: str) -> Sequence[int]:
    """Returns the windows that text in UTC names; in ISO format, with a zone or seconds, one. Raises UsageError."""
    try:
        return settings.list_named(key)
    except ValueError as error:
        try:
            at = datetime.fromisoformat(key)
        except ValueError:
            raise UsageError(f"{key!r} {error}") from None
        start = _to_ms(at) if at.tzinfo else settings.parse_name(at.strftime("%Y-%m-%dT%H:%M"))
        return settings.list_starts(start, settings.end_of(start))


def _to_ms(at: datetime) -> int:
    """Returns ms since the epoch. Airflow's times are pendulum's, whose differences are not timedeltas."""
    return round(at.timestamp() * 1000)


def as_airflow_error(error: SluiceError) -> Exception:
    """Returns the error with its remedy: AirflowFailException, which Airflow does not retry, if no retry helps."""
    kind = AirflowException if isinstance(error, _RETRIED) else AirflowFailException
    return kind(f"{type(error).__name__}: {error.message} → {error.remedy}")  # type: ignore[no-any-return]
