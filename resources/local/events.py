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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from kafka import KafkaAdminClient
from kafka.errors import KafkaError, TopicAlreadyExistsError

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.rights import Right, grantee, rights_to_create, rights_to_produce
from sluice.pipelines.records.rows.row_format import HEADERS, TO_SEND
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.zero_copy_transport import client_of
from sluice.resources.kafka.protocol.kafka_errors import explain

if TYPE_CHECKING:  # it loads compiled loops
    from sluice.resources.kafka.produce.sender import KafkaSender

CUSTOMERS = 5_000
CURRENCIES = ("EUR", "EUR", "EUR", "USD", "USD", "GBP", "CHF", "SEK")
COUNTRIES = ("DE", "FR", "US", "GB", "CH", "SE", "NL", "IT")
CHANNELS = ("web", "app", "store", "phone")
STATUSES = ("placed", "paid", "shipped", "returned")
_CHUNK = 2_000
_PATIENCE = {"bootstrap_timeout_ms": 10_000}


class SampleEvent(NamedTuple):
    """One record to send; `timestamp` in ms, `malformed` if the value is no valid order."""

    key: bytes
    value: bytes | None
    timestamp: int
    headers: list[tuple[str, bytes]]
    malformed: bool = False


@dataclass(frozen=True, slots=True)
class Mix:
    """Mix of the events: shares between 0 and 1 of all records; `first` is the number of the first order."""

    seed: int
    first: int = 0
    bad: float = 0.0
    tombstones: float = 0.0
    headers: float = 0.0
    aborted: float = 0.0


@dataclass(frozen=True, slots=True)
class SentEvents:
    """Records sent, by kind; those in aborted transactions are in `aborted` and in no other number but `records`."""

    records: int
    committed: int
    aborted: int
    tombstones: int
    malformed: int
    with_headers: int
    bytes: int
    seconds: float

    def __add__(self, other: SentEvents) -> SentEvents:
        return SentEvents(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))


def orders(mix: Mix, count: int, start: int, end: int) -> Iterator[SampleEvent]:
    """`count` events in order of time, stamped evenly from `start` to `end` (ms)."""
    dice, draw = Random(mix.seed), Random(mix.seed + 1).random
    step = (end - start) / max(count - 1, 1)
    for i in range(count):
        stamp = start + int(i * step)
        yield _make_event(mix, mix.first + i, stamp, dice.getrandbits(64), draw())


