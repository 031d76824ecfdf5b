"""Rows encoded as record batches, checked with Sluice's decoder and kafka-python's reader and writer."""

from __future__ import annotations

import random
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder

from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, decompression
from sluice.pipelines.records.kafka_batches.encode import (
    CODECS,
    TO_SEND,
    Accumulator,
    SealedBatch,
    by_key,
    split,
    spread,
)
from sluice.pipelines.records.kafka_batches.encode.accumulator import Numbering
from sluice.pipelines.records.rows.row_format import MARK, escape_key
from sluice.pipelines.republishing import CODEC_NAMES
from tests.examples import scale_examples

Row = dict[str, Any]

contents = st.one_of(st.none(), st.binary(max_size=12), st.integers(60, 300).map(bytes))
names = st.text(st.characters(codec="utf-8"), max_size=5)
header_lists = st.lists(
    st.fixed_dictionaries({"key": names, "value": st.one_of(st.none(), st.binary(max_size=6))}), max_size=3
)
row_lists = st.lists(
    st.fixed_dictionaries(
        {
            "key": contents,
            "value": contents,
            "timestamp": st.one_of(
                st.integers(1_600_000_000_000, 1_800_000_000_000), st.sampled_from([-1, 0, 1 << 62])
            ),
            "headers": st.one_of(st.none(), header_lists),
            "to": st.integers(0, 3),
        }
    ),
    max_size=20,
)

# Kafka's own tests publish these (UtilsTest.testMurmur2).
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def to_arrow(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{k: r[k] for k in TO_SEND.names} for r in rows], schema=TO_SEND)


def seal(rows: list[Row], **options: Any) -> list[SealedBatch]:
    """Return the batches of rows that are added in two chunks, each a slice of one table."""
    out, accumulator = [], Accumulator(**options)
    table, to = to_arrow(rows), np.array([r["to"] for r in rows], np.int64)
    middle = len(rows) // 3
    for a, b in ((0, middle), (middle, len(rows))):
        out += [*accumulator.add(table.slice(a, b - a), to[a:b], np.arange(a, b))]
    return [*out, *accumulator.flush()]


def decode(batch: SealedBatch, by: Numbering | None = None) -> list[Row]:
    decoder = BatchDecoder("t", batch.partition, 0, batch.count)
    data = batch.encode(by) if by else batch.encode()
    chunks = [*decoder.feed(data), *decoder.finish()]
    rows = [
        r for chunk in chunks for r in chunk.set_column(3, "timestamp", chunk.column(3).cast(pa.int64())).to_pylist()
    ]
    assert [r["offset"] for r in rows] == list(range(batch.count))
    return [{k: r[k] for k in TO_SEND.names} for r in rows]


def to_sent(row: Row) -> Row:
    """Return the row as a log has it: an empty list of headers is null."""
    return {k: row[k] for k in TO_SEND.names} | {"headers": row["headers"] or None}


@settings(max_examples=scale_examples(150))
@given(row_lists, st.sampled_from(sorted(CODECS)), st.integers(1, 700))
def test_encoded_rows_decode_in_order_within_the_size_limit(rows: list[Row], codec: str, limit: int) -> None:
    batches = seal(rows, codec=CODECS[codec].number, batch_bytes=limit)
    by_partition: dict[int, list[Row]] = {}
    for batch in batches:
        assert batch.count == 1 or batch.plain_bytes <= limit
        decoded = decode(batch, Numbering(9, 2, 5, transactional=False))
        assert decoded == [to_sent(rows[n]) for n in batch.numbers]
        by_partition.setdefault(batch.partition, []).extend(decoded)
    assert by_partition == {p: [to_sent(r) for r in rows if r["to"] == p] for p in {r["to"] for r in rows}}


@settings(max_examples=scale_examples(50))
@given(row_lists, st.sampled_from(sorted(CODECS)))
def test_kafka_python_reads_every_codec_and_writes_the_same_bytes(rows: list[Row], codec: str) -> None:
    for batch in seal(rows, codec=CODECS[codec].number):
        chosen = [rows[n] for n in batch.numbers]
        data = bytes(batch.encode(Numbering(7, 3, 11, transactional=True)))
        memory = MemoryRecords(data)
        (read,) = [memory.next_batch()]
        assert (read.producer_id, read.producer_epoch, read.base_sequence, read.is_transactional) == (7, 3, 11, True)
        assert read.validate_crc()
        assert [(r.key, r.value, r.timestamp, r.headers) for r in read] == [
            (r["key"], r["value"], r["timestamp"], [(h["key"], h["value"]) for h in r["headers"] or ()]) for r in chosen
        ]
        if codec == "none":
            theirs = DefaultRecordBatchBuilder(2, 0, True, 7, 3, 11, 1 << 30)
            for n, r in enumerate(chosen):
                theirs.append(
                    n, r["timestamp"], r["key"], r["value"], [(h["key"], h["value"]) for h in r["headers"] or ()]
                )
            other = bytes(theirs.build())  # its leader epoch is 0, ours −1, as in Java: brokers write their own
            assert data[:12] + data[16:] == other[:12] + other[16:]


class RawKey(str):
    """A header key whose bytes kafka-python writes unchanged."""

    def __new__(cls, raw: bytes) -> Self:
        key = super().__new__(cls, raw.hex())
        key.raw = raw
        return key

    raw: bytes

    def encode(self, *_: Any) -> bytes:
        return self.raw


