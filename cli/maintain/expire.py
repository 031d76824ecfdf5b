"""`sluice expire`: retires rows that landed before a time, by an entry in the ledger."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import EachFeed, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.request_options import DryRun, Yes
from sluice.cli.shared import other_batches
from sluice.cli.shared.rewrite_summary import format_window, table_after
from sluice.cli.terminal import output
from sluice.cli.terminal.output import good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.receipts import count_files
from sluice.pipelines.util.documents import AsText
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.maintenance.expiry import Retired, Retirement, RetireRequest
    from sluice.pipelines.model.plans import OffsetRange
    from sluice.pipelines.model.receipts import Receipt
    from sluice.pipelines.ports import Ports


def register(app: typer.Typer) -> None:
    command(app)(expire)


def expire(
    session: Session,
    feed: EachFeed,
    before: Annotated[
        str | None,
        option(
            "--before",
            "TIME",
            "Start of the oldest window to keep (UTC), such as 2026-08-01; or an age, such as 90d.",
            show_default="the feed's `retention`",
        ),
    ] = None,
    reason: Annotated[str | None, option("--reason", "TEXT", "The reason; the ledger keeps it.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Retire the rows of old windows, and remove their files.

    It asks for confirmation on a terminal; elsewhere it needs --yes. It retires complete windows only, of all
    partitions together. The ledger records the retired rows with user and reason, so audits still reconcile. Retired
    rows can land again only if Kafka still has them. Reports of batches without rows are removed, too; results of SQL
    reports stay. Windows on hold stay: sluice hold.

    $ sluice expire orders --before 2026-08-01 --dry-run
    $ sluice expire orders --before 90d --reason "kept for 90 days" --yes
    $ sluice expire --all --before 90d --reason "kept for 90 days" --yes
    $ sluice expire --all --yes
    """
    definition = session.feed(feed)
    with session.open_ports(definition) as ports:
        from sluice.pipelines.maintenance.expiry import RetireRequest, request_retention

        request = request_retention(definition, ports.clock()) if before is None else None
        if before is None and request is None:
            session.terminal.show(warn(f"feed {feed} has no `retention`: nothing expires without --before"))
            return session.terminal.print_document(feed=feed, applied=False)
        at = request.before if request else _time(definition, before or "", ports.clock())
        reason = reason or (request.reason if request else None)
        if not dry_run and not (reason or "").strip():
            raise UsageError("--reason is missing", remedy='add --reason "kept for 90 days", or preview with --dry-run')
        if dry_run or not yes:
            _preview(session, definition, ports, at, dry_run=dry_run)
        if not dry_run:
            _expire(session, definition, ports, RetireRequest(at, reason or ""), previewed=not yes)


def _time(feed: Feed, text: str, now: int) -> int:
    """The start of a window (ms), from its name or from a time span before now."""
    from sluice.pipelines.util.units import parse_duration

    try:
        return feed.window.start_of(max(now - parse_duration(text), 0))
    except ValueError:
        pass
    try:
        return parsing.window(text, feed.window)
    except UsageError as error:
        raise UsageError(f"{error.message}, or how long ago: 90d", remedy=error.remedy) from None


def _preview(session: Session, feed: Feed, ports: Ports, before: int, *, dry_run: bool) -> None:
    """Show the retirement, and ask for confirmation unless it is a dry run."""
    from sluice.pipelines.maintenance.expiry import look

    retirement = look(feed, ports, before)
    files = many(count_files(retirement.receipts), "file")
    session.terminal.show(
        *view(feed, retirement), *([output.format_dry_run()] if dry_run and retirement.receipts else [])
    )
    if dry_run:
        session.terminal.print_document(_sum_expiry(feed, retirement), applied=False)
    elif retirement.receipts:
        session.terminal.confirm(f"Retire these windows of {feed.name}, and remove {files}?")


def _expire(session: Session, feed: Feed, ports: Ports, request: RetireRequest, *, previewed: bool) -> None:
    from sluice.pipelines.maintenance.expiry import retire

    by = f"{getpass.getuser()} on {socket.gethostname()}"
    heard = other_batches.MetRecorder(lambda progress: None)
    with session.terminal.working("retiring"):
        done = retire(feed, ports, request, by, heard)
        lines = (*_format_done(feed.name, done), *other_batches.view(heard.met), *table_after(session, feed))
    session.terminal.show(*([] if previewed else view(feed, done.expiry)), *lines)
    session.terminal.print_document(
        _sum_expiry(feed, done.expiry),
        applied=True,
        entry=done.number,
        removed_files=len(done.removed.parts),
        removed_pages=len(done.removed.pages),
        kept_files=len(done.removed.kept),
        other_batches=heard.met,
    )


# -- for people


def view(feed: Feed, retirement: Retirement) -> Iterator[RenderableType]:
    yield heading(f"Expiry of {feed.name}", f"before {feed.window.name(retirement.before)}")
    if not retirement.receipts:
        yield good("no landed rows before that time")
    else:
        amounts = _sum_expiry(feed, retirement)
        amounts_by_name: list[tuple[str, ExpiredRows | ExpiryResult]] = [
            *((w.window or "outside windows", w) for w in amounts.windows),
            ("in all", amounts),
        ]
        rows = [[title, count(a.files), count(a.rows), size(a.bytes)] for title, a in amounts_by_name]
        names = ("window", "files", "rows", "bytes")
        yield table(names, [*limit_rows(rows[:-1]), rows[-1]], right="files rows bytes")
    if retirement.on_hold:
        windows = {r.offset_range.window for r in retirement.on_hold}
        yield warn(f"kept: {many(len(windows), 'window')} on hold: sluice hold {feed.name}")
    if retirement.across:
        yield warn(f"kept: {many(len(retirement.across), 'offset range')} outside windows, across that time")


@dataclass(frozen=True, slots=True)
class ExpiredRows:
    """Amounts in one window, or outside of windows."""

    window: str | None
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpiryResult:
    """All amounts, those of each window, and what stays: windows on hold, and the offset ranges across the time."""

    feed: str
    before: str
    files: int
    rows: int
    bytes: int
    windows: list[ExpiredRows]
    on_hold: list[str | None]
    across: AsText[list[OffsetRange]]


def _sum_expiry(feed: Feed, retirement: Retirement) -> ExpiryResult:
    from sluice.pipelines.maintenance.expiry import windows_of

    def add_up(receipts: Sequence[Receipt]) -> tuple[int, int, int]:
        parts = [p for r in receipts for p in r.parts]
        return count_files(receipts), sum(p.rows for p in parts), sum(p.bytes for p in parts)

    windows = [
        ExpiredRows(format_window(feed, w), *add_up(receipts)) for w, receipts in windows_of(retirement, feed.window)
    ]
    across = [r.offset_range for r in retirement.across]
    before = feed.window.name(retirement.before)
    on_hold = [format_window(feed, w) for w in dict.fromkeys(r.offset_range.window for r in retirement.on_hold)]
    return ExpiryResult(feed.name, before, *add_up(retirement.receipts), windows, on_hold, across)


def _format_done(feed: str, done: Retired) -> Iterator[Text]:
    if done.number is not None:
        removed = f": {many(len(done.removed.parts), 'file')} removed" if not done.removed.kept else ""
        yield good(f"retired, by ledger entry {done.number}{removed}")
    elif done.removed.parts:
        yield good(f"{many(len(done.removed.parts), 'file')} of earlier retirements removed")
    if done.removed.kept:
        yield warn(
            f"{many(len(done.removed.kept), 'file')} stay while snapshots of the table refer to them: sluice table sync"
            f" {feed} removes them when those expire"
        )
