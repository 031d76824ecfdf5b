"""Progress of running tasks, read from the receipts that they leave in staging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic

from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ports import Lake
from sluice.pipelines.vocabulary.errors import SluiceError
from sluice.pipelines.vocabulary.plans import Plan
from sluice.pipelines.vocabulary.progress import Progress, Reporter


@contextmanager
def report_progress(lake: Lake, feed: str, batch: int, plan: Plan, report: Reporter) -> Iterator[None]:
    """Report progress, from the receipts in staging, until the block ends: about once a second, and less often when
    listing them takes long. A lake that does not answer is asked again later. What `report` raises ends the looking,
    and is raised when the block has ended without an error of its own."""
    spans = {paths.slice_name(s): s.span for s in plan.slices}
    known: dict[str, frozenset[str]] = {}
    total, stop, raised = sum(spans.values()), Event(), list[BaseException]()

    def look() -> None:
        report(Progress("land", 0, total))
        pause = 1.0
        while not stop.wait(pause):
            began, done = monotonic(), None
            with suppress(SluiceError):
                done = sum(spans.get(name, 0) for name in receipt_files.finished(lake, feed, batch, known))
            if done is not None:
                report(Progress("land", done, total))
            pause = max(1.0, 10 * (monotonic() - began))

    def keep_looking() -> None:
        try:
            look()
        except BaseException as error:  # noqa: BLE001 - reporters end a run by an interrupt, too
            raised.append(error)

    thread = Thread(target=keep_looking, name="sluice-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if raised:
        raise raised[0]
