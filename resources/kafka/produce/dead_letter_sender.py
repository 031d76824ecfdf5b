"""Producing inside a transaction of ours: letters, each once and in order, to a topic that stands already.

Promises: a batch is asked for again with its own sequence numbers, so that a lost answer doubles nothing (KIP-98); one
batch at a time is under way to each partition, which keeps the order; about a megabyte is held. What a topic does not
take is an error that names the record. Nothing is there for readers until the transaction ends; the caller ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import CommitFenced, SluiceError, UnknownTopic, UsageError
from sluice.pipelines.feed.rights import rights_to_produce
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.ports import Letter
from sluice.resources.kafka.connection.connections import Patience, Wire
from sluice.resources.kafka.connection.coordinators import Coordinators
from sluice.resources.kafka.protocol import group_api, messages
from sluice.resources.kafka.protocol.group_api import TRANSACTION, ProducerId
from sluice.resources.kafka.protocol.kafka_errors import error_text

CHUNK_BYTES = 900_000
"""Letters that are held, and sent to each partition in one batch: less than what a topic takes by default."""
_OVERHEAD = 32  # of a record in its batch, at most, besides what is in it
_UNKNOWN_TOPIC_TRIES = 4  # a topic made a moment ago may be unknown to the broker that is asked
TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
NOT_TAKEN = {
    kafka_errors.MessageSizeTooLargeError: "raise its max.message.bytes",
    kafka_errors.RecordListTooLargeError: "raise its segment.bytes",
    kafka_errors.InvalidTimestampError: "let it take such times (message.timestamp.after.max.ms and .before.max.ms), or"
    " set its message.timestamp.type to LogAppendTime",
    kafka_errors.InvalidRecordError: "a compacted topic takes none without a key: set its cleanup.policy to delete",
    kafka_errors.PolicyViolationError: "change what the brokers' policy says of the topic",
}


_NO_LETTERS = (
    "nothing was sent or committed, and landing goes on; create the topic (Sluice never does), grant DESCRIBE and WRITE"
    " on it, or mend `dead_letters` in the feed"
)


class _NotTaken(Exception):
    """The partition's leader refuses these letters; `first` is the one that it names, where it names one."""

    def __init__(self, error: KafkaError, first: int) -> None:
        super().__init__(error_text(error))
        self.error, self.first = error, first


