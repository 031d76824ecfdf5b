"""The judgement of a soak's series: a robust slope per hour, its limit, and a plot.

The slope is Theil and Sen's: the median over all pairs of points that are a few minutes apart. Both points of a pair
are of one life of a process: after a kill a new life begins, with its own warm-up.

Not judged, because it grows by design: the ledger (entries are the account of all rows), Dagster's runs and events
(of PostgreSQL; of SQLite `sluice prune` bounds the logs), and what moto holds in memory. Dagster's database is judged
by its size for each run. The caches of this user are shared with other processes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plot import picture, text
from sluice.pipelines.batch_report.markup import Html, tag

LIMITS: Mapping[str, float] = {
    "memory": 24.0,
    "threads": 4.0,
    "files": 10.0,
    "sockets": 10.0,
    "count": 6.0,
    "temporary entries": 30.0,
    "temporary mib": 24.0,
    "connections": 4.0,
}
"""Of a series, per hour: MiB, or how many. A pool of connections fills and empties: what leaks with each tick or run
leaks more."""
LIMIT_OF_RUN = 4.0
"""MiB of Dagster's database for each run: events of the 24 feeds that it lands."""
WARM_UP = 15.0
"""Minutes of a process's life, and of the scene, that count for no slope."""
_APART, _LEAST_SPAN = 5.0, 25.0
"""Minutes between the points of a pair, and between the first point and the last, at least."""
_WIDTH, _PANEL, _LEFT = 900, 110, 60


@dataclass(frozen=True)
class Point:
    minute: float
    value: float
    life: int = 0
    """The pid of the process; points of different lives are not compared."""


@dataclass(frozen=True)
class Slope:
    """A series with its slope per hour; None where there were too few points. `limit`: None where growth is fine."""

    name: str
    points: Sequence[Point] = field(repr=False)
    per_hour: float | None
    limit: float | None

    @property
    def is_flat(self) -> bool:
        return self.per_hour is None or self.limit is None or self.per_hour <= self.limit

    def __str__(self) -> str:
        slope = "too few points" if self.per_hour is None else f"{self.per_hour:+.2f} an hour"
        limit = "grows by design" if self.limit is None else f"limit {self.limit:g}"
        return f"{self.name}: {slope} ({limit})"


def compute_slope(points: Iterable[Point]) -> float | None:
    """Returns Theil and Sen's slope per hour within lives, after their warm-ups; None of too few points."""
    lives: dict[int, list[Point]] = {}
    for p in points:
        lives.setdefault(p.life, []).append(p)
    slopes: list[float] = []
    for life in lives.values():
        warm = [p for p in life if p.minute >= max(life[0].minute, 0) + WARM_UP]
        if warm and warm[-1].minute - warm[0].minute >= _LEAST_SPAN:
            slopes += [
                60 * (b.value - a.value) / (b.minute - a.minute)
                for i, a in enumerate(warm)
                for b in warm[i + 1 :]
                if b.minute - a.minute >= _APART
            ]
    return statistics.median(slopes) if slopes else None


def judge(lines: Sequence[Mapping[str, Any]]) -> list[Slope]:
    """Returns the slope of each series of a soak's measurements."""
    judged = []
    for name, points in _list_series(lines).items():
        limit = next((n for key, n in LIMITS.items() if name.endswith(key)), None)
        judged.append(Slope(name, points, compute_slope(points), limit))
    return judged


def compute_run_size(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns MiB of Dagster's database for each run, between the end of the warm-up and the last line."""
    measured = [line for line in lines if "database" in line and line["minute"] >= WARM_UP]
    if len(measured) < 2 or measured[-1]["runs"] <= measured[0]["runs"]:
        return None
    return float((measured[-1]["database"] - measured[0]["database"]) / (measured[-1]["runs"] - measured[0]["runs"]))


def _list_series(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for line in lines:
        minute = float(line["minute"])
        for name, process in line["processes"].items():
            for key in ("memory", "threads", "files", "sockets"):
                point = Point(minute, float(process[key]), int(process["pid"]))
                series.setdefault(f"{name} {key}", []).append(point)
        for name, value in _list_values(line):
            series.setdefault(name, []).append(Point(minute, float(value)))
    return series


def _list_values(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "processes count", line["count"]
    for name in ("temporary", "home", "project", "caches"):
        yield f"{name} entries", line[name]["entries"]
        yield f"{name} mib", line[name]["mib"]
    for name in ("database", "runs", "connections"):
        if name in line:
            yield name, line[name]
    if line["ledger"]:
        yield "ledger", sum(line["ledger"].values())
    if line["lag"]:
        yield "lag of all feeds", sum(line["lag"].values())
        yield "lag of the last feed", max(line["lag"].values())


# -- the plot


def plot(slopes: Sequence[Slope], title: str) -> Html:
    """Returns a panel for each series, over the minutes of the soak."""
    columns, width = 2, (_WIDTH - 20) // 2
    drawn: list[Html] = [text(title, 16, 26, class_="title")]
    last = max((s.points[-1].minute for s in slopes if s.points), default=1.0) or 1.0
    for number, slope in enumerate(slopes):
        x, y = 16 + (number % columns) * width, 48 + number // columns * _PANEL
        drawn += _draw_panel(slope, x, y, width - 24, last)
    return picture(title, drawn, _WIDTH, 60 + (len(slopes) + 1) // columns * _PANEL)


def _draw_panel(slope: Slope, x: int, y: int, width: int, last: float) -> Iterator[Html]:
    values = [p.value for p in slope.points]
    top, height = max(values) or 1.0, _PANEL - 46
    yield text(str(slope), x, y + 10, class_="note" if slope.is_flat else "title")
    yield text(f"{top:,.0f}", x + _LEFT - 8, y + 24, text_anchor="end", class_="note")
    base = y + 18 + height
    yield tag("line", x1=x + _LEFT, x2=x + width, y1=base, y2=base, class_="line")
    for p in slope.points:
        across, high = x + _LEFT + (width - _LEFT) * p.minute / last, base - height * max(p.value, 0) / top
        yield tag("rect", x=f"{across:.1f}", y=f"{high - 1:.1f}", width="2", height="2", class_="ours")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def judge_folder(folder: Path, print_line: Callable[[str], None] = print) -> list[str]:
    """Judge the measurements in a soak's folder, also while it runs, and write its plot.

    Prints each series. Returns those that grow by more than their limits.
    """
    lines = read_lines(folder / "metrics.jsonl")
    slopes = judge(lines)
    (folder / "plot.svg").write_text(plot(slopes, f"{folder.name}, {lines[-1]['minute']:.0f} minutes"))
    size = compute_run_size(lines)
    of_runs = f"Dagster's database: {'too few runs' if size is None else f'{size:.2f} MiB a run'}"
    results = [(s.is_flat, str(s)) for s in slopes]
    results.append((size is None or size <= LIMIT_OF_RUN, f"{of_runs} (limit {LIMIT_OF_RUN:g})"))
    for is_flat, line in results:
        print_line(f"{' ' if is_flat else '✗'} {line}")
    return [line for is_flat, line in results if not is_flat]


if __name__ == "__main__":
    sys.exit(1 if judge_folder(Path(sys.argv[1])) else 0)
