"""Whatever the bytes, nothing is read before or behind the values, and nothing written behind a buffer.

Values lie directly against pages that nobody may touch, and so does the room for what comes of them: one byte too far
ends the process.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.pipelines.typed import columns
from sluice.pipelines.typed.schema import parse_schema
from sluice.pipelines.typed.typer import Typer
from tests.pipelines.typed.test_properties import mutated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are guarded by Linux's own calls")

PAGE = 4096
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22
SCHEMA = parse_schema(
    {
        "id": "int64",
        "a": "string",
        "d": "decimal(20,3)",
        "t": "timestamp",
        "day": "date",
        "b": "binary",
        "f": "float64",
        "ok": "bool",
        "l": "list<struct<s:string, q:int8>>",
        "m": "map<string, string>",
        "j": "json",
        "n": {"x": "int32 not null"},
    }
)
RECORD = (
    '{"id":12345,"a":"h\\u00e9llo wörld","d":-123.45,"t":"2024-02-29T12:00:00.123+05:30","day":"2024-02-29",'
    '"b":"aGVs\\/G8=","f":1.5e10,"ok":true,"l":[{"s":"abc","q":1},null],"m":{"k":"v","k2":"\\n"},"j":[1,{"z":null}],'
    '"n":{"x":5},"zz":"extra"}'
).encode()


class Guarded:
    """Memory between two pages that nobody may touch."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        self._c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._held: list[tuple[int, int]] = []

    def room(self, size: int, *, at_end: bool = True) -> int:
        """The address of `size` bytes that end (or begin) where a guarded page begins (or ends)."""
        pages = -(-max(size, 1) // PAGE) * PAGE
        base = self._c.mmap(None, pages + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        assert self._c.mprotect(base, PAGE, 0) == 0
        assert self._c.mprotect(base + PAGE + pages, PAGE, 0) == 0
        self._held.append((base, pages + 2 * PAGE))
        return int(base + PAGE + (pages - size if at_end else 0))

    def buffer(self, n: int, kind: Any) -> np.ndarray:
        """What `columns.buffer` gives, as near to the edge as its alignment allows."""
        size = n * np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.room(size)), kind) if n else np.empty(0, kind)

    def free(self) -> None:
        for base, size in self._held:
            self._c.munmap(base, size)
        self._held = []


records = st.one_of(
    mutated(RECORD),
    st.integers(0, len(RECORD)).map(lambda n: RECORD[:n]),
    st.integers(0, len(RECORD)).map(lambda n: RECORD[n:]),
    st.just(RECORD),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, min_size=1, max_size=6), st.booleans())
def test_nothing_is_touched_beyond(monkeypatch: pytest.MonkeyPatch, values: list[bytes], at_end: bool) -> None:
    guarded = Guarded()
    monkeypatch.setattr(columns, "buffer", guarded.buffer)
    data = b"".join(values)
    place = guarded.room(len(data), at_end=at_end)
    ctypes.memmove(place, data, len(data))
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.foreign_buffer(place, len(data))]
    (piece,) = Typer(SCHEMA).pieces(pa.Array.from_buffers(pa.binary(), len(values), buffers))
    assert len(piece.rows) + len(piece.refused.rows) == len(values)
    for array in piece.arrays:
        array.validate(full=True)
    del piece
    guarded.free()
