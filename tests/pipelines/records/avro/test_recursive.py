"""Recursive types of the writer alone are skipped; the finite part that the feed's schema names lands."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.avro.loops import MOST_OPEN
from tests.examples import scale_examples
from tests.pipelines.records.avro.rows import Schemas, convert, encode, make_reader
from tests.pipelines.records.avro.test_properties import read, to_landed
from tests.pipelines.records.json.rows import FIRST, by_offset

READER = {"type": "record", "name": "Ev", "fields": [{"name": "id", "type": "long"}, {"name": "end", "type": "string"}]}


def make_record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def make_event(kind: Any) -> dict[str, Any]:
    return make_record("Ev", id="long", rest=kind, end="string")


CAUSE = make_record("Cause", msg="string", cause=["null", "Cause"])
TREE = make_record("Tree", children={"type": "array", "items": "Tree"}, v="int")
NAMES = make_record("Names", of={"type": "map", "values": "Names"})
EXPR = make_record(
    "Add", left=["int", "Add", make_record("Neg", of=["Add", "Neg", "string"])], right=["int", "Add", "Neg"]
)

SKIPPED = [
    (["null", CAUSE], {"msg": "a", "cause": {"msg": "b", "cause": None}}),
    (TREE, {"children": [{"children": [], "v": 1}, {"children": [{"children": [], "v": 5}] * 3, "v": 2}], "v": 3}),
    (NAMES, {"of": {"a": {"of": {}}, "b": {"of": {"c": {"of": {}}}}}}),
    (EXPR, {"left": ("Neg", {"of": ("Add", {"left": 1, "right": 2})}), "right": ("Add", {"left": 3, "right": 4})}),
    ({"type": "array", "items": CAUSE}, [{"msg": "a", "cause": None}] * 5),
    ({"type": "array", "items": ["null", "Ev"]}, [None, {"id": 1, "rest": [None], "end": "x"}]),
    (make_record("A", b=make_record("B", a=["null", "A"], c=["null", "B"]), d=["null", "B"]),
     {"b": {"a": {"b": {"a": None, "c": None}, "d": None}, "c": None}, "d": {"a": None, "c": None}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), SKIPPED)
def test_recursive_field_of_the_writer_is_skipped(kind: Any, value: Any) -> None:
    writer = make_event(kind)
    records = [encode(writer, {"id": i, "rest": value, "end": f"e{i}"}) for i in range(3)]
    assert [read(writer, READER, r[5:]) for r in records] == [{"id": i, "end": f"e{i}"} for i in range(3)]
    landed, quarantined, drift = convert(make_reader(READER), [*records, records[0][:-3]], Schemas({1: writer}))
    assert landed.select(["id", "end"]).to_pylist() == [{"id": i, "end": f"e{i}"} for i in range(3)]
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == ["not_avro"]
    assert [(d.field, d.type) for d in drift] == [("rest", "")]


def test_the_finite_part_of_a_recursive_record_lands() -> None:
    writer = make_event(["null", CAUSE])
    inner = make_record("Inner", msg="string") | {"aliases": ["Cause"]}
    reader = make_event(["null", make_record("Cause", msg="string", cause=["null", inner])])
    deep = {"msg": "a", "cause": {"msg": "b", "cause": {"msg": "c", "cause": None}}}
    landed, quarantined, _ = convert(
        make_reader(reader), [encode(writer, {"id": 1, "rest": deep, "end": "e"})], Schemas({1: writer})
    )
    assert quarantined is None
    assert landed["rest"].to_pylist() == [{"msg": "a", "cause": {"msg": "b"}}]


def test_endless_or_too_deep_recursion_is_refused() -> None:
    endless, long = make_event(make_record("Again", again="Again")), make_event(CAUSE)
    deep = b"\0\0\0\0\x02\x02" + b"\x02m\x02" * (MOST_OPEN + 5) + b"\x02m\x00\x02e"
    near = b"\0\0\0\0\x02\x02" + b"\x02m\x02" * (MOST_OPEN - 5) + b"\x02m\x00\x02e"
    values = [b"\0\0\0\0\x01\x02\x02e", deep, near, b"\0\0\0\0\x02\x02" + b"\x02m\x02" * 9]
    landed, quarantined, _ = convert(make_reader(READER), values, Schemas({1: endless, 2: long}))
    assert landed["id"].to_pylist() == [1]
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == ["too_deep", "too_deep", "not_avro"]


class _Wild:
    """Random schemas in which a record may contain those that enclose it, and random values of them."""

    def __init__(self, rnd: Random) -> None:
        self.rnd, self.count, self.defined = rnd, 0, dict[str, Any]()

    def make_record(self, outer: tuple[str, ...]) -> dict[str, Any]:
        self.count += 1
        name, enclosing = f"R{self.count}", (*outer, f"R{self.count}")
        fields = {f"f{i}": self.make_type(enclosing) for i in range(self.rnd.randint(1, 4))}
        self.defined[name] = make_record(name, **fields)
        return self.defined[name]

    def make_type(self, enclosing: tuple[str, ...]) -> Any:
        kind, rnd = self.rnd.randrange(12), self.rnd
        again = rnd.choice([*enclosing, *self.defined])
        if kind == 0 and len(enclosing) < 4:
            return self.make_record(enclosing)
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

    def make_value(self, t: Any, depth: int = 0) -> Any:
        rnd = self.rnd
        if isinstance(t, list):
            branch = "null" if depth > 5 and "null" in t else rnd.choice(t)
            value = self.make_value(branch, depth + 1)
            return (branch, value) if branch in self.defined else value
        t = self.defined.get(t, t) if isinstance(t, str) else t
        if isinstance(t, dict) and t["type"] == "record":
            return {f["name"]: self.make_value(f["type"], depth + 1) for f in t["fields"]}
        if isinstance(t, dict):
            n = 0 if depth > 5 else rnd.randint(0, 3)
            inside = t.get("items") or t.get("values")
            if t["type"] == "array":
                return [self.make_value(inside, depth + 1) for _ in range(n)]
            return {f"k{i}": self.make_value(inside, depth + 1) for i in range(n)}
        simple = {"null": None, "int": -7, "long": 1 << 40, "string": "é" * rnd.randrange(4), "double": 0.5}
        return simple.get(t, bool(rnd.randrange(2)))


def _drop_recursive_fields(schema: dict[str, Any], defined: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with only the fields that name no record."""
    keep = [f for f in schema["fields"] if not any(f'"{name}"' in json.dumps(f["type"]) for name in defined)]
    return {"type": "record", "name": schema["name"], "fields": keep}


@given(st.integers(0, 1 << 40))
@settings(max_examples=scale_examples(100))
def test_rows_of_recursive_schemas_match_fastavro(seed: int) -> None:
    wild = _Wild(Random(seed))
    writer = wild.make_record(())
    writer["fields"] = [{"name": "id", "type": "long"}, *writer["fields"], {"name": "end", "type": "string"}]
    reader = _drop_recursive_fields(writer, wild.defined)
    values = [wild.make_value(writer) for _ in range(5)]
    records = [encode(writer, v) for v in values]
    landed, quarantined, _ = convert(make_reader(reader), records, Schemas({1: writer}))
    rows = by_offset(landed, "kafka_offset")
    assert quarantined is None
    for i, data in enumerate(records):
        expected = to_landed(reader, read(writer, reader, data[5:]))
        assert {k: rows[FIRST + i][k] for k in expected} == expected
