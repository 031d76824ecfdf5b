"""Producers that log the outcome of each value they send, in the checker's format."""

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
"""Time for the client's own clean-up: all answers were awaited before."""


class Noting:
    """A producer that logs each value once the outcome is known. A value has its name and a unique sequence number.
    With `transactional_id` each `transaction` block is a transaction. A value without an answer is logged as unknown.
    Records are stamped by a clock that is `ahead_ms` ahead of this machine's.
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
        """Send `count` values to a partition, and wait for all answers. `fields` are added to the values in turn.

        Raises TimeoutError if a value of a transaction gets no answer: the transaction can only be abandoned.
        """
        fields_in_turn = list(fields) or [{}]
        sent = [self._send_one(topic, partition, fields_in_turn[n % len(fields_in_turn)]) for n in range(count)]
        end = time.monotonic() + SECONDS
        answered = [self._log_outcome(topic, partition, *value, max(end - time.monotonic(), 0)) for value in sent]
        if self._transaction and not all(answered):
            raise TimeoutError(f"no answer to values of a transaction for {SECONDS} s")

    def _send_one(self, topic: str, partition: int, fields: dict[str, Any]) -> tuple[int, Any]:
        sequence, self._sequence = self._sequence, self._sequence + 1
        value_id = {"producer": self.name, "sequence": sequence}
        headers = [("text", b"a:b\nc"), ("none", b"")] if sequence % 3 == 0 else []
        key = json.dumps(value_id).encode() if fields.get("tombstone") else f"k{sequence % 7}".encode()
        value = (
            None if fields.get("tombstone") else json.dumps(value_id | fields, ensure_ascii=False, indent=1).encode()
        )
        timestamp = time.time_ns() // 1_000_000 + self._ahead_ms
        try:
            future = self._producer.send(topic, value, key, headers, partition, timestamp)
        except KafkaError:
            future = None  # unknown: it may be in a batch or not
        return sequence, future

    def _log_outcome(self, topic: str, partition: int, sequence: int, future: Any, seconds: float) -> bool:
        """Wait for the outcome of a value, and log it. Returns whether it was acknowledged in time."""
        offset, outcome = None, "unknown"
        if future is not None:
            with suppress(KafkaError):  # a timeout, or an answer that leaves the outcome open
                offset, outcome = future.get(seconds).offset, "acknowledged"
        line = {"producer": self.name, "sequence": sequence, "topic": topic, "partition": partition}
        line |= {"offset": offset, "outcome": outcome, "transaction": self._transaction or None}
        self._file.write(json.dumps(line) + "\n")
        return offset is not None

    @contextmanager
    def run_transaction(self, *, commits: bool = True) -> Iterator[None]:
        """Run the block in a transaction. An end without confirmation is logged as unknown.

        Raises TimeoutError, and the client's errors: this producer is then unusable, and another must take over.
        """
        self._blocks += 1
        self._transaction = f"{self._transactional}/{self.name}/{self._blocks}"
        self._producer.begin_transaction()
        ended = "unknown"
        try:
            yield
            _call_with_timeout(self._producer.commit_transaction if commits else self._producer.abort_transaction)
            ended = "committed" if commits else "aborted"
        finally:
            self._file.write(json.dumps({"transaction": self._transaction, "ended": ended}) + "\n")
            self._transaction = ""

    def close(self) -> None:
        """Close the producer, by force if its flush fails: kafka-python would leak the thread and its sockets."""
        with suppress(KafkaError):
            self._producer.close(CLOSING_SECONDS)
        if not self._producer._closed:
            self._producer._sender.force_close()
            self._producer._sender.join(CLOSING_SECONDS)
            self._producer._closed = True
        self._file.close()


def _call_with_timeout(end: Callable[[], None]) -> None:
    """End a transaction with a timeout: the client waits forever if a broker dies before it answers."""
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
