"""Every record of the assigned topic by librdkafka's consumer (confluent-kafka), in large lots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from bench.stand import PeerTask

_PATIENCE_SECONDS = 60.0
READ_AHEAD = {
    # Room to read ahead while Python works: its defaults hold far less of a fast topic.
    "queued.min.messages": 1_000_000,
    "queued.max.messages.kbytes": 262_144,
    "fetch.message.max.bytes": 8 << 20,
}


def message_lots(task: PeerTask, limit: int) -> Iterator[list[Any]]:
    """Lots of up to `limit` messages, until all that was assigned is read. Raises KafkaException when nothing comes."""
    settings = {
        "bootstrap.servers": task.bootstrap,
        "group.id": "bench",  # it must have one; nothing is committed to it
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        **READ_AHEAD,
    }
    remaining = task.records
    with closing(Consumer(settings)) as consumer:
        consumer.assign([TopicPartition(task.topic, p, OFFSET_BEGINNING) for p in task.ends])
        while remaining:
            messages = consumer.consume(min(limit, remaining), timeout=_PATIENCE_SECONDS)
            if not messages:
                raise KafkaException(f"nothing came for {_PATIENCE_SECONDS:.0f} s")
            for failed in (m.error() for m in messages if m.error()):
                raise KafkaException(failed)
            remaining -= len(messages)
            yield messages
