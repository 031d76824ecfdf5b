"""Sending batches to a topic, by leader, in transactions that leave a mark: Kafka's producer, from sealed batches.

    batches ─► waiting, by partition ─► a round: each partition's first batch, one request a leader ─► offsets

Promises: a partition has one batch under way, which keeps the order; a batch is asked for again with its own sequence
numbers, so that a lost answer doubles nothing (KIP-98). What waits is bounded, and whoever brings more waits, too. A
batch that is too large for the topic is split; a record that it does not take is an error that names the record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from kafka.errors import KafkaError, LeaderNotAvailableError, UnknownTopicOrPartitionError

from sluice.pipelines.feed.rights import rights_to_republish
from sluice.pipelines.ports import Delivered
from sluice.pipelines.records.encode.batches import Numbering, SealedBatch, split
from sluice.pipelines.vocabulary.errors import SluiceError, UsageError
from sluice.pipelines.vocabulary.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka import group_messages, producing
from sluice.resources.kafka.coordinators import Coordinators
from sluice.resources.kafka.failures import error_text
from sluice.resources.kafka.group import KafkaGroup
from sluice.resources.kafka.group_messages import GROUP, TRANSACTION, Produced, ProducerId, Seat
from sluice.resources.kafka.messages import partition_errors, top_error
from sluice.resources.kafka.producing import NOT_TAKEN, TOO_LARGE
from sluice.resources.kafka.settings import KafkaAccess
from sluice.resources.kafka.wire import Patience, Wire

WAITING_BYTES = 32 << 20
"""Of batches that wait to be sent, or for their answer."""
REQUEST_BYTES = 8 << 20
"""Of one round's batches, unless one is larger."""
_LAYOUT_SECONDS = 300.0  # how old what is known of leaders may be
_MOST_SEQUENCE = 0x7FFFFFFF
_MISSING = "nothing was sent; create the topic (Sluice never does), or grant DESCRIBE and WRITE on it"


class KafkaTarget:
    """One topic, written to in transactions under `name`, which is the transactional id and the group of the marks.

    A mark is what the group has committed for partition 0 of the topic. `seconds`: how long a transaction may be open.
    """

    def __init__(
        self, access: KafkaAccess, topic: str, name: str, *, seconds: float = 60.0, patience: float = 60.0
    ) -> None:
        self._wire = Wire(access, rights=rights_to_republish(topic, name))
        self._topic, self._name, self._seconds, self._patience = topic, name, seconds, patience
        self._coordinators = Coordinators(self._wire, patience)
        self._group = KafkaGroup(access, name, wire=self._wire, rights=rights_to_republish(topic, name))
        self._producer: ProducerId | None = None
        self._flow: _Flow | None = None
        self._sequences: dict[int, int] = {}

    def close(self) -> None:
        self._wire.close()

    def partitions(self) -> int:
        return producing.partitions_of(self._wire, self._topic, self._patience, "the topic to send to", _MISSING)

    def begin(self) -> CommittedOffset | None:
        response = self._coordinators.run(
            f"starting transactions as {self._name}",
            TRANSACTION,
            self._name,
            partial(group_messages.ask_producer, self._name, int(self._seconds * 1000)),
            top_error,
        )
        self._producer = ProducerId(self._name, response.producer_id, response.producer_epoch)
        self._sequences, self._flow = {}, None
        return self._group.committed([self._mark_place])[self._mark_place]

    def send(self, batches: Iterable[SealedBatch], describe: Callable[[int], str]) -> list[Delivered]:
        flow = self._flow
        if flow is None:
            flow = self._flow = _Flow(
                self._wire, self._coordinators, self._begun, self._topic, self._sequences, self._seconds
            )
        try:
            for batch in batches:
                flow.put(batch)
            return flow.finish()
        except BaseException as error:
            self._give_up()
            if isinstance(error, _NotTaken):
                raise _refusal(self._topic, error, describe) from None
            if isinstance(error, KafkaError):
                raise self._wire.explain(error, f"sending to {self._topic}", topic=self._topic) from None
            raise

    def commit(self, mark: CommittedOffset) -> None:
        producer, doing = self._begun, f"committing what was sent to {self._topic}"
        self._producer, flow, self._flow = None, self._flow, None
        try:
            self._wire.run(doing, self._add_mark, producer, mark)
        except BaseException:
            self._producer = producer
            self._give_up()
            raise
        ending = partial(group_messages.ask_end, producer, commit=True)
        self._coordinators.run(doing, TRANSACTION, self._name, ending, top_error, final=True)
        self._producer = producer
        if flow is not None:
            self._sequences = flow.sequences

    @property
    def _mark_place(self) -> TopicPartition:
        return TopicPartition(self._topic, 0)

    @property
    def _begun(self) -> ProducerId:
        if self._producer is None:
            raise UsageError("no transaction was begun", remedy="call begin first")
        return self._producer

    def _give_up(self) -> None:
        """Abort, so that readers need not wait until the transaction times out. Nothing is asked of who is away."""
        producer, self._producer, flow, self._flow = self._producer, None, self._flow, None
        if flow is not None:
            flow.stop()
        if producer is not None:
            with contextlib.suppress(SluiceError):
                self._wire.run("aborting", self._abort, producer)

    # -- on the background thread

    async def _add_mark(self, producer: ProducerId, mark: CommittedOffset) -> None:
        """The group has no members: whoever sends by this name is fenced by the transactional id alone."""
        key, ask = producer.transactional_id, self._coordinators.ask
        await ask(TRANSACTION, key, partial(group_messages.ask_add_offsets, producer, self._name), top_error)
        sending = partial(group_messages.ask_commit_in, producer, Seat(self._name, "", -1), {self._mark_place: mark})
        await ask(GROUP, self._name, sending, partition_errors)

    async def _abort(self, producer: ProducerId) -> None:
        ending = partial(group_messages.ask_end, producer, commit=False)
        with contextlib.suppress(KafkaError):
            await self._coordinators.ask(TRANSACTION, producer.transactional_id, ending, top_error)


