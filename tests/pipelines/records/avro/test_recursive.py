"""Recursive types that only the writer has are passed over; a finite part that the feed's schema has lands."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.avro.loops import MOST_OPEN
from tests.examples import examples
from tests.pipelines.records.avro.rows import Schemas, convert, encoded, reader_of
from tests.pipelines.records.avro.test_properties import landing, read
from tests.pipelines.records.json.rows import FIRST, by_offset

READER = {"type": "record", "name": "Ev", "fields": [{"name": "id", "type": "long"}, {"name": "end", "type": "string"}]}


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def event(kind: Any) -> dict[str, Any]:
    return record("Ev", id="long", rest=kind, end="string")


CAUSE = record("Cause", msg="string", cause=["null", "Cause"])
TREE = record("Tree", children={"type": "array", "items": "Tree"}, v="int")
NAMES = record("Names", of={"type": "map", "values": "Names"})
EXPR = record("Add", left=["int", "Add", record("Neg", of=["Add", "Neg", "string"])], right=["int", "Add", "Neg"])

SKIPPED = [
    (["null", CAUSE], {"msg": "a", "cause": {"msg": "b", "cause": None}}),
    (TREE, {"children": [{"children": [], "v": 1}, {"children": [{"children": [], "v": 5}] * 3, "v": 2}], "v": 3}),
    (NAMES, {"of": {"a": {"of": {}}, "b": {"of": {"c": {"of": {}}}}}}),
    (EXPR, {"left": ("Neg", {"of": ("Add", {"left": 1, "right": 2})}), "right": ("Add", {"left": 3, "right": 4})}),
    ({"type": "array", "items": CAUSE}, [{"msg": "a", "cause": None}] * 5),
    ({"type": "array", "items": ["null", "Ev"]}, [None, {"id": 1, "rest": [None], "end": "x"}]),
    (record("A", b=record("B", a=["null", "A"], c=["null", "B"]), d=["null", "B"]),
     {"b": {"a": {"b": {"a": None, "c": None}, "d": None}, "c": None}, "d": {"a": None, "c": None}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), SKIPPED)
def test_a_recursive_field_of_the_writer_is_passed_over(kind: Any, value: Any) -> None:
    writer = event(kind)
    records = [encoded(writer, {"id": i, "rest": value, "end": f"e{i}"}) for i in range(3)]
    assert [read(writer, READER, r[5:]) for r in records] == [{"id": i, "end": f"e{i}"} for i in range(3)]
    landed, held, drift = convert(reader_of(READER), [*records, records[0][:-3]], Schemas({1: writer}))
    assert landed.select(["id", "end"]).to_pylist() == [{"id": i, "end": f"e{i}"} for i in range(3)]
    assert held is not None
    assert held["reason"].to_pylist() == ["not_avro"]
    assert [(d.field, d.type) for d in drift] == [("rest", "")]


def test_the_finite_part_of_a_recursive_record_lands() -> None:
    writer = event(["null", CAUSE])
    inner = record("Inner", msg="string") | {"aliases": ["Cause"]}
    reader = event(["null", record("Cause", msg="string", cause=["null", inner])])
    deep = {"msg": "a", "cause": {"msg": "b", "cause": {"msg": "c", "cause": None}}}
    landed, held, _ = convert(
        reader_of(reader), [encoded(writer, {"id": 1, "rest": deep, "end": "e"})], Schemas({1: writer})
    )
    assert held is None
    assert landed["rest"].to_pylist() == [{"msg": "a", "cause": {"msg": "b"}}]


def test_a_recursion_without_an_end_or_deeper_than_the_bound_is_refused() -> None:
    endless, long = event(record("Again", again="Again")), event(CAUSE)
    deep = b"\0\0\0\0\x02\x02" + b"\x02m\x02" * (MOST_OPEN + 5) + b"\x02m\x00\x02e"
    near = b"\0\0\0\0\x02\x02" + b"\x02m\x02" * (MOST_OPEN - 5) + b"\x02m\x00\x02e"
    values = [b"\0\0\0\0\x01\x02\x02e", deep, near, b"\0\0\0\0\x02\x02" + b"\x02m\x02" * 9]
    landed, held, _ = convert(reader_of(READER), values, Schemas({1: endless, 2: long}))
    assert landed["id"].to_pylist() == [1]
    assert held is not None
    assert held["reason"].to_pylist() == ["too_deep", "too_deep", "not_avro"]


class _Wild:
    """Random schemas whose records may hold the records around them, and random values of them."""

    def __init__(self, rnd: Random) -> None:
        self.rnd, self.count, self.defined = rnd, 0, dict[str, Any]()

    def record(self, around: tuple[str, ...]) -> dict[str, Any]:
        self.count += 1
        name, known = f"R{self.count}", (*around, f"R{self.count}")
        fields = {f"f{i}": self.type(known) for i in range(self.rnd.randint(1, 4))}
        self.defined[name] = record(name, **fields)
        return self.defined[name]

    def type(self, known: tuple[str, ...]) -> Any:
        kind, rnd = self.rnd.randrange(12), self.rnd
        again = rnd.choice([*known, *self.defined])
        if kind == 0 and len(known) < 4:
            return self.record(known)
        if kind == 1 and self.defined:
            return rnd.choice([*self.defined])
        ended: list[Any] = [
            ["null", again], [again, "null"], {"type": "array", "items": again}, {"type": "map", "values": again},
            ["null", "string", again], {"type": "array", "items": ["null", again]},
            {"type": "map", "values": {"type": "array", "items": again}},
        ]  # fmt: skip
        if kind < 6:
            return rnd.choice(ended)
        return rnd.choice(["int", "string", "double", "boolean", ["null", "long"], {"type": "array", "items": "int"}])

    def value(self, t: Any, depth: int = 0) -> Any:
        rnd = self.rnd
        if isinstance(t, list):
            branch = "null" if depth > 5 and "null" in t else rnd.choice(t)
            value = self.value(branch, depth + 1)
            return (branch, value) if branch in self.defined else value
        t = self.defined.get(t, t) if isinstance(t, str) else t
        if isinstance(t, dict) and t["type"] == "record":
            return {f["name"]: self.value(f["type"], depth + 1) for f in t["fields"]}
        if isinstance(t, dict):
            n = 0 if depth > 5 else rnd.randint(0, 3)
            inside = t.get("items") or t.get("values")
            if t["type"] == "array":
                return [self.value(inside, depth + 1) for _ in range(n)]
            return {f"k{i}": self.value(inside, depth + 1) for i in range(n)}
        simple = {"null": None, "int": -7, "long": 1 << 40, "string": "é" * rnd.randrange(4), "double": 0.5}
        return simple.get(t, bool(rnd.randrange(2)))


def _finite(schema: dict[str, Any], defined: dict[str, Any]) -> dict[str, Any]:
    """The schema with the fields that name no record."""
    keep = [f for f in schema["fields"] if not any(f'"{name}"' in json.dumps(f["type"]) for name in defined)]
    return {"type": "record", "name": schema["name"], "fields": keep}


@given(st.integers(0, 1 << 40))
@settings(max_examples=examples(100))
def test_any_recursive_schema_is_read_as_fastavro_reads_it(seed: int) -> None:
    wild = _Wild(Random(seed))
    writer = wild.record(())
    writer["fields"] = [{"name": "id", "type": "long"}, *writer["fields"], {"name": "end", "type": "string"}]
    reader = _finite(writer, wild.defined)
    values = [wild.value(writer) for _ in range(5)]
    records = [encoded(writer, v) for v in values]
    landed, held, _ = convert(reader_of(reader), records, Schemas({1: writer}))
    rows = by_offset(landed, "kafka_offset")
    assert held is None
    for i, data in enumerate(records):
        expected = landing(reader, read(writer, reader, data[5:]))
        assert {k: rows[FIRST + i][k] for k in expected} == expected
