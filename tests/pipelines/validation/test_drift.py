"""Schemas over time: drift is counted exactly, the policy applies, and all landed rows stay one table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import reading
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import FeedError, SchemaChanged, SchemaDrifted
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ledger import Ledger, State, checkpoint
from sluice.pipelines.ledger.entries import SchemaEntry
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Counts, Drift, DriftKind, PartKind, Receipt
from sluice.pipelines.planning.schema_changes import declare, evolve, evolve_schema, find_shape
from sluice.pipelines.ports import Job, Ports
from sluice.pipelines.records.json import typer
from sluice.pipelines.records.json.format import JsonFormat
from sluice.pipelines.records.rows.row_format import Format
from sluice.pipelines.records.rows.wire_format import AVRO, RegisteredSchema
from sluice.pipelines.schema.schema import Kind, Type, arrow_type, parse_schema
from sluice.pipelines.schema.wider import holds, join, join_texts, parse_type
from sluice.pipelines.validation.drift import MOST_FIELDS, OTHERS, Drifts, check_drift, sum_drift
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.spark import parts
from sluice.resources.spark import parts as types
from sluice.testing.engine import MemoryEngine, MemoryLiveness, owner
from sluice.testing.group import MemoryGroup
from sluice.testing.logs import LogBatch, LogRecord
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, Topic
from tests.pipelines.records.avro.rows import encode
from tests.pipelines.records.json.rows import make_chunk

CATCH_UP = Request(RequestKind.CATCH_UP)
NEW, MISSING, WIDENED, WRONG, OUT_OF_RANGE, INEXACT, MALFORMED, *_ = DriftKind
SCHEMA = {"id": "int32", "amount": "decimal(5,2)", "note": "string"}


class World:
    """A typed feed over a log in memory, in a lake on disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.topic, self.now, self.runs = root, Topic(), START, 0
        (root / "feeds").mkdir()
        self.liveness = MemoryLiveness()
        self.lake = LocalLake(root / "lake")

    def make_feed(self, schema: dict[str, str] | None, on_drift: str = "extra") -> Feed:
        typed = f"format: json\nschema: {json.dumps(schema)}\npolicies: {{on_drift: {on_drift}}}\n" if schema else ""
        text = "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: orders\nstart: earliest\nlake: lake\nwindow: 1h\n"
        path = self.root / "feeds" / "orders.yaml"
        path.write_text(text + typed)
        return load_feed(path, {})

    def write(self, *values: dict[str, Any] | bytes | None, partition: int = 0) -> None:
        data = [v if v is None or isinstance(v, bytes) else json.dumps(v).encode() for v in values]
        records = tuple(LogRecord(b"k", v, START + 60_000) for v in data)
        self.topic.batches[PARTITIONS[partition]].append(LogBatch(records))

    def make_ports(self, feed: Feed) -> Ports:
        engine = MemoryEngine(self.lake, self.topic.make_fetcher, feed.landing)
        return Ports(self.topic, MemoryGroup(), self.lake, engine, self.liveness, lambda: self.now, None)  # type: ignore[arg-type]

    def land(self, feed: Feed, request: Request = CATCH_UP) -> Landed:
        self.runs += 1
        try:
            return land(feed, self.make_ports(feed), request, owner(f"token-{self.runs}"), lambda progress: None)
        finally:
            self.liveness.dead.add(f"token-{self.runs}")

    def land_records(self, feed: Feed, *values: dict[str, Any] | bytes | None) -> tuple[Receipt, ...]:
        """Write these records and land them in a run. Returns its receipts."""
        self.write(*values)
        return tuple(r for b in self.land(feed).batches for r in b.receipts)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", lambda: self.now, "test", self.topic.id)

    @property
    def entries(self) -> list[SchemaEntry]:
        return [e for _, e in self.ledger.entries() if isinstance(e, SchemaEntry)]

    def read_window(self, feed: Feed) -> reading.Windows:
        self.now = START + 3 * HOUR
        self.land(feed)
        return reading.of_feed(feed, START)

    def find_problems(self, feed: Feed) -> list[str]:
        """Returns the problems that the audit and a rescan report."""
        report = audit(self.ledger, self.lake)
        current = self.ledger.read().current
        today = {current[p.tp]: p for p in self.topic.partitions(["orders"], feed.isolation)}
        fetcher: Any = self.topic.make_fetcher()
        book, lake = self.ledger, self.lake
        return [
            str(p) for p in rescan(report, book, lake, feed.shape, CurrentLog(fetcher, feed.isolation, today)).problems
        ]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- types


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("int64", "int8"), ("int64", "uint32"), ("uint16", "uint8"), ("float64", "float32"), ("float64", "int32"),
        ("decimal(10,3)", "decimal(5,2)"), ("timestamp(us)", "timestamp(ms)"), ("timestamp(us)", "epoch(s)"),
        ("string", "json"), ("list<int64>", "list<int8>"), ("map<string, float64>", "map<string, float32>"),
        ("struct<a:int64, b:string>", "struct<a:int32>"), ("struct<b:string>", "struct<a:int32>"),
    ],
)  # fmt: skip
def test_type_covers_all_values_of_narrower_type(wide: str, narrow: str) -> None:
    assert holds(parse_type(wide), parse_type(narrow))
    arrow_type(parse_type(wide))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("int32", "int64"), ("int32", "uint32"), ("uint64", "int8"), ("float64", "int64"), ("float32", "float64"),
        ("decimal(5,3)", "decimal(5,2)"), ("timestamp(ns)", "timestamp(us)"), ("timestamp(ms)", "date"),
        ("string", "int32"), ("json", "struct<a:int32>"), ("struct<A:int32>", "struct<a:int32>"),
        ("list<struct<a:string>>", "list<struct<a:int8>>"), ("binary", "string"),
    ],
)  # fmt: skip
def test_type_does_not_cover_all_values_of_other_type(wide: str, narrow: str) -> None:
    assert not holds(parse_type(wide), parse_type(narrow))


