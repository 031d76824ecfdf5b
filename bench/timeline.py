"""The timeline of one cold run, as a picture: the stages of the command, and when each of its processes used a core.

The stages are the run's own, from `--json`. CPU time of the processes is read from `/proc` while they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import plot
from bench.measure import Stat, list_tree, read_stats
from sluice.pipelines.batch_report.markup import Html, tag
from sluice.pipelines.errors import Failed

PICTURE = "images/cold_start.svg"
_LOOK_SECONDS = 0.02
_NAMES = ("command", "pool", "worker")
"""Processes of Python by their distance from the command."""
_JVM = "JVM"
_LANES = (_NAMES[0], _JVM, *_NAMES[1:])
_LEFT, _WIDTH, _LANE, _BAR, _TOP = 126, 760, 30, 16, 44
_LETTER = 6.4
"""Width of a letter, about."""
_SHORTEST = 0.02
"""Share of the run of a stage whose name is drawn."""
_MOST_TICKS = 8


@dataclass
class Process:
    """A process of the run: seconds at which it was seen first and last, and those between which it used CPU."""

    name: str
    began: float
    ended: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)
    cpu: float = 0.0

    def see(self, at: float, cpu: float) -> None:
        """Take note of its CPU seconds at a time."""
        since = max(self.ended, self.began)
        if cpu > self.cpu and at > since:  # at first sight there is no time before
            if self.busy and self.busy[-1][1] == since:
                self.busy[-1] = self.busy[-1][0], at
            else:
                self.busy.append((since, at))
        self.ended, self.cpu = at, cpu


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run: its seconds, those of each stage in their order, and its processes."""

    seconds: float
    stages: Mapping[str, float]
    processes: Sequence[Process]


def watch(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Timeline:
    """Run `sluice run … --json` in the folder and watch its processes. Raises Failed."""
    began, processes = time.perf_counter(), dict[int, Process]()
    with subprocess.Popen(
        command, cwd=folder, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        while run.poll() is None:
            at, stats = time.perf_counter() - began, read_stats()
            for pid in list_tree(run.pid, stats):
                if pid not in processes:
                    name = _NAMES[min(_count_parents(pid, run.pid, stats), 2)]
                    processes[pid] = Process(_JVM if stats[pid].name == "java" else name, at, at)
                processes[pid].see(at, stats[pid].cpu)
            time.sleep(_LOOK_SECONDS)
        seconds = time.perf_counter() - began
        out, err = run.communicate()
    if run.returncode:
        raise Failed(f"{command[0]} ended with {run.returncode}: {err[-500:]}")
    stages: dict[str, Any] = json.loads(out)["feeds"][0]["runs"][0]["seconds"]
    return Timeline(seconds, stages | {"exit": seconds - sum(stages.values())}, [*processes.values()])


def _count_parents(pid: int, root: int, stats: Mapping[int, Stat]) -> int:
    """Return the number of processes from `pid` up to `root`."""
    count = 0
    while pid != root and pid in stats:
        pid, count = stats[pid].parent, count + 1
    return count


def draw(timeline: Timeline) -> Html:
    """Return the picture, an SVG without script."""
    scale = (_WIDTH - _LEFT - 16) / timeline.seconds
    lanes = [p for name in _LANES for p in timeline.processes if p.name == name]
    bottom = _TOP + _LANE * (2 + len(lanes))
    title = f"A cold run through Dagster, {timeline.seconds:.1f} seconds on {os.cpu_count()} cores"
    drawn = [plot.text(title, 16, 26, class_="title"), *_draw_axis(timeline.seconds, scale, bottom)]
    drawn += _draw_stages(timeline.stages, scale)
    for number, process in enumerate(lanes):
        y = _TOP + _LANE * (2 + number)
        drawn.append(plot.text(f"CPU of {process.name}", 16, y + _BAR - 4))
        drawn.append(_draw_bar(process.began, process.ended, y, scale, "others"))
        drawn += [_draw_bar(a, b, y, scale, "ours") for a, b in process.busy]
    return plot.picture(title, drawn, _WIDTH, bottom + 36)


def _draw_stages(stages: Mapping[str, float], scale: float) -> Iterator[Html]:
    """Stages one after the other, with the names of those that have room for one."""
    yield plot.text("stages", 16, _TOP + _BAR - 4)
    at, names = 0.0, list[tuple[float, str]]()
    for number, (name, seconds) in enumerate(stages.items()):
        yield _draw_bar(at, at + seconds, _TOP, scale, "ours" if number % 2 else "others", name)
        if seconds >= _SHORTEST * sum(stages.values()):
            names.append((at, f"{name} {seconds:.2f}"))
        at += seconds
    right = 0.0
    for at, name in names:
        x = max(_LEFT + at * scale, right)
        right = x + _LETTER * len(name) + 8
        if right < _WIDTH:
            yield plot.text(name, x, _TOP + _LANE + 4, class_="note")


def _draw_axis(seconds: float, scale: float, bottom: float) -> Iterator[Html]:
    tenths = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if seconds * 10 / n <= _MOST_TICKS)
    for number in range(0, int(seconds * 10) + 1, tenths):
        x = f"{_LEFT + number / 10 * scale:.1f}"
        yield tag("line", x1=x, x2=x, y1=str(_TOP - 6), y2=str(bottom), class_="line")
        yield plot.text(f"{number / 10:.1f} s", float(x), bottom + 18, class_="note", text_anchor="middle")


def _draw_bar(start: float, end: float, y: float, scale: float, kind: str, name: str = "") -> Html:
    width = max((end - start) * scale, 1.0)
    box = {"x": f"{_LEFT + start * scale:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": str(_BAR)}
    return tag("rect", *([tag("title", name)] if name else []), class_=kind, **box)
