"""The power of the tests: seeded mutants of the core, and the share that some test fails for.

    make mutants SEED=1 COUNT=300

A mutant is one changed operator, condition, constant or left out statement in the ledger, planning, landing,
publishing or committing. It lives in a forked process, never on the disk, and meets the quick tests that call its
function, fastest file first, until one fails. A mutant that hangs counts as killed. Survivors are printed with their
line.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 - loaded once, before the forks
import numpy  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pydantic  # noqa: F401
import pytest

ROOT = Path(__file__).parents[1]
AREAS = ("ledger", "planning", "landing", "publishing", "committing")
TESTS = (*(f"tests/pipelines/{area}" for area in (*AREAS, "batch", "audit", "maintenance")), "tests/model")
FOLDER = ROOT / "build" / "mutants"
_QUICK = "not kafka and not spark and not slow and not soak and not faults"
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_LEAST_SECONDS, _PATIENCE = 60.0, 10.0
"""A mutant's test file may take the greater of the first, and the second times its duration without mutants."""


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change that is possible in a module."""

    path: str
    number: int
    function: str
    line: int
    change: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.change}"


def list_mutants(path: Path) -> list[Mutant]:
    """Returns all mutants of the functions of a module."""
    name = str(path.relative_to(ROOT))
    return [Mutant(name, n, *described) for n, (described, _) in enumerate(_find_changes(ast.parse(path.read_text())))]


def mutate(mutant: Mutant) -> ast.Module:
    """Returns the module with this one change."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    for number, (_, change) in enumerate(_find_changes(tree)):
        if number == mutant.number:
            change()
            return ast.fix_missing_locations(tree)
    raise LookupError(mutant)


def _find_changes(tree: ast.Module) -> Iterator[tuple[tuple[str, int, str], Callable[[], None]]]:
    """Yields function, line and description of each change, with a call that makes it."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            line = function.lineno
            for node in _walk(function.body):
                line = getattr(node, "lineno", line)
                for what, change in _vary(node):
                    yield (function.name, line, what), change


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields what works: no annotations, messages, errors' arguments, logging, or inner functions."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.JoinedStr | ast.Raise) and not _is_logging(node):
            yield node
            inner = (child for name, child in ast.iter_fields(node) if name != "annotation")
            children = (c for child in inner for c in (child if isinstance(child, list) else [child]))
            yield from _walk(c for c in children if isinstance(c, ast.AST))


def _is_logging(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("_log.")


def _vary(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS:
        yield ast.unparse(node), lambda: setattr(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield ast.unparse(node), lambda: node.ops.__setitem__(0, _SWAPS[type(node.ops[0])]())
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield f"not {ast.unparse(node.test)}", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} → {changed}", lambda: setattr(node, "value", changed)
    for statements in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for at, statement in enumerate(statements if isinstance(statements, list) else ()):
            called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if (called and not _is_logging(statement)) or isinstance(
                statement, ast.Raise | ast.AugAssign | ast.Continue
            ):
                yield f"without {ast.unparse(statement)[:80]}", lambda s=statements, n=at: s.__setitem__(n, ast.Pass())


def note_calls(file: str) -> tuple[set[str], float]:
    """Returns the functions of the areas that the tests of this file call, as path:function, and their seconds.

    Raises SystemExit if they fail.
    """
    prefixes, names = tuple(str(ROOT / "pipelines" / area) for area in AREAS), dict[Any, str]()

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in names:
            path = os.path.realpath(code.co_filename)
            names[code] = f"{os.path.relpath(path, ROOT)}:{code.co_name}" if path.startswith(prefixes) else ""

    def run_test() -> int:
        threading.setprofile(note)
        sys.setprofile(note)
        code = _test(file)
        sys.setprofile(None)
        noted.write_text(json.dumps(sorted(filter(None, names.values()))))
        return code

    noted, begun = FOLDER / f"{file.replace('/', '.')}.json", time.monotonic()
    if (code := _fork(run_test, 3600.0)) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{file} fails without any mutant ({code})")
    return set(json.loads(noted.read_text())), time.monotonic() - begun


def _test(file: str) -> int:
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", _QUICK, "--hypothesis-profile=quick"]
    return int(pytest.main([*quiet, file]))


def _fork(work: Callable[[], int], seconds: float) -> int | None:
    """Returns the exit code of the work in a process of its own, or None if it takes longer. Its output is lost."""
    child = os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        code = -1
        with suppress(BaseException):
            code = work()
        os._exit(code & 0xFF)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def kill(mutant: Mutant, files: list[tuple[float, str]]) -> str | None:
    """Returns the test file that fails for the mutant, or None if it survives all: (seconds, path) of each."""

    def run_test() -> int:
        code, target = compile(mutate(mutant), mutant.path, "exec"), str(ROOT / mutant.path)
        load = SourceFileLoader.get_code

        def get_code(self: SourceFileLoader, name: str) -> Any:
            return code if os.path.realpath(self.path) == target else load(self, name)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        return _test(file)

    for seconds, file in files:
        if _fork(run_test, max(_LEAST_SECONDS, _PATIENCE * seconds)) != pytest.ExitCode.OK:
            return file
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    paths = [p for area in AREAS for p in sorted((ROOT / "pipelines" / area).rglob("*.py"))]
    mutants = random.Random(options.seed).sample([m for p in paths for m in list_mutants(p)], options.count)
    tests = sorted(str(p) for folder in TESTS for p in Path(folder).rglob("test_*.py"))
    callers = defaultdict[str, list[tuple[float, str]]](list)

    def judge(mutant: Mutant) -> str | None:
        by = kill(mutant, sorted(callers[f"{mutant.path}:{mutant.function}"]))
        print(f"{'killed by ' + by if by else 'SURVIVED'}  {mutant}", flush=True)
        return by

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, (functions, seconds) in zip(tests, pool.map(note_calls, tests), strict=True):
            for function in functions:
                callers[function].append((seconds, file))
        print(f"{len(tests)} test files call {len(callers)} functions", flush=True)
        killed = list(map(bool, pool.map(judge, mutants)))
    for area in AREAS:
        of_area = [k for m, k in zip(mutants, killed, strict=True) if m.path.startswith(f"pipelines/{area}/")]
        print(f"{area}: {sum(of_area)} of {len(of_area)} killed")
    print(f"{sum(killed)} of {len(mutants)} mutants killed, seed {options.seed}")


if __name__ == "__main__":
    main()
