"""The queue of batches for one topic, sent to the partitions' leaders.

    batches ─► waiting, by partition ─► rounds: each partition's first batch, one request a leader ─► offsets

Promises: a partition has one batch in flight, which keeps the order; a batch is retried with its own sequence numbers,
so that a lost answer duplicates nothing (KIP-98). Queued bytes are bounded: `put` blocks. The bound starts small, grows
while brokers keep up, and shrinks when they throttle, so that a transaction ends within its timeout. A throttling
broker gets nothing during the pause that it demands (KIP-219). A batch that is too large for the topic is split; a
record that the topic refuses is an error that names the record.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kafka import errors as kafka_errors
from kafka.errors import KafkaConnectionError, KafkaError, LeaderNotAvailableError, UnknownTopicOrPartitionError

from sluice.pipelines.errors import Unknown
from sluice.pipelines.ports import Delivered
from sluice.resources.kafka.connection.connections import Coordinators, Patience
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import TRANSACTION, Produced, ProducerId
from sluice.resources.kafka.protocol.kafka_errors import AnswerLost, error_text

if TYPE_CHECKING:
    from sluice.pipelines.records.kafka_batches.encode.accumulator import Numbering, SealedBatch

MAX_BYTES = 16 << 20
"""The largest limit, for batches that are queued or in flight."""
FIRST_BYTES = 2 << 20
THROTTLED_SECONDS = 5.0
"""The time in which a throttling broker must accept all buffered bytes; at most a quarter of a transaction."""


class Backpressure:
    """The limit of one producer, across its transactions.

    `bytes`: the current limit. `tight`: the last answer came from a throttling broker. `throttled_ms`: the total pause
    that brokers demanded; `until`: the end of the current pause (monotonic seconds).
    """

    def __init__(self, transaction_seconds: float) -> None:
        self._seconds = min(THROTTLED_SECONDS, transaction_seconds / 4)
        self.bytes = FIRST_BYTES
        self.tight = False
        self.throttled_ms = 0
        self.until = 0.0

    def record_answer(self, size: int, throttle_ms: int) -> None:
        """Adapt the limit after a broker accepted `size` bytes and demanded a pause."""
        self.tight = throttle_ms > 0
        self.throttled_ms += throttle_ms
        if self.tight:
            self.until = max(self.until, time.monotonic() + throttle_ms / 1000)
            self.bytes = min(self.bytes, int(size * self._seconds * 1000 / throttle_ms))
        else:
            self.bytes = min(self.bytes + size, MAX_BYTES)


REQUEST_BYTES = 8 << 20
"""Largest request of a round, unless one batch is larger."""
ROUNDS = 2
"""Concurrent rounds, each with its own partitions."""
WORTH_BYTES = 1 << 20
"""Queued bytes that start a round. Fewer wait for more, unless a caller waits for them."""
_LAYOUT_SECONDS = 300.0  # maximum age of cached leaders
_NEVER = -math.inf  # 0 would be a moment ago on a machine that has just booted
_MOST_SEQUENCE = 0x7FFFFFFF
_STRANGE = (  # the leader has lost the producer's state
    kafka_errors.OutOfOrderSequenceNumberError,
    kafka_errors.UnknownProducerIdError,
    kafka_errors.InvalidProducerEpochError,
)
TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
NOT_TAKEN = {
    kafka_errors.MessageSizeTooLargeError: "raise its max.message.bytes",
    kafka_errors.RecordListTooLargeError: "raise its segment.bytes",
    kafka_errors.InvalidTimestampError: "let it take such times (message.timestamp.after.max.ms and .before.max.ms), or"
    " set its message.timestamp.type to LogAppendTime",
    kafka_errors.InvalidRecordError: "a compacted topic takes none without a key: set its cleanup.policy to delete",
    kafka_errors.PolicyViolationError: "change the brokers' policy for the topic",
}
_MAYBE_THERE = (
    AnswerLost,
    kafka_errors.RequestTimedOutError,
    kafka_errors.NotEnoughReplicasAfterAppendError,
    kafka_errors.UnknownError,
)


class NotTaken(Exception):
    """The topic refuses the row with this number; `size` is its size in bytes, on average of its batch."""

    def __init__(self, error: type[KafkaError], number: int, partition: int, size: int) -> None:
        super().__init__(error_text(error()))
        self.error, self.number, self.partition, self.size = error, number, partition, size


class SendQueue:
    """Filled by one thread, sent by the background thread.

    A transactional producer sends in its transaction. Any other gets a new id from `renew` for a partition whose leader
    has lost the producer's state.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        producer: ProducerId,
        topic: str,
        seconds: float,
        renew: Callable[[], Awaitable[ProducerId]],
        backpressure: Backpressure,
    ) -> None:
        """`seconds`: the limit for absent leaders, and for a transaction."""
        self._coordinators, self._producer, self._topic = coordinators, producer, topic
        self._wire, self._seconds, self._renew = coordinators.wire, seconds, renew
        self._backpressure = backpressure
        self._sequences: dict[int, int] = {}
        self._renewed: dict[int, ProducerId] = {}
        self._maybe_there: set[int] = set()
        self._added: set[int] = set()
        self._leaders: dict[int, int] = {}
        self._looked = _NEVER
        self._changed = threading.Condition()
        # shared by both threads, under `_changed`
        self._waiting: dict[int, deque[SealedBatch]] = {}
        self._busy: set[int] = set()
        self._held = self._under_way = self._rounds = 0
        self._stopped = self._awaited = False
        self._error: BaseException | None = None
        self._delivered: list[Delivered] = []

    def put(self, batch: SealedBatch) -> None:
        """Queue a batch; block while the queue is full. Raises the error that stopped the sending."""
        with self._changed:
            self._wait_until(lambda: not self._held or self._held + batch.size <= self._backpressure.bytes)
            self._waiting.setdefault(batch.partition, deque()).append(batch)
            self._held += batch.size
            self._begin()

    def take_deliveries(self) -> list[Delivered]:
        """Return the deliveries since the last call."""
        with self._changed:
            delivered, self._delivered = self._delivered, []
            return delivered

    def finish(self) -> list[Delivered]:
        """Wait until everything is delivered; return the deliveries since the last call."""
        with self._changed:
            self._wait_until(lambda: not self._held and not self._rounds)
        return self.take_deliveries()

    def begin_another(self) -> None:
        """Start the next transaction."""
        self._added.clear()

    def stop(self) -> None:
        """Stop sending, and wait for rounds in flight, so that none of their batches arrives after an abort."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._rounds, self._seconds)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition while any queued batch starts a round. Raises the error that stopped the sending."""
        self._awaited = True
        while self._error is None and not done():
            self._begin()
            self._changed.wait()
        self._awaited = False
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        """Start a round if there are batches for it."""
        if (
            self._rounds < (1 if self._backpressure.tight else ROUNDS)
            and self._worth
            and any(p not in self._busy for p in self._waiting)
        ):
            self._wire.spawn(self._send)  # raises if the connections are closed
            self._rounds += 1

    @property
    def _worth(self) -> bool:
        return self._awaited or self._held - self._under_way >= WORTH_BYTES

    # -- on the background thread

    async def _send(self) -> None:
        """Run rounds until no idle partition has a batch."""
        try:
            while heads := self._heads():
                taken, size = set(heads), sum(b.size for b in heads.values())
                await self._run_round(heads)
                with self._changed:
                    self._busy -= taken
                    self._under_way -= size
        except BaseException as error:
            with self._changed:
                ended = error if isinstance(error, Exception) else KafkaConnectionError("the connection was closed")
                self._error = self._error or ended
                self._rounds -= 1
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    def _heads(self) -> dict[int, SealedBatch]:
        """Return the first batches of idle partitions, as many as fit in a round; none if no round is due."""
        heads: dict[int, SealedBatch] = {}
        size = 0
        with self._changed:
            idle = [p for p in self._waiting if p not in self._busy]
            for partition in idle if self._worth and not self._is_halted else ():
                batch = self._waiting[partition][0]
                if heads and size + batch.size > REQUEST_BYTES:
                    break
                heads[partition] = batch
                size += batch.size
            self._busy |= heads.keys()
            self._under_way += size
            if not heads:
                self._rounds -= 1
                self._changed.notify_all()
        return heads

    @property
    def _is_halted(self) -> bool:
        return self._stopped or self._error is not None

    async def _run_round(self, heads: dict[int, SealedBatch]) -> None:
        """Send until each of these batches is delivered, or split for a later round."""
        if self._producer.transactional_id and not self._added:  # its time does not run before that
            await self._wire.sleep(max(self._backpressure.until - time.monotonic(), 0.0))
        await self._add(heads.keys() - self._added)
        patience = Patience(self._wire, self._seconds)
        while heads and not self._is_halted:
            trouble: KafkaError | None = None
            try:
                by_leader = await self._by_leader(heads)
            except KafkaError as error:
                by_leader, trouble = {}, error
            for answers in await self._wire.gather(self._ask(n, batches) for n, batches in by_leader.items()):
                for partition, answer in answers.items():
                    if isinstance(answer, Produced) and self._apply_answer(heads[partition], answer):
                        del heads[partition]
                    elif failed := answer if isinstance(answer, KafkaError) else answer.error and answer.error():
                        trouble = await self._handle_error(partition, failed) or trouble
            if trouble is not None:
                self._looked = _NEVER
                await patience.trouble(trouble)

    async def _handle_error(self, partition: int, error: KafkaError) -> KafkaError | None:
        """Return the error to wait for, or None to retry at once as another producer.

        Raises Unknown if the batch may have been written and its leader can no longer tell.
        """
        if isinstance(error, _MAYBE_THERE):
            self._maybe_there.add(partition)
        if self._producer.transactional_id or not isinstance(error, _STRANGE):
            return error
        if partition in self._renewed and not self._sequences[partition]:
            return error  # another producer is not known there, either
        if partition in self._maybe_there:
            raise Unknown(
                f"the answer to a batch was lost, and {self._topic}:{partition} no longer knows its producer:"
                f" {error_text(error)}",
                remedy="inspect the records of the partition before sending again",
            )
        self._renewed[partition] = await self._renew()
        self._sequences[partition] = 0
        return None

    async def _add(self, partitions: set[int]) -> None:
        if partitions and self._producer.transactional_id:
            asking = partial(group_api.ask_add_partitions, self._producer, self._topic, sorted(partitions))
            await self._coordinators.ask(TRANSACTION, self._producer.transactional_id, asking, group_api.added_errors)
            self._added |= partitions

    async def _by_leader(self, heads: Mapping[int, SealedBatch]) -> dict[int, list[SealedBatch]]:
        if time.monotonic() - self._looked > _LAYOUT_SECONDS:
            layout = await self._wire.layout([self._topic])
            if error := layout.errors.get(self._topic):
                raise error()
            self._leaders = {tp.partition: leadership.leader for tp, leadership in layout.leaders.items()}
            self._looked = time.monotonic()
        by_leader: dict[int, list[SealedBatch]] = {}
        for partition, batch in heads.items():
            if (leader := self._leaders.get(partition, -1)) >= 0:
                by_leader.setdefault(leader, []).append(batch)
        if sum(map(len, by_leader.values())) < len(heads):
            self._looked = _NEVER
        if not by_leader:
            raise LeaderNotAvailableError() if self._leaders else UnknownTopicOrPartitionError()
        return by_leader

    async def _ask(self, leader: int, batches: Iterable[SealedBatch]) -> dict[int, Produced | KafkaError]:
        records = {b.partition: b.encode(self._numbering(b.partition)) for b in batches}
        request = group_api.ask_produce(self._producer, self._topic, records)
        try:
            answer = await self._wire.send(leader, request)
            self._backpressure.record_answer(sum(map(len, records.values())), answer.throttle_time_ms)
            return dict(group_api.read_produced(answer))
        except KafkaError as error:
            return dict.fromkeys(records, error)

    def _numbering(self, partition: int) -> Numbering:
        from sluice.pipelines.records.kafka_batches.encode.accumulator import Numbering

        producer = self._renewed.get(partition, self._producer)
        sequence, transactional = self._sequences.get(partition, 0), bool(producer.transactional_id)
        return Numbering(producer.id, producer.epoch, sequence, transactional)

    def _apply_answer(self, batch: SealedBatch, answer: Produced) -> bool:
        """Return whether the batch is finished in this round. Raises NotTaken for a refused record."""
        if answer.error is None:
            self._deliver(batch, answer)
            return True
        if issubclass(answer.error, TOO_LARGE) and batch.count > 1:
            from sluice.pipelines.records.kafka_batches.encode.accumulator import split

            self._replace(batch, *split(batch))
            return True
        if answer.error in NOT_TAKEN:
            blamed = answer.blamed if answer.blamed < batch.count else 0
            number, size = int(batch.numbers[blamed]), batch.plain_bytes // batch.count
            raise NotTaken(answer.error, number, batch.partition, size)
        return False

    def _deliver(self, batch: SealedBatch, answer: Produced) -> None:
        self._maybe_there.discard(batch.partition)
        before = self._sequences.get(batch.partition, 0)
        self._sequences[batch.partition] = (before + batch.count) & _MOST_SEQUENCE
        with self._changed:
            self._delivered.append(Delivered(batch.partition, answer.first, batch.numbers))
        self._replace(batch)

    def _replace(self, batch: SealedBatch, *others: SealedBatch) -> None:
        """Replace the first batch of its partition by these."""
        with self._changed:
            queue = self._waiting[batch.partition]
            queue.popleft()
            queue.extendleft(reversed(others))
            self._held += sum(o.size for o in others) - batch.size
            # A served partition moves to the end, so that no partition starves.
            del self._waiting[batch.partition]
            if queue:
                self._waiting[batch.partition] = queue
            self._changed.notify_all()
