"""The rows of a window, compared with DuckDB over the same files: late and early ones, keys, updates, copies."""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind
from sluice.pipelines.records.rows.row_hashes import combine, hash_rows, hash_texts
from sluice.pipelines.status.repeats import Cause, RepeatCounter
from sluice.pipelines.status.window_rows import WindowRows, read_rows
from sluice.pipelines.util.units import HOUR, MINUTE
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing import Message, land

START = 1_767_225_600_000
WINDOW = Range(START, START + HOUR)
TYPED = """\
kafka: {bootstrap: "memory:9092"}
topics: orders
start: earliest
format: json
schema: {id: int64, name: string, tags: "list<string>", at: "struct<x:int32, y:float64>"}
"""
RAW = """\
kafka: {bootstrap: "memory:9092"}
topics: orders
start: earliest
"""


def read(root: Path, messages: Sequence[Message], text: str = RAW, by: Sequence[str] = ()) -> WindowRows:
    """Land the messages in a folder, and read all of them as the rows of one window."""
    (root / "feeds").mkdir(exist_ok=True)
    (root / "feeds" / "orders.yaml").write_text(text)
    landed = land(root / "feeds" / "orders.yaml", messages, lake=root / "lake", environ={})
    receipts = sorted(
        (r for b in landed.result.batches for r in b.receipts), key=lambda r: (r.offset_range.key, r.offset_range.start)
    )
    parts = [(r.offset_range, p) for r in receipts for p in r.of(PartKind.LANDED)]
    return read_rows(LocalLake(root / "lake"), parts, WINDOW.start, WindowSettings(), by, lambda progress: None)


def query(root: Path, sql: str) -> Any:
    """Returns the first row of a query in DuckDB over the landed files, named ROWS."""
    files = [str(path) for path in (root / "lake" / "data").rglob("*.parquet")]
    source = duckdb.read_parquet(files, hive_partitioning=False)  # noqa: F841 - the query names it
    return duckdb.sql(sql.replace("ROWS", "source")).fetchall()[0]


