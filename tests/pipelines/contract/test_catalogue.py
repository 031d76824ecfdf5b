"""The catalogue agrees with Great Expectations' own classes and with the documentation; its entries in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.contract.catalogue import RULES, Scope, Takes, columns, demand, text
from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.rows.row_format import landed_schema
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import arrow_type, parse_schema

DOCS = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text()


def make_expectation(type_: str, **kwargs: Any) -> Expectation:
    return Expectation(0, type_, kwargs)


@pytest.mark.slow
def test_catalogue_matches_great_expectations() -> None:
    import great_expectations.expectations as gxe

    for entry in RULES.values():
        name = "".join(word.capitalize() for word in entry.type.split("_"))
        properties = getattr(gxe, name).schema()["properties"]
        assert properties["metadata"]["properties"]["data_quality_issues"]["const"] == [str(entry.issue)], entry.type
        for kwarg in entry.kwargs.values():
            assert kwarg.name in properties, (entry.type, kwarg.name)
            if not kwarg.required:
                theirs = properties[kwarg.name].get("default")
                assert theirs == kwarg.default or not (theirs or kwarg.default), (entry.type, kwarg.name)


def test_the_documentation_lists_each_with_its_reason() -> None:
    for entry in RULES.values():
        row = re.search(rf"^\| `{entry.type}` \|.*$", DOCS, re.MULTILINE)
        assert row, entry.type
        assert entry.reason in row[0], entry.type


def test_row_expectations_have_reasons_and_batch_expectations_have_none() -> None:
    assert {bool(e.reason) for e in RULES.values() if e.scope is Scope.ROW} == {True}
    assert {e.reason for e in RULES.values() if e.scope is Scope.WHOLE} == {""}
    assert sum(e.scope is Scope.ROW for e in RULES.values()) == 16


LEAST: dict[Takes, Any] = {
    Takes.COLUMN: "c",
    Takes.COLUMNS: ["a", "b"],
    Takes.NAMES: ["a"],
    Takes.TRUTH: True,
    Takes.BOUND: 1,
    Takes.COUNT: 1,
    Takes.NUMBER: 1,
    Takes.SHARE: 0.5,
    Takes.VALUES: ["v"],
    Takes.PAIRS: [["v", None]],
    Takes.REGEX: "^r",
    Takes.REGEXES: ["^r"],
    Takes.QUANTILES: {"quantiles": [0.5], "value_ranges": [[1, None]]},
}


@pytest.mark.parametrize("type_", [*RULES])
def test_each_expectation_has_a_description(type_: str) -> None:
    kwargs = {k.name: LEAST[k.takes] for k in RULES[type_].kwargs.values() if k.takes in LEAST}
    expectation = Expectation(0, type_, kwargs)
    assert text(expectation).isprintable()
    assert "should" in demand(expectation)
    assert all(name in text(expectation) for name in columns(expectation))


@pytest.mark.parametrize(
    ("expectation", "words"),
    [
        (
            make_expectation("expect_column_values_to_be_between", column="amount", min_value=0, max_value=10000.0),
            "amount is between 0 and 10,000",
        ),
        (
            make_expectation("expect_column_values_to_be_between", column="amount", min_value=0.5, strict_min=True),
            "amount is more than 0.5",
        ),
        (
            make_expectation("expect_column_values_to_be_in_set", column="c", value_set=[*"abcdefg"], mostly=0.995),
            'c is one of "a", "b", "c", "d", "e" and 2 more, in at least 99.5% of rows',
        ),
        (
            make_expectation(
                "expect_column_pair_values_a_to_be_greater_than_b", column_A="end", column_B="begin", or_equal=True
            ),
            "end is at least begin",
        ),
        (make_expectation("expect_column_values_to_match_regex", column="c", regex="a" * 70), f"c matches {'a' * 60}…"),
        (make_expectation("expect_column_value_lengths_to_equal", column="c\x1b", value=3), "the length of c� is 3"),
    ],
)
def test_descriptions(expectation: Expectation, words: str) -> None:
    assert text(expectation) == words


def test_requirement_of_a_broken_row() -> None:
    expectation = make_expectation("expect_column_values_to_not_match_regex", column="c", regex="^x")
    assert (text(expectation), demand(expectation)) == ("c does not match ^x", "c should not match ^x")


def test_columns_are_the_landed_ones() -> None:
    from sluice.pipelines.contract.catalogue import column_types

    schema = parse_schema({"a": "epoch(s)", "d": "decimal(3,1)", "l": "list<int32>"})
    for shape in (Shape(), Shape(schema)):
        types = column_types(shape.columns)
        assert [*types] == landed_schema(shape.columns).names
        for name, kind in types.items():
            arrow = landed_schema(shape.columns).field(name).type
            if name.removeprefix("kafka_") not in ("topic", "headers"):
                assert arrow_type(kind) == arrow, name


def test_documented_example_is_a_valid_contract() -> None:
    from sluice.pipelines.contract.suite import parse_contract

    (example,) = re.findall(r"```json\n(.*?)```", DOCS.partition("## Severity")[0], re.DOTALL)
    schema = parse_schema({"amount": "decimal(12,2)", "currency": "string", "order_id": "string"})
    assert len(parse_contract(example.encode(), schema).expectations) == 3
