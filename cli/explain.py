"""`sluice explain`: where one record is, or why it is nowhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli import parse
from sluice.cli.records import document as record_document
from sluice.cli.records import rows
from sluice.cli.records import view as record_view
from sluice.cli.session import FeedName, Session, command
from sluice.cli.terminal import heading

if TYPE_CHECKING:
    from sluice.pipelines.explain import Explanation
    from sluice.pipelines.ports import Lake

Place = Annotated[str, typer.Argument(metavar="T:P:OFFSET", help="Topic, partition and offset.", show_default=False)]


def register(app: typer.Typer) -> None:
    command(app)(explain)


def explain(session: Session, feed: FeedName, place: Place) -> None:
    """Say where a record is, or why it is nowhere.

    From the ledger and the files alone; Kafka is not asked (see peek).

    $ sluice explain orders orders:0:150
    """
    from sluice.pipelines.explain import explain as of_ledger
    from sluice.pipelines.ledger import Ledger

    tp, offset = parse.record(place)
    found = session.feed(feed)
    with session.open_edges(found) as edges:
        said = of_ledger(Ledger(edges.lake, feed, edges.clock), edges.lake, tp, offset)
        row = _row(edges.lake, said)
    session.terminal.show(*_view(said, row))
    session.terminal.document(_document(said, row))


def _row(lake: Lake, said: Explanation) -> dict[str, Any] | None:
    """The record as it landed."""
    if said.path is None or said.row_group is None or said.row is None:
        return None
    import pyarrow.parquet as pq

    with lake.open(said.path) as file:
        group = pq.ParquetFile(file).read_row_group(said.row_group)
    return rows(group.slice(said.row, 1))[0]


def _view(said: Explanation, row: dict[str, Any] | None) -> list[RenderableType]:
    out: list[RenderableType] = [heading(f"{said.tp}:{said.offset}", str(said.found)), f"  {said.text}"]
    return [*out, record_view([row])] if row else out


def _document(said: Explanation, row: dict[str, Any] | None) -> dict[str, Any]:
    place = {"topic": said.tp.topic, "partition": said.tp.partition, "offset": said.offset}
    rest = {k: v for k, v in asdict(said).items() if k not in ("tp", "offset", "found")}
    return {**place, "class": str(said.found), **rest, "record": record_document(row) if row else None}
