"""What people type, as values: places and ranges (see `pipelines.model.plans`), windows, durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.plans import parse_offset_range, parse_partition, parse_record
from sluice.pipelines.util import units

if TYPE_CHECKING:
    from sluice.pipelines.feed.sections import WindowSettings

__all__ = ["duration", "parse_offset_range", "parse_partition", "parse_record", "window", "windows"]
T = TypeVar("T")


def window(text: str, settings: WindowSettings) -> int:
    """`2026-11-20T14`: the start of a window, in ms. Raises UsageError."""
    return _parse(settings.parse_name, text)


def windows(text: str, settings: WindowSettings) -> Sequence[int]:
    """The windows that text names, such as those of a day: `2026-11-20`. Raises UsageError."""
    return _parse(settings.list_named, text)


def instant(text: str, parse_window: Callable[[str], int] = units.parse_window) -> int:
    """An instant, or a window's start, in ms. Raises UsageError."""
    for read in (units.parse_instant, parse_window):
        with suppress(ValueError):
            return read(text)
    raise UsageError(
        f"{text!r} is not a time", remedy="write it with its zone, such as 2026-11-20T14:00:00Z, or as a window's start"
    )


def duration(text: str) -> int:
    """`30m`, in ms. Raises UsageError."""
    return _parse(units.parse_duration, text)


def _parse(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", remedy="see --help for an example") from None
