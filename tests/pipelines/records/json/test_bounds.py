"""For any bytes, nothing is read before or behind the values, and nothing is written behind a buffer.

Values and output buffers lie next to inaccessible pages: one byte too far ends the process.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.columns import builders
from sluice.pipelines.records.json.typer import Typer
from sluice.pipelines.schema.schema import Schema, parse_schema
from tests.examples import scale_examples
from tests.guarded import Guarded
from tests.pipelines.records.json.test_properties import mutate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are guarded by Linux's own calls")

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


GUARDED = Guarded()

records = st.one_of(
    mutate(RECORD),
    st.integers(0, len(RECORD)).map(lambda n: RECORD[:n]),
    st.integers(0, len(RECORD)).map(lambda n: RECORD[n:]),
    st.just(RECORD),
)


FLAT = parse_schema({"id": "int64", "a": "string", "d": "decimal(20,3)", "t": "timestamp", "n": {"x": "int32"}})
ALIKE = b'{"id":12345,"a":"hello world","d":-123.45,"t":"2024-02-29T12:00:00.123Z","n":{"x":5}}'
alike = st.one_of(st.just(ALIKE), st.just(ALIKE), mutate(ALIKE), st.integers(0, len(ALIKE)).map(lambda n: ALIKE[:n]))


@pytest.mark.parametrize(
    ("schema", "records"),
    [(SCHEMA, st.lists(records, min_size=1, max_size=6)), (FLAT, st.lists(alike, min_size=4, max_size=20))],
    ids=["lists and maps", "read by a template"],
)
@settings(
    max_examples=scale_examples(300), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(chosen=st.data(), at_end=st.booleans())
def test_nothing_is_accessed_beyond_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
    schema: Schema,
    records: st.SearchStrategy[list[bytes]],
    chosen: st.DataObject,
    at_end: bool,
) -> None:
    values = chosen.draw(records)
    monkeypatch.setattr(builders, "allocate", GUARDED.allocate_items)
    data = GUARDED.fill(b"".join(values), at_end=at_end)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    (piece,) = Typer(schema).pieces(pa.Array.from_buffers(pa.binary(), len(values), buffers))
    assert len(piece.rows) + len(piece.refused.rows) == len(values)
    for array in piece.arrays:
        array.validate(full=True)
    del array, piece
    GUARDED.free()
