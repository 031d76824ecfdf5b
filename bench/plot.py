"""The plot of the results: an SVG by itself, without script or anything from elsewhere, on a ground of its own that is
dark where the reader's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bench.peers import SLUICE, SPARK
from bench.results import PeerResult, RaceResult
from sluice.pipelines.batch_report.markup import Html, tag

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 120, 220, 56
_BAR, _STEP, _BETWEEN = 12, 17, 12
_STYLE = """
.ground { fill: #ffffff; stroke: #d8dee4 } text { font-family: system-ui, sans-serif; font-size: 12px; fill: #24292f }
.title { font-weight: 600; font-size: 14px } .note { fill: #57606a } .line { stroke: #8c959f; stroke-dasharray: 3 3 }
.others { fill: #afb8c1 } .ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .note { fill: #9198a1 }
.line { stroke: #6e7681 } .others { fill: #57606a } .ours { fill: #4493f8 } }
"""


def plot(races: Sequence[RaceResult]) -> Html:
    """Each peer's rate relative to Spark's connector, race by race; those without it are left out."""
    pairs = [(race, spark) for race in races if (spark := race.of(SPARK.name))]
    largest = max((r.rate / spark.rate for race, spark in pairs for r in race.results), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(largest, 1.0)
    drawn, y = [], _TOP
    for race, spark in pairs:
        drawn.append(text(race.name, _LEFT - 10, y + _BAR - 2, text_anchor="end"))
        for result in race.results:
            drawn += _bar(result, spark, y, scale)
            y += _STEP
        y += _BETWEEN
    at = f"{_LEFT + scale:.1f}"
    line = tag("line", x1=at, x2=at, y1=str(_TOP - 6), y2=str(y - _BETWEEN), class_="line")
    title = "Records a second, as multiples of Spark's Kafka connector"
    return picture(title, [text(title, 16, 26, class_="title"), *drawn, line], _WIDTH, y)


def picture(title: str, drawn: Iterable[Html], width: int, height: int) -> Html:
    """Return an SVG of that size, in pixels."""
    return tag(
        "svg",
        tag("title", title),
        tag("style", Html(_STYLE)),
        tag("rect", x="0.5", y="0.5", width=str(width - 1), height=str(height - 1), rx="8", class_="ground"),
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        role="img",
    )


def _bar(result: PeerResult, spark: PeerResult, y: int, scale: float) -> Iterator[Html]:
    times = result.rate / spark.rate
    kind, width = "ours" if result.peer == SLUICE.name else "others", max(times * scale, 1.0)
    yield tag("rect", x=str(_LEFT), y=str(y), width=f"{width:.1f}", height=str(_BAR), class_=kind)
    label = "" if result is spark else f"{times:.1f}× " if times < 9.95 else f"{times:.0f}× "
    yield text(
        f"{label}{result.title}, {result.rate:,.0f}/s", _LEFT + max(width, scale) + 6, y + _BAR - 2, class_="note"
    )


def text(words: str, x: float, y: float, **attributes: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
