"""`sluice wait`: wait until a window is complete. Reads the lake only; Kafka is not asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.window_options import OneWindow
from sluice.cli.shared import window_text
from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.status.window_state import WindowStanding, describe_pending
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import show_duration

if TYPE_CHECKING:
    from sluice.pipelines.model.receipts import Reporter
    from sluice.pipelines.operating.check_window import LookAtWindow

POLL = 1.0  # seconds between reads of the lake


def register(app: typer.Typer) -> None:
    command(app)(wait)


def wait(
    session: Session,
    feed: FeedName,
    window: OneWindow,
    timeout: Annotated[
        str | None, option("--timeout", "TIME", "Give up after this time, such as 30m.", show_default="never")
    ] = None,
) -> int:
    """Wait until a window is complete, or all windows of a day.

    A window is complete when all its records have landed or are accounted for, and its files can be read. Exit 75
    at the end of --timeout. The command starts no run.

    $ sluice wait orders --window 2026-11-20T14 --timeout 30m && spark-submit report.py
    """
    definition = session.find_dataset(feed)
    starts = parsing.windows(window, definition.window)
    from sluice.pipelines.operating.check_window import watch_window  # late: it takes pyarrow

    limit = None if timeout is None else parsing.duration(timeout)
    until = None if limit is None else time.monotonic() + limit / 1000
    looked = []
    with session.open_ports(definition) as ports, session.terminal.progress() as meter:
        for start in starts:
            standing, ready = _wait_for(watch_window(definition, ports, start), meter, until)
            looked.append(standing)
            # Later windows are complete later still: the timeout is over for them, too.
            if not ready:
                break
    session.terminal.show(*map(window_text.verdict, looked))
    error = None if ready else _build_timeout(definition.name, standing, limit or 0)
    if error:
        session.terminal.fail(error)
    code = error.exit_code if error else 0
    session.terminal.print_document(WaitResult(feed, ready, standing, error, looked, code))
    return code


@dataclass(frozen=True, slots=True)
class WaitResult:
    """The state of the last window that was waited for, and of all `windows`."""

    feed: str
    complete: bool
    window: Flat[WindowStanding]
    error: Flat[WindowIncomplete | None]
    windows: list[WindowStanding]
    exit_code: int


def _wait_for(look: LookAtWindow, report: Reporter, until: float | None) -> tuple[WindowStanding, bool]:
    """Wait for the window, at the latest until this monotonic time. Returns its state, and True if it is complete."""
    while True:
        standing, ready = look()
        remaining = POLL if until is None else until - time.monotonic()
        if ready or remaining <= 0:
            return standing, ready
        report(Progress("wait", standing.accounted, standing.offsets or 0, describe_pending(standing.pending)))
        time.sleep(min(POLL, remaining))


def _build_timeout(feed: str, standing: WindowStanding, limit: int) -> WindowIncomplete:
    name = standing.window
    return WindowIncomplete(
        f"window {name} is not complete after {show_duration(limit)}",
        remedy=f"land it with sluice run {feed} --window {name}, or see sluice status {feed} for active runs",
    )
