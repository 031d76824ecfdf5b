"""Search for inputs that take every path through the compiled loops, by tracing the loops as plain Python.

    python -m tests.fuzz.reach records --seconds 300 [--keep]

Machine code does not report the branches that it takes. Here the same functions run uncompiled and traced, a thousand
times slower. An input with a new step from line to line is worth mutating further. `--keep` adds the smallest set of
inputs that covers all steps to the corpus, with which the compiled loops are fuzzed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import numpy as np

from sluice.pipelines.records.compiled import jit as compiled
from tests.fuzz.hunt import load_target
from tests.fuzz.target import Target, format_line, load

_FILES = {"records": ("decode/loops.py",), "typed": ("json/scan.py", "json/fill.py", "columns/loops.py")}
Way = tuple[str, int, int]
"""A step in a function: the function with its file, the line before, the next line."""


# -- the loops in Python


def pack(start: int, stop: int, kind: int) -> int:
    """Pack a span like the compiled `pack`: a kind of 2 or more sets the sign bit, where machine code wraps around."""
    bits = int(kind) << 62 | (int(stop) - int(start)) << 31 | int(start)
    return np.int64(bits - (1 << 64 if bits >> 63 else 0))


def replace_loops() -> None:
    """Make modules imported after this use the loops as plain Python."""
    compiled.compiled = lambda *arguments, results=0: lambda f: f
    np.seterr(all="ignore")
    from sluice.pipelines.records.columns import spans

    spans.pack = pack


# -- tracing


class Trace:
    """Records the steps through functions of some files."""

    def __init__(self, endings: tuple[str, ...]) -> None:
        self._endings = endings
        self._names: dict[CodeType, str | None] = {}
        self.ways: set[Way] = set()

    def record(self, work: Callable[[], Any]) -> set[Way]:
        """Return the steps that the work takes."""
        self.ways = set()
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(None)
        return self.ways

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._names:
            ours = code.co_filename.endswith(self._endings)
            self._names[code] = f"{Path(code.co_filename).name}:{code.co_name}" if ours else None
        if (name := self._names[code]) is None:
            return None
        ways, before = self.ways, 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                ways.add((name, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step


# -- the search


def search(target: Target, seconds: float) -> dict[bytes, set[Way]]:
    """Return inputs with their steps, searching from the corpus on."""
    trace, random, corpus = Trace(_FILES[target.name]), Random(target.name), target.load_corpus()
    taken, covered = dict[bytes, set[Way]](), set[Way]()
    until, tried = time.monotonic() + seconds, 0
    waiting = list(corpus)
    while time.monotonic() < until or waiting:
        data = waiting.pop() if waiting else target.mutate(random, random.choice(list(taken)), corpus)
        ways = trace.record(lambda data=data: target.run(data))  # type: ignore[misc]
        tried += 1
        if ways - covered:
            covered |= ways
            taken[data] = ways
            print(f"{tried} inputs, {len(taken)} kept, {len(covered)} ways", flush=True)
    return taken


def choose_fewest(taken: dict[bytes, set[Way]]) -> list[bytes]:
    """Choose inputs, small ones first, each with a step that none before has."""
    out, covered = [], set[Way]()
    for data in sorted(taken, key=lambda d: (len(d), d)):
        if taken[data] - covered:
            covered |= taken[data]
            out.append(data)
    return out


def list_unreached(endings: tuple[str, ...], ways: set[Way]) -> list[str]:
    """Return, for each file, the lines of its functions that no input reached."""
    reached = {(name.partition(":")[0], to) for name, _, to in ways}
    out = []
    for ending in endings:
        path = Path(compiled.__file__).parent / ending
        lines = sorted(_list_lines(compile(path.read_text(), str(path), "exec")))
        missing = [n for n in lines if (path.name, n) not in reached]
        out.append(f"{path.name}: {len(lines) - len(missing)} of {len(lines)} lines; not {missing}")
    return out


def _list_lines(code: CodeType) -> set[int]:
    """Return the lines inside functions."""
    inside = (c for c in code.co_consts if isinstance(c, CodeType))
    own = {n for _, _, n in code.co_lines() if n} if code.co_flags & CO_OPTIMIZED else set()
    return (own - {code.co_firstlineno, code.co_firstlineno + 1}).union(*map(_list_lines, inside))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=_FILES)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    replace_loops()
    target = load_target(options.target)
    taken = search(target, options.seconds)
    chosen = choose_fewest(taken)
    print("\n".join(list_unreached(_FILES[options.target], set().union(*taken.values()))))
    print(f"{len(chosen)} inputs of {sum(map(len, chosen)):,} bytes take all ways")
    if options.keep:
        existing = {*load(target.corpus_file), *target.seeds()}
        with target.corpus_file.open("a") as file:
            file.writelines(format_line(data, "takes a way of its own") for data in chosen if data not in existing)


if __name__ == "__main__":
    main()
