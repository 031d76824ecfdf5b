"""Formats of counts, bytes, shares, times and rates, and labels of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.pipelines.model.kafka import Key


def count(n: int | None) -> str:
    return "–" if n is None else f"{n:,}"


def size(n: float) -> str:
    """Bytes, to three digits: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < _NEXT_UNIT:
            return f"{n:.3g} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    return f"{n:,.3g} TB"


_NEXT_UNIT = 999.5
"""From this share on, three digits are not enough."""


def format_percent(share: float) -> str:
    """A share of a whole, to two digits or more: `0.012 %`, `3.4 %`, `100 %`."""
    value = 100 * share
    if 0 < value < _SMALLEST:
        return f"under {_SMALLEST} %"
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


_SMALLEST = 0.001


def seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 120 else f"{int(s // 60)} min {int(s % 60)} s"


def rate(n: float, s: float, unit: str = "records") -> str:
    return f"{n / s:,.0f} {unit}/s" if s > 0 else "–"


def label_partitions(keys: Iterable[Key]) -> dict[Key, str]:
    """The partitions' names in a table. If two incarnations of a partition are listed, names include them."""
    listed = list(keys)
    several = Counter(k.tp for k in dict.fromkeys(listed))
    return {k: f"{k} (topic id {k.life})" if several[k.tp] > 1 else str(k) for k in listed}


def list_ranges(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    return [[start, end] for start, end in pairs]
