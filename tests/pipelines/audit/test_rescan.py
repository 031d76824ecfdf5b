"""The rescan reports every difference between the lake and the log, for landed and quarantined records."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, equal_rows, rescan
from sluice.pipelines.errors import OffsetsLost
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.landed_rows import compare_rows
from sluice.pipelines.ledger.entries import PublishEntry, dump
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.testing.cluster import MemoryFetcher
from tests.pipelines.batch.test_batch import PARTITIONS
from tests.pipelines.validation.test_drift import SCHEMA, World

ROWS = [{"id": 1, "amount": 1.5, "note": "a"}, {"id": "x"}, {"id": 3, "amount": 2, "note": None}, None, b"nojson"]
P0 = PARTITIONS[0]
Change = Callable[[pa.Table], pa.Table]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def feed(world: World) -> Feed:
    feed = world.make_feed(SCHEMA)
    world.land_records(feed, *ROWS)
    assert world.find_problems(feed) == []
    return feed


def list_files(world: World, folder: str) -> list[str]:
    return [p for p in world.lake.list(f"{folder}/orders") if p.endswith(".parquet")]


def rewrite(world: World, folder: str, change: Change) -> None:
    """Change the one file of this folder, and its number of rows in the ledger: a reader stops at another number."""
    (path,) = list_files(world, folder)
    table = change(pq.read_table(io.BytesIO(world.lake.get(path) or b"")))
    out = io.BytesIO()
    pq.write_table(table, out)
    world.lake.put(path, out.getvalue())
    same = lambda r: tuple(replace(p, rows=table.num_rows) if p.path == path else p for p in r.parts)  # noqa: E731
    change_receipts(world, lambda r: replace(r, parts=same(r)))


def change_receipts(world: World, change: Callable[[Receipt], Receipt]) -> None:
    """Change the receipts in the publish entry."""
    number, entry = next((n, e) for n, e in world.ledger.entries() if isinstance(e, PublishEntry))
    changed = entry.model_copy(update={"receipts": tuple(map(change, entry.receipts))})
    world.lake.put(paths.log_path("orders", number), dump(changed))


def with_value(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    items = table.column(name).to_pylist()
    items[row] = value
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(items, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("folder", "change", "says"),
    [
        ("data", lambda t: with_value(t, "id", 1, 4), "the record at offset 2 differs from the landed row"),
        ("data", lambda t: with_value(t, "note", 0, None), "the record at offset 0 differs from the landed row"),
        (
            "data",
            lambda t: with_value(t, "kafka_tombstone", 2, False),
            "the record at offset 3 differs from the landed row",
        ),
        ("data", lambda t: t.slice(0, 2), "offset 3 is not landed"),
        ("data", lambda t: pa.concat_tables([t.slice(0, 1), t]), "an offset is there twice"),
        ("data", lambda t: with_value(t, "kafka_offset", 2, 4), "an offset is there twice"),
        ("data", lambda t: with_value(t, "kafka_offset", 2, 9), "the files have more rows than the log|not landed"),
        ("quarantine", lambda t: with_value(t, "value", 0, b"{}"), "offset 1 in quarantine is not the log's"),
        ("quarantine", lambda t: with_value(t, "key", 1, None), "offset 4 in quarantine is not the log's"),
        ("quarantine", lambda t: t.filter(pc.equal(t.column("offset"), 1)), "offset 4 is not landed"),
    ],
)
def test_differences_from_the_log_are_reported(
    world: World, feed: Feed, folder: str, change: Change, says: str
) -> None:
    rewrite(world, folder, change)
    problems = [p for p in world.find_problems(feed) if "orders:0:0-5" in p]
    assert any(part in p for p in problems for part in says.split("|")), problems


def test_quarantined_record_that_fits_is_reported(world: World, feed: Feed) -> None:
    moved: list[pa.Table] = []
    rewrite(world, "data", lambda t: moved.append(t.slice(2)) or t.slice(0, 2))  # type: ignore[func-returns-value]
    tombstone = {"value": None, "offset": 3, "byte": None}

    def quarantine_tombstone(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        return pa.Table.from_pylist([rows[0], rows[0] | tombstone, rows[1]], table.schema)

    rewrite(world, "quarantine", quarantine_tombstone)
    assert any("offset 3 fits, and is in quarantine" in p for p in world.find_problems(feed))


def test_rows_are_rebuilt_with_the_shape_of_their_landing(world: World, feed: Feed) -> None:
    other = world.make_feed({"amount": "decimal(20,4)", "more": "list<string>"})
    assert world.find_problems(other) == []
    world.land_records(other, {"amount": 1, "more": ["a"]}, {"more": 1})
    assert world.find_problems(world.make_feed(SCHEMA)) == []


def test_fixed_rows_are_not_compared_and_replayed_rows_may_have_any_shape(world: World, feed: Feed) -> None:
    def add_row(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        return pa.Table.from_pylist([rows[0], rows[0] | {"kafka_offset": 1, "id": 77}, *rows[1:]], table.schema)

    rewrite(world, "data", add_row)
    rewrite(world, "quarantine", lambda t: t.slice(1))
    change_receipts(world, lambda r: replace(r, relanded=(Range(1, 2),)))
    assert any("offset 1 differs from the landed row" in p for p in world.find_problems(feed))
    change_receipts(world, lambda r: replace(r, mended=(Range(1, 2),)))
    assert [p for p in world.find_problems(feed) if "offset" in p and "what landed" in p] == []


def test_unescaped_header_keys_of_older_files_match_the_log(tmp_path: Path) -> None:
    def read_back(*keys: str) -> pa.Table:
        headers = [[{"key": key, "value": b"v"}] for key in keys]
        pq.write_table(pa.table({"headers": pa.array([*headers, None], HEADERS)}), tmp_path / "rows.parquet")
        return pq.read_table(tmp_path / "rows.parquet")

    escaped = read_back("sluice.hex:41ff42", "plain", "sluice.hex:41ff42")
    assert equal_rows(read_back("A\ufffdB", "plain", "A\ufffdC"), escaped).tolist() == [True, True, False, True]
    assert equal_rows(escaped, escaped).all()


@pytest.mark.parametrize(
    "kind", [pa.timestamp("ms", "UTC"), pa.timestamp("ns"), pa.date32(), pa.time64("us"), pa.time32("ms")], ids=str
)
def test_times_out_of_range_for_python_are_compared_next_to_nan(kind: pa.DataType) -> None:
    number, largest = (pa.int32(), (1 << 31) - 1) if kind.bit_width == 32 else (pa.int64(), (1 << 62) + 1)

    def build(times: list[int | None]) -> pa.Table:
        item = pa.struct([("x", pa.float64()), ("t", number), ("m", pa.map_(pa.string(), number))])
        numbers = pa.array([[{"x": math.nan, "t": t, "m": [("a", t)]}] for t in times], pa.list_(item))
        as_times = pa.struct([("x", pa.float64()), ("t", kind), ("m", pa.map_(pa.string(), kind))])
        return pa.table({"n": numbers.cast(pa.list_(as_times))})

    assert equal_rows(build([largest, 1, None]), build([largest, 1, None])).all()
    assert compare_rows(iter(build([largest]).to_batches()), iter(build([largest]).to_batches()))
    assert equal_rows(build([largest, 1, None]), build([largest - 1, 1, 1])).tolist() == [False, True, False]


def test_nan_equals_nan_at_any_depth_and_nothing_else() -> None:
    kind = pa.list_(pa.struct([("x", pa.float64()), ("m", pa.map_(pa.string(), pa.float32()))]))
    items = [[{"x": x, "m": [("a", x)]}, None] for x in (math.nan, 1.0, None)]
    rows = pa.table({"x": pa.array([math.nan, 1.0, None]), "n": pa.array(items, kind)})
    again = pa.table({"x": pa.array([math.nan, 1.0, None]), "n": pa.array(items, kind)})
    assert equal_rows(rows, again).all()
    assert compare_rows(iter(rows.to_batches()), iter(again.to_batches()))
    for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        assert equal_rows(rows, rows.take(order)).sum() == 1
        for name in rows.schema.names:
            own, other = (iter(t.select([name]).combine_chunks().to_batches()) for t in (rows, rows.take(order)))
            assert not compare_rows(own, other)


def compare_with_log(
    world: World, feed: Feed, compacted: dict[str, bool], fetcher: MemoryFetcher | None = None
) -> AuditReport:
    report = audit(world.ledger, world.lake)
    current = world.ledger.read().current
    today = {current[p.tp]: p for p in world.topic.partitions(["orders"], feed.isolation)}
    log = CurrentLog(fetcher or world.topic.make_fetcher(), feed.isolation, today, compacted)
    return rescan(report, world.ledger, world.lake, feed.shape, log)


@pytest.fixture
def raw(world: World) -> Feed:
    """A feed that landed offsets 0 to 4, of which Kafka then compacted away 1, 3 and 4."""
    feed = world.make_feed(None)
    world.land_records(feed, b"a", b"b", b"c", b"d", b"e")
    (batch,) = world.topic.batches[P0]
    first, _, third, _, _ = batch.records
    world.topic.batches[P0] = [replace(batch, records=(first, replace(third, skip=1)), tail=2)]
    return feed


def test_records_that_compaction_removed_since_are_not_comparable(world: World, raw: Feed) -> None:
    report = compare_with_log(world, raw, {"orders": True})
    assert report.problems == ()
    assert (report.compared, report.not_comparable) == (2, 3)
    assert len(report.list_uncompared()) == 1, "nothing proves the other records"
    rewrite(world, "data", lambda t: with_value(t, "value", 2, b"x"))
    assert "the record at offset 2 differs" in str(compare_with_log(world, raw, {"orders": True}).problems[-1])


@pytest.mark.parametrize("compacted", [{"orders": False}, {}], ids=["not compacted", "unknown"])
def test_records_that_the_log_lacks_without_compaction_are_a_problem(
    world: World, raw: Feed, compacted: dict[str, bool]
) -> None:
    (problem,) = compare_with_log(world, raw, compacted).problems
    assert "offset 1 is not in the log" in problem.text
    assert ("unless it compacted the topic" if compacted else "DESCRIBE_CONFIGS") in problem.remedy


def test_records_deleted_during_a_rescan_are_not_comparable(world: World) -> None:
    feed = world.make_feed(None)
    world.write(b"a")
    world.land_records(feed, b"b")
    fetcher = world.topic.make_fetcher()
    fetcher.answer_bytes = 1
    fetcher.failing[P0] = OffsetsLost("gone", remedy="", topic="orders", partition=0, start=0, end=1)
    report = compare_with_log(world, feed, {}, fetcher)
    assert (report.problems, report.compared, report.not_comparable) == ((), 0, 2)
