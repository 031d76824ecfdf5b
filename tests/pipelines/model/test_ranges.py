"""Range arithmetic against sets of integers."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.model.kafka import Range, cut, find_contiguous_end, intersect, is_covered, subtract, union
from sluice.pipelines.records.rows.row_format import inside

ranges = st.builds(lambda a, n: Range(a, a + n), st.integers(0, 40), st.integers(0, 12))
many = st.lists(ranges, max_size=8)


def list_offsets(rs: list[Range] | tuple[Range, ...]) -> set[int]:
    return {o for r in rs for o in range(r.start, r.end)}


def is_tidy(rs: tuple[Range, ...]) -> bool:
    return all(r.start < r.end for r in rs) and all(a.end < b.start for a, b in itertools.pairwise(rs))


@given(many)
def test_union_keeps_offsets_and_merges_adjacent_ranges(rs: list[Range]) -> None:
    assert list_offsets(union(rs)) == list_offsets(rs)
    assert is_tidy(union(rs))


@given(ranges, many)
def test_subtract_removes_taken_offsets(wanted: Range, taken: list[Range]) -> None:
    remaining = subtract(wanted, taken)
    assert list_offsets(remaining) == list_offsets([wanted]) - list_offsets(taken)
    assert is_tidy(remaining)
    assert is_covered(taken, wanted) == (not remaining)


@given(many, ranges)
def test_intersect_keeps_common_offsets(rs: list[Range], bound: Range) -> None:
    assert list_offsets(intersect(rs, bound)) == list_offsets(rs) & list_offsets([bound])


@given(many, st.lists(st.integers(0, 60)))
def test_inside_matches_offsets_of_the_ranges(rs: list[Range], at: list[int]) -> None:
    offset_array = np.array(at, np.int64)
    assert inside(offset_array, rs).tolist() == [o in list_offsets(rs) for o in at]
    assert inside(offset_array, [*rs, Range(50, 1 << 80)]).tolist() == [o in list_offsets(rs) or o >= 50 for o in at]


@given(st.integers(0, 50), many)
def test_contiguous_end_is_the_first_missing_offset(start: int, rs: list[Range]) -> None:
    end = find_contiguous_end(start, rs)
    assert set(range(start, end)) <= list_offsets(rs)
    assert end not in list_offsets(rs)


@given(ranges, st.lists(st.integers(0, 60)))
def test_cut_pieces_tile_the_range(r: Range, at: list[int]) -> None:
    pieces = cut(r, at)
    assert list_offsets(pieces) == list_offsets([r])
    assert all(a.end == b.start for a, b in itertools.pairwise(pieces))
    assert {p.start for p in pieces[1:]} == {x for x in at if r.start < x < r.end}
