"""A batch's report: its contents, the escaping of all foreign text, and its limited size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from sluice.pipelines.batch_report import column_profiles, markup, report_page
from sluice.pipelines.batch_report.batch_account import BatchAccount, PartitionLag, newest, read_account
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import PartTarget, PartWriter
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import OriginEntry, OriginItem, PlanEntry, SchemaEntry
from sluice.pipelines.model.kafka import Isolation, Key, Range
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task, to_json
from sluice.pipelines.model.receipts import (
    BrokerTraffic,
    Counts,
    Drift,
    DriftKind,
    Latency,
    PartKind,
    RangeFailure,
    Receipt,
    Tally,
    Traffic,
)
from sluice.pipelines.publishing.publish import publish, roll_forward
from sluice.pipelines.records.rows.row_format import HEADERS, quarantine_rows
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import parse_schema
from sluice.pipelines.validation.batch_expectations import count_earlier_rows, hold_whole
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.pipelines.landed_world import A, B, World, split_offsets

HOUR = 3_600_000
START = 400_000 * HOUR
KEY = Key("orders", 0, "id-1")
COLUMNS = {"id": "int64", "name": "string", "price": "float64", "blob": "binary", "tags": "list<string>", "ok": "bool"}
EVIL = "<script>alert(1)</script>\" onload='x' \u202eevil\u2066 \x00\x1b[2J \U0001f600 &amp; javascript:alert(1)"
_ELEMENTS = {
    *[
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "footer",
        "nav",
        "section",
        "div",
        "span",
        "p",
        "a",
        "b",
        "h1",
        "h2",
        "h3",
        "bdi",
        "code",
        "mark",
    ],
    *[
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "dl",
        "dt",
        "dd",
        "svg",
        "g",
        "rect",
    ],
}
_VOID = {"meta", "rect"}


class Outline(HTMLParser):
    """The page as a browser parses it: elements are balanced, and none is active."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page.decode())
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ELEMENTS, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "style", "srcdoc", "action", "xlink:href"), name
            assert name != "href" or (value or "").startswith("#"), value
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def of(self, element: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == element]

    def has_section(self, name: str) -> bool:
        return any(a.get("id") == name for a in self.of("section"))


def with_facts(account: BatchAccount, **changes: Any) -> BatchAccount:
    return replace(account, facts=replace(account.facts, **changes))