@pytest.mark.parametrize(
    ("texts", "becomes"),
    [
        (("int64", "float64"), "float64"), (("int64", ""), "int64"), (("", ""), ""), (("string", "json"), "json"),
        (("bool", "int64"), "json"), (("string", "int64"), "json"), (("uint8", "int8"), "int16"),
        (("uint64", "int8"), "float64"), (("decimal(5,2)", "decimal(4,3)"), "decimal(6,3)"), (("", "bool"), "bool"),
    ],
)  # fmt: skip
def test_observed_types_are_joined(texts: tuple[str, ...], becomes: str) -> None:
    assert join_texts(*texts) == join_texts(*reversed(texts)) == becomes


NUMBERS = [*(Type(k) for k in list(Kind)[:10]), Type(Kind.DECIMAL, 9, 2), Type(Kind.DECIMAL, 20, 0), Type(Kind.JSON)]


@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
def test_type_join_does_not_depend_on_order(a: Type, b: Type, c: Type) -> None:
    assert join(a, a) == a
    assert join(a, b) == join(b, a)
    wide = join(join(a, b), c)
    assert wide.kind in (Kind.JSON, Kind.FLOAT64) or all(holds(wide, t) for t in (a, b, c))


# -- counting drift


def observe_drift(
    world: World, *values: dict[str, Any] | bytes | None, schema: dict[str, str] | None = None
) -> dict[Any, Any]:
    receipts = world.land_records(world.make_feed(schema or SCHEMA), *values)
    return {(d.kind, d.field): (d.records, d.first, d.type) for d in sum_drift(receipts)}


ROW = {"id": 1, "amount": 1.5, "note": "x"}


def test_records_that_fit_the_schema_do_not_drift(world: World) -> None:
    assert observe_drift(world, ROW, None, ROW | {"id": None}) == {}


def test_unknown_fields_are_counted_by_name_and_typed(world: World) -> None:
    drift = observe_drift(
        world,
        ROW,
        ROW | {"coupon": "x", "rank": 1, "gone": None},
        ROW | {"coupon": None, "rank": 2.5, "big": 1 << 70},
        b'{"id":1,"amount":1,"note":"","coupon":"y","coupon":"z","c\\u006fupon":"w","ok":true}',
        ROW | {"ok": {"a": [1, {"b": 2}]}, "tags": [1], "a\nb\\": 1},
    )
    assert drift == {
        (NEW, "coupon"): (3, 1, "string"),
        (NEW, "rank"): (2, 1, "float64"),
        (NEW, "gone"): (1, 1, ""),
        (NEW, "big"): (1, 2, "json"),
        (NEW, "ok"): (2, 3, "json"),
        (NEW, "tags"): (1, 4, "json"),
        (NEW, "a\\nb\\\\"): (1, 4, "int64"),
    }


def test_fields_without_any_value_are_missing_not_counting_tombstones(world: World) -> None:
    assert observe_drift(world, {"id": 1}, None, {"id": 2, "note": None}) == {
        (MISSING, "amount"): (2, 0, ""),
        (MISSING, "note"): (2, 0, ""),
    }
    assert observe_drift(world, None, None) == {}, "tombstones have no fields"


def test_drift_reports_type_that_would_fit(world: World) -> None:
    schema = SCHEMA | {"lines": "list<struct<n:int8>>", "at": "timestamp(ms)", "small": "uint8", "part": "float32"}
    row = ROW | {"lines": [{"n": 1}], "at": "2026-01-01T00:00:00Z", "small": 1, "part": 1.5}
    drift = observe_drift(
        world,
        row,
        *(row | {"id": n} for n in (1 << 31, 1 << 62, 1.5, 1 << 80, "x")),
        *(row | {"amount": n} for n in (12345.5, 1.125, "1.5")),
        *(row | {"lines": [{"n": 1}, {"n": n}]} for n in (128, True)),
        *(row | {"small": n} for n in (300, -1)),
        row | {"at": "yesterday"},
        row | {"part": 1e300},
        schema=schema,
    )
    assert drift == {
        (WIDENED, "id"): (3, 1, "float64"),
        (OUT_OF_RANGE, "id"): (1, 4, "float64"),
        (WRONG, "id"): (1, 5, "string"),
        (WIDENED, "amount"): (2, 6, "decimal(8,3)"),
        (WRONG, "amount"): (1, 8, "string"),
        (WIDENED, "lines[].n"): (1, 9, "int16"),
        (WRONG, "lines[].n"): (1, 10, "bool"),
        (WIDENED, "small"): (2, 11, "int32"),
        (MALFORMED, "at"): (1, 13, "string"),
        (WIDENED, "part"): (1, 14, "float64"),
    }


@pytest.mark.parametrize(
    ("numbers", "type_text"), [((7, -1), "int64"), ((1.5,), "float64"), ((1e300, 7), "float64")], ids=str
)
def test_numbers_of_another_type_of_field_are_reported_by_their_type(
    world: World, numbers: tuple[float, ...], type_text: str
) -> None:
    drift = observe_drift(world, ROW, *(ROW | {"note": n} for n in numbers))
    assert drift == {(WRONG, "note"): (len(numbers), 1, type_text)}


