"""Checks that a feed's table has exactly the ledger's files and rows at its mark (invariant 17)."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.pipelines.audit.audit import AuditProblem
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.tables.check import compare, load_both


def table_problems(
    ledger: Ledger, lake: Lake, table: Table, kind: PartKind = PartKind.LANDED
) -> Iterator[AuditProblem]:
    """Yields the problems of the table. Files that the next sync will add are none.

    Raises TableDiffers for a table of somebody else's, EntriesLost, CatalogUnavailable, LedgerCorrupt.
    """
    head, state = load_both(ledger, table)
    mend = f"sluice table sync {ledger.feed} --repair"
    if head is None:
        return
    comparison = compare(ledger, lake, table, head, state, kind)
    for address in comparison.missing:
        yield AuditProblem(17, f"{address} is missing in {table.name}", address, mend)
    for address in comparison.foreign:
        yield AuditProblem(17, f"{address} is in {table.name}, and is not a file of the feed", address, mend)
    for address, expected, counted in comparison.rows:
        yield AuditProblem(
            17, f"{address} has {expected} rows in {table.name}, the ledger says {counted}", address, mend
        )
    if comparison.deletes:
        yield AuditProblem(17, f"{table.name} deletes rows, by {comparison.deletes} of its files")