def parse(page: bytes) -> Outline:
    """Parse the page, and check the rules of every report."""
    text = page.decode()
    assert len(page) < 300_000
    assert all(c.isprintable() or c == "\n" for c in text)
    outline = Outline(page)
    policy = next(a for a in outline.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert "url(" not in text.partition("<style>")[2].partition("</style>")[0]
    for drawn in re.findall(r"<svg[^>]*role=\"img\"[^>]*>(.{0,10})", text):
        assert drawn.startswith("<title>")
    return outline


Records = Sequence[bytes | None]


class Typed:
    """A typed feed of one partition: its own format converts the records, and `land` publishes them."""

    def __init__(self, *expectations: dict[str, Any], columns: dict[str, str] | None = None, name: str = "orders"):
        self.columns, self.name = columns or COLUMNS, name
        schema = parse_schema(self.columns)
        contract = parse_contract(json.dumps({"expectations": expectations}).encode(), schema) if expectations else None
        self.shape = Shape(schema, contract)
        self.lake, self.now, self.at = MemoryLake(), START + HOUR, 0
        self.ledger = Ledger(self.lake, name, lambda: self.now, "run-1", "c")
        origin = OriginItem(key=KEY, offset=0, committed=None, why="test", opens=START)
        self.ledger.append(lambda s: OriginEntry(items=(origin,)))
        text = contract.text if contract else ""
        self.ledger.append(lambda s: SchemaEntry(shape=self.shape.name, columns=self.columns, contract=text))

    def land(
        self,
        records: Records,
        *,
        published: bool = True,
        fix: Callable[[Receipt], Receipt] = lambda r: r,
        failures: Sequence[RangeFailure] = (),
    ) -> int:
        """Land the records, and return the number of the batch."""
        end = self.at + max(len(records), 1)
        s = OffsetRange(*KEY, self.at, end, 3, 0, START, paths.window_folder(START, HOUR, paths.PREFIX))
        plan = Plan(
            self.name, "c", Request(RequestKind.WINDOW, window=START), Isolation.READ_COMMITTED, (Task(0, 1, (s,)),)
        )
        me = owner(f"t{self.at}")
        appended = self.ledger.append(lambda _: PlanEntry(plan=plan, hash=plan.hash, owner=me))
        assert appended is not None
        receipt = fix(self._make_receipt(s, appended.number, plan.hash, me.token, records))
        self.lake.put(paths.receipt_path(self.name, appended.number, me.token, s), to_json(receipt).encode())
        self.now, self.at = self.now + 2000, end
        if published:
            earlier = count_earlier_rows(appended.state, plan.request, appended.number)
            results = hold_whole(self.shape, [receipt], self.lake, earlier)  # type: ignore[arg-type]
            publish(self.ledger, appended.number, me, [receipt, *failures], results)
            roll_forward(self.ledger, self.lake, self.name)  # type: ignore[arg-type]
        return appended.number

    def _make_receipt(self, s: OffsetRange, batch: int, plan: str, attempt: str, records: Records) -> Receipt:
        form, parts, tallies, drift = self.shape.format(), [], dict[int, Tally](), list[Drift]()
        landed = refused = 0
        for converted in form.convert(s, _make_chunk(s.start, records)) if records else ():
            bad = (
                quarantine_rows(converted.quarantined, batch, form.contract)
                if converted.quarantined is not None
                else None
            )
            for kind, rows in ((PartKind.LANDED, converted.landed), (PartKind.QUARANTINED, bad)):
                if rows is not None and rows.num_rows:
                    target = PartTarget(self.name, batch, plan, attempt, s, kind)
                    writer = PartWriter(self.lake, target, rows.schema, LandingSettings(), 1 << 20)  # type: ignore[arg-type]
                    writer.write(rows)
                    parts += writer.close()
            landed, refused = landed + converted.landed.num_rows, refused + (bad.num_rows if bad is not None else 0)
            tallies |= {t.expectation: t for t in converted.tallies}
            drift += converted.drift
        counts = Counts(landed=landed, quarantined=refused, compacted=s.span - landed - refused)
        times = {"wait": 3_000_000, "type": 1_000_000}
        return Receipt(
            s, s.end, counts, tuple(parts), attempt, 1000, times, self.shape.name, tuple(tallies.values()), tuple(drift)
        )

    def read_account(self, batch: int, **more: Any) -> BatchAccount:
        return read_account(self.ledger, self.lake, batch, **more)  # type: ignore[arg-type]

    def render_page(self, batch: int, behind: Sequence[PartitionLag] | None = None, **more: Any) -> Outline:
        account = self.read_account(batch, **more)
        page = report_page.make(account, self.lake, behind)  # type: ignore[arg-type]
        assert page == report_page.make(account, self.lake, behind), "the same batch, the same file"  # type: ignore[arg-type]
        return parse(page)


def _make_chunk(start: int, records: Records) -> pa.RecordBatch:
    n = len(records)
    columns = {
        "key": pa.array([EVIL.encode() + b"\xff"] * n, pa.binary()),
        "value": pa.array(records, pa.binary()),
        "offset": pa.array(np.arange(start, start + n), pa.int64()),
        "timestamp": pa.array(START + np.arange(n), pa.int64()).cast(pa.timestamp("ms", "UTC")),
        "timestampType": pa.array(np.zeros(n, np.int32)),
        "headers": pa.nulls(n, HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


def make_rows(n: int, **fields: Any) -> list[bytes]:
    return [
        json.dumps({"id": i, "name": f"n{i % 3}", "price": i / 4, "ok": i % 2 == 0} | fields).encode() for i in range(n)
    ]


def expect(type_: str, severity: str = "critical", **kwargs: Any) -> dict[str, Any]:
    return {"type": f"expect_{type_}", "kwargs": kwargs, "severity": severity}


BETWEEN = expect("column_values_to_be_between", column="id", min_value=0, max_value=89)
NAMES = expect("column_values_to_be_in_set", "warning", column="name", value_set=["n0", "n1"])
PRICE = expect("column_values_to_be_between", "info", column="price", min_value=0)


# -- contents


def test_a_published_batch() -> None:
    feed = Typed(BETWEEN, NAMES, PRICE, expect("column_mean_to_be_between", column="price", min_value=0, max_value=20))
    feed.land(make_rows(10))
    outline = feed.render_page(feed.land([*make_rows(100), b"{"]), [PartitionLag(KEY, 1280, 95_000)])
    for words in (
        "orders · batch 4",
        "Window 2015-08-19T16:00, published 2015-08-19T17:00:04Z, with 1 expectation of its contract not met.",
        "90 rows landed",
        "11 quarantined, 10.89 %",
        "2.0 s from plan to publish",
        "45 rows a second",
        "contract out_of_bounds id should be between 0 and 89 id expect_column_values_to_be_between 10 9.90 %",
        "10 9.90 % orders:0:100",
        "decode not_json",
        "4 expectations: 2 hold without exception, 2 broken.",
        'name is one of "n0", "n1"',
        "orders:0:12 name = n2",
        "the mean of price is between 0 and 20",
        "1,280",
        "95 s old",
        "waiting for Kafka 3 ms 75.00 %",
        "The last 2 batches",
        "run-1",
        f"data/orders/{paths.window_folder(START, HOUR, paths.PREFIX)}/orders-0-10-111-b4.parquet",
    ):
        assert words in outline.text, words
    assert feed.read_account(4).batch.hash in outline.text
    assert feed.shape.name in outline.text
    assert {s["id"] for s in outline.of("section")} == {
        "rows", "quarantine", "contract", "columns", "drift", "lag", "time", "history", "offset-ranges", "origin",
    }  # fmt: skip
    assert len(outline.of("caption")) == len(outline.of("table"))


def test_requests_to_brokers() -> None:
    feed = Typed()
    account = feed.read_account(feed.land(make_rows(10)))
    busy = BrokerTraffic(
        7, "b7:9092", 3, 0, 2_000_000, Latency.of(20_000), {"no answer": 1}, throttled=1, throttle_ms=4000
    )
    brokers = (busy, *(BrokerTraffic(node, EVIL, 1) for node in range(8, 100)))
    page = parse(report_page.make(with_facts(account, traffic=Traffic(brokers, {"orders": 12})), feed.lake))  # type: ignore[arg-type]
    assert page.has_section("brokers")
    for words in (
        "broker 7 at b7:9092 throttled this client for 4.0 s",
        "7 b7:9092 3 2 MB 20.0 ms 20.0 ms 20.0 ms 20 ms 0 ms 4.00 s 0 no answer 1",
        "53 more",
        "orders 10 1 kB 12",
    ):
        assert words in page.text, words
    assert not feed.render_page(account.batch.id).has_section("brokers"), "an entry of before says nothing of brokers"


def test_columns_are_drawn() -> None:
    feed = Typed(BETWEEN, NAMES)
    batch = feed.land(make_rows(90))
    columns = report_page.columns_to_profile(feed.read_account(batch))
    assert columns == ["kafka_timestamp", "id", "name"]
    outline = feed.render_page(batch)
    histograms = [a["aria-label"] for a in outline.of("svg") if (a.get("aria-label") or "").startswith("Histogram")]
    assert histograms == ["Histogram of kafka_timestamp", "Histogram of id"]
    assert "least 0 · median 44.5 · mean 44.5 · most 89 · no nulls" in outline.text
    assert "n0 30 33.33 % n1 30 33.33 % n2 30 33.33 %" in outline.text


def test_refused_batch_is_read_from_staging() -> None:
    feed = Typed(BETWEEN, expect("column_mean_to_be_between", column="price", min_value=1000))
    batch = feed.land(make_rows(100), published=False)
    outline = feed.render_page(batch)
    assert "refused Window 2015-08-19T16:00. Nothing of it is visible" in outline.text
    assert "Not met: 1 critical expectation about the whole batch." in outline.text
    assert "the mean of price is at least 1,000" in outline.text
    assert "contract out_of_bounds" in outline.text
    assert "_sluice/orders/staging/" in outline.text
    assert "too much is bad" in feed.render_page(batch, why="too much is bad\n    the first").text
    account = feed.read_account(batch)
    assert report_page.path_of(account) == f"_sluice/orders/reports/0/{batch}-{account.batch.owner.token}.html"


def test_a_batch_published_in_part() -> None:
    feed = Typed()
    lost = RangeFailure(OffsetRange(*KEY, 500, 600), "OffsetsLost", EVIL * 100, fatal=True)
    outline = feed.render_page(feed.land(make_rows(3), failures=[lost]))
    assert "published in part" in outline.text
    assert "orders:0:500-600 OffsetsLost <script>alert(1)" in outline.text
    assert not outline.has_section("contract")


def test_field_present_in_some_ranges_is_not_missing() -> None:
    feed = Typed()
    account = feed.read_account(feed.land(make_rows(5)))
    (r,) = account.facts.receipts
    wrong, absent = (
        Drift(DriftKind.WRONG, "qty", 2, 7, "string"),
        Drift(DriftKind.MISSING, "name", 5, r.offset_range.start),
    )
    both = (
        replace(r, drift=(wrong, absent)),
        replace(r, offset_range=replace(r.offset_range, partition=1), drift=(wrong,)),
    )
    outline = parse(report_page.make(with_facts(account, receipts=both), feed.lake))  # type: ignore[arg-type]
    assert "values of another type" in outline.text
    assert "a field that no record has" not in outline.text


def test_invalid_receipts_are_not_counted() -> None:
    feed = Typed()
    unsound = feed.land(make_rows(3), published=False, fix=lambda r: replace(r, counts=replace(r.counts, landed=9)))
    assert feed.read_account(unsound).facts.receipts == ()


def test_raw_batches_and_merged_ones(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 25), *split_offsets(B, 25), bad=1)
    world.compact()
    assert len(world.state().batches) > 1
    for batch in world.state().batches:
        account = read_account(world.reopen_ledger(), world.lake, batch)  # type: ignore[arg-type]
        outline = parse(report_page.make(account, world.lake))  # type: ignore[arg-type]
        assert " rows landed" in outline.text
        assert not outline.has_section("lag")
    assert "not there any more" in parse(report_page.make(read_account(world.ledger, world.lake, 2), world.lake)).text  # type: ignore[arg-type]


def test_missing_batches() -> None:
    feed = Typed()
    with pytest.raises(UsageError, match="no batch yet"):
        newest(feed.ledger.read(), "orders")
    with pytest.raises(UsageError, match="no batch 7"):
        feed.read_account(7)
    batch = feed.land(make_rows(1))
    assert newest(feed.ledger.read(), "orders") == batch


def test_page_is_stored_in_the_lake() -> None:
    feed = Typed()
    batch = feed.land(make_rows(2))
    path = report_page.keep(feed.read_account(batch), feed.lake)  # type: ignore[arg-type]
    assert path == f"_sluice/orders/reports/0/{batch}.html"
    parse(feed.lake.files[path])


# -- edge cases


@pytest.mark.parametrize(
    "records", [[], [b"nonsense"] * 20, [None] * 5, make_rows(1)], ids=["none", "bad", "dead", "one"]
)
def test_few_rows_or_none(records: list[bytes | None]) -> None:
    feed = Typed(BETWEEN, NAMES, PRICE, expect("column_values_to_be_unique", column="name"))
    for published in (True, False):
        outline = feed.render_page(feed.land(records, published=published))
        assert outline.has_section("contract")


def test_values_that_are_not_numbers() -> None:
    feed = Typed(PRICE, NAMES, expect("column_values_to_not_be_null", "info", column="blob"))
    batch = feed.land(make_rows(20, name=None, price=None))
    outline = feed.render_page(batch)
    assert outline.text.count("100 % null") == 3
    table = {
        "price": pa.array([float("nan"), float("inf"), -float("inf"), None, 1.0, 1e300, -1e-300] * 5),
        "kafka_offset": pa.array(range(35), pa.int64()),
    }
    profiles = _read_columns(pa.table(table), ["price"])
    assert dict(profiles[0].stats)["NaN or infinite"] == "15"
    assert sum(b.rows for b in profiles[0].bins) == 15


def test_every_kind_of_column() -> None:
    columns = {
        "i8": pa.array([-128, 127, None, 0], pa.int8()),
        "u64": pa.array([0, 2**64 - 1, 5, None], pa.uint64()),
        "text": pa.array(["", "a\0b", "x" * 2_000_000, None]),
        "bytes": pa.array([b"", b"\xff" * 5, None, b"a"]),
        "yes": pa.array([True, None, False, True]),
        "day": pa.array([0, 20_000, None, -1], pa.date32()),
        "at": pa.array([0, 1 << 62, None, -5], pa.timestamp("us", "UTC")),
        "money": pa.array(["1.20", None, "-99999999999999999999.99", "0"]).cast(pa.decimal128(38, 2)),
        "list": pa.array([[1], None, [], [2]]),
        "struct": pa.array([{"a": 1}, None, {"a": None}, {"a": 2}]),
        "one": pa.array([7, 7, 7, 7]),
        "few": pa.array(["a", "a", "b", None]).dictionary_encode(),
        "code": pa.array(["abc", "abd", None, "abc"]),
    }
    table = pa.table(columns | {"offset": pa.array(range(4), pa.int64())})
    profiles = {p.name: p for p in _read_columns(table, list(columns))}
    assert [*profiles] == list(columns)
    assert {n: p.nulls for n, p in profiles.items()} == {n: c.null_count for n, c in columns.items()}
    assert profiles["few"].top == (("a", 2), ("b", 1))
    assert profiles["yes"].top == (("true", 2), ("false", 1))
    assert profiles["one"].bins == (column_profiles.Bin("7", 4),)
    assert profiles["bytes"].of == "lengths in bytes"
    assert dict(profiles["text"].stats) == {"different": "3", "length": "0 to 2,000,000, 666,667.7 on average"}
    assert dict(profiles["code"].stats) == {"different": "2", "length": "3"}
    assert max(len(v) for v, _ in profiles["text"].top) == column_profiles.TEXT
    assert all(sum(b.rows for b in p.bins) == 4 - p.nulls for p in profiles.values() if p.bins)
    assert {n for n, p in profiles.items() if p.bins} == {"i8", "u64", "bytes", "day", "at", "money", "one"}


def test_few_outliers_do_not_hide_the_others() -> None:
    values = [*range(1000), 10**9, -(10**9)]
    table = pa.table({"v": pa.array(values, pa.int64()), "offset": pa.array(range(1002), pa.int64())})
    (profile,) = _read_columns(table, ["v"])
    assert sum(b.rows for b in profile.bins) == 1002
    assert [b.edge for b in profile.bins].count(True) == 2
    assert sum(not b.edge and b.rows > 20 for b in profile.bins) > 20


@pytest.mark.parametrize("values", [[1.7e308] * 3, [1.7e308, -1.7e308], [1.7e308, 0.0, None, float("nan")]])
def test_sums_and_distances_beyond_float64_are_omitted(values: list[float | None]) -> None:
    table = pa.table({"v": pa.array(values, pa.float64()), "offset": pa.array(range(len(values)), pa.int64())})
    (profile,) = _read_columns(table, ["v"])
    assert {"least", "median", "most"} <= {name for name, _ in profile.stats}


def test_large_batch_is_sampled() -> None:
    table = pa.table({"v": pa.array(range(10_000), pa.int64()), "offset": pa.array(range(10_000), pa.int64())})
    profiles = _read_profiles(table, ["v"], max_rows=1000, group=100)
    assert (profiles.rows, profiles.all_, profiles.is_sampled) == (1000, 10_000, True)
    (profile,) = profiles.columns
    assert [b.rows > 0 for b in profile.bins].count(True) >= 10, "from everywhere"


def test_concurrent_pages_share_a_database_and_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = pa.array(range(500), pa.int64())
    tables = [pa.table({"v": pa.array([n] * 500, pa.int64()), "offset": offsets}) for n in range(8)]
    _read_columns(tables[0], ["v"])
    monkeypatch.setattr(duckdb, "connect", lambda **how: pytest.fail("another database"))
    with ThreadPoolExecutor(4) as threads:
        pages = [*threads.map(lambda table: _read_columns(table, ["v"]), tables)]
    assert [v.bins for (v,) in pages] == [(column_profiles.Bin(str(n), 500),) for n in range(8)]


def _read_columns(table: pa.Table, wanted: list[str]) -> tuple[column_profiles.Profile, ...]:
    return _read_profiles(table, wanted).columns


def _read_profiles(
    table: pa.Table, wanted: list[str], max_rows: int = 10**6, group: int = 1 << 20
) -> column_profiles.Profiles:
    import io

    import pyarrow.parquet as pq

    lake, sink = MemoryLake(), io.BytesIO()
    pq.write_table(table, sink, row_group_size=group)
    lake.put("part", sink.getvalue())
    part = replace(_make_part("part"), rows=table.num_rows)
    receipt = Receipt(OffsetRange(*KEY, 0, 4), 4, Counts(4), (part,), "a")
    return column_profiles.profiles([(receipt, part)], lake, wanted, published=True, max_rows=max_rows)  # type: ignore[arg-type]


def _make_part(path: str) -> Any:
    from sluice.pipelines.model.receipts import Part

    return Part(path, PartKind.LANDED, path, path, 0, 0, "")


# -- hostile input


def test_record_values_are_escaped() -> None:
    evil = expect("column_values_to_not_match_regex", column="name", regex='<b onclick="x">|</td><script>')
    feed = Typed(evil, NAMES, columns={**COLUMNS, "x<script>y": "string", 'q"&': "int32"})
    records = [
        *make_rows(50, name=EVIL),
        *make_rows(5, name="</td><script>alert(2)</script>"),
        EVIL.encode("utf-8", "surrogatepass"),
        b'{"name": "' + b"<script>" * 130_000 + b'", "id": "no"}',
        b'{"name": "' + b"\xf0\x9f\x98\x80" * 9 + b"\xff\xfe\x00" * 50,
        json.dumps({"name": "<script>" * 100_000, "id": 1}).encode(),
    ]
    drifts = tuple(Drift(DriftKind.NEW, f"{EVIL}{i}" * 5, 3, 7, "string") for i in range(200))
    batch = feed.land(records, fix=lambda r: replace(r, drift=drifts, timings={"<script>": 5}))
    outline = feed.render_page(batch)
    assert "<script>alert(1)</script>" in outline.text, "shown as text"
    assert "\\u202eevil\\u2066 \\x00\\x1b[2J \U0001f600 &amp; javascript:alert(1)" in outline.text
    assert "\\xff\\xfe\\x00" in outline.text
    assert "140 more" in outline.text
    feed.render_page(feed.land(records, published=False), why=EVIL * 10_000)


def test_names_of_feeds_topics_and_columns_are_escaped() -> None:
    columns = {f'"><script>{i}': "int32" for i in range(40)}
    checks = [expect("column_values_to_be_between", "warning", column=c, min_value=5) for c in columns]
    feed = Typed(*checks, columns=columns)
    batch = feed.land([json.dumps(dict.fromkeys(columns, 1)).encode()] * 9)
    outline = feed.render_page(batch)
    assert "25 columns more are not shown" in outline.text
    account = replace(feed.read_account(batch), feed=EVIL, ledger_id=EVIL)
    evil = tuple(replace(r, offset_range=replace(r.offset_range, topic=EVIL)) for r in account.facts.receipts)
    parse(report_page.make(with_facts(account, receipts=evil), feed.lake))  # type: ignore[arg-type]


@pytest.mark.slow
def test_page_size_is_bounded() -> None:
    checks = [
        expect("column_values_to_be_in_set", "warning", column="name", value_set=["&" * 60, f"{i}"]) for i in range(500)
    ]
    feed = Typed(*checks, columns={**COLUMNS, **{f"c{i}": "int32" for i in range(60)}})
    account = feed.read_account(
        feed.land([*make_rows(300, name="\"'&<>" * 99), *(b'{"c%d": "' % i + b"&" * 5000 for i in range(60))])
    )
    receipts = tuple(_move(account.facts.receipts[0], i) for i in range(1000))
    failures = tuple(RangeFailure(r.offset_range, "&" * 900, "<" * 900) for r in receipts)
    behind = tuple(PartitionLag(Key(f"{'&' * 200}{i}", i, "x"), i + 1, 5) for i in range(2000))
    page = report_page.make(replace(with_facts(account, receipts=receipts), failures=failures), feed.lake, behind)  # type: ignore[arg-type]
    outline = parse(page)
    assert "Left out: it is too large to be shown." in outline.text
    assert "90 rows landed" not in outline.text


def _move(r: Receipt, i: int) -> Receipt:
    """Returns the receipt for another partition and window."""
    s = replace(r.offset_range, topic="&" * 200, partition=i, window=START + i * HOUR)
    return replace(r, offset_range=s, relanded=(Range(0, 1),))


@pytest.mark.parametrize("text", ["", "a", "\x00", "\u202e", "\ud800", "é", "\U0001f468\u200d\U0001f469", "\n", "&lt;"])
def test_text_round_trips(text: str) -> None:
    words = list(_list_texts(f"<p>{markup.plain(text)}</p>"))
    assert "".join(words) == markup.harmless(text)
    assert len(markup.plain(text * 100_000)) < 10 * markup.LONGEST


def _list_texts(page: str) -> Iterator[str]:
    class Words(HTMLParser):
        def handle_data(self, data: str) -> None:
            texts.append(data)

    texts: list[str] = []
    parser = Words()
    parser.feed(page)
    parser.close()
    yield from texts


@pytest.mark.parametrize(
    ("part", "total", "text"),
    [
        (0, 0, "–"),
        (0, 5, "0 %"),
        (5, 5, "100 %"),
        (1, 10**9, "< 0.01 %"),
        (10**9 - 1, 10**9, "99.99 %"),
        (1, 3, "33.33 %"),
    ],
)
def test_shares(part: int, total: int, text: str) -> None:
    assert markup.share(part, total) == text
