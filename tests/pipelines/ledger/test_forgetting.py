"""The state forgets old batches, and answers every question as if it had forgotten none.

`former.json` was written by the code that forgot nothing: a log in which windows are merged, landed again and retired,
a publish entry is void, a batch changes hands, offset ranges fail; and its checkpoint. `former_3.json` is the
checkpoint of that log by the code that wrote format 3, with a memory of four batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State, batches, checkpoint, log
from sluice.pipelines.ledger.batches import FORGOTTEN, Batches
from sluice.pipelines.ledger.columns import NONE, Published, Superseded
from sluice.pipelines.ledger.entries import Entry, PublishEntry, parse
from sluice.pipelines.model.kafka import Range
from sluice.testing.lake import MemoryLake

FORMER = json.loads((Path(__file__).parent / "former.json").read_text())
LOG = [parse(json.dumps(e).encode(), "former.json") for e in FORMER["log"]]
KEPT = 4


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "KEPT", KEPT)


def fold_entries(entries: list[Entry], start: State | None = None) -> State:
    return (start or State()).extend(entries)


def fold_all(entries: list[Entry]) -> State:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "KEPT", len(LOG))
        return fold_entries(entries)


def make_ledger(checkpointed: bytes | None = None, number: int = 0) -> Ledger:
    lake = MemoryLake()
    for at, entry in enumerate(FORMER["log"]):
        lake.files[paths.log_path("orders", at)] = json.dumps(entry).encode()
    if checkpointed:
        lake.files[paths.checkpoint_path("orders", number)] = checkpointed
    return Ledger(lake, "orders", lambda: 0)


def collect_answers(state: State, of: Ledger) -> dict[str, Any]:
    """Returns the answers of a state to all questions that the code asks."""
    own = {f.name: getattr(state, f.name) for f in fields(state) if not f.name.startswith("_")}
    own |= {"batches": [of.recall(b) for b in state.batches.values()], "superseded": None, "replaced": None}
    publications = [(n, e) for n, e in enumerate(LOG[: state.number]) if isinstance(e, PublishEntry)]
    every = {p.path for _, e in publications for r in e.receipts for p in r.parts}
    own["counting"] = [[r.offset_range for r in state.receipts(n, e)] for n, e in publications]
    own["free"] = [
        [state.superseded.get(s.key, Superseded()).after(since, s.range) for since in range(0, len(LOG), 5)]
        for _, e in publications
        for s in (r.offset_range for r in e.receipts)
    ]
    remembered = state.batches
    own["lists"] = [
        [b.id for b in listed]
        for listed in (
            remembered.newest_first(),
            remembered.newest_first(60),
            remembered.published_since(40),
            remembered.failed_in_part(),
        )
    ]
    return own | {"replaced parts": of.list_replaced(every, state), "publications": remembered.publications()}


def fold_states() -> Iterator[tuple[int, State]]:
    state = State()
    for number, entry in enumerate(LOG, 1):
        yield number, (state := state.extend([entry]))


def test_compacted_state_answers_like_a_complete_one(short_memory: None) -> None:
    for number, state in fold_states():
        assert collect_answers(state, make_ledger()) == collect_answers(fold_all(LOG[:number]), make_ledger()), number
    assert [b.id for b in state.batches.values() if b.owner == FORGOTTEN][:2] == [3, 8]
    assert len(state.batches.held) == KEPT + 1, "and a live one"
    assert len(state.replaced) < len(fold_all(LOG).replaced)


def test_fold_is_the_same_from_any_checkpoint(short_memory: None) -> None:
    full = fold_entries(LOG)
    for number, state in fold_states():
        loaded = checkpoint.load(checkpoint.dump(state))
        assert loaded == state, number
        assert fold_entries(LOG[number:], loaded) == full, number
        assert checkpoint.dump(loaded) == checkpoint.dump(state), number


@pytest.mark.parametrize("format_", [None, *range(checkpoint.FORMAT), checkpoint.ERASED_FORMAT + 1])
def test_checkpoint_of_another_format_is_ignored(short_memory: None, format_: int | None) -> None:
    raw = json.loads(checkpoint.dump_state(fold_entries(LOG))) | {"format": format_}
    former = json.dumps(FORMER["checkpoint"] if format_ is None else raw).encode()
    assert checkpoint.load(former) is None
    assert make_ledger(former, len(LOG)).read() == fold_entries(LOG)


def test_checkpoint_with_a_damaged_column_is_ignored(short_memory: None) -> None:
    sound = json.loads(checkpoint.dump_state(fold_entries(LOG)))
    column_lists = [
        ("past", "columns"),
        ("superseded", "columns"),
        ("published_in", "columns"),
        ("boundaries", "columns"),
    ]
    for name, columns in column_lists:
        packed = sound[name][columns]
        for damaged in (
            packed[:-1],
            [*packed, packed[0]],
            [packed[0][:-8], *packed[1:]],
            [packed[0], "AAAA", *packed[2:]],
        ):
            assert checkpoint.load(json.dumps(sound | {name: sound[name] | {columns: damaged}}).encode()) is None


def test_batches_that_end_late_are_inserted_in_order(short_memory: None) -> None:
    done = [b for b in fold_all(LOG).batches.values() if b.plan is None]
    in_order = Batches(done)
    late = Batches()
    for b in done:
        late.plan(replace(b, status=batches.BatchStatus.PLANNED))
    for b in (*done[4:], *done[:4]):
        late.become(b)
    assert list(late) == list(in_order) == [b.id for b in done]
    assert late.past == in_order.past
    assert [b.id for b in late.newest_first()] == [b.id for b in done][::-1]


def test_superseded_parts_are_listed_for_any_range() -> None:
    pairs = [(3, Range(10, 20)), (5, Range(0, 100)), (7, Range(20, 30)), (9, Range(90, 120)), (9, Range(200, 201))]
    superseded = Superseded.of(pairs)
    for number in range(11):
        for start in range(0, 210, 3):
            for end in (start, start + 1, start + 7, 300):
                meant = any(at > number and r.meets(Range(start, end)) for at, r in pairs)
                assert superseded.after(number, Range(start, end)) == meant, (number, start, end)
    assert list(superseded.cover(11, [Range(0, 110)])) == [
        (9, Range(90, 120)),
        (9, Range(200, 201)),
        (11, Range(0, 110)),
    ]
    assert list(superseded) == pairs, "a value, never changed"


@pytest.mark.parametrize("short", [0, checkpoint.SHORT])
def test_columns_round_trip(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of any sign and size, with numpy and without."""
    monkeypatch.setattr(checkpoint, "SHORT", short)
    columns = [
        [],
        [0],
        [NONE],
        [1 << 62, NONE, -1, 0, NONE],
        list(range(1_000_000, 2_000_000, 977)),
        [5, 4, 3, -(1 << 40), 1 << 33],
        [255, 511, 767],
        [0, 1 << 32, 1 << 33],
        [0, (1 << 32) - 1],
    ]
    assert [c.tolist() for c in checkpoint.unpack_all(checkpoint.pack(columns), len(columns))] == columns


def test_publications_are_listed_by_window_and_by_entry() -> None:
    published = Published()
    assert not published
    for number, windows in ((3, [1, 2]), (5, [None]), (8, [2]), (9, [2, 7, None])):
        published = published.copy()
        published.add(number, windows)
    assert dict(published) == {None: (5, 9), 1: (3,), 2: (3, 8, 9), 7: (9,)}
    assert (published.get(6, ()), 6 in published, None in published, len(published)) == ((), False, True, 4)
    assert published.since(6) == {2, 7, None}
    assert published.every() == [3, 5, 8, 9]
    assert published == Published(published.windows, published.numbers) != Published([1], [3])
    with pytest.raises(ValueError, match="one entry"):
        Published([1], [])


def test_checkpoint_interval_grows_with_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 5)
    before = len(LOG) - 6
    for share, remaining in ((len(LOG), 2), (len(LOG) // 7, 1)):
        monkeypatch.setattr(log, "CHECKPOINT_SHARE", share)
        reader = make_ledger(checkpoint.dump(fold_entries(LOG[:before])), before)
        reader.read()
        assert len(list(reader.lake.list(paths.checkpoint_folder("orders")))) == remaining
