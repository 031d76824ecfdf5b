"""A table of short texts contains exactly the texts of Arrow's hash table, or there is no table."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.contract_rows.text_tables import LONGEST, short_set
from tests.examples import scale_examples

SHORT = st.binary(max_size=LONGEST).filter(lambda b: b.isascii()).map(bytes.decode) | st.sampled_from(
    ["", "\0", "a", "a\0", "EUR", "EURO", "12345678", "ä", "日本"]
)


@settings(max_examples=scale_examples(200))
@given(st.data(), st.lists(SHORT, min_size=1, max_size=64, unique=True), st.integers(0, 3))
def test_text_table_matches_arrow_is_in(data: st.DataObject, members: list[str], start: int) -> None:
    near = st.none() | st.sampled_from(members) | st.sampled_from(members).map(lambda t: t + "\0") | st.text(max_size=9)
    column = pa.array(data.draw(st.lists(near, max_size=20)), pa.string()).slice(start)
    allowed = pa.array(members, pa.string())
    among = short_set(allowed)
    if among is not None:
        assert among(column).to_pylist() == pc.is_in(column, allowed).to_pylist()


@pytest.mark.parametrize("count", [1, 5, 64])
def test_common_text_sets_have_a_table(count: int) -> None:
    assert short_set(pa.array([f"c-{i:02d}" for i in range(count)]))


@pytest.mark.parametrize(
    "members",
    [[], ["123456789"], ["a", None], ["a", "a\0"], [f"{i:02d}" for i in range(65)]],
    ids=["none", "long", "null", "alike", "many"],
)
def test_unsuitable_text_sets_have_no_table(members: list[str | None]) -> None:
    assert short_set(pa.array(members, pa.string())) is None


def test_number_sets_have_no_table() -> None:
    assert short_set(pa.array([1, 2])) is None
