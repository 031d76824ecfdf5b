"""`sluice report`: the report of a batch, one HTML file. From the ledger and the lake; Kafka is not asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.pipelines.util.documents import document_of

if TYPE_CHECKING:
    from sluice.pipelines.batch_report.batch_account import BatchAccount
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ports import Clock, Lake


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
    definition = session.feed(feed)
    with session.open_ports(definition) as ports:
        facts_, path, data, fresh = _read_report(definition, ports.lake, ports.clock, batch)
        address = ports.lake.locate(path)
    if output is not None:
        output.write_bytes(data)
    session.terminal.lines([str(output or address)])
    session.terminal.print_document(
        {
            **_build_figures(facts_),
            "path": address,
            "output": output and str(output),
            "rebuilt": fresh,
            "size": len(data),
        }
    )


def _read_report(feed: Feed, lake: Lake, clock: Clock, batch: int | None) -> tuple[BatchAccount, str, bytes, bool]:
    """The batch, where its report stands, the report, and whether it had to be made. Raises UsageError."""
    from sluice.pipelines.batch_report import report_page
    from sluice.pipelines.batch_report.batch_account import newest, read_account
    from sluice.pipelines.ledger import Ledger

    ledger = Ledger(lake, feed.name, clock)
    batch_account = read_account(ledger, lake, newest(ledger.read(), feed.name) if batch is None else batch)
    path = report_page.standing_report(batch_account, lake)
    if path is not None and (data := lake.get(path)) is not None:
        return batch_account, path, data, False
    data = report_page.make(report_page.with_reason(batch_account, feed.policies, lake), lake)
    lake.put(path := report_page.path_of(batch_account), data)
    return batch_account, path, data, True


def _build_figures(a: BatchAccount) -> dict[str, Any]:
    facts = a.facts
    names = "rows=counts.landed quarantined=counts.quarantined quarantined_share dropped=counts.dropped"
    return {
        **document_of(a, "feed batch=batch.id status=batch.status"),
        **document_of(facts, f"{names} no_record=counts.no_record bytes files"),
        "milliseconds": facts.took or None,
        "expectations": len(facts.outcomes),
        "broken": sum(not o.passed for o in facts.outcomes),
    }
