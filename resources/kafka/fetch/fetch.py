"""The Fetcher port: raw record bytes of offset ranges, fetched ahead of the decoder.

Promises: ranges start in order, `active_ranges` at once, those of one partition one after another; the bytes buffered
ahead of the consumer stay within `ahead_bytes`, except for one answer when nothing else is buffered (a record batch
comes whole, whatever its size). A quarter of these are of answers that reach into a partition's next range, which is
read from them. Bytes of a range come in order and without gap; offsets without a batch are passed over
only when the leader confirms that there is none; each leader epoch is checked before it is read from (KIP-320), the
topic id before the first and after the last fetch. Each range ends with either one `last` or one FetchFailed. Closing
ends thread and connections.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from kafka.errors import (
    KafkaError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)

from sluice.pipelines.errors import KafkaUnavailable, LogTruncated, OffsetsLost, SluiceError, TopicRecreated
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import BrokerTraffic, TaskTraffic
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.pipelines.records.kafka_batches.decode import find_batches, next_position
from sluice.pipelines.util.grouping import group_by
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Patience, Wire
from sluice.resources.kafka.fetch.broker_sessions import Sources, TrafficCounter, find_local_starts
from sluice.resources.kafka.protocol.kafka_errors import AnswerLost, Location, NoRecordsReturned, is_passing
from sluice.resources.kafka.protocol.messages import FetchAsk, FetchPart, Leadership

_ANSWER_BYTES = 1 << 30
"""The largest accepted answer: a fetch of the request's size, or one record batch of any size in use."""
_LIVELY = 5.0  # seconds between checks that the background thread is alive
_SHARE_TOLD = 8  # consumed bytes are reported to the fetching thread by this share of `ahead_bytes`, or when we wait


class KafkaFetcher:
    """Fetches offset ranges of one Kafka. Opens no connection before a stream is consumed.

    `isolation` as in the plan; `rack` (client.rack, KIP-392) lets a leader send us to a replica near us; `patience`:
    seconds without progress after which a range fails with KafkaUnavailable. After that, later ranges of its partition
    are tried without waiting, as are all others until something is read again.
    """

    def __init__(self, access: KafkaAccess, isolation: Isolation, *, rack: str = "", patience: float = 60.0) -> None:
        self._access = access
        self._isolation = isolation
        self._rack = rack
        self._patience = patience
        self._streams: set[_Stream] = set()
        self._counter = TrafficCounter()

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """Yield bytes of the ranges from their leaders, fetched ahead in a thread that starts with the first `next`.

        `aborted` of each item is the broker's list under read_committed: transactions (producer id, first offset) that
        were aborted and overlap its bytes. Close the iterator, or the fetcher, to end early.
        """
        wire = Wire(self._access, _ANSWER_BYTES)
        rack = "" if limits.leaders_only else self._rack
        stream = _Stream(Sources(wire, self._isolation, limits, rack, self._counter), ranges, self._patience)
        self._streams.add(stream)
        try:
            yield from stream.items()
        finally:
            self._streams.discard(stream)
            stream.close()

    def traffic(self) -> TaskTraffic:
        """Return the traffic of all streams of this fetcher."""
        return self._counter.total()

    def close(self) -> None:
        """End every stream; a pending `next` raises KafkaUnavailable."""
        for stream in list(self._streams):
            stream.close()


class _End:
    pass


class Rest(NamedTuple):
    """Record batches of an answer, its number and the leader that was asked. Of answers with aborted transactions there
    is none: which batches these cover is known only from the first batch on. `is_copy`: they hold no other memory."""

    leadership: Leadership
    answer: int
    records: memoryview
    is_copy: bool = False