def make(chance: random.Random, count: int) -> list[Message]:
    """Records with few keys and values, most of them in the window, some without a key."""
    return [
        Message(
            b'{"id": %d, "name": "%d", "tags": ["%d"], "at": {"x": 1, "y": 0.5}}' % (chance.randrange(9), i % 3, i % 2),
            chance.choice([None, b"a", b"b", b"%d" % chance.randrange(50)]),
            time=START + chance.randrange(-HOUR, 2 * HOUR),
            partition=chance.randrange(3),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_keys_updates_and_copies_match_duckdb(seed: int, tmp_path: Path) -> None:
    result = read(tmp_path, make(random.Random(seed), 500))
    keys, pairs, keyed, all_pairs, records = query(
        tmp_path,
        "select count(distinct key), count(distinct (key, value)) filter (key is not null), count(key),"
        " count(distinct (key, value)), count(*) from ROWS",
    )
    repeats = result.repeats
    assert (repeats.exact, repeats.records, repeats.keyed) == (True, records, keyed)
    assert (repeats.keys, repeats.updates, repeats.copied) == (keys, pairs - keys, records - all_pairs)


def test_typed_columns_serve_as_key_and_nested_values_are_compared(tmp_path: Path) -> None:
    result = read(tmp_path, make(random.Random(7), 400), TYPED, by=("id", "tags"))
    keys, pairs, records = query(
        tmp_path,
        'select count(distinct (id, tags)), count(distinct (id, name, tags, "at")), count(*) from ROWS',
    )
    repeats = result.repeats
    assert (repeats.keys, repeats.updates, repeats.copied) == (keys, pairs - keys, records - pairs)
    assert repeats.by == ("id", "tags")


def test_late_and_early_records_match_duckdb(tmp_path: Path) -> None:
    result = read(tmp_path, make(random.Random(1), 400))
    late, furthest, median, early = query(
        tmp_path,
        f"""with stamped as (select epoch_ms("timestamp") as ms from ROWS)
        select count(*) filter (ms < {WINDOW.start}), max({WINDOW.start} - ms),
        median({WINDOW.start} - ms) filter (ms < {WINDOW.start}), count(*) filter (ms >= {WINDOW.end}) from stamped""",
    )
    assert (result.late.records, 1000 * result.late.furthest_seconds, 1000 * result.late.median_seconds) == (
        late,
        furthest,
        int(median),
    )
    assert result.early.records == early
    assert result.late.windows == {"2025-12-31T23:00": late}
    assert result.late.furthest is not None
    assert WINDOW.start - (result.late.furthest.timestamp or 0) == furthest
    assert result.earliest == result.late.furthest


def record(key: bytes | None, value: bytes, minutes: float, partition: int = 0) -> Message:
    return Message(value, key, time=START + int(minutes * MINUTE), partition=partition)


def test_copies_are_reported_with_likely_cause_and_example(tmp_path: Path) -> None:
    retried, twice, sent = record(b"r", b"1", 1), record(b"t", b"2", 2), record(b"s", b"3", 3)
    others = [record(b"%d" % i, b"x", 4) for i in range(3)]
    again = [replace(twice, partition=1), record(b"s", b"3", 30)]
    result = read(
        tmp_path, [retried, *others, retried, twice, sent, *again, record(b"u", b"1", 5), record(b"u", b"2", 6)]
    )
    causes = {c.cause: (c.records, [f"{a} {b}" for a, b in c.examples]) for c in result.repeats.copies}
    assert causes == {
        Cause.RETRIED: (1, ["orders:0:0 orders:0:4"]),
        Cause.WRITTEN_AGAIN: (1, ["orders:0:5 orders:1:0"]),
        Cause.SENT_AGAIN: (1, ["orders:0:6 orders:0:7"]),
    }
    assert result.repeats.updates == 1
    assert result.repeats.update
    assert [str(c) for c in result.repeats.update] == ["orders:0:8", "orders:0:9"]
    assert [str(c) for c in result.ends[Key("orders", 0, "memory")]] == ["orders:0:0", "orders:0:9"]


@pytest.mark.parametrize("text", [RAW, TYPED])
def test_repeated_tombstone_is_reported_as_deleted_again(text: str, tmp_path: Path) -> None:
    deletes = [Message(None, b"k", time=START + minutes * MINUTE) for minutes in (1, 2, 3)]
    result = read(tmp_path, [record(b"k", b'{"id": 1}', 0), *deletes], text)
    (copies,) = result.repeats.copies
    assert (copies.cause, copies.records) == (Cause.DELETED_AGAIN, 2)


def test_tombstones_have_no_columns_and_are_not_copies(tmp_path: Path) -> None:
    deletes = [Message(None, key, time=START) for key in (b"a", b"b", None, None)]
    repeats = read(tmp_path, [record(b"k", b'{"id": 1}', 0), *deletes], TYPED, by=("id",)).repeats
    assert (repeats.records, repeats.keyed, repeats.keys, repeats.copies) == (5, 1, 1, ())


def test_files_by_record_time_are_read_in_offset_order(tmp_path: Path) -> None:
    """Their offsets interleave, and no record is in them twice."""
    result = read(tmp_path, make(random.Random(4), 300), RAW + "landing: {layout: record_time}\n")
    assert (result.landed_twice, result.rows) == ((), 300)
    first, last = query(tmp_path, 'select min("offset"), max("offset") from ROWS where partition = 1')
    assert [c.offset for c in result.ends[Key("orders", 1, "memory")]] == [first, last]


def test_part_read_twice_is_reported_as_landed_twice(tmp_path: Path) -> None:
    assert read(tmp_path, [record(b"a", b"1", 1), record(b"b", b"2", 2)]).landed_twice == ()
    (path,) = (tmp_path / "lake" / "data").rglob("*.parquet")
    name = str(path.relative_to(tmp_path / "lake"))
    part = (OffsetRange("orders", 0, "memory", 0, 2), Part("p", PartKind.LANDED, name, name, 2, 1, ""))
    result = read_rows(
        LocalLake(tmp_path / "lake"), [part, part], WINDOW.start, WindowSettings(), (), lambda progress: None
    )
    assert [str(c) for c in result.landed_twice] == ["orders:0:0", "orders:0:1"]


def test_counts_beyond_the_limit_are_estimates() -> None:
    chance = np.random.default_rng(5)
    counter = RepeatCounter(limit=4000)
    keys = chance.integers(0, 40_000, 60_000, np.uint64)
    values = chance.integers(0, 2, 60_000, np.uint64)
    exact = len(np.unique(keys)), len(np.unique(keys * np.uint64(2) + values))
    for at in range(0, 60_000, 1000):
        part = slice(at, at + 1000)
        column = pa.array(keys[part])
        hashes = hash_rows([("key", column)], 1000)
        both = hash_rows([("key", column), ("value", pa.array(values[part]))], 1000)
        offsets = np.arange(at, at + 1000)
        counter.add(
            Key("orders", 0, "id"), offsets, offsets, (hashes, np.ones(1000, bool)), (both, np.zeros(1000, np.int8))
        )
    result = counter.build()
    assert not result.exact
    assert result.keys == pytest.approx(exact[0], rel=0.2)
    assert result.copied == pytest.approx(60_000 - exact[1], rel=0.2)


@pytest.mark.parametrize("updated", [0, 1, 19_999])
def test_updates_are_counted_and_shown_among_many_copies(updated: int) -> None:
    """Every key has copies; few have another value, and whichever it is, it is the example."""
    keys = np.random.default_rng(7).permutation(np.repeat(np.arange(20_000), 3))
    values = np.where((keys == updated) & (np.cumsum(keys == updated) > 1), 1, 0) if updated else np.zeros(60_000, int)
    counter = RepeatCounter()
    for at in range(0, 60_000, 7000):
        of, offsets = keys[at : at + 7000], np.arange(at, min(at + 7000, 60_000))
        hashes = hash_rows([("key", pa.array(of))], len(of))
        both = combine(hashes, hash_rows([("value", pa.array(values[at : at + 7000]))], len(of)))
        everywhere = np.ones(len(of), bool), np.zeros(len(of), np.int8)
        counter.add(Key("orders", 0, "id"), offsets, offsets, (hashes, everywhere[0]), (both, everywhere[1]))
    result, changes = counter.build(), 1 if updated else 0
    assert (result.exact, result.keyed, result.keys, result.updates) == (True, 60_000, 20_000, changes)
    assert result.copied == 40_000 - changes
    if result.update:
        assert [c.offset for c in result.update] == np.flatnonzero(keys == updated)[:2].tolist()
    assert bool(result.update) is bool(updated)


def add_rows(counter: RepeatCounter, keys: np.ndarray, values: np.ndarray, first: int = 0) -> None:
    """Add records of one partition with these keys and values; each timestamp stands for two offsets."""
    hashes = hash_rows([("key", pa.array(keys))], len(keys))
    both = combine(hashes, hash_rows([("value", pa.array(values))], len(keys)))
    offsets = np.arange(first, first + len(keys))
    always, kinds = np.ones(len(keys), bool), np.zeros(len(keys), np.int8)
    counter.add(Key("orders", 0, "id"), offsets, offsets // 2, (hashes, always), (both, kinds))


def test_copies_of_many_rows_have_the_causes_and_examples_of_a_search() -> None:
    chance = np.random.default_rng(11)
    keys, values = chance.integers(0, 15_000, 60_000), chance.integers(0, 3, 60_000)
    keys[1:200:2] = keys[:200:2]
    values[1:200:2] = values[:200:2]  # the second offset of a timestamp repeats the first
    counter, last, expected = RepeatCounter(), dict[tuple[int, int], int](), dict[Cause, list[tuple[int, int]]]()
    for at in range(0, 60_000, 7000):
        add_rows(counter, keys[at : at + 7000], values[at : at + 7000], at)
    for offset, row in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
        if (before := last.get(row)) is not None:
            same_time = before // 2 == offset // 2
            expected.setdefault(Cause.RETRIED if same_time else Cause.SENT_AGAIN, []).append((before, offset))
        last[row] = offset
    copies = counter.build().copies
    assert {c.cause: c.records for c in copies} == {cause: len(pairs) for cause, pairs in expected.items()}
    for c in copies:
        assert [(a.offset, b.offset) for a, b in c.examples] == expected[c.cause][:3]


def test_memory_does_not_grow_with_the_rows() -> None:
    def measure_peak(rows: int) -> int:
        counter, chance = RepeatCounter(), np.random.default_rng(3)
        tracemalloc.start()
        try:
            for at in range(0, rows, 1 << 14):
                add_rows(counter, chance.integers(0, 1 << 40, 1 << 14), np.zeros(1 << 14, np.int64), at)
            assert counter.build().keys == rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert measure_peak(1 << 20) < measure_peak(1 << 17) + (8 << 20), "65 bytes a row would be 60 MB more"


def test_no_room_for_hashes_names_the_folder_and_another_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = np.arange(60_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Failed, match=r"(?s)cannot be counted: No such file or directory.*TMPDIR"):
        add_rows(RepeatCounter(), keys, keys)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counter = RepeatCounter()
    add_rows(counter, keys, keys)
    assert counter.build().keys == 60_000
    assert [*tmp_path.iterdir()] == []


def test_hashes_are_equal_only_for_equal_rows() -> None:
    rows = [
        {"a": a, "l": items, "s": member, "m": pairs, "d": flag}
        for a in ("x", "", None)
        for items in ([1, 2], [2, 1], [], [None], None)
        for member in ({"x": 1, "y": ["q"]}, {"x": 1, "y": None}, None)
        for pairs in ([("k", 1.5)], [("k", None)], None)
        for flag in (True, False, None)
    ]
    schema = pa.schema(
        [
            ("a", pa.string()),
            ("l", pa.list_(pa.int64())),
            ("s", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))])),
            ("m", pa.map_(pa.string(), pa.float32())),
            ("d", pa.bool_()),
        ]
    )
    batch = pa.RecordBatch.from_pylist(rows * 2, schema)
    columns = list(zip(schema.names, batch.columns, strict=True))
    hashes = hash_rows(columns, len(batch))
    assert len(set(hashes.tolist())) == len(rows)
    assert hashes[: len(rows)].tolist() == hashes[len(rows) :].tolist()
    assert hash_rows(columns[::-1], len(batch)).tolist() == hashes.tolist()
    tail = [(name, column.slice(7, 50)) for name, column in columns]
    assert hash_rows(tail, 50).tolist() == hashes[7:57].tolist()


