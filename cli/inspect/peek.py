"""`sluice peek`: records as they are in Kafka, also those that no consumer would get."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.options import parsing
from sluice.cli.terminal.output import heading
from sluice.cli.terminal.record_view import build_document as record_document
from sluice.cli.terminal.record_view import rows, typed_fields
from sluice.cli.terminal.record_view import view as record_view
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import FeedError, UnknownTopic, UsageError
from sluice.pipelines.model.kafka import Isolation, PartitionState, TopicPartition
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.util.documents import document_of

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ports import Fetched
    from sluice.pipelines.records.kafka_batches.decode import BatchDecoder

STABLE, ABORTED, OPEN = "", "aborted", "not stable yet"
SHOWN = 10
"""How many records, by default."""
_BYTES = 1 << 20


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
        int | None,
        typer.Option(
            "-n",
            metavar="N",
            min=1,
            max=100_000,
            help="Number of records. Default: 10, or no limit with --follow.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new stable records until Ctrl-C.")] = False,
    feed: Annotated[
        str | None,
        typer.Option(
            "--feed",
            metavar="FEED",
            help="The feed whose Kafka to read.",
            show_default=False,
            autocompletion=completers.complete_feeds,
        ),
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
    tp, offset = parsing.parse_record(start)
    source = session.feed(feed) if feed else _find_reader(session, tp.topic)
    if follow:
        _follow(session, source, tp, offset, number)
        return
    with session.terminal.working("reading"):
        partition = _partition(source, tp)
        _check(offset, partition)
        records = list(_read(source, partition, offset, number or SHOWN))
    session.terminal.show(*_view(tp, partition, records))
    session.terminal.print_document(
        document_of(partition, "topic=tp.topic partition=tp.partition log_start last_stable_offset high_watermark")
        | {"records": [_build_document(r) for r in records]}
    )


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


@dataclass(frozen=True, slots=True)
class PeekedRecord:
    """One record with Spark's Kafka columns, and what read_committed makes of it."""

    row: dict[str, Any]
    state: str
    fields: dict[str, Any] | None = None
    """The record's columns by the feed's schema; None without a schema."""


def _build_document(record: PeekedRecord) -> dict[str, Any]:
    fields = {"fields": record.fields} if record.fields is not None else {}
    return record_document(record.row) | fields | {"state": record.state or "stable"}