def test_drifted_field_names_are_bounded_in_number_and_length(world: World) -> None:
    drift = observe_drift(world, ROW | {f"n{i}": i for i in range(100)}, ROW | {"x" * 700: 1, "y" * 5000: 1})
    assert len([k for k in drift if k[1] != OTHERS]) == MOST_FIELDS
    assert drift[(NEW, OTHERS)][0] == 100 + 2 - MOST_FIELDS
    assert max(len(name) for _, name in drift) <= 201


def test_long_field_name_is_reported_by_its_beginning(world: World) -> None:
    drift = observe_drift(world, ROW | {f"{'y' * 5000}{n}": n for n in range(3)}, ROW | {"é" * 1300: "x"})
    assert drift == {(NEW, f"{'y' * 200}…"): (1, 0, "int64"), (NEW, f"{'é' * 200}…"): (1, 1, "string")}


def test_drift_is_summed_over_pieces_and_ranges() -> None:
    drifts = Drifts()
    drifts.add([Drift(NEW, "a", 2, 7, "int64"), Drift(MISSING, "b", 5, 0)], 5)
    drifts.add([Drift(NEW, "a", 1, 3, "float64")], 5)
    assert drifts.all == (Drift(NEW, "a", 3, 3, "float64"),)
    ranges = [OffsetRange("orders", p, "id-1", 0, 10) for p in (0, 1, 2)]
    missing = (Drift(MISSING, "b", 10, 0),)
    empty = Receipt(ranges[2], 10, Counts(compacted=10), (), "a")
    receipts = [Receipt(s, 10, Counts(landed=10), (), "a", drift=missing) for s in ranges[:2]]
    assert sum_drift([*receipts, empty]) == (Drift(MISSING, "b", 20, 0),)
    assert sum_drift([receipts[0], replace(receipts[1], drift=())]) == ()


# -- policies


def test_closed_schema_quarantines_records_with_unknown_fields(world: World) -> None:
    feed = world.make_feed(SCHEMA, "quarantine")
    receipts = world.land_records(feed, ROW, ROW | {"coupon": 1}, ROW | {"id": "x", "more": 1}, None)
    assert sum((r.counts for r in receipts), Counts()) == Counts(landed=2, quarantined=2)
    assert [(d.kind, d.field, d.records) for d in sum_drift(receipts)] == [(NEW, "coupon", 1), (WRONG, "id", 1)]
    world.now = START + 3 * HOUR
    world.land(feed)
    rows = reading.of_feed(feed, START, kind="quarantined").arrow().to_pylist()
    refusals = [(r["offset"], r["stage"], r["reason"], r["field"]) for r in rows]
    assert refusals == [(1, "schema", "unknown_field", "coupon"), (2, "schema", "wrong_type", "id")]
    assert world.find_problems(feed) == []


def test_feed_that_fails_on_drift_publishes_nothing_until_fixed(world: World) -> None:
    world.write(ROW, ROW | {"coupon": "s3cret"})
    with pytest.raises(SchemaDrifted, match=r"coupon \(string\) is not in the schema, 1 record.*orders:0:1") as caught:
        world.land(world.make_feed(SCHEMA, "fail")).check()
    assert "s3cret" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert world.ledger.read().landed == {}
    done = world.land(world.make_feed(SCHEMA))
    assert done.batches[0].adopted_offset_ranges == 1, "the failed run's receipts are kept"
    check_drift(done.batches[0].receipts, world.make_feed(SCHEMA).policies)
    world.land_records(world.make_feed(SCHEMA, "fail"), {"id": 1}, ROW)


def test_on_drift_is_refused_for_raw_feed(world: World) -> None:
    path = world.root / "feeds" / "orders.yaml"
    world.make_feed(None)
    path.write_text(path.read_text() + "policies: {on_drift: evolve}\n")
    with pytest.raises(FeedError, match="on_drift without a schema"):
        load_feed(path, {})


def test_evolving_adds_new_and_wider_fields_from_next_batch(world: World) -> None:
    feed = world.make_feed(SCHEMA, "evolve")
    odd = {"kafka_x": 1, "Id": 2, "_extra": 3, "a.b": 4, "none": None, "b\\s": 1}
    world.land_records(feed, ROW, ROW | {"coupon": "a", "id": 1 << 40}, ROW | {"coupon": "b"} | odd)
    last = world.entries[-1]
    assert last.evolved == {"id": "int64", "coupon": "string"}
    assert last.reason == "added coupon (string); id: int32 to int64"
    receipts = world.land_records(feed, ROW | {"coupon": "c", "id": 1 << 41})
    assert (receipts[0].format, receipts[0].drift) == (last.shape, ())
    assert len(world.entries) == 2, "the next batch lands by the entry that stands"
    table = world.read_window(feed).arrow()
    assert table.schema.names[:5] == ["id", "amount", "note", "coupon", "_extra"]
    assert table.select(["id", "coupon"]).to_pylist() == [
        {"id": 1, "coupon": None}, {"id": 1, "coupon": None}, {"id": 1 << 41, "coupon": "c"},
    ]  # fmt: skip
    assert world.find_problems(feed) == []
    assert checkpoint.load(checkpoint.dump(world.ledger.read())) == world.ledger.read()


def test_declared_columns_take_precedence_and_evolved_columns_stay(world: World) -> None:
    world.land_records(world.make_feed(SCHEMA, "evolve"), ROW | {"coupon": 1, "rank": 2}, ROW | {"id": 1 << 40})
    state = world.ledger.read()

    def get_texts(schema: dict[str, str]) -> dict[str, str]:
        shape = find_shape(world.make_feed(schema), state)
        assert shape.columns is not None
        return shape.columns.texts()

    assert get_texts(SCHEMA) == SCHEMA | {"id": "int64", "coupon": "int64", "rank": "int64"}
    own = {"id": "int64 not null", "rank": "string"}
    assert get_texts(own) == own | {"coupon": "int64"}
    assert get_texts({"id": "string"})["id"] == "string"


