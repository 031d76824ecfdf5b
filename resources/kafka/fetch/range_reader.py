"""Reads one offset range from start to end, following the leader of its partition.

Promises: bytes come in order and without gap; control and aborted records are skipped only when the leader confirms
them; each leader epoch is checked against the range before it is read from (KIP-320), the topic id before the first and
after the last fetch. It ends with one of `sluice.pipelines.errors`, or after the last byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kafka.errors import (
    KafkaError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)

from sluice.pipelines.errors import LogTruncated, OffsetsLost, SluiceError, TopicRecreated
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.traffic import BrokerTraffic
from sluice.pipelines.ports import Fetched
from sluice.pipelines.records.kafka_batches.decode import next_position
from sluice.resources.kafka.connection.connections import Patience
from sluice.resources.kafka.fetch.broker_sessions import Sources
from sluice.resources.kafka.protocol.messages import FetchAsk, FetchPart, Leadership

_EMPTY_FOR_A_GAP = 2
_UNKNOWN_TOPIC_TRIES = 4
_LEAST_BYTES = 64 << 10
_AGAIN = "run again: what is owed is held against the log as it is now, and the command that accepts it is named"

E = TypeVar("E", bound=SluiceError)


class SliceReader:
    """Reads one range. `index`: its position in the stream; `emit`: takes its bytes; `patience`: seconds without
    progress."""

    def __init__(
        self, sources: Sources, index: int, piece: Slice, emit: Callable[[Fetched], None], patience: float
    ) -> None:
        self._sources = sources
        self._index = index
        self._slice = piece
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
                if self._position >= self._slice.end:
                    await self._confirm()
                    self._emit(Fetched(self._index, b"", (), self._position, last=True))
                    return
                await self._step(leadership)
            except KafkaError as error:
                leadership = None
                await self._trouble(error)

    # -- leader and checks

    async def _settle(self) -> Leadership:
        leadership = await self._sources.place(self._slice.tp, fresh=self._must_ask_again)
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

        The bytes read count under one id only.
        """
        self._same_topic(await self._sources.place(self._slice.tp, fresh=True))

    def _same_topic(self, leadership: Leadership) -> None:
        if leadership.topic_id != self._slice.key.topic_id:
            raise self._refusal(
                TopicRecreated,
                f"topic {self._slice.topic} was deleted and created again: planned under id"
                f" {self._slice.key.topic_id}, now {leadership.topic_id}",
                self._slice.start,
                self._slice.end,
                remedy=_AGAIN,
            )

    async def _not_truncated(self, leadership: Leadership) -> None:
        """Check that the range's leader epoch does not end before the range does: the log must still hold it."""
        epoch = self._slice.leader_epoch if self._slice.leader_epoch >= 0 else leadership.leader_epoch
        end = await self._sources.epoch_end(leadership, epoch)
        if 0 <= end < self._slice.end:
            raise self._truncation(f"leader epoch {epoch} ends at {end}", end)

    async def _in_range(self, leadership: Leadership) -> None:
        log_start, high_watermark = await self._sources.bounds(leadership)
        if self._position < log_start:
            raise self._refusal(
                OffsetsLost,
                f"{self._slice.tp}: offsets [{self._position}, {log_start}) are gone from Kafka,"
                f" its log starts at {log_start}; {self._slice} was to be read",
                self._position,
                log_start,
                remedy=_AGAIN,
            )
        if self._position > high_watermark:
            raise self._truncation(f"the log ends at {high_watermark}, {self._position} was next", high_watermark)

    # -- reading

    async def _step(self, leadership: Leadership) -> None:
        node = leadership.leader if self._replica is None else self._replica
        lane = self._sources.lane(node, "" if self._leader_only else self._sources.rack)
        part, first = await lane.fetch(FetchAsk(leadership, self._position, self._appetite()), self._fed)
        if part.error:
            raise part.error()
        self._sources.counter.saw_end(self._slice.tp, part.high_watermark)
        position = next_position(part.records, self._position, self._slice.topic, self._slice.partition)
        if position > self._position:
            self._advance(part, position)
        else:
            self._sources.budget.change(-len(part.records))
            self._nothing_new(part, first)

    def _advance(self, part: FetchPart, position: int) -> None:
        self._emit(Fetched(self._index, part.records, part.aborted, position, last=False))
        self._position = position
        self._seen_bytes += len(part.records)
        self._fed = self._sources.next_answer()
        self._empty_answers = self._unknown_answers = 0
        self._patience.progress()

    def _appetite(self) -> int:
        """Estimate the bytes of the remaining range: those fetched beyond its end are wasted."""
        advanced = self._position - self._slice.start
        size, span = (self._seen_bytes, advanced) if advanced else (self._slice.estimated_bytes, self._slice.span)
        limit = self._sources.limits.partition_bytes
        if not size or not span:
            return limit
        rest = (self._slice.end - self._position) * size // span
        return min(limit, rest + rest // 16 + _LEAST_BYTES)

    def _nothing_new(self, part: FetchPart, first: bool) -> None:
        """Handle an answer without a batch.

        Another broker is better placed, or this one has no batch up to the range's end, or none yet.
        """
        if part.replica >= 0 and not self._leader_only:
            self._replica = part.replica
            return
        committed = self._sources.isolation is Isolation.READ_COMMITTED
        if self._replica is not None or (part.stable_end if committed else part.high_watermark) < self._slice.end:
            raise OffsetNotAvailableError("it does not have these offsets yet")
        # The first partition gets a batch if there is one below the last stable offset (KIP-74). So an empty answer
        # means that compaction left none: a broker sends whole batches, and none covers the end of such a gap. Asked
        # twice, because a broker that just started may not know yet how far it may read.
        self._empty_answers += first
        if self._empty_answers >= _EMPTY_FOR_A_GAP:
            self._position = self._slice.end

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
            f"{self._slice.tp}: the log was truncated ({how}), {self._slice} was to be read",
            end,
            self._slice.end,
            remedy=_AGAIN,
        )

    def _refusal(self, kind: type[E], message: str, start: int, end: int, remedy: str) -> E:
        return kind(
            message,
            remedy=remedy,
            topic=self._slice.topic,
            partition=self._slice.partition,
            start=start,
            end=end,
        )
