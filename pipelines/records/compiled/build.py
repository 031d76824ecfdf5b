"""Builds the loops: numba compiles the entry points of one module into an object file that needs no Python.

    python -m sluice.pipelines.records.compiled.build json.scan OBJECT TARGET

The object exports one C function for each entry point: `loop.py` calls it. It checks the arguments as numba's own
dispatcher does, and reads the arrays in place:

    int64_t f(PyObject *arguments, const int64_t *layout, const int64_t *numbers, int64_t *results)

`arguments` is the tuple of the call. `layout`: the sizes of `object` and `tuple`, the address of NumPy's array type,
then that of each named tuple's class. `numbers`: the call's numbers. Returns 0, or 1 + the position of an argument that
does not fit, or the address of numba's constant for a raised exception. The structs of arrays are NumPy's stable ABI
(`PyArrayObject_fields`, and the first fields of `PyArray_Descr`).

With NUMBA_BOUNDSCHECK=1, loads and stores by address are checked as well.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.np import arrayobj

import sluice.pipelines.records.compiled.jit as jit
from sluice.pipelines.records.compiled.jit import CELLS, Array
from sluice.pipelines.records.compiled.library import PACKAGE
from sluice.pipelines.records.compiled.loop import Argument, Arrays, Number, Numbers

types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
_njit: Any = numba.njit
_raw_memcpy: Any = cgutils.raw_memcpy
_function: Any = cgutils.get_or_insert_function
_populate_array: Any = arrayobj.populate_array
_unpack_tuple: Any = cgutils.unpack_tuple

# Callers hold the arrays and nothing is allocated here: counting references would take ten times as long as the work.
_OPTIONS = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compile_inner(f: Any) -> Any:
    return _njit(**_OPTIONS)(f)


def compile_inlined(f: Any) -> Any:
    return _njit(forceinline=True, **_OPTIONS)(getattr(f, "py_func", f))


# -- the functions of `jit`


@intrinsic
def load_byte(typingctx, buf, at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.zext(builder.load(builder.gep(data, [args[1]])), ir.IntType(64))

    return types.int64(buf, types.int64), emit


@intrinsic
def load_word(typingctx, buf, at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(address)
        loaded.align = 1
        return loaded

    return types.uint64(buf, types.int64), emit


@intrinsic
def load_cell(typingctx, table, row, column):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        index = builder.add(builder.mul(args[1], ir.Constant(ir.IntType(64), CELLS)), args[2])
        return builder.load(builder.gep(data, [index]))

    return types.int64(table, types.int64, types.int64), emit


@intrinsic
def load_item(typingctx, numbers, at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return types.int64(numbers, types.int64), emit


@intrinsic
def store_item(typingctx, numbers, at, number):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store(args[2], builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64), emit


@intrinsic
def count_trailing_zeros(typingctx, x):  # type: ignore[no-untyped-def]
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
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        loaded = _load_bytes(context, builder, signature.args[0], args[0], args[1], 32)
        # As signed bytes, those beyond ASCII are negative.
        special = builder.icmp_signed("<", loaded, _fill_vector(0x20, 32))
        for byte in b'"\\':
            special = builder.or_(special, builder.icmp_signed("==", loaded, _fill_vector(byte, 32)))
        return _as_bits(builder, special, 32)

    return types.uint64(buf, types.int64), emit


@intrinsic
def find_digit_stops(typingctx, buf, at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        loaded = _load_bytes(context, builder, signature.args[0], args[0], args[1], 16)
        values = builder.sub(loaded, _fill_vector(0x30, 16))
        return _as_bits(builder, builder.icmp_unsigned(">", values, _fill_vector(9, 16)), 16)

    return types.uint64(buf, types.int64), emit


@intrinsic
def find_differences(typingctx, one, one_at, other, other_at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        first = _load_bytes(context, builder, signature.args[0], args[0], args[1], 32)
        second = _load_bytes(context, builder, signature.args[2], args[2], args[3], 32)
        return _as_bits(builder, builder.icmp_signed("!=", first, second), 32)

    return types.uint64(one, types.int64, other, types.int64), emit


@intrinsic
def find_byte(typingctx, buf, at, wanted):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        loaded, lane = _load_bytes(context, builder, signature.args[0], args[0], args[1], 32), ir.IntType(32)
        one = builder.insert_element(_fill_vector(0, 32), builder.trunc(args[2], ir.IntType(8)), lane(0))
        all_ = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(lane, 32), [0] * 32))
        return _as_bits(builder, builder.icmp_signed("==", loaded, all_), 32)

    return types.uint64(buf, types.int64, types.int64), emit


@intrinsic
def keep_branch(typingctx, number):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.asm(kind, "", "=r,0", [args[0]], True)

    return types.int64(types.int64), emit


@intrinsic
def prefetch(typingctx, buf, at):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        kind = ir.FunctionType(ir.VoidType(), [data.type, ir.IntType(32), ir.IntType(32), ir.IntType(32)])
        function = _function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, of_data = (ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))
        builder.call(function, [builder.gep(data, [args[1]]), read, keep, of_data])
        return context.get_dummy_value()

    return types.void(buf, types.int64), emit


@intrinsic
def _copy_bytes(typingctx, dst, dst_at, src, src_at, size):  # type: ignore[no-untyped-def]
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


def copy(dst: Array, dst_at: int, src: Array, src_at: int, size: int) -> None:
    if size <= 16 and dst_at >= 0 and src_at >= 0 and dst_at + 16 <= dst.size and src_at + 16 <= src.size:
        _copy_sixteen(dst, dst_at, src, src_at)
        return
    # Callers have checked both ends; this stands between a mistake of theirs and memory.
    if size < 0 or dst_at < 0 or src_at < 0 or size > dst.size - dst_at or size > src.size - src_at:
        raise IndexError("copy outside of a buffer")
    _copy_bytes(dst, dst_at, src, src_at, size)


def check_byte(buf: Array, at: int) -> int:
    if at < 0 or at >= buf.size:
        raise IndexError("a byte outside")
    return load_byte(buf, at)  # type: ignore[no-any-return]


def check_word(buf: Array, at: int) -> int:
    if at < 0 or at + 8 > buf.size:
        raise IndexError("a word outside")
    return load_word(buf, at)  # type: ignore[no-any-return]


def check_cell(table: Array, row: int, column: int) -> int:
    if row < 0 or row >= table.shape[0] or column < 0 or column >= CELLS:
        raise IndexError("a cell outside")
    return load_cell(table, row, column)  # type: ignore[no-any-return]


def check_item(numbers: Array, at: int) -> int:
    if at < 0 or at >= numbers.size:
        raise IndexError("an item outside")
    return load_item(numbers, at)  # type: ignore[no-any-return]


def check_put(numbers: Array, at: int, number: int) -> None:
    if at < 0 or at >= numbers.size:
        raise IndexError("an item outside")
    store_item(numbers, at, number)


# -- entry points

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_TYPE_NUMBERS = {
    "int8": (1,), "uint8": (2,), "int32": (5,), "int64": (7, 9), "uint64": (8, 10), "float64": (12,),
}  # fmt: skip
"""NumPy's numbers of types: `long` and `long long` are both int64."""
_CONTIGUOUS_ALIGNED, _WRITEABLE = 0x101, 0x400
_BIG_ENDIAN = ord(">")


