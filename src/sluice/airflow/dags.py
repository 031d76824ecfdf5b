"""DAGs of a project's feeds: one for each feed, or one for all of them.

    from sluice.airflow import make_dags
    globals().update(make_dags("/srv/sluice"))
    globals().update(make_dags("/srv/sluice", together="all_feeds", start_date=datetime(2026, 11, 1, tzinfo=UTC)))

Reading feed files asks neither Kafka nor the lake. A broken feed file is an import error of the DAG file, unless other
feeds are sound: then only its DAG is missing, and a warning is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from airflow.sdk import DAG
except ImportError:  # Airflow 2
    from airflow.models.dag import DAG

from sluice.airflow.hooks import SluiceHook
from sluice.airflow.operators import LandWindowOperator
from sluice.assets.specs.feed_files import read_shapes
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.sections import UNKNOWN_KAFKA
from sluice.resources.project import NOWHERE, Project

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed

log = logging.getLogger("sluice.airflow")
_RETRY = {"retries": 3, "retry_delay": timedelta(minutes=2)}
_START = datetime(2026, 1, 1, tzinfo=UTC)


def make_dags(
    project: str,
    *,
    together: str = "",
    pools: bool = False,
    sluice_conn_id: str = SluiceHook.default_conn_name,
    **dag_arguments: Any,
) -> dict[str, Any]:
    """Returns DAGs by their ids: `land_FEED` for each feed, or one of the id `together` with a task for each.

    A DAG runs once for each window, `catchup` is off, and one run is active at a time; `dag_arguments` replace any of
    this. With `pools`, a task takes a slot of `name_pool(feed)`: make these pools, or the tasks wait.

    Raises FeedError if no feed file is valid, UsageError for feeds that need a `schedule`.
    """
    files = read_shapes(Project.find(Path(project)))
    for path, error in files.broken.items():
        if not files.feeds:
            raise error
        log.warning("no DAG for %s: %s", path.name, error.message)
    groups = {together: [*files.feeds.values()]} if together else {f"land_{n}": [f] for n, f in files.feeds.items()}
    common = {"sluice_conn_id": sluice_conn_id, "project": project}
    tasks = {f.name: {**common, "feed": f.name, "doc_md": f.description} for f in files.feeds.values()}
    for feed in files.feeds.values() if pools else ():
        tasks[feed.name]["pool"] = name_pool(feed)
    return {name: _make_dag(name, feeds, tasks, dag_arguments) for name, feeds in groups.items()}


def _make_dag(
    name: str, feeds: list[Feed], tasks: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]
) -> DAG:
    if "schedule" not in arguments:
        arguments = {**arguments, "schedule": make_timetable({(f.window.cron, f.window.timezone) for f in feeds})}
    defaults = {
        "start_date": _START,
        "catchup": False,
        "max_active_runs": 1,
        "tags": ["sluice"],
        "description": feeds[0].description if len(feeds) == 1 else f"{len(feeds)} feeds",
    }
    with DAG(name, **{**defaults, **arguments, "default_args": {**_RETRY, **arguments.get("default_args", {})}}) as dag:
        for feed in feeds:
            LandWindowOperator(task_id="land" if len(feeds) == 1 else f"land_{feed.name}", **tasks[feed.name])
    return dag


def name_pool(feed: Feed) -> str:
    """Returns the pool of the feed's Kafka: `sluice_` and its first address. Airflow's default pool if unknown."""
    address = feed.kafka.bootstrap.partition(",")[0]
    is_known = address not in (UNKNOWN_KAFKA, NOWHERE)
    return "sluice_" + re.sub(r"[^A-Za-z0-9_.-]", "_", address) if is_known else "default_pool"


def make_timetable(times: set[tuple[str, str | None]]) -> Any:
    """Returns the timetable whose runs stand for one window each, of feeds whose windows begin at these times.

    These are cron expressions with their time zones (None: UTC).

    Runs have a partition key where Airflow has them (3.2), and a data interval before. Raises UsageError.
    """
    (cron, zone), *others = times
    if others:
        raise UsageError(
            "no cron expression fits the windows of these feeds",
            remedy="pass `schedule`, or make a DAG for each feed",
        )
    try:
        from airflow.sdk import CronPartitionTimetable
    except ImportError:
        from airflow.timetables.interval import CronDataIntervalTimetable

        return CronDataIntervalTimetable(cron, timezone=zone or "UTC")
    return CronPartitionTimetable(
        cron, timezone=zone or "UTC", run_offset=-1, key_format="%Y-%m-%d" if zone else "%Y-%m-%dT%H:%M"
    )
