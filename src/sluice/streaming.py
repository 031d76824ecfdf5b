"""Records of a bounded or open range of a feed's topics, as Arrow batches, for notebooks and tests.

    for batch in sluice.stream("orders", "2026-11-20T14", "2026-11-20T15"):
        print(batch.num_rows)

Guarantee: each visible record of the range once, in offset order within a partition. A position never jumps and never
goes back: if Kafka deleted the next records, replaced the topic, or truncated the log below the position,
the next batch raises. No group is joined, nothing is committed and nothing is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from sluice.pipelines.errors import TopicRecreated, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.ledger import State
from sluice.pipelines.model import plans
from sluice.pipelines.model.kafka import FetchLimits, Isolation, PartitionState, TopicPartition
from sluice.pipelines.model.plans import Assignor, OffsetRange
from sluice.pipelines.planning.assignment import assign_ranges, round_robin
from sluice.pipelines.planning.origins import explain_out_of_range, find_key
from sluice.pipelines.ports import Fetcher, FetchFailed
from sluice.pipelines.quarantine.limit import Fault, kinds_of, rank_faults
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions
from sluice.pipelines.records.shape import RAW
from sluice.pipelines.util.units import join_first
from sluice.reading import When, instant
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.registry import writers_of

Place = When | Mapping[str, int]
"""`earliest`, `latest`, a time (as windows are written, ms, or a datetime), or offsets by partition (`orders:0`)."""

CHUNK_BYTES = 4 << 20
"""Decoded keys, values and headers of one partition that are held at a time."""
_LOOK_SECONDS = 0.5
"""Between two checks of the ends of exhausted logs."""
_SHARES = {Assignor.RANGE: assign_ranges, Assignor.ROUND_ROBIN: round_robin}


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream stands in one partition, as next offsets.

    `fetched` follows the bytes that Kafka sent. `consumed` follows the batches that you are done with: a batch counts
    once you ask for the one after it.
    """

    fetched: int
    consumed: int


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of `sluice.stream`: `follow` new records, for up to `timeout` seconds without any; `typed` columns."""

    follow: bool = False
    typed: bool = False
    timeout: float | None = None


def of_feed(
    feed: Feed,
    count: int,
    start: Place = "earliest",
    end: Place | None = None,
    options: StreamOptions = StreamOptions(),
    assignor: str = Assignor.RANGE,
) -> list[Stream]:
    """`count` streams of a feed that share the partitions of its topics; see `sluice.streams`."""
    if feed.protect and not options.typed:
        raise UsageError(
            f"{feed.name} protects fields, and records as they came would show them",
            remedy="stream typed columns: typed=True; or read the topic by a tool of Kafka's",
        )
    if options.follow and end is not None:
        raise UsageError("a stream that follows its topics has no end", remedy="leave out `end`, or `follow`")
    if count < 1:
        raise UsageError(f"{count} streams", remedy="ask for one or more")
    if options.typed and feed.split:
        raise UsageError(
            f"feed {feed.name} has `split`, and its outputs have no common columns",
            remedy="leave out `typed`: the stream has the records as they are",
        )
    if assignor not in _SHARES:
        raise UsageError(f"{assignor!r} shares no partitions among streams", remedy=f"one of {', '.join(_SHARES)}")
    with closing(KafkaCluster(feed.kafka)) as cluster:
        states = {p.tp: p for p in cluster.partitions(match(feed.topics, cluster.topics()), feed.isolation)}
        starts = _offsets(cluster, states, start, "start")
        ends = (
            {tp: p.last_stable_offset for tp, p in states.items()}
            if end is None
            else _offsets(cluster, states, end, "end")
        )
    # Partitions that were created after the start was given have no offset in it.
    chosen = sorted(starts.keys() & ends.keys())
    # An end below the start reads nothing.
    pieces = {tp: _piece(states[tp], starts[tp], max(starts[tp], ends[tp])) for tp in chosen}
    shares = _SHARES[Assignor(assignor)](chosen, count)
    return [Stream(feed, [pieces[tp] for tp in share], options) for share in shares]


class Stream:
    """An iterator of Arrow batches, each of one partition. Close it, or use it in a `with` block, to end early.

    Batches have the columns of Spark's Kafka source; `typed` ones those that the feed lands, without the records that
    do not fit (`refused` counts these). Not for two threads at once, but for `stop`.
    """

    def __init__(self, feed: Feed, pieces: Sequence[OffsetRange], options: StreamOptions) -> None:
        self._feed, self._pieces, self._options = feed, list(pieces), options
        self._format = (feed.shape if options.typed else RAW).format(
            writers_of(feed, open_lake(feed), keep=False) if options.typed else None
        )
        self._fetcher = KafkaFetcher(feed.kafka, feed.isolation, rack=feed.fetch.rack or "")
        self._stopped = threading.Event()
        self._fetched = {s.tp: s.start for s in pieces}
        self._consumed = dict(self._fetched)
        self._batches = self._read()
        self.refused = 0
        """Number of records that did not fit the feed's schema or contract."""
        self.faults: list[Fault] = []
        """The common faults of these, the most frequent first."""

    def __repr__(self) -> str:
        positions = join_first((f"{tp} at {at}" for tp, at in sorted(self._consumed.items())), 4, " … {:,} more")
        return f"Stream({self._feed.name}, {positions or 'nothing'})"

    @property
    def schema(self) -> pa.Schema:
        """Of the batches."""
        return self._format.schema

    @property
    def positions(self) -> dict[str, StreamPosition]:
        """By partition, spelled `orders:0`."""
        return {str(tp): StreamPosition(self._fetched[tp], at) for tp, at in self._consumed.items()}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        """The next batch. Raises OffsetsLost, LogTruncated, TopicRecreated, NotAuthorized, KafkaUnavailable; and
        StopIteration at the end, after `stop`, or when nothing came for `timeout` seconds."""
        return next(self._batches)

    def stop(self) -> None:
        """End the stream after the batch that is being made. Any thread may call it."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._batches.close()
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Generator[pa.RecordBatch, None, None]:
        pieces, waited = self._pieces, 0.0
        with closing(KafkaCluster(self._feed.kafka)) as cluster:
            while True:
                for batch in self._records([s for s in pieces if s.span]):
                    yield batch
                    if self._stopped.is_set():
                        return
                if not self._options.follow or self._stopped.is_set():
                    return
                began = time.monotonic()
                self._stopped.wait(_LOOK_SECONDS)
                pieces = self._grown(cluster, pieces)
                waited = 0.0 if any(s.span for s in pieces) else waited + time.monotonic() - began
                if self._options.timeout is not None and waited >= self._options.timeout:
                    return

    def _records(self, pieces: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
        if not pieces:
            return
        for s, fetched, chunk in decode_ranges(self._fetcher, pieces, self._feed.fetch.limits(), self._feed.isolation):
            self._fetched[s.tp] = fetched
            for piece in () if chunk is None else self._format.convert(s, chunk):
                self.refused += piece.dropped + (piece.quarantined.num_rows if piece.quarantined else 0)
                if piece.quarantined:
                    kinds = kinds_of(piece.quarantined)
                    more = [Fault(kind, n, f"{s.tp}:{first}") for kind, n, first in kinds]
                    self.faults = rank_faults([*self.faults, *more])
                if piece.landed.num_rows:
                    yield piece.landed
            self._consumed[s.tp] = s.end if chunk is None else chunk.column("offset")[-1].as_py() + 1

    def _grown(self, cluster: KafkaCluster, pieces: Sequence[OffsetRange]) -> list[OffsetRange]:
        """Returns new records' ranges in the same partitions. Raises if a log does not continue at our position."""
        if not pieces:
            return []
        states = {p.tp: p for p in cluster.partitions(sorted({s.topic for s in pieces}), self._feed.isolation)}
        return [_next_piece(s, states.get(s.tp)) for s in pieces]


