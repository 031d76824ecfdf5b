"""`sluice peek`: records as they are in Kafka, also those that no consumer would get."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.terminal.output import heading
from sluice.cli.terminal.record_view import build_document as record_document
from sluice.cli.terminal.record_view import rows, typed_fields
from sluice.cli.terminal.record_view import view as record_view
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import FeedError, UsageError

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.kafka import PartitionState, TopicPartition
    from sluice.pipelines.operating.peek import Peeked

SHOWN = 10
"""How many records, by default."""
PeekedRecord = tuple[dict[str, Any], str, dict[str, Any] | None]
"""A record with Spark's Kafka columns, what read_committed makes of it, and its columns by the feed's schema."""


def register(app: typer.Typer) -> None:
    command(app)(peek)


def peek(
    session: Session,
    start: Annotated[
        str,
        typer.Argument(
            metavar="T:P:OFFSET",
            help="The first record.",
            show_default=False,
            autocompletion=completers.complete_partitions,
        ),
    ],
    number: Annotated[
        int | None, option("-n", "N", "Number of records. Default: 10, or no limit with --follow.", min=1, max=100_000)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new stable records until Ctrl-C.")] = False,
    feed: Annotated[
        str | None, option("--feed", "FEED", "The feed whose Kafka to read.", autocompletion=completers.complete_feeds)
    ] = None,
) -> None:
    """Show records in Kafka.

    Records of aborted transactions, and records above the last stable offset, are marked. Values are shortened, and
    control characters escaped; --json has full values, in base64. With a schema_file, values are decoded. No consumer
    group is used.

    --follow prints new records that the feed's isolation reads; with --json, one document per line.

    $ sluice peek orders:0:150 -n 3
    $ sluice peek orders:0:150 --json | jq -r '.records[].value | @base64d'
    $ sluice peek orders:0:150 --follow
    """
    from sluice.pipelines.operating.peek import peek as peek_records
    from sluice.resources.registry import writers_of

    tp, offset = parsing.parse_record(start)
    # Without a feed, the first that reads the topic: its Kafka, format and protection.
    source = session.feed(feed) if feed else _find_reader(session, tp.topic)
    if follow:
        _follow(session, source, tp, offset, number)
        return
    with session.terminal.working("reading"), session.open_ports(source) as ports:
        # A look writes nothing: schemas that the registry gives are not kept in the lake.
        writers = writers_of(source, ports.lake, keep=False)
        peeked = peek_records(source, ports, tp, offset, number or SHOWN, writers)
        records = list(_list_records(peeked))
    session.terminal.show(*_view(tp, peeked.partition, records))
    # Without a schema, a record has no `fields`.
    documents = [
        record_document(row) | ({} if fields is None else {"fields": fields}) | {"state": state or "stable"}
        for row, state, fields in records
    ]
    session.terminal.print_document(peeked.partition, records=documents)


def _follow(session: Session, feed: Feed, tp: TopicPartition, offset: int, number: int | None) -> None:
    """Records as they come, a table for each batch of them."""
    import pyarrow as pa

    from sluice.pipelines.feed.topic_selection import TopicFilter
    from sluice.streaming import StreamOptions, of_feed

    here = feed.model_copy(update={"topics": TopicFilter(names=(tp.topic,))})
    (stream,) = of_feed(here, 1, {str(tp): offset}, options=StreamOptions(follow=True))
    session.terminal.show(heading(str(tp), f"from {count(offset)} on; Ctrl-C stops it"))
    printed = 0
    with stream:
        for batch in stream:
            records = rows(pa.Table.from_batches([batch]))[: None if number is None else number - printed]
            session.terminal.show(record_view(records))
            for row in records:
                session.terminal.print_document(record_document(row))
            printed += len(records)
            if printed == number:
                return


def _list_records(peeked: Peeked) -> Iterator[PeekedRecord]:
    """The records as documents have them, with their columns by the feed's schema."""
    partition, fields = peeked.partition.tp._asdict(), dict[int, dict[str, Any]]()
    for row in (table.slice(i, 1) for table in peeked.typed for i in range(table.num_rows)):
        own = typed_fields(row) or {}
        if not own["kafka_tombstone"]:
            is_kafka = ("kafka_", "_extra")
            fields[own["kafka_offset"]] = {name: v for name, v in own.items() if not name.startswith(is_kafka)}
    fields |= {offset: {"refused": why} for offset, why in peeked.refused.items()}
    for row, state in zip((row for table in peeked.tables for row in rows(table)), peeked.states, strict=True):
        yield row | partition, state, fields.get(row["offset"])


def _find_reader(session: Session, topic: str) -> Feed:
    """A feed that reads the topic, or any feed if all read one Kafka. Raises UsageError, also if feeds read the topic
    in several, and FeedError where no feed is known to read it, and files are wrong."""
    feeds, broken = list(session.files.feeds.values()), session.files.broken
    reading = [f for f in feeds if f.topics.takes(topic)]
    if broken and not reading:
        wrong = ", ".join(path.name for path in broken)
        raise FeedError(
            f"no valid feed reads {topic}, and these feed files are invalid: {wrong}",
            remedy="see sluice feeds check; or choose a feed of that Kafka with --feed NAME",
        )
    if len({f.kafka.bootstrap for f in reading}) > 1:
        names = ", ".join(f"{f.name} ({f.kafka.bootstrap})" for f in reading)
        raise UsageError(
            f"several Kafkas have a topic {topic}: those of feeds {names}", remedy="choose one with --feed NAME"
        )
    if reading or len({f.kafka.bootstrap for f in feeds}) == 1:
        return (reading or feeds)[0]
    raise UsageError(
        f"no feed of this project reads {topic}, and --feed is missing",
        remedy="choose a feed of that Kafka with --feed NAME",
    )


def _view(tp: TopicPartition, p: PartitionState, records: Sequence[PeekedRecord]) -> list[RenderableType]:
    note = f"log [{count(p.log_start)}, {count(p.high_watermark)}), last stable offset {count(p.last_stable_offset)}"
    states = [state for _, state, _ in records]
    read = [
        row if fields is None else row | {"value": json.dumps(fields, ensure_ascii=False).encode()}
        for row, _, fields in records
    ]
    parts = record_view(read, states if any(states) else None)
    return [heading(str(tp), note), parts if records else "  no more records"]
