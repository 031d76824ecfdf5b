"""Proposals for samples: each file loads, and its feed lands the sample but for the strays that it names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.operating.feed_text import FileSettings, feed_text
from sluice.pipelines.operating.propose_feed import FeedProposal, Fit, TopicSample, fit_sample, propose
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.rows.row_format import RawFormat
from tests.examples import scale_examples

Sent = tuple[Mapping[str, str], Any]
SETTINGS = FileSettings({"bootstrap": "127.0.0.1:9"}, {}, "", EngineKind.PROCESSES, "2026-11-20")


def make_batch(records: Sequence[Sent]) -> pa.RecordBatch:
    """Return records of a partition as a raw feed has them; values are bytes, None, or objects for JSON."""
    n = len(records)
    values = [v if v is None or isinstance(v, bytes) else json.dumps(v).encode() for _, v in records]
    headers = [[{"key": k, "value": t.encode()} for k, t in h.items()] or None for h, _ in records]
    columns = {
        "key": pa.nulls(n, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "offset": pa.array(range(n), pa.int64()),
        "timestamp": pa.array(range(n), pa.int64()).cast(SCHEMA.field("timestamp").type),
        "timestampType": pa.array([0] * n, pa.int32()),
        "headers": pa.array(headers, SCHEMA.field("headers").type),
    }
    chunk = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    (piece,) = RawFormat().convert(OffsetRange("events", 0, "id", 0, n), chunk)
    return piece.landed


def follow(records: Iterable[Sent]) -> tuple[FeedProposal, Fit, str]:
    """Propose a feed, load its file, and land the records by it."""
    sample = TopicSample("events", (), None, (make_batch([*records]),))
    proposal = propose(sample.records)
    text = feed_text(sample, proposal, SETTINGS)
    with TemporaryDirectory() as folder:
        path = Path(folder, "feeds", "events.yaml")
        path.parent.mkdir()
        path.write_text(text)
        feed = load_feed(path, {})
    fit = fit_sample(feed, sample.batches) if feed.columns or feed.split else Fit(proposal.sampled)
    if feed.columns and not any(o.extra or o.strays for o in proposal.outputs) and not proposal.envelope:
        chunk = sample.batches[0].select(SCHEMA.names)
        for piece in feed.shape.format().convert(OffsetRange("events", 0, "id", 0, chunk.num_rows), chunk):
            assert piece.landed.column("_extra").null_count == piece.landed.num_rows, text
    assert fit.landed + len(fit.misfits) == proposal.sampled
    return proposal, fit, text


NAMES = st.sampled_from(
    [
        "id",
        "ID",
        "a.b",
        "a b",
        "",
        "kafka_key",
        "_extra",
        'q"q',
        "a:b",
        "ä",
        "x # y",
        "new\nline: 1",
        "\u2028",
        "after",
        "op",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(-1e300, 1e300) | st.text(max_size=4)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
ROWS = st.dictionaries(NAMES, JSON, max_size=5)


def wrap_plain(i: int, row: dict[str, Any]) -> Sent:
    return {}, row


def wrap_change(i: int, row: dict[str, Any]) -> Sent:
    op, other = "cud"[i % 3], row if i % 2 else None
    return {}, {
        "op": op,
        "before": row if op == "d" else other,
        "after": None if op == "d" else row,
        "source": {"x": 1},
    }


def wrap_structured(i: int, row: dict[str, Any]) -> Sent:
    return {}, {"specversion": "1.0", "id": str(i), "source": "/s", "type": "t", "data": row}


def wrap_binary(i: int, row: dict[str, Any]) -> Sent:
    return {"ce_specversion": "1.0", "ce_type": "t", "ce_odd name": "x"}, row


def wrap_connect(i: int, row: dict[str, Any]) -> Sent:
    return {}, {"schema": {"type": "struct", "fields": []}, "payload": row}


@settings(max_examples=scale_examples(150))
@given(
    st.lists(ROWS, min_size=1, max_size=6),
    st.sampled_from([wrap_plain, wrap_change, wrap_structured, wrap_binary, wrap_connect]),
)
def test_every_proposed_file_loads_and_lands_its_sample(
    rows: list[dict[str, Any]], wrap: Callable[[int, dict[str, Any]], Sent]
) -> None:
    _, fit, text = follow(wrap(i, row) for i, row in enumerate(rows))
    assert not fit.misfits, text


@settings(max_examples=scale_examples(60))
@given(
    st.dictionaries(st.text(min_size=1, max_size=6), ROWS, min_size=2, max_size=4),
    st.sampled_from(["header", "field", "path"]),
    st.randoms(use_true_random=False),
)
def test_records_of_several_shapes_land_by_any_source(
    shapes: dict[str, dict[str, Any]], source: str, chooser: random.Random
) -> None:
    def make(value: str) -> Sent:
        if source == "header":
            return {"kind": value}, shapes[value]
        field: dict[str, Any] = {"kind": value} if source == "field" else {"meta": {"kind": value}}
        return {}, shapes[value] | field

    proposal, fit, text = follow(make(chooser.choice([*shapes])) for _ in range(60))
    assert not fit.other_misfits, text
    assert len(fit.misfits) == sum(proposal.rest.values()), text


def test_no_discriminator_means_no_split() -> None:
    rng = random.Random(7)
    names = [f"f{i}" for i in range(12)]
    rows = [{n: 1 for n in names if rng.random() < 0.5} | {"tag": rng.choice("abc")} for _ in range(500)]
    proposal, fit, _ = follow(({"source": rng.choice("xy")}, row) for row in rows)
    assert (proposal.by, fit.landed) == ({}, 500)


def test_the_header_is_preferred_to_a_field_that_splits_alike() -> None:
    shapes = {"a": {"x": 1, "y": 2}, "b": {"p": "1", "q": "2"}}
    proposal, _, _ = follow(({"eventType": k}, shapes[k] | {"label": k, "type": k}) for k in "abbbab" * 20)
    assert (proposal.by, [o.records for o in proposal.outputs]) == ({"header": "eventType"}, [80, 40])


def test_the_value_that_explains_shapes_best_is_chosen() -> None:
    """`group` merges two shapes, `id` has too many values, `kind` has one for each shape."""
    shapes = {"a": {"x": 1, "y": 2}, "b": {"p": "1", "q": "2"}, "c": {"s": 1, "t": 1}}
    records = [({}, shapes[k] | {"kind": k, "group": k == "a", "id": i % 60}) for i, k in enumerate("abc" * 100)]
    assert follow(records)[0].by == {"field": "kind"}


@pytest.mark.parametrize("name", ["landed", "table", "otherwise", "Über-Kind", "42", "a b", "A B"])
def test_outputs_get_names_that_a_feed_takes(name: str) -> None:
    shapes = {name: {"x": 1, "y": 2}, "a_b": {"p": "1", "q": "2"}}
    proposal, fit, _ = follow(({"kind": k}, shapes[k]) for k in [name, "a_b"] * 20)
    assert (len(proposal.outputs), fit.misfits) == (2, ())


def test_tombstones_are_counted_with_the_rest_of_a_split_by_a_field() -> None:
    records: list[Sent] = [({}, {"kind": k, k + "1": 1, k + "2": 2}) for k in "ab" * 50]
    proposal, fit, text = follow([*records, ({}, None), ({}, None)])
    assert (proposal.rest, len(fit.misfits)) == ({"tombstone": 2}, 2)
    assert "policies: {quarantine_limit: {share: 0.02}}" in text


def test_numbers_whose_digits_a_float_loses_stay_text_also_among_strays() -> None:
    values = [b'{"x": 1.5}'] * 995 + [b'{"x": 12345678901234567890.123}'] * 5
    proposal, fit, _ = follow(({}, v) for v in values)
    assert ([c.type for c in proposal.outputs[0].columns], fit.landed) == (["json"], 1000)


def test_path_with_odd_names_is_spelled_as_a_feed_reads_it() -> None:
    shapes = [{"x": 1, "y": 2}, {"p": "1", "q": "2"}]
    records = [({}, shapes[i % 2] | {"my meta": {"event.type": "ab"[i % 2]}}) for i in range(100)]
    proposal, fit, _ = follow(records)
    assert (proposal.by, fit.landed) == ({"at": '"my meta"."event.type"'}, 100)


def test_times_and_identifiers_that_differ_by_shape_do_not_split() -> None:
    shapes = [{"x": 1, "y": 2, "hook": "4711"}, {"p": "1", "q": "2", "hook": "4712"}]
    records = [({}, shapes[i % 2] | {"created": f"2026-11-2{i % 2}T10:00:00Z"}) for i in range(100)]
    assert follow(records)[0].by == {}


def test_large_objects_are_json() -> None:
    large = {f"f{i}": {"a": 1, "b": 2} for i in range(30)}
    proposal, fit, text = follow(({}, {"id": i, "large": large}) for i in range(20))
    assert ([c.type for c in proposal.outputs[0].columns], fit.landed) == (["int64", "json"], 20)
    assert "large: json " in text
    assert "columns `at` paths" in text


def test_schemas_of_kafka_connect_give_the_types() -> None:
    decimal = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "3"}}
    fields = [
        {"field": "base64", **decimal},
        {"field": "numeric", **decimal},
        {"field": "day", "type": "int32", "name": "org.apache.kafka.connect.data.Date"},
        {"field": "at", "type": "int64", "name": "org.apache.kafka.connect.data.Timestamp"},
        {"field": "ratio", "type": "float"},
        {"field": "bytes", "type": "bytes"},
        {"field": "empty", "type": "int16"},
        {"field": "tags", "type": "array", "items": {"type": "string"}},
    ]
    row = {
        "base64": "AYaf",
        "numeric": 1.25,
        "day": 7,
        "at": 7,
        "ratio": 0.5,
        "bytes": "AA==",
        "empty": None,
        "tags": ["a"],
    }
    message = {"schema": {"type": "struct", "fields": fields}, "payload": row}
    proposal, fit, _ = follow(({}, message) for _ in range(9))
    assert ({c.name: c.type for c in proposal.outputs[0].columns}, fit.landed) == (
        {
            "base64": "decimal(38,3) from base64 at payload.base64",
            "numeric": "decimal(38,3) at payload.numeric",
            "day": "date from days at payload.day",
            "at": "epoch(ms) at payload.at",
            "ratio": "float32 at payload.ratio",
            "bytes": "binary at payload.bytes",
            "empty": "int16 at payload.empty",
            "tags": "list<string> at payload.tags",
        },
        9,
    )


def test_unusable_type_of_a_schema_leaves_the_field_in_extra() -> None:
    """The scale of such a decimal is larger than its digits: no column can have it."""
    name = "org.apache.kafka.connect.data.Decimal"
    fields = [
        {"field": "x", "type": "bytes", "name": name, "parameters": {"scale": "50"}},
        {"field": "id", "type": "int8"},
    ]
    proposal, fit, text = follow(
        ({}, {"schema": {"fields": fields}, "payload": {"x": "AQ==", "id": 1}}) for _ in range(9)
    )
    (output,) = proposal.outputs
    assert ([c.name for c in output.columns], output.extra, fit.landed) == (["id"], ("x",), 9)
    assert '# in the column _extra: "x"' in text


@pytest.mark.parametrize("strays", [1, 10, 11])
def test_majority_decides_up_to_one_percent(strays: int) -> None:
    records: list[Sent] = [({}, {"x": n if n < strays else f"t{n}"}) for n in range(1000)]
    proposal, fit, text = follow(records)
    (column,) = proposal.outputs[0].columns
    assert (column.type, len(fit.misfits)) == (("string", strays) if strays <= 10 else ("json", 0))
    assert f"{1000 - strays:,} text, {strays} number: " in text


def test_elements_of_lists_must_all_agree() -> None:
    records: list[Sent] = [({}, {"x": [1] * 99 + (["a"] if n == 5 else [2])}) for n in range(1000)]
    proposal, fit, _ = follow(records)
    assert (proposal.outputs[0].columns[0].type, fit.landed) == ("list<json>", 1000)


def test_names_of_records_write_no_lines_of_their_own() -> None:
    members = [{"a\nstart: latest #": n if n % 2 else "x"} for n in range(20)]
    proposal, fit, text = follow(({}, {"x": member, "y\nb: c": 1}) for member in members)
    assert "start: latest" not in text.splitlines()
    assert (len(proposal.outputs[0].columns), fit.landed) == (2, 20)


@pytest.mark.parametrize("name", ["a \u2028 b", "x \x85 y", "\u00a0", "\U0001f600\u2028", "\ufeff", "tab\t", "e\u0301"])
def test_unprintable_names_read_the_same_field(name: str) -> None:
    _, fit, text = follow(({}, {"id": 1, name: "v", "s": {name: 2}}) for _ in range(3))
    assert fit.landed == 3, text
