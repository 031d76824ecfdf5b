"""Progress of running tasks, read from the lake: a batch's receipts in staging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Event, Thread
from time import monotonic

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.progress import Progress, Reporter
from sluice.pipelines.ports import Lake


def report_progress(lake: Lake, feed: str, batch: int, plan: Plan, report: Reporter) -> AbstractContextManager[None]:
    """Report a batch's progress from the receipts in staging until the block ends."""
    spans = {paths.slice_name(s): s.span for s in plan.slices}
    names_by_path: dict[str, frozenset[str]] = {}

    total = sum(spans.values())

    def landed() -> Progress:
        done = sum(spans.get(name, 0) for name in receipt_files.finished(lake, feed, batch, names_by_path))
        return Progress("land", done, total)

    return reporting(Progress("land", 0, total), landed, report)


@contextmanager
def reporting(first: Progress, read_progress: Callable[[], Progress], report: Reporter) -> Iterator[None]:
    """Report `first`, then the progress that is read, about once a second until the block ends.

    Reads less often if reading takes long, and again later if the lake does not answer. An error of `report` ends
    the reports; it is raised at the end of a block without an error of its own.
    """
    stop, raised = Event(), list[BaseException]()

    def look() -> None:
        report(first)
        pause = 1.0
        while not stop.wait(pause):
            began, progress = monotonic(), None
            with suppress(SluiceError):
                progress = read_progress()
            if progress is not None:
                report(progress)
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
