"""The topic filter over Kafka's topics, and the conversion of topic names to parts of file names and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.pipelines.errors import UnknownTopic
from sluice.pipelines.feed.topic_selection import TopicFilter, match
from sluice.pipelines.model.kafka import MAX_ENCODED, decode_topic, encode_topic, is_topic_name

SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
NAMES = st.text(SIGNS, min_size=1, max_size=249).filter(is_topic_name)
NEAR_NAMES = st.text("aA._-~1", min_size=1, max_size=6).filter(is_topic_name)
LONG_NAMES = st.text("aA-", min_size=150, max_size=249)


def make_filter(spelling: Any) -> TopicFilter:
    return TopicFilter.model_validate(spelling)


def list_topics(*names: str) -> Mapping[str, str]:
    return {n: f"id-of-{n}" for n in names}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("orders", ("orders",)),
        (["payments", "orders", "orders"], ("orders", "payments")),
        ({"include": [r"orders(\..*)?"]}, ("orders", "orders.eu", "orders.eu.test")),
        ({"include": [r"orders\..*", "pay.*"], "exclude": [r".*\.test"]}, ("orders.eu", "payments")),
        ({"exclude": ["orders.*"]}, ("payments",)),
    ],
)
def test_static_list_include_and_exclude(spelling: Any, expected: tuple[str, ...]) -> None:
    assert match(make_filter(spelling), list_topics("payments", "orders.eu.test", "orders", "orders.eu")) == expected


def test_patterns_match_whole_names_only() -> None:
    with pytest.raises(UnknownTopic):
        match(make_filter({"include": ["order"]}), list_topics("orders", "preorder"))


def test_alternatives_match_the_whole_name() -> None:
    assert match(make_filter({"include": ["a|b"]}), list_topics("a", "b", "ab", "xb", "ax")) == ("a", "b")


def test_an_unknown_name_is_an_error_with_near_names() -> None:
    with pytest.raises(UnknownTopic, match="did you mean `orders`") as caught:
        match(make_filter(["ordres", "payments"]), list_topics("orders", "payments"))
    assert caught.value.topic == "ordres"


def test_unmatched_include_pattern_is_an_error_even_if_another_matches() -> None:
    with pytest.raises(UnknownTopic, match="refunds"):
        match(make_filter({"include": ["orders", "refunds"]}), list_topics("orders"))


@pytest.mark.parametrize("spelling", [{"include": [".*"], "exclude": [".*"]}, {"exclude": ["orders"]}])
def test_filter_without_matches_is_an_error(spelling: Any) -> None:
    with pytest.raises(UnknownTopic, match="no topic is left"):
        match(make_filter(spelling), list_topics("orders"))


def test_no_visible_topic_is_an_error() -> None:
    with pytest.raises(UnknownTopic):
        match(make_filter({"include": [".*"]}), {})


@pytest.mark.parametrize(
    "spelling",
    [
        "", ".", "..", "a/b", "a b", "ä", "x" * 250, "a\n", [], {}, {"include": []}, None, 7,
        {"include": ["("]}, {"include": [""]}, {"include": ["a)|(b"]}, {"include": ["(?=a)"]},
        {"include": [r"(a)\1"]}, {"include": ["a\\"]}, {"include": [r"\Qa"]}, {"include": ["x" * 501]},
        {"include": ["\ud800"]}, {"exclude": ["*"]}, {"include": ["((a{1000}){1000}){1000}"]},
        {"names": ["a"], "include": ["b"]}, {"include": "a", "why": 1},
    ],
)  # fmt: skip
def test_invalid_filter_is_refused_without_quoting_it(spelling: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        make_filter(spelling)
    assert "input_value" not in str(caught.value)


def test_a_hostile_pattern_on_a_hostile_name_takes_linear_time() -> None:
    # With backtracking this would never end, and neither would the suite.
    evil = "a" * 248 + "-"
    with pytest.raises(UnknownTopic):
        match(make_filter({"include": ["(a+)+b", "(a|a)*c"]}), list_topics(evil))


def test_names_invalid_in_kafka_match_nothing() -> None:
    assert match(make_filter({"include": [".*"]}), list_topics("orders", "../etc", "a\nb")) == ("orders",)


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("orders", "orders"),
        ("a.b", "a.b"),
        ("a_b", "a_b"),
        ("a-b", "a~~b"),
        ("Orders-EU.v2", "~orders~~~e~u.v2"),
        ("_private", "~_private"),
        (".hidden", "~.hidden"),
    ],
)
def test_encoding_by_example(name: str, encoded: str) -> None:
    assert encode_topic(name) == encoded
    assert decode_topic(encoded) == name


@given(NAMES)
def test_encoding_is_reversed_and_safe_in_a_file_name(name: str) -> None:
    encoded = encode_topic(name)
    assert re.fullmatch(r"[a-z0-9~][a-z0-9._~]*", encoded)
    assert len(encoded) <= MAX_ENCODED
    if "~1" not in re.sub("~[^1]", "", encoded):
        assert decode_topic(encoded) == name


@given(st.one_of(NAMES, NEAR_NAMES, LONG_NAMES), st.one_of(NAMES, NEAR_NAMES, LONG_NAMES))
def test_encoded_topics_never_collide_even_ignoring_case(one: str, other: str) -> None:
    assert (encode_topic(one).casefold() == encode_topic(other).casefold()) == (one == other)


@given(NAMES, st.tuples(*[st.integers(0, 2**31 - 1)] + [st.integers(0, 2**63 - 1)] * 3))
def test_part_name_is_unambiguous_and_fits_a_file_system(name: str, numbers: tuple[int, int, int, int]) -> None:
    partition, start, end, batch = numbers
    file = f"{encode_topic(name)}-{partition}-{start}-{end}-b{batch}.parquet"
    assert len(file.encode()) <= 255
    assert file.split("-") == [encode_topic(name), *map(str, numbers[:3]), f"b{batch}.parquet"]


@given(LONG_NAMES)
def test_too_long_name_is_truncated_and_not_decoded(name: str) -> None:
    encoded = encode_topic(name)
    if "~1" in encoded:
        with pytest.raises(ValueError, match="cut"):
            decode_topic(encoded)


@given(st.text(max_size=20))
def test_decoding_returns_the_topic_or_raises_value_error(text: str) -> None:
    try:
        name = decode_topic(text)
    except ValueError:
        return
    assert encode_topic(name) == text


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 250])
def test_encoding_refuses_invalid_topic_names(name: str) -> None:
    with pytest.raises(ValueError, match="topic name"):
        encode_topic(name)
