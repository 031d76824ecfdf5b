"""Records as they are in Kafka, also those that no consumer would get: of aborted transactions, or not stable yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import FetchLimits, Isolation, PartitionState, TopicPartition
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.ports import Cluster, FetchFailed, Ports
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions
from sluice.pipelines.records.rows.protected import protect_records
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.split_format import SplitFormat

STABLE, ABORTED, OPEN = "", "aborted", "not stable yet"
_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Peeked:
    """Records of a partition, in the order of offsets.

    `tables` have Spark's Kafka columns, without values if the feed protects fields; `states` has what read_committed
    makes of each record. With a schema, `typed` has the rows as the feed reads them, and `refused`, by offset, the
    reason for each record that does not fit.
    """

    partition: PartitionState
    tables: list[pa.Table] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    typed: list[pa.Table] = field(default_factory=list)
    refused: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def peek(
    feed: Feed, ports: Ports, tp: TopicPartition, offset: int, number: int, writers: WriterSchemas | None = None
) -> Peeked:
    """Returns the first `number` records from `offset` on: the stable ones, then the unstable ones.

    Uses no group, and writes nothing if `writers` stores nothing. Raises UsageError for a partition or an offset that
    Kafka does not have.
    """
    p = _find_partition(ports.cluster, tp, offset)
    peeked, start = Peeked(p), offset
    # Without the contract: peek shows how the schema reads a record.
    form = replace(feed.shape, contract=None).format(writers)
    rest = form.rest if isinstance(form, SplitFormat) else form
    # The stable records with those of aborted transactions between them, then those above the last stable offset.
    for isolation, end, hidden in (
        (Isolation.READ_COMMITTED, p.last_stable_offset, ABORTED),
        (Isolation.READ_UNCOMMITTED, p.high_watermark, OPEN),
    ):
        missing = number - len(peeked.states)
        if not missing or start >= end:
            continue
        piece = OffsetRange(p.topic, p.partition, p.topic_id, start, end, p.leader_epoch)
        chunks, visible = _read(ports, piece, isolation, missing)
        if chunks:
            protected = [protect_records(rest, chunk, for_display=True) for chunk in chunks]
            records = pa.Table.from_batches(protected).slice(0, missing)
            peeked.tables.append(records)
            peeked.states.extend(STABLE if o in visible else hidden for o in records.column("offset").to_pylist())
        if feed.readers or feed.shape.protected:
            for converted in (m for chunk in chunks for m in form.convert(piece, chunk)):
                peeked.typed.append(pa.Table.from_batches([converted.landed]))
                if converted.quarantined is not None:
                    for refused in converted.quarantined.select(["offset", "reason", "field", "detail"]).to_pylist():
                        peeked.refused[refused.pop("offset")] = refused
        # The second pass begins where the first one had to stop: no record is read twice.
        start = end
    return peeked


def _find_partition(cluster: Cluster, tp: TopicPartition, offset: int) -> PartitionState:
    """The partition under read_committed: the end of the log is the last stable offset. It has the offset."""
    partitions = cluster.partitions([tp.topic], Isolation.READ_COMMITTED)
    p = next((p for p in partitions if p.tp == tp), None)
    if p is None:
        raise UsageError(f"{tp.topic} has no partition {tp.partition}", remedy=f"it has 0 to {len(partitions) - 1}")
    if not p.log_start <= offset < p.high_watermark:
        raise UsageError(
            f"{tp} has offsets [{p.log_start:,}, {p.high_watermark:,}), not {offset:,}",
            remedy="choose one of these offsets; sluice explain shows landed records",
        )
    return p


def _read(
    ports: Ports, piece: OffsetRange, isolation: Isolation, number: int
) -> tuple[list[pa.RecordBatch], frozenset[int]]:
    """Returns the first records of the range, and the offsets of those that read_committed shows.

    Stable records are decoded twice: as they are, and as read_committed shows them.
    """
    committed = isolation is Isolation.READ_COMMITTED
    position = (piece.topic, piece.partition, piece.start, piece.end)
    every, visible_decoder = (
        BatchDecoder(*position, DecodeOptions(visible, chunk_rows=10_000, chunk_bytes=_BYTES))
        for visible in (False, True)
    )
    chunks, visible = list[pa.RecordBatch](), list[pa.RecordBatch]()
    with ports.open_fetcher(isolation) as fetcher:
        for fetched in fetcher.stream([piece], FetchLimits(1, _BYTES, _BYTES, _BYTES)):
            if isinstance(fetched, FetchFailed):
                raise fetched.error
            chunks += every.feed(fetched.records, fetched.aborted)
            if committed:
                visible += visible_decoder.feed(fetched.records, fetched.aborted)
            if every.counts.records >= number:
                break
    chunks += every.finish()
    visible += visible_decoder.finish()
    return chunks, frozenset(o for chunk in visible for o in chunk.column("offset").to_pylist())
