"""The plot of the results: an SVG by itself, without script or anything from elsewhere, on a ground of its own that is
dark where the reader's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.peers import SLUICE, SLUICE_PROCESSES, SPARK
from bench.results import PeerResult, RaceResult
from sluice.pipelines.batch_report.markup import Html, tag

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 120, 220, 68
_BAR, _STEP, _BETWEEN = 12, 17, 12
_STYLE = """
.ground { fill: #ffffff; stroke: #d8dee4 } text { font-family: system-ui, sans-serif; font-size: 12px; fill: #24292f }
.title { font-weight: 600; font-size: 14px } .note { fill: #57606a } .line { stroke: #8c959f; stroke-dasharray: 3 3 }
.others { fill: #afb8c1 } .ours { fill: #0969da } .ours-too { fill: #80b4f0 }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .note { fill: #9198a1 }
.line { stroke: #6e7681 } .others { fill: #57606a } .ours { fill: #4493f8 }
.ours-too { fill: #1f5fa8 } }
"""
ENGINES = (SLUICE.name, SLUICE_PROCESSES.name)


def plot(races: Sequence[RaceResult]) -> Html:
    """Each peer's rate relative to Spark's connector, which is the line at 1, race by race.

    Races without it are left out. Both engines have a legend, since they take part in every race; others are named at
    their bars.
    """
    pairs = [(race, spark) for race in races if (spark := race.of(SPARK.name))]
    bars = [(race, [r for r in race.results if r is not spark], spark) for race, spark in pairs]
    own = {r.peer: r.title for _, results, _ in bars for r in results if r.peer in ENGINES}
    largest = max((r.rate / spark.rate for _, results, spark in bars for r in results), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(largest, 1.0)
    drawn, y = [], _TOP
    for race, results, spark in bars:
        drawn.append(text(race.name, _LEFT - 10, y + _BAR - 2, text_anchor="end"))
        for result in results:
            times, label = result.rate / spark.rate, "" if result.peer in own else f" {result.title},"
            width = max(times * scale, 1.0)
            drawn.append(_draw_rectangle(_LEFT, y, width, _choose_class([*own], result.peer)))
            ratio = f"{times:.1f}×" if times < 9.95 else f"{times:.0f}×"
            x = _LEFT + max(width, scale) + 6
            drawn.append(text(f"{ratio}{label} {result.rate:,.0f}/s", x, y + _BAR - 2, class_="note"))
            y += _STEP
        y += _BETWEEN
    at = _LEFT + scale
    line = tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=str(_TOP - 6), y2=str(y - _BETWEEN), class_="line")
    label = text(f"1× = {SPARK.title}", at, _TOP - 10, class_="note")
    title = "Records a second, as multiples of Spark's Kafka connector"
    return picture(title, [text(title, 16, 26, class_="title"), *_draw_legend(own), label, *drawn, line], _WIDTH, y)


def is_own(result: PeerResult) -> bool:
    """Returns whether the peer is Sluice, on any engine."""
    return result.peer.partition("-")[0] == SLUICE.name


def _draw_legend(own: Mapping[str, str]) -> Iterator[Html]:
    for i, (peer, title) in enumerate(own.items()):
        x = _WIDTH - 200 * (len(own) - i)
        yield _draw_rectangle(x, 37, _BAR, _choose_class([*own], peer))
        yield text(title, x + _BAR + 6, 47, class_="note")


def _choose_class(own: Sequence[str], peer: str) -> str:
    return "others" if peer not in own else "ours" if peer == own[0] else "ours-too"


def _draw_rectangle(x: float, y: float, width: float, class_: str) -> Html:
    return tag("rect", x=f"{x}", y=f"{y}", width=f"{width:.1f}", height=str(_BAR), class_=class_)


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


def text(words: str, x: float, y: float, **attributes: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
