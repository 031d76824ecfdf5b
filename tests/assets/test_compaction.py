"""The job `compact_<schedule>_feeds` merges files without new asset versions, report runs or pending events.

Also: a retired window in Dagster.
"""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg
import pytest

from sluice.assets.factory import build
from sluice.assets.jobs.report_assets import report_key
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from tests.assets.world import World, at_hour, in_hour, list_versions, read_metadata, read_windows

LANDED, COMMITTED = landed_key("orders"), dg.AssetKey(["orders", "committed"])
H0 = "2024-05-01T00:00"


def compact(world: World, instance: dg.DagsterInstance, **config: str) -> dg.ExecuteInProcessResult:
    job = build(world.project, RunSession(world.project, world.open_ports)).resolve_job_def("compact_many_feeds")
    run_config = {"ops": {"compact_many_feeds__compact": {"config": {"feed": "orders"} | config}}}
    return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)


def read_output_metadata(result: dg.ExecuteInProcessResult) -> dict[str, object]:
    """Returns the metadata of the op's output."""
    (output,) = (e for e in result.all_node_events if e.is_successful_output)
    return {k: v.value for k, v in output.step_output_data.metadata.items()}


@pytest.fixture
def landed(world: World) -> World:
    world.land_in_pieces()
    assert world.run(in_hour(1)).error is None, "it reports the unreported batches of the others"
    return world


def test_job_merges_files_and_reports_counts(landed: World, instance: dg.DagsterInstance) -> None:
    result = compact(landed, instance)
    assert result.success
    metadata = read_output_metadata(result)
    assert (metadata["files_before"], metadata["files_after"], metadata["left_alone"]) == (20, 2, "none")
    assert audit(landed.open_ledger(), landed.lake, hashes=True).reconciled  # type: ignore[arg-type]
    again = read_output_metadata(compact(landed, instance))
    assert (again["files_before"], again["batches"]) == (0, "none")


def test_job_merges_requested_windows_and_rejects_invalid_ranges(landed: World, instance: dg.DagsterInstance) -> None:
    metadata = read_output_metadata(compact(landed, instance, since=H0, until="2024-05-01T01"))
    assert (metadata["files_before"], metadata["files_after"]) == (10, 1)
    wrong_ends = ("", "2024-05-01T01:30", H0)
    for wrong in (*({"since": H0, "until": end} for end in wrong_ends), {"since": "dawn", "until": H0}):
        assert not compact(landed, instance, **wrong).success


def test_nightly_maintenance_merges_and_retires_beyond_the_retention(
    landed: World, instance: dg.DagsterInstance
) -> None:
    """A feed without retention, or without rows, is left as it is."""
    definitions = build(landed.project, RunSession(landed.project, landed.open_ports))
    schedule = definitions.resolve_schedule_def("maintain_many_feeds")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    at = datetime(2024, 5, 2, 3, tzinfo=UTC)
    with dg.build_schedule_context(instance, scheduled_execution_time=at) as context:
        requests = schedule.evaluate_tick(context).run_requests
    assert requests is not None
    (request,) = requests
    assert request.run_key == "compact_many_feeds orders 2024-05-02"

    def run_request() -> dg.ExecuteInProcessResult:
        definitions = build(landed.project, RunSession(landed.project, landed.open_ports))
        job = definitions.resolve_job_def(str(schedule.job_name))
        return job.execute_in_process(request.run_config, instance=instance, raise_on_error=False)

    metadata = read_output_metadata(run_request())
    assert (metadata["files_before"], "expired_files" in metadata) == (20, False)
    path = landed.project.root / "feeds" / "orders.yaml"
    path.write_text(f"{path.read_text()}retention: 1h\n")
    landed.clock.now = at_hour(2) + 1
    metadata = read_output_metadata(run_request())
    assert metadata["expired_files"] == 1
    ledger_view = landed.open_ledger_view()
    assert (len(ledger_view.list_receipts(at_hour(0))), len(ledger_view.list_receipts(at_hour(1)))) == (0, 2)
    assert audit(landed.open_ledger(), landed.lake, hashes=True).reconciled  # type: ignore[arg-type]


def test_compaction_changes_no_version_and_repeats_no_event(landed: World, instance: dg.DagsterInstance) -> None:
    before = {k: list_versions(instance, k, H0) for k in (LANDED, COMMITTED)}
    event_count, version = (
        len(read_metadata(instance, LANDED)),
        landed.open_ledger_view().format_window_version(at_hour(0)),
    )
    assert compact(landed, instance).success
    assert landed.open_ledger_view().format_window_version(at_hour(0)) == version
    assert landed.run(in_hour(2)).error is None, "the commit demands no event of a batch that only merged"
    assert {k: list_versions(instance, k, H0) for k in (LANDED, COMMITTED)} == before
    assert len(read_metadata(instance, LANDED)) == event_count
    assert len(landed.open_ledger_view().list_receipts(at_hour(0))) == 2


def test_window_reported_after_compaction_names_landing_request(world: World, instance: dg.DagsterInstance) -> None:
    world.land_in_pieces()
    assert compact(world, instance).success
    assert world.run(in_hour(1)).error is None
    (event,) = (w for k, w in read_windows(instance, LANDED).items() if k == H0)
    assert (event["files"], event["rows"], event["request"]) == (1, 50, "offsets orders:0:20-25, orders:1:20-25")


def test_a_report_of_a_retired_window_is_refused(landed: World, instance: dg.DagsterInstance) -> None:
    folder = landed.project.root / "reports"
    folder.mkdir()
    (folder / "rows.sql").write_text("-- Rows.\n-- feed: orders\nSELECT count(*) FROM orders\n")
    expire(
        landed.open_ledger(),
        landed.lake,
        RetireRequest(at_hour(1), "old"),
        landed.make_session().feed("orders").window,
        landed.liveness,
    )  # type: ignore[arg-type]
    job = build(landed.project, landed.make_session()).resolve_implicit_job_def_def_for_assets([report_key("rows")])
    assert job is not None
    result = job.execute_in_process(
        instance=instance, asset_selection=[report_key("rows")], partition_key=H0, raise_on_error=False
    )
    assert not result.success
    (failed,) = (e for e in result.all_node_events if e.is_step_failure)
    assert "was retired on" in str(failed.step_failure_data.error)
    assert landed.run(in_hour(0)).error is None
    assert list_versions(instance, LANDED, H0)[-1] == landed.open_ledger_view().format_window_version(at_hour(0))
