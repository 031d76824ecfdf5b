"""Calls compiled entry points by ctypes. Their C function checks each argument: a wrong one is a TypeError, never
damaged memory. `build.py` has the function's signature.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np

from sluice.pipelines.records.compiled.library import PACKAGE, find_address


@dataclass(frozen=True, slots=True)
class Number:
    """A number: int64, uint64 or boolean."""

    name: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """A C-contiguous array of numbers. If `readonly`, a writable one is accepted as well."""

    item: str
    dims: int = 1
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class Arrays:
    """A named tuple of arrays."""

    items: tuple[Numbers, ...]
    cls: type


Argument = Number | Numbers | Arrays

_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Failure(ctypes.Structure):
    """The first fields of numba's constant for a raised exception."""

    _fields_ = (("pickled", ctypes.c_void_p), ("size", ctypes.c_int32))


def load(f: Callable[..., Any], arguments: tuple[Argument, ...], results: int) -> Callable[..., Any]:
    """Return an entry point's machine code as a function, which releases the GIL and takes arguments by position."""
    entry = _C_FUNCTION(find_address(f.__module__.removeprefix(f"{PACKAGE}."), f.__name__))
    classes = (id(a.cls) for a in arguments if isinstance(a, Arrays))
    head = (object.__basicsize__, tuple.__basicsize__, id(np.ndarray), *classes)
    layout = ctypes.cast((ctypes.c_int64 * len(head))(*head), ctypes.c_void_p)
    positions = [i for i, a in enumerate(arguments) if isinstance(a, Number)]
    pack = struct.Struct("".join("Q" if arguments[i] == Number("uint64") else "q" for i in positions)).pack
    pick = itemgetter(*positions) if positions else None
    several, room = len(positions) > 1, ctypes.c_int64 * results

    @wraps(f)
    def call(*values: Any) -> Any:
        numbers = None
        if pick is not None:
            try:
                numbers = pack(*pick(values)) if several else pack(pick(values))
            except (struct.error, IndexError) as error:
                raise TypeError(f"{f.__name__}: {error}") from None
        returned = room() if results else None
        if status := entry(values, layout, numbers, returned):
            _fail(status, f, values, arguments)
        return None if returned is None else returned[0] if results == 1 else tuple(returned)

    return call


def _fail(status: int, f: Callable[..., Any], values: tuple[Any, ...], arguments: tuple[Argument, ...]) -> NoReturn:
    if len(values) != len(arguments):
        raise TypeError(f"{f.__name__} takes {len(arguments)} arguments, not {len(values)}")
    if 0 < status <= len(values):
        wrong, expected = values[status - 1], arguments[status - 1]
        raise TypeError(f"argument {status} of {f.__name__} is {_describe(wrong)} instead of {expected}")
    failure = _Failure.from_address(status)
    cls, parameters, _ = pickle.loads(ctypes.string_at(failure.pickled, failure.size))
    raise cls(*(parameters or ()))


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_describe, value))})"
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    kinds = {"C_CONTIGUOUS": "not contiguous", "ALIGNED": "not aligned", "WRITEABLE": "read-only"}
    flags: Any = value.flags
    return " ".join(
        [
            *(word for flag, word in kinds.items() if not flags[flag]),
            str(value.dtype),
            f"array of {value.ndim} dimensions",
        ]
    )