class _Stream:
    """One thread's readers on one side, one consumer on the other, a queue between them."""

    def __init__(self, sources: Sources, ranges: Sequence[OffsetRange], patience: float) -> None:
        self._sources = sources
        self._patience = patience
        pieces = group_by(enumerate(ranges), lambda item: item[1].tp)
        self._waiting = {tp: deque(items) for tp, items in pieces.items()}
        """By partition, the ranges that have not begun, each with its index."""
        self._ready = [(items[0][0], tp) for tp, items in pieces.items()]
        """A heap of the partitions that may be read: the index of the next range, and the partition."""
        self._rests: dict[TopicPartition, Rest] = {}
        self._adjacent: dict[int, tuple[OffsetRange | None, int]] = {}
        """By index, the partition's next range, if it begins where this one ends, and estimated bytes from there on."""
        later: dict[TopicPartition, int] = {}
        for index in reversed(range(len(ranges))):
            piece, at = ranges[index], later.get(ranges[index].tp)
            if at is not None and ranges[at].start == piece.end:
                self._adjacent[index] = ranges[at], ranges[at].estimated_bytes + self._adjacent.get(at, (None, 0))[1]
            later[piece.tp] = index
        # Half of the room: the batch at an answer's end comes whole.
        self._share = sources.limits.kept_bytes // (2 * max(len(later), 1))
        self._active = 0
        self._given_up: set[TopicPartition] = set()
        self._answers_then = -1
        self._taken = 0
        self._queue: queue.SimpleQueue[Fetched | FetchFailed | BaseException | _End] = queue.SimpleQueue()

    def items(self) -> Iterator[Fetched | FetchFailed]:
        """Yield the items of the readers until all have ended."""
        self._sources.wire.post(self._admit)
        while True:
            start = time.perf_counter_ns()
            item = self._next()
            match item:
                case Fetched():
                    self._take(len(item.records))
                    yield replace(item, waited_ns=time.perf_counter_ns() - start)
                case FetchFailed():
                    yield item
                case _End():
                    return
                case error:
                    raise error

    def close(self) -> None:
        self._queue.put(
            KafkaUnavailable("the stream was closed while it was being read", remedy="read the offset ranges again")
        )
        self._sources.wire.close()

    def _next(self) -> Fetched | FetchFailed | BaseException | _End:
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        self._give_back()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_LIVELY)
            if not self._sources.wire.alive:
                raise KafkaUnavailable("the thread that fetches has died", remedy="read the offset ranges again")

    def _take(self, size: int) -> None:
        """Report consumed bytes of several items at once: waking the other thread costs more than a small range's
        bytes."""
        self._taken += size
        if self._taken * _SHARE_TOLD >= self._sources.limits.ahead_bytes:
            self._give_back()

    def _give_back(self) -> None:
        if self._taken:
            self._sources.budget.release(self._taken)
            self._taken = 0

    # -- on the background thread

    def _admit(self) -> None:
        """Start the ranges that may start; end the stream when nothing is left."""
        while self._ready and self._active < self._sources.limits.active_ranges:
            _, tp = heappop(self._ready)
            item = self._waiting[tp].popleft()
            self._active += 1
            # An unexpected error is a bug: the consumer must see it instead of waiting without end.
            self._sources.wire.spawn(self._read, *item).add_errback(self._queue.put)
        if not self._active:
            self._queue.put(_End())

    async def _read(self, index: int, piece: OffsetRange) -> None:
        following, later_bytes = self._adjacent.get(index, (None, 0))
        patience, ahead = self._patience_with(piece.tp), min(later_bytes, self._share)
        reader = RangeReader(self._sources, index, piece, self._queue.put, patience, ahead)
        reader.rest = self._rests.pop(piece.tp, None)
        try:
            await reader.run()
            if reader.rest and following:
                self._keep(reader.rest, following)
        except SluiceError as error:
            self._queue.put(FetchFailed(index, error))
        except (KafkaError, OSError, ValueError) as error:
            if is_passing(error):
                self._given_up.add(piece.tp)
                self._answers_then = self._sources.answers
            self._queue.put(FetchFailed(index, self._explain(error, piece, reader.position)))
        self._active -= 1
        if waiting := self._waiting[piece.tp]:
            heappush(self._ready, (waiting[0][0], piece.tp))
        self._admit()

    def _keep(self, rest: Rest, piece: OffsetRange) -> None:
        """Keep the batches for the next range, if there is room. Copy them out of an answer of several partitions."""
        batches, _ = find_batches(rest.records, piece.start)
        total = sum(len(other.records) for other in self._rests.values())
        if len(batches) and total + len(batches) <= self._sources.limits.kept_bytes:
            own = batches if rest.is_copy else memoryview(bytes(batches))
            self._rests[piece.tp] = rest._replace(records=own, is_copy=True)

    def _patience_with(self, tp: TopicPartition) -> float:
        """Return the patience for a range: 0 if waiting just failed, or each range of a dead leader would take its
        time."""
        vain = tp in self._given_up or self._sources.answers == self._answers_then
        return 0.0 if vain else self._patience

    def _explain(self, error: BaseException, piece: OffsetRange, position: int) -> SluiceError:
        where = Location(piece.topic, piece.partition, position, piece.end)
        return self._sources.wire.explain(error, f"reading {piece.tp} at {position}", where)


