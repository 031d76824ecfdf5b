"""Our own producer, as a peer of `send`: Arrow rows → batches → leaders, idempotent or in republish's transactions."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.kafka import CommittedOffset
from sluice.pipelines.records.kafka_batches.encode import CODECS, TO_SEND, Accumulator, SealedBatch, spread
from sluice.pipelines.republishing.republish_rows import CHUNK_ROWS
from sluice.pipelines.republishing.send_lane import TRANSACTION_BYTES
from sluice.pipelines.schema.arrays import fixed_width
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.produce.sender import KafkaSender, KafkaTarget

_CHUNKS = 8  # different ones, which are sent again and again


def main(bootstrap: str, topic: str, payloads: str, records: str, mode: str) -> None:
    chunks, access = _chunks(Path(payloads)), KafkaAddress(bootstrap)
    send = {"idempotent": _idempotent, "transactional": _transactional}[mode]
    print(json.dumps({"transactions": send(access, topic, chunks, int(records))}))


def _idempotent(access: KafkaAddress, topic: str, chunks: list[pa.RecordBatch], records: int) -> int:
    with closing(KafkaSender.connect(access)) as sender:
        partitions = sender.partitions(topic)
        sender.begin()
        sender.send(topic, _taken(sender, topic, _batches(chunks, partitions, 0, records)))
        sender.flush(topic)
    return 0


def _taken(sender: KafkaSender, topic: str, batches: Iterator[SealedBatch]) -> Iterator[SealedBatch]:
    for batch in batches:
        yield batch
        sender.take_deliveries(topic)


def _transactional(access: KafkaAddress, topic: str, chunks: list[pa.RecordBatch], records: int) -> int:
    """In transactions as large as a republish's."""
    per_transaction, count, sent = TRANSACTION_BYTES * CHUNK_ROWS // chunks[0].nbytes, 0, 0
    with closing(KafkaTarget(access, topic, f"bench-{topic}")) as target:
        partitions = target.partitions()
        target.begin()
        while sent < records:
            now = min(per_transaction, records - sent)
            target.send(_batches(chunks, partitions, sent, now), str)
            sent += now
            count += 1
            target.commit(CommittedOffset(sent))
    return count


def _batches(chunks: list[pa.RecordBatch], partitions: int, first: int, count: int) -> Iterator[SealedBatch]:
    accumulator = Accumulator(CODECS["lz4"].number)
    for turn, at in enumerate(range(0, count, CHUNK_ROWS)):
        rows = chunks[turn % len(chunks)].slice(0, min(CHUNK_ROWS, count - at))
        numbers = first + at + np.arange(rows.num_rows)
        yield from accumulator.add(rows, spread(numbers, partitions), numbers)
    yield from accumulator.flush()


def _chunks(payloads: Path) -> list[pa.RecordBatch]:
    lines, dice = payloads.read_bytes().splitlines(), random.Random(1)
    return [_chunk(dice.choices(lines, k=CHUNK_ROWS)) for _ in range(_CHUNKS)]


def _chunk(values: list[bytes]) -> pa.RecordBatch:
    rows = len(values)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    columns = [
        pa.nulls(rows, pa.binary()),
        # as a task has them: pa.array() would import pandas, and 60 MB
        pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]),
        fixed_width(pa.int64(), np.full(rows, 1_735_689_600_000)),
        pa.nulls(rows, TO_SEND.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TO_SEND)


if __name__ == "__main__":
    main(*sys.argv[1:])
