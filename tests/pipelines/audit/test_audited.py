"""An audit that reads only changes since the last one reports the same as an audit of everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.pipelines.audit import audit_cache
from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.audit_cache import Audited
from sluice.pipelines.errors import LakeUnavailable, LedgerCorrupt
from sluice.pipelines.lake import paths
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets

NOON = 1_700_000_000_000


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A feed with two batches of two offset ranges each."""
    world = World(tmp_path)
    world.land((A, 0, 50), (B, 0, 50))
    world.land((A, 50, 100), (B, 50, 100), bad=2)
    return world


def run_audit(world: World, *, everything: bool = False, hashes: bool = False, at: int = NOON) -> AuditReport:
    """Audit as `sluice audit` does, and keep the proof."""
    before = audit_cache.load_audited(world.lake, "orders")
    previous = None if everything else before
    report = audit(world.reopen_ledger(), world.lake, hashes=hashes, previous=previous, at=at)
    assert audit_cache.keep(world.lake, "orders", report.audited, before, at) is None
    return report


def list_opened(world: World, work: Callable[[], object]) -> set[str]:
    """Do the work. Returns the files that it opens."""
    opened: set[str] = set()
    world.lake.before["open"] = opened.add
    work()
    del world.lake.before["open"]
    return opened


def test_checked_files_are_not_opened_again(world: World) -> None:
    first = run_audit(world)
    assert (first.looked_at, first.batches, first.proven) == (2, 2, None)
    assert not list_opened(world, lambda: run_audit(world))
    again = run_audit(world)
    assert (again.looked_at, again.batches, again.proven) == (0, 2, (NOON, NOON))
    assert (again.partitions, again.files, again.rows) == (first.partitions, first.files, first.rows)
    world.land((A, 100, 200))
    (third,) = list_opened(world, lambda: run_audit(world))
    assert "-100-200-" in third
    assert list_opened(world, lambda: run_audit(world, everything=True)) == set(world.list_files())


def test_each_kind_of_audit_alone(world: World) -> None:
    run_audit(world)
    assert list_opened(world, lambda: run_audit(world, hashes=True)) == set(world.list_files())
    assert not list_opened(world, lambda: run_audit(world, hashes=True))
    assert not list_opened(world, lambda: run_audit(world))
    run_audit(world, everything=True, at=NOON + HOUR)
    assert not list_opened(world, lambda: run_audit(world, hashes=True)), (
        "the same files, whose bytes were hashed before"
    )


