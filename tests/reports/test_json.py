"""Reports about JSON: numbers, texts, broken values, and their effect on adjacent records.

Each value is between two good records, so reports that one bad record stops all are covered too. A landed value must
equal the one that Python's json reads.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.reports.world import land_json, land_values, list_reasons

GOOD = b'{"id": 0}'
LANDS: dict[str, tuple[str, bytes]] = {
    "risingwavelabs/risingwave#13047": ("x: float64", b'{"x": 327267367867168100000}'),
    "apache/kafka#9227": ("x: 'decimal(38,0)'", b'{"x": 9223372036854775808}'),
    "eulerto/wal2json#143": ("x: int64", b'{"x": 2001000009664553892}'),
    "influxdata/telegraf#9520": ("x: uint64", b'{"x": 18446744073709551615}'),
    "ClickHouse/ClickHouse#56937": ("x: uint64", b'{"x": 1e2}'),
    "ClickHouse/ClickHouse#21875": ("x: 'decimal(38,18)'", b'{"x": 111111.111111111111111111}'),
    "ClickHouse/ClickHouse#69082": ("x: 'decimal(38,16)'", b'{"x": 111244542.003}'),
    "ClickHouse/ClickHouse#3135": ("x: 'decimal(18,5)'", b'{"x": 4.2E-4}'),
    "ClickHouse/ClickHouse#49895": ("x: float64", b'{"x": -57783588950605040000}'),
    "ClickHouse/ClickHouse#60385": ("x: float64", b'{"x": 6.3e-06}'),
    "ClickHouse/ClickHouse#39842": ("x: 'decimal(16,6)'", b'{"x": 1659386157.403862}'),
    "pola-rs/polars#10661": ("x: string", rb'{"x": "\ufffd1234"}'),
    "pola-rs/polars#10034": ("x: string", b'{"x": "%s"}' % ("\N{RIGHT SINGLE QUOTATION MARK}\u20ac" * 9999).encode()),
    "delta-io/delta-kernel-rs#1139": ("x: string", json.dumps({"x": "page\u2028\n\t\0\\ \U0001f600" * 3000}).encode()),
    "pola-rs/polars#15145": ("x: int32", b'\xef\xbb\xbf{"x": 1}'),
    "apache/druid#10259": ("x: int32", b'{\r\n\t"x":\n\t1\r\n}\n'),
    "LinkedInAttic/camus#156": ("x: string", '{"x": "größer Ω 漢"}'.encode()),
}
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "apache/openwhisk-package-kafka#319": ("x: list<float64>", b'{"x": [NaN, NaN, 123]}', "not_json"),
    "apache/openwhisk-package-kafka#332": ("x: float64", b'{"x": 1e400}', "out_of_range"),
    "snowflakedb/snowflake-kafka-connector#641": ("x: string", b"FT109918", "not_json"),
    "ClickHouse/ClickHouse#40059": ("x: 'decimal(2,2)'", b'{"x": 2}', "out_of_range"),
    "technicalpickles/cq#26": ("x: string", b'{"x": "a\x00b"}', "not_json"),
    "ClickHouse/ClickHouse#52005": ("x: string", rb'{"x": "\u12"}', "not_json"),
    "ClickHouse/ClickHouse#2675": ("x: int32", b'{"x": "seven"}', "wrong_type"),
    "ClickHouse/ClickHouse#6916": ("x: string", b'{"x": unquoted","cols": 1}', "not_json"),
    "StarRocks/starrocks#79338": ("x: json", b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "too_deep"),
    "castorm/kafka-connect-http#168": ("x: int32", b'{"x": 1}\n{"x": 2}\n{"x": 3}', "not_json"),
    "druid-io/tranquility#216": ("x: int32", b'[{"x": 1}, {"x": 2}]', "wrong_type"),
    "duckdb/duckdb#11152": ("x: int32", b'{"x": 1, "y": 2, "x": 3}', "duplicate"),
    "parseablehq/parseable#1334": ("x: 'map<string, int32>'", b'{"x": {"a": 1, "a": 1}}', "duplicate"),
    "ClickHouse/ClickHouse#97423": ("x: json", b'{"x": 42, "x": {"b": 42}}', "duplicate"),
    "apache/spark#33608": ("x: int32", b"null", "wrong_type"),
    "apache/spark#22938": ("x: int32", b"   ", "not_json"),
    "apache/spark#33212": ("x: 'int32 not null'", b'{"x": null}', "missing"),
}


def read_by_python(value: bytes) -> Any:
    return json.loads(value.decode("utf-8-sig"), parse_float=Decimal)["x"]


@pytest.mark.parametrize("report", LANDS)
def test_value_matches_the_json_module_of_python(report: str, tmp_path: Path) -> None:
    schema, value = LANDS[report]
    landed = land_json(tmp_path, f"id: int32, {schema}", GOOD, value, GOOD)
    assert landed.counts.landed == 3
    (_, x, _), expected = landed.rows["x"].to_pylist(), read_by_python(value)
    assert x == (float(expected) if "float" in schema else expected)


@pytest.mark.parametrize("report", REFUSED)
def test_invalid_value_is_refused_alone_with_its_bytes(report: str, tmp_path: Path) -> None:
    schema, value, reason = REFUSED[report]
    good = b'{"id": 0, "x": 0}' if "not null" in schema else GOOD
    landed = land_json(tmp_path, f"id: int32, {schema}", good, value, good)
    assert landed.rows["id"].to_pylist() == [0, 0]
    assert (list_reasons(landed), landed.quarantined["value"].to_pylist()) == ([reason], [value])


def test_oversized_number_does_not_affect_other_fields(tmp_path: Path) -> None:
    """ClickHouse/ClickHouse#81132: an integer of 27 digits made every other field of its record empty."""
    value = b'{"id": "123", "big_number":100000000000000000000000000}'
    landed = land_json(tmp_path, "id: string", value)
    (row,) = landed.rows.to_pylist()
    assert row["id"] == "123"
    assert json.loads(row["_extra"]) == {"big_number": 10**26}


