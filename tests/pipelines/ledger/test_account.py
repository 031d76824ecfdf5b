"""Offsets by class: an account has those of its range only, and the accounts of pieces add up to the whole."""

from __future__ import annotations

from functools import reduce
from operator import add

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.account import OffsetAccount, OffsetClass, build_account, list_unread
from sluice.pipelines.model.kafka import Key, Range, cut
from sluice.pipelines.model.receipts import Counts
from tests.examples import scale_examples

KEY, OTHER = Key("orders", 0, "id"), Key("orders", 1, "id")
END = 60


@st.composite
def draw_state(draw: st.DrawFn) -> State:
    """A partition whose offsets are in one class each: landed or pending, lost, skipped, retired."""
    bounds = draw(st.lists(st.integers(1, END - 1), unique=True, max_size=8))
    classes: dict[int, list[Range]] = {n: [] for n in range(4)}
    for piece in cut(Range(0, END), bounds):
        classes[draw(st.integers(0, 3))].append(piece)
    lost, skipped, retired = ({KEY: tuple(classes[n])} for n in (1, 2, 3))
    return State(lost=lost, skipped=skipped, retired=retired)


@settings(max_examples=scale_examples(150))
@given(draw_state(), st.lists(st.integers(1, END - 1), unique=True, max_size=5))
def test_accounts_of_pieces_add_up_to_the_partition(state: State, bounds: list[int]) -> None:
    pieces = [build_account(state, KEY, Counts(landed=1), piece) for piece in cut(Range(0, END), bounds)]
    assert reduce(add, pieces) == build_account(state, KEY, Counts(landed=len(pieces)))
    assert build_account(state, OTHER, Counts()).total == 0


@settings(max_examples=scale_examples(150))
@given(draw_state(), st.integers(0, END - 1))
def test_an_offset_without_a_receipt_is_in_one_class_at_most(state: State, offset: int) -> None:
    names = [name for name, ranges in list_unread(state, KEY).items() if any(r.start <= offset < r.end for r in ranges)]
    account = build_account(state, KEY, Counts(), Range(offset, offset + 1))
    assert account.total == len(names) <= 1
    expected = {OffsetClass.LOST: account.lost, OffsetClass.SKIPPED: account.skipped,
                OffsetClass.RETIRED: account.retired}  # fmt: skip
    assert [name for name, count in expected.items() if count] == names


def test_a_range_of_unknown_bounds_has_receipts_only() -> None:
    state = State(lost={KEY: (Range(0, 9),)})
    assert build_account(state, KEY, Counts(landed=2, control=1), Range(0, 0)) == OffsetAccount(
        Counts(landed=2, control=1)
    )
