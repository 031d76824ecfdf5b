"""What compiled loops share: their signatures, and loads and copies of a few bytes at once.

Entry points (`compiled`) have explicit types, run as machine code and release the GIL; `inner` functions are parts of
them. Nothing here imports numba: `build` compiles a module of loops with its own versions of the functions below,
which are these functions in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from sluice.pipelines.records.compiled.loop import Argument, Number, Numbers, load

F = TypeVar("F", bound=Callable[..., Any])
Array = npt.NDArray[Any]
# To the type checker a compiled number is an int.
int32: Callable[[Any], int] = cast(Any, np.int32)
int64: Callable[[Any], int] = cast(Any, np.int64)
uint64: Callable[[Any], int] = cast(Any, np.uint64)

INTEGER = Number("int64")
UNSIGNED = Number("uint64")
FLAG = Number("boolean")
BYTES = Numbers("uint8", readonly=True)
ENDS = Numbers("int32", readonly=True)
"""Where Arrow's texts or lists end."""
U8 = Numbers("uint8")
I8 = Numbers("int8")
I32 = Numbers("int32")
I64 = Numbers("int64")
F64 = Numbers("float64")
TABLE = Numbers("int64", dims=2)
CELLS = 16
"""Columns of the tables that `cell` reads."""


def compiled(*arguments: Argument, results: int = 0) -> Callable[[F], F]:
    """Load a function's machine code when its module is imported. It takes these arguments, by position, and returns
    None, an integer, or a tuple of integers: as many as `results`."""

    def load_code(f: F) -> F:
        return cast(F, load(f, arguments, results))

    return load_code


def inner(f: F) -> F:
    """Compiled into the loops that call it."""
    return f


def inlined(f: F) -> F:
    """Compiled in place into the loops that call it: for functions of many arrays, whose passing would cost more than
    the work. Of an `inner` function it makes a second, inlined one."""
    return f


def byte(buf: Array, at: int) -> int:
    """The byte at `at` as an int64; the caller has checked that it is there."""
    return int64(buf[at])


def word(buf: Array, at: int) -> int:
    """Eight bytes from `at` as a little-endian uint64; the caller has checked that they are there."""
    return uint64(int.from_bytes(buf[at : at + 8].tobytes(), "little"))


# Plain indexing checks the sign of an index first, to count from the end: a tenth of the time in the innermost loops.


def cell(table: Array, row: int, column: int) -> int:
    """An int64 of a table with CELLS columns; the caller knows that it is there."""
    return cast(int, table[row, column])


def item(numbers: Array, at: int) -> int:
    """An int64 of an array; the caller knows that it is there."""
    return cast(int, numbers[at])


def put(numbers: Array, at: int, number: int) -> None:
    """Write an int64 into an array; the caller knows that there is room."""
    numbers[at] = number


def trailing_zeros(x: int) -> int:
    """Of a uint64 that is not 0."""
    return int64((int(x) & -int(x)).bit_length() - 1)


def find_text_stops(buf: Array, at: int) -> int:
    """A bit for each of 32 bytes from `at`: a quote, a backslash, below 0x20 or not ASCII. The caller has checked that
    the bytes are there."""
    text = buf[at : at + 32]
    return _pack_bits((text < 0x20) | (text > 0x7F) | (text == 0x22) | (text == 0x5C))


def find_digit_stops(buf: Array, at: int) -> int:
    """A bit for each of 16 bytes from `at` that is no digit. The caller has checked that the bytes are there."""
    return _pack_bits((buf[at : at + 16] < 0x30) | (buf[at : at + 16] > 0x39))


def find_differences(one: Array, one_at: int, other: Array, other_at: int) -> int:
    """A bit for each of 32 bytes that differs. The caller has checked that the bytes are there."""
    return _pack_bits(one[one_at : one_at + 32] != other[other_at : other_at + 32])


def find_byte(buf: Array, at: int, wanted: int) -> int:
    """A bit for each of 32 bytes from `at` that is `wanted`. The caller has checked that the bytes are there."""
    return _pack_bits(buf[at : at + 32] == wanted)


def _pack_bits(flags: Array) -> int:
    return uint64(int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little"))


def keep_branch(number: int) -> int:
    """Returns the number. The compiler knows nothing of it, so it keeps the branch that chose it."""
    return number


def prefetch(buf: Array, at: int) -> None:
    """Ask for the byte at `at`, and those around it, to be read soon; it need not be there."""


def copy(dst: Array, dst_at: int, src: Array, src_at: int, size: int) -> None:
    """`size` bytes, and up to 16 where both sides have them: what follows in `dst` is not yet written. Raises
    IndexError outside of a buffer."""
    if size < 0 or dst_at < 0 or src_at < 0 or size > dst.size - dst_at or size > src.size - src_at:
        raise IndexError("copy outside of a buffer")
    dst[dst_at : dst_at + size] = src[src_at : src_at + size]


def clear(bitmap: Array, bit: int) -> None:
    bitmap[bit >> 3] &= np.uint8(0xFF ^ (1 << (bit & 7)))


def bit_of(bitmap: Array, bit: int) -> bool:
    return bool((bitmap[bit >> 3] >> (bit & 7)) & 1)
