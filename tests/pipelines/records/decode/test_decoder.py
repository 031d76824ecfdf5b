"""The rows of an offset range: every visible record once, in order, as kafka-python's builders wrote it."""

from __future__ import annotations

import struct

import cramjam
import pytest
from kafka.record import MemoryRecords

from sluice.pipelines.errors import CorruptBatch, OversizedBatch, UnsupportedBatch
from sluice.pipelines.records.kafka_batches.decode import OffsetCounts, next_position
from sluice.pipelines.records.rows.row_format import get_former_text, unescape_key
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
    compress,
    compress_lz4,
    encode_message,
    encode_raw_v2,
    log,
    with_checksum,
)
from tests.pipelines.records.decode.reading import decode, make_decoder, read, to_rows

SOME = tuple(LogRecord(b"k%d" % i, b"value %d " % i * (i % 7), 1_700_000_000_000 + i * i) for i in range(500))
ODD = (
    LogRecord(None, b"no key"),
    LogRecord(b"deleted", None),
    LogRecord(None, None),
    LogRecord(b"", b""),
    LogRecord(b"k", b"v", -1),
    LogRecord(b"k", b"v", (1 << 63) - 1),
    LogRecord(b"k", b"v", -(1 << 63)),
    LogRecord(b"k", b"v", headers=(("a", b"1"), ("a", None), ("", b""), ("größe", b"\xff\x00"))),
    LogRecord(b"k", b"x" * 300, headers=(("trace", b"t" * 200),)),
)


def read_both(source: Log, **options: object) -> tuple[list[Row], list[Row]]:
    """Return the decoded and the expected rows of a complete log."""
    return read(source, make_decoder(0, source.end, **options), source.end), source.visible(0, source.end)


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
@pytest.mark.parametrize("append_time", [None, 1_700_000_999_999])
def test_every_codec_and_timestamp_type_is_decoded(codec: int, append_time: int | None) -> None:
    got, expected = read_both(log(*[LogBatch(r, codec, append_time=append_time) for r in (SOME, ODD, SOME[:1])]))
    assert got == expected


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("append_time", [None, 1_700_000_999_999])
def test_message_sets(magic: int, codec: int, append_time: int | None) -> None:
    bare = tuple(LogRecord(r.key, r.value, r.time, skip=i % 3) for i, r in enumerate(ODD + SOME))
    stamp = append_time if magic else None
    got, expected = read_both(
        log(LogBatch(bare, codec, magic, append_time=stamp), LogBatch(SOME, codec, magic, append_time=stamp))
    )
    assert got == expected


def test_mixed_record_formats_are_decoded() -> None:
    mixed = [
        LogBatch(SOME[:5], c, m)
        for m, c in [(0, NONE), (1, NONE), (0, NONE), (1, GZIP), (1, NONE), (2, LZ4), (1, NONE)]
    ]
    got, expected = read_both(log(*mixed))
    assert got == expected


def test_records_match_kafka_python() -> None:
    source = log(LogBatch(SOME), LogBatch(ODD[:5] + ODD[7:], gap=4), LogBatch(SOME[:9], GZIP, tail=3))
    mine = decode(source.data)
    theirs = [r for batch in MemoryRecords(source.data) for r in batch]
    assert [(r["offset"], r["key"], r["value"], r["timestamp"], r["headers"]) for r in mine] == [
        (r.offset, r.key, r.value, r.timestamp, [{"key": k, "value": v} for k, v in r.headers] or None) for r in theirs
    ]


def test_snappy_without_framing_is_decoded() -> None:
    got, expected = read_both(log(LogBatch(SOME, SNAPPY, xerial=False)))
    assert got == expected


def test_snappy_framing_with_little_endian_version_is_decoded() -> None:
    data = bytearray(log(LogBatch(SOME, SNAPPY)).data)
    data[61 + 8 : 61 + 16] = struct.pack("<ii", 1, 1)
    assert len(decode(with_checksum(bytes(data)))) == len(SOME)


