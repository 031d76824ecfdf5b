"""A feed's table in Dagster: a run syncs it after its commit; a check compares all files.

It never stops a run. If the catalog is away, or somebody else changed the table, the run logs it, the check `table`
warns, and the next run adds what is owed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg

from sluice.assets.checks.contract_checks import CheckResult
from sluice.assets.checks.feed_checks import feed_evaluation
from sluice.assets.instance import internals
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.model.tables import TableHead
from sluice.pipelines.tables.check import Compared, comparison
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.util.units import many, show_instant

TABLE = "table"
"""Is the table what the ledger says?"""


def bring_up_table(
    context: dg.AssetExecutionContext | dg.OpExecutionContext, session: RunSession, name: str
) -> Iterator[Any]:
    """Bring the feed's table up to the ledger, if it has one, and report it as `<feed>/table`. Raises nothing of ours.

    What it found goes into the check `table`: whether anybody else changed the table is told by the table's mark, not
    by comparing all files.
    """
    feed = session.feed(name)
    if feed.table is None:
        return
    from sluice.resources.open_ports import open_tables

    key, report = session.keys(name).table, session.reporter(context.log)
    try:
        report(Progress("table"))
        with session.open_ports(feed) as edges, open_tables(feed, edges.lake) as (rows, refused, windows):
            ledger = Ledger(edges.lake, name, edges.clock)
            before = edges.clock() - feed.table.keep_snapshots
            done = sync(ledger, edges.lake, rows, report, quarantine=refused, windows=windows, expire_before=before)
    except SluiceError as error:
        session.result.table = error
        context.log.warning("the table is not up to date: %s → %s", error.message, error.remedy)
        yield feed_evaluation(context.instance, key, TABLE, _failed(error))
        return
    if done.head is None:
        return
    beside = done.quarantine
    if done.commits or (beside and beside.commits) or internals.newest(context.instance, key) is None:
        yield dg.AssetMaterialization(key, metadata=_metadata(done.head, done))
    said = f"everything that had landed is in snapshot {done.head.snapshot}"
    yield feed_evaluation(context.instance, key, TABLE, {"passed": True, "description": said})


def table_check(feed: Feed, session: RunSession) -> dg.AssetChecksDefinition:
    """The check that compares the table with the ledger, file by file, whenever somebody runs it."""

    @dg.asset_check(
        asset=session.keys(feed.name).table,
        name=TABLE,
        description="The table has exactly the files and rows that the ledger says.",
    )
    def check() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(**_compared(session, feed.name))

    made: dg.AssetChecksDefinition = check
    return made


def _compared(session: RunSession, name: str) -> CheckResult:
    from sluice.resources.open_ports import open_tables

    feed = session.feed(name)
    try:
        lake = session.open_lake(feed)
        with session.open_ports(feed) as edges, open_tables(feed, lake) as tables:
            ledger = Ledger(lake, name, edges.clock)
            return _verdict([(t.name, comparison(ledger, lake, t, kind)) for kind, t in tables.of_parts])
    except SluiceError as error:
        return _failed(error)


def _verdict(found: list[tuple[str, Compared]]) -> CheckResult:
    """Of the table, and of the quarantine's if there is one."""
    (_, first), *rest = found
    said = [_described(first), *(f"{name}: {_described(compared)}" for name, compared in rest)]
    return {
        "passed": all(compared.sound and not compared.misread for _, compared in found),
        "severity": dg.AssetCheckSeverity.ERROR,
        "description": "; ".join(said),
        "metadata": _metadata(first.head) if first.head else {},
    }


def _described(found: Compared) -> str:
    if not found.sound:
        return found.describe()
    if found.misread:
        return f"{many(len(found.misread), 'file')} with bounds that engines misread: sluice table sync FEED --repair"
    lacking = f"; {many(len(found.owed), 'file')} not in it yet" if found.owed else ""
    return f"the same {many(len(found.live) - len(found.owed), 'file')} and rows as in the ledger{lacking}"


def _failed(error: SluiceError) -> CheckResult:
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": f"{error.message} → {error.remedy}",
        "metadata": {},
    }


def _metadata(head: TableHead, done: Synced | None = None) -> Metadata:
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
