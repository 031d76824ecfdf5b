"""`sluice explain`: where one record is, or why it is nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from sluice.cli.app import completers
from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.options import parsing
from sluice.cli.terminal.output import good, heading
from sluice.cli.terminal.record_view import build_document as record_document
from sluice.cli.terminal.record_view import rows, typed_fields, typed_view
from sluice.cli.terminal.record_view import view as record_view

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.audit.explain_offset import Explanation

RecordArgument = Annotated[
    str,
    typer.Argument(
        metavar="T:P:OFFSET",
        help="Topic, partition and offset.",
        show_default=False,
        autocompletion=completers.complete_partitions,
    ),
]


def register(app: typer.Typer) -> None:
    command(app)(explain)


def explain(session: Session, feed: FeedName, coordinates: RecordArgument) -> None:
    """Show where a record landed, or why it did not.

    It reads the ledger and the files, not Kafka's records (see sluice peek). It also shows where a republish sent the
    record, or where a republished record came from.

    $ sluice explain orders orders:0:150
    $ sluice explain orders orders-again:2:7
    """
    from sluice.pipelines.operating.trace_record import trace_record

    tp, offset = parsing.parse_record(coordinates)
    definition = session.feed(feed)
    with session.open_ports(definition) as ports:
        trace = trace_record(definition, ports, tp, offset)
    sent = (good(f"republish {m.republish} sent {m.from_} to {m.to}") for m in trace.sent)
    session.terminal.show(*_view(trace.explanation, trace.row), *sent)
    record = None if trace.row is None else typed_fields(trace.row) or record_document(rows(trace.row)[0])
    session.terminal.print_document(trace.explanation, record=record, republished=trace.sent)


def _view(explanation: Explanation, row: pa.Table | None) -> list[RenderableType]:
    out: list[RenderableType] = [
        heading(f"{explanation.tp}:{explanation.offset}", str(explanation.class_)),
        f"  {explanation.text}",
    ]
    if row is None:
        return out
    fields = typed_fields(row)
    return [*out, typed_view(fields) if fields else record_view(rows(row))]
