"""Old entries are copied into segments: a fold without checkpoints reads few objects, and says what it always said."""

from __future__ import annotations

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import LedgerCorrupt
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, log, segments
from sluice.pipelines.ledger.entries import GapEntry
from sluice.pipelines.ledger.segments import Segment
from sluice.testing.lake import MemoryLake
from tests.pipelines.landed_world import Died, dying
from tests.pipelines.ledger.test_ledger import a_plan, begun, planned

FULL = [(n, n + 10) for n in range(0, 50, 10)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ENTRIES", 10)
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 5)


def old() -> MemoryLake:
    """A ledger of 66 entries; its oldest checkpoint is a fold up to entry 55."""
    lake = MemoryLake()
    begun(lake)
    for i in range(65):
        planned(Ledger(lake, "orders", lambda: 5, "run", "c"), a_plan(i * 10, i * 10 + 10))
    return lake


def fresh(lake: MemoryLake) -> Ledger:
    return Ledger(lake, "orders", lambda: 0)


def without_checkpoints(lake: MemoryLake) -> MemoryLake:
    return MemoryLake({p: d for p, d in lake.files.items() if "/checkpoints/" not in p})


def of_log(lake: MemoryLake) -> dict[str, bytes]:
    return {p: d for p, d in lake.files.items() if "/log/" in p}


def packed(lake: MemoryLake) -> list[tuple[int, int]]:
    return [n for p in lake.list(paths.segment_folder("orders")) if (n := paths.segment_numbers(p))]


def test_a_cold_fold_reads_segments_and_what_came_since() -> None:
    lake = old()
    said, before = fresh(lake).read(), of_log(lake)
    assert fresh(lake).pack(limit=2) == 2, "a bounded piece of work"
    assert fresh(lake).pack() == 3
    assert fresh(lake).pack() == 0
    assert packed(lake) == FULL, "below every checkpoint"
    assert of_log(lake) == before, "each number stays taken"
    cold = without_checkpoints(lake)
    found = fresh(cold)
    assert found.read() == said
    assert cold.requests["get"] < 2 * len(FULL) + 66 - 50 + 5
    assert [n for n, _ in fresh(cold).entries()] == list(range(66))
    assert [n for n, _ in fresh(cold).entries(17)] == list(range(17, 66))


def test_a_young_ledger_asks_for_no_segments() -> None:
    lake = MemoryLake()
    begun(lake)
    lake.requests.clear()
    fresh(lake).read()
    assert lake.requests["list"] == 2, "checkpoints and log"


@pytest.mark.parametrize("after", range(6))
def test_a_crash_at_any_step_and_two_who_pack(after: int) -> None:
    lake = old()
    said = fresh(lake).read()
    with dying(lake, after):
        try:
            fresh(lake).pack()
        except Died:
            assert after < len(FULL)
    assert fresh(without_checkpoints(lake)).read() == said
    begun_before = fresh(lake)
    fresh(lake).pack()
    begun_before.pack()
    assert packed(lake) == FULL
    assert fresh(without_checkpoints(lake)).read() == said


def test_segments_of_another_log_or_damaged_ones_are_passed_over() -> None:
    lake, other = old(), old()
    said = fresh(lake).read()
    fresh(lake).pack()
    fresh(other).pack()
    path = paths.segment_path("orders", 10, 20)
    for data in (other.files[path], lake.files[path][:-5], b"", b"[]"):
        spoiled = without_checkpoints(lake)
        spoiled.put(path, data)
        assert fresh(spoiled).read() == said
        lake.put(path, data)
        assert fresh(lake).pack() == 4, "they are written again, from the first that does not count"
        assert fresh(lake).read() == said


def test_an_audit_of_everything_compares_segments_with_the_log() -> None:
    lake = old()
    fresh(lake).pack()
    assert audit(fresh(lake), lake).problems == ()  # type: ignore[arg-type]
    path = paths.segment_path("orders", 10, 20)
    held = Segment.load(lake.files[path])
    assert held is not None
    wrong = [(n, data.replace(b'"run":"run"', b'"run":"nur"') if n == 13 else data) for n, data in held.entries]
    lake.put(path, Segment(20, tuple(wrong)).dump())
    (problem,) = audit(fresh(lake), lake).problems  # type: ignore[arg-type]
    assert str(problem) == f"I11: {path} differs from entry 13 of the ledger"


def test_a_reader_with_an_old_listing() -> None:
    """Segments come while it reads the log."""
    lake = old()
    said, copy = fresh(lake).read(), MemoryLake(lake.files)
    fresh(copy).pack()
    lake = without_checkpoints(lake)

    def pack(prefix: str) -> None:
        if prefix == paths.log_folder("orders"):
            lake.files |= {p: d for p, d in copy.files.items() if "/segments/" in p}

    lake.before["list"] = pack
    assert fresh(lake).read() == said


def test_entries_that_are_lost_are_not_read_from_segments() -> None:
    lake = old()
    fresh(lake).pack()
    cut = MemoryLake({p: d for p, d in lake.files.items() if (paths.log_number(p) or 0) < 33 or "/log/" not in p})
    cut.files = {p: d for p, d in cut.files.items() if "/checkpoints/" not in p and "tip" not in p}
    assert fresh(cut).read().number == 33
    assert Ledger.from_entries(cut, "orders", lambda: 0).read().number == 33


def test_a_gap_lies_within_a_segment() -> None:
    lake = old()
    ledger = Ledger(lake, "orders", lambda: 0, "run", "c")
    ledger.append(lambda s: GapEntry(next=90, evidence=(), reason="restored"))
    for i in range(40):
        planned(Ledger(lake, "orders", lambda: 5, "run", "c"), a_plan(i * 10, i * 10 + 10))
    said = fresh(lake).read()
    fresh(lake).pack()
    assert (60, 93) in packed(lake)
    assert fresh(without_checkpoints(lake)).read() == said


def test_a_hole_is_still_a_hole() -> None:
    lake = without_checkpoints(old())
    lake.remove(paths.log_path("orders", 50))
    with pytest.raises(LedgerCorrupt, match="entry 50 is missing"):
        fresh(lake).read()


def test_what_a_segment_says_is_read_back() -> None:
    held = ((3, b'{"a":1}\n'), (4, b""), (9, "é\n".encode()))
    segment = Segment(12, held)
    assert Segment.load(segment.dump()) == segment