@dataclass(slots=True)
class Outbox:
    """The letters of one transaction, for one topic. Use from outside the background thread.

    `sequences` are the producer's next sequence numbers: they go on from transaction to transaction of one epoch.
    `seconds`: how long the coordinator lets the transaction be open.
    """

    coordinators: Coordinators
    producer: ProducerId
    topic: str
    seconds: float
    sequences: dict[TopicPartition, int]
    added: set[int] = field(default_factory=set)
    sent: int = 0
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def late(self) -> bool:
        """Whether the coordinator may have given the transaction up by now."""
        return time.monotonic() - self.begun > self.seconds

    @property
    def crowded(self) -> bool:
        """Whether the letters, now sent, took most of the transaction's time: it is they who made it late."""
        return self.ended is not None and self.ended - self.begun > self.seconds / 2

    def send(self, letters: Iterable[Letter]) -> None:
        """Send them all, each acknowledged by all in-sync replicas.

        Raises UsageError for a letter that the topic does not take and when time is up, NotAuthorized, UnknownTopic,
        CommitFenced, KafkaUnavailable, and what taking letters raises: the transaction must be aborted then.
        """
        for chunk in _chunks(letters):
            if self.late:
                self.give_up()
            self.wire.run(f"sending dead letters to {self.topic}", self._chunk, chunk)
            self.sent += len(chunk)
        self.ended = time.monotonic()

    def give_up(self) -> NoReturn:
        """Say that the transaction's time was not enough."""
        raise UsageError(
            f"{self.sent} dead letters were sent to {self.topic} in the {self.seconds:g} s that a transaction of this"
            " feed may take, and there are more, or no time is left to commit them",
            remedy="nothing was committed, and landing goes on; raise kafka.transaction_timeout_ms in the feed (the"
            " brokers' transaction.max.timeout.ms bounds it)",
            topic=self.topic,
        )

    @property
    def wire(self) -> Wire:
        return self.coordinators.wire

    # -- on the background thread

    async def _chunk(self, chunk: Sequence[Letter]) -> None:
        by_partition: dict[int, list[Letter]] = {}
        for letter in chunk:
            by_partition.setdefault(letter.partition, []).append(letter)
        try:
            await self._add(by_partition.keys() - self.added)
            await self.wire.gather(self._deliver(p, some) for p, some in by_partition.items())
        except KafkaError as error:
            raise self._explained(error) from None

    async def _add(self, partitions: set[int]) -> None:
        """Tell the coordinator where the transaction will write to."""
        if not partitions:
            return
        await self.coordinators.ask(
            TRANSACTION,
            self.producer.transactional_id,
            partial(group_api.ask_add_partitions, self.producer, self.topic, sorted(partitions)),
            group_api.added_errors,
        )
        self.added |= partitions

    async def _deliver(self, partition: int, letters: Sequence[Letter]) -> None:
        """In one batch; in halves where that is too large for the topic."""
        tp, waiting = TopicPartition(self.topic, partition), [letters]
        while waiting:
            some = waiting.pop()
            try:
                await self._batch(tp, some)
            except _NotTaken as refused:
                if len(some) > 1 and isinstance(refused.error, TOO_LARGE):
                    half = len(some) // 2
                    waiting += [some[half:], some[:half]]
                    continue
                raise _not_taken(self.topic, some[refused.first % len(some)], refused.error) from None
            self.sequences[tp] = self.sequences.get(tp, 0) + len(some)

    async def _batch(self, tp: TopicPartition, letters: Sequence[Letter]) -> None:
        """Until its leader has it: asked again, it is the same batch with the same numbers."""
        records = group_api.record_batch(self.producer, self.sequences.get(tp, 0), letters)
        patience = Patience(self.wire, self.seconds)
        while True:
            try:
                return await self._ask(tp, records)
            except kafka_errors.DuplicateSequenceNumberError:
                return  # an earlier attempt, whose answer was lost, did it
            except KafkaError as error:
                if self.late:
                    self.give_up()
                await patience.trouble(error)

    async def _ask(self, tp: TopicPartition, records: bytes) -> None:
        place = (await self.wire.layout([tp.topic])).places.get(tp)
        if place is None or place.leader < 0:
            raise messages.missing(place)
        request = group_api.ask_produce(self.producer, tp.topic, {tp.partition: records})
        said = group_api.read_produced(await self.wire.send(place.leader, request))[tp.partition]
        if said.error:
            raise _NotTaken(said.error(), said.blamed) if said.error in NOT_TAKEN else said.error()

    def _explained(self, error: KafkaError) -> SluiceError:
        found = self.wire.explain(
            error,
            f"sending dead letters to {self.topic}",
            topic=self.topic,
            rights=rights_to_produce([self.topic], self.producer.transactional_id),
        )
        if isinstance(found, CommitFenced) and self.late:
            self.give_up()
        return found


def partitions_of(
    wire: Wire, topic: str, patience: float, what: str = "the topic of dead letters", missing: str = _NO_LETTERS
) -> int:
    """How many partitions the topic has. Raises UnknownTopic, NotAuthorized, KafkaUnavailable; it is never created.

    `what` is the topic in words, `missing` what to do where it is not there.
    """

    async def ask() -> int:
        waiting, tries = Patience(wire, patience), 0
        while True:
            layout = await wire.layout([topic])
            if topic in layout.topics:
                return sum(tp.topic == topic for tp in layout.places)
            tries += 1
            error = layout.errors.get(topic, kafka_errors.UnknownTopicOrPartitionError)
            if issubclass(error, kafka_errors.UnknownTopicOrPartitionError) and tries >= _UNKNOWN_TOPIC_TRIES:
                raise UnknownTopic(
                    f"{what}, `{topic}`, is not there, or this client may not see it", remedy=missing, topic=topic
                )
            await waiting.trouble(error())

    return wire.run(f"looking for {what}, {topic}", ask, rights=rights_to_produce([topic]))


def _chunks(letters: Iterable[Letter]) -> Iterator[list[Letter]]:
    """About CHUNK_BYTES each, of the one after the other; a larger letter is a chunk by itself."""
    chunk: list[Letter] = []
    held = 0
    for letter in letters:
        size = _size(letter)
        if chunk and held + size > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(letter)
        held += size
    if chunk:
        yield chunk


def _size(letter: Letter) -> int:
    headers = sum(4 * len(name) + len(value or b"") + 10 for name, value in letter.headers)
    return _OVERHEAD + len(letter.key or b"") + len(letter.value or b"") + headers


def _not_taken(topic: str, letter: Letter, error: KafkaError) -> UsageError:
    return UsageError(
        f"topic {topic} does not take the dead letter of {letter.source} ({_size(letter):,} bytes at most):"
        f" {error_text(error)}",
        remedy=f"nothing was committed, and landing goes on; {NOT_TAKEN[type(error)]}, and run again",
        topic=topic,
        partition=letter.partition,
    )
