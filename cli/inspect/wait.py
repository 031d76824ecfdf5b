"""`sluice wait`: wait until a window is complete. Reads the lake only; Kafka is not asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import parsing, window_options
from sluice.cli.options.window_options import OneWindow
from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.status.window_state import Standing, WindowStanding
from sluice.pipelines.util.units import show_duration, show_window

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.model.receipts import Reporter
    from sluice.pipelines.ports import Ports

POLL = 1.0  # seconds between reads of the lake


def register(app: typer.Typer) -> None:
    command(app)(wait)


def wait(
    session: Session,
    feed: FeedName,
    window: OneWindow,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="Give up after this time, such as 30m.", show_default="never"),
    ] = None,
) -> None:
    """Wait until a window is complete.

    A window is complete when all its records have landed or are accounted for, and its files can be read. Exit 75
    at the end of --timeout. The command starts no run.

    $ sluice wait orders --window 2026-11-20T14 --timeout 30m && spark-submit report.py
    """
    start, definition = parsing.window(window), session.feed(feed)
    limit = None if timeout is None else parsing.duration(timeout)
    with session.open_ports(definition) as edges, session.terminal.progress() as meter:
        standing, ready = _wait_for(_looking(definition, edges, start), meter, limit)
    session.terminal.show(window_options.verdict(standing))
    session.terminal.print_document({"feed": feed, "complete": ready, **window_options.build_document(standing)})
    if not ready:
        raise _build_timeout(feed, standing, limit or 0)


Look = Callable[[], tuple[WindowStanding, bool]]


def _wait_for(look: Look, report: Reporter, limit: int | None) -> tuple[WindowStanding, bool]:
    """Wait for the window, at most `limit` ms. Returns its state, and True if it is complete."""
    until = None if limit is None else time.monotonic() + limit / 1000
    while True:
        standing, ready = look()
        remaining = POLL if until is None else until - time.monotonic()
        if ready or remaining <= 0:
            return standing, ready
        report(Progress("wait", standing.done, standing.span or 0, window_options.show_pending(standing.pending)))
        time.sleep(min(POLL, remaining))


def _looking(feed: Feed, edges: Ports, start: int) -> Look:
    """Returns a function that reads new ledger entries at each call. Raises UsageError, WindowRetired."""
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.planning.windows import check_aligned, check_begun
    from sluice.pipelines.publishing import manifest
    from sluice.pipelines.status.strip import standing

    check_aligned(start, feed.window)
    ledger = Ledger(edges.lake, feed.name, edges.clock)

    def look() -> tuple[WindowStanding, bool]:
        state = ledger.read()
        check_begun(start, feed.window, state)
        manifest.demand_kept(ledger, state, feed.name, start, feed.window)
        state_of_window = standing(state, feed.window, start, edges.clock())
        landed = state_of_window.standing is Standing.LANDED
        return state_of_window, landed and (
            manifest.is_declared(edges.lake, feed.name, start, feed.window) or _visible(ledger)
        )

    def _visible(ledger: Ledger) -> bool:
        parts = manifest.read_window_files(ledger, start, feed.window).parts
        return not manifest.find_missing(edges.lake, parts)

    return look


def _build_timeout(feed: str, standing: WindowStanding, limit: int) -> WindowIncomplete:
    name = show_window(standing.window)
    return WindowIncomplete(
        f"window {name} is not complete after {show_duration(limit)}",
        remedy=f"land it with sluice run {feed} --window {name}, or see sluice status {feed} for active runs",
    )
