"""Contracts from their files: accepted settings and their meaning, and errors with the place in the file."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.contract.expectation import Contract, Severity
from sluice.pipelines.contract.suite import MAX_BYTES, MOST, ContractError, parse_contract, read_contract, recall
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.load import load_feed, load_feeds
from sluice.pipelines.schema.schema import parse_schema

SCHEMA = parse_schema(
    {
        "amount": "decimal(12,2)",
        "n": "int64",
        "small": "int8",
        "g": "float32",
        "big": "uint64",
        "f": "float64",
        "s": "string",
        "at": "timestamp(ms)",
        "day": "date",
        "b": "bool",
        "raw": "binary",
        "lines": "list<struct<sku:string>>",
    }
)
BETWEEN = "expect_column_values_to_be_between"
REGEX = "expect_column_values_to_match_regex"
IN_SET = "expect_column_values_to_be_in_set"
VOLUME = "expect_table_row_count_to_be_between"
SUM = "expect_multicolumn_sum_to_equal"
EQUAL = "expect_column_pair_values_to_be_equal"


def make_suite(*items: Any, **top: Any) -> bytes:
    return json.dumps({"name": "orders", "expectations": [*items], "meta": {}} | top).encode()


def make_item(type_: str, severity: str | None = None, **kwargs: Any) -> dict[str, Any]:
    return {"type": type_, "kwargs": kwargs} | ({"severity": severity} if severity else {})


def read_error(data: bytes) -> str:
    with pytest.raises(ContractError) as caught:
        parse_contract(data, SCHEMA)
    error = caught.value
    assert error.__context__ is None
    assert all(line.isprintable() for p in error.problems for line in (p.place, p.what, p.remedy))
    return "\n".join(f"{p.place}: {p.what} → {p.remedy}" for p in error.problems)


def parse(*items: Any, **top: Any) -> Contract:
    return parse_contract(make_suite(*items, **top), SCHEMA)


def test_saved_suite_of_great_expectations_is_read() -> None:
    saved = make_item(
        BETWEEN, "warning", column="n", min_value=1.0, max_value=5, mostly=1, strict_min=False, windows=None
    )
    del saved["kwargs"]["windows"]
    saved |= {"id": "x", "meta": {"a": 1}, "notes": "n", "rendered_content": [], "description": None}
    saved["kwargs"] |= {"row_condition": None, "condition_parser": None, "batch_id": None, "result_format": "BASIC"}
    contract = parse(saved, meta={"great_expectations_version": "1.24.1"}, id="y", notes=None)
    (expectation,) = contract.expectations
    assert (expectation.place, expectation.severity) == (0, Severity.WARNING)
    assert expectation.kwargs == {"column": "n", "min_value": 1.0, "max_value": 5}


def test_severity_defaults_to_critical() -> None:
    assert parse(make_item(BETWEEN, column="n", min_value=1)).expectations[0].severity is Severity.CRITICAL


def test_contract_can_be_pickled() -> None:
    contract = parse(
        make_item(IN_SET, column="s", value_set=["a", "日"]),
        make_item(BETWEEN, "info", column="at", min_value="2026-01-01"),
    )
    assert pickle.loads(pickle.dumps(contract)) == contract == recall(contract.text)
    assert recall(contract.text).hash == contract.hash
    assert parse(make_item(IN_SET, column="s", value_set=["a"])).hash != contract.hash


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("amount", "0.10"),
        ("amount", 0.1),
        ("amount", 3),
        ("amount", "99999999999999999999999999999999999999"),
        ("amount", 0.001),
        ("n", 1e3),
        ("n", 0.5),
        ("small", 300),
        ("big", (1 << 64) - 1),
        ("f", 0.1),
        ("at", "2026-01-01"),
        ("at", "2026-01-01 10:00"),
        ("at", "2026-01-01T10:00:00.123456789+05:30"),
        ("day", "2024-02-29"),
        ("kafka_timestamp", "2026-01-01T00:00:00Z"),
        ("kafka_offset", 1 << 62),
    ],
)
def test_accepted_bounds(column: str, value: Any) -> None:
    assert parse(make_item(BETWEEN, column=column, min_value=value))


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"column": "n", "min_value": "1"}, "min_value: should be a number"),
        ({"column": "n", "min_value": True}, "min_value: should be a number"),
        ({"column": "f", "min_value": "1"}, "min_value: should be a number"),
        ({"column": "amount", "min_value": "1,5"}, "min_value: should be a number or its digits in quotes"),
        ({"column": "at", "min_value": 17}, "min_value: should be a time such as"),
        ({"column": "at", "min_value": "2026-02-30"}, "min_value: should be a time such as"),
        ({"column": "at", "min_value": "now"}, "min_value: should be a time such as"),
        ({"column": "day", "min_value": "2026-01-01T00:00:00"}, "min_value: should be a date such as"),
        ({"column": "n"}, "has neither min_value nor max_value"),
        ({"column": "n", "min_value": 2, "max_value": 1}, "has a min_value above its max_value"),
        ({"column": "at", "min_value": "2026-01-02", "max_value": "2026-01-01T23:00"}, "above its max_value"),
        ({"column": "n", "min_value": 1, "strict_min": "yes"}, "strict_min: should be true or false"),
        ({"column": "n", "min_value": 1, "mostly": 1.5}, "mostly: should be a number from 0 to 1"),
        ({"column": "n", "min_value": {"$PARAMETER": "x"}}, "min_value: should be a number"),
        ({"column": "n", "min_valu": 1}, "min_valu: is unknown → did you mean `min_value`?"),
        ({"column": "n", "min_value": 1, "row_condition": "n > 1"}, "row_condition: is not supported"),
        ({"column": "n", "min_value": 1, "batch_id": "x"}, "batch_id: is not supported"),
        ({"min_value": 1}, "column: is missing"),
        ({"column": "amont", "min_value": 1}, "column: `amont` is not a column of this feed → did you mean `amount`?"),
        ({"column": "zzzzz", "min_value": 1}, "not a column of this feed → columns: amount, n, small"),
        ({"column": "lines.sku", "min_value": 1}, "`lines.sku` is inside `lines`: fields inside others"),
        ({"column": "lines[].sku", "min_value": 1}, "is inside `lines`"),
        ({"column": ["n"], "min_value": 1}, "column: should be a column's name"),
        (
            {"column": "s", "min_value": 1},
            "`s` is string, which this expectation does not support → it is about numbers",
        ),
        ({"column": "_extra", "min_value": 1}, "`_extra` is json, which this expectation does not support"),
        ({"column": "lines", "min_value": 1}, "`lines` is list, which this expectation does not support"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], error: str) -> None:
    message = read_error(make_suite(make_item(BETWEEN, column="f", min_value=0), make_item(BETWEEN, **kwargs)))
    assert message.startswith(f"expectations[1] {BETWEEN}")
    assert error in message


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (make_item(IN_SET, column="s", value_set=[]), "value_set: should be a list of 1 to 10,000"),
        (make_item(IN_SET, column="s", value_set=["a", 1]), "value_set: [1] should be text in quotes"),
        (make_item(IN_SET, column="s", value_set=["a", None]), "[1] should be text in quotes → nulls are not checked"),
        (make_item(IN_SET, column="n", value_set=[1.5]), "value_set: [0] is not a value of int64"),
        (make_item(IN_SET, column="small", value_set=[1, 128]), "value_set: [1] is not a value of int8"),
        (make_item(IN_SET, column="g", value_set=[3.4e38, -3.41e38]), "value_set: [1] is not a value of float32"),
        (make_item(IN_SET, column="amount", value_set=["0.001"]), "value_set: [0] is not a value of decimal(12,2)"),
        (make_item(IN_SET, column="at", value_set=["2026-01-01T00:00:00.0001"]), "value_set: [0] is not a time in ms"),
        (make_item(IN_SET, column="b", value_set=[1]), "value_set: [0] should be true or false"),
        (make_item(IN_SET, column="raw", value_set=["x"]), "`raw` is binary, which this expectation does not support"),
        (
            make_item(REGEX, column="n", regex="a"),
            "`n` is int64, which this expectation does not support → it is about strings",
        ),
        (make_item(REGEX, column="s", regex="(a"), "regex: is not a regular expression at position 1: missing )"),
        (
            make_item(REGEX, column="s", regex="(?=a)"),
            "regex: is not taken by RE2 at position 1: invalid perl operator: (?=",
        ),
        (
            make_item(REGEX, column="s", regex=r"(a)\1"),
            r"is not taken by RE2 at position 4: invalid escape sequence: \1",
        ),
        (make_item(REGEX, column="s", regex="((a{100}){100}){100}"), "is not taken by RE2"),
        (make_item(REGEX, column="s", regex="[[:alpha:]]"), "is not a regular expression with one meaning"),
        (make_item(REGEX, column="s", regex="a{,3}"), "has {,3} at position 2 → write {0,3}"),
        (make_item(REGEX, column="s", regex="^a{01}$"), "has {01} at position 3 → write {1}"),
        (make_item(REGEX, column="s", regex="a{1}b{1,02}"), "has {1,02} at position 6 → write {1,2}"),
        (make_item(REGEX, column="s", regex="a{00,}"), "has {00,} at position 2 → write {0,}"),
        (make_item(REGEX, column="s", regex=r"\\{,}"), "has {,} at position 3 → write {0,}"),
        (make_item(REGEX, column="s", regex=r"a\Z"), "is not taken by RE2"),
        (make_item(REGEX, column="s", regex="a" * 1001), "should be a regular expression of at most 1000 characters"),
        (make_item(REGEX + "_list", column="s", regex_list=["a", "("]), "regex_list: [1] is not a regular expression"),
        (make_item(REGEX + "_list", column="s", regex_list=["a"], match_on="some"), "match_on: is none of its words"),
        (make_item(EQUAL, column_A="n", column_B="s"), "compares strings with whole numbers"),
        (make_item(EQUAL, column_A="amount", column_B="f"), "compares decimals with floats"),
        (make_item(EQUAL, column_A="n", column_B="f", ignore_row_if="never"), "ignore_row_if: is none of its words"),
        (make_item(SUM, column_list=["n"], sum_total=1), "column_list: should be a list of 2 to 32"),
        (make_item(SUM, column_list=["n", "n"], sum_total=1), "column_list: should be a list of columns, each once"),
        (make_item(SUM, column_list=["amount", "f"], sum_total=1), "adds floats to decimals"),
        (make_item(SUM, column_list=["n", "s"], sum_total=1), "`s` is string, which this expectation does not support"),
        (make_item(VOLUME, min_value=-1), "min_value: should be a whole number from 0 on"),
        (make_item(VOLUME, min_value={"$PARAMETER": "low"}), "has a $PARAMETER that none of its windows gives"),
        (make_item(VOLUME, min_value=1, windows=[{"range": 3}]), "windows: [0] is not a window"),
        (
            make_item("expect_column_mean_to_be_betwen", column="n"),
            "is not supported → did you mean expect_column_mean_to_be",
        ),
        (
            make_item("expect_column_values_to_match_json_schema", column="s"),
            "expect_column_values_to_match_json_schema: is not",
        ),
        ({"kwargs": {}}, "expectations[0]: type: is missing"),
        ({"type": 5}, "expectations[0]: type: should be text"),
        ({"expectation_type": IN_SET, "kwargs": {}}, "is an expectation of Great Expectations before 1.0"),
        ("x", "expectations[0]: is not an expectation"),
        (
            make_item(BETWEEN, "fatal", column="n", min_value=1),
            "severity: is none of them → choose critical, warning, info",
        ),
        (make_item(BETWEEN, column="n", min_value=1) | {"mostly": 1}, f"{BETWEEN}: mostly: is unknown"),
        (make_item(BETWEEN, column="n", min_value=1) | {"kwargs": []}, "kwargs: should be an object"),
    ],
)
def test_wrong_expectations_are_named(item: Any, error: str) -> None:
    assert error in read_error(make_suite(item))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "is not JSON at line 1, column 1"),
        (b'{"a": 1,}', "is not JSON at line 1, column"),
        (b"[]", "is not a suite"),
        (b"\xff", "is not UTF-8"),
        (b" " * (MAX_BYTES + 1), "is larger than 256 KiB"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"meta": ' * 40 + b"1" + b"}" * 40, "is nested too deeply"),
        (b'{"name": "a", "name": "b"}', "has the key `name` twice"),
        (b'{"n": NaN}', "has NaN, which is not a number in JSON"),
        (b'{"n": 1e999}', "of more digits than a float keeps"),
        (b'{"n": 0.12345678901234567890}', "of more digits than a float keeps"),
        (b'{"n": ' + b"9" * 5000 + b"}", "a whole number of more than 39 digits"),
        (rb'{"n": "\ud800"}', "half of a surrogate pair"),
        (make_suite(), "expectations: should be a list of 1 to 500"),
        (
            make_suite(*[make_item(BETWEEN, column="n", min_value=i) for i in range(MOST + 1)]),
            "expectations: should be a list",
        ),
        (
            make_suite(make_item(BETWEEN), meta={"great_expectations_version": "0.18.2"}),
            "another Great Expectations than 1.x (0.18.2)",
        ),
        (
            make_suite(make_item(BETWEEN), meta={"great_expectations_version": "2.0.0"}),
            "another Great Expectations than 1.x",
        ),
        (
            make_suite(make_item(BETWEEN), meta={"great_expectations_version": "10.0"}),
            "another Great Expectations than 1.x",
        ),
        (make_suite(make_item(BETWEEN), expectation_suite_name="x"), "another Great Expectations than 1.x"),
        (make_suite(make_item(BETWEEN), suite_parameters={"a": 1}), "suite_parameters: are not supported"),
        (make_suite(make_item(BETWEEN), nmae="x"), "nmae: is unknown → did you mean `name`?"),
    ],
)
def test_wrong_files_are_named(data: bytes, error: str) -> None:
    assert error in read_error(data)


def test_all_problems_are_reported_together() -> None:
    message = read_error(
        make_suite(
            make_item(BETWEEN, column="x", min_value=1), make_item("nonsense"), make_item(REGEX, column="s", regex="(")
        )
    )
    assert [line.split()[0] for line in message.splitlines()] == [
        "expectations[0]",
        "expectations[1]",
        "expectations[2]",
    ]


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.sampled_from([BETWEEN, "n", "$PARAMETER"]),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["type", "kwargs", "column", "windows"]), inner)
        ),
    )
)
def test_arbitrary_file_is_a_contract_or_refused(value: Any) -> None:
    items = (
        value
        if isinstance(value, list)
        else [value, {"type": BETWEEN, "kwargs": value}, {"type": VOLUME, "kwargs": value}]
    )
    with suppress(ContractError):
        assert isinstance(parse_contract(json.dumps({"expectations": items}).encode(), SCHEMA), Contract)


def test_coordinates_and_the_columns_of_raw_feeds_are_columns() -> None:
    null = "expect_column_values_to_not_be_null"
    assert parse(make_item(null, column="kafka_key"), make_item(null, column="_extra"), make_item(null, column="lines"))
    raw = make_suite(make_item(null, column="value"), make_item(BETWEEN, column="partition", min_value=0))
    assert len(parse_contract(raw, None).expectations) == 2
    with pytest.raises(ContractError, match="`kafka_key` is not a column"):
        parse_contract(make_suite(make_item(null, column="kafka_key")), None)


# -- next to its feed


@pytest.fixture
def feeds(tmp_path: Path) -> Path:
    folder = tmp_path / "feeds"
    folder.mkdir()
    feed = {"kafka": {"bootstrap": "127.0.0.1:9092"}, "topics": "orders", "start": "earliest"}
    (folder / "orders.yaml").write_text(yaml.safe_dump(feed | {"format": "json", "schema": {"n": "int64"}}))
    return folder


def test_feed_uses_the_contract_of_its_name(feeds: Path) -> None:
    assert load_feed(feeds / "orders.yaml", {}).contract is None
    (feeds / "orders.contract.json").write_bytes(make_suite(make_item(BETWEEN, column="n", min_value=1)))
    feed = load_feeds(feeds, {})["orders"]
    assert feed.contract is not None
    assert feed.shape.contract is feed.contract
    assert feed.contract.hash in feed.shape.name
    assert pickle.loads(pickle.dumps(feed)).contract == feed.contract


def test_error_names_file_expectation_and_position(feeds: Path) -> None:
    file = feeds / "orders.contract.json"
    file.write_bytes(make_suite(make_item(BETWEEN, column="m", min_value=1)))
    with pytest.raises(FeedError) as caught:
        load_feed(feeds / "orders.yaml", {})
    assert f"{file}: expectations[0] {BETWEEN}: column: `m` is not a column of this feed" in str(caught.value)
    assert caught.value.__context__ is None


def test_contract_without_a_feed_is_a_problem_and_a_folder_is_ignored(feeds: Path) -> None:
    stray = feeds / "order.contract.json"
    stray.write_bytes(make_suite(make_item(BETWEEN, column="n", min_value=1)))
    with pytest.raises(FeedError, match=r"order\.contract\.json: has no order\.yaml in its folder"):
        load_feeds(feeds, {})
    stray.unlink()
    (feeds / "orders.contract.json").mkdir()
    with pytest.raises(FeedError, match="cannot be read"):
        load_feeds(feeds, {})


def test_contract_in_a_feed_file_is_refused(feeds: Path) -> None:
    path = feeds / "orders.yaml"
    path.write_text(path.read_text() + "contract: {}\n")
    with pytest.raises(
        FeedError, match=r"contract: is unknown\s+→ a contract is a file of its own, orders\.contract\.json"
    ):
        load_feed(path, {})


def test_missing_file_means_no_contract(tmp_path: Path) -> None:
    assert read_contract(tmp_path / "x.contract.json", None) is None