def test_digits_of_extra_field_are_kept(tmp_path: Path) -> None:
    """snowflakedb/snowflake-kafka-connector#225: numbers of more digits than a double were rounded in a variant."""
    digits = "3.14159265358979323846264338327950288419716939937510"
    landed = land_json(tmp_path, "id: int32", b'{"id": 1, "pi": %s}' % digits.encode())
    assert digits in landed.rows["_extra"].to_pylist()[0]


def test_fraction_of_epoch_seconds_is_refused_not_truncated(tmp_path: Path) -> None:
    """risingwavelabs/risingwave#16852: a number of another unit than the column's was taken for this one."""
    values = [b'{"x": 1659386157.403862}', b'{"x": 1659386157403862}', b'{"x": 1659386157}']
    landed = land_json(tmp_path, "x: epoch(s)", *values)
    assert list_reasons(landed) == ["inexact", "out_of_range"]
    assert [t.isoformat() for t in landed.rows["x"].to_pylist()] == ["2022-08-01T20:35:57+00:00"]


def test_utf_16_is_quarantined_with_its_bytes(tmp_path: Path) -> None:
    """neilpa/yajsv#14: JSON in UTF-16 gave no useful message."""
    value = '{"id": 1}'.encode("utf-16")
    landed = land_json(tmp_path, "id: int32", value)
    assert landed.quarantined["value"].to_pylist() == [value]
    assert list_reasons(landed)[0] in ("not_json", "invalid_utf8")


def test_refused_records_are_counted(tmp_path: Path) -> None:
    """ClickHouse/ClickHouse#57366: the number of skipped messages was not visible."""
    landed = land_json(tmp_path, "id: int32", GOOD, b"1", b"", b"{", None)
    assert (landed.counts.landed, landed.counts.quarantined, landed.counts.dropped) == (2, 3, 0)


def test_records_dropped_by_policy_are_counted(tmp_path: Path) -> None:
    """ClickHouse/ClickHouse#10647: the limit of broken messages to skip depended on the size of a block."""
    landed = land_json(tmp_path, "id: int32", GOOD, *[b"1"] * 500, policies="on_undecodable: drop")
    assert (landed.counts.landed, landed.counts.quarantined, landed.counts.dropped) == (1, 0, 500)


def test_empty_message_is_not_a_tombstone(tmp_path: Path) -> None:
    """redpanda-data/connect#1715: an empty message and a tombstone could not be distinguished."""
    landed = land_json(tmp_path, "id: int32", b"", None)
    assert landed.rows["kafka_tombstone"].to_pylist() == [True]
    assert (list_reasons(landed), landed.quarantined["value"].to_pylist()) == (["not_json"], [b""])
    raw = land_values(tmp_path / "raw", "topics: orders\nstart: earliest\n", [b"", None])
    assert raw.rows["value"].to_pylist() == [b"", None]


def test_tombstones_land_among_typed_rows(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-storage-cloud#42: a tombstone among typed records killed the task."""
    landed = land_json(tmp_path, "id: 'int32 not null'", b'{"id": 1}', None, b'{"id": 2}')
    assert landed.rows.select(["id", "kafka_tombstone"]).to_pylist() == [
        {"id": 1, "kafka_tombstone": False},
        {"id": None, "kafka_tombstone": True},
        {"id": 2, "kafka_tombstone": False},
    ]


def test_names_that_differ_only_by_case_stay_separate(tmp_path: Path) -> None:
    """apache/spark#11420: `user` and `User` became one column."""
    landed = land_json(tmp_path, "user: string", b'{"user": "a", "User": "b"}')
    (row,) = landed.rows.to_pylist()
    assert (row["user"], json.loads(row["_extra"])) == ("a", {"User": "b"})


def test_debezium_decimals_land_as_decoded_bytes(tmp_path: Path) -> None:
    """risingwavelabs/risingwave#19792: a decimal in Base64 was read as its text's bytes."""
    landed = land_json(tmp_path, "x: binary", b'{"x": "CSo="}')
    (x,) = landed.rows["x"].to_pylist()
    assert Decimal(int.from_bytes(x, "big", signed=True)).scaleb(-4) == Decimal("0.2346")


def test_debezium_microseconds_keep_leading_zero(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-bigquery#345: .048491 of a second arrived as .484910."""
    landed = land_json(tmp_path, "x: epoch(us)", b'{"x": 1690366967048491}')
    assert [t.isoformat() for t in landed.rows["x"].to_pylist()] == ["2023-07-26T10:22:47.048491+00:00"]
