"""Producers that write all the time: one without transactions, others with transactions over several topics.

The outcome of each value is written to `notes/<topic>.jsonl`, in the checker's format, with `amount`, `fits` and
`stamp` for the readers. Producers connect to the brokers directly, not through the proxies.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tests.soak.feeds import BY_NAME, FEEDS, SoakFeed
from tests.soak.journal import Journal

PAUSE = 1.0
"""Seconds between two rounds of a producer."""
_SECONDS = 20
_ABORTED, _LATE, _EARLY = 1 / 3, 0.03, 0.005
_TOPICS, _RECORDS = 6, 4
"""Maxima of a round."""


@dataclass
class _Value:
    line: dict[str, Any]
    topic: str


@dataclass
class Writer:
    """One producer with its thread. `transactional`: each round is a transaction, one of three aborted."""

    name: str
    feeds: Sequence[SoakFeed]
    transactional: bool
    shared: Writers
    lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _producer: Producer | None = None
    _sequence: int = 0
    _rounds: int = 0

    def start(self) -> None:
        self._draw = random.Random(f"{self.shared.seed} {self.name}")
        self._thread = threading.Thread(target=self._write, name=self.name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(3 * _SECONDS)

    def _write(self) -> None:
        while not self._ended.is_set():
            with self.lock:
                try:
                    self._write_round()
                except KafkaException as error:
                    self.shared.journal.note("producer", f"{self.name}: {error}")
                    self._producer = None  # another one takes over
            self._ended.wait(PAUSE * self._draw.uniform(0.5, 1.5))

    def _write_round(self) -> None:
        feeds = [f for f in self.feeds if f.name not in self.shared.paused]
        if not feeds:
            return
        producer = self._producer = self._producer or self._create_producer()
        chosen = self._draw.sample(feeds, self._draw.randint(1, min(_TOPICS, len(feeds))))
        self._rounds += 1
        if not self.transactional:
            self._note(self._send(producer, chosen, None))
            return
        name = f"{self.name}/{self._rounds}"
        producer.begin_transaction()
        values = self._send(producer, chosen, name)
        ended = "unknown"
        try:
            if all(v.line["outcome"] == "acknowledged" for v in values) and self._draw.random() > _ABORTED:
                producer.commit_transaction(_SECONDS)
                ended = "committed"
            else:
                producer.abort_transaction(_SECONDS)
                ended = "aborted"
        finally:
            self._note(values)
            for topic in {v.topic for v in values}:
                self._append(topic, [{"transaction": name, "ended": ended}])

    def _send(self, producer: Producer, feeds: Iterable[SoakFeed], transaction: str | None) -> list[_Value]:
        """Send records to some partitions of the topics and wait for the answers; those without one are unknown."""
        values = [v for feed in feeds for v in self._send_to(producer, feed, transaction)]
        producer.flush(_SECONDS)
        return [_Value(dict(v.line), v.topic) for v in values]  # an answer that comes later changes nothing

    def _send_to(self, producer: Producer, feed: SoakFeed, transaction: str | None) -> Iterator[_Value]:
        for _ in range(self._draw.randint(1, _RECORDS)):
            self._sequence += 1
            partition, stamp = self._draw.randrange(feed.partitions), self._draw_stamp()
            record = feed.make_record(self.name, self._sequence, self._draw, self.shared.numbers.get(feed.name, 0))
            line = {"producer": self.name, "sequence": self._sequence, "topic": feed.topic, "partition": partition}
            line |= {"offset": None, "outcome": "unknown", "transaction": transaction}
            line |= {"amount": record.amount, "fits": record.fits, "stamp": stamp}
            value = _Value(line, feed.topic)

            def answer(error: KafkaError | None, message: Message, line: dict[str, Any] = line) -> None:
                if error is None:
                    line |= {"offset": message.offset(), "outcome": "acknowledged"}

            headers = [("text", b"a:b\nc"), ("none", b"")] if self._sequence % 5 == 0 else None
            with suppress(BufferError):  # noted as unknown
                producer.produce(
                    feed.topic,
                    record.value,
                    record.key,
                    partition,
                    on_delivery=answer,
                    timestamp=stamp,
                    headers=headers,
                )
            yield value

    def _draw_stamp(self) -> int:
        now, luck = int(time.time() * 1000), self._draw.random()
        if luck < _LATE:
            return now - self._draw.randrange(10 * 60_000)
        return now + self._draw.randrange(60_000) if luck < _LATE + _EARLY else now

    def _create_producer(self) -> Producer:
        settings = {
            "bootstrap.servers": self.shared.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 20,
            "message.timeout.ms": 15_000,
            "topic.metadata.refresh.interval.ms": 30_000,
            "log_level": 0,
        }
        if self.transactional:
            settings |= {"transactional.id": f"soak-{self.name}", "transaction.timeout.ms": 15_000}
        producer = Producer(settings)
        if self.transactional:
            producer.init_transactions(2 * _SECONDS)
        return producer

    def _note(self, values: Iterable[_Value]) -> None:
        by_topic = defaultdict(list)
        for v in values:
            by_topic[v.topic].append(v.line)
        for topic, lines in by_topic.items():
            self._append(topic, lines)

    def _append(self, topic: str, lines: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with (self.shared.notes / f"{topic}.{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(text)


@dataclass
class Writers:
    """All producers of the scene, and their shared state. `numbers`: the schema numbers to write with, by feed."""

    bootstrap: str
    notes: Path
    seed: int
    numbers: dict[str, int]
    journal: Journal
    paused: set[str] = field(default_factory=set)
    """Feeds whose topics get nothing now."""
    writers: list[Writer] = field(default_factory=list)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the producers until the block ends."""
        self.notes.mkdir(exist_ok=True)
        feeds = [f for f in FEEDS if not f.source]
        self.writers.append(Writer("w0", feeds, False, self))
        self.writers += [Writer(f"w{n}", feeds[n - 1 :: 2], True, self) for n in (1, 2, 3)]
        for writer in self.writers:
            writer.start()
        try:
            yield
        finally:
            for writer in self.writers:
                writer.end()

    def pause(self, feeds: Iterable[str]) -> None:
        """Stop writing to the feeds' topics. Returns once no round with one of them is at work."""
        self.paused.update(feeds)
        for writer in self.writers:
            with writer.lock:
                pass

    def resume(self) -> None:
        self.paused.clear()

    def list_notes(self, feed: str) -> list[Path]:
        """Returns the files of notes about the feed's topic."""
        return sorted(self.notes.glob(f"{BY_NAME[feed].topic}.*.jsonl"))
