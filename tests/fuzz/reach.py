"""Inputs that take every way through the compiled loops, found by running these as plain Python, line by line.

    python -m tests.fuzz.reach records --seconds 300 [--keep]

Machine code tells nobody where it has been. Here the same functions run uncompiled and traced, a thousand times
slower: an input that goes from a line to a line where none went before is worth changing further, and `--keep` writes
the fewest small ones that go everywhere to the corpus, where the compiled loops are fuzzed from.
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
from tests.fuzz.hunt import target
from tests.fuzz.target import Target, line, load

_FILES = {"records": ("decode/loops.py",), "typed": ("typed/scan.py", "typed/fill.py")}
Way = tuple[str, int, int]
"""From a line to a line of a function, which is named with its file."""


# -- the loops in Python


def pack(start: int, stop: int, kind: int) -> int:
    """A kind of 2 or more is in the sign's bit, where machine code wraps around."""
    bits = int(kind) << 62 | (int(stop) - int(start)) << 31 | int(start)
    return np.int64(bits - (1 << 64 if bits >> 63 else 0))


def plain() -> None:
    """From here on modules that import the loops get Python's."""
    compiled.compiled = lambda *arguments, results=0: lambda f: f
    np.seterr(all="ignore")
    from sluice.pipelines.records.json import scan

    scan.pack = pack


# -- tracing


class Trace:
    """The ways that were taken through functions of some files."""

    def __init__(self, endings: tuple[str, ...]) -> None:
        self._endings = endings
        self._named: dict[CodeType, str | None] = {}
        self.ways: set[Way] = set()

    def of(self, work: Callable[[], Any]) -> set[Way]:
        """What the work took."""
        self.ways = set()
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(None)
        return self.ways

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._named:
            ours = code.co_filename.endswith(self._endings)
            self._named[code] = f"{Path(code.co_filename).name}:{code.co_name}" if ours else None
        if (name := self._named[code]) is None:
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


def search(found: Target, seconds: float) -> dict[bytes, set[Way]]:
    """Inputs by what they take, found from the corpus on."""
    trace, random, corpus = Trace(_FILES[found.name]), Random(found.name), found.corpus()
    taken, known = dict[bytes, set[Way]](), set[Way]()
    until, tried = time.monotonic() + seconds, 0
    waiting = list(corpus)
    while time.monotonic() < until or waiting:
        data = waiting.pop() if waiting else found.mutate(random, random.choice(list(taken)), corpus)
        ways = trace.of(lambda data=data: found.run(data))  # type: ignore[misc]
        tried += 1
        if ways - known:
            known |= ways
            taken[data] = ways
            print(f"{tried} inputs, {len(taken)} kept, {len(known)} ways", flush=True)
    return taken


def fewest(taken: dict[bytes, set[Way]]) -> list[bytes]:
    """Small ones first; each goes somewhere where none before goes."""
    out, known = [], set[Way]()
    for data in sorted(taken, key=lambda d: (len(d), d)):
        if taken[data] - known:
            known |= taken[data]
            out.append(data)
    return out


def unreached(endings: tuple[str, ...], ways: set[Way]) -> list[str]:
    """Lines of functions of the files that no input came to."""
    been = {(name.partition(":")[0], to) for name, _, to in ways}
    out = []
    for ending in endings:
        path = Path(compiled.__file__).parent / ending
        lines = sorted(_lines(compile(path.read_text(), str(path), "exec")))
        missed = [n for n in lines if (path.name, n) not in been]
        out.append(f"{path.name}: {len(lines) - len(missed)} of {len(lines)} lines; not {missed}")
    return out


def _lines(code: CodeType) -> set[int]:
    """Lines inside of functions."""
    inside = (c for c in code.co_consts if isinstance(c, CodeType))
    own = {n for _, _, n in code.co_lines() if n} if code.co_flags & CO_OPTIMIZED else set()
    return (own - {code.co_firstlineno, code.co_firstlineno + 1}).union(*map(_lines, inside))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=_FILES)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    plain()
    found = target(asked.target)
    taken = search(found, asked.seconds)
    chosen = fewest(taken)
    print("\n".join(unreached(_FILES[asked.target], set().union(*taken.values()))))
    print(f"{len(chosen)} inputs of {sum(map(len, chosen)):,} bytes take all ways")
    if asked.keep:
        known = {*load(found.kept), *found.seeds()}
        with found.kept.open("a") as file:
            file.writelines(line(data, "takes a way of its own") for data in chosen if data not in known)


if __name__ == "__main__":
    main()
