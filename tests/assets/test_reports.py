"""Reports are assets downstream of the landed ones: each runs once per complete window, never over half of one."""

from __future__ import annotations

import io
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.assets.factory import build
from sluice.assets.jobs.report_assets import _format_table, report_key
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.sql_report import Report, load_report
from sluice.pipelines.model.receipts import PartKind
from sluice.reading import Windows
from tests.assets.world import P1, World, in_hour, list_versions, read_windows
from tests.pipelines.validation.test_drift import SCHEMA
from tests.pipelines.validation.test_drift import World as Drifting

REPORT, LANDED = report_key("rows"), landed_key("orders")
SQL = "-- How many rows.\n-- feed: orders\nSELECT count(*) AS rows FROM orders\n"
DAY = "2024-05-01T"


@pytest.fixture
def reporting(world: World) -> World:
    folder = world.project.root / "reports"
    folder.mkdir()
    (folder / "rows.sql").write_text(SQL)
    return world


def count_rows(report: Report, rows: Windows) -> pa.Table:
    """Returns the table that Spark would return for the report's SQL."""
    return pa.table({"table": [report.feed], "rows|<b>": [rows.rows]})


def build_definitions(world: World) -> dg.Definitions:
    return build(world.project, RunSession(world.project, world.open_ports, ask=count_rows))


def run_report(
    world: World, instance: dg.DagsterInstance, window: str, *, ok: bool = True
) -> dg.ExecuteInProcessResult:
    job = build_definitions(world).resolve_implicit_job_def_def_for_assets([REPORT])
    assert job is not None
    result = job.execute_in_process(
        instance=instance, asset_selection=[REPORT], partition_key=window, raise_on_error=False
    )
    assert result.success is ok
    return result


def test_report_over_complete_window_writes_parquet_file(reporting: World, instance: dg.DagsterInstance) -> None:
    reporting.run(in_hour(0))
    run_report(reporting, instance, f"{DAY}00:00")

    metadata = read_windows(instance, REPORT)[f"{DAY}00:00"]
    assert (metadata["rows_read"], metadata["dagster/partition_row_count"]) == (50, 1)
    assert metadata["preview"] == "| table | rows\\|\\<b> |\n| --- | --- |\n| orders | 50 |"
    path = "reports/rows/kafka_window_date=2024-05-01/kafka_window_hour=00/rows.parquet"
    assert metadata["dagster/uri"] == f"memory://{path}"
    table = pq.read_table(io.BytesIO(reporting.lake.files[path]))
    assert table["rows|<b>"].to_pylist() == [50]
    assert table.schema.metadata[b"sluice.window"] == f"{DAY}00:00".encode()

    before = reporting.lake.files[path]
    run_report(reporting, instance, f"{DAY}00:00")
    assert reporting.lake.files[path] == before, "the same window again is the same file"
    assert [p for p in reporting.lake.files if p.startswith("reports/")] == [path]
    assert len(set(list_versions(instance, REPORT, f"{DAY}00:00"))) == 1


def test_preview_shows_timestamps_beyond_python_range() -> None:
    late = pa.array([1_764_000_000_000_000_000, 0], pa.int64())
    columns = [late.cast(pa.timestamp("us", "UTC")), pa.array([1, 2])]
    text = _format_table(pa.Table.from_arrays(columns, names=["same", "same"]))
    assert text.splitlines()[2:] == ["| 1764000000000000000 us | 1 |", "| 1970-01-01 00:00:00+00:00 | 2 |"]


def test_earlier_windows_without_report_are_named_with_command(reporting: World, instance: dg.DagsterInstance) -> None:
    """Dagster's automation asks for windows that are new since its first tick."""
    reporting.run()
    run_report(reporting, instance, f"{DAY}00:00")
    assert "missing" not in read_windows(instance, REPORT)[f"{DAY}00:00"]
    run_report(reporting, instance, f"{DAY}03:00")
    metadata = read_windows(instance, REPORT)[f"{DAY}03:00"]
    assert metadata["missing_windows"] == 2
    assert "2 earlier complete windows (2024-05-01T01:00 to 2024-05-01T02:00) have no result" in metadata["missing"]
    assert "--select key:reports/rows --partition 2024-05-01T01:00" in metadata["missing"]


