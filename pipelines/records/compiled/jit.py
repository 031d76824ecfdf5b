"""What compiled loops share: how they are compiled and cached, and loads and copies of a few bytes at once.

Entry points (`compiled`) get explicit types, are loaded from a file or compiled when their module is imported, and
release the GIL; `inner` functions become part of them. numba's own cache would notice only changes of the file that
defines an entry point, and serve only the processor that compiled it, so the files are those of `cache`.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, compiler, serialize

from sluice.pipelines.records.compiled.cache import (
    HOST,
    LEVEL,
    find_targets,
    find_writable_folder,
    get_folders,
    make_file_name,
)

F = TypeVar("F", bound=Callable[..., Any])
Array = npt.NDArray[Any]
# To the type checker a compiled number is an int, and numba is untyped.
int32: Callable[[Any], int] = cast(Any, np.int32)
int64: Callable[[Any], int] = cast(Any, np.int64)
uint64: Callable[[Any], int] = cast(Any, np.uint64)
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
_njit: Any = numba.njit
_dumps: Any = serialize.dumps
_rebuild: Any = compiler.CompileResult._rebuild
_raw_memcpy: Any = cgutils.raw_memcpy
_function: Any = cgutils.get_or_insert_function

# Callers hold the arrays and nothing is allocated here: counting references would take ten times as long as the work.
_OPTIONS = {"nogil": True, "_nrt": False}

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
ENDS = types.Array(types.int32, 1, "C", readonly=True)
"""Where Arrow's texts or lists end."""
U8 = types.Array(types.uint8, 1, "C")
I8 = types.Array(types.int8, 1, "C")
I32 = types.Array(types.int32, 1, "C")
I64 = types.Array(types.int64, 1, "C")
F64 = types.Array(types.float64, 1, "C")
TABLE = types.Array(types.int64, 2, "C")


_ROOM = "sluice.pipelines.records."
CELLS = 16
"""Columns of the tables that `cell` reads."""


def compiled(signature: Any) -> Callable[[F], F]:
    """Load a function from its file when its module is imported, or compile it and write the file."""

    def compile(f: F) -> F:
        loop = _njit(**_OPTIONS)(f)
        loop._cache = _LoopFile(f)
        loop.compile(signature)
        loop.disable_compile()
        return cast(F, loop)

    return compile


_UNREADABLE = (FileNotFoundError, NotADirectoryError, PermissionError, EOFError, pickle.UnpicklingError)
"""Errors of a missing file, and of one that a crash of the machine cut: it is compiled and written again."""


class _LoopFile:
    """numba's interface of a cache, over the file of one function. Processes see a complete file or none."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._module, self._function = f.__module__.removeprefix(_ROOM), f.__name__

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled function; None if no folder has its complete file."""
        context.refresh()
        names = [make_file_name(self._module, self._function, target) for target in find_targets()]
        for path in (folder / name for name in names for folder in get_folders()):
            with suppress(*_UNREADABLE):
                return _rebuild(context, *pickle.loads(path.read_bytes()))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write the file, if any folder is writable."""
        _, name, features = result.codegen.magic_tuple()
        target = LEVEL if (name, features) == (LEVEL, "") else HOST
        with suppress(OSError):
            if folder := find_writable_folder():
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    file.write(_dumps(result._reduce()))
                os.chmod(file.name, 0o644)
                os.replace(file.name, folder / make_file_name(self._module, self._function, target))


def inner(f: F) -> F:
    """Compiled into the loops that call it."""
    return cast(F, _njit(**_OPTIONS)(f))


def inlined(f: F) -> F:
    """Compiled in place into the loops that call it: for functions of many arrays, whose passing would cost more than
    the work. Of an `inner` function it makes a second, inlined one."""
    return cast(F, _njit(forceinline=True, **_OPTIONS)(getattr(f, "py_func", f)))


@intrinsic
def byte(typingctx, buf, at):  # type: ignore[no-untyped-def]
    """The byte at `at` as an int64; the caller has checked that it is there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.zext(builder.load(builder.gep(data, [args[1]])), ir.IntType(64))

    return types.int64(buf, types.int64), emit


@intrinsic
def word(typingctx, buf, at):  # type: ignore[no-untyped-def]
    """Eight bytes from `at` as a little-endian uint64; the caller has checked that they are there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(address)
        loaded.align = 1
        return loaded

    return types.uint64(buf, types.int64), emit


# Plain indexing checks the sign of an index first, to count from the end: a tenth of the time in the innermost loops.


@intrinsic
def cell(typingctx, table, row, column):  # type: ignore[no-untyped-def]
    """An int64 of a table with CELLS columns; the caller knows that it is there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        index = builder.add(builder.mul(args[1], ir.Constant(ir.IntType(64), CELLS)), args[2])
        return builder.load(builder.gep(data, [index]))

    return types.int64(table, types.int64, types.int64), emit


@intrinsic
def item(typingctx, numbers, at):  # type: ignore[no-untyped-def]
    """An int64 of an array; the caller knows that it is there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return types.int64(numbers, types.int64), emit


@intrinsic
def put(typingctx, numbers, at, number):  # type: ignore[no-untyped-def]
    """Write an int64 into an array; the caller knows that there is room."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store(args[2], builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64), emit


