"""What people type for partitions, ranges and records, read into values; a topic's name never holds a colon."""

from __future__ import annotations

import re
from collections.abc import Callable

from sluice.pipelines import units
from sluice.pipelines.errors import UsageError
from sluice.pipelines.values import AskedRange, TopicPartition

_PARTITION = re.compile(r"([A-Za-z0-9._-]{1,249}):([0-9]{1,9})")
_RANGE = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})-([0-9]{{1,18}})")
_RECORD = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})")


def partition(text: str) -> TopicPartition:
    """`orders:3`. Raises UsageError."""
    found = _read(_PARTITION, text, "a partition", "TOPIC:PARTITION, such as orders:3")
    return TopicPartition(found[1], int(found[2]))


def asked_range(text: str) -> AskedRange:
    """`orders:0:100-200`: offsets 100 up to, not including, 200. Raises UsageError."""
    found = _read(_RANGE, text, "a range of offsets", "TOPIC:PARTITION:START-END, such as orders:0:100-200")
    return AskedRange(found[1], int(found[2]), int(found[3]), int(found[4]))


def record(text: str) -> tuple[TopicPartition, int]:
    """`orders:0:150`. Raises UsageError."""
    found = _read(_RECORD, text, "a record's place", "TOPIC:PARTITION:OFFSET, such as orders:0:150")
    return TopicPartition(found[1], int(found[2])), int(found[3])


def window(text: str) -> int:
    """`2026-11-20T14`: the start of a window, in ms. Raises UsageError."""
    return _value(units.parse_window, text)


def duration(text: str) -> int:
    """`30m`, in ms. Raises UsageError."""
    return _value(units.parse_duration, text)


def _value(read: Callable[[str], int], text: str) -> int:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", remedy="see --help for an example") from None


def _read(pattern: re.Pattern[str], text: str, what: str, form: str) -> re.Match[str]:
    if (found := pattern.fullmatch(text)) is None:
        raise UsageError(f"{text!r} is not {what}", remedy=f"write {form}")
    return found
