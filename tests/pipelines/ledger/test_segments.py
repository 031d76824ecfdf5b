"""Old entries are copied into segments: a fold without checkpoints reads few objects, with the same result."""

from __future__ import annotations

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import LedgerCorrupt
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, log, segments
from sluice.pipelines.ledger.entries import GapEntry
from sluice.pipelines.ledger.segments import Segment
from sluice.testing.lake import MemoryLake
from tests.pipelines.landed_world import Died, crash_after
from tests.pipelines.ledger.test_ledger import append_plan, begin_ledger, make_plan

FULL = [(n, n + 10) for n in range(0, 50, 10)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ENTRIES", 10)
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 5)


def make_old_lake() -> MemoryLake:
    """Returns a ledger of 66 entries; its oldest checkpoint is a fold up to entry 55."""
    lake = MemoryLake()
    begin_ledger(lake)
    for i in range(65):
        append_plan(Ledger(lake, "orders", lambda: 5, "run", "c"), make_plan(i * 10, i * 10 + 10))
    return lake


def open_ledger(lake: MemoryLake) -> Ledger:
    return Ledger(lake, "orders", lambda: 0)


def without_checkpoints(lake: MemoryLake) -> MemoryLake:
    return MemoryLake({p: d for p, d in lake.files.items() if "/checkpoints/" not in p})


def of_log(lake: MemoryLake) -> dict[str, bytes]:
    return {p: d for p, d in lake.files.items() if "/log/" in p}


def list_segments(lake: MemoryLake) -> list[tuple[int, int]]:
    return [n for p in lake.list(paths.segment_folder("orders")) if (n := paths.segment_numbers(p))]


def test_cold_fold_reads_segments_and_later_entries() -> None:
    lake = make_old_lake()
    state, before = open_ledger(lake).read(), of_log(lake)
    assert open_ledger(lake).pack(limit=2) == 2, "a bounded piece of work"
    assert open_ledger(lake).pack() == 3
    assert open_ledger(lake).pack() == 0
    assert list_segments(lake) == FULL, "below every checkpoint"
    assert of_log(lake) == before, "each number stays taken"
    cold = without_checkpoints(lake)
    reader = open_ledger(cold)
    assert reader.read() == state
    assert cold.requests["get"] < 2 * len(FULL) + 66 - 50 + 5
    assert [n for n, _ in open_ledger(cold).entries()] == list(range(66))
    assert [n for n, _ in open_ledger(cold).entries(17)] == list(range(17, 66))


def test_small_ledger_lists_no_segments() -> None:
    lake = MemoryLake()
    begin_ledger(lake)
    lake.requests.clear()
    open_ledger(lake).read()
    assert lake.requests["list"] == 2, "checkpoints and log"


@pytest.mark.parametrize("after", range(6))
def test_crash_at_any_step_and_concurrent_packing(after: int) -> None:
    lake = make_old_lake()
    state = open_ledger(lake).read()
    with crash_after(lake, after):
        try:
            open_ledger(lake).pack()
        except Died:
            assert after < len(FULL)
    assert open_ledger(without_checkpoints(lake)).read() == state
    rival = open_ledger(lake)
    open_ledger(lake).pack()
    rival.pack()
    assert list_segments(lake) == FULL
    assert open_ledger(without_checkpoints(lake)).read() == state


def test_foreign_or_damaged_segments_are_ignored() -> None:
    lake, other = make_old_lake(), make_old_lake()
    state = open_ledger(lake).read()
    open_ledger(lake).pack()
    open_ledger(other).pack()
    path = paths.segment_path("orders", 10, 20)
    for data in (other.files[path], lake.files[path][:-5], b"", b"[]"):
        spoiled = without_checkpoints(lake)
        spoiled.put(path, data)
        assert open_ledger(spoiled).read() == state
        lake.put(path, data)
        assert open_ledger(lake).pack() == 4, "they are written again, from the first that does not count"
        assert open_ledger(lake).read() == state


def test_an_audit_of_everything_compares_segments_with_the_log() -> None:
    lake = make_old_lake()
    open_ledger(lake).pack()
    assert audit(open_ledger(lake), lake).problems == ()  # type: ignore[arg-type]
    path = paths.segment_path("orders", 10, 20)
    segment = Segment.load(lake.files[path])
    assert segment is not None
    wrong = [(n, data.replace(b'"run":"run"', b'"run":"nur"') if n == 13 else data) for n, data in segment.entries]
    lake.put(path, Segment(20, tuple(wrong)).dump())
    (problem,) = audit(open_ledger(lake), lake).problems  # type: ignore[arg-type]
    assert str(problem) == f"I11: {path} differs from entry 13 of the ledger"


def test_a_reader_with_an_old_listing() -> None:
    """Segments appear while it reads the log."""
    lake = make_old_lake()
    state, copy = open_ledger(lake).read(), MemoryLake(lake.files)
    open_ledger(copy).pack()
    lake = without_checkpoints(lake)

    def pack(prefix: str) -> None:
        if prefix == paths.log_folder("orders"):
            lake.files |= {p: d for p, d in copy.files.items() if "/segments/" in p}

    lake.before["list"] = pack
    assert open_ledger(lake).read() == state


def test_lost_entries_are_not_read_from_segments() -> None:
    lake = make_old_lake()
    open_ledger(lake).pack()
    cut = MemoryLake({p: d for p, d in lake.files.items() if (paths.log_number(p) or 0) < 33 or "/log/" not in p})
    cut.files = {p: d for p, d in cut.files.items() if "/checkpoints/" not in p and "tip" not in p}
    assert open_ledger(cut).read().number == 33
    assert Ledger.from_entries(cut, "orders", lambda: 0).read().number == 33


def test_gap_within_a_segment() -> None:
    lake = make_old_lake()
    ledger = Ledger(lake, "orders", lambda: 0, "run", "c")
    ledger.append(lambda s: GapEntry(next=90, evidence=(), reason="restored"))
    for i in range(40):
        append_plan(Ledger(lake, "orders", lambda: 5, "run", "c"), make_plan(i * 10, i * 10 + 10))
    state = open_ledger(lake).read()
    open_ledger(lake).pack()
    assert (60, 93) in list_segments(lake)
    assert open_ledger(without_checkpoints(lake)).read() == state


def test_hole_is_still_an_error() -> None:
    lake = without_checkpoints(make_old_lake())
    lake.remove(paths.log_path("orders", 50))
    with pytest.raises(LedgerCorrupt, match="entry 50 is missing"):
        open_ledger(lake).read()


def test_segment_round_trips() -> None:
    entries = ((3, b'{"a":1}\n'), (4, b""), (9, "é\n".encode()))
    segment = Segment(12, entries)
    assert Segment.load(segment.dump()) == segment
