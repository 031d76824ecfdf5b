"""A fixed form matches exactly the texts that Arrow's automaton matches, or there is no fixed form."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.contract_rows.text_tables import LONGEST_FORM, fixed_form
from tests.examples import scale_examples

PLACES = st.sampled_from(
    ["a", "Z", "7", "_", "-", " ", ":", r"\.", r"\$", r"\d", "[0-9a-f]", "[A-z]", "[a-c_-]", "[x]"]
)
TIMES = st.sampled_from(["", "", "{0}", "{1}", "{3}"])
FORMS = st.lists(st.tuples(PLACES, TIMES).map("".join), min_size=1, max_size=6).map(lambda p: f"^{''.join(p)}$")


@st.composite
def generate_near_match(draw: st.DrawFn, regex: str) -> str | None:
    """Generate a text that matches, one that nearly matches, or neither."""
    text: str = draw(st.from_regex(regex, fullmatch=True, alphabet=st.characters(codec="utf-8")))
    at = draw(st.integers(0, len(text)))
    changed = text[:at] + draw(st.text(max_size=2)) + text[at + draw(st.integers(0, 1)) :]
    return draw(st.sampled_from([text, text, changed, changed, text + "\n", "", None]))


@settings(max_examples=scale_examples(200))
@given(st.data(), FORMS, st.integers(0, 3))
def test_fixed_form_matches_arrow_regex(data: st.DataObject, regex: str, start: int) -> None:
    form = fixed_form(regex)
    column = pa.array(data.draw(st.lists(generate_near_match(regex), max_size=20)), pa.string()).slice(start)
    if form is not None:
        assert form(column).to_pylist() == pc.match_substring_regex(column, regex).to_pylist()


@pytest.mark.parametrize("regex", [r"^o-[0-9]{10}-[0-9a-f]{6}$", r"^\d{4}-\d{2}$", "^[A-Z]{3}$", r"^a\.b$"])
def test_common_contract_regexes_have_a_fixed_form(regex: str) -> None:
    assert fixed_form(regex)


@pytest.mark.parametrize(
    "regex",
    ["", "^$", "^", "$", "a", "^a", "a$", "^a*$", "^a?$", "^a+$", "^a{1,2}$", "^a{,2}$", "^.$", "^(a)$", "^a|b$",
     r"^\w$", r"^\b$", r"^a\$", "^ä$", "^[ä]$", "^[^a]$", "^[[:alpha:]]$", "^[a\\d]$", "^[]$", "^[]a]$", "^{2}$",
     "^a{2}{3}$", "^a$$", "(?i)^a$", "^a{999}$", f"^a{{{LONGEST_FORM}}}b$"],
)  # fmt: skip
def test_other_regexes_have_no_fixed_form(regex: str) -> None:
    assert fixed_form(regex) is None
