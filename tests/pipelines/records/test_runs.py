"""Rows taken as runs equal rows taken one by one."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.compiled.take_rows import LEAST_RUN, take_rows
from tests.examples import scale_examples

N = 1000
TEXTS = [str(i) * (i % 3) for i in range(N)]
SOME: list[Any] = [None if i % 7 == 0 else i for i in range(N)]
COLUMNS = {
    "int64": pa.array(range(N), pa.int64()),
    "int8": pa.array([i % 100 for i in range(N)], pa.int8()),
    "nulls": pa.array(SOME, pa.int32()),
    "only_nulls": pa.array([None] * N, pa.string()),
    "bool": pa.array([i % 3 == 0 for i in range(N)]),
    "bool_nulls": pa.array([None if i % 5 == 0 else i % 3 == 0 for i in range(N)]),
    "float": pa.array([i / 3 for i in range(N)]),
    "decimal": pa.array([Decimal(i) / 100 for i in range(N)], pa.decimal128(12, 2)),
    "large_decimal": pa.array([Decimal(i) for i in range(N)], pa.decimal256(50, 0)),
    "time": pa.array(range(N), pa.timestamp("us", "UTC")),
    "date": pa.array(range(N), pa.date32()),
    "fixed": pa.array([b"%04d" % i for i in range(N)], pa.binary(4)),
    "text": pa.array(TEXTS),
    "bytes": pa.array([t.encode() if i % 4 else None for i, t in enumerate(TEXTS)], pa.binary()),
    "large_text": pa.array(TEXTS, pa.large_string()),
    "few": pa.array([f"v{i % 3}" for i in range(N)]).dictionary_encode(),
    "few_nulls": pa.array([None if i % 6 == 0 else f"v{i % 3}" for i in range(N)]).dictionary_encode(),
    "list": pa.array([[i] * (i % 4) if i % 9 else None for i in range(N)], pa.list_(pa.int32())),
    "struct": pa.array([{"a": i, "b": TEXTS[i]} if i % 8 else None for i in range(N)]),
    "headers": pa.array([[{"key": "k", "value": t.encode()}] * (i % 2) for i, t in enumerate(TEXTS)]),
    "map": pa.array([[("k", i)] * (i % 3) for i in range(N)], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(N),
}


@settings(max_examples=scale_examples(60))
@given(st.lists(st.integers(0, N - 1), max_size=30), st.integers(0, 70), st.sampled_from([1, 1, 1, 3, 700]))
def test_take_rows_returns_rows_at_positions(left_out: list[int], start: int, every: int) -> None:
    rows = pa.RecordBatch.from_pydict(COLUMNS).slice(start)
    positions = np.setdiff1d(np.arange(0, rows.num_rows, every), left_out)
    chosen = take_rows(rows, positions)
    chosen.validate(full=True)
    assert chosen.equals(rows.take(pa.array(positions, pa.int64())), check_metadata=True)


@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_of_each_type_are_taken_as_runs(kind: str) -> None:
    rows = pa.RecordBatch.from_arrays([COLUMNS[kind]], ["c"]).slice(3)
    positions = np.array([*range(LEAST_RUN * 2), *range(LEAST_RUN * 3, LEAST_RUN * 6)])
    assert take_rows(rows, positions)["c"].to_pylist() == [rows["c"][i].as_py() for i in positions.tolist()]


def test_empty_positions_return_no_rows() -> None:
    rows = pa.RecordBatch.from_pydict(COLUMNS)
    assert take_rows(rows, np.empty(0, np.int64)).num_rows == 0
