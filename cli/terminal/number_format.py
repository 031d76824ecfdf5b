"""Numbers as people read them: counts, bytes, shares, times, rates."""

from __future__ import annotations


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
