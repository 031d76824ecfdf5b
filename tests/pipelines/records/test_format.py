"""Rows are chosen as whole runs or one by one: the same rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.schema.arrays import take_rows


@settings(deadline=None)
@given(st.lists(st.integers(0, 999), max_size=8), st.sampled_from([1, 3, 700]))
def test_chosen_rows_are_those_that_were_asked_for(left_out: list[int], every: int) -> None:
    rows = pa.RecordBatch.from_pydict({"n": list(range(1000)), "t": [str(i) * (i % 3) for i in range(1000)]})
    places = np.setdiff1d(np.arange(0, 1000, every), left_out)
    found = take_rows(rows, places)
    assert found["n"].to_pylist() == places.tolist()
    assert found["t"].to_pylist() == [str(i) * (i % 3) for i in places.tolist()]
