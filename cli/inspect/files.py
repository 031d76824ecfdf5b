"""`sluice files`: the Parquet files of windows, for other tools to read."""

from __future__ import annotations

from typing import Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options.window_options import WindowOptions
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.receipts import PartKind

_FILE = "address topic partition start end rows bytes sha256 first"


def register(app: typer.Typer) -> None:
    command(app)(files)


def files(
    session: Session,
    feed: FeedName,
    windows: WindowOptions,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="List files of quarantined records instead of landed rows.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Also list incomplete windows.")] = False,
) -> None:
    """List the files of a window.

    It prints one address per line, from the ledger alone; holds are notes. Exit 75 if a window is not complete.
    --json adds rows, bytes, offsets and SHA-256 of the file for each offset range; if ranges share a file, `first` is
    a range's first row in it.

    $ sluice files orders --window 2026-11-20T14
    $ sluice files orders --from 2026-11-20 --to 2026-11-21 | xargs ls -l
    """
    from sluice.pipelines.maintenance.expiry import read_holds
    from sluice.pipelines.publishing.published_files import list_files, order_files

    definition = session.find_dataset(feed)
    kind = PartKind.QUARANTINED if quarantine else PartKind.LANDED
    if not windows.any:
        raise UsageError("no window", remedy=f"add one: sluice files {feed} --window 2026-11-20T14")
    with session.open_ports(definition) as ports:
        starts = windows.parse(definition.window, ports.clock())
        listed = list_files(definition, ports.lake, starts, kind, partial=partial)
        holds = read_holds(definition, ports, starts)
    for hold in holds:
        session.terminal.note(f"on hold {hold}")
    # Addresses only, a line each: other programs read them.
    session.terminal.lines(f.address for f in order_files(listed))
    session.terminal.print_document(
        feed=feed,
        windows=[*map(definition.window.name, starts)],
        kind=kind,
        rows=sum(f.rows for f in listed),
        bytes=sum(f.bytes for f in listed),
        files=listed,
        holds=holds,
    )