def test_concatenated_snappy_framings_are_decoded_as_by_kafka_consumer() -> None:
    plain = log(LogBatch(SOME)).data
    body = compress(plain[61:5000], SNAPPY) + compress(plain[5000:], SNAPPY)
    head = bytearray(plain[:61])
    head[8:12], head[22] = struct.pack(">i", 61 - 12 + len(body)), SNAPPY
    assert decode(with_checksum(bytes(head) + body)) == decode(plain)


def test_gaps_tails_and_empty_batches_of_compaction_are_decoded() -> None:
    thin = tuple(LogRecord(b"k", b"v", skip=i) for i in range(20))
    source = log(LogBatch(thin, tail=7), LogBatch((), tail=30, gap=2), LogBatch(SOME[:3], gap=100, delete_horizon=True))
    d = make_decoder(0, source.end)
    assert read(source, d, source.end) == source.visible(0, source.end)
    assert d.position == source.end
    assert d.counts.records == 23


def test_position_advances_past_invisible_batches() -> None:
    source = log(LogBatch((), tail=10), LogBatch(producer=1, marker=COMMIT), LogBatch(SOME[:2], tail=5))
    d = make_decoder(0, source.end)
    assert to_rows(d.feed(source.batches[0].data)) == []
    assert d.position == 10
    assert to_rows(d.feed(source.batches[1].data)) == []
    assert d.position == 11
    assert to_rows(d.feed(source.batches[2].data)) == []
    assert d.position == 18 == source.end
    assert len(to_rows(d.finish())) == 2


