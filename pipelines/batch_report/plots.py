"""Plots as inline SVG: stretched to whatever width there is, so that they hold no text but titles; labels are HTML.

Each plot has a title for people who cannot see it. Each bar has a title that is shown when you point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.pipelines.batch_report.markup import Html, number, tag

_HEIGHT = 100


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its meaning, its height, and a class of the style sheet that colours it."""

    label: str
    height: float
    kind: str = ""
    text: str = ""

    @property
    def title(self) -> str:
        return f"{self.label}: {self.text or number(self.height)}"


def upright(title: str, bars: Sequence[Bar], ends: Sequence[str], top: str = "") -> Html:
    """Bars side by side, with labels below from the left to the right end; `top` is the height of the highest."""
    highest = max((b.height for b in bars), default=0) or 1
    drawn = [_column(i, bar, highest) for i, bar in enumerate(bars)]
    drawing = tag(
        "svg",
        tag("title", title),
        *drawn,
        viewBox=f"0 0 {10 * max(len(bars), 1)} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
        class_="plot",
    )
    axis = tag("div", *(tag("span", e) for e in ends), class_="axis", aria_hidden="true")
    return tag("div", tag("div", top, class_="top", aria_hidden="true"), drawing, axis, class_="chart")


def _column(index: int, bar: Bar, highest: float) -> Html:
    height = max(_HEIGHT * bar.height / highest, 1.5) if bar.height > 0 else 0
    kind = f"b {bar.kind}".strip()
    x, y = 10 * index + 0.7, _HEIGHT - height
    drawn = tag("rect", x=f"{x:g}", y=f"{y:.4g}", width="8.6", height=f"{height:.4g}", class_=kind)
    return tag("g", tag("title", bar.title), drawn)


def lying(parts: Sequence[tuple[float, str]], longest: float) -> Html:
    """A bar in a table's cell, next to its number: pieces (length, class) one after the other."""
    at, drawn = 0.0, []
    for length, kind in parts:
        width = max(100 * length / longest, 0.6) if length > 0 and longest else 0
        if width:
            drawn.append(
                tag("rect", x=f"{at:.4g}", y="0", width=f"{width:.4g}", height="10", class_=f"b {kind}".strip())
            )
        at += width
    return tag("svg", *drawn, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")