def test_concurrent_runs_keep_all_evolved_columns(world: World) -> None:
    feed = world.make_feed(SCHEMA, "evolve")
    receipts = world.land_records(world.make_feed(SCHEMA), ROW)
    one, other = world.ledger, world.ledger
    one.read(), other.read()
    for ledger, name in ((one, "a"), (other, "b")):
        evolve(feed, ledger, [replace(receipts[0], drift=(Drift(NEW, name, 1, 0, "bool"),))])
    assert world.ledger.read().evolved == {"a": "bool", "b": "bool"}


def test_evolved_columns_are_bounded_and_compatible_with_table() -> None:
    columns = parse_schema({"id": "int32", "in": "struct<n:int8>"})
    new_fields = [Drift(NEW, f"n{i}", 1, 0, "bool") for i in range(5)]
    grown = evolve_schema(
        columns, [*new_fields, Drift(WIDENED, "in.n", 1, 0, "int16"), Drift(WIDENED, "id", 1, 0, "json")], {}, 3
    )
    assert grown.texts() == {"id": "int32", "in": "struct<n:int16>", "n0": "bool", "n1": "bool", "n2": "bool"}
    assert evolve_schema(columns, [Drift(NEW, "was", 1, 0, "bool")], {"was": "string"}, 3) == columns


# -- one table


CHANGES = [
    ("int32", 7, "int64", 1 << 40),
    ("uint32", 7, "int64", -1),
    ("int32", 7, "float64", 1.5),
    ("float32", 1.5, "float64", 1e300),
    ("decimal(5,2)", 1.25, "decimal(12,4)", 12345678.125),
    ("timestamp(ms)", "2026-01-01T00:00:00.123Z", "timestamp(us)", "2026-01-01T00:00:00.123456Z"),
    ("epoch(s)", 1, "timestamp(us)", "1970-01-01T00:00:01Z"),
    ("json", {"a": 1}, "string", "x"),
    ("list<int8>", [1], "list<int64>", [1 << 40]),
    ("struct<a:int8>", {"a": 1}, "struct<b:string, a:int64>", {"b": "x", "a": 1 << 40}),
    ("struct<a:int8, b:bool>", {"a": 1, "b": True}, "struct<a:int8, c:bool>", {"a": 1, "c": True}),
    ("list<struct<a:int8>>", [{"a": 1}], "list<struct<a:int8, b:string>>", [{"a": 1, "b": "x"}]),
    ("map<string, int8>", {"k": 1}, "map<string, int32>", {"k": 70000}),
]


@pytest.mark.parametrize(("old", "before", "new", "after"), CHANGES, ids=[f"{c[0]} to {c[2]}" for c in CHANGES])
def test_window_with_parts_of_two_schemas_is_read_as_one_table(
    world: World, old: str, before: Any, new: str, after: Any
) -> None:
    world.land_records(world.make_feed({"x": old, "gone": "string"}), {"x": before, "gone": "g"})
    feed = world.make_feed({"added": "bool", "x": new})
    world.land_records(feed, {"x": after, "added": True})
    window = world.read_window(feed)
    assert window.schema.names[:3] == ["added", "x", "_extra"]
    assert window.schema.names[-1] == "gone"
    table = window.arrow()
    assert table.column("gone").to_pylist() == ["g", None]
    assert table.column("added").to_pylist() == [None, True]
    assert table.column("x").null_count == 0
    by_duckdb = window.duckdb().to_arrow_table()
    assert by_duckdb.column("x").cast(table.schema.field("x").type).equals(table.column("x"))
    schema = types.spark_schema(window.schema)
    shares = parts.shares(world.lake, window.files)  # type: ignore[arg-type]
    rows = [b for s in shares for b in parts.rows(world.lake, s, schema)]  # type: ignore[arg-type]
    assert pa.Table.from_batches(rows).column("x").to_pylist() == table.column("x").to_pylist()
    assert world.find_problems(feed) == []


REFUSED = [
    ({"x": "int64"}, {"x": "int32"}, "x is int32, and has landed as int64"),
    ({"x": "int32"}, {"x": "string"}, "x is string, and has landed as int32"),
    ({"x": "timestamp(us)"}, {"x": "timestamp(ns)"}, "x is timestamp"),
    ({"x": "int64"}, {"X": "int64"}, "X differs by case only from x"),
    ({"x": "struct<a:int32>"}, {"x": "struct<a:string>"}, "x is struct"),
]


@pytest.mark.parametrize(("old", "new", "says"), REFUSED)
def test_incompatible_schema_is_refused_before_reading(
    world: World, old: dict[str, str], new: dict[str, str], says: str
) -> None:
    world.land_records(world.make_feed(old), {})
    world.land_records(world.make_feed({"other": "bool"}), {})
    feed, number = world.make_feed(new), world.ledger.read().number
    world.write({})
    for act in (world.land, lambda f: preview(f, world.make_ports(f), CATCH_UP)):
        with pytest.raises(SchemaChanged, match=says) as caught:
            act(feed)
        assert caught.value.exit_code == 3
        assert "new feed" in caught.value.remedy
    assert world.ledger.read().number == number
    assert reading.schema_of(feed, PartKind.LANDED).names[0] == "other", "readers go by the ledger"


def test_declared_schema_that_never_landed_can_be_changed(world: World) -> None:
    declare(world.make_feed({"x": "int64"}), world.ledger)
    world.land_records(world.make_feed({"x": "string"}), {"x": "a"})
    assert [e.reason for e in world.entries] == ["the first", "x: int64 to string"]


