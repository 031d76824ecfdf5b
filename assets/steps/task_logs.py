"""What each task of a batch did, a line of JSON for each: in the run's log, where logs are JSON, and nowhere else."""

from __future__ import annotations

import logging
from typing import Any

from sluice.pipelines.batch.result import BatchResult, Landed
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import SliceFailure
from sluice.pipelines.status.batch_facts import WorkTime, by_task
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import many, show_window

log = logging.getLogger(f"{logs.OURS}.tasks")


def tell(landed: Landed) -> None:
    """A line for each task, one for each slice that failed, and one for the batch."""
    if not logs.as_json():
        return
    for batch in landed.batches:
        with logs.log_context(batch=batch.batch):
            _tell_batch(batch)


def _tell_batch(batch: BatchResult) -> None:
    failed = {f.slice: f for f in batch.failures}
    for task, spent in by_task(batch.plan, batch.receipts):
        with logs.log_context(task=task.index, window=_window(task)):
            _tell_task(task, spent)
            for f in (failed[s] for s in task.slices if s in failed):
                _tell_failure(f)
    counts = batch.counts
    said = {"rows": counts.landed, "quarantined": counts.quarantined, "bytes": batch.bytes, "entry": batch.number}
    published = "published" if batch.number is not None else "not published"
    log.info("%s: %s", published, many(counts.landed, "row"), extra={"about": said})


def _tell_task(task: Task, spent: WorkTime) -> None:
    said: dict[str, Any] = {
        "leader": task.leader,
        "slices": spent.slices,
        "records": spent.records,
        "bytes": spent.input_bytes,
        "seconds": round(spent.total / 1e9, 6),
        "activities": {a: round(ns / 1e9, 6) for a, ns in spent.ns.items()},
    }
    log.info("landed %s of %s", many(spent.slices, "slice"), len(task.slices), extra={"about": said})


def _tell_failure(f: SliceFailure) -> None:
    said = {"slice": str(f.slice), "error": f.error, "remedy": f.remedy}
    log.error("%s: %s", f.slice, f.message, extra={"about": said})


def _window(task: Task) -> str | None:
    """The one window of its slices, if it is one."""
    windows = {s.window for s in task.slices}
    only = windows.pop() if len(windows) == 1 else None
    return None if only is None else show_window(only)
