"""`sluice report`: the report of a batch, one HTML file. From the ledger and the lake; Kafka is not asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.invocation import FeedName, Session, command

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    command(app)(report)


def report(
    session: Session,
    feed: FeedName,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", min=0, help="The report of this batch.", show_default="the newest batch"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Also write a copy to this file.", show_default=False),
    ] = None,
) -> None:
    """Print the address of a batch's report, an HTML file that opens offline.

    Runs write it when a batch is published or refused. If it is missing, it is built again from the ledger and the
    files of the batch. It contains values of records.

    $ sluice report orders --output orders.html
    $ sluice report orders --batch 42 --json
    """
    from sluice.pipelines.batch_report.report_page import read_report

    definition = session.feed(feed)
    with session.open_ports(definition) as ports:
        page = read_report(definition, ports, batch)
    if output is not None:
        output.write_bytes(page.data)
    session.terminal.lines([str(output or page.address)])
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
        path=page.address,
        output=output,
        rebuilt=page.rebuilt,
        size=len(page.data),
    )
