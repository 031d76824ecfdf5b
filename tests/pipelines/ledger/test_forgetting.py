"""What the state forgets of the past, and that every answer is the one it would give if it forgot nothing.

`former.json` was written by the code that forgot nothing: a log in which windows are merged, landed again and retired,
a publish entry is void, a batch changes hands, offset ranges fail; and its checkpoint. `former_3.json` is the
checkpoint of that log by the code that wrote format 3, with a memory of four batches.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State, batches, checkpoint, log
from sluice.pipelines.ledger.batches import FORGOTTEN, Batches
from sluice.pipelines.ledger.columns import NONE, Published, Superseded, pack, unpack, unpack_all
from sluice.pipelines.ledger.entries import Entry, PublishEntry, parse
from sluice.pipelines.model.kafka import Range
from sluice.testing.lake import MemoryLake

FORMER = json.loads((Path(__file__).parent / "former.json").read_text())
LOG = [parse(json.dumps(e).encode(), "former.json") for e in FORMER["log"]]
KEPT = 4


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "KEPT", KEPT)


def fold(entries: list[Entry], begun: State | None = None) -> State:
    return (begun or State()).extend(entries)


def knowing_all(entries: list[Entry]) -> State:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "KEPT", len(LOG))
        return fold(entries)


def ledger(checkpointed: bytes | None = None, number: int = 0) -> Ledger:
    lake = MemoryLake()
    for at, entry in enumerate(FORMER["log"]):
        lake.files[paths.log_path("orders", at)] = json.dumps(entry).encode()
    if checkpointed:
        lake.files[paths.checkpoint_path("orders", number)] = checkpointed
    return Ledger(lake, "orders", lambda: 0)


def answers(state: State, of: Ledger) -> dict[str, Any]:
    """Everything that is asked of a state, whole."""
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
    asked = state.batches
    own["lists"] = [
        [b.id for b in some]
        for some in (asked.newest_first(), asked.newest_first(60), asked.published_since(40), asked.failed_in_part())
    ]
    return own | {"replaced parts": of.list_replaced(every, state), "publications": asked.publications()}


def states() -> Iterator[tuple[int, State]]:
    state = State()
    for number, entry in enumerate(LOG, 1):
        yield number, (state := state.extend([entry]))


def test_every_answer_is_that_of_a_state_that_forgot_nothing(short_memory: None) -> None:
    for number, state in states():
        assert answers(state, ledger()) == answers(knowing_all(LOG[:number]), ledger()), number
    assert [b.id for b in state.batches.values() if b.owner == FORGOTTEN][:2] == [3, 8]
    assert len(state.batches.held) == KEPT + 1, "and a live one"
    assert len(state.replaced) < len(knowing_all(LOG).replaced)


def test_a_fold_is_the_same_from_whatever_checkpoint_it_began(short_memory: None) -> None:
    whole = fold(LOG)
    for number, state in states():
        kept = checkpoint.load(checkpoint.dump(state))
        assert kept == state, number
        assert fold(LOG[number:], kept) == whole, number
        assert checkpoint.dump(kept) == checkpoint.dump(state), number


def test_a_checkpoint_that_knew_everything_is_read(short_memory: None) -> None:
    former = dict(FORMER["checkpoint"])
    state = checkpoint.load(json.dumps(former).encode())
    assert state is not None
    assert answers(state, ledger()) == answers(fold(LOG), ledger())
    assert set(state.replaced) == set(knowing_all(LOG).replaced)
    assert replace(state, replaced={}) == replace(fold(LOG), replaced={}, superseded=state.superseded)
    assert ledger(json.dumps(former).encode(), len(LOG)).read() == state
    del former["by_marker"]  # the first ones had none
    before = checkpoint.load(json.dumps(former).encode())
    assert before == replace(state, by_marker={})


def test_a_checkpoint_that_repeated_columns_is_read(short_memory: None) -> None:
    former = (Path(__file__).parent / "former_3.json").read_bytes()
    state = checkpoint.load(former)
    assert state is not None
    assert json.loads(former)["format"] == 3
    assert state == fold(LOG)
    assert answers(state, ledger()) == answers(fold(LOG), ledger())
    assert checkpoint.dump(state) == checkpoint.dump(fold(LOG))
    assert ledger(former, len(LOG)).read() == state
    damaged = former.replace(b'"counts":[', b'"counts":[1,', 1)
    assert checkpoint.load(damaged) is None


def test_the_former_code_passes_todays_checkpoint_over() -> None:
    with pytest.raises(ValueError, match=r"codec|JSON|Expecting"):  # which it knows as: no checkpoint
        json.loads(checkpoint.dump(fold(LOG)))
    assert json.loads(checkpoint.dump_state(fold(LOG)))["format"] not in (1, 2, 3)


def test_a_damaged_column_is_no_checkpoint(short_memory: None) -> None:
    sound = json.loads(checkpoint.dump_state(fold(LOG)))
    places = [("past", "columns"), ("superseded", "columns"), ("published_in", "columns"), ("boundaries", "columns")]
    for name, columns in places:
        given = sound[name][columns]
        for damaged in (given[:-1], [*given, given[0]], [given[0][:-8], *given[1:]], [given[0], "AAAA", *given[2:]]):
            assert checkpoint.load(json.dumps(sound | {name: sound[name] | {columns: damaged}}).encode()) is None


def test_batches_that_end_late_take_their_place(short_memory: None) -> None:
    done = [b for b in knowing_all(LOG).batches.values() if b.plan is None]
    held = Batches(done)
    late = Batches()
    for b in done:
        late.plan(replace(b, status=batches.BatchStatus.PLANNED))
    for b in (*done[4:], *done[:4]):
        late.become(b)
    assert list(late) == list(held) == [b.id for b in done]
    assert late.past == held.past
    assert [b.id for b in late.newest_first()] == [b.id for b in done][::-1]


def test_what_is_superseded_is_found_by_any_range() -> None:
    pairs = [(3, Range(10, 20)), (5, Range(0, 100)), (7, Range(20, 30)), (9, Range(90, 120)), (9, Range(200, 201))]
    held = Superseded.of(pairs)
    for number in range(11):
        for start in range(0, 210, 3):
            for end in (start, start + 1, start + 7, 300):
                meant = any(at > number and r.meets(Range(start, end)) for at, r in pairs)
                assert held.after(number, Range(start, end)) == meant, (number, start, end)
    assert list(held.cover(11, [Range(0, 110)])) == [(9, Range(90, 120)), (9, Range(200, 201)), (11, Range(0, 110))]
    assert list(held) == pairs, "a value, never changed"


def test_columns_are_what_was_packed() -> None:
    """Of whatever sign and size, also as they were packed formerly: in eight planes, by zlib alone."""
    given = [
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
    assert [c.tolist() for c in unpack_all(pack(given), len(given))] == given
    for column in given:
        steps = np.diff(np.array(column, "<i8"), prepend=np.int64(0)).view(np.uint8).reshape(-1, 8)
        former = base64.b64encode(zlib.compress(steps.T.tobytes(), 6)).decode()
        assert unpack(former).tolist() == column


def test_what_was_published_is_found_by_window_and_by_entry() -> None:
    held = Published()
    assert not held
    for number, windows in ((3, [1, 2]), (5, [None]), (8, [2]), (9, [2, 7, None])):
        held = held.copy()
        held.add(number, windows)
    assert dict(held) == {None: (5, 9), 1: (3,), 2: (3, 8, 9), 7: (9,)}
    assert (held.get(6, ()), 6 in held, None in held, len(held)) == ((), False, True, 4)
    assert held.since(6) == {2, 7, None}
    assert held.every() == [3, 5, 8, 9]
    assert held == Published(held.windows, held.numbers) != Published([1], [3])
    with pytest.raises(ValueError, match="one entry"):
        Published([1], [])


def test_the_older_a_ledger_is_the_more_entries_lie_between_its_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 5)
    before = len(LOG) - 6
    for share, left in ((len(LOG), 2), (len(LOG) // 7, 1)):
        monkeypatch.setattr(log, "CHECKPOINT_SHARE", share)
        of = ledger(checkpoint.dump(fold(LOG[:before])), before)
        of.read()
        assert len(list(of.lake.list(paths.checkpoint_folder("orders")))) == left
