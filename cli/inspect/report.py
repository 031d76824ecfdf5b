"""`sluice report`: pages of HTML that open offline, of a window, of a batch, and of all feeds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag, option
from sluice.cli.terminal.output import warn
from sluice.pipelines.errors import UsageError


def register(app: typer.Typer) -> None:
    command(app)(report)


def report(
    session: Session,
    feed: Annotated[
        str | None,
        typer.Argument(
            metavar="FEED",
            help="Name of a feed, as in feeds/FEED.yaml.",
            show_default=False,
            autocompletion=completers.complete_feeds,
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Argument(
            metavar="[WINDOW]",
            help="The page of this window, by its start in UTC, such as 2026-11-20T14.",
            show_default="the report of a batch",
            autocompletion=completers.complete_windows,
        ),
    ] = None,
    batch: Annotated[
        int | None, option("--batch", "N", "The report of this batch.", min=0, show_default="the newest batch")
    ] = None,
    output: Annotated[Path | None, option("--output", "FILE", "Also write a copy to this file.")] = None,
    everything: Annotated[
        bool, flag("--all", "The page of all feeds: their newest windows, worst feeds first.")
    ] = False,
) -> None:
    """Print the address of a page: of a window, of a batch or of all feeds. It is HTML that opens offline.

    A window's page shows what `sluice check` prints; it is made again. Runs write it and the batch's report. A missing
    report is built again from the ledger and the files of the batch. Once `--all` has made the page of all feeds, runs
    refresh it. Pages contain values of records. For users without the right to write they are temporary files, or
    `--output`.

    $ sluice report orders 2026-11-20T14
    $ sluice report orders --output orders.html
    $ sluice report orders --batch 42 --json
    $ sluice report --all
    """
    # A window makes a page of an hour; a batch, or neither of them, that of a batch.
    if everything != (feed is None):
        raise UsageError("one feed or all of them", remedy="name a feed: sluice report FEED; or: sluice report --all")
    # Pages of windows and of all feeds are made anew; a batch's report is only read, if the run has written it.
    if feed is None:
        _report_all(session, output)
    elif window is None:
        _report_batch(session, feed, batch, output)
    elif batch is not None:
        raise UsageError("--batch together with a window", remedy="use either of them")
    else:
        _report_window(session, feed, window, output)


def _report_all(session: Session, output: Path | None) -> None:
    from sluice.pipelines.operating.project_page import make_project_page

    feeds = [*session.files.feeds.values()]
    with session.terminal.working("reading ledgers, asking Kafka"), session.share_ports(feeds) as open_ports:
        project = make_project_page(open_ports, feeds)
    _finish(session, project.addresses, project.data, output)
    session.terminal.print_document(project, output=output, size=len(project.data))


def _report_window(session: Session, feed: str, window: str, output: Path | None) -> None:
    from sluice.pipelines.operating.check_window import check_window
    from sluice.pipelines.operating.hour_page import build_page
    from sluice.reading import find_one

    definition = session.find_dataset(feed)
    with session.open_ports(definition) as ports, session.terminal.progress() as meter:
        check = check_window(definition, ports, find_one(definition, window), (), meter)
        page = build_page(definition, ports, check)
    _finish(session, [page.address], page.data, output)
    session.terminal.print_document(check, path=page.address, output=output, size=len(page.data))


def _finish(session: Session, addresses: Iterable[str], data: bytes, output: Path | None) -> None:
    """Write the copy, and print where the page is. If it is nowhere, it becomes a temporary file of this user."""
    if output is None and not any(addresses):
        descriptor, name = tempfile.mkstemp(".html", "sluice-")
        os.close(descriptor)
        output = Path(name)
        session.terminal.show(warn("the page could not be written to the lake: it is a temporary file"))
    if output is not None:
        output.write_bytes(data)
    session.terminal.lines([str(output)] if output else addresses)


def _report_batch(session: Session, feed: str, batch: int | None, output: Path | None) -> None:
    from sluice.pipelines.operating.hour_page import read_batch_report

    definition = session.feed(feed)
    with session.open_ports(definition) as ports:
        page = read_batch_report(definition, ports, batch)
    _finish(session, [page.address], page.data, output)
    account, facts = page.account, page.account.facts
    session.terminal.print_document(
        feed=account.feed,
        batch=account.batch.id,
        status=account.batch.status,
        rows=facts.counts.landed,
        quarantined=facts.counts.quarantined,
        quarantined_share=facts.counts.quarantined_share,
        dropped=facts.counts.dropped,
        no_record=facts.counts.no_record,
        bytes=facts.bytes,
        files=facts.files,
        milliseconds=facts.took or None,
        expectations=len(facts.outcomes),
        broken=sum(not o.passed for o in facts.outcomes),
        outcomes=facts.outcomes,
        drift=facts.drift,
        path=page.address,
        output=output,
        rebuilt=page.rebuilt,
        size=len(page.data),
    )
