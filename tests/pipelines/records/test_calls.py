"""Calls of compiled loops refuse arguments that their machine code would misread, and raise the errors of the loop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from sluice.pipelines.records.avro.loops import AvroTables
from sluice.pipelines.records.avro.loops import scan as scan_avro
from sluice.pipelines.records.columns.loops import mark_nulls, measure
from sluice.pipelines.records.compiled.take_rows import _copy_runs, _move_ends
from sluice.pipelines.records.json.fill import integers
from sluice.pipelines.records.slots.binary_loops import BlockResults

N = np.zeros(4, np.int64)
TABLE = np.zeros((2, 16), np.int64)
STATE = np.zeros(8, np.int64)
VALID = np.full(1, 255, np.uint8)


def freeze(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def make_unaligned(kind: type) -> Any:
    return np.zeros(65, np.uint8)[1:].view(kind)


@pytest.mark.parametrize(
    "argument",
    [
        N.astype(np.int32), N.astype(np.uint64), N.astype(np.float64), N.astype(bool), N.astype(">i8"), N[::2],
        N[::-1], TABLE, np.zeros((), np.int64), np.ma.array(N), N.tolist(), N.tobytes(), None, 7, freeze(N),
        make_unaligned(np.int64), np.array([object()]), N.view("m8[s]"), N.view("M8[us]"), (N,), memoryview(N),
    ],
)  # fmt: skip
def test_argument_other_than_expected_array_is_refused(argument: Any) -> None:
    with pytest.raises(TypeError, match="argument 1 of measure"):
        measure(argument)


@pytest.mark.parametrize("kind", [np.int64, np.longlong, np.intp])
def test_equal_types_with_other_names_are_accepted(kind: Any) -> None:
    assert measure(np.zeros(4, kind)) == 0


def test_read_argument_accepts_writable_and_read_only_arrays() -> None:
    for data in (
        np.arange(8, dtype=np.uint8),
        freeze(np.arange(8, dtype=np.uint8)),
        np.frombuffer(b"\0\1\2\3", np.uint8),
    ):
        out = np.zeros(2, np.uint8)
        _copy_runs(data, np.array([1]), np.array([2]), 1, out)
        assert out.tolist() == data[1:3].tolist()


@pytest.mark.parametrize("number", [0.5, "1", None, 1 << 63, -(1 << 63) - 1, N])
def test_invalid_number_argument_is_refused(number: Any) -> None:
    with pytest.raises(TypeError):
        mark_nulls(N, number, VALID, STATE)


@pytest.mark.parametrize("unsigned", [-1, 1 << 64])
def test_unsigned_argument_out_of_range_is_refused(unsigned: int) -> None:
    small, flags = np.zeros(1, np.int32), np.zeros(1, np.int8)
    with pytest.raises(TypeError):
        integers(VALID, N, 0, N, VALID, STATE, small, flags, unsigned, 1, 0)


@pytest.mark.parametrize("arguments", [(), (N,), (N, 0, VALID), (N, 0, VALID, STATE, STATE)])
def test_the_number_of_arguments_is_checked(arguments: Any) -> None:
    with pytest.raises(TypeError):
        mark_nulls(*arguments)


def test_class_and_arrays_of_named_tuple_argument_are_checked() -> None:
    kinds = (TABLE, N, N, N, TABLE, TABLE, N, N, VALID, N, N, N, N, N, N)
    numbers = np.zeros(8, np.int32)
    results = BlockResults(*[numbers] * 5)
    tables = AvroTables(*kinds)
    wrong = [
        tuple(tables), list(tables), results, tables._replace(**{AvroTables._fields[0]: N}),
        tables._replace(**{AvroTables._fields[8]: None}), tuple.__new__(AvroTables, kinds[:3]),
    ]  # fmt: skip
    for argument in wrong:
        with pytest.raises(TypeError, match="argument 5 of scan"):
            scan_avro(VALID, numbers, VALID, N, argument, results)


def test_error_raised_in_loop_is_propagated() -> None:
    with pytest.raises(IndexError, match=r"^a run outside of its column$"):
        _move_ends(np.zeros(2, np.int32), np.array([5]), np.array([1]), np.zeros(9, np.int32))
    with pytest.raises(IndexError, match=r"^copy outside of a buffer$"):
        _copy_runs(VALID, np.array([0]), np.array([99]), 1, np.zeros(9, np.uint8))


def test_concurrent_calls_return_correct_results() -> None:
    def call(size: int) -> None:
        spans = np.zeros(size, np.int64)
        expected = measure(spans)
        wrong.extend(size for _ in range(2000) if measure(spans) != expected)

    wrong: list[int] = []
    threads = [threading.Thread(target=call, args=(size,)) for size in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_importing_all_loops_imports_neither_numba_nor_llvmlite() -> None:
    script = """import sys
import sluice.pipelines.records.json.format, sluice.pipelines.records.avro.format
import sluice.pipelines.records.kafka_batches.decode, sluice.pipelines.records.kafka_batches.encode
print(*{"numba", "llvmlite"} & set(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"


def test_missing_library_is_an_error_with_its_remedy(tmp_path: Any) -> None:
    script = """from sluice.pipelines.errors import SetupError
try:
    import sluice.pipelines.records.json.counting
except SetupError as error:
    print(error.message, error.remedy)"""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert "no compiled loops for its sources and this processor" in done.stdout
    assert "make setup" in done.stdout
    assert not list(tmp_path.iterdir())