@settings(max_examples=scale_examples(50))
@given(st.lists(st.lists(st.binary(max_size=6) | st.just(MARK.encode() + b"41"), max_size=3), max_size=6))
def test_header_keys_are_sent_as_their_original_bytes(keys: list[list[bytes]]) -> None:
    headers = [[{"key": escape_key(k), "value": k} for k in header_keys] for header_keys in keys]
    rows = [{"key": None, "value": b"v", "timestamp": 5, "headers": h, "to": 0} for h in headers]
    for batch in seal(rows, codec=CODECS["none"].number):
        theirs = DefaultRecordBatchBuilder(2, 0, True, 7, 3, 11, 1 << 30)
        for n, row in enumerate(batch.numbers):
            theirs.append(n, 5, None, b"v", [(RawKey(k), k) for k in keys[row]])
        data, other = bytes(batch.encode(Numbering(7, 3, 11, transactional=True))), bytes(theirs.build())
        assert data[:12] + data[16:] == other[:12] + other[16:]
        assert [r["headers"] for r in decode(batch)] == [headers[n] or None for n in batch.numbers]


def test_tables_of_codecs_agree() -> None:
    numbers = {name: codec.number for name, codec in CODECS.items()}
    assert numbers == {name: number for number, name in enumerate(CODEC_NAMES)}
    assert numbers == {"none": 0} | {codec.name: number for number, codec in decompression.CODECS.items()}


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_batches_with_incompressible_blocks_are_encoded(codec: str) -> None:
    dice = random.Random(1)
    values = [dice.randbytes(70_000), b"again " * 40_000, b"", dice.randbytes(200_000), b"x"] * 2
    rows = [{"key": None, "value": v, "timestamp": n, "headers": None, "to": 0} for n, v in enumerate(values)]
    batches = seal(rows, codec=CODECS[codec].number)
    assert len(batches) == 2
    assert [r for b in batches for r in decode(b)] == [to_sent(r) for r in rows]
    read = [r for b in batches for r in MemoryRecords(bytes(b.encode())).next_batch()]
    assert [r.value for r in read] == values


@settings(max_examples=scale_examples(50))
@given(row_lists)
def test_a_batch_is_split_in_two(rows: list[Row]) -> None:
    rows = [r | {"to": 2} for r in rows]
    for batch in seal(rows, codec=CODECS["lz4"].number):
        if batch.count > 1:
            halves = split(batch)
            assert [h.count for h in halves] == [batch.count // 2, batch.count - batch.count // 2]
            assert [r for h in halves for r in decode(h)] == [to_sent(rows[n]) for n in batch.numbers]
            assert [n for h in halves for n in h.numbers] == list(batch.numbers)


@settings(max_examples=scale_examples(100))
@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_key_is_sent_to_the_same_partition_as_by_java(keys: list[bytes | None], partitions: int, first: int) -> None:
    column = pa.array(keys, pa.binary()).slice(first)
    numbers = np.arange(len(column))
    chosen = by_key(column, partitions, spread(numbers, partitions))
    assert chosen.tolist() == [
        n % partitions if k is None else (murmur2(k) & 0x7FFFFFFF) % partitions for n, k in enumerate(keys[first:])
    ]


def test_murmur2_matches_java() -> None:
    partitions = 1 << 31
    chosen = by_key(pa.array(list(JAVA), pa.binary()), partitions, np.zeros(len(JAVA), np.int64))
    assert chosen.tolist() == [h & 0x7FFFFFFF for h in JAVA.values()]


def test_many_open_batches_are_sealed_at_the_memory_limit() -> None:
    rows = [{"key": None, "value": bytes(5000), "timestamp": 1, "headers": None, "to": n % 50} for n in range(500)]
    accumulator = Accumulator(held_bytes=1 << 20)
    batches = [*accumulator.add(to_arrow(rows), np.array([r["to"] for r in rows]), np.arange(500))]
    assert len(batches) == 50
    assert not [*accumulator.flush()]


def test_batches_stay_full_after_a_huge_record() -> None:
    def add(*values: bytes) -> list[SealedBatch]:
        rows = to_arrow([{"key": None, "value": v, "timestamp": 1, "headers": None} for v in values])
        return [*accumulator.add(rows, np.zeros(len(values), np.int64), np.arange(len(values)))]

    accumulator = Accumulator(batch_bytes=100_000, held_bytes=1 << 20)
    assert [b.count for b in add(bytes(2 << 20))] == [1]
    assert [b.count for _ in range(30) for b in add(*[bytes(1000)] * 10)] == [99, 99, 99]


def test_rows_with_other_columns_or_without_times_are_refused() -> None:
    accumulator = Accumulator()
    with pytest.raises(ValueError, match="not rows to send"):
        list(accumulator.add(pa.RecordBatch.from_pydict({"a": [1]}), np.zeros(1, np.int64), np.zeros(1, np.int64)))
    timeless = to_arrow([{"key": None, "value": None, "timestamp": None, "headers": None}])
    with pytest.raises(ValueError, match="need times"):
        list(accumulator.add(timeless, np.zeros(1, np.int64), np.zeros(1, np.int64)))
