"""Membership in a consumer group: commits offsets, and dead letters in the same transaction.

Promises: each commit carries the member id and generation of one join, never refreshed, so that the coordinator refuses
it once anybody else has joined (KIP-447). Readers see the letters together with the offsets or not at all. One chunk of
letters is in memory, about a megabyte.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import CommitFenced, ProofFailed, UsageError
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import DeadLetter
from sluice.resources.kafka.connection.connections import Coordinators
from sluice.resources.kafka.produce.sender import KafkaSender
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import GROUP, TRANSACTION, ProducerId, Seat
from sluice.resources.kafka.protocol.messages import partition_errors, top_error

if TYPE_CHECKING:
    from sluice.pipelines.records.kafka_batches.encode import SealedBatch

CHUNK_BYTES = 900_000
"""Letters in memory, and in a batch: less than a topic's default limit."""
_RECORD_OVERHEAD = 32
_HEADER_OVERHEAD = 10
_HEARTBEATS_WHILE_OTHERS_WAIT = 3
_MOVED = {kafka_errors.NotCoordinatorError, kafka_errors.CoordinatorNotAvailableError}
_NO_LETTERS = (
    "nothing was sent or committed, and landing goes on; create the topic (Sluice never does), grant DESCRIBE and WRITE"
    " on it, or fix `dead_letters` in the feed"
)

Offsets = Mapping[TopicPartition, CommittedOffset]


class KafkaMembership:
    """One join of a group. `seconds`: how long the coordinator lets a transaction stay open."""

    def __init__(self, coordinators: Coordinators, seat: Seat, transactional_id: str | None, seconds: float) -> None:
        self._coordinators, self._seat, self._seconds = coordinators, seat, seconds
        self._transactional_id = transactional_id
        self._sender = KafkaSender(coordinators, transactional_id or "", seconds=seconds, noun="dead letter")

    def init_transactions(self) -> None:
        """Fence older committers of the same transactional id (KIP-98), and abort their open transaction.

        Raises NotAuthorized, KafkaUnavailable; UsageError if the group was joined without a transactional id.
        """
        if self._transactional_id is None:
            raise UsageError("no transactional id", remedy="join with one, or commit without a transaction")
        self._sender.begin()

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return committed offsets, with require_stable (KIP-447): waits while a transaction on them is open."""
        wanted, doing = sorted(set(partitions)), f"reading the committed offsets of group {self._seat.group}"
        run, read = self._coordinators.wire.run, self._coordinators.fetch_offsets
        committed = run(doing, read, self._seat.group, wanted) if wanted else {}
        return {tp: committed.get(tp) for tp in wanted}

    def partitions_of(self, topic: str) -> int:
        """Return the number of the topic's partitions; it is never created.

        Raises UnknownTopic, NotAuthorized, KafkaUnavailable.
        """
        return self._sender.partitions(topic, "the topic of dead letters", _NO_LETTERS)

    def commit_transaction(self, offsets: Offsets, topic: str = "", letters: Iterable[DeadLetter] = ()) -> None:
        """Commit all offsets in one transaction under our member id and generation, with the letters for `topic`.

        Raises CommitFenced, NotAuthorized, UnknownTopic, UsageError, KafkaUnavailable (nothing was committed), Unknown
        (the answer to the commit was lost), ProofFailed for an invalid offset. After an error, call
        `init_transactions` again.
        """
        _refuse_invalid(offsets)
        if not offsets:
            return
        clock = _Clock(self._seconds)
        try:
            # First the letters: readers of the group's offsets wait while offsets are pending.
            self._send_letters(topic, letters, clock)
            doing = f"committing the offsets of group {self._seat.group}"
            self._sender.end(commit=True, doing=doing, first=partial(self._add_offsets, offsets))
        except CommitFenced:
            if clock.is_late and clock.spent_on_letters > self._seconds / 2:
                raise _no_time(topic, clock) from None
            raise

    def commit_plain(self, offsets: Offsets) -> None:
        """Commit by an ordinary OffsetCommit; after a refusal, some partitions may be committed."""
        _refuse_invalid(offsets)
        if offsets:
            doing = f"committing the offsets of group {self._seat.group}"
            self._coordinators.wire.run(doing, self._commit_plain, offsets)

    def _send_letters(self, topic: str, letters: Iterable[DeadLetter], clock: _Clock) -> None:
        """Send the letters in chunks; all in-sync replicas acknowledge a chunk before the next one is read."""
        try:
            for chunk in _chunks(letters):
                if clock.is_late:
                    raise _no_time(topic, clock)
                batches = _encode(chunk)
                clock.begin()
                sources = [letter.source for letter in chunk]
                self._sender.send(topic, batches, sources.__getitem__)
                self._sender.flush(topic, sources.__getitem__)
                clock.sent += len(chunk)
        except BaseException:
            self._sender.give_up()
            raise
        clock.letters_end = time.monotonic()

    # -- on the background thread

    async def _commit_plain(self, offsets: Offsets) -> None:
        await self._check_protocol()
        request = partial(group_api.ask_commit, self._seat, offsets)
        await self._coordinators.ask(GROUP, self._seat.group, request, partition_errors, final=True)

    async def _check_protocol(self) -> None:
        """Raise CommitFenced if a consumer of the newer protocol (KIP-848) has joined.

        The coordinator then converts the group, and gives partitions away while it still accepts our generation.
        """
        group = self._seat.group
        request = partial(group_api.ask_group, group)
        response = await self._coordinators.ask(GROUP, group, request, group_api.group_errors)
        if not group_api.read_group(response).exists:
            raise CommitFenced(
                f"a consumer of the newer group protocol has joined group {group}: nothing was committed",
                remedy="stop its consumers, or let the feed commit under a group of its own; landed rows stay",
            )

    async def _add_offsets(self, offsets: Offsets, producer: ProducerId) -> None:
        key, seat, ask = producer.transactional_id, self._seat, self._coordinators.ask
        await self._check_protocol()
        await ask(TRANSACTION, key, partial(group_api.ask_add_offsets, producer, seat.group), top_error)
        await ask(GROUP, seat.group, partial(group_api.ask_commit_in, producer, seat, offsets), partition_errors)


@dataclass(slots=True)
class _Clock:
    """The time of one transaction, which starts with its first letters, and the letters `sent` in it."""

    seconds: float
    sent: int = 0
    start: float | None = None
    letters_end: float | None = None

    def begin(self) -> None:
        self.start = self.start or time.monotonic()

    @property
    def is_late(self) -> bool:
        """True if the coordinator may have aborted the transaction."""
        return self.start is not None and time.monotonic() - self.start > self.seconds

    @property
    def spent_on_letters(self) -> float:
        return 0.0 if self.start is None else (self.letters_end or time.monotonic()) - self.start


def _no_time(topic: str, clock: _Clock) -> UsageError:
    return UsageError(
        f"{clock.sent} dead letters were sent to {topic} in the {clock.seconds:g} s that a transaction of this feed may"
        " take, and there are more, or no time is left to commit them",
        remedy="nothing was committed, and landing goes on; raise kafka.transaction_timeout_ms in the feed (the"
        " brokers' transaction.max.timeout.ms bounds it)",
        topic=topic,
    )


def _chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Yield lists of about CHUNK_BYTES, or of one larger letter."""
    chunk: list[DeadLetter] = []
    pending = 0
    for letter in letters:
        headers = sum(4 * len(name) + len(value or b"") + _HEADER_OVERHEAD for name, value in letter.headers)
        size = _RECORD_OVERHEAD + len(letter.key or b"") + len(letter.value or b"") + headers
        if chunk and pending + size > CHUNK_BYTES:
            yield chunk
            chunk, pending = [], 0
        chunk.append(letter)
        pending += size
    if chunk:
        yield chunk


