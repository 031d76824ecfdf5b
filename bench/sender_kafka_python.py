"""The producer in plain Python, as a peer of `send`: kafka-python."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kafka import KafkaProducer


def main(bootstrap: str, topic: str, payloads: str, records: str, batch_bytes: str, linger_ms: str) -> None:
    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        enable_idempotence=True,
        compression_type="lz4",
        batch_size=int(batch_bytes),
        linger_ms=int(linger_ms),
    )
    lines = Path(payloads).read_bytes().splitlines()
    values = random.Random(1).choices(lines, k=100_000)
    for n in range(int(records)):
        producer.send(topic, values[n % len(values)])
    producer.flush()
    producer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
