"""Typed rows as JSON: whatever landed lands the same again."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import HealthCheck, given, settings

from sluice.pipelines.republishing.values import json_values
from sluice.pipelines.schema.schema import EXTRA, Schema, parse_schema
from tests.pipelines.records.typed.rows import by_offset, convert, parsed
from tests.pipelines.records.typed.test_properties import cases


def again(schema: Schema, landed: pa.Table) -> tuple[list[bytes | None], pa.Table]:
    """The values made of landed rows, and what lands of these."""
    (rows,) = landed.unify_dictionaries().combine_chunks().to_batches() or [None]
    values = json_values(rows, schema).to_pylist()
    made, refused = convert(schema, values)
    assert refused is None, refused.to_pylist()
    return values, made


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_what_landed_lands_the_same_again(case: tuple[Schema, list[bytes | None]]) -> None:
    schema, values = case
    landed, _ = convert(schema, values)
    if not landed.num_rows:
        return
    _, made = again(schema, landed)
    before, after = (list(by_offset(t, "kafka_offset").values()) for t in (landed, made))
    names = [*(f.name for f in schema.fields), "kafka_tombstone"]
    assert repr([{n: r[n] for n in names} for r in after]) == repr([{n: r[n] for n in names} for r in before])
    assert [parsed(r[EXTRA]) for r in after] == [parsed(r[EXTRA]) for r in before]


def test_how_values_are_spelled() -> None:
    schema = parse_schema(
        {
            "id": "int64",
            "a": "decimal(12,2)",
            "f": "float32",
            "t": "timestamp",
            "e": "epoch(s)",
            "b": "binary",
            "j": "json",
        }
    )
    value = b""" {"j": [1, 1.50], "new": {"x" : 1}, "t": "2024-02-29T12:00:00.25+01:00", "a": 1.5, "id": 1e3, "f": 0.1,
        "e": 1709208000, "b": "aGk=", "gone": null} """
    landed, _ = convert(schema, [value, None, b"{}"])
    values, _ = again(schema, landed)
    assert values == [
        b'{"id":1000,"a":1.50,"f":0.1,"t":"2024-02-29T11:00:00.250000Z","e":1709208000,"b":"aGk=","j":[1, 1.50],%s}'
        % b'"new":{"x" : 1},"gone":null',
        None,
        b"{}",
    ]
