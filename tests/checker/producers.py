"""Producers that note what became of each value they sent, as the checker reads it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from kafka import KafkaProducer
from kafka.errors import KafkaError

SECONDS = 20
CLOSING_SECONDS = 5
"""All answers were waited for before: what is left is the client's own."""


class Noting:
    """One producer: values are (its name, a sequence that never repeats); a line is noted once the outcome is known.

    With `transactional_id` each `transaction` block is one. Values that were sent and never answered are unknown, and
    are noted as such by `close`. Records are stamped by a clock that is `ahead_ms` of this machine's.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        bootstrap: str,
        transactional_id: str | None = None,
        ahead_ms: int = 0,
        **settings: Any,
    ):
        self.name, self._transactional, self._transaction = name, transactional_id, ""
        self._ahead_ms = ahead_ms
        self._sequence, self._blocks = 0, 0
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        more = {"transactional_id": transactional_id} if transactional_id else {}
        self._producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", **{"linger_ms": 5, **more, **settings})
        if transactional_id:
            try:
                self._producer.init_transactions()
            except BaseException:
                self.close()
                raise

    def send(self, topic: str, partition: int, count: int, fields: Iterable[dict[str, Any]] = ()) -> None:
        """So many values to a partition; waits for all answers. `fields` are added to the values, in turn.

        Raises TimeoutError in a transaction in which a value stays without an answer: it can only be given up.
        """
        more = list(fields) or [{}]
        sent = [self._one(topic, partition, more[n % len(more)]) for n in range(count)]
        end = time.monotonic() + SECONDS
        answered = [self._note(topic, partition, *one, max(end - time.monotonic(), 0)) for one in sent]
        if self._transaction and not all(answered):
            raise TimeoutError(f"no answer to values of a transaction for {SECONDS} s")

    def _one(self, topic: str, partition: int, fields: dict[str, Any]) -> tuple[int, Any]:
        sequence, self._sequence = self._sequence, self._sequence + 1
        who = {"producer": self.name, "sequence": sequence}
        headers = [("text", b"a:b\nc"), ("none", b"")] if sequence % 3 == 0 else []
        key = json.dumps(who).encode() if fields.get("tombstone") else f"k{sequence % 7}".encode()
        value = None if fields.get("tombstone") else json.dumps(who | fields, ensure_ascii=False, indent=1).encode()
        at = time.time_ns() // 1_000_000 + self._ahead_ms
        try:
            future = self._producer.send(topic, value, key, headers, partition, at)
        except KafkaError:
            future = None  # it may have gone into a batch or not: unknown
        return sequence, future

    def _note(self, topic: str, partition: int, sequence: int, future: Any, seconds: float) -> bool:
        """Whether it was acknowledged in time."""
        offset, outcome = None, "unknown"
        if future is not None:
            with suppress(KafkaError):  # a timeout, or an answer that says nothing about the log
                offset, outcome = future.get(seconds).offset, "acknowledged"
        said = {"producer": self.name, "sequence": sequence, "topic": topic, "partition": partition}
        said |= {"offset": offset, "outcome": outcome, "transaction": self._transaction or None}
        self._file.write(json.dumps(said) + "\n")
        return offset is not None

    @contextmanager
    def transaction(self, *, commits: bool = True) -> Iterator[None]:
        """What is sent in the block is one transaction. An end that nobody confirmed is noted as unknown.

        Raises TimeoutError, and what the client raises: this producer is of no use then, another one takes over.
        """
        self._blocks += 1
        self._transaction = f"{self._transactional}/{self.name}/{self._blocks}"
        self._producer.begin_transaction()
        ended = "unknown"
        try:
            yield
            _within_time(self._producer.commit_transaction if commits else self._producer.abort_transaction)
            ended = "committed" if commits else "aborted"
        finally:
            self._file.write(json.dumps({"transaction": self._transaction, "ended": ended}) + "\n")
            self._transaction = ""

    def close(self) -> None:
        """Close the producer, by force if its flush fails: kafka-python would keep the thread and its sockets."""
        with suppress(KafkaError):
            self._producer.close(CLOSING_SECONDS)
        if not self._producer._closed:
            self._producer._sender.force_close()
            self._producer._sender.join(CLOSING_SECONDS)
            self._producer._closed = True
        self._file.close()


def _within_time(end: Callable[[], None]) -> None:
    """The client itself waits for the end of a transaction for ever, when a broker dies with the answer."""
    raised: list[KafkaError] = []

    def run() -> None:
        try:
            end()
        except KafkaError as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if raised:
        raise raised[0]
    if thread.is_alive():
        raise TimeoutError(f"no answer to the end of a transaction for {SECONDS} s")