_EMPTY_FOR_A_GAP = 2
_UNKNOWN_TOPIC_TRIES = 4
_LEAST_BYTES = 64 << 10
_AGAIN = "run again: pending offsets are compared with the current log, and the error names the command to accept it"

E = TypeVar("E", bound=SluiceError)


class RangeReader:
    """Reads one range. `index`: its position in the stream; `emit`: takes its bytes; `patience`: seconds without
    progress; `ahead`: bytes to fetch beyond its end, for the next ranges."""

    def __init__(
        self,
        sources: Sources,
        index: int,
        piece: OffsetRange,
        emit: Callable[[Fetched], None],
        patience: float,
        ahead: int = 0,
    ) -> None:
        self.rest: Rest | None = None
        """The batches of the last answer: before the first request, of an earlier range's."""
        self._beyond = max(ahead, _LEAST_BYTES)
        self._sources = sources
        self._index = index
        self._range = piece
        self._emit = emit
        self._patience = Patience(sources.wire, patience)
        self._position = piece.start
        self._fed = 0
        self._seen_bytes = 0
        self._validated_epoch: int | None = None
        self._must_ask_again = False
        self._maybe_out_of_range = False
        self._empty_answers = 0
        self._unknown_answers = 0
        self._replica: int | None = None
        self._leader: int | None = None
        self._leader_only = not sources.rack

    @property
    def position(self) -> int:
        return self._position

    async def run(self) -> None:
        """Emit all bytes, then one `last` without any. Raises SluiceError, or the kafka error that did not pass."""
        leadership: Leadership | None = None
        while True:
            try:
                if leadership is None:
                    leadership = await self._settle()
                if self._position >= self._range.end:
                    await self._confirm()
                    self._emit(Fetched(self._index, b"", (), self._position, last=True))
                    return
                await self._step(leadership)
            except KafkaError as error:
                leadership = None
                await self._trouble(error)

    # -- leader and checks

    async def _settle(self) -> Leadership:
        leadership = await self._sources.place(self._range.tp, fresh=self._must_ask_again)
        self._must_ask_again = False
        self._same_topic(leadership)
        if self._leader not in (None, leadership.leader):
            self._sources.counter.add(BrokerTraffic(self._leader, moved=1))
        self._leader = leadership.leader
        if leadership.leader_epoch != self._validated_epoch:
            await self._not_truncated(leadership)
            self._validated_epoch = leadership.leader_epoch
        if self._maybe_out_of_range:
            await self._in_range(leadership)
            self._maybe_out_of_range = False
        return leadership

    async def _confirm(self) -> None:
        """Check the topic id once more: a fetch by name (before Kafka 3.1) cannot detect a recreated topic.

        The bytes read count under one id only. It need not be requested again if it was since the last of them came.
        """
        checked = self._sources.checked.get(self._range.topic, 0)
        fresh = self.rest is None or checked < self.rest.answer
        self._same_topic(await self._sources.place(self._range.tp, fresh=fresh))

    def _same_topic(self, leadership: Leadership) -> None:
        if leadership.topic_id != self._range.key.topic_id:
            raise self._refusal(
                TopicRecreated,
                f"topic {self._range.topic} was deleted and created again: planned under id"
                f" {self._range.key.topic_id}, now {leadership.topic_id}",
                self._range.start,
                self._range.end,
                remedy=_AGAIN,
            )

    async def _not_truncated(self, leadership: Leadership) -> None:
        """Check that the range's leader epoch does not end before the range does: the log must still hold it."""
        epoch = self._range.leader_epoch if self._range.leader_epoch >= 0 else leadership.leader_epoch
        end = await self._sources.epoch_end(leadership, epoch, self._range.end)
        if 0 <= end < self._range.end:
            raise self._truncation(f"leader epoch {epoch} ends at {end}", end)

    async def _in_range(self, leadership: Leadership) -> None:
        log_start, high_watermark = await self._sources.bounds(leadership)
        if self._position < log_start:
            raise self._refusal(
                OffsetsLost,
                f"{self._range.tp}: offsets [{self._position}, {log_start}) are gone from Kafka,"
                f" its log starts at {log_start}; {self._range} was to be read",
                self._position,
                log_start,
                remedy=_AGAIN,
            )
        if self._position > high_watermark:
            raise self._truncation(f"the log ends at {high_watermark}, {self._position} was next", high_watermark)

    # -- reading

    async def _step(self, leadership: Leadership) -> None:
        if self.rest and self.rest.leadership == leadership:
            batches, position = find_batches(self.rest.records, self._position, self._range.end)
            if position > self._position:
                self._sources.budget.change(len(batches))  # the consumer releases them
                self._advance(batches, (), position, self.rest.answer)
                return
        self.rest = None
        node = leadership.leader if self._replica is None else self._replica
        lane = self._sources.lane(node, "" if self._leader_only else self._sources.rack)
        part, first = await lane.fetch(FetchAsk(leadership, self._position, self._appetite()), self._fed)
        try:
            if part.error:
                raise part.error()
            self._sources.counter.saw_end(self._range.tp, part.high_watermark)
            position = next_position(part.records, self._position, self._range.topic, self._range.partition)
        except BaseException:
            self._sources.budget.change(-len(part.records))  # the consumer never gets them
            raise
        if position > self._position:
            number, ends = self._sources.next_answer(), position >= self._range.end
            self.rest = Rest(leadership, number, part.records) if ends and not part.aborted else None
            self._advance(part.records, part.aborted, position, number)
        else:
            self._sources.budget.change(-len(part.records))
            await self._nothing_new(leadership, part, first)

    def _advance(self, records: memoryview, aborted: tuple[tuple[int, int], ...], position: int, answer: int) -> None:
        self._emit(Fetched(self._index, records, aborted, position, last=False))
        self._position = position
        self._seen_bytes += len(records)
        self._fed = answer
        self._empty_answers = self._unknown_answers = 0
        self._patience.progress()

    def _appetite(self) -> int:
        """Estimate the bytes of the remaining range: those fetched beyond its end are wasted."""
        advanced = self._position - self._range.start
        size, span = (self._seen_bytes, advanced) if advanced else (self._range.estimated_bytes, self._range.span)
        limit = self._sources.limits.partition_bytes
        if not size or not span:
            return limit
        rest = (self._range.end - self._position) * size // span
        return min(limit, rest + rest // 16 + self._beyond)

    async def _nothing_new(self, leadership: Leadership, part: FetchPart, first: bool) -> None:
        """Handle an answer without a batch.

        Another broker is better placed, or this one has no batch up to the range's end, or none yet.
        """
        if part.replica >= 0 and self._replica is None and not self._leader_only:
            self._replica = part.replica
            return
        committed = self._sources.isolation is Isolation.READ_COMMITTED
        if (
            self._replica is not None
            or (part.last_stable_offset if committed else part.high_watermark) < self._range.end
        ):
            raise OffsetNotAvailableError("it does not have these offsets yet")
        if first and len(part.records):
            raise AnswerLost("the broker sent no whole record batch")
        # The first partition gets a batch if there is one below the last stable offset (KIP-74). So an empty answer
        # means that compaction left none: a broker sends whole batches, and none covers the end of such a gap. Asked
        # twice, because a broker that just started may not know yet how far it may read.
        self._empty_answers += first
        if self._empty_answers >= _EMPTY_FOR_A_GAP:
            await self._check_gap(leadership)
            self._position = self._range.end

    async def _check_gap(self, leadership: Leadership) -> None:
        """Raise NoRecordsReturned unless compaction may have left no batch at the position."""
        starts = await find_local_starts(self._sources.wire.send, leadership.leader, [leadership])
        if self._position < starts[self._range.tp] or not await self._sources.may_compact(leadership):
            raise NoRecordsReturned

    # -- errors

    async def _trouble(self, error: KafkaError) -> None:
        self._must_ask_again = True
        self._empty_answers = 0
        if self._replica is not None:
            self._replica, self._leader_only = None, True
            return
        self._maybe_out_of_range = self._maybe_out_of_range or isinstance(error, OffsetOutOfRangeError)
        self._unknown_answers += isinstance(error, UnknownTopicOrPartitionError)
        if self._unknown_answers >= _UNKNOWN_TOPIC_TRIES:
            raise error
        await self._patience.trouble(OffsetNotAvailableError() if self._maybe_out_of_range else error)

    def _truncation(self, how: str, end: int) -> LogTruncated:
        return self._refusal(
            LogTruncated,
            f"{self._range.tp}: the log was truncated ({how}), {self._range} was to be read",
            end,
            self._range.end,
            remedy=_AGAIN,
        )

    def _refusal(self, kind: type[E], message: str, start: int, end: int, remedy: str) -> E:
        return kind(
            message,
            remedy=remedy,
            topic=self._range.topic,
            partition=self._range.partition,
            start=start,
            end=end,
        )