def decode_ranges(
    fetcher: Fetcher, ranges: Sequence[OffsetRange], limits: FetchLimits, isolation: Isolation
) -> Iterator[tuple[OffsetRange, int, pa.RecordBatch | None]]:
    """Chunks of the offset ranges' visible records as they are decoded, each range's in offset order.

    Each comes with its range and the next offset to fetch there; one without a chunk ends the range. Raises the
    error that stops a range.
    """
    committed, decoders = isolation is Isolation.READ_COMMITTED, dict[int, BatchDecoder]()
    for got in fetcher.stream(ranges, limits):
        if isinstance(got, FetchFailed):
            raise got.error
        s = ranges[got.index]
        if got.index not in decoders:
            key = (s.topic, s.partition, s.start, s.end)
            options = DecodeOptions(read_committed=committed, chunk_bytes=CHUNK_BYTES)
            decoders[got.index] = BatchDecoder(*key, options)
        for chunk in decoders[got.index].feed(got.records, got.aborted):
            yield s, got.next_position, chunk
        if got.last:
            for chunk in decoders.pop(got.index).finish():
                yield s, s.end, chunk
            yield s, s.end, None


def _offsets(
    cluster: KafkaCluster, states: Mapping[TopicPartition, PartitionState], position: Place, what: str
) -> dict[TopicPartition, int]:
    """The offset that a place means in each partition; with offsets by partition, in these alone."""
    if isinstance(position, Mapping):
        return {
            tp: _check_retained(states, tp, at, what)
            for tp, at in ((plans.parse_partition(n), at) for n, at in position.items())
        }
    if position == "earliest":
        return {tp: p.log_start for tp, p in states.items()}
    if position == "latest":
        return {tp: p.last_stable_offset for tp, p in states.items()}
    offsets = cluster.offsets_at(dict.fromkeys(states, instant(position)))
    return {
        tp: min(at.offset if (at := offsets[tp]) else p.last_stable_offset, p.last_stable_offset)
        for tp, p in states.items()
    }


