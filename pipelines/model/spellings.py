"""Partitions, ranges and records as people write them, parsed into values. A topic's name never holds a colon."""

from __future__ import annotations

import re

from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange

_PARTITION = re.compile(r"([A-Za-z0-9._-]{1,249}):([0-9]{1,9})")
_RANGE = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})-([0-9]{{1,18}})")
_RECORD = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})")


def partition(text: str) -> TopicPartition:
    """The partition that `orders:3` names. Raises UsageError."""
    match = _read(_PARTITION, text, "a partition", "TOPIC:PARTITION, such as orders:3")
    return TopicPartition(match[1], int(match[2]))


def asked_range(text: str) -> AskedRange:
    """The range that `orders:0:100-200` names: offsets 100 up to, not including, 200. Raises UsageError."""
    match = _read(_RANGE, text, "a range of offsets", "TOPIC:PARTITION:START-END, such as orders:0:100-200")
    return AskedRange(match[1], int(match[2]), int(match[3]), int(match[4]))


def record(text: str) -> tuple[TopicPartition, int]:
    """The partition and offset of the record that `orders:0:150` names. Raises UsageError."""
    match = _read(_RECORD, text, "a record's place", "TOPIC:PARTITION:OFFSET, such as orders:0:150")
    return TopicPartition(match[1], int(match[2])), int(match[3])


def _read(pattern: re.Pattern[str], text: str, what: str, form: str) -> re.Match[str]:
    if (match := pattern.fullmatch(text)) is None:
        raise UsageError(f"{text!r} is not {what}", remedy=f"write {form}")
    return match