def test_unchanged_schema_is_declared_with_one_ledger_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, ledger, looks = world.make_feed({"x": "int64"}), world.ledger, list[State]()
    shape, read = declare(feed, ledger), ledger.read

    def look() -> State:
        looks.append(read())
        return looks[-1]

    monkeypatch.setattr(ledger, "read", look)
    assert declare(feed, ledger) == shape == feed.shape
    assert len(looks) == 1
    assert len(world.entries) == 1


def test_raw_feed_can_become_typed(world: World) -> None:
    world.land_records(world.make_feed(None), ROW)
    feed = world.make_feed(SCHEMA)
    world.land_records(feed, ROW)
    table = world.read_window(feed).arrow()
    assert (table.column("id").to_pylist(), table.column("offset").to_pylist()) == ([None, 1], [0, None])
    assert world.find_problems(feed) == []
    with pytest.raises(SchemaChanged, match="value is string"):
        world.land_records(world.make_feed({"value": "string"}), {})


# -- at every depth

NESTED = {
    "id": "int64",
    "after": "struct<a:int64>",
    "list": "list<struct<x:int64>>",
    "tags": "map<string, struct<v:int8>>",
}
NEW_INSIDE: list[dict[str, Any]] = [
    {"id": 1, "after": {"a": 1}},
    {"id": 2, "after": {"a": 2, "iban": "DE02"}, "top": 1},
    {"id": 3, "list": [{"x": 1}, {"x": 2, "y": [1]}, {"x": 3}]},
    {"id": 4, "after": {"a": 4, "iban": None, "b.c": 1}, "tags": {"k": {"v": 1}, "l": {"w": {"u": 1}}}},
]
PATHS = {
    (NEW, "after.b\\.c"): (1, 3, "int64"),
    (NEW, "after.iban"): (2, 1, "string"),
    (NEW, "list[].y"): (1, 2, "json"),
    (NEW, "tags{}.w"): (1, 3, "json"),
    (NEW, "top"): (1, 1, "int64"),
}


def test_new_fields_at_every_depth_keep_their_paths(world: World) -> None:
    feed = world.make_feed(NESTED)
    receipts = world.land_records(feed, *NEW_INSIDE)
    assert {(d.kind, d.field): (d.records, d.first, d.type) for d in sum_drift(receipts)} == PATHS
    table = world.read_window(feed)
    assert [json.loads(text) if text else None for text in table.arrow()["_extra"].to_pylist()] == [
        None,
        {"after": {"iban": "DE02"}, "top": 1},
        {"list": [{}, {"y": [1]}]},
        {"after": {"iban": None, "b.c": 1}, "tags": {"l": {"w": {"u": 1}}}},
    ]
    relation = table.duckdb().filter("json_extract_string(_extra, '$.after.iban') = 'DE02'")
    assert relation.project("id, after.a").fetchall() == [(2, 2)]
    relation = table.duckdb().filter("json_extract(_extra, '$.list[1].y[0]') = 1")
    assert relation.project("id").fetchall() == [(3,)]
    assert world.find_problems(feed) == []


def test_closed_schema_quarantines_new_fields_at_every_depth(world: World) -> None:
    feed = world.make_feed(NESTED, "quarantine")
    receipts = world.land_records(feed, *[NEW_INSIDE[0]] * 20, *NEW_INSIDE)
    assert sum((r.counts for r in receipts), Counts()) == Counts(landed=21, quarantined=3)
    world.now = START + 3 * HOUR
    world.land(feed)
    rows = reading.of_feed(feed, START, kind="quarantined").arrow().to_pylist()
    assert [(r["reason"], r["field"]) for r in rows] == [
        ("unknown_field", "after.iban"), ("unknown_field", "list[].y"), ("unknown_field", "after.iban"),
    ]  # fmt: skip
    assert world.find_problems(feed) == []


def test_on_drift_fail_covers_new_fields_at_every_depth(world: World) -> None:
    world.write(*NEW_INSIDE)
    with pytest.raises(SchemaDrifted) as caught:
        world.land(world.make_feed(NESTED, "fail")).check()
    assert [path for _, path in PATHS if f"\n    {path} (" not in caught.value.message] == []
    assert world.ledger.read().landed == {}


def test_evolving_adds_new_struct_members_from_next_batch(world: World) -> None:
    feed = world.make_feed(NESTED, "evolve")
    world.land_records(feed, *NEW_INSIDE)
    grown = {
        "id": "int64",
        "after": "struct<a:int64, iban:string>",
        "list": "list<struct<x:int64, y:json>>",
        "tags": "map<string, struct<v:int8, w:json>>",
        "top": "int64",
    }
    assert world.entries[-1].columns == grown
    assert world.ledger.read().evolved == {n: t for n, t in grown.items() if NESTED.get(n) != t}
    receipts = world.land_records(feed, *NEW_INSIDE)
    assert [(d.kind, d.field) for d in sum_drift(receipts)] == [(NEW, "after.b\\.c")]
    window = world.read_window(feed)
    rows = window.duckdb().filter("after.iban = 'DE02'").project("id, after.a, top, _extra").fetchall()
    assert rows == [(2, 2, 1, None)]
    rows = window.duckdb().filter("json_extract(list[2].y, '$[0]') = 1").project("id, list[3].x").fetchall()
    assert rows == [(3, 3)]
    table = window.arrow()
    assert table["after"].to_pylist()[1] == {"a": 2, "iban": None}, (
        "rows that landed before keep their values in _extra"
    )
    assert world.find_problems(feed) == []
    assert list_texts(world.make_feed({"id": "int64", "after": "struct<a:int64>"}), world) == grown


def list_texts(feed: Feed, world: World) -> dict[str, str]:
    shape = find_shape(feed, world.ledger.read())
    assert shape.columns is not None
    return shape.columns.texts()


