"""For any log, offset ranges, cuts and damage: the right rows or one of our errors, and never a read out of bounds."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import decode_varint

from sluice.pipelines.errors import CorruptBatch, UnsupportedBatch
from sluice.pipelines.records.kafka_batches.decode import next_position
from sluice.testing.logs import (
    ABORT,
    COMMIT,
    GZIP,
    HUGE,
    LZ4,
    NONE,
    SNAPPY,
    Log,
    LogBatch,
    LogRecord,
    Row,
    log,
    with_checksum,
    wrap_int64,
)
from tests.examples import scale_examples
from tests.pipelines.records.decode.reading import make_decoder, read, to_rows

OURS = (CorruptBatch, UnsupportedBatch)

times = st.one_of(
    st.integers(1_600_000_000_000, 1_800_000_000_000),
    st.sampled_from([-1, 0, -(1 << 63), (1 << 63) - 1]),
)
contents = st.one_of(
    st.none(), st.binary(max_size=12), st.integers(60, 300).map(lambda n: bytes(i % 251 for i in range(n)))
)
names = st.text(st.characters(codec="utf-8"), max_size=5)
headers = st.lists(st.tuples(names, st.one_of(st.none(), st.binary(max_size=6))), max_size=3).map(tuple)
gaps = st.sampled_from([0, 0, 0, 1, 5])
plain_records = st.builds(LogRecord, contents, contents, times, st.just(()), gaps)
records = st.builds(LogRecord, contents, contents, times, st.one_of(st.just(()), headers), gaps)
clocks = st.one_of(st.none(), times)
producers = st.integers(0, 2)

ordinary = st.builds(
    LogBatch,
    st.lists(records, max_size=6).map(tuple),
    codec=st.integers(0, 4),
    producer=st.one_of(st.just(-1), producers),
    append_time=clocks,
    gap=gaps,
    tail=st.integers(1, 3),
    xerial=st.booleans(),
)
transactional = st.builds(
    LogBatch,
    st.lists(records, min_size=1, max_size=4).map(tuple),
    codec=st.integers(0, 4),
    producer=producers,
    transactional=st.just(True),
    gap=gaps,
    tail=gaps,
)
markers = st.builds(LogBatch, producer=producers, marker=st.sampled_from([ABORT, COMMIT]), gap=gaps)
message_sets = st.builds(
    LogBatch,
    st.lists(plain_records, min_size=1, max_size=5).map(tuple),
    codec=st.sampled_from([NONE, GZIP, SNAPPY, LZ4]),
    magic=st.just(1),
    append_time=clocks,
    gap=gaps,
)
oldest = st.builds(
    LogBatch,
    st.lists(plain_records, min_size=1, max_size=5).map(tuple),
    codec=st.sampled_from([NONE, GZIP, SNAPPY, LZ4]),
    magic=st.just(0),
    gap=gaps,
)
logs = st.lists(
    st.one_of(ordinary, transactional, transactional, markers, message_sets, oldest), min_size=1, max_size=10
)


@settings(max_examples=scale_examples(150))
@given(st.data(), logs)
def test_every_range_of_a_random_log_is_decoded(data: st.DataObject, batches: list[LogBatch]) -> None:
    source = log(*batches)
    start = data.draw(st.integers(0, source.end), "start")
    end = data.draw(st.integers(start, source.end), "end")
    committed = data.draw(st.booleans(), "read committed")
    sizes = data.draw(st.lists(st.integers(0, 600), max_size=6), "sizes of responses")
    options = {
        "read_committed": committed,
        "chunk_rows": data.draw(st.integers(1, 9), "chunk rows"),
        "chunk_bytes": data.draw(st.sampled_from([1, 100, 1 << 20]), "chunk bytes"),
    }
    d = make_decoder(start, end, **options)
    assert read(source, d, end, sizes) == source.visible(start, end, committed)
    assert d.position >= end
    assert d.counts.control == source.count(start, end, control=True)
    assert d.counts.aborted == (source.count(start, end, control=False) if committed else 0)


@settings(max_examples=scale_examples(60))
@given(logs, st.lists(st.integers(0, 400), max_size=8), st.integers(1, 7))
def test_chunks_do_not_depend_on_response_boundaries(
    batches: list[LogBatch], sizes: list[int], chunk_rows: int
) -> None:
    source = log(*batches)

    def count_rows(cuts: list[int]) -> list[int]:
        d, out, wanted = make_decoder(0, source.end, chunk_rows=chunk_rows, chunk_bytes=500), [], iter(cuts)
        while d.position < source.end:
            response, aborted = source.fetch(d.position, max(next(wanted, HUGE), get_needed_bytes(source, d.position)))
            out += [c.num_rows for c in d.feed(response, aborted)]
        return out + [c.num_rows for c in d.finish()]

    assert count_rows(sizes) == count_rows([])


def get_needed_bytes(source: Log, position: int) -> int:
    return len(next(b for b in source.batches if b.last >= position).data)


# --- damage -------------------------------------------------------------------------------------------------------


def read_damaged(data: bytes, aborted: list[tuple[int, int]], **options: object) -> tuple[list[Row], bool]:
    """Return the rows, including those before an error, and true if there was an error."""
    d, chunks = make_decoder(**options), []
    try:
        for chunk in d.feed(data, aborted):
            chunks.append(chunk)
    except OURS:
        return to_rows([*chunks, *d.finish()]), True
    return to_rows([*chunks, *d.finish()]), False


@settings(max_examples=scale_examples(150))
@given(st.data(), logs)
def test_flipped_bit_is_recovered_by_reading_again(data: st.DataObject, batches: list[LogBatch]) -> None:
    source = log(*batches)
    damaged = bytearray(source.data)
    at = data.draw(st.integers(0, len(damaged) - 1), "byte")
    # No checksum covers a base offset: Kafka's own consumer would read it as it is.
    assume(not in_base_offset(source.data, at))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    d, chunks = make_decoder(0, source.end, chunk_rows=data.draw(st.integers(1, 9), "chunk rows")), []
    with suppress(*OURS):
        for chunk in d.feed(bytes(damaged), source.fetch(0)[1]):
            chunks.append(chunk)
    assert to_rows(chunks) + read(source, d, source.end) == source.visible(0, source.end)
    assert d.counts.control == source.count(0, source.end, control=True)
    assert d.counts.aborted == source.count(0, source.end, control=False)


def in_base_offset(data: bytes, at: int) -> bool:
    begin = 0
    while begin < len(data):
        if begin <= at < begin + 8:
            return True
        begin += 12 + struct.unpack_from(">i", data, begin + 8)[0]
    return False


@settings(max_examples=scale_examples(200))
@given(st.data(), st.lists(records, min_size=1, max_size=4), st.integers(0, 3))
def test_malformed_records_with_a_valid_checksum(
    data: st.DataObject, lying_records: list[LogRecord], tail: int
) -> None:
    batch = bytearray(log(LogBatch(tuple(lying_records), tail=tail)).data)
    for _ in range(data.draw(st.integers(1, 3), "edits")):
        at = data.draw(st.one_of(st.integers(57, 60), st.integers(61, len(batch) - 1)), "byte")
        batch[at] = data.draw(st.integers(0, 255), "value")
    damaged = with_checksum(bytes(batch))
    got, failed = read_damaged(damaged, [])
    theirs = read_with_kafka_python(damaged)
    if not failed and theirs is not None:
        assert [(r["offset"], r["key"], r["value"], r["timestamp"]) for r in got] == theirs


class OneByteAttributes(DefaultRecordBatch):
    """Raises for attributes above 0x7f, which kafka-python reads as a varint although they are one byte (format v2)."""

    def _read_msg(self, *args: Any) -> Any:
        _, at = decode_varint(self._buffer, self._pos)
        if at < len(self._buffer) and self._buffer[at] & 0x80:
            raise CorruptRecordError("attributes beyond what kafka-python reads")
        return super()._read_msg(*args)


def read_with_kafka_python(batch: bytes) -> list[tuple[object, ...]] | None:
    try:
        return [(r.offset, r.key, r.value, wrap_int64(r.timestamp)) for r in OneByteAttributes(batch)]
    except CorruptRecordError:
        return None


@settings(max_examples=scale_examples(150))
@given(st.data(), logs)
def test_any_damage_with_checksums_off(data: st.DataObject, batches: list[LogBatch]) -> None:
    source = log(*batches)
    damaged = bytearray(source.data)
    for _ in range(data.draw(st.integers(1, 5), "edits")):
        at = data.draw(st.integers(0, len(damaged) - 1), "byte")
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3), "bytes")
    read_damaged(bytes(damaged), source.fetch(0)[1], check_crc=False, max_batch_bytes=1 << 20, chunk_rows=5)
    probe(bytes(damaged))


@settings(max_examples=scale_examples(100), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.binary(max_size=200), st.sampled_from([0, 1, 2, 3, 255]), st.integers(-5, 200))
def test_arbitrary_bytes(noise: bytes, magic: int, size: int) -> None:
    head = struct.pack(">qiI", 7, size, 0) + bytes([magic])
    for data in (noise, head + noise):
        read_damaged(data, [(0, 0)], check_crc=False)
        probe(data)


def probe(data: bytes) -> None:
    with suppress(*OURS):
        assert next_position(data, 3) >= 3


@pytest.mark.slow
def test_nothing_is_read_out_of_bounds(tmp_path: Path) -> None:
    """The same tests over loops in which numba checks every index."""
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    here = Path(__file__).parent
    only = "any_damage or valid_checksum or arbitrary_bytes or message_sets or wrong_counts"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", only, str(here)]
    modules = ("kafka_batches.decode.loops", "kafka_batches.encode.loops", "compiled.take_rows")
    subprocess.run([sys.executable, "infra/loops.py", *modules], env=env, cwd=here.parents[3], check=True)
    run = subprocess.run(command, env=env, cwd=here.parents[3], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
