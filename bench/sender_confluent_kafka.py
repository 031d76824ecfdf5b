"""The fast producer in Python, as a peer of `send`: confluent-kafka, over librdkafka."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from confluent_kafka import Producer


def main(bootstrap: str, topic: str, payloads: str, records: str, *settings: str) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, **dict(s.split("=") for s in settings)})
    lines = Path(payloads).read_bytes().splitlines()
    values = random.Random(1).choices(lines, k=100_000)
    for n in range(int(records)):
        while True:
            try:
                producer.produce(topic, values[n % len(values)])
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
