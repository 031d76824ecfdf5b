"""Progress of running tasks, read from the receipts that they leave in staging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

from sluice.pipelines.lake import paths
from sluice.pipelines.ports import Lake
from sluice.pipelines.vocabulary.plans import Plan
from sluice.pipelines.vocabulary.progress import Progress, Reporter


@contextmanager
def report_progress(lake: Lake, feed: str, batch: int, plan: Plan, report: Reporter) -> Iterator[None]:
    """Report progress, from the receipts in staging, until the block ends: about once a second, and less often when
    listing them takes long."""
    spans = {paths.slice_name(s): s.span for s in plan.slices}
    total, stop = sum(spans.values()), Event()

    def look() -> None:
        report(Progress("land", 0, total))
        pause = 1.0
        while not stop.wait(pause):
            began = monotonic()
            report(Progress("land", _finished_offsets(lake, feed, batch, spans), total))
            pause = max(1.0, 10 * (monotonic() - began))

    thread = Thread(target=look, name="sluice-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _finished_offsets(lake: Lake, feed: str, batch: int, spans: Mapping[str, int]) -> int:
    names = {paths.receipt_slice(p) for p in lake.list(paths.staging_folder(feed, batch))}
    return sum(spans.get(n, 0) for n in names if n)
