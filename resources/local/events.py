"""Sample order events: what `sluice produce` and the demo send, and the sending of them.

Promises: a seed gives the same records byte for byte (timestamps follow the times asked for), and what `send`
reports as committed was acknowledged by all in-sync replicas. A record is an order as JSON of about 190 bytes, keyed
by its customer; some are tombstones, some carry headers, some are malformed on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import (
    KafkaError,
    TopicAlreadyExistsError,
)
from kafka.partitioner.default import murmur2

from sluice.pipelines.feed.kafka import KafkaSettings
from sluice.pipelines.feed.rights import Right, rights_to_create, rights_to_produce
from sluice.resources.kafka.failures import explain
from sluice.resources.kafka.receiving import client_of
from sluice.resources.kafka.settings import grantee

CUSTOMERS = 5_000
CURRENCIES = ("EUR", "EUR", "EUR", "USD", "USD", "GBP", "CHF", "SEK")
COUNTRIES = ("DE", "FR", "US", "GB", "CH", "SE", "NL", "IT")
CHANNELS = ("web", "app", "store", "phone")
STATUSES = ("placed", "paid", "shipped", "returned")
_PROGRESS_EVERY = 2_000
_PATIENCE = {"bootstrap_timeout_ms": 10_000}


class SampleEvent(NamedTuple):
    """One record to send; `timestamp` in ms, `malformed` says that the value is no valid order."""

    key: bytes
    value: bytes | None
    timestamp: int
    headers: list[tuple[str, bytes]]
    malformed: bool = False


@dataclass(frozen=True, slots=True)
class Mix:
    """What the events are: shares between 0 and 1 of all records; `first` is the number of the first order."""

    seed: int
    first: int = 0
    bad: float = 0.0
    tombstones: float = 0.0
    headers: float = 0.0
    aborted: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Records sent, by kind; those in aborted transactions are in `aborted` and in no other number but `records`."""

    records: int
    committed: int
    aborted: int
    tombstones: int
    malformed: int
    with_headers: int
    bytes: int
    seconds: float

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))


def orders(mix: Mix, count: int, start: int, end: int) -> Iterator[SampleEvent]:
    """`count` events in order of time, stamped evenly from `start` to `end` (ms)."""
    dice, draw = Random(mix.seed), Random(mix.seed + 1).random
    step = (end - start) / max(count - 1, 1)
    for i in range(count):
        stamp = start + int(i * step)
        yield _event(mix, mix.first + i, stamp, dice.getrandbits(64), draw())


def _event(mix: Mix, number: int, stamp: int, bits: int, chance: float) -> SampleEvent:
    customer = bits % CUSTOMERS
    key = b"c-%06d" % customer
    tagged = (bits >> 20 & 0xFFFF) < mix.headers * 0x10000
    headers = _headers(number, bits) if tagged else []
    if chance < mix.tombstones:
        return SampleEvent(key, None, stamp, headers)
    value = _order(number, customer, stamp, bits)
    if chance < mix.tombstones + mix.bad:
        return SampleEvent(key, _spoil(value, bits >> 40 & 3), stamp, headers, malformed=True)
    return SampleEvent(key, value, stamp, headers)


def _order(number: int, customer: int, stamp: int, bits: int) -> bytes:
    return (
        b'{"order_id":"o-%010d-%06x","customer":"c-%06d","ts":"%s","amount":%d.%02d,"currency":"%s",'
        b'"items":%d,"country":"%s","channel":"%s","status":"%s"}'
        % (
            *(number, bits >> 40, customer, _iso(stamp), bits >> 13 & 0x3FF, (bits >> 23) % 100),
            *(CURRENCIES[bits >> 30 & 7].encode(), 1 + (bits >> 33 & 7), COUNTRIES[bits >> 36 & 7].encode()),
            *(CHANNELS[bits >> 44 & 3].encode(), STATUSES[bits >> 46 & 3].encode()),
        )
    )


def _headers(number: int, bits: int) -> list[tuple[str, bytes]]:
    trace = b"%016x" % bits
    return [("trace", trace)] + ([("source", b"shop")] if number % 3 == 0 else [])


