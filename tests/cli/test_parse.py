"""Arguments that name partitions, offset ranges and records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.options import parsing
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange

topics = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)
numbers = st.integers(0, 10**17)


@given(topics, st.integers(0, 10**8), numbers, numbers)
def test_printed_partitions_ranges_and_records_are_parsed_back(
    topic: str, partition: int, start: int, end: int
) -> None:
    tp = TopicPartition(topic, partition)
    assert parsing.parse_partition(str(tp)) == tp
    assert parsing.parse_offset_range(f"{tp}:{start}-{end}") == AskedRange(topic, partition, start, end)
    assert parsing.parse_record(f"{tp}:{start}") == (tp, start)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "orders",
        "orders:",
        ":0",
        "orders:x",
        "orders:-1",
        "a b:0",
        "orders:0:1:2",
        "órders:0",
        "orders:0\n",
        "orders:٣",
    ],
)
def test_invalid_text_is_refused_with_the_expected_form(text: str) -> None:
    for read in (parsing.parse_partition, parsing.parse_offset_range, parsing.parse_record):
        with pytest.raises(UsageError) as caught:
            read(text)
        assert "orders:" in caught.value.remedy


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for read in (parsing.parse_partition, parsing.parse_offset_range, parsing.parse_record):
        try:
            read(text)
        except UsageError:
            continue
