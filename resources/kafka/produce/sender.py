"""The one producer: sends sealed batches, idempotently or in transactions.

Promises: all in-sync replicas acknowledge each batch; each partition keeps the order of its batches; a lost answer
duplicates nothing. `send_queue` brings the batches to their leaders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import BrokerTooOld, SluiceError, UnknownTopic, UsageError
from sluice.pipelines.feed.rights import Right, rights_to_produce, rights_to_republish
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import Delivered
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Coordinators, Patience, Wire
from sluice.resources.kafka.produce.send_queue import NOT_TAKEN, Backpressure, NotTaken, SendQueue
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import GROUP, TRANSACTION, ProducerId, Seat
from sluice.resources.kafka.protocol.kafka_errors import Location
from sluice.resources.kafka.protocol.messages import partition_errors, top_error

if TYPE_CHECKING:  # it loads compiled loops
    from sluice.pipelines.records.kafka_batches.encode.accumulator import SealedBatch

_UNKNOWN_TOPIC_TRIES = 4  # a broker may not know a new topic yet
_MISSING = "nothing was sent; create the topic (Sluice never does), or grant DESCRIBE and WRITE on it"
Describe = Callable[[int], str]
"""Describes a row, by its number."""


class KafkaSender:
    """Sends batches to topics of one Kafka. With a `transactional_id`, in transactions that `end` ends.

    `seconds`: how long a transaction may be open, and a leader away. `noun`: one of the records, in messages. For one
    thread.
    """

    def __init__(
        self, coordinators: Coordinators, transactional_id: str = "", *, seconds: float = 60.0, noun: str = "record"
    ) -> None:
        self.coordinators, self.wire = coordinators, coordinators.wire
        self._name, self._seconds, self._noun = transactional_id, seconds, noun
        self._producer: ProducerId | None = None
        self._queues: dict[str, SendQueue] = {}
        self.backpressure = Backpressure(seconds)

    @classmethod
    def connect(
        cls,
        access: KafkaAccess,
        transactional_id: str = "",
        *,
        rights: Sequence[Right] = (),
        seconds: float = 60.0,
        patience: float = 60.0,
    ) -> KafkaSender:
        """Create a sender with connections of its own, which `close` ends.

        `rights`: rights that its work needs. `patience`: how long a coordinator may be away, in seconds.
        """
        return cls(Coordinators(Wire(access, rights=rights), patience), transactional_id, seconds=seconds)

    def close(self) -> None:
        self.wire.close()

    def partitions(self, topic: str, what: str = "the topic to send to", remedy: str = _MISSING) -> int:
        """Return the number of the topic's partitions; it is never created.

        Raises UnknownTopic with this remedy, NotAuthorized, KafkaUnavailable. `what` names the topic in messages.
        """

        async def count() -> int:
            patience, attempts = Patience(self.wire, self._seconds), 0
            while True:
                layout = await self.wire.layout([topic])
                if topic in layout.topics:
                    return sum(tp.topic == topic for tp in layout.leaders)
                attempts += 1
                error = layout.errors.get(topic, kafka_errors.UnknownTopicOrPartitionError)
                unknown = issubclass(error, kafka_errors.UnknownTopicOrPartitionError)
                if unknown and attempts >= _UNKNOWN_TOPIC_TRIES:
                    message = f"{what}, `{topic}`, does not exist, or this client may not see it"
                    raise UnknownTopic(message, remedy=remedy, topic=topic)
                await patience.trouble(error())

        return self.wire.run(f"looking for {what}, {topic}", count, rights=rights_to_produce([topic]))

    def begin(self, topic: str = "", group: str = "") -> None:
        """Get a producer id. A transactional id fences other producers of it and aborts their open transaction.

        With `topic` and `group`, also write the markers that Kafka may have dropped there: it skips those of partitions
        without a leader (seen in 4.3), and their records would share the outcome of this producer's next transaction.
        """
        doing = f"starting transactions as {self._name}" if self._name else "asking for a producer id"
        beginning = partial(self._take_over, topic, group) if topic else self._new_producer
        self._producer, self._queues = self.wire.run(doing, beginning), {}

    def send(self, topic: str, batches: Iterable[SealedBatch], describe: Describe = str) -> None:
        """Send batches, reading them as the queue has space. Call `begin` first.

        Raises UsageError for a record that the topic does not take, CommitFenced if another producer has the
        transactional id or the transaction timed out, Unknown, and the iterator's errors. After an error the
        transaction is aborted; call `begin` again.
        """
        queue = self._queues.get(topic)
        if queue is None:
            queue = SendQueue(
                self.coordinators, self.begun, topic, self._seconds, self._new_producer, self.backpressure
            )
            self._queues[topic] = queue
        with self._giving_up(topic, describe):
            for batch in batches:
                queue.put(batch)

    def take_deliveries(self, topic: str) -> list[Delivered]:
        """Return the deliveries to the topic since the last call of this or of `flush`."""
        return self._queues[topic].take_deliveries() if topic in self._queues else []

    def flush(self, topic: str, describe: Describe = str) -> list[Delivered]:
        """Wait until everything is delivered; return the deliveries since the last call. Raises as `send`."""
        with self._giving_up(topic, describe):
            return self._queues[topic].finish() if topic in self._queues else []

    def end(self, *, commit: bool, doing: str, first: Callable[[ProducerId], Awaitable[None]] | None = None) -> None:
        """Run `first` in the transaction, then end it.

        Raises CommitFenced, KafkaUnavailable (nothing took effect), Unknown. After an error, call `begin` again.
        """
        producer, self._producer = self.begun, None
        try:
            if first is not None:
                self.wire.run(doing, first, producer)
        except BaseException:
            self._producer = producer
            self.give_up()
            raise
        self.wire.run(doing, self._end, producer, commit)
        self._producer = producer
        for queue in self._queues.values():
            queue.begin_another()

    def give_up(self) -> None:
        """Abort, so that readers need not wait for the transaction to time out. Does not wait for absent brokers."""
        producer, self._producer = self._producer, None
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.stop()
        if producer is not None and self._name:
            with contextlib.suppress(SluiceError):
                self.wire.run("aborting", self._abort, producer)

    @property
    def begun(self) -> ProducerId:
        if self._producer is None:
            raise UsageError("the producer was not started", remedy="start it before anything is sent or committed")
        return self._producer

    @contextlib.contextmanager
    def _giving_up(self, topic: str, describe: Describe) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.give_up()
            if isinstance(error, NotTaken):
                unit = "transaction" if self._name else "batch"
                raise UsageError(
                    f"topic {topic} does not take the {self._noun} of {describe(error.number)} (about {error.size:,}"
                    f" bytes): {error}",
                    remedy=f"nothing of this {unit} was sent; {NOT_TAKEN[error.error]}, and run the same again",
                    topic=topic,
                    partition=error.partition,
                ) from None
            if isinstance(error, KafkaError):
                rights = rights_to_produce([topic], self._name or None)
                doing, where = f"sending {self._noun}s to {topic}", Location(topic)
                raise self.wire.explain(error, doing, where, rights=rights) from None
            raise

    # -- on the background thread

    async def _take_over(self, topic: str, group: str) -> ProducerId:
        """Get a producer id; end the records of the id's last transaction once more, as that transaction ended."""
        partitions = await self._wait_for_leaders(topic)
        describing = partial(group_api.ask_transaction, self._name)
        try:
            described = await self.coordinators.ask(
                TRANSACTION, self._name, describing, group_api.collect_transaction_errors
            )
        except kafka_errors.UnsupportedVersionError:
            raise BrokerTooOld(
                f"the brokers at {self.wire.bootstrap} do not describe transactions",
                remedy="republishing needs brokers of Apache Kafka 3.0 or newer",
            ) from None
        committed = group_api.read_committed_last(described)
        producer = await self._new_producer()
        if committed is not None and partitions:
            adding = partial(group_api.ask_add_partitions, producer, topic, partitions)
            await self.coordinators.ask(TRANSACTION, self._name, adding, group_api.added_errors)
            await self.coordinators.ask(
                TRANSACTION, self._name, partial(group_api.ask_add_offsets, producer, group), top_error
            )
            await self._end(producer, committed)
        return producer

    async def _wait_for_leaders(self, topic: str) -> list[int]:
        """Return the topic's partitions, as soon as each has a leader; none if the topic does not exist."""
        patience = Patience(self.wire, self._seconds)
        while True:
            layout = await self.wire.layout([topic])
            leaders = {tp.partition: at.leader for tp, at in layout.leaders.items() if tp.topic == topic}
            if all(leader >= 0 for leader in leaders.values()):
                return sorted(leaders)
            await patience.trouble(kafka_errors.LeaderNotAvailableError())

    async def _new_producer(self) -> ProducerId:
        request = partial(group_api.ask_producer, self._name, int(self._seconds * 1000))
        if self._name:
            response = await self.coordinators.ask(TRANSACTION, self._name, request, top_error)
        else:
            response = await self._ask_any(request)
        return ProducerId(self._name, response.producer_id, response.producer_epoch)

    async def _ask_any(self, request: Callable[[], Any]) -> Any:
        patience = Patience(self.wire, self.coordinators.patience)
        while True:
            try:
                response = await self.wire.send(None, request())
                for error in top_error(response):
                    raise error()
                return response
            except KafkaError as error:
                await patience.trouble(error)

    async def _end(self, producer: ProducerId, commit: bool) -> None:
        ending = partial(group_api.ask_end, producer, commit=commit)
        await self.coordinators.ask(TRANSACTION, producer.transactional_id, ending, top_error, final=True)

    async def _abort(self, producer: ProducerId) -> None:
        ending = group_api.ask_end(producer, commit=False)
        await self.coordinators.notify(TRANSACTION, producer.transactional_id, ending)


