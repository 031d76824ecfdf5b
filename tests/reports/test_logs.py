"""Reports about a partition's log: transactions, compaction, codecs, old formats, headers.

Each log goes through the whole pipeline. The rows must be the visible ones of the log's description, in order, and
every offset must be accounted for: landed, aborted, a marker, or removed by compaction.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lz4.frame
import pyarrow as pa
import pytest
import zstandard
from kafka.record import MemoryRecords

from sluice.pipelines.errors import SluiceError
from sluice.testing.logs import (
    ABORT,
    COMMIT,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    BatchHeader,
    Log,
    LogBatch,
    LogRecord,
    Row,
    encode_message,
    encode_message_set,
    encode_raw_v2,
    log,
)
from tests.reports.world import land_log

TIME = 1_700_000_000_000


def make_records(count: int, size: int = 8, skip: int = 0) -> tuple[LogRecord, ...]:
    return tuple(LogRecord(b"k%d" % i, (b"%d " % i * size)[:size], TIME + i, skip=skip) for i in range(count))


def make_transaction(producer: int, count: int = 2) -> LogBatch:
    return LogBatch(make_records(count), producer=producer, transactional=True)


def commit(producer: int) -> LogBatch:
    return LogBatch((LogRecord(time=TIME + 9),), producer=producer, marker=COMMIT)


def abort(producer: int) -> LogBatch:
    return LogBatch((LogRecord(time=TIME + 9),), producer=producer, marker=ABORT)


def make_plain(count: int = 2, **more: object) -> LogBatch:
    return LogBatch(make_records(count), **more)  # type: ignore[arg-type]


def compress_log(compress: Callable[[bytes], bytes], codec: int, count: int = 3, size: int = 8) -> Log:
    """Returns a log of one batch of format v2 that another compressor wrote."""
    source = log(LogBatch(make_records(count, size)))
    (stored,) = source.batches
    data = encode_raw_v2(
        BatchHeader(0, count - 1, codec, TIME, TIME + count - 1, count=count), compress(stored.data[61:])
    )
    return replace(source, batches=[replace(stored, data=data)])


def compress_zstd_frames(data: bytes) -> bytes:
    """Compress to consecutive frames without their size in the header, as streaming writers do."""
    cut = len(data) // 2
    return b"".join(zstandard.ZstdCompressor(write_content_size=False).compress(d) for d in (data[:cut], data[cut:]))


def compress_zstd_stream(data: bytes) -> bytes:
    """Compress to one frame of unknown size with a window of 8 MiB."""
    how = zstandard.ZstdCompressionParameters.from_level(3, window_log=23, write_content_size=False)
    out = zstandard.ZstdCompressor(compression_params=how).compressobj()
    return out.compress(data) + out.flush()


def compress_lz4_with_size(data: bytes) -> bytes:
    return lz4.frame.compress(data, store_size=True, content_checksum=True, block_linked=True)


def compress_lz4_large(data: bytes) -> bytes:
    return lz4.frame.compress(data, store_size=False, block_size=lz4.frame.BLOCKSIZE_MAX64KB)


ALL_ABORTED = [b for p in range(9) for b in (make_transaction(p), abort(p))]
LOGS: dict[str, Log] = {
    "kafka4beam/brod#659": log(
        make_transaction(1), commit(1), make_transaction(1), abort(1), make_transaction(1), commit(1), make_plain()
    ),
    "risingwavelabs/risingwave#24720": log(make_plain(), make_transaction(4), commit(4)),
    "apache/seatunnel#11471": log(make_transaction(4), commit(4), commit(4), commit(5)),
    "apache/flink-connector-kafka#100": log(make_plain(3), *[commit(p) for p in range(40)]),
    "apache/pinot#12318": log(*ALL_ABORTED, make_plain(1)),
    "apache/pinot#14716": log(make_plain(1), *ALL_ABORTED[:2], make_plain(1)),
    "apache/kafka#11046": log(make_plain(2), *ALL_ABORTED),
    "tulios/kafkajs#562": log(make_plain(2), LogBatch((), tail=5), make_plain(1)),
    "segmentio/kafka-go#813": log(LogBatch(make_records(2), tail=2), LogBatch((), tail=1), make_plain(1)),
    "kafka4beam/brod#263": log(make_plain(3), LogBatch(make_records(3), tail=7), LogBatch(make_records(1), gap=100)),
    "redpanda-data/redpanda#8698": log(make_transaction(1), commit(1), LogBatch((), tail=3)),
    "apache/spark#20836": log(
        LogBatch(make_records(5, skip=3)), make_transaction(1), abort(1), LogBatch(make_records(5, skip=1))
    ),
    "kafka-protocol-rs/kafka-protocol-rs#79": log(make_plain(5, codec=SNAPPY, xerial=True)),
    "TrackingSoft/Kafka#18": log(make_plain(2, codec=SNAPPY, xerial=True), make_plain(2, codec=SNAPPY, xerial=False)),
    "TrackingSoft/Kafka#38": log(
        LogBatch(make_records(40, 4000), codec=SNAPPY), LogBatch(make_records(40, 4000), codec=LZ4)
    ),
    "kafka-python-ng/kafka-python-ng#202": compress_log(compress_zstd_frames, ZSTD, 30, 20_000),
    "kafka4beam/kafka_protocol#142": compress_log(compress_zstd_stream, ZSTD),
    "apache/kafka#23172": compress_log(compress_lz4_with_size, LZ4, 30),
    "dpkp/kafka-python#695": compress_log(compress_lz4_large, LZ4, 600, 10_000),
    "SOHU-Co/kafka-node#1225": log(
        make_plain(20, codec=GZIP, magic=0), make_plain(20, codec=GZIP, magic=1), start=100_000
    ),
    "apache/kafka#3203": log(
        *[LogBatch(make_records(4, skip=1), codec=c, magic=m) for m in (0, 1) for c in (GZIP, SNAPPY, LZ4)], start=77
    ),
    "IBM/sarama#721": log(*[make_plain(3, codec=SNAPPY, magic=1)] * 3, make_plain(3, magic=1), start=1 << 33),
    "confluentinc/librdkafka#1192": log(make_plain(3, codec=LZ4, magic=0), make_plain(3, codec=LZ4, magic=1), start=5),
    "apache/kafka#7628": log(LogBatch(make_records(3, skip=2), magic=0), LogBatch(make_records(3, skip=2), magic=1)),
    "redpanda-data/connect#1478": log(
        LogBatch((LogRecord(headers=(("trace", b"1"), ("trace", b"2"), ("trace", b"1"))),))
    ),
    "apache/kafka#6484": log(LogBatch((LogRecord(headers=(("a", None), ("b", b""))), LogRecord(headers=())))),
}


def list_expected_rows(source: Log) -> list[Row]:
    """Returns the visible rows of the log's description, as a raw feed lands them."""
    keys = ("key", "value", "offset", "timestamp", "timestampType", "headers")
    return [{k: row[k] for k in keys} for row in source.visible(source.start, source.end)]