def test_evolved_members_are_bounded_and_compatible_with_table() -> None:
    columns = parse_schema({"id": "int32", "in": "struct<n:int8>", "l": "list<list<struct<n:int8>>>"})
    members = [Drift(NEW, f"in.n{i}", 1, 0, "bool") for i in range(3)]
    odd = [Drift(NEW, name, 1, 0, "bool") for name in ("in.N", "in.", "in.a\\.b", "id.x", "up.x", "l[].x", "in.a`b")]
    grown = evolve_schema(columns, [*odd, Drift(NEW, "l[][].m", 1, 0, "string"), *members], {}, 3)
    assert grown.texts() == {
        "id": "int32", "in": "struct<n:int8, n0:bool, n1:bool>", "l": "list<list<struct<n:int8, m:string>>>",
    }  # fmt: skip
    table = {"in": "struct<n:int8, was:string>"}
    assert evolve_schema(columns, [Drift(NEW, "in.was", 1, 0, "bool")], table, 3) == columns


def test_column_mapped_to_other_field_name_keeps_mapping_when_evolving(world: World) -> None:
    own = {"id": 'int32 from "ID"', "method": 'string from "http.method"', "s": 'struct<a_b:int8 from "a.b">'}
    row = {"ID": 1, "http.method": "GET", "s": {"a.b": 2}}
    feed = world.make_feed(own, "evolve")
    world.land_records(feed, row)
    fresh = row | {"method": "other", "s": {"a.b": 3, "c": True}, "new": 1}
    world.land_records(feed, fresh, row | {"ID": 1 << 40})
    assert world.ledger.read().evolved == {
        "id": 'int64 from "ID"',
        "s": 'struct<a_b:int8 from "a.b", c:bool>',
        "new": "int64",
    }
    world.land_records(feed, fresh | {"ID": 1 << 40})
    table = world.ledger.read().table
    assert table == {"id": "int64", "method": "string", "s": "struct<a_b:int8, c:bool>", "new": "int64"}
    window = world.read_window(feed)
    assert window.arrow().select(["id", "method", "s", "new", "_extra"]).to_pylist()[-1] == {
        "id": 1 << 40, "method": "GET", "s": {"a_b": 3, "c": True}, "new": 1, "_extra": '{"method":"other"}'
    }  # fmt: skip
    assert world.find_problems(feed) == []
    feed = world.make_feed(own | {"fresh": 'int64 from "new"'}, "evolve")
    assert "new" not in list_texts(feed, world), "a field has one column, and the file's wins"
    assert {entry.format for entry in world.entries} == {5}


def test_column_at_path_evolves_and_keeps_its_path(world: World) -> None:
    own = {"id": "int32 at a.id", "s": "struct<x:int8> at a.b.s", "n": "int16 from text at a.n", "h": "string header h"}
    value = {"a": {"id": 1, "b": {"s": {"x": 1}, "c": 1}, "n": "1"}}
    feed = world.make_feed(own, "evolve")
    more = {"a": {"b": {"s": {"x": 2, "y": True}}}, "new": 1}
    world.land_records(feed, value, more, {"a": {"id": 1 << 40}}, {"a": {"n": "70000"}})
    assert world.ledger.read().evolved == {
        "id": "int64 at a.id",
        "s": "struct<x:int8, y:bool> at a.b.s",
        "n": "int32 from text at a.n",
        "new": "int64",
    }, "unknown members along a path stay in _extra"
    misfit = {"a": {"id": 1 << 40, "b": {"s": {"x": 2, "y": "text"}}, "n": "70000"}, "new": "text"}
    world.land_records(feed, misfit, value | {"new": 2})
    table = world.ledger.read().table
    assert table == {"id": "int64", "s": "struct<x:int8, y:bool>", "n": "int32", "h": "string", "new": "int64"}
    rows = world.read_window(feed).arrow().select(["id", "s", "n", "new", "_extra"]).to_pylist()
    assert rows[-2] == {
        "id": 1 << 40, "s": {"x": 2, "y": None}, "n": 70000, "new": None,
        "_extra": '{"a":{"b":{"s":{"y":"text"}}},"new":"text"}',
    }  # fmt: skip
    assert world.find_problems(feed) == []
    assert {entry.format for entry in world.entries} == {6}
    fewer = world.make_feed({"n": own["n"]}, "evolve")
    assert [f.text for f in find_shape(fewer, world.ledger.read()).columns.fields] == [
        "int32 from text at a.n",
        "int64",
    ]  # type: ignore[union-attr]


def test_narrower_copy_of_a_widened_column_is_refused_with_its_type(world: World) -> None:
    own = {"s": "struct<x:int8>"}
    world.land_records(world.make_feed(own, "evolve"), {"s": {"x": 1}}, {"s": {"x": 300}})
    feed = world.make_feed(own | {"x": "int8 at s.x"}, "evolve")
    with pytest.raises(SchemaChanged, match=r"x: is int8, and another column has s\.x as int16") as caught:
        world.land_records(feed, {"s": {"x": 1}})
    assert caught.value.remedy == "write `int16 at s.x`"
    feed = world.make_feed({"s": "struct<x:int16>", "x": "int16 at s.x"}, "evolve")
    world.land_records(feed, {"s": {"x": 300}})
    assert world.read_window(feed).arrow().column("x").to_pylist()[-1] == 300
    assert world.find_problems(feed) == []


