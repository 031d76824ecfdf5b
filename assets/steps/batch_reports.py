"""Writes batch reports, and a JSON line for each task to the run's log.

Both are optional: no run fails because of them, and `sluice report` writes a missing report again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import dagster as dg

from sluice.pipelines.batch.result import BatchResult, Landed
from sluice.pipelines.errors import BatchRefused
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import RangeFailure
from sluice.pipelines.ports import Lake
from sluice.pipelines.status.batch_facts import WorkTime, by_task
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import many, show_window


class Context(Protocol):
    """The part of Dagster's contexts that a report needs."""

    @property
    def log(self) -> dg.DagsterLogManager: ...


@dataclass(frozen=True, slots=True)
class BatchReports:
    """Writes the reports of a feed's batches. Errors are logged only."""

    context: Context
    ledger: Ledger
    lake: Lake

    def write_all(self, batches: Sequence[BatchResult], outlook: Outlook | None) -> None:
        """Write reports of batches, whatever their outcome. `outlook`: the feed's now, if known."""
        for b in batches:
            failed = f"{many(len(b.failures), 'offset range')} failed, and nothing is published."
            why = b.refused or ("" if b.number is not None else failed)
            self._write(b.batch, why, b.failures, outlook)

    def write_refused(self, run: str, refused: BatchRefused) -> None:
        """Write the report of the batch that was refused in this run."""
        for b in self.ledger.read().live():
            if b.owner.run == run:
                self._write(b.id, refused.message)

    def _write(
        self, batch: int, why: str, failures: Sequence[RangeFailure] = (), outlook: Outlook | None = None
    ) -> None:
        from sluice.pipelines.batch_report import report_page
        from sluice.pipelines.batch_report.batch_account import behind

        try:
            path = report_page.keep(self.ledger, self.lake, batch, behind(outlook) if outlook else None, why, failures)
        except Exception as error:  # noqa: BLE001 - the batch is decided, and its report is optional
            self.context.log.warning(
                "the report of batch %d was not written: %s: %s", batch, type(error).__name__, error
            )
            return
        self.context.log.info("the report of batch %d: %s", batch, self.lake.locate(path))


log = logging.getLogger(f"{logs.OURS}.tasks")


def log_tasks(landed: Landed) -> None:
    """Log a line for each task, each failed offset range and each batch, if logs are JSON."""
    if not logs.as_json():
        return
    for batch in landed.batches:
        with logs.log_context(batch=batch.batch):
            _log_batch(batch)


def _log_batch(batch: BatchResult) -> None:
    failed = {f.offset_range: f for f in batch.failures}
    for task, spent in by_task(batch.plan, batch.receipts):
        with logs.log_context(task=task.index, window=_find_window(task)):
            _log_task(task, spent)
            for f in (failed[s] for s in task.offset_ranges if s in failed):
                _log_failure(f)
    counts = batch.counts
    fields = {"rows": counts.landed, "quarantined": counts.quarantined, "bytes": batch.bytes, "entry": batch.number}
    published = "published" if batch.number is not None else "not published"
    log.info("%s: %s", published, many(counts.landed, "row"), extra={"about": fields})


def _log_task(task: Task, spent: WorkTime) -> None:
    fields: dict[str, Any] = {
        "leader": task.leader,
        "offset_ranges": spent.offset_ranges,
        "records": spent.records,
        "bytes": spent.input_bytes,
        "seconds": round(spent.total / 1e9, 6),
        "activities": {a: round(ns / 1e9, 6) for a, ns in spent.ns.items()},
    }
    log.info(
        "landed %s of %s", many(spent.offset_ranges, "offset range"), len(task.offset_ranges), extra={"about": fields}
    )


def _log_failure(f: RangeFailure) -> None:
    fields = {"offset_range": str(f.offset_range), "error": f.error, "remedy": f.remedy}
    log.error("%s: %s", f.offset_range, f.message, extra={"about": fields})


def _find_window(task: Task) -> str | None:
    """Returns the window of the task's offset ranges if all have the same one."""
    windows = {s.window for s in task.offset_ranges}
    only = windows.pop() if len(windows) == 1 else None
    return None if only is None else show_window(only)