def test_a_batch_that_was_merged_or_retired_since(world: World) -> None:
    run_audit(world)
    world.land(*split_offsets(A, 20, 100), *split_offsets(B, 20, 100))
    run_audit(world)
    world.compact()
    merged = run_audit(world)
    assert merged.problems == ()
    assert merged.partitions == run_audit(world, everything=True).partitions
    ledger = world.reopen_ledger()
    expire(ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    retired = run_audit(world)
    assert (retired.problems, retired.looked_at) == ((), 0)
    assert retired.partitions == run_audit(world, everything=True).partitions
    assert retired.partitions[0].account.retired == 100


def _find_data_file(world: World) -> str:
    return world.list_files()[0]


def missing(world: World) -> None:
    world.lake.remove(_find_data_file(world))


def short(world: World) -> None:
    world.lake.put(_find_data_file(world), world.lake.files[_find_data_file(world)][:-9])


def another_of_its_size(world: World) -> None:
    data = world.lake.files[_find_data_file(world)]
    world.lake.put(_find_data_file(world), data[:-4] + b"XXXX")


def a_stranger(world: World) -> None:
    world.lake.put("data/orders/what.parquet", b"")


def not_visible_yet(world: World) -> None:
    entry = world.ledger.publication(world.state().batches[world.state().batches.live()[0].id if 0 else 2])
    part = entry.receipts[0].parts[0]
    world.lake.put(part.staged, world.lake.files[part.path])
    world.lake.remove(part.path)


@pytest.mark.parametrize("damage", [missing, short, another_of_its_size, a_stranger, not_visible_yet])
def test_damage_is_reported_each_time_until_repaired(world: World, damage: Callable[[World], None]) -> None:
    intact = dict(world.lake.files)
    run_audit(world)
    damage(world)
    report = run_audit(world)
    assert report.problems
    assert report.problems == run_audit(world).problems == run_audit(world, everything=True).problems
    world.lake.files = intact | {p: d for p, d in world.lake.files.items() if p == paths.audited_path("orders")}
    assert run_audit(world).problems == ()
    assert run_audit(world).looked_at == 0


def test_missing_or_changed_entry(world: World) -> None:
    run_audit(world)
    path = paths.log_path("orders", 1)
    entry = world.lake.files[path]
    world.lake.put(path, entry.replace(b'"run":"test"', b'"run":"tset"'))
    with pytest.raises(LedgerCorrupt, match="or the one before it, is not the one that was written there"):
        run_audit(world)
    world.lake.remove(path)
    with pytest.raises(LedgerCorrupt, match="entry 1 is missing"):
        run_audit(world)


def test_file_with_only_another_tag(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the whole lake has such files: entries are read again and are the same, files are checked again."""
    run_audit(world)
    real = type(world.lake).stats
    copied = lambda lake, prefix, after="": (s._replace(tag="new") for s in real(lake, prefix, after))  # noqa: E731
    monkeypatch.setattr(type(world.lake), "stats", copied)
    assert run_audit(world).looked_at == 2
    assert run_audit(world).looked_at == 0


def test_note_of_another_ledger_or_invalid_note(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    other.land((A, 0, 50), (B, 0, 50))
    run_audit(other)
    proof = other.lake.files[paths.audited_path("orders")]
    for data in (proof, proof[:-3], b"", b"{}", b"[" * 50_000):
        world.lake.put(paths.audited_path("orders"), data)
        assert run_audit(world).looked_at == 2
        assert run_audit(world).looked_at == 0


def test_missing_write_permission_is_reported(world: World) -> None:
    def refuse(path: str) -> None:
        raise LakeUnavailable("no")

    world.lake.before["put"] = refuse
    report = audit(world.reopen_ledger(), world.lake)
    assert isinstance(audit_cache.keep(world.lake, "orders", report.audited, None, 0), LakeUnavailable)


def test_note_round_trips(world: World) -> None:
    run_audit(world)
    data = world.lake.files[paths.audited_path("orders")]
    loaded = Audited.load(data)
    assert loaded is not None
    assert loaded.dump() == data


@pytest.mark.parametrize("seed", range(8))
def test_quick_audit_reports_the_findings_of_a_full_audit(tmp_path: Path, seed: int) -> None:
    chance, world = random.Random(seed), World(tmp_path)
    at = {A: 0, B: 0}

    def land() -> None:
        key = chance.choice([k for k in at if at[k] < 200] or [A])
        if at[key] < 200:
            end = min(at[key] + chance.choice((10, 25, 50)), at[key] // 100 * 100 + 100)
            world.land((key, at[key], end), bad=chance.choice((0, 0, 3)))
            at[key] = end

    def break_file() -> None:
        if world.list_files():
            path = chance.choice(world.list_files())
            data = world.lake.files[path]
            copy = path.replace(".parquet", "-9.parquet")
            path, data = chance.choice([(path, None), (path, data[: len(data) // 2]), (copy, data)])
            world.lake.write(path, data)

    def rewrite() -> None:
        if all(end == 200 for end in at.values()) and run_audit(world, everything=True).reconciled:
            world.compact()

    for _ in range(14):
        chance.choice([land, land, land, land, rewrite, break_file])()
        if chance.random() < 0.6:
            quick = run_audit(world, hashes=chance.random() < 0.3)
            full = audit(world.reopen_ledger(), world.lake)
            assert sorted(map(str, quick.problems)) == sorted(map(str, full.problems))
            assert (quick.partitions, quick.batches) == (full.partitions, full.batches)
