"""Reports of the batches that a run published, or that were refused. They are for people, and no run fails because of
them: `sluice report` makes a missing one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import dagster as dg

from sluice.pipelines.batch.result import BatchResult
from sluice.pipelines.errors import BatchRefused
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import SliceFailure
from sluice.pipelines.ports import Ports
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.util.units import many


class Context(Protocol):
    """The part of Dagster's contexts that a report needs."""

    @property
    def log(self) -> dg.DagsterLogManager: ...


def keep_all(
    context: Context, ledger: Ledger, edges: Ports, batches: Sequence[BatchResult], outlook: Outlook | None
) -> None:
    """Write reports of batches that were carried out, whatever their outcome. `outlook`: the feed's now, if known."""
    for b in batches:
        failed = f"{many(len(b.failures), 'slice')} failed, and nothing is published."
        why = b.refused or ("" if b.number is not None else failed)
        _keep(context, ledger, edges, b.batch, why, b.failures, outlook)


def keep_refused(context: Context, ledger: Ledger, edges: Ports, run: str, refused: BatchRefused) -> None:
    """Write the report of the batch that was refused in this run."""
    for b in ledger.read().live():
        if b.owner.run == run:
            _keep(context, ledger, edges, b.id, refused.message)


def _keep(
    context: Context,
    ledger: Ledger,
    edges: Ports,
    batch: int,
    why: str = "",
    failures: Sequence[SliceFailure] = (),
    outlook: Outlook | None = None,
) -> None:
    from sluice.pipelines.batch_report import report_page
    from sluice.pipelines.batch_report.batch_account import behind

    try:
        path = report_page.keep(ledger, edges.lake, batch, behind(outlook) if outlook else None, why, failures)
    except Exception as error:  # noqa: BLE001 - the batch is decided, and its report is optional
        context.log.warning("the report of batch %d was not written: %s: %s", batch, type(error).__name__, error)
        return
    context.log.info("the report of batch %d: %s", batch, edges.lake.locate(path))
