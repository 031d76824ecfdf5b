"""Rows of typed feeds: complete as JSON, and free of control characters on a terminal."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pytest
from rich.console import Console

from sluice.cli.terminal.record_view import time_text, typed_fields, typed_view
from sluice.pipelines.records.rows.row_format import RawFormat

ROW = pa.table(
    {
        "amount": pa.array(["1.20"]).cast(pa.decimal128(5, 2)),
        "at": pa.array([1_709_208_000_123_456_789]).cast(pa.timestamp("ns", "UTC")),
        "tags": pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int8())),
        "lines": pa.array([[{"sku": b"\xff"}, None]], pa.list_(pa.struct([("sku", pa.binary())]))),
        "note": ["\x1b[2J" + "x" * 1000],
        "nothing": pa.nulls(1, pa.string()),
        "kafka_key": [b"c-1"],
        "kafka_offset": [7],
        "kafka_timestamp": pa.array([1 << 62]).cast(pa.timestamp("ms", "UTC")),
    }
)


def test_typed_row_is_serialized_as_json() -> None:
    fields = typed_fields(ROW)
    assert json.loads(json.dumps(fields)) == {
        "amount": "1.20",
        "at": "2024-02-29 12:00:00.123456789Z",
        "tags": {"a": 1, "b": None},
        "lines": [{"sku": "/w=="}, None],
        "note": "\x1b[2J" + "x" * 1000,
        "nothing": None,
        "kafka_key": "Yy0x",
        "kafka_offset": 7,
        "kafka_timestamp": 1 << 62,
    }
    assert typed_fields(RawFormat.schema.empty_table()) is None


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (1_764_000_000_000_000, pa.timestamp("ms", "UTC"), "1764000000000000 ms"),
        (-(1 << 63), pa.timestamp("us", "UTC"), f"{-(1 << 63)} us"),
        (253_402_300_799_999, pa.timestamp("ms", "UTC"), "9999-12-31 23:59:59.999Z"),
        (-62_135_596_800_000, pa.timestamp("ms", "UTC"), "0001-01-01 00:00:00.000Z"),
        ((1 << 31) - 1, pa.date32(), "2147483647 days"),
        (18_262, pa.date32(), "2020-01-01"),
    ],
)
def test_time_out_of_range_is_shown_as_a_number(number: int, kind: pa.DataType, text: str) -> None:
    (cell,) = pa.array([number], pa.int64() if pa.types.is_timestamp(kind) else pa.int32()).cast(kind)
    assert time_text(cell) == text


def test_typed_row_has_no_terminal_escapes() -> None:
    fields = typed_fields(ROW)
    assert fields is not None
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(typed_view(fields))
    text = console.export_text()
    assert "\x1b" not in text
    assert "nothing" not in text
    assert "1.20" in text
    assert '"c-1"' in text
