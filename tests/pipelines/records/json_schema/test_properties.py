"""Random schemas and records: those land that `jsonschema` allows, apart from the leniency in docs/formats.md."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import scale_examples
from tests.pipelines.records.json.rows import FIRST
from tests.pipelines.records.json_schema.rows import convert, make_reader

NAMES = ("a", "b", "c", "d")
TEXTS = st.sampled_from(["", "A", "ab", "AB", "é", "x" * 9, "42"])
NUMBERS = st.one_of(st.integers(-12, 12), st.sampled_from([0.5, -1.5, 3.0, 10.25]))


def _generate_optional(**keywords: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


BOUNDS = _generate_optional(minimum=NUMBERS, exclusiveMaximum=st.integers(13, 20))
FIELDS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    BOUNDS.map(lambda keywords: {"type": "integer"} | keywords),
    BOUNDS.map(lambda keywords: {"type": ["number", "null"]} | keywords),
    _generate_optional(
        minLength=st.integers(0, 2), maxLength=st.integers(2, 4), pattern=st.sampled_from(["^[A-Z]", "b$", "[0-9]"])
    ).map(lambda keywords: {"type": "string"} | keywords),
    st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(lambda keywords: {"enum": keywords}),
    st.just({"anyOf": [{"type": "boolean"}, {"type": "null"}]}),
    st.lists(st.sampled_from(["ab", None]), max_size=2, unique=True)
    .map(lambda names: {"type": ["string", "null"], "enum": ["A", *names]}),
    st.just({"type": "array", "items": {"type": "integer"}}),
    st.just({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}),
    st.just({"type": "object", "additionalProperties": {"type": ["integer", "null"]}}),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inside: st.one_of(st.lists(inside, max_size=2), st.dictionaries(st.sampled_from("xy"), inside, max_size=2)),
    max_leaves=4,
)
SCHEMAS = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.sampled_from(NAMES), FIELDS, min_size=1)},
    optional={"additionalProperties": st.booleans()},
)


@settings(max_examples=scale_examples(120))
@given(SCHEMAS, st.data())
def test_landed_records_match_a_validator(keywords: dict[str, Any], data: st.DataObject) -> None:
    names = sorted(keywords["properties"])
    required = data.draw(st.lists(st.sampled_from(names), unique=True))
    schema = {"type": "object", "required": required} | keywords
    records = data.draw(st.lists(st.dictionaries(st.sampled_from((*NAMES, "e")), VALUES, max_size=5), max_size=12))
    landed, _ = convert(make_reader(schema), [json.dumps(r).encode() for r in records])
    judge = jsonschema.Draft202012Validator(schema)
    lenient = [_apply_leniency(r, keywords["properties"], required) for r in records]
    allowed = [FIRST + i for i, r in enumerate(lenient) if judge.is_valid(r)]
    assert landed["kafka_offset"].to_pylist() == allowed


def _apply_leniency(record: dict[str, Any], fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the record without nulls that count as missing, and with nulls for missing fields that may be null."""
    may_be_null = {n for n, f in fields.items() if jsonschema.Draft202012Validator(f).is_valid(None)}
    out = {n: v for n, v in record.items() if v is not None or n not in fields or n in may_be_null or n in required}
    return out | {n: None for n in required if n in may_be_null and n not in out}