def _spoil(value: bytes, how: int) -> bytes:
    """Cut off, not JSON at all, the wrong type, or bytes that are not UTF-8."""
    return (
        value[: len(value) // 2],
        b"order failed: timeout",
        value.replace(b'"items":', b'"items":"many","was":'),
        value.replace(b"o-", b"\xff\xfe"),
    )[how]


_ISO: tuple[int, bytes] = (-1, b"")


def _iso(stamp: int) -> bytes:
    """ISO time in UTC with milliseconds; whole seconds are formatted once."""
    global _ISO
    second, ms = divmod(stamp, 1000)
    if _ISO[0] != second:
        _ISO = (second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode())
    return b"%s.%03dZ" % (_ISO[1], ms)


def topics_of(kafka: KafkaSettings) -> tuple[str, ...]:
    """The names of all topics that Kafka shows us. Raises KafkaUnavailable, NotAuthorized."""
    with _translating_errors(kafka, "listing topics"), closing(_admin(kafka)) as admin:
        return tuple(sorted(admin.list_topics()))


def create(kafka: KafkaSettings, topics: Sequence[str], partitions: int) -> None:
    """Create the topics (those that stand stay as they are) and wait until each partition has a leader."""
    doing, rights = f"creating {', '.join(topics)}", rights_to_create(topics)
    with _translating_errors(kafka, doing, rights), closing(_admin(kafka)) as admin:
        try:
            admin.create_topics({t: {"num_partitions": partitions} for t in topics}, wait_for_metadata=True)
        except TopicAlreadyExistsError:
            return


def _admin(kafka: KafkaSettings) -> KafkaAdminClient:
    settings = _PATIENCE | kafka.client_settings()
    return client_of(KafkaAdminClient, **settings, bootstrap_servers=kafka.bootstrap)


@contextmanager
def _translating_errors(kafka: KafkaSettings, doing: str, rights: Sequence[Right] = ()) -> Iterator[None]:
    """Kafka's errors as ours; `rights` is what it takes."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise explain(error, grantee(kafka), doing, rights=rights) from error


@dataclass(frozen=True, slots=True)
class Sending:
    """How to send. `rate` is in records a second (None: as fast as it goes); with a `transactional_id` the records
    go in transactions of `transaction_records`."""

    topics: tuple[str, ...]
    transactional_id: str | None = None
    transaction_records: int = 1_000
    rate: float | None = None
    compression: str | None = None


def send(
    kafka: KafkaSettings,
    events: Iterator[SampleEvent],
    mix: Mix,
    how: Sending,
    progress: Callable[[int], None] = lambda sent: None,
) -> Sent:
    """Send all events, round-robin over the topics, each to the partition of its key; waits for acknowledgement.

    Of the transactions, about the share `mix.aborted` is aborted. `progress` hears records sent so far. Raises
    KafkaUnavailable, NotAuthorized.
    """
    with _translating_errors(
        kafka, f"producing to {', '.join(how.topics)}", rights_to_produce(how.topics, how.transactional_id)
    ):
        settings = _PATIENCE | kafka.producer_settings()
        producer = client_of(KafkaProducer, **settings, **_producer_settings(kafka, how))
        sender = None
        try:
            sender = _Sender(producer, mix, how, progress)
            return sender.run(events)
        except KafkaError as error:
            raise _first(error, sender.failure if sender else None) from error
        finally:
            producer.close()


def _first(error: KafkaError, before: BaseException | None) -> BaseException:
    """What went wrong first: a producer that failed says afterwards only that it did, with the reason beside it."""
    found: BaseException = error
    if type(error) is KafkaError:
        found = next((e for e in (*error.args, before) if isinstance(e, KafkaError)), error)
    return found


def _producer_settings(kafka: KafkaSettings, how: Sending) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap,
        "acks": "all",
        "batch_size": 256 << 10,
        "linger_ms": 20,
        "compression_type": how.compression,
        "metrics_enabled": False,
        "allow_auto_create_topics": False,
    }
    return settings | ({"transactional_id": how.transactional_id} if how.transactional_id else {})


class _Sender:
    """One call of `send`: the producer, what was counted, and the first failure that the producer told of."""

    def __init__(self, producer: KafkaProducer, mix: Mix, how: Sending, progress: Callable[[int], None]) -> None:
        self._producer, self._how, self._progress = producer, how, progress
        self._dice, self._aborted_share = Random(mix.seed + 2), mix.aborted
        self._partitions = {t: len(producer.partitions_for(t)) for t in how.topics}
        self._placed: dict[bytes, int] = {}
        self._counts = dict.fromkeys(("records", "aborted", "tombstones", "malformed", "with_headers", "bytes"), 0)
        self.failure: BaseException | None = None
        self._began = time.monotonic()

    def run(self, events: Iterator[SampleEvent]) -> Sent:
        if self._how.transactional_id:
            self._producer.init_transactions()
        size = self._how.transaction_records if self._how.transactional_id else _PROGRESS_EVERY
        while chunk := list(islice(events, size)):
            self._transaction(chunk) if self._how.transactional_id else self._plain(chunk)
            self._progress(self._counts["records"])
            self._pace()
        self._flush()
        counts = self._counts
        seconds = time.monotonic() - self._began
        return Sent(**counts, committed=counts["records"] - counts["aborted"], seconds=seconds)

    def _plain(self, chunk: Sequence[SampleEvent]) -> None:
        self._send(chunk)
        self._count(chunk)
        if self.failure:
            raise self.failure

    def _transaction(self, chunk: Sequence[SampleEvent]) -> None:
        self._producer.begin_transaction()
        self._send(chunk)
        self._flush()
        if self._dice.random() < self._aborted_share:
            self._producer.abort_transaction()
            self._counts["records"] += len(chunk)
            self._counts["aborted"] += len(chunk)
        else:
            self._producer.commit_transaction()
            self._count(chunk)

    def _send(self, chunk: Sequence[SampleEvent]) -> None:
        topics, send = self._how.topics, self._producer.send
        for i, event in enumerate(chunk):
            topic = topics[i % len(topics)]
            sent = send(topic, event.value, event.key, event.headers, self._place(topic, event.key), event.timestamp)
            sent.add_errback(self._failed)

    def _place(self, topic: str, key: bytes) -> int:
        """The partition that every Kafka client chooses for the key."""
        if (hashed := self._placed.get(key)) is None:
            hashed = self._placed[key] = murmur2(key) & 0x7FFFFFFF
        return hashed % self._partitions[topic]

    def _failed(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _flush(self) -> None:
        self._producer.flush()
        if self.failure:
            raise self.failure

    def _count(self, chunk: Sequence[SampleEvent]) -> None:
        counts = self._counts
        counts["records"] += len(chunk)
        counts["tombstones"] += sum(e.value is None for e in chunk)
        counts["malformed"] += sum(e.malformed for e in chunk)
        counts["with_headers"] += sum(bool(e.headers) for e in chunk)
        counts["bytes"] += sum(len(e.value or b"") for e in chunk)

    def _pace(self) -> None:
        if self._how.rate:
            ahead = self._counts["records"] / self._how.rate - (time.monotonic() - self._began)
            if ahead > 0:
                self._producer.flush()
                time.sleep(ahead)