def land_rows(root: Path, source: Log, answer_bytes: int) -> list[Row]:
    """Land the log, and check that its audit reconciles every offset."""
    landed = land_log(root, source, answer_bytes=answer_bytes)
    counts = landed.counts
    accounted = counts.landed + counts.control + counts.aborted + counts.compacted
    assert (accounted, counts.quarantined) == (source.end - source.start, 0)
    table = landed.rows.drop_columns(["topic", "partition"])
    at = table.schema.get_field_index("timestamp")
    return list(table.set_column(at, "timestamp", table["timestamp"].cast(pa.int64())).to_pylist())


@pytest.mark.parametrize("report", LOGS)
def test_log_lands_with_all_offsets_accounted_for(report: str, tmp_path: Path) -> None:
    source = LOGS[report]
    for number, answer_bytes in enumerate((1, 1 << 20)):
        assert land_rows(tmp_path / str(number), source, answer_bytes) == list_expected_rows(source)


def read_by_kafka_python(data: bytes) -> list[tuple[int, bytes | None]]:
    values, batches = [], MemoryRecords(data)
    while batches.has_next():
        values += [(r.offset, r.value) for r in batches.next_batch()]
    return values


PACKED = [r for r, source in LOGS.items() if source.batches[0].batch.magic == 2 and not source.aborted]


