"""`sluice hold`: windows that are neither expired nor erased, by entries in the ledger."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.terminal.output import good, heading, table
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import show_instant


def register(app: typer.Typer) -> None:
    command(app, name="hold")(put_on_hold)


def put_on_hold(
    session: Session,
    feed: FeedName,
    start: Annotated[
        str | None, option("--from", "START", "The first window on hold (UTC).", show_default="the oldest")
    ] = None,
    end: Annotated[
        str | None, option("--to", "END", "The end, exclusive.", show_default="none: later windows, too")
    ] = None,
    reason: Annotated[str | None, option("--reason", "TEXT", "The reason; the ledger keeps it.")] = None,
    release: Annotated[int | None, option("--release", "NUMBER", "End this hold.")] = None,
) -> None:
    """Keep windows from being expired or erased, such as for a lawsuit; without --reason, list the holds.

    Expiries leave windows on hold out, and erasures of records in them are refused, until the hold is released. The
    ledger records both with user and reason. Records that land later in these windows are on hold, too.

    $ sluice hold orders --from 2026-08-01 --to 2026-09-01 --reason "case 12"
    $ sluice hold orders
    $ sluice hold orders --release 4711 --reason "case 12 is closed"
    """
    from sluice.pipelines.maintenance.expiry import change_holds

    definition, reason = session.feed(feed), (reason or "").strip()
    if (start or end or release is not None) and not reason:
        raise UsageError("--reason is missing", remedy='add --reason "case 12"; without options, it lists the holds')
    if release is not None and (start or end):
        raise UsageError("--release together with --from or --to", remedy="a hold ends as a whole")
    first, last = (parsing.window(text, definition.window) if text else None for text in (start, end))
    if first is not None and last is not None and first >= last:
        raise UsageError("--to is not after --from", remedy="such as --from 2026-08-01 --to 2026-09-01")
    with session.open_ports(definition) as ports:
        by = f"{getpass.getuser()} on {socket.gethostname()}"
        holds = change_holds(definition, ports, by, reason, (first, last), release)
    rows = [[str(h.number), h.from_, h.to, h.reason, h.by, show_instant(h.at)] for h in holds]
    columns = ("number", "from", "to", "reason", "by", "at")
    session.terminal.show(
        heading(f"Holds of {feed}"), table(columns, rows, right="number") if rows else good("no window is on hold")
    )
    session.terminal.print_document(feed=feed, holds=holds)