def test_values_that_do_not_fit_evolved_type_land_in_extra(world: World) -> None:
    feed = world.make_feed({"id": "int32", "s": "struct<a:int64>"}, "evolve")
    world.land_records(feed, {"id": 1, "n": 1, "m": "x", "s": {"a": 1, "b": True}}, {"id": 1, "n": 2})
    later: list[dict[str, Any]] = [
        {"id": 2, "n": 1.5, "m": "y", "s": {"a": 2, "b": False}},
        {"id": 3, "n": "n/a", "m": 7, "s": {"a": 3, "b": 0}},
        {"id": 4, "n": 1 << 70, "s": {"a": 4, "b": [], "c": 1}},
        {"id": 5, "n": 4, "m": "z", "s": {"b": True}},
        {"id": "six", "n": 1.5},
    ]
    receipts = world.land_records(feed, *later, *[later[3]] * 20)
    assert sum((r.counts for r in receipts), Counts()) == Counts(landed=24, quarantined=1)
    assert {(d.kind, d.field): d.records for d in sum_drift(receipts)} == {
        (NEW, "s.c"): 1, (WRONG, "id"): 1, (WRONG, "m"): 1, (WRONG, "s.b"): 2,
        (INEXACT, "n"): 1, (OUT_OF_RANGE, "n"): 1, (WRONG, "n"): 1,
    }  # fmt: skip
    window = world.read_window(feed)
    table = window.arrow().select(["id", "n", "m", "s", "_extra"]).to_pylist()[2:6]
    assert [json.loads(r.pop("_extra") or "{}") for r in table] == [
        {"n": 1.5}, {"n": "n/a", "m": 7, "s": {"b": 0}}, {"n": 1 << 70, "s": {"b": [], "c": 1}}, {},
    ]  # fmt: skip
    assert table == [
        {"id": 2, "n": None, "m": "y", "s": {"a": 2, "b": False, "c": None}},
        {"id": 3, "n": None, "m": None, "s": {"a": 3, "b": None, "c": None}},
        {"id": 4, "n": None, "m": None, "s": {"a": 4, "b": None, "c": None}},
        {"id": 5, "n": 4, "m": "z", "s": {"a": None, "b": True, "c": None}},
    ]
    assert window.duckdb().filter("n = 4").aggregate("count(*)").fetchall() == [(21,)]
    assert world.find_problems(feed) == []
    closed = world.make_feed({"id": "int32", "s": "struct<a:int64>"}, "quarantine")
    assert find_shape(closed, world.ledger.read()).base is None, "there, nothing lands in _extra"


class MembersAlone:
    """Replaces pyarrow.compute in the typer: members inside of fields do not land."""

    @staticmethod
    def replace_with_mask(members: pa.Array, mask: pa.Array, texts: pa.Array) -> pa.Array:
        return members


def test_audit_reports_rows_that_lack_nested_values(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = world.make_feed(NESTED)
    monkeypatch.setattr(typer, "pc", MembersAlone)
    world.land_records(feed, *NEW_INSIDE)
    monkeypatch.undo()
    (problem,) = world.find_problems(feed)
    assert "offset 1 differs from the landed row: _extra" in problem


def test_audit_counts_values_independently_of_row_builder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = world.make_feed(NESTED)
    monkeypatch.setattr(typer, "pc", MembersAlone)
    world.land_records(feed, *NEW_INSIDE)
    (problem,) = world.find_problems(feed)
    assert "offset 1 has 4 values, and its row 3" in problem


def test_number_of_fallback_typers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer, "MOST_TYPERS", 8)
    monkeypatch.setattr(typer, "MOST_ARRAYS", 4)
    names = [f"f{i}" for i in range(6)]
    form = JsonFormat(parse_schema({"id": "int64"} | dict.fromkeys(names, "int64")), base=parse_schema({"id": "int64"}))
    values = [{"id": n} | {name: n if n >> i & 1 else "x" for i, name in enumerate(names)} for n in range(64)] * 2
    records = make_chunk([json.dumps(value).encode() for value in values])
    (piece,) = form.convert(OffsetRange("orders", 0, "id", 1000, 1000 + len(values)), records)
    assert (piece.landed.num_rows, piece.quarantined) == (len(values), None)
    for row, value in zip(piece.landed.to_pylist(), values, strict=True):
        fitting = {k: v for k, v in row.items() if k in value and v is not None}
        assert fitting | json.loads(row["_extra"] or "{}") == value
    assert form._fallback is not None
    assert len(form._fallback._typers) <= typer.MOST_TYPERS


def test_rescan_does_not_count_byte_order_mark_as_value(world: World) -> None:
    feed = world.make_feed(SCHEMA)
    world.land_records(feed, b"\xef\xbb\xbf" + json.dumps(ROW).encode(), ROW)
    assert world.read_window(feed).arrow()["id"].to_pylist() == [1, 1]
    assert world.find_problems(feed) == []


# -- Avro


class AvroWorld(World):
    """A feed of Avro records, whose writer schemas the lake keeps."""

    def write_feed(self, *fields: tuple[str, Any]) -> Feed:
        (self.root / "r.avsc").write_text(dump_record_schema(*fields))
        path = self.root / "feeds" / "orders.yaml"
        path.write_text(
            "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: orders\nstart: earliest\nlake: lake\nwindow: 1h\n"
            f"format: avro\nschema_file: {self.root / 'r.avsc'}\nregistry: {{url: 'http://127.0.0.1:9'}}\n"
            "policies: {on_drift: evolve}\n"
        )
        return load_feed(path, {})

    def write_by(self, number: int, *fields: tuple[str, Any, Any]) -> None:
        """Write a record with a new schema, from its names, types and values."""
        text = dump_record_schema(*((name, kind) for name, kind, _ in fields))
        KeptSchemas(self.lake, "orders").keep(RegisteredSchema(number, AVRO, (text,)))
        self.write(encode(json.loads(text), {name: value for name, _, value in fields}, number))

    def make_ports(self, feed: Feed) -> Ports:
        engine = AvroEngine(self.lake, self.topic.make_fetcher, feed.landing)
        return replace(super().make_ports(feed), engine=engine)