def test_rows_of_older_window_have_later_columns(tmp_path: Path) -> None:
    drifting = Drifting(tmp_path)
    feed = drifting.make_feed(SCHEMA, "evolve")
    drifting.land_records(feed, {"id": 1, "coupon": "x"})
    window = drifting.read_window(feed)
    rows = Windows.of(feed, drifting.ledger, drifting.lake, (window.starts[0],), PartKind.LANDED)
    assert rows.schema == window.schema
    assert rows.arrow(["id", "coupon"]).to_pylist() == [{"id": 1, "coupon": None}]


def test_report_over_incomplete_window_is_refused(reporting: World, instance: dg.DagsterInstance) -> None:
    reporting.engine.failing = {P1}
    reporting.run(in_hour(0))
    result = run_report(reporting, instance, f"{DAY}00:00", ok=False)
    (failed,) = (e for e in result.all_events if e.is_step_failure)
    failure_data = failed.step_failure_data.user_failure_data
    assert failure_data is not None
    assert "window 2024-05-01T00:00 of feed orders is not complete" in (failure_data.description or "")
    assert not [p for p in reporting.lake.files if p.startswith("reports/")]


def test_report_is_requested_once_when_window_becomes_complete(reporting: World, instance: dg.DagsterInstance) -> None:
    def find_requested(cursor: dg.AutomationConditionCursor | None) -> tuple[set[str], object]:  # type: ignore[name-defined]
        result = dg.evaluate_automation_conditions(build_definitions(reporting), instance, cursor=cursor)
        return {k for k in result.get_requested_partitions(REPORT) if k}, result.cursor

    requested, cursor = find_requested(None)
    assert requested == set()
    reporting.engine.failing = {P1}
    reporting.run(in_hour(1))
    requested, cursor = find_requested(cursor)
    assert requested == {f"{DAY}04:00"}, "not the hour that landed in part; the quiet one is complete"
    reporting.engine.failing = set()
    reporting.run()  # a catch-up: an event for the batch, which has no partition, and one for each window
    requested, cursor = find_requested(cursor)
    assert requested == {f"{DAY}0{h}:00" for h in range(4)}
    run_report(reporting, instance, f"{DAY}00:00")
    reporting.run(in_hour(0))
    requested, cursor = find_requested(cursor)
    assert requested == set(), "the same rows again are no news"
    other = {"dagster/data_version": "another batch"}
    instance.report_runless_asset_event(dg.AssetMaterialization(LANDED, partition=f"{DAY}00:00", tags=other))
    assert find_requested(cursor)[0] == {f"{DAY}00:00"}


def test_definitions_show_reports_and_error_of_invalid_report(reporting: World) -> None:
    folder = reporting.project.root / "reports"
    (folder / "lost.sql").write_text("-- feed: nobody\nSELECT 1\n")
    (folder / "notes.txt").write_text("not a report")
    graph = build_definitions(reporting).resolve_asset_graph()
    assert graph.get(REPORT).parent_keys == {LANDED}
    assert graph.get(REPORT).partitions_def == graph.get(LANDED).partitions_def
    assert "How many rows." in (graph.get(REPORT).description or "")
    assert "no feed `nobody` is loaded" in (graph.get(report_key("lost")).description or "")
    assert {k.to_user_string() for k in graph.get_all_asset_keys() if k.path[0] == "reports"} == {
        "reports/rows", "reports/lost",
    }  # fmt: skip
    sensor = build_definitions(reporting).resolve_sensor_def("reports")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sql", "SELECT 1", "whose rows"),
        ("a.sql", "-- feed: orders\n-- feed: clicks\nSELECT 1", "whose rows"),
        ("a.sql", "SELECT 1\n-- feed: orders", "whose rows"),
        ("a.sql", "-- feed: Orders'; drop\nSELECT 1", "whose rows"),
        ("a.sql", "-- feed: orders\n\n-- nothing else\n", "no SQL"),
        ("landed.sql", "-- feed: orders\nSELECT 1", "not a name"),
        ("Big One.sql", "-- feed: orders\nSELECT 1", "not a name"),
        ("a.sql", "-- feed: orders\n" + "x" * (1 << 20), "1 MiB"),
        ("a.sql", "-- feed: orders\n\udcff", "cannot be read"),
    ],
)
def test_invalid_report_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FeedError, match=message):
        load_report(tmp_path / name)