class _NotTaken(Exception):
    """The topic refuses the row with this number."""

    def __init__(self, error: type[KafkaError], number: int, size: int) -> None:
        super().__init__(error_text(error()))
        self.error, self.number, self.size = error, number, size


class _Flow:
    """The batches of one transaction: brought by one thread, sent by the background thread in rounds."""

    def __init__(
        self,
        wire: Wire,
        coordinators: Coordinators,
        producer: ProducerId,
        topic: str,
        sequences: Mapping[int, int],
        seconds: float,
    ) -> None:
        self._wire, self._coordinators, self._producer, self._topic = wire, coordinators, producer, topic
        self.sequences = dict(sequences)
        self._seconds = seconds
        self._added: set[int] = set()
        self._leaders: dict[int, int] = {}
        self._looked = 0.0
        self._changed = threading.Condition()
        # shared by both threads, under `_changed`
        self._waiting: dict[int, deque[SealedBatch]] = {}
        self._held = 0
        self._sending = False
        self._stopped = False
        self._error: BaseException | None = None
        self._delivered: list[Delivered] = []

    def put(self, batch: SealedBatch) -> None:
        """Bring a batch; waits while there is no room. Raises the error that ended the sending."""
        with self._changed:
            while self._held and self._held + batch.size > WAITING_BYTES and self._error is None:
                self._changed.wait()
            self._raise()
            self._waiting.setdefault(batch.partition, deque()).append(batch)
            self._held += batch.size
            begin, self._sending = not self._sending, True
        if begin:
            self._wire.spawn(self._send)

    def finish(self) -> list[Delivered]:
        """Wait until all is delivered."""
        with self._changed:
            while self._sending and self._error is None:
                self._changed.wait()
            self._raise()
            delivered, self._delivered = self._delivered, []
            return delivered

    def stop(self) -> None:
        """Send nothing more; waits for the round under way, so that nothing of it comes after an abort."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._sending, self._seconds)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- on the background thread

    async def _send(self) -> None:
        try:
            while heads := self._heads():
                await self._round(heads)
        except BaseException as error:
            with self._changed:
                self._error, self._sending = error, False
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    def _heads(self) -> dict[int, SealedBatch]:
        """The first batch of each partition, as many as one round takes; none: all is sent."""
        heads, size = dict[int, SealedBatch](), 0
        with self._changed:
            for partition in [*self._waiting] if not self._stopped else ():
                batch = self._waiting[partition][0]
                if heads and size + batch.size > REQUEST_BYTES:
                    break
                heads[partition] = batch
                size += batch.size
            if not heads:
                self._sending = False
                self._changed.notify_all()
        return heads

    async def _round(self, heads: dict[int, SealedBatch]) -> None:
        """Until each of these batches is delivered, or split for a later round."""
        await self._add(heads.keys() - self._added)
        patience = Patience(self._wire, self._seconds)
        while heads and not self._stopped:
            trouble: KafkaError | None = None
            try:
                by_leader = await self._by_leader(heads)
            except KafkaError as error:
                by_leader, trouble = {}, error
            for answers in await self._wire.gather(self._ask(n, some) for n, some in by_leader.items()):
                for partition, said in answers.items():
                    if isinstance(said, KafkaError):
                        trouble = said
                    elif self._settled(heads[partition], said):
                        del heads[partition]
                    elif said.error is not None:
                        trouble = said.error()
            if trouble is not None:
                self._looked = 0.0
                await patience.trouble(trouble)

    async def _add(self, partitions: set[int]) -> None:
        if partitions:
            asking = partial(group_messages.ask_add_partitions, self._producer, self._topic, sorted(partitions))
            await self._coordinators.ask(
                TRANSACTION, self._producer.transactional_id, asking, group_messages.added_errors
            )
            self._added |= partitions

    async def _by_leader(self, heads: Mapping[int, SealedBatch]) -> dict[int, list[SealedBatch]]:
        if time.monotonic() - self._looked > _LAYOUT_SECONDS:
            layout = await self._wire.layout([self._topic])
            if error := layout.errors.get(self._topic):
                raise error()
            self._leaders = {tp.partition: place.leader for tp, place in layout.places.items()}
            self._looked = time.monotonic()
        found: dict[int, list[SealedBatch]] = {}
        for partition, batch in heads.items():
            if (leader := self._leaders.get(partition, -1)) >= 0:
                found.setdefault(leader, []).append(batch)
        if sum(map(len, found.values())) < len(heads):
            self._looked = 0.0
        if not found:
            raise LeaderNotAvailableError() if self._leaders else UnknownTopicOrPartitionError()
        return found

    async def _ask(self, leader: int, batches: Iterable[SealedBatch]) -> dict[int, Produced | KafkaError]:
        records = {
            b.partition: b.to_bytes(
                Numbering(self._producer.id, self._producer.epoch, self.sequences.get(b.partition, 0), True)
            )
            for b in batches
        }
        request = group_messages.ask_produce(self._producer, self._topic, records)
        try:
            return dict(group_messages.read_produced(await self._wire.send(leader, request)))
        except KafkaError as error:
            return dict.fromkeys(records, error)

    def _settled(self, batch: SealedBatch, said: Produced) -> bool:
        """Whether the batch is done with in this round. Raises what no waiting mends."""
        if said.error is None:
            self._deliver(batch, said)
            return True
        if issubclass(said.error, TOO_LARGE) and batch.count > 1:
            self._replace(batch, *split(batch))
            return True
        if said.error in NOT_TAKEN:
            blamed = said.blamed if said.blamed < batch.count else 0
            raise _NotTaken(said.error, int(batch.numbers[blamed]), batch.plain_bytes // batch.count)
        return False

    def _deliver(self, batch: SealedBatch, said: Produced) -> None:
        before = self.sequences.get(batch.partition, 0)
        self.sequences[batch.partition] = (before + batch.count) & _MOST_SEQUENCE
        with self._changed:
            self._delivered.append(Delivered(batch.partition, said.first, batch.numbers))
        self._replace(batch)

    def _replace(self, batch: SealedBatch, *others: SealedBatch) -> None:
        """Put these in the place of the batch, which is the first of its partition."""
        with self._changed:
            queue = self._waiting[batch.partition]
            queue.popleft()
            queue.extendleft(reversed(others))
            self._held += sum(o.size for o in others) - batch.size
            # What was served goes to the end, so that no partition waits for others for ever.
            del self._waiting[batch.partition]
            if queue:
                self._waiting[batch.partition] = queue
            self._changed.notify_all()


def _refusal(topic: str, refused: _NotTaken, describe: Callable[[int], str]) -> UsageError:
    return UsageError(
        f"topic {topic} does not take the record of {describe(refused.number)} (about {refused.size:,} bytes):"
        f" {refused}",
        remedy=f"nothing of this transaction was sent; {NOT_TAKEN[refused.error]}, and run the same again",
        topic=topic,
    )
