"""Reports as assets: `reports/<name>`, by the windows of its feed, downstream of landed rows.

    <feed>/landed  →  reports/<name>

A report runs by itself when a window is complete, also a backfilled one, and again when the window's rows have changed.
The sensor `wake` does this, and it is on. A window that is not complete is refused. The result is one Parquet file for
each window in the lake; the next run for the same window replaces it.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `context` itself, not as text.

import re
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import Metadata, columns_of, plain
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.sql_report import Report, load_report
from sluice.pipelines.lake import paths
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.publishing.manifest import is_retired
from sluice.pipelines.util.units import many, show_window
from sluice.resources.project import Project

POOL = "sluice_reports"
PREVIEW_ROWS = 20

_CHANGED = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed())
WHEN = (
    (dg.AutomationCondition.newly_missing() | _CHANGED).since_last_handled()
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
).with_label("when its window is complete")
"""Like Dagster's `eager`, but for every window instead of only the latest, and not again for the same rows."""


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The folder's contents: reports by name, and problems of the other files."""

    reports: Mapping[str, Report]
    broken: Mapping[Path, FeedError]


def read_reports(project: Project, feeds: Container[str]) -> ReportFiles:
    """Every report of the project, sound or broken; none if there is no folder `reports/`."""
    reports: dict[str, Report] = {}
    broken: dict[Path, FeedError] = {}
    for path in sorted((project.root / "reports").glob("[!.]*.sql")):
        try:
            report = load_report(path)
            if report.feed not in feeds:
                remedy = f"fix feeds/{report.feed}.yaml first"
                raise FeedError(f"{path}: no feed `{report.feed}` is loaded", remedy=remedy)
            reports[path.stem] = report
        except FeedError as error:
            broken[path] = error
    return ReportFiles(reports, broken)


def report_key(name: str) -> dg.AssetKey:
    return dg.AssetKey(["reports", name])


def report_definitions(
    reports: Iterable[Report], windows: Mapping[str, dg.TimeWindowPartitionsDefinition], session: RunSession
) -> dg.Definitions:
    """The reports, and the sensor that runs them. `windows`: each feed's partitions."""
    assets = [_build_asset(report, windows[report.feed], session) for report in reports]
    wake = dg.AutomationConditionSensorDefinition(
        "reports",
        target=dg.AssetSelection.assets(*assets),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Runs each report when a window of its feed is complete, also a backfilled one.",
    )
    return dg.Definitions(assets=assets, sensors=[wake] if assets else [])


def _build_asset(
    report: Report, windows: dg.TimeWindowPartitionsDefinition, session: RunSession
) -> dg.AssetsDefinition:
    @dg.asset(
        key=report_key(report.name),
        deps=[session.keys(report.feed).landed],
        partitions_def=windows,
        group_name="reports",
        description=f"{report.description}\n\n```sql\n{report.sql.strip()}\n```",
        kinds={"sql", "spark", "parquet"},
        code_version=report.version,
        automation_condition=WHEN,
        pool=POOL,
    )
    def made(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        return report_step(context, session, report.name)

    return made


def report_step(context: dg.AssetExecutionContext, session: RunSession, name: str) -> dg.MaterializeResult[Any]:
    """Run the report over the window that is the run's partition, and put the result into the lake.

    Raises dagster.Failure if the window is not complete, or if Spark refuses the SQL.
    """
    from sluice.reading import Windows

    with session.step(context):
        report = load_report(session.project.root / "reports" / f"{name}.sql")
        feed, key = session.feed(report.feed), context.partition_key
        window = feed.window.parse_name(key)
        with session.open_ports(feed) as ports:
            view = LedgerView.open(feed, ports)
            rows = Windows.of(feed, view.ledger, view.lake, (window,), PartKind.LANDED)
            version = f"{report.version}/{view.format_window_version(window)}"
            began = time.monotonic()
            result = session.ask(report, rows)
            seconds = round(time.monotonic() - began, 3)
            path = _find_path(view, name, window)
            data = _write_parquet(result, report, window, version)
            # The result comes before its event. Killed in between, the next run writes the same result again; the file
            # names the version of rows and SQL.
            ports.lake.put(path, data)
            where: Metadata = {"dagster/uri": ports.lake.locate(path), "bytes": len(data)}
            missing = _list_missing(view, name, window)
    if missing:
        first, last = show_window(missing[0]), show_window(missing[-1])
        message = (
            f"{many(len(missing), 'earlier complete window')} ({first} to {last}) have no result: Dagster requests only"
            f" windows that complete after the report was added → choose Materialize on the page reports/{name}, and"
            f" the missing partitions; or for each: dagster asset materialize -m {internals.MODULE}"
            f" --select key:reports/{name} --partition {first}"
        )
        context.log.warning("%s", message)
        where |= {"missing_windows": len(missing), "missing": message}
    metadata = {
        "preview": dg.MetadataValue.md(_format_table(result)),
        "dagster/partition_row_count": result.num_rows,
        "dagster/column_schema": columns_of(result.schema),
    } | {"rows_read": rows.rows, "seconds": seconds}
    return dg.MaterializeResult(metadata=metadata | where, data_version=dg.DataVersion(version))


def _list_missing(view: LedgerView, report: str, window: int) -> list[int]:
    """Returns the complete windows before this one that have no result and whose rows are still in the lake."""
    results = {*view.lake.list(f"reports/{report}")}
    missing = (w for w in view.complete if _find_path(view, report, w) not in results)
    return sorted(w for w in missing if w < window and not is_retired(view.state, w, view.feed.window))


def _find_path(view: LedgerView, report: str, window: int) -> str:
    settings = view.feed.window
    return paths.report_path(report, settings.local(window), settings.length, view.state.folder_prefix)


def _write_parquet(result: pa.Table, report: Report, window: int, version: str) -> bytes:
    """Writes one file, which names its sources."""
    import pyarrow.parquet as pq  # late: definitions load without it

    what = {"sluice.report": report.name, "sluice.window": show_window(window), "sluice.version": version}
    sink = pa.BufferOutputStream()
    pq.write_table(result.replace_schema_metadata(what), sink, compression="zstd")
    return bytes(sink.getvalue())


def _format_table(result: pa.Table) -> str:
    """The first rows as a table. Their text came from records: none of it is taken for markup."""
    preview = result.slice(0, PREVIEW_ROWS)
    lines = [[_format_cell(n) for n in result.schema.names], ["---"] * result.num_columns]
    rows = zip(*map(_list_values, preview.columns), strict=True)
    lines += [[_format_cell(value) for value in row] for row in rows]
    more = result.num_rows - preview.num_rows
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + (f"\n\n… and {more} more rows" if more else "")


def _list_values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return [*column.to_pylist()]
    except (OverflowError, ValueError):
        return [_get_value(cell) for cell in column]


def _get_value(cell: pa.Scalar) -> Any:
    """The value; the number itself for a time beyond the year 9999, which Python does not have."""
    try:
        return cell.as_py()
    except (OverflowError, ValueError):
        is_number = pa.types.is_timestamp(cell.type) or pa.types.is_date(cell.type)
        return f"{cell.value} {getattr(cell.type, 'unit', 'days')}" if is_number else "…"


def _format_cell(value: object) -> str:
    return plain(re.sub(r"[\r\n]", " ", str(value)[:200])).replace("|", r"\|")