def _find_reader(session: Session, topic: str) -> Feed:
    """A feed that reads the topic, or any feed if all read one Kafka. Raises UsageError, also if feeds read the topic
    in several, and FeedError where no feed is known to read it, and files are wrong."""
    feeds, broken = list(session.files.feeds.values()), session.files.broken
    reading = [f for f in feeds if _is_read_by(f, topic)]
    if broken and not reading:
        wrong = ", ".join(path.name for path in broken)
        raise FeedError(
            f"no valid feed reads {topic}, and these feed files are invalid: {wrong}",
            remedy="see sluice feeds check, or choose a feed of that Kafka with --feed NAME",
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


def _is_read_by(feed: Feed, topic: str) -> bool:
    from sluice.pipelines.feed.topic_selection import match

    if feed.topics.names:
        return topic in feed.topics.names
    try:
        return bool(match(feed.topics, {topic: ""}))
    except UnknownTopic:
        return False


def _partition(feed: Feed, tp: TopicPartition) -> PartitionState:
    """The partition under read_committed: the end of the log is the last stable offset."""
    from sluice.resources.kafka.cluster.cluster import KafkaCluster

    with closing(KafkaCluster(feed.kafka)) as cluster:
        partitions = cluster.partitions([tp.topic], Isolation.READ_COMMITTED)
    for partition in partitions:
        if partition.tp == tp:
            return partition
    raise UsageError(f"{tp.topic} has no partition {tp.partition}", remedy=f"it has 0 to {len(partitions) - 1}")


def _check(offset: int, partition: PartitionState) -> None:
    if not partition.log_start <= offset < partition.high_watermark:
        available = f"[{count(partition.log_start)}, {count(partition.high_watermark)})"
        raise UsageError(
            f"{partition.tp} has offsets {available}, not {count(offset)}",
            remedy="choose one of these offsets; sluice explain shows landed records",
        )


def _read(feed: Feed, p: PartitionState, offset: int, number: int) -> Iterator[PeekedRecord]:
    """The first `number` records from `offset` on: the stable ones, then the unstable ones."""
    total = 0
    for isolation, end in (
        (Isolation.READ_COMMITTED, p.last_stable_offset),
        (Isolation.READ_UNCOMMITTED, p.high_watermark),
    ):
        if total == number or offset >= end:
            continue
        piece = OffsetRange(p.topic, p.partition, p.topic_id, offset, end, p.leader_epoch)
        for records in _peek(feed, piece, isolation, number - total):
            total += 1
            yield records
        offset = end


def _peek(feed: Feed, piece: OffsetRange, isolation: Isolation, number: int) -> Iterator[PeekedRecord]:
    """The offset range's first records. Stable ones are decoded twice, as they are and as read_committed shows them."""
    committed = isolation is Isolation.READ_COMMITTED
    every, visible_decoder = _make_decoder(piece, committed=False), _make_decoder(piece, committed=True)
    chunks: list[pa.RecordBatch] = []
    visible: set[int] = set()
    for fetched in _fetch(feed, piece, isolation):
        chunks += every.feed(fetched.records, fetched.aborted)
        if committed:
            visible.update(_list_offsets(visible_decoder.feed(fetched.records, fetched.aborted)))
        if every.counts.records >= number:
            break
    chunks += every.finish()
    visible.update(_list_offsets(visible_decoder.finish()))
    hidden = ABORTED if committed else OPEN
    read = _read_by_schema(feed, chunks, piece) if feed.readers else {}
    for row in _build_rows(chunks, piece, number):
        yield PeekedRecord(row, STABLE if row["offset"] in visible else hidden, read.get(row["offset"]))


def _read_by_schema(feed: Feed, chunks: Sequence[pa.RecordBatch], piece: OffsetRange) -> dict[int, dict[str, Any]]:
    """Returns the records as the feed reads them, by offset; for those that do not fit, the reason."""
    import pyarrow as pa

    from sluice.resources.lake import open_lake
    from sluice.resources.registry.confluent import writers_of

    form = replace(feed.shape, contract=None).format(writers_of(feed, open_lake(feed), keep=False))
    by_offset: dict[int, dict[str, Any]] = {}
    for converted in (m for chunk in chunks for m in form.convert(piece, chunk)):
        for row in (converted.landed.slice(i, 1) for i in range(converted.landed.num_rows)):
            fields = typed_fields(pa.Table.from_batches([row])) or {}
            own = {name: value for name, value in fields.items() if not name.startswith(("kafka_", "_extra"))}
            if not fields["kafka_tombstone"]:
                by_offset[fields["kafka_offset"]] = own
        if converted.quarantined is not None:
            for refused in converted.quarantined.select(["offset", "reason", "field", "detail"]).to_pylist():
                by_offset[refused.pop("offset")] = {"refused": refused}
    return by_offset


def _fetch(feed: Feed, piece: OffsetRange, isolation: Isolation) -> Iterator[Fetched]:
    from sluice.pipelines.model.kafka import FetchLimits
    from sluice.pipelines.ports import FetchFailed
    from sluice.resources.kafka.fetch.fetch import KafkaFetcher

    with closing(KafkaFetcher(feed.kafka, isolation)) as fetcher:
        for answer in fetcher.stream([piece], FetchLimits(1, _BYTES, _BYTES, _BYTES)):
            if isinstance(answer, FetchFailed):
                raise answer.error
            yield answer


def _make_decoder(piece: OffsetRange, *, committed: bool) -> BatchDecoder:
    from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions

    position = (piece.topic, piece.partition, piece.start, piece.end)
    return BatchDecoder(*position, DecodeOptions(committed, chunk_rows=10_000, chunk_bytes=_BYTES))


def _list_offsets(chunks: Iterable[pa.RecordBatch]) -> Iterator[int]:
    for chunk in chunks:
        yield from chunk.column("offset").to_pylist()


def _build_rows(chunks: Sequence[pa.RecordBatch], piece: OffsetRange, number: int) -> list[dict[str, Any]]:
    import pyarrow as pa

    if not chunks:
        return []
    records = rows(pa.Table.from_batches(chunks).slice(0, number))
    return [{**row, "topic": piece.topic, "partition": piece.partition} for row in records]


def _as_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _view(tp: TopicPartition, p: PartitionState, records: Sequence[PeekedRecord]) -> list[RenderableType]:
    note = f"log [{count(p.log_start)}, {count(p.high_watermark)}), last stable offset {count(p.last_stable_offset)}"
    states = [r.state for r in records]
    read = [r.row if r.fields is None else r.row | {"value": _as_json(r.fields)} for r in records]
    parts = record_view(read, states if any(states) else None)
    return [heading(str(tp), note), parts if records else "  no more records"]
