"""Workloads in Avro, JSON Schema and Protobuf hold the same orders as the JSON workload."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from bench.formats import BEGIN, FORMATS, HEADER, as_sent
from bench.workloads import AVRO_ORDERS, JSON_SCHEMA_ORDERS, PROTOBUF_ORDERS, TYPED_ORDERS
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import READERS

ROWS = next(TYPED_ORDERS.of(40).chunks(0))


def test_fastavro_reads_same_orders_from_avro() -> None:
    read = FORMATS["avro"].reading()
    sent = as_sent(ROWS, "avro").column("value").to_pylist()
    for value, text in zip(sent, ROWS.column("value").to_pylist(), strict=True):
        order, expected = read(value), json.loads(text, parse_float=Decimal)
        assert order | {"ts": None} == expected | {"ts": None}
        assert order["ts"].isoformat(timespec="milliseconds").replace("+00:00", "Z") == expected["ts"]


def test_json_schema_orders_are_json_orders_with_header() -> None:
    sent = as_sent(ROWS, "json_schema").column("value").to_pylist()
    assert {v[:BEGIN] for v in sent} == {HEADER}
    assert [v[BEGIN:].decode() for v in sent] == ROWS.column("value").to_pylist()


def test_google_protobuf_reads_same_orders() -> None:
    read = FORMATS["protobuf"].reading()
    sent = as_sent(ROWS, "protobuf").column("value").to_pylist()
    for value, text in zip(sent, ROWS.column("value").to_pylist(), strict=True):
        order, expected = read(value), json.loads(text, parse_float=Decimal)
        assert order | {"ts": None} == expected | {"ts": None}
        assert datetime.fromisoformat(expected["ts"]) == datetime.fromtimestamp(order["ts"] / 1_000_000, UTC)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_match_fields_of_typed_workload(name: str) -> None:
    form = READERS[name]
    reader = form.make(form.read(FORMATS[name].schema, Path(), ""), WireFormat.CONFLUENT)
    assert [f.name for f in reader.columns.fields] == [n for n, _ in TYPED_ORDERS.schema]


def test_formats_have_distinct_fingerprints_and_json_is_unchanged() -> None:
    assert as_sent(ROWS, "") is ROWS
    prints = {w.fingerprint for w in (TYPED_ORDERS, AVRO_ORDERS, PROTOBUF_ORDERS, JSON_SCHEMA_ORDERS)}
    assert len(prints) == 4