def _get_numba_type(argument: Argument) -> Any:
    if isinstance(argument, Number):
        return getattr(types, argument.name)
    if isinstance(argument, Numbers):
        return types.Array(getattr(types, argument.item), argument.dims, "C", readonly=argument.readonly)
    return types.NamedTuple([_get_numba_type(a) for a in argument.items], argument.cls)


class _Entry:
    """The C function of one entry point."""

    def __init__(self, context: Any, function: ir.Function) -> None:
        self._context = context
        self._arguments, self._layout, self._numbers, self._results = function.args
        self._builder = ir.IRBuilder(function.append_basic_block())
        self._head, self._items, self._array_type = (self._load(self._layout, 8 * i, _I64) for i in range(3))
        self._classes = self._taken = 0

    def emit(self, callee: Any, kinds: Sequence[Any], result: Any, arguments: tuple[Argument, ...]) -> None:
        builder, call = self._builder, self._context.call_conv
        self._check(self._load(self._skip_head(self._arguments), 0, _I64), len(arguments), len(arguments))
        values = []
        for i, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
            actual = self._load(self._find_item(self._arguments, i), 0, _I8.as_pointer())
            values.append(self._emit_value(argument, kind, actual, i))
        status, returned = call.call_function(builder, callee, result, kinds, values)
        with builder.if_then(status.is_error, likely=False):
            builder.ret(builder.ptrtoint(status.excinfoptr, _I64))
        if isinstance(result, types.UniTuple):
            self._store(_unpack_tuple(builder, returned))
        elif result is not types.void:
            self._store([returned])
        builder.ret(_I64(0))

    def _emit_value(self, argument: Argument, kind: Any, actual: Any, position: int) -> Any:
        if isinstance(argument, Numbers):
            return self._emit_array(argument, kind, actual, position)
        if isinstance(argument, Arrays):
            cls = self._load(self._layout, 8 * (3 + self._classes), _I64)
            self._classes += 1
            self._check(self._load_type(actual), cls, position)
            self._check(self._load(self._skip_head(actual), 0, _I64), len(argument.items), position)
            items = [self._load(self._find_item(actual, i), 0, _I8.as_pointer()) for i in range(len(argument.items))]
            parts = zip(argument.items, kind.types, items, strict=True)
            return self._context.make_tuple(self._builder, kind, [self._emit_array(*part, position) for part in parts])
        number = self._load(self._numbers, 8 * self._taken, _I64)
        self._taken += 1
        return self._builder.icmp_signed("!=", number, _I64(0)) if kind is types.boolean else number

    def _emit_array(self, argument: Numbers, kind: Any, actual: Any, position: int) -> Any:
        """Return the struct of an array that must have this type."""
        builder, head = self._builder, self._skip_head(actual)
        self._check(self._load_type(actual), self._array_type, position)
        self._check(self._load(head, 8, _I32), argument.dims, position)
        needed = _I32(_CONTIGUOUS_ALIGNED | (0 if argument.readonly else _WRITEABLE))
        self._check(builder.and_(self._load(head, 48, _I32), needed), needed, position)
        described = self._skip_head(self._load(head, 40, _I8.as_pointer()))
        number = self._load(described, 12, _I32)
        same = [builder.icmp_signed("==", number, _I32(n)) for n in _TYPE_NUMBERS[argument.item]]
        native = builder.icmp_signed("!=", self._load(described, 10, _I8), _I8(_BIG_ENDIAN))
        self._require(builder.and_(builder.or_(same[0], same[-1]), native), position)
        dims = self._load(head, 16, _I8.as_pointer())
        shape = [self._load(dims, 8 * d, _I64) for d in range(argument.dims)]
        item_bytes = _I64(kind.dtype.bitwidth // 8)
        strides = [item_bytes]
        for size in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        array = self._context.make_array(kind)(self._context, builder)
        data = builder.bitcast(self._load(head, 0, _I8.as_pointer()), array.data.type)
        _populate_array(array, data=data, shape=shape, strides=strides, itemsize=item_bytes, meminfo=None)
        return array._getvalue()

    def _load_type(self, actual: Any) -> Any:
        return self._load(self._builder.gep(self._skip_head(actual), [_I64(-8)]), 0, _I64)

    def _skip_head(self, actual: Any) -> Any:
        """The address behind an object's count of references and type."""
        return self._builder.gep(actual, [self._head])

    def _find_item(self, actual: Any, index: int) -> Any:
        return self._builder.gep(self._builder.gep(actual, [self._items]), [_I64(8 * index)])

    def _load(self, address: Any, offset: int, kind: Any) -> Any:
        item = self._builder.gep(address, [_I64(offset)])
        return self._builder.load(self._builder.bitcast(item, kind.as_pointer()))

    def _store(self, numbers: Sequence[Any]) -> None:
        for i, number in enumerate(numbers):
            item = self._builder.gep(self._results, [_I64(8 * i)])
            self._builder.store(number, self._builder.bitcast(item, _I64.as_pointer()))

    def _check(self, actual: Any, expected: Any, position: int) -> None:
        constant = actual.type(expected) if isinstance(expected, int) else expected
        self._require(self._builder.icmp_signed("==", actual, constant), position)

    def _require(self, truth: Any, position: int) -> None:
        with self._builder.if_then(self._builder.not_(truth), likely=False):
            self._builder.ret(_I64(1 + position))


class _Share:
    """The entry points of one module. They are compiled while it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bitcode: dict[str, bytes] = {}
        self._codegen: Any = None

    def compile_entry(self, *arguments: Argument, results: int = 0) -> Callable[[Any], Any]:
        """Stands in for `jit.compiled`. Compiles none of the modules that the share imports."""

        def compile(f: Any) -> Any:
            if f.__module__ == f"{PACKAGE}.{self._name}":
                self._add(f, arguments, results)
            return f

        return compile

    def _add(self, f: Any, arguments: tuple[Argument, ...], results: int) -> None:
        result = types.UniTuple(types.int64, results) if results > 1 else types.int64 if results else types.void
        loop = compile_inner(f)
        loop.compile(result(*(_get_numba_type(a) for a in arguments)))
        (compiled,) = loop.overloads.values()
        context, self._codegen = compiled.target_context, compiled.library.codegen
        name = f"{self._name}.{f.__name__}"
        library = self._codegen.create_library(name)
        module = library.create_ir_module(name)
        pointer = _I8.as_pointer()
        entry = ir.Function(module, ir.FunctionType(_I64, [pointer] * 4), name)
        callee = context.declare_function(module, compiled.fndesc)
        _Entry(context, entry).emit(callee, compiled.signature.args, compiled.signature.return_type, arguments)
        library.add_linking_library(compiled.library)
        library.add_ir_module(module)
        library.finalize()
        self._bitcode[name] = library._final_module.as_bitcode()

    def emit_object(self) -> bytes:
        """Return one object file of all entry points."""
        triple, processor, features = self._codegen.magic_tuple()
        machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=processor, features=features, opt=3, reloc="pic", codemodel="default"
        )
        module, *others = (llvm.parse_bitcode(code) for code in self._bitcode.values())
        for other in others:
            module.link_in(other)
        for symbol in (*module.functions, *module.global_variables):
            if not symbol.is_declaration and symbol.name not in self._bitcode:
                symbol.linkage = "internal"
        return bytes(machine.emit_object(module))


def main(name: str, path: Path, target: str) -> None:
    """Write the object file of one module's entry points, or nothing."""
    settings: Any = numba.config
    if settings.CPU_NAME is None and not settings.CPU_FEATURES:
        settings.CPU_NAME, settings.CPU_FEATURES = target, ""  # before a first function makes numba's code generator
    share = _Share(name)
    functions = {"byte": load_byte, "word": load_word, "cell": load_cell, "item": load_item, "put": store_item}
    if settings.BOUNDSCHECK:
        checks = {"byte": check_byte, "word": check_word, "cell": check_cell, "item": check_item, "put": check_put}
        functions = {n: compile_inner(f) for n, f in checks.items()}
    shared = {f.__name__: compile_inner(f) for f in (copy, jit.clear, jit.bit_of)}
    vars(jit).update(
        functions | shared, trailing_zeros=count_trailing_zeros, keep_branch=keep_branch, prefetch=prefetch
    )
    vars(jit).update({f.__name__: f for f in (find_text_stops, find_digit_stops, find_differences, find_byte)})
    vars(jit).update(compiled=share.compile_entry, inner=compile_inner, inlined=compile_inlined)
    with global_compiler_lock:
        importlib.import_module(f"{PACKAGE}.{name}")
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(share.emit_object())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