def test_a_wider_column_has_the_same_hashes() -> None:
    narrow, wide = pa.array([1, -2, None], pa.int16()), pa.array([1, -2, None], pa.int64())
    assert hash_rows([("a", narrow)], 3).tolist() == hash_rows([("a", wide)], 3).tolist()
    assert (
        hash_rows([("a", narrow), ("b", pa.nulls(3, pa.string()))], 3).tolist() == hash_rows([("a", wide)], 3).tolist()
    )


def hash_by_paper(key: tuple[int, int], text: bytes) -> int:
    """Returns SipHash-1-3, written after its paper."""
    mask = 2**64 - 1

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & mask

    first, second = key
    v = [
        first ^ 0x736F6D6570736575,
        second ^ 0x646F72616E646F6D,
        first ^ 0x6C7967656E657261,
        second ^ 0x7465646279746573,
    ]

    def mix() -> None:
        v[0] = (v[0] + v[1]) & mask
        v[1] = rotate(v[1], 13) ^ v[0]
        v[0] = rotate(v[0], 32)
        v[2] = (v[2] + v[3]) & mask
        v[3] = rotate(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & mask
        v[3] = rotate(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & mask
        v[1] = rotate(v[1], 17) ^ v[2]
        v[2] = rotate(v[2], 32)

    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        mix()
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(3):
        mix()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_texts_have_the_hashes_of_the_paper() -> None:
    dice = random.Random(3)
    texts = [dice.randbytes(n % 41) for n in range(400)] + [b"x" * 300]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    key, out = np.array([dice.getrandbits(63), dice.getrandbits(63)]), np.empty(len(texts), np.int64)
    hash_texts(np.frombuffer(b"".join(texts), np.uint8), ends, key, out)
    assert out.view(np.uint64).tolist() == [hash_by_paper((int(key[0]), int(key[1])), text) for text in texts]