def _make_event(mix: Mix, number: int, stamp: int, bits: int, chance: float) -> SampleEvent:
    customer = bits % CUSTOMERS
    key = b"c-%06d" % customer
    tagged = (bits >> 20 & 0xFFFF) < mix.headers * 0x10000
    headers = [("trace", b"%016x" % bits)] if tagged else []
    if tagged and number % 3 == 0:
        headers.append(("source", b"shop"))
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
    """Translate Kafka's errors to ours; `rights` names the required rights."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise explain(error, grantee(kafka), doing, rights=rights) from error


@dataclass(frozen=True, slots=True)
class SendOptions:
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
    how: SendOptions,
    progress: Callable[[int], None] = lambda sent: None,
) -> SentEvents:
    """Send all events, round-robin over the topics, each to the partition of its key; waits for acknowledgement.

    Of the transactions, about the share `mix.aborted` is aborted. `progress` is called with the number of sent
    records. Raises
    UsageError for an unknown codec, KafkaUnavailable, NotAuthorized.
    """
    from sluice.pipelines.records.kafka_batches.encode import CODECS
    from sluice.resources.kafka.produce.sender import KafkaSender

    if (codec := CODECS.get(how.compression or "none")) is None:
        raise UsageError(f"{how.compression!r} is no codec", remedy=f"one of {', '.join(CODECS)}")
    settings = {"transaction_timeout_ms": 60_000} | _PATIENCE | kafka.producer_settings()
    seconds = settings.pop("transaction_timeout_ms") / 1000
    access = KafkaAddress(kafka.bootstrap, settings)
    rights = rights_to_produce(how.topics, how.transactional_id)
    with closing(KafkaSender.connect(access, how.transactional_id or "", rights=rights, seconds=seconds)) as sender:
        return _Sending(sender, codec.number, mix, how, progress).run(events)


class _Sending:
    """State of one `send` call: pending records and counts."""

    def __init__(
        self, sender: KafkaSender, codec: int, mix: Mix, how: SendOptions, progress: Callable[[int], None]
    ) -> None:
        from sluice.pipelines.records.kafka_batches.encode import Accumulator

        self._sender, self._how, self._progress = sender, how, progress
        self._dice, self._aborted_share = Random(mix.seed + 2), mix.aborted
        self._partitions = {t: sender.partitions(t) for t in how.topics}
        self._accumulators = {t: Accumulator(codec) for t in how.topics}
        self._counts = dict.fromkeys(("records", "aborted", "tombstones", "malformed", "with_headers", "bytes"), 0)
        self._began = time.monotonic()

    def run(self, events: Iterator[SampleEvent]) -> SentEvents:
        self._sender.begin()
        size = self._how.transaction_records if self._how.transactional_id else _CHUNK
        while chunk := list(islice(events, size)):
            self._send(chunk)
            self._end_transaction(chunk) if self._how.transactional_id else self._count(chunk)
            self._progress(self._counts["records"])
            if self._how.rate:
                ahead = self._counts["records"] / self._how.rate - (time.monotonic() - self._began)
                if ahead > 0:
                    self._flush()
                    time.sleep(ahead)
        self._flush()
        counts = self._counts
        seconds = time.monotonic() - self._began
        return SentEvents(**counts, committed=counts["records"] - counts["aborted"], seconds=seconds)

    def _end_transaction(self, chunk: Sequence[SampleEvent]) -> None:
        self._flush()
        aborted = self._dice.random() < self._aborted_share
        self._sender.end(commit=not aborted, doing="ending a transaction of sample events")
        if aborted:
            self._counts["records"] += len(chunk)
            self._counts["aborted"] += len(chunk)
        else:
            self._count(chunk)

    def _send(self, chunk: Sequence[SampleEvent]) -> None:
        from sluice.pipelines.records.kafka_batches.encode import by_key

        for number, topic in enumerate(self._how.topics):
            share = chunk[number :: len(self._how.topics)]
            rows, numbers = to_send(share), np.arange(len(share))
            where = by_key(rows.column("key"), self._partitions[topic], numbers)
            self._sender.send(topic, self._accumulators[topic].add(rows, where, numbers))
            self._sender.take_deliveries(topic)

    def _flush(self) -> None:
        for topic, accumulator in self._accumulators.items():
            self._sender.send(topic, accumulator.flush())
        for topic in self._how.topics:
            self._sender.flush(topic)

    def _count(self, chunk: Sequence[SampleEvent]) -> None:
        counts = self._counts
        counts["records"] += len(chunk)
        counts["tombstones"] += sum(e.value is None for e in chunk)
        counts["malformed"] += sum(e.malformed for e in chunk)
        counts["with_headers"] += sum(bool(e.headers) for e in chunk)
        counts["bytes"] += sum(len(e.value or b"") for e in chunk)


def to_send(events: Sequence[SampleEvent]) -> pa.RecordBatch:
    """As rows of `records.format.TO_SEND`."""
    headers = [[{"key": k, "value": v} for k, v in e.headers] for e in events] if any(e.headers for e in events) else ()
    columns = [
        pa.array([e.key for e in events], TO_SEND.field("key").type),
        pa.array([e.value for e in events], TO_SEND.field("value").type),
        pa.array([e.timestamp for e in events], pa.int64()),
        pa.array(headers, HEADERS) if headers else pa.nulls(len(events), HEADERS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TO_SEND)
