"""`sluice explain`: where records are, or why they are nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.options.window_options import Window
from sluice.cli.shared.rewrite_summary import view_matches
from sluice.cli.terminal.output import good, heading, table
from sluice.cli.terminal.record_view import build_document as record_document
from sluice.cli.terminal.record_view import rows, typed_fields, typed_view
from sluice.cli.terminal.record_view import view as record_view
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.documents import to_document

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.record_search import Criteria
    from sluice.pipelines.operating.trace_record import RecordTrace

RecordArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[T:P:OFFSET]",
        help="Topic, partition and offset.",
        show_default=False,
        autocompletion=completers.complete_partitions,
    ),
]


def register(app: typer.Typer) -> None:
    command(app)(explain)


@dataclass(frozen=True, slots=True)
class RecordSearch:
    """The records to look for, as typed."""

    where: Annotated[
        str | None,
        option("--where", "SQL", "Records whose row meets this condition, such as: order_id = 17 (DuckDB's SQL)."),
    ] = None
    key: Annotated[str | None, option("--key", "KEY", "Records with this Kafka key.")] = None
    run: Annotated[str | None, option("--run", "RUN", "Records of the run with this in its id.")] = None
    window: Window = None
    number: Annotated[int, option("-n", "N", "Number of records to list.", min=1, show_default=True)] = 10

    def parse(self, dataset: Feed) -> Criteria | None:
        """Returns None if nothing is asked for. Raises UsageError."""
        if not (self.where or self.run or self.window) and self.key is None:
            return None
        from sluice.pipelines.operating.record_search import Criteria

        if self.where and self.key is not None:
            raise UsageError("--where together with --key", remedy="write the key as a condition: kafka_key = '17'")
        windows = frozenset(w for text in self.window or () for w in parsing.windows(text, dataset.window))
        keys = () if self.key is None else (self.key,)
        return Criteria(self.where or "", keys, run=self.run or "", windows=windows)


def explain(session: Session, feed: FeedName, coordinates: RecordArgument = None, *, wanted: RecordSearch) -> int:
    """Show where a record landed, or why it did not.

    It reads the ledger and the files, not Kafka's records (see sluice peek). It also shows where a republish sent the
    record, or where a republished record came from, and the same offset of a topic that was created again.

    Without an offset it searches landed and quarantined records by --where, --key, --run and --window together, in all
    lives of the topics. Exit 1 if no record matches.

    $ sluice explain orders orders:0:150
    $ sluice explain orders --where "order_id = 17"
    $ sluice explain orders --run 3f0c2a9d --window 2026-11-20T14 -n 3
    """
    from sluice.pipelines.operating.trace_record import trace_matches, trace_record

    if ":" in feed:
        raise UsageError(f"a record in place of a feed: {feed}", remedy="write sluice explain FEED T:P:OFFSET")
    dataset = session.find_dataset(feed)
    criteria = wanted.parse(dataset)
    if (coordinates is None) == (criteria is None):
        problem = "an offset together with a search" if coordinates else "neither an offset nor a search"
        raise UsageError(problem, remedy="add T:P:OFFSET, or --where, --key, --run, --window")
    with session.open_ports(dataset) as ports:
        if criteria is None:
            first, *earlier = trace_record(dataset, ports, *parsing.parse_record(coordinates or ""))
            session.terminal.show(*(line for trace in (first, *earlier) for line in _view(trace)))
            session.terminal.print_document(
                first.explanation,
                record=_build_record(first),
                republished=first.sent,
                earlier=[_build_document(t) for t in earlier],
            )
            return 0
        from sluice.pipelines.operating.record_search import search

        with session.terminal.progress() as meter:
            matches = search(dataset, ports, criteria, meter)
        traces = list(trace_matches(dataset, ports, matches, wanted.number))
    session.terminal.show(*view_matches(dataset, matches, f"Records of {dataset.dataset}"), *_view_list(feed, traces))
    session.terminal.print_document(matches, feed=dataset.dataset, records=[_build_document(t) for t in traces])
    return 0 if matches.records else 1


def _build_record(trace: RecordTrace) -> dict[str, Any] | None:
    return None if trace.row is None else typed_fields(trace.row) or record_document(rows(trace.row)[0])


def _build_document(trace: RecordTrace) -> dict[str, Any]:
    return to_document(trace.explanation) | {
        "record": _build_record(trace),
        "republished": [to_document(m) for m in trace.sent],
    }


def _view(trace: RecordTrace) -> Iterator[RenderableType]:
    explanation = trace.explanation
    yield heading(f"{explanation.tp}:{explanation.offset}", str(explanation.class_))
    yield f"  {explanation.text}"
    if trace.row is not None:
        fields = typed_fields(trace.row)
        yield typed_view(fields) if fields else record_view(rows(trace.row))
    yield from (good(f"republish {m.republish} sent {m.from_} to {m.to}") for m in trace.sent)


def _view_list(feed: str, traces: list[RecordTrace]) -> Iterator[RenderableType]:
    if len(traces) == 1:
        yield from _view(traces[0])
    elif traces:
        explanations = [t.explanation for t in traces]
        lines = [
            (f"{e.tp}:{e.offset}", str(e.class_), count(e.batch or 0), e.text.partition(": ")[2]) for e in explanations
        ]
        yield table(("record", "class", "batch", "place"), lines, right="batch")
        yield Text.assemble(("  → ", "bold"), f"a record: sluice explain {feed} {lines[0][0]}")
    else:
        yield Text.assemble(("  → ", "bold"), f"batches that were refused, or are not finished: sluice status {feed}")