def _encode(letters: Sequence[DeadLetter]) -> list[SealedBatch]:
    """Return uncompressed batches, one for each partition; letters are numbered by their position."""
    # Loaded late: these take about a second, and most commits have no letters.
    import numpy as np
    import pyarrow as pa

    from sluice.pipelines.records.kafka_batches.encode import TO_SEND, Accumulator

    rows = [
        {
            "key": letter.key,
            "value": letter.value,
            "timestamp": letter.timestamp,
            "headers": [{"key": name, "value": value} for name, value in letter.headers],
        }
        for letter in letters
    ]
    partitions = np.array([letter.partition for letter in letters], np.int64)
    accumulator = Accumulator()
    full = accumulator.add(pa.RecordBatch.from_pylist(rows, schema=TO_SEND), partitions, np.arange(len(letters)))
    return [*full, *accumulator.flush()]


class Heart:
    """Heartbeats on the background thread until stopped; a commit shows whether the coordinator still accepts us.

    A new member waits for us to join again, which we never do: after a few heartbeats we stop, so that the coordinator
    drops us after a session.
    """

    def __init__(self, coordinators: Coordinators, seat: Seat, seconds: float) -> None:
        self._coordinators = coordinators
        self._seat = seat
        self._seconds = seconds
        self._beating = True
        coordinators.wire.spawn(self._send_heartbeats)

    def stop(self) -> None:
        self._beating = False

    async def _send_heartbeats(self) -> None:
        others_waited, wire, group = 0, self._coordinators.wire, self._seat.group
        while others_waited < _HEARTBEATS_WHILE_OTHERS_WAIT:
            await wire.sleep(self._seconds)  # also before the first: joining counts as a heartbeat
            if not self._beating:
                return
            request = group_api.ask_heartbeat(self._seat)
            try:
                errors = top_error(await self._coordinators.ask_once(GROUP, group, request, self._seconds))
            except KafkaError:
                errors = {kafka_errors.CoordinatorNotAvailableError}
            others_waited += kafka_errors.RebalanceInProgressError in errors
            if errors & _MOVED:
                wire.forget_coordinator(GROUP, group)


def _refuse_invalid(offsets: Offsets) -> None:
    """Raise ProofFailed for a negative offset, which a transaction would ignore."""
    for tp, committed in offsets.items():
        if committed.offset < 0:
            raise ProofFailed(
                f"{tp}: {committed.offset} is no offset to commit",
                remedy="this is a bug; nothing was committed",
                topic=tp.topic,
                partition=tp.partition,
            )