def test_only_records_of_the_range_are_decoded() -> None:
    source = log(*[LogBatch(SOME[i : i + 10], [NONE, LZ4][i // 10 % 2]) for i in range(0, 100, 10)])
    for start, end in [(0, 1), (7, 8), (9, 11), (10, 20), (13, 57), (99, 100), (5, 5)]:
        d = make_decoder(start, end)
        assert read(source, d, end) == source.visible(start, end)
        assert d.position >= end
        assert d.counts.records == end - start


def test_range_end_inside_a_gap_is_reached() -> None:
    source = log(LogBatch(SOME[:5]), LogBatch(SOME[:5], gap=20))
    d = make_decoder(0, 10)
    assert len(read(source, d, 10)) == 5
    assert d.position == 25


def test_responses_cut_at_any_byte_are_decoded() -> None:
    source = log(*[LogBatch(SOME[i : i + 3], codec) for i, codec in enumerate([NONE, LZ4, ZSTD, NONE, GZIP])])
    for size in range(1, len(source.data), 7):
        d = make_decoder(0, source.end)
        assert read(source, d, source.end, [size] * 100) == source.visible(0, source.end)


def test_records_read_before_are_skipped() -> None:
    source = log(*[LogBatch(SOME[i : i + 3]) for i in range(5)])
    d = make_decoder(4, source.end)
    out = to_rows([*d.feed(source.data), *d.feed(source.data), *d.finish()])
    assert out == source.visible(4, source.end)


# --- transactions -------------------------------------------------------------------------------------------------


def make_transaction(producer: int, n: int = 3) -> LogBatch:
    return LogBatch(
        tuple(LogRecord(b"p%d" % producer, b"%d" % i) for i in range(n)), producer=producer, transactional=True
    )


INTERLEAVED = log(
    make_transaction(1),  # 0-2
    make_transaction(2),  # 3-5
    LogBatch(SOME[:2]),  # 6-7
    LogBatch(SOME[:2], producer=1),  # 8-9: idempotent only, in no transaction
    LogBatch(producer=1, marker=ABORT),  # 10
    make_transaction(1),  # 11-13: the next one, committed
    LogBatch(producer=2, marker=COMMIT),  # 14
    make_transaction(2, 5),  # 15-19
    LogBatch(producer=1, marker=COMMIT),  # 20
    make_transaction(1),  # 21-23
    LogBatch(producer=2, marker=ABORT),  # 24
    LogBatch(producer=1, marker=ABORT),  # 25
    LogBatch(SOME[:1]),  # 26
)


def test_aborted_records_are_skipped() -> None:
    d = make_decoder(0, INTERLEAVED.end)
    got = read(INTERLEAVED, d, INTERLEAVED.end)
    assert [r["offset"] for r in got] == [3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 26]
    assert (d.counts.records, d.counts.control, d.counts.aborted) == (11, 5, 11)


def test_read_uncommitted_skips_only_markers() -> None:
    d = make_decoder(0, INTERLEAVED.end, read_committed=False)
    got = read(INTERLEAVED, d, INTERLEAVED.end)
    assert [r["offset"] for r in got] == [o for o in range(27) if o not in (10, 14, 20, 24, 25)]
    assert (d.counts.records, d.counts.control, d.counts.aborted) == (22, 5, 0)


@pytest.mark.parametrize("size", [1, 150, 333, 700, 10_000])
def test_ranges_and_responses_may_begin_inside_transactions(size: int) -> None:
    for start in range(INTERLEAVED.end):
        for end in range(start, INTERLEAVED.end + 1, 5):
            d = make_decoder(start, end)
            assert read(INTERLEAVED, d, end, [size] * 100) == INTERLEAVED.visible(start, end)
            assert d.counts.aborted == INTERLEAVED.count(start, end, control=False)
            assert d.counts.control == INTERLEAVED.count(start, end, control=True)


def test_response_may_be_fed_in_pieces_with_its_full_aborted_list() -> None:
    aborted = [(p, first) for p, first, _ in INTERLEAVED.aborted]
    d = make_decoder(0, INTERLEAVED.end)
    pieces = [chunk for b in INTERLEAVED.batches for chunk in d.feed(b.data, aborted)]
    assert to_rows([*pieces, *d.finish()]) == INTERLEAVED.visible(0, INTERLEAVED.end)


def test_markers_read_before_an_error_are_read_again() -> None:
    source = log(
        LogBatch(SOME[:2], magic=1),
        make_transaction(1),
        LogBatch(producer=1, marker=ABORT),
        make_transaction(1),
        LogBatch(producer=1, marker=COMMIT),
    )
    damaged = bytearray(source.data)
    damaged[12] ^= 1  # the CRC-32 of the first message, which the decode loop checks, long after the markers were met
    d = make_decoder(0, source.end)
    with pytest.raises(CorruptBatch, match="CRC-32"):
        list(d.feed(bytes(damaged), [(1, 2)]))
    assert read(source, d, source.end) == source.visible(0, source.end)


def test_aborted_records_are_counted_exactly_at_range_edges() -> None:
    thin = tuple(LogRecord(b"k", b"v", skip=1) for _ in range(10))  # offsets 1, 3, … 19
    source = log(LogBatch(thin, LZ4, producer=4, transactional=True), LogBatch(producer=4, marker=ABORT))
    d = make_decoder(4, 15)
    assert read(source, d, 15) == []
    assert (d.counts.aborted, d.counts.control) == (5, 0)


def test_control_batch_of_another_type_ends_no_transaction() -> None:
    source = log(
        make_transaction(1), LogBatch(producer=1, marker=5), make_transaction(1), LogBatch(producer=1, marker=ABORT)
    )
    data, _ = source.fetch(0)
    assert decode(data, [(1, 0)]) == []


# --- chunks -------------------------------------------------------------------------------------------------------


def test_chunks_are_bounded_by_rows() -> None:
    source = log(*[LogBatch(SOME, LZ4), LogBatch(ODD * 40), LogBatch(SOME, LZ4, magic=1)])
    d = make_decoder(0, source.end, chunk_rows=7)
    chunks = [*d.feed(source.data), *d.finish()]
    assert {c.num_rows for c in chunks[:-1]} == {7}
    assert to_rows(chunks) == source.visible(0, source.end)


def test_chunks_are_bounded_by_bytes() -> None:
    records = tuple(LogRecord(b"k" * 10, b"v" * (10 * i % 90), headers=(("h" * 5, b"x" * 5),)) for i in range(300))
    source = log(LogBatch(records, ZSTD))
    d = make_decoder(0, source.end, chunk_bytes=256)
    chunks = [*d.feed(source.data), *d.finish()]
    assert to_rows(chunks) == source.visible(0, source.end)
    for c in chunks:
        size = sum(len(r["key"]) + len(r["value"]) + 10 for r in to_rows([c]))
        assert size <= 256


def test_record_larger_than_the_chunk_limit_gets_a_separate_chunk() -> None:
    big = bytes(50_000_000)
    source = log(LogBatch(SOME[:3]), LogBatch((LogRecord(b"k", big, headers=(("h", big),)),), LZ4), LogBatch(SOME[:3]))
    d = make_decoder(0, source.end, chunk_bytes=1000, max_batch_bytes=200 << 20)
    chunks = [*d.feed(source.data), *d.finish()]
    assert [c.num_rows for c in chunks] == [3, 1, 3]
    assert chunks[1].column("value")[0].as_py() == big
    assert chunks[1].column("headers")[0].as_py() == [{"key": "h", "value": big}]


def test_chunk_is_not_modified_after_it_was_yielded() -> None:
    source = log(*[LogBatch(SOME) for _ in range(4)])
    d = make_decoder(0, source.end, chunk_rows=300)
    chunks = d.feed(source.data)
    first = next(chunks)
    before = first.to_pylist()
    assert sum(c.num_rows for c in chunks) + first.num_rows + sum(c.num_rows for c in d.finish()) == 2000
    assert first.to_pylist() == before


# Java 17's `new String(bytes, UTF_8)`.
AS_JAVA = [
    ("41ff42", "A\ufffdB"),
    ("c3a9", "é"),
    ("c3", "\ufffd"),
    ("e282", "\ufffd"),
    ("e28241", "\ufffdA"),
    ("eda080", "\ufffd"),
    ("eda0", "\ufffd"),
    ("edacec90", "\ufffd\ufffd"),
    ("f09f9880", "😀"),
    ("f09f98", "\ufffd"),
    ("f48fbfbf", "\U0010ffff"),
    ("f4908080", "\ufffd\ufffd\ufffd\ufffd"),
    ("c080", "\ufffd\ufffd"),
    ("12f37e8fedac", "\x12\ufffd\x7e\ufffd\ufffd"),
    ("00", "\x00"),
]


def test_header_keys_keep_their_bytes_and_former_text_matches_java() -> None:
    # Placeholders of the same length first: the builder takes text only.
    headers = tuple(("x" * (len(key) // 2), bytes([i])) for i, (key, _) in enumerate(AS_JAVA))
    data = bytearray(log(LogBatch((LogRecord(headers=headers), LogRecord(headers=(("plain", b""),))))).data)
    at = 0
    for i, (key, _) in enumerate(AS_JAVA):
        raw = bytes.fromhex(key)
        at = data.index(b"x" * len(raw) + bytes([2, i]), at)
        data[at : at + len(raw)] = raw
    got = decode(with_checksum(bytes(data)))
    keys = [h["key"] for h in got[0]["headers"]]
    assert [unescape_key(key).hex() for key in keys] == [key for key, _ in AS_JAVA]
    assert [get_former_text(key) for key in keys] == [text for _, text in AS_JAVA]
    assert [k for k, (_, text) in zip(keys, AS_JAVA, strict=True) if k == text] == ["é", "😀", "\U0010ffff", "\x00"]
    assert got[1]["headers"] == [{"key": "plain", "value": b""}]


# --- bad bytes ----------------------------------------------------------------------------------------------------


def test_checksum_mismatch_names_the_batch() -> None:
    source = log(*[LogBatch(SOME[i * 3 : i * 3 + 3], LZ4) for i in range(5)])
    data = bytearray(source.data)
    data[sum(len(b.data) for b in source.batches[:3]) + 70] ^= 1
    d = make_decoder(0, source.end)
    with pytest.raises(CorruptBatch, match=r"orders:3: batch at offset 9: its checksum is 0x") as e:
        list(d.feed(bytes(data)))
    assert (e.value.topic, e.value.partition, e.value.start, e.value.end) == ("orders", 3, 9, 12)
    assert d.position == 9
    # A second read from the position succeeds.
    assert to_rows([*d.feed(source.fetch(d.position)[0]), *d.finish()]) == source.visible(0, source.end)


def test_unparsable_record_discards_its_whole_batch() -> None:
    source = log(LogBatch(ODD), LogBatch(ODD[7:8] + ODD[:7]))
    bad = bytearray(source.batches[1].data)
    bad[-1] = 2  # the last record claims a header
    d = make_decoder(0, source.end)
    with pytest.raises(CorruptBatch, match=r"batch at offset 9: .* \(byte \d+\)"):
        list(d.feed(source.batches[0].data + with_checksum(bytes(bad))))
    assert (d.position, d.counts.records) == (9, 9)
    assert to_rows([*d.feed(source.batches[1].data), *d.finish()]) == source.visible(0, source.end)


def test_wrong_checksum_is_ignored_without_crc_checks() -> None:
    data = bytearray(log(LogBatch(SOME[:3])).data)
    data[17] ^= 1
    assert len(decode(bytes(data), check_crc=False)) == 3


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_message_checksums_are_checked(magic: int, codec: int) -> None:
    source = log(LogBatch(SOME[:4], codec, magic))
    data = bytearray(source.data)
    data[-1] ^= 1
    with pytest.raises(CorruptBatch, match=r"checksum|CRC-32") as e:
        decode(bytes(data))
    assert (e.value.start, e.value.end) == (3 if codec else 0, 4)


def test_unknown_formats_and_codecs_are_unsupported() -> None:
    newer = bytearray(log(LogBatch()).data)
    newer[16] = 3
    with pytest.raises(UnsupportedBatch, match="format 3"):
        decode(bytes(newer))
    with pytest.raises(UnsupportedBatch, match="codec 6"):
        decode(encode_raw_v2(BatchHeader(attributes=6), b"whatever"))


@pytest.mark.parametrize(
    ("count", "delta", "records"),
    [
        ((1 << 31) - 1, (1 << 31) - 1, b""),
        (-1, 0, b""),
        (2, 0, bytes(20)),
        (1, 0, b""),
        (1, 0, b"\x0c\0\0\0\1\1"),
        (1, 0, b"\x0c\0\0\0\1\1\0\0"),
        (1, 0, b"\x0c\0\0\2\1\1\0"),
        (2, 1, b"\x0c\0\0\2\1\1\0\x0c\0\0\0\1\1\0"),
        (1, 0, b"\x0c\0\0\0\x7e\1\0"),
        (1, 0, b"\x0c\0\0\0\1\x7e\0"),
        (1, 0, b"\x0c\0\0\0\1\1\x7e"),
        (1, 0, b"\x0c\0\0\0\1\1\1"),
        (1, 0, b"\x10\0\0\0\1\1\2\1\1"),
        (1, 0, b"\x10\0\0\0\1\1\2\0\x7e"),
        (1, 0, b"\xff" * 30),
        (1, 0, b"\x16\0" + b"\xff" * 9 + b"\x7f\0\1\1\0"),
    ],
)
def test_wrong_counts_and_lengths(count: int, delta: int, records: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode(encode_raw_v2(BatchHeader(delta=delta, count=count), records))


def test_negative_lengths_are_null_as_in_java() -> None:
    assert decode(encode_raw_v2(BatchHeader(first=5, newest=5), b"\x0c\0\0\0\x03\x05\0"))[0]["key"] is None


@pytest.mark.parametrize("size", [-1, 0, 13, 48])
def test_sizes_smaller_than_any_batch_are_refused(size: int) -> None:
    data = bytearray(log(LogBatch()).data)
    data[8:12] = struct.pack(">i", size)
    with pytest.raises(CorruptBatch, match="size"):
        decode(bytes(data))
    with pytest.raises(CorruptBatch, match="size"):
        next_position(bytes(data), 0, "orders", 3)


def test_decreasing_offsets_between_batches_reject_both_batches() -> None:
    source = log(*[LogBatch(SOME[:3]) for _ in range(4)])
    data = bytearray(source.data)
    at = len(source.batches[0].data) + len(source.batches[1].data)
    data[at : at + 8] = struct.pack(">q", 1 << 40)  # no checksum covers the base offset
    d = make_decoder(0, source.end)
    with pytest.raises(CorruptBatch, match="offset 9: its offsets do not follow"):
        list(d.feed(bytes(data)))
    assert d.position == 6


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_compression_bombs_are_bounded(codec: int) -> None:
    source = log(LogBatch((LogRecord(b"k", bytes(9 << 20)),), codec))
    assert len(source.data) < 1 << 20
    d = make_decoder(0, 1, max_batch_bytes=8 << 20)
    with pytest.raises(OversizedBatch, match="8,388,608 bytes"):
        list(d.feed(source.data))
    assert not len(d._scratch.data)  # an error that is kept also keeps the decoder
    assert len(decode(source.data, max_batch_bytes=16 << 20)) == 1


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_oversized_batch_is_replaced_by_stand_ins(codec: int) -> None:
    large = LogBatch((*SOME[:2], LogRecord(b"k", bytes(9 << 20))), codec)
    source = log(LogBatch(SOME[:3], codec), large, LogBatch(SOME[3:6], codec))
    d = make_decoder(0, source.end, max_batch_bytes=8 << 20)
    read = [*d.read(source.data), *((None, chunk) for chunk in d.finish())]
    rows, stand_ins = (to_rows(c for batch, c in read if (batch is None) == readable) for readable in (True, False))
    expected = source.visible(0, source.end)
    assert rows == [r for r in expected if not 3 <= r["offset"] < 6]
    newest = max(r["timestamp"] for r in expected[3:6])
    assert stand_ins == [r | {"key": None, "value": None, "headers": None, "timestamp": newest} for r in expected[3:6]]
    assert (d.position, d.counts) == (source.end, OffsetCounts(records=9))


@pytest.mark.parametrize(("start", "end"), [(4, 9), (0, 4), (4, 5)])
def test_stand_ins_stay_within_the_range(start: int, end: int) -> None:
    source = log(LogBatch(SOME[:3]), LogBatch((*SOME[:2], LogRecord(b"k", bytes(9 << 20))), ZSTD), LogBatch(SOME[3:6]))
    d = make_decoder(start, end, max_batch_bytes=8 << 20)
    read = [*d.read(source.data), *((None, chunk) for chunk in d.finish())]
    assert [r["offset"] for _, chunk in read for r in to_rows([chunk])] == [*range(start, end)]


def test_record_with_endless_headers_is_oversized() -> None:
    many = LogRecord(b"k", b"v", headers=(("", None),) * 100_000)
    source = log(LogBatch(SOME[:3]), LogBatch((*SOME[:2], many), LZ4), LogBatch(SOME[3:6]))
    d = make_decoder(0, source.end, max_batch_bytes=1 << 20)
    read = [*d.read(source.data), *((None, chunk) for chunk in d.finish())]
    assert [r["offset"] for batch, c in read if batch for r in to_rows([c])] == [3, 4, 5]


def test_oversized_batch_with_gaps_is_refused() -> None:
    source = log(LogBatch(SOME[:3]), LogBatch((LogRecord(b"k", bytes(9 << 20)),), ZSTD, tail=2))
    d = make_decoder(0, source.end, max_batch_bytes=8 << 20)
    with pytest.raises(OversizedBatch, match="8,388,608 bytes"):
        list(d.read(source.data))
    assert d.position == 3


def test_oversized_aborted_batch_is_counted_at_the_edges_of_a_range() -> None:
    large = LogBatch((*SOME[:2], LogRecord(b"k", bytes(9 << 20))), ZSTD, producer=7, transactional=True)
    source = log(large, LogBatch(producer=7, marker=ABORT), LogBatch(SOME[:3]))
    data, aborted = source.fetch(1)
    d = make_decoder(1, 2, max_batch_bytes=1 << 20)
    assert ([*d.read(data, aborted)], d.counts) == ([], OffsetCounts(aborted=1))


def test_large_record_does_not_wait_for_the_next_one() -> None:
    source = log(LogBatch((*SOME[:3], LogRecord(b"k", bytes(2 << 20)))), LogBatch(SOME[3:6]))
    for cuts in ([], [len(log(LogBatch((*SOME[:3], LogRecord(b"k", bytes(2 << 20))))).data)]):
        d, at, chunks = make_decoder(0, source.end, chunk_bytes=1 << 20), 0, []
        for stop in (*cuts, len(source.data)):
            chunks += [c.num_rows for c in d.feed(source.data[at:stop])]
            at = stop
        assert chunks == [3, 1], "also if the response ends there"


def test_damage_at_the_end_of_the_largest_buffer_is_corrupt() -> None:
    plain = log(LogBatch((LogRecord(b"k", bytes(range(256)) * 4096),))).data[61:]
    frame = bytearray(compress_lz4(plain, block=4 << 20))
    frame[40:60] = b"\xff" * 20
    header = BatchHeader(0, 0, LZ4, 0, 0, count=1)
    with pytest.raises(CorruptBatch) as raised:
        decode(encode_raw_v2(header, bytes(frame)), max_batch_bytes=1 << 20)
    assert not isinstance(raised.value, OversizedBatch)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_truncated_compressed_data_is_refused(codec: int) -> None:
    complete = log(LogBatch(SOME, codec)).data
    for stop in (61, 62, 70, len(complete) // 2, len(complete) - 5):
        data = bytearray(complete[:stop])
        data[8:12] = struct.pack(">i", stop - 12)
        with pytest.raises(CorruptBatch):
            decode(with_checksum(bytes(data)), max_batch_bytes=1 << 20)


def test_lz4_frames_of_other_writers_are_decoded() -> None:
    plain = log(LogBatch(SOME)).data
    linked = bytes(cramjam.lz4.compress(plain[61:]))
    assert not linked[4] & 0x20
    sized = compress_lz4(plain[61:])
    sized = sized[:4] + b"\x68\x40" + struct.pack("<Q", len(plain) - 61) + b"\x00" + sized[7:]
    stored = compress_lz4(plain[61:65])[:-4] + compress_lz4(plain[65:])[7:]
    for frame in (linked, sized, stored):
        header = BatchHeader(0, len(SOME) - 1, LZ4, SOME[0].time, SOME[0].time, count=len(SOME))
        batch = encode_raw_v2(header, frame)
        assert decode(batch) == decode(plain)


def test_nested_compressed_message_set_is_refused() -> None:
    inner = log(LogBatch(SOME[:3], GZIP, 1)).data
    with pytest.raises(CorruptBatch, match="compressed"):
        decode(encode_message(2, 1, GZIP, 0, None, compress(inner, GZIP)))


def test_wrapper_offset_may_exceed_its_remaining_messages() -> None:
    inner = log(LogBatch(SOME[:3], NONE, 0)).data
    d = make_decoder(0, 20)
    got = to_rows([*d.feed(encode_message(10, 0, GZIP, 0, None, compress(inner, GZIP))), *d.finish()])
    assert ([r["offset"] for r in got], d.position) == ([0, 1, 2], 11)


@pytest.mark.parametrize("base", [-1, (1 << 63) - 1, (1 << 63) - 3])
def test_offsets_out_of_bounds_are_refused(base: int) -> None:
    with pytest.raises(CorruptBatch, match="offsets"):
        decode(encode_raw_v2(BatchHeader(base, 2), b"\x0c\0\0\0\1\1\0"))


# --- positions for the fetcher ------------------------------------------------------------------------------------


def test_next_position_follows_the_last_complete_batch() -> None:
    source = log(
        LogBatch(SOME[:5], tail=2),
        LogBatch(SOME[:5], LZ4, gap=10),
        LogBatch(SOME[:2], GZIP, 1),
        LogBatch(SOME[:2], NONE, 1),
    )
    complete = source.data
    assert next_position(b"", 3) == 3
    assert next_position(complete, 0) == source.end
    for cut in range(1, len(complete), 13):
        done = 0
        reached = 0
        for b in source.batches[:3]:
            done += len(b.data)
            if done <= cut:
                reached = b.last + 1
        if cut < done:
            assert next_position(memoryview(complete)[:cut], 0) == reached


def test_invalid_range_and_chunk_size_are_refused() -> None:
    with pytest.raises(ValueError, match="range"):
        make_decoder(5, 4)
    with pytest.raises(ValueError, match="chunks"):
        make_decoder(0, 4, chunk_rows=0)


def test_an_empty_response_yields_nothing() -> None:
    d = make_decoder(0, 10)
    assert to_rows([*d.feed(b""), *d.feed(memoryview(b"")), *d.finish()]) == []
    assert d.position == 0