@pytest.mark.parametrize("report", PACKED)
def test_kafka_python_reads_the_same_values(report: str) -> None:
    """kafka-python's own reader finds the same values in the logs above."""
    source = LOGS[report]
    markers = {o for b in source.batches if b.batch.marker is not None for o in b.offsets}
    rows = [(o, v) for o, v in read_by_kafka_python(source.data) if o not in markers]
    if report == "kafka-python-ng/kafka-python-ng#202":
        rows = [
            (row["offset"], row["value"]) for row in list_expected_rows(source)
        ]  # the report: that reader fails on it
    assert rows == [(row["offset"], row["value"]) for row in list_expected_rows(source)]


def test_batch_ends_before_open_transaction(tmp_path: Path) -> None:
    """dpkp/kafka-python#1707: readers of committed records stop where the first open transaction begins."""
    source = log(make_plain(2), make_transaction(1), make_plain(3), make_transaction(2), abort(2))
    landed = land_log(tmp_path, source)
    assert landed.rows["offset"].to_pylist() == [0, 1]


def test_reading_continues_past_compacted_offsets(tmp_path: Path) -> None:
    """dpkp/kafka-python#1390: a reader whose position was compacted away never went on."""
    source = log(LogBatch((LogRecord(b"a", skip=3),)), LogBatch((LogRecord(b"b", skip=40),)))
    landed = land_log(tmp_path, source, answer_bytes=1)
    assert landed.rows["offset"].to_pylist() == [3, 44]
    assert landed.counts.compacted == 43


def test_many_headers_keep_their_order(tmp_path: Path) -> None:
    """MassTransit/MassTransit#5098: a tracer adds one header many times; a map of headers refused the message."""
    headers = tuple(("newrelic" if i % 2 else f"x-{i}", b"%d" % i) for i in range(3000))
    landed = land_log(tmp_path, log(LogBatch((LogRecord(headers=headers),))))
    (row,) = landed.rows["headers"].to_pylist()
    assert [(h["key"], h["value"]) for h in row] == list(headers)


def make_mixed_wrapper() -> Log:
    """Returns a wrapper of format v1 around messages of format v0, as an old cleaner wrote it."""
    batch = LogBatch(make_records(3), NONE, 0)
    source = log(LogBatch(make_records(3), GZIP, 1))
    (stored,) = source.batches
    data = encode_message(2, 1, GZIP, TIME + 2, None, gzip.compress(encode_message_set(batch, (0, 1, 2))))
    return replace(source, batches=[replace(stored, data=data)])


def test_wrapper_with_messages_of_other_format_is_refused(tmp_path: Path) -> None:
    """apache/kafka#2019: an old cleaner converted only the wrapper. Java's consumer refuses such a set; so do we."""
    with pytest.raises(SluiceError) as refused:
        land_log(tmp_path, make_mixed_wrapper())
    assert "orders:0: batch at offset 2" in str(refused.value)
    assert "sluice accept orders corrupt --offsets orders:0:0-3" in str(refused.value)


def test_batch_that_cannot_be_decompressed_is_reported(tmp_path: Path) -> None:
    """dpkp/kafka-python#1033: without a codec's library a consumer returned nothing and no error."""
    source = compress_log(lambda data: b"\0" * 40, ZSTD)
    with pytest.raises(SluiceError, match=r"orders.*0"):
        land_log(tmp_path, source)


def test_offsets_beyond_32_bits_are_kept(tmp_path: Path) -> None:
    """DataDog/integrations-core#24814: offsets went through 32 bits, and a lag was negative."""
    source = log(make_plain(3), start=2_761_265_739)
    assert [row["offset"] for row in land_rows(tmp_path, source, 1)] == [2_761_265_739 + i for i in range(3)]
