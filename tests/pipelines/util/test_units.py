"""Numbers of things as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.util.units import join_first, show_float
from tests.examples import scale_examples


def test_list_is_cut_after_the_limit_and_counts_the_others() -> None:
    assert join_first([], 2) == ""
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first((n for n in range(1_003)), 2) == "0, 1 and 1,001 more"
    assert join_first("abc", 1, " … {:,} more", between="; ") == "a … 2 more"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (8.5e-05, 0, "0.000085"),
        (-1.5e-12, 0, "-1.5 × 10⁻¹²"),
        (99_999.6, 4, "100,000"),
        (1234.5, 15, "1,234.5"),
        (1e300, 3, "1 × 10³⁰⁰"),
        (0.0, 4, "0"),
    ],
)
def test_floats_have_no_exponents(value: float, digits: int, text: str) -> None:
    assert show_float(value, digits) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=scale_examples(150))
def test_text_of_a_float_is_the_same_number(value: float) -> None:
    text = show_float(value)
    assert "e" not in text
    digits, _, power = text.replace(",", "").partition(" × 10")
    plain = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or "0"
    assert float(f"{digits}e{plain}") == value