class AvroEngine(MemoryEngine):
    def format(self, job: Job) -> Format:
        return job.shape.format(KeptSchemas(self.lake, "orders"))


def dump_record_schema(*fields: tuple[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, t in fields]})


@pytest.fixture
def avro(tmp_path: Path) -> AvroWorld:
    return AvroWorld(tmp_path)


def test_avro_fields_of_several_types_or_unnamed_do_not_become_columns(avro: AvroWorld) -> None:
    feed = avro.write_feed(("id", "long"))
    many = [(f"n{i:03}", "boolean", True) for i in range(2 * MOST_FIELDS)]
    avro.write_by(1, ("id", "long", 1), ("a", "string", "x"), *many)
    avro.write_by(2, ("id", "long", 2), ("a", "long", 7))
    avro.land(feed)
    evolved = avro.ledger.read().evolved
    assert evolved
    assert {*evolved} <= {name for name, _, _ in many}
    avro.write_by(3, ("id", "long", 3), ("a", "string", "x"), *many)
    (receipt,) = avro.land(feed).batches[0].receipts
    assert receipt.counts == Counts(landed=1)
    assert avro.read_window(feed).arrow()["n000"].to_pylist() == [None, None, True]


def test_avro_records_land_after_their_fields_became_columns(avro: AvroWorld) -> None:
    feed = avro.write_feed(("id", "long"))
    kinds: dict[str, tuple[str, Any]] = {
        "date": ("int", 1), "time-millis": ("int", 1), "time-micros": ("long", 1), "uuid": ("string", str(UUID(int=1))),
        **{f"{kind}timestamp-{unit}": ("long", 1) for kind in ("", "local-") for unit in ("millis", "micros", "nanos")},
    }  # fmt: skip
    fields = [(f"f{i}", {"type": t, "logicalType": kind}, v) for i, (kind, (t, v)) in enumerate(kinds.items())]
    lists = [(f"l{i}", {"type": "array", "items": t}, [v]) for i, (_, t, v) in enumerate(fields)]
    for number in (1, 2):
        avro.write_by(number, ("id", "long", number), *fields, *lists)
        (receipt,) = avro.land(feed).batches[0].receipts
        assert receipt.counts == Counts(landed=1)
    assert len(avro.ledger.read().evolved) == 2 * (len(kinds) - 3), "local times are read by a schema of local times"


def test_evolved_avro_lists_and_maps_accept_nulls_of_other_writers(avro: AvroWorld) -> None:
    feed, nullable = avro.write_feed(("id", "long")), ["null", "int"]
    for number, (items, values) in enumerate([("int", [1]), ("int", [2]), (nullable, [3, None])], 1):
        kinds = {"type": "array", "items": items}, {"type": "map", "values": items}
        avro.write_by(number, ("id", "long", number), ("l", kinds[0], values), ("m", kinds[1], {"k": values[-1]}))
        (receipt,) = avro.land(feed).batches[0].receipts
        assert receipt.counts == Counts(landed=1)
    assert avro.read_window(feed).arrow().select(["l", "m"]).to_pylist()[1:] == [
        {"l": [2], "m": [("k", 2)]},
        {"l": [3, None], "m": [("k", None)]},
    ]


@pytest.mark.parametrize("wire", ["confluent", "bare"])
def test_avro_feed_lands_despite_unreadable_columns_from_json(avro: AvroWorld, wire: str) -> None:
    avro.land_records(avro.make_feed({"id": "int64"}, "evolve"), {"id": 1, "x y": 1, "z": "a", "m": [1]})
    assert avro.ledger.read().evolved == {"x y": "int64", "z": "string", "m": "json"}
    feed = avro.write_feed(("id", "long"))
    if wire == "bare":
        path = avro.root / "feeds" / "orders.yaml"
        path.write_text(path.read_text().split("registry:")[0])
        feed = load_feed(path, {})
        avro.write(encode(json.loads(dump_record_schema(("id", "long"))), {"id": 2}, None))
    else:
        avro.write_by(1, ("id", "long", 2), ("z", "string", "b"), ("x", "long", 3))
    (receipt,) = avro.land(feed).batches[0].receipts
    assert receipt.counts == Counts(landed=1)


def test_avro_schema_file_narrower_than_evolved_columns_is_refused(avro: AvroWorld) -> None:
    for value in (1 << 40, 1 << 41):
        avro.write_by(1, ("id", "long", 1), ("a", "long", value))
        avro.land(avro.write_feed(("id", "long")))
    assert avro.ledger.read().evolved == {"a": "int64"}
    avro.write_by(2, ("id", "long", 2), ("a", "int", 7))
    with pytest.raises(SchemaChanged, match="a is int32, and has landed as int64"):
        avro.land(avro.write_feed(("id", "long"), ("a", ["null", "int"])))
    feed = avro.write_feed(("id", "long"), ("a", ["null", "long"]))
    avro.land(feed)
    assert avro.read_window(feed).arrow()["a"].to_pylist() == [None, 1 << 41, 7]


def test_overflow_field_name_does_not_become_column(world: World) -> None:
    feed = world.make_feed(SCHEMA, "evolve")
    world.land_records(feed, ROW | {f"n{i:03}": i for i in range(2 * MOST_FIELDS)})
    assert OTHERS in {d.field for d in sum_drift(world.land_records(feed, ROW | {f"m{i:03}": i for i in range(99)}))}
    assert OTHERS not in world.ledger.read().evolved
