"""A fix function, written by a user: loaded by name, called record by record, and trusted with nothing.

Promise: the caller always gets bytes, None, or a Botched. Its text describes the failure and never holds a value of
the record.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sluice.pipelines.errors import UsageError

MOST_BYTES = 64 << 20
"""Size limit of a fixed value."""


@dataclass(frozen=True, slots=True)
class Record:
    """The argument of a fix function: the record as it came, `timestamp` in ms, and why it is in quarantine."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    topic: str
    partition: int
    offset: int
    timestamp: int | None
    stage: str
    reason: str
    field: str | None
    detail: str
    expectation: str | None


class Botched(Exception):
    """The function gave no value. The text names the error and where it was raised, or describes the returned value."""


class Fixer:
    """A function that takes a record and returns its fixed value: bytes, text, a dict or list for JSON, or None."""

    def __init__(self, function: Callable[[Record], Any], file: str) -> None:
        self._function, self._file = function, file

    def fix(self, record: Record) -> bytes | None:
        """The value that the record should have had; None leaves it in quarantine. Raises Botched."""
        try:
            value = _bytes_of(self._function(record))
        except Botched:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            raise Botched(f"{type(error).__name__}{self._line(error)}") from None
        if value is not None and len(value) > MOST_BYTES:
            raise Botched(f"returned more than {MOST_BYTES >> 20} MB")
        return value

    def _line(self, error: BaseException) -> str:
        at = _place(error, self._file)
        return f" at {Path(at[0]).name}:{at[1]}" if at and at[0] == self._file else ""


def _bytes_of(answer: object) -> bytes | None:
    match answer:
        case None:
            return None
        case bytes() | bytearray() | memoryview():
            return bytes(answer)
        case str():
            return answer.encode()
        case dict() | list():
            return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
        case _:
            raise Botched(f"returned {type(answer).__name__}")


def load(text: str, root: Path) -> Fixer:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names, both looked for in the folder `root`.

    Raises UsageError with the file and the line that is wrong.
    """
    module, name = module_of(text, root)
    return Fixer(_function(module, name), str(module.__file__ or ""))


def module_of(text: str, root: Path) -> tuple[ModuleType, str]:
    """The module that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names, and the function's name. Raises UsageError."""
    location, _, name = text.rpartition(":")
    if not location or not name.isidentifier():
        raise UsageError(f"{text!r} names no function", remedy="write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = _file(location, root) if location.endswith(".py") else None
    try:
        with _also_from(file.parent if file else root):
            module = _of_file(file) if file else importlib.import_module(location)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        at = _place(error, str(file or ""))
        where = f"{at[0]}, line {at[1]}" if at else location
        raise UsageError(
            f"{where}: {type(error).__name__}: {error}", remedy="fix it; nothing was read or changed"
        ) from None
    return module, name


def _file(path: str, root: Path) -> Path:
    """The file of that name in the project, or by its whole path. Raises UsageError."""
    file = (root / path).resolve()
    if file.is_file():
        return file
    here = Path(path).resolve()
    if here.is_file():
        raise UsageError(
            f"there is no file {file}: files are looked for in the project, not where the shell stands",
            remedy=f"the one that lies here is meant with its whole path: --fix {here}:FUNCTION",
        )
    raise UsageError(f"there is no file {file}", remedy="name it as it is seen from the project, or by its whole path")


def _of_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_mending_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def _also_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _place(error: BaseException, file: str) -> tuple[str, int] | None:
    """File and line of an error: where it left `file`, or else where it was raised; None if in our own import."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = [(f.filename, f.lineno or 1) for f in traceback.extract_tb(error.__traceback__)]
    theirs = [f for f in frames if f[0] != __file__ and not f[0].startswith("<frozen") and "importlib" not in f[0]]
    mine = [f for f in theirs if f[0] == file]
    return next(iter((mine or theirs)[-1:]), None)


def _function(module: ModuleType, name: str) -> Callable[[Record], Any]:
    """The function of that name. Raises UsageError if it cannot be called with a record."""
    file, candidate = module.__file__, getattr(module, name, None)
    if candidate is None:
        raise UsageError(f"{file} has no function {name}", remedy="name one that it defines at its top level")
    code = getattr(candidate, "__code__", None)
    line = f", line {code.co_firstlineno}" if code else ""
    if not callable(candidate):
        raise UsageError(f"{file}: {name} is no function", remedy="name one: def fix(record): ...")
    if inspect.iscoroutinefunction(candidate) or inspect.isgeneratorfunction(candidate):
        raise UsageError(f"{file}{line}: {name} returns no value", remedy="write it with `def` and `return`")
    try:
        inspect.signature(candidate).bind(None)
    except TypeError:
        remedy = f"it is called with one argument: def {name}(record): ..."
        raise UsageError(f"{file}{line}: {name} takes no single argument", remedy=remedy) from None
    except ValueError:  # a builtin that tells nothing of itself
        pass
    function: Callable[[Record], Any] = candidate
    return function
