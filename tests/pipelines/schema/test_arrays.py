"""Arrow arrays from NumPy and back, compared with Arrow's own conversion to Python."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.schema.arrays import as_mask, boolean_array


@given(st.lists(st.sampled_from([True, False, None])), st.integers(0, 20), st.booleans())
def test_masks_are_false_where_the_array_is_false_or_null(
    values: list[bool | None], start: int, is_chunked: bool
) -> None:
    array = pa.array(values, pa.bool_()).slice(start)
    expected = [value is True for value in values[start:]]
    mask = as_mask(pa.chunked_array([array, array], pa.bool_()) if is_chunked else array)
    assert mask.tolist() == expected * (2 if is_chunked else 1)
    assert boolean_array(mask).to_pylist() == mask.tolist()
