"""Syncs a feed's table after a commit, and compares all of its files in a check.

It never stops a run. If the catalog is unreachable, or the table was changed by others, the run logs it, the check
`matches_ledger` warns, and the next run adds the missing files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from sluice.assets.checks.contract_checks import CheckResult
from sluice.assets.checks.feed_checks import evaluate_feed
from sluice.assets.instance import internals
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import Metadata, plain, table
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import find_output
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.model.tables import TableHead
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.tables.check import TableComparison
    from sluice.pipelines.tables.sync import Synced

MATCHES_LEDGER = "matches_ledger"
"""The name of the check on a table."""


def sync_table(
    context: dg.AssetExecutionContext | dg.OpExecutionContext, session: RunSession, name: str
) -> Iterator[Any]:
    """Sync the tables of the feed, or of its outputs, with the ledger. Each is reported as `<feed>/[<output>/]table`.

    Errors go into the check `matches_ledger`; the tables before the one with an error are reported. Changes by others
    are detected by the table's mark, not by comparing all files.
    """
    for dataset in session.feed(name).table_feeds:
        yield from _sync_one(context, session, dataset)


def _sync_one(
    context: dg.AssetExecutionContext | dg.OpExecutionContext, session: RunSession, dataset: Feed
) -> Iterator[Any]:
    from sluice.pipelines.operating.feed_tables import sync_current_rows, sync_tables
    from sluice.resources.open_ports import open_tables

    key, report = session.keys(dataset.name).table(dataset.output), session.reporter(context.log)
    try:
        report(Progress("table"))
        with session.open_ports(dataset) as ports, open_tables(dataset, ports.lake) as tables:
            done, _ = sync_tables(dataset, ports, tables._replace(current=None), report)
            if done.head is None:
                return
            changed = done.commits or (done.quarantine and done.quarantine.commits)
            if changed or internals.newest(context.instance, key) is None:
                yield dg.AssetMaterialization(key, metadata=_build_metadata(done.head, done))
            current, current_key = sync_current_rows(dataset, ports, tables, report), session.keys(dataset.name).current
    except SluiceError as error:
        session.result.add_table_error(error)
        context.log.warning("the table is not up to date: %s → %s", error.message, error.remedy)
        yield evaluate_feed(context.instance, key, MATCHES_LEDGER, _report_failure(error))
        return
    if current and current.head and (current.commits or internals.newest(context.instance, current_key) is None):
        yield dg.AssetMaterialization(current_key, metadata=_build_metadata(current.head, current))
    newest = done.head.snapshot
    description = "it is empty: no row has landed" if newest is None else f"all landed rows are in snapshot {newest}"
    yield evaluate_feed(context.instance, key, MATCHES_LEDGER, {"passed": True, "description": description})


def table_check(feed: Feed, session: RunSession) -> dg.AssetChecksDefinition:
    """Returns the check that compares the table with the ledger, file by file, when executed."""

    @dg.asset_check(
        asset=session.keys(feed.name).table(feed.output),
        name=MATCHES_LEDGER,
        description="Passes when the table has exactly the files and rows of the ledger. If not: `sluice table"
        " sync FEED` updates it, `--repair` replaces wrong files.",
    )
    def check() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(**_compare(session, feed.name, feed.output))

    definition: dg.AssetChecksDefinition = check
    return definition


def _compare(session: RunSession, name: str, output: str) -> CheckResult:
    from sluice.pipelines.operating.feed_tables import compare_tables
    from sluice.resources.open_ports import open_tables

    try:
        dataset = find_output(session.feed(name), output)
        with session.open_ports(dataset) as ports, open_tables(dataset, ports.lake) as tables:
            return _judge(compare_tables(dataset, ports, tables), dataset.dataset)
    except SluiceError as error:
        return _report_failure(error)


def _judge(tables: list[tuple[str, TableComparison]], feed: str) -> CheckResult:
    """Returns the check's result for the table, and for the quarantine's if there is one."""
    (_, first), *rest = tables
    texts = [_describe(first, feed), *(f"{name}: {_describe(compared, feed)}" for name, compared in rest)]
    return {
        "passed": all(compared.sound and not (compared.misread or compared.faults) for _, compared in tables),
        "severity": dg.AssetCheckSeverity.ERROR,
        "description": plain("; ".join(texts)),
        "metadata": _build_metadata(first.head) if first.head else {},
    }


def _describe(result: TableComparison, feed: str) -> str:
    if result.keys is not None and result.right:
        return f"the rows of {many(result.keys, 'key')} by a new fold"
    if not result.sound or result.faults:
        return f"{result.describe()}: {result.find_remedy(feed)}"
    if result.misread:
        return f"{many(len(result.misread), 'file')} with bounds that engines misread: {result.find_remedy(feed)}"
    lacking = f"; {many(len(result.pending), 'file')} not in it yet" if result.pending else ""
    lacking += f"; {many(len(result.stale), 'more file')} until the next sync" if result.stale else ""
    return f"the same {many(len(result.live) - len(result.pending), 'file')} and rows as in the ledger{lacking}"


def _report_failure(error: SluiceError) -> CheckResult:
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": plain(f"{error.message} → {error.remedy}"),
        "metadata": {},
    }


def _build_metadata(head: TableHead, done: Synced | None = None) -> Metadata:
    out: Metadata = {
        "snapshot": str(head.snapshot),
        "committed_at": show_instant(head.at or 0),
        "dagster/row_count": head.rows,
        "files": head.files,
        "snapshots": head.snapshots,
        "ledger_entries": head.mark,
    }
    out |= {"added_files": done.added, "removed_files": done.removed} if done else {}
    if done and done.windows:
        rows = [{"window": w, "snapshot": str(s)} for w, s in sorted(done.windows.items(), reverse=True)]
        out["windows"] = table(rows, {"window": "string", "snapshot": "string"})
    refused = done.quarantine.head if done and done.quarantine else None
    return out | ({"quarantined_rows": refused.rows} if refused else {})