class KafkaTarget:
    """One topic, written in transactions under `name`, which is the transactional id and the group of the marks.

    A mark is the group's committed offset of partition 0. `seconds`: how long a transaction may stay open. `family`:
    the common prefix of the names that share the work; empty if this one works alone.
    """

    def __init__(
        self,
        access: KafkaAccess,
        topic: str,
        name: str,
        *,
        family: str = "",
        seconds: float = 60.0,
        patience: float = 60.0,
    ) -> None:
        rights = rights_to_republish(topic, family or name, all_of=bool(family))
        self._sender = KafkaSender.connect(access, name, rights=rights, seconds=seconds, patience=patience)
        self._topic, self._name = topic, name

    def close(self) -> None:
        self._sender.close()

    @property
    def throttled_ms(self) -> int:
        return self._sender.backpressure.throttled_ms

    @property
    def most_bytes(self) -> int | None:
        return self._sender.backpressure.bytes if self.throttled_ms else None

    def partitions(self) -> int:
        return self._sender.partitions(self._topic)

    def begin(self) -> CommittedOffset | None:
        self._sender.begin(self._topic, self._name)
        doing = f"reading the committed offsets of group {self._name}"
        return self._sender.wire.run(
            doing, self._sender.coordinators.fetch_offsets, self._name, [self._mark_place]
        ).get(self._mark_place)

    def send(self, batches: Iterable[SealedBatch], describe: Describe) -> list[Delivered]:
        self._sender.send(self._topic, batches, describe)
        return self._sender.flush(self._topic, describe)

    def commit(self, mark: CommittedOffset) -> None:
        doing = f"committing the records sent to {self._topic}"
        self._sender.end(commit=True, doing=doing, first=partial(self._add_mark, mark))

    @property
    def _mark_place(self) -> TopicPartition:
        return TopicPartition(self._topic, 0)

    # -- on the background thread

    async def _add_mark(self, mark: CommittedOffset, producer: ProducerId) -> None:
        """Add the mark. The group has no members: the transactional id alone fences other senders."""
        key, ask = producer.transactional_id, self._sender.coordinators.ask
        await ask(TRANSACTION, key, partial(group_api.ask_add_offsets, producer, self._name), top_error)
        sending = partial(group_api.ask_commit_in, producer, Seat(self._name, "", -1), {self._mark_place: mark})
        await ask(GROUP, self._name, sending, partition_errors)