def _check_retained(states: Mapping[TopicPartition, PartitionState], tp: TopicPartition, at: int, what: str) -> int:
    if (p := states.get(tp)) is None:
        listed = ", ".join(map(str, sorted(states)[:6]))
        raise UsageError(f"{tp} is not a partition of this feed", remedy=f"its partitions are: {listed or 'none'}")
    if not hasattr(at, "__index__"):
        raise UsageError(f"{what} {at!r} of {tp} is no offset", remedy="write it as a whole number")
    if not p.log_start <= at <= p.last_stable_offset:
        raise UsageError(
            f"{what} {at} lies outside {tp}, which holds offsets [{p.log_start}, {p.last_stable_offset}) now",
            remedy="choose one of those, or earliest, or latest",
        )
    return at


def _piece(p: PartitionState, start: int, end: int) -> OffsetRange:
    return OffsetRange(p.topic, p.partition, p.topic_id, start, end, p.leader_epoch)


def _next_piece(s: OffsetRange, p: PartitionState | None) -> OffsetRange:
    if p is None or p.topic_id != s.incarnation:
        now = f"is {p.topic_id}" if p else f"it has no partition {s.partition} any more"
        raise TopicRecreated(
            f"{s.topic} is another topic now: its id was {s.incarnation} and {now}",
            remedy="start a new stream",
            topic=s.topic,
            partition=s.partition,
        )
    if wrong := explain_out_of_range(s.end, find_key(State(), p), p, ""):
        wrong.remedy = "start a new stream, from `earliest` or an offset that Kafka still has"
        raise wrong
    return _piece(p, s.end, max(s.end, p.last_stable_offset))
