"""An audit looks at what changed since the last one, and finds what an audit of everything finds."""

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
from tests.pipelines.landed_world import HOUR, START, A, B, World, pieces

NOON = 1_700_000_000_000


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two batches, of two offset ranges each."""
    made = World(tmp_path)
    made.land((A, 0, 50), (B, 0, 50))
    made.land((A, 50, 100), (B, 50, 100), bad=2)
    return made


def look(world: World, *, everything: bool = False, hashes: bool = False, at: int = NOON) -> AuditReport:
    """What `sluice audit` does."""
    before = audit_cache.load_audited(world.lake, "orders")
    known = None if everything else before
    report = audit(world.fresh_ledger(), world.lake, hashes=hashes, previous=known, at=at)
    assert audit_cache.keep(world.lake, "orders", report.audited, before, at) is None
    return report


def opened(world: World, work: Callable[[], object]) -> set[str]:
    """The files that are opened meanwhile."""
    seen: set[str] = set()
    world.lake.before["open"] = seen.add
    work()
    del world.lake.before["open"]
    return seen


def test_what_was_looked_at_is_not_opened_again(world: World) -> None:
    first = look(world)
    assert (first.looked, first.batches, first.proven) == (2, 2, None)
    assert not opened(world, lambda: look(world))
    again = look(world)
    assert (again.looked, again.batches, again.proven) == (0, 2, (NOON, NOON))
    assert (again.accounts, again.parts, again.rows) == (first.accounts, first.parts, first.rows)
    world.land((A, 100, 200))
    (third,) = opened(world, lambda: look(world))
    assert "-100-200-" in third
    assert opened(world, lambda: look(world, everything=True)) == set(world.visible())


def test_each_kind_of_audit_by_itself(world: World) -> None:
    look(world)
    assert opened(world, lambda: look(world, hashes=True)) == set(world.visible())
    assert not opened(world, lambda: look(world, hashes=True))
    assert not opened(world, lambda: look(world))
    look(world, everything=True, at=NOON + HOUR)
    assert not opened(world, lambda: look(world, hashes=True)), "the same files, whose bytes were hashed before"


def test_a_batch_that_was_merged_or_retired_since(world: World) -> None:
    look(world)
    world.land(*pieces(A, 20, 100), *pieces(B, 20, 100))
    look(world)
    world.compact()
    merged = look(world)
    assert merged.problems == ()
    assert merged.accounts == look(world, everything=True).accounts
    ledger = world.fresh_ledger()
    expire(ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    retired = look(world)
    assert (retired.problems, retired.looked) == ((), 0)
    assert retired.accounts == look(world, everything=True).accounts
    assert retired.accounts[0].retired == 100


def _data(world: World) -> str:
    return world.visible()[0]


def missing(world: World) -> None:
    world.lake.remove(_data(world))


def short(world: World) -> None:
    world.lake.put(_data(world), world.lake.files[_data(world)][:-9])


def another_of_its_size(world: World) -> None:
    data = world.lake.files[_data(world)]
    world.lake.put(_data(world), data[:-4] + b"XXXX")


def a_stranger(world: World) -> None:
    world.lake.put("data/orders/what.parquet", b"")


def not_visible_yet(world: World) -> None:
    entry = world.ledger.publication(world.state().batches[world.state().batches.live()[0].id if 0 else 2])
    part = entry.receipts[0].parts[0]
    world.lake.put(part.staged, world.lake.files[part.path])
    world.lake.remove(part.path)


@pytest.mark.parametrize("damage", [missing, short, another_of_its_size, a_stranger, not_visible_yet])
def test_damage_is_found_each_time_until_it_is_mended(world: World, damage: Callable[[World], None]) -> None:
    whole = dict(world.lake.files)
    look(world)
    damage(world)
    found = look(world)
    assert found.problems
    assert found.problems == look(world).problems == look(world, everything=True).problems
    world.lake.files = whole | {p: d for p, d in world.lake.files.items() if p == paths.audited_path("orders")}
    assert look(world).problems == ()
    assert look(world).looked == 0


def test_an_entry_that_is_gone_or_another(world: World) -> None:
    look(world)
    path = paths.log_path("orders", 1)
    said = world.lake.files[path]
    world.lake.put(path, said.replace(b'"run":"test"', b'"run":"tset"'))
    assert look(world).looked == 2, "this is another log: nothing of the proof counts"
    world.lake.remove(path)
    with pytest.raises(LedgerCorrupt, match="entry 1 is missing"):
        look(world)


def test_a_file_that_only_has_another_tag(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a copy of the whole lake: entries are read and say the same, files are looked at."""
    look(world)
    real = type(world.lake).stats
    copied = lambda lake, prefix, after="": (s._replace(tag="new") for s in real(lake, prefix, after))  # noqa: E731
    monkeypatch.setattr(type(world.lake), "stats", copied)
    assert look(world).looked == 2
    assert look(world).looked == 0


def test_the_proof_of_another_ledger_or_none_at_all(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    other.land((A, 0, 50), (B, 0, 50))
    look(other)
    proof = other.lake.files[paths.audited_path("orders")]
    for data in (proof, proof[:-3], b"", b"{}", b"[" * 50_000):
        world.lake.put(paths.audited_path("orders"), data)
        assert look(world).looked == 2
        assert look(world).looked == 0


def test_who_may_not_write_is_told(world: World) -> None:
    def refuse(path: str) -> None:
        raise LakeUnavailable("no")

    world.lake.before["put"] = refuse
    report = audit(world.fresh_ledger(), world.lake)
    assert isinstance(audit_cache.keep(world.lake, "orders", report.audited, None, 0), LakeUnavailable)


def test_what_is_kept_is_read_back(world: World) -> None:
    look(world)
    data = world.lake.files[paths.audited_path("orders")]
    found = Audited.load(data)
    assert found is not None
    assert found.dump() == data


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_it_finds_what_an_audit_of_everything_finds(tmp_path: Path, seed: int) -> None:
    chance, world = random.Random(seed), World(tmp_path)
    at = {A: 0, B: 0}

    def land() -> None:
        key = chance.choice([k for k in at if at[k] < 200] or [A])
        if at[key] < 200:
            end = min(at[key] + chance.choice((10, 25, 50)), at[key] // 100 * 100 + 100)
            world.land((key, at[key], end), bad=chance.choice((0, 0, 3)))
            at[key] = end

    def damage() -> None:
        if world.visible():
            path = chance.choice(world.visible())
            data = world.lake.files[path]
            copy = path.replace(".parquet", "-9.parquet")
            path, data = chance.choice([(path, None), (path, data[: len(data) // 2]), (copy, data)])
            world.lake.write(path, data)

    def rewrite() -> None:
        if all(end == 200 for end in at.values()) and look(world, everything=True).is_reconciled:
            world.compact()

    for _ in range(14):
        chance.choice([land, land, land, land, rewrite, damage])()
        if chance.random() < 0.6:
            quick = look(world, hashes=chance.random() < 0.3)
            whole = audit(world.fresh_ledger(), world.lake)
            assert sorted(map(str, quick.problems)) == sorted(map(str, whole.problems))
            assert (quick.accounts, quick.batches) == (whole.accounts, whole.batches)
