"""Numbers of things as people write them."""

from __future__ import annotations

from sluice.pipelines.util.units import join_first


def test_list_is_cut_after_the_limit_and_counts_the_others() -> None:
    assert join_first([], 2) == ""
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first((n for n in range(1_003)), 2) == "0, 1 and 1,001 more"
    assert join_first("abc", 1, " … {:,} more", between="; ") == "a … 2 more"