@intrinsic
def trailing_zeros(typingctx, x):  # type: ignore[no-untyped-def]
    """Of a uint64 that is not 0."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit


def _load_bytes(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: int) -> Any:
    """A vector of `count` bytes of a byte array from `at` on."""
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(8), count)
    loaded = builder.load(builder.bitcast(builder.gep(data, [at]), vector.as_pointer()))
    loaded.align = 1
    return loaded


def _fill_vector(byte: int, count: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(8), count), [byte] * count)


def _as_bits(builder: Any, flags: Any, count: int) -> Any:
    """A vector of flags as a uint64, the first in the lowest bit."""
    return builder.zext(builder.bitcast(flags, ir.IntType(count)), ir.IntType(64))


@intrinsic
def find_text_stops(typingctx, buf, at):  # type: ignore[no-untyped-def]
    """A bit for each of 32 bytes from `at`: a quote, a backslash, below 0x20 or not ASCII. The caller has checked that
    the bytes are there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        loaded = _load_bytes(context, builder, signature.args[0], args[0], args[1], 32)
        special = builder.icmp_signed(
            "<", loaded, _fill_vector(0x20, 32)
        )  # as a signed byte, none but ASCII is positive
        for byte in b'"\\':
            special = builder.or_(special, builder.icmp_signed("==", loaded, _fill_vector(byte, 32)))
        return _as_bits(builder, special, 32)

    return types.uint64(buf, types.int64), emit


@intrinsic
def find_digit_stops(typingctx, buf, at):  # type: ignore[no-untyped-def]
    """A bit for each of 16 bytes from `at` that is no digit. The caller has checked that the bytes are there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        loaded = _load_bytes(context, builder, signature.args[0], args[0], args[1], 16)
        values = builder.sub(loaded, _fill_vector(0x30, 16))
        return _as_bits(builder, builder.icmp_unsigned(">", values, _fill_vector(9, 16)), 16)

    return types.uint64(buf, types.int64), emit


@intrinsic
def find_differences(typingctx, one, one_at, other, other_at):  # type: ignore[no-untyped-def]
    """A bit for each of 32 bytes that differs. The caller has checked that the bytes are there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        first = _load_bytes(context, builder, signature.args[0], args[0], args[1], 32)
        second = _load_bytes(context, builder, signature.args[2], args[2], args[3], 32)
        return _as_bits(builder, builder.icmp_signed("!=", first, second), 32)

    return types.uint64(one, types.int64, other, types.int64), emit


@intrinsic
def prefetch(typingctx, buf, at):  # type: ignore[no-untyped-def]
    """Ask for the byte at `at`, and those around it, to be read soon; it need not be there."""

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        kind = ir.FunctionType(ir.VoidType(), [data.type, ir.IntType(32), ir.IntType(32), ir.IntType(32)])
        function = _function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, of_data = (ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))
        builder.call(function, [builder.gep(data, [args[1]]), read, keep, of_data])
        return context.get_dummy_value()

    return types.void(buf, types.int64), emit


@intrinsic
def _memcpy(typingctx, dst, dst_at, src, src_at, size):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target = context.make_array(signature.args[0])(context, builder, args[0])
        source = context.make_array(signature.args[2])(context, builder, args[2])
        to = builder.gep(target.data, [args[1]])
        fro = builder.gep(source.data, [args[3]])
        _raw_memcpy(builder, to, fro, args[4], 1)
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, types.int64), emit


@intrinsic
def _copy_sixteen(typingctx, dst, dst_at, src, src_at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        two = ir.VectorType(ir.IntType(64), 2).as_pointer()
        target = context.make_array(signature.args[0])(context, builder, args[0])
        source = context.make_array(signature.args[2])(context, builder, args[2])
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[3]]), two))
        loaded.align = 1
        stored = builder.store(loaded, builder.bitcast(builder.gep(target.data, [args[1]]), two))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64), emit


@inner
def copy(dst: Array, dst_at: int, src: Array, src_at: int, size: int) -> None:
    """`size` bytes, and up to 16 where both sides have them: what follows in `dst` is not yet written."""
    if size <= 16 and dst_at >= 0 and src_at >= 0 and dst_at + 16 <= dst.size and src_at + 16 <= src.size:
        _copy_sixteen(dst, dst_at, src, src_at)
        return
    # Callers have checked both ends; this stands between a mistake of theirs and memory.
    if size < 0 or dst_at < 0 or src_at < 0 or size > dst.size - dst_at or size > src.size - src_at:
        raise IndexError("copy outside of a buffer")
    _memcpy(dst, dst_at, src, src_at, size)


@inner
def clear(bitmap: Array, bit: int) -> None:
    bitmap[bit >> 3] &= np.uint8(0xFF ^ (1 << (bit & 7)))


@inner
def bit_of(bitmap: Array, bit: int) -> bool:
    return bool((bitmap[bit >> 3] >> (bit & 7)) & 1)
