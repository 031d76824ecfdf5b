"""A ledger that lost any number of its newest entries: a run detects it before it writes, and continues after an
explicit acceptance, without lost records, duplicates or reused numbers. Sluice's own runs over ports in memory; the
model's watch checks every change against the invariants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.strict_audit import strict
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.survey import take_survey
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import EntriesLost, LedgerCorrupt, NothingToAccept, OffsetsLost, PlanBusy
from sluice.pipelines.feed.sections import CommitMode, OnLoss
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import checkpoint
from sluice.pipelines.ledger.entries import CommitEntry, GapEntry, dump
from sluice.pipelines.ledger.tip import Tip
from sluice.pipelines.operating.acceptance import accept_ledger
from sluice.pipelines.operating.repairs import RepairTarget, repair
from sluice.testing.logs import COMMIT
from tests.model.explore import Scenario, build_feed
from tests.model.programs import CATCH_UP, build_program, run_deterministically
from tests.model.watch import LOG, ROOTS, Watch
from tests.model.world import CLUSTER, FEED, HOUR, World

TIP = paths.tip_path(FEED)
LATER = "_sluice/orders/aside/"


@pytest.fixture(autouse=True)
def _as_one() -> Iterator[None]:
    with run_deterministically():
        yield


@dataclass(frozen=True)
class Evidence:
    """Evidence besides the log: the note of the newest number, and a checkpoint of all entries."""

    tip: bool
    fold: bool

    def __str__(self) -> str:
        return f"{'tip' if self.tip else 'no tip'}, {'checkpoint' if self.fold else 'no checkpoint'}"


def write(world: World, number: int, *kinds: str) -> None:
    for kind in kinds:
        p = world.partitions[number].with_record(world.now, kind)
        world.partitions[number] = p.with_transaction_end(world.now, 100 + p.end - 1, COMMIT) if kind == "o" else p


@cache
def land_twice(mode: CommitMode) -> World:
    """Returns a world of two partitions after two runs: quarantined records, transactions, and a complete window."""
    scenario = Scenario("lost", (), ("cbt", "cc"), letters=mode is CommitMode.TRANSACTIONAL)
    world = World(build_feed(scenario).model_copy(update={"commit": mode}), scenario.logs)
    Watch(world)
    run(world, "first")
    world.now += HOUR // 2
    write(world, 0, "c", "b")
    write(world, 1, "o", "c")
    world.now += 2 * HOUR
    run(world, "second")
    assert not world.broken
    return world


def run(world: World, name: str) -> None:
    build_program(world, name, ("catch",))()


def copy_world(world: World) -> World:
    out = world.clone()
    Watch(out).take_over(world.watch)
    return out


def list_entries(world: World) -> list[str]:
    return sorted(p for p in world.files if p.startswith(LOG))


def lose(world: World, count: int, evidence: Evidence) -> None:
    """Delete the newest entries, `count` of them."""
    if evidence.fold:
        state = world.open_ledger("folding").read()
        world.files[paths.checkpoint_path(FEED, state.number)] = checkpoint.dump(state)
    if not evidence.tip:
        del world.files[TIP]
    for path in list_entries(world)[-count:]:
        del world.files[path]


def accept_loss(world: World) -> int:
    return accept_ledger(world.feed, world.open_ports("operator"), "the disk was restored").next


def list_rows(world: World) -> dict[str, bytes]:
    return {p: data for p, data in world.files.items() if p.startswith(ROOTS)}


def find_problems(world: World) -> list[str]:
    ports = world.open_ports("auditor")
    ledger = world.open_ledger("auditor")
    report = audit(ledger, ports.lake)
    findings = strict(ledger, ports.lake, world.feed, take_survey(world.feed, ports, ledger), report)
    return [str(p) for p in (*audit(ledger, ports.lake, hashes=True).problems, *findings.problems)]


def check_complete(world: World) -> None:
    """After the last run, every stable record has landed once, is committed and reported, and the audits close."""
    none = world.feed.commit is CommitMode.NONE
    assert world.watch.check_end_state(moved=none, letters=world.feed.dead_letters is not None) == ""
    assert not world.broken
    assert find_problems(world) == []


def is_refused(world: World) -> bool:
    """Returns True if a run is refused."""
    try:
        run(world, "refused")
    except EntriesLost:
        return True
    return False


SUFFIXES = [(m, count) for m in CommitMode for count in range(1, 8 if m is CommitMode.NONE else 12)]
EVIDENCE = [Evidence(tip, fold) for tip in (True, False) for fold in (True, False)]


def test_suffixes_cover_all_ledger_entries() -> None:
    for mode in CommitMode:
        assert len(list_entries(land_twice(mode))) == max(count for m, count in SUFFIXES if m is mode)


@pytest.mark.parametrize("evidence", EVIDENCE, ids=str)
@pytest.mark.parametrize(("mode", "count"), SUFFIXES)
def test_lake_is_complete_after_recovery_from_any_lost_suffix(mode: CommitMode, count: int, evidence: Evidence) -> None:
    """The loss is detected before any write, and accepted; without evidence of it, landing gives the same result."""
    world = copy_world(land_twice(mode))
    numbers = {paths.log_number(p) or 0 for p in list_entries(world)}
    lose(world, count, evidence)
    before = dict(world.files)
    if not is_refused(world):
        assert evidence == Evidence(tip=False, fold=False), "only without any evidence may the loss go undetected"
        check_complete(world)
        return
    assert world.files == before, "nothing was written"
    after = accept_loss(world)
    if evidence.tip or evidence.fold:
        assert after > max(numbers)
    files = list_rows(world)
    run(world, "on")
    check_complete(world)
    assert {p: d for p, d in list_rows(world).items() if p in files} == files, "remaining files are unchanged"
    used = {
        int(json.loads(world.files[p])["batch"]) for p in list_entries(world) if b'"kind":"publish"' in world.files[p]
    }
    assert all(b >= after or b in numbers for b in used)
    write(world, 0, "c")
    run(world, "later")
    check_complete(world)


# -- one truth


def shorten_ledger(count: int = 3, mode: CommitMode = CommitMode.TRANSACTIONAL) -> World:
    world = copy_world(land_twice(mode))
    lose(world, count, Evidence(tip=True, fold=False))
    return world


def make_target(world: World) -> RepairTarget:
    ports = world.open_ports("operator")
    return RepairTarget(FEED, world.open_ledger("operator"), ports.lake, ports.liveness, world.feed.window)


@pytest.mark.parametrize("tip", [True, False])
def test_dry_run_survey_and_repair_report_lost_entries(tip: bool) -> None:
    """Without the note, the visible parts of a planned batch and the marks are the evidence."""
    world = copy_world(land_twice(CommitMode.TRANSACTIONAL))
    lose(world, 3, Evidence(tip=tip, fold=False))
    before = dict(world.files)
    ports = world.open_ports("looking")
    for look in (
        lambda: preview(world.feed, ports, CATCH_UP),
        lambda: take_survey(world.feed, ports, world.open_ledger("looking")),
        lambda: list(repair(make_target(world))),
    ):
        with pytest.raises(EntriesLost, match=r"ledger of feed orders lost entries.*: its newest is entry 7"):
            look()
    assert world.files == before


def test_file_name_alone_does_not_prove_a_lost_entry() -> None:
    """A file copied into the lake may have any name. The run is refused, since the file may be a lost batch's."""
    world = copy_world(land_twice(CommitMode.TRANSACTIONAL))
    stray = f"data/{FEED}/orders-0-0-5-b93.parquet"
    world.files[stray] = b"?"
    with pytest.raises(EntriesLost) as stopped:
        list(repair(make_target(world)))
    assert "lost entries, or files in its folders are not its own" in stopped.value.message
    assert f"the name of {stray} is of batch 93" in stopped.value.message
    assert "once existed" not in stopped.value.message
    assert "move it out of the lake" in stopped.value.remedy
    del world.files[stray]
    assert list(repair(make_target(world))) == []


def test_error_reports_lost_entries_evidence_and_remedy() -> None:
    with pytest.raises(EntriesLost) as stopped:
        run(shorten_ledger(), "refused")
    assert str(stopped.value) == (
        "the ledger of feed orders lost entries: its newest is entry 7, and entry 10 once existed.\n"
        "    _sluice/orders/tip.json names entry 10\n"
        "  → restore _sluice/orders/log from a backup of the lake; nothing was changed. Or go on without them: "
        "sluice accept orders ledger --reason …   sets aside their files; the next run lands them again"
    )
    assert stopped.value.exit_code == 3


# -- accepting


def test_files_of_lost_entries_are_set_aside_and_not_deleted() -> None:
    world = shorten_ledger()
    before = dict(world.files)
    done = accept_ledger(world.feed, world.open_ports("operator"), "the disk was restored")
    assert (done.entry, done.next, done.abandoned) == (8, 11, (7,))
    moved = {p.removeprefix(f"{LATER}11/"): data for p, data in world.files.items() if p.startswith(LATER)}
    assert {p.rpartition("/")[2] for p in moved} >= {"orders-0-4-6-b7.parquet", "orders-1-2-5-b7.parquet"}
    assert set(moved) == set(done.aside)
    assert all(before[p] == data for p, data in moved.items()), "moved as they were"
    assert {p for p in before if p not in world.files} == set(moved)
    entry = world.open_ledger("reader").entry(8)
    assert isinstance(entry, GapEntry)
    assert (entry.next, entry.reason, entry.ledger) == (11, "the disk was restored", "")
    assert "_sluice/orders/tip.json names entry 10" in entry.evidence


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("kept_tip", [True, False])
def test_numbers_of_lost_entries_are_not_reused(count: int, kept_tip: bool) -> None:
    """Only the tip proves the entry of a commit; its intent has a mark in Kafka."""
    world = copy_world(land_twice(CommitMode.TRANSACTIONAL))
    before = {p: world.files[p] for p in list_entries(world)}
    lose(world, count, Evidence(tip=kept_tip, fold=False))
    if not kept_tip and count == 1:
        with pytest.raises(NothingToAccept):
            accept_loss(world)
        return
    accept_loss(world)
    run(world, "next")
    again = {p for p in before if world.files.get(p, before[p]) != before[p]}
    assert again <= {list_entries(world)[len(before) - count]}, "only the gap's own entry"


def test_acceptance_without_lost_entries_is_refused() -> None:
    world = copy_world(land_twice(CommitMode.TRANSACTIONAL))
    before = dict(world.files)
    with pytest.raises(NothingToAccept):
        accept_loss(world)
    assert world.files == before
    lose(world, 3, Evidence(tip=True, fold=True))
    accept_loss(world)
    with pytest.raises(NothingToAccept):
        accept_loss(world)


def test_acceptance_is_refused_while_a_run_may_be_active() -> None:
    world = shorten_ledger(2)
    lose(world, 1, Evidence(tip=True, fold=False))
    world.dead.clear()
    before = dict(world.files)
    with pytest.raises(PlanBusy, match="is at work on feed orders"):
        accept_loss(world)
    assert world.files == before


def test_lost_offsets_missing_in_kafka_are_reported() -> None:
    world = shorten_ledger()
    p = world.partitions[0]
    world.partitions[0] = replace(p, start=p.end)
    done = accept_ledger(world.feed, world.open_ports("operator"), "the disk was restored")
    assert [str(r.range) for r in done.gone] == ["[4, 6)"]
    policies = world.feed.policies.model_copy(update={"on_loss": OnLoss.FAIL})
    world.feed = world.feed.model_copy(update={"policies": policies})
    with pytest.raises(OffsetsLost) as refused:
        run(world, "on")
    assert (refused.value.start, refused.value.end) == (4, 6)
    build_program(world, "operator2", ("lost",))()
    run(world, "again")
    assert find_problems(world) == []


def test_commit_waits_until_landing_reaches_the_committed_offsets() -> None:
    world = shorten_ledger()
    accept_loss(world)
    offsets = dict(world.group.offsets)
    build_program(world, "one", ("bf", 0, 4, 5))()
    assert world.group.offsets == offsets, "never moved back"
    ports = world.open_ports("two")
    settings = CommitSettings(world.feed.commit, "tid", world.feed.policies.on_group_moved)
    result = commit(world.open_ledger("two"), ports.group, settings)
    assert [(m.key.partition, m.before, m.after) for m in result.waiting] == [(0, 6, 5), (1, 5, 2)]
    run(world, "on")
    check_complete(world)


def test_outdated_or_invalid_tip_note_is_ignored() -> None:
    world = copy_world(land_twice(CommitMode.TRANSACTIONAL))
    ledger_id = world.open_ledger("reader").read().ledger_id
    for data in (Tip(ledger_id, 3).dump(), b"", b"[", b"{}", b"[" * 100_000, Tip(ledger_id, 1 << 62).dump()):
        world.files[TIP] = data
        run(world, "on")
        check_complete(world)


def test_tip_note_of_another_ledger_is_detected() -> None:
    world = copy_world(land_twice(CommitMode.NONE))
    world.files[TIP] = Tip("another", 3).dump()
    with pytest.raises(EntriesLost, match="names entry 3 of another ledger"):
        run(world, "refused")


# -- the log


def test_late_entry_within_the_gap_is_ignored() -> None:
    world = shorten_ledger()
    after = accept_loss(world)
    state = world.open_ledger("reader").read()
    late = CommitEntry(mode="plain", mark=9, offsets=(), write="late", cluster=CLUSTER)
    world.files[paths.log_path(FEED, 9)] = dump(late)
    assert world.open_ledger("reader").read() == state
    assert state.number == after
    run(world, "on")
    check_complete(world)


def test_numbers_continue_above_the_gap_with_and_without_a_checkpoint() -> None:
    world = shorten_ledger()
    after = accept_loss(world)
    reader = world.open_ledger("reader")
    assert reader.read().number == after
    run(world, "on")
    assert [n for n, _ in world.open_ledger("lister").entries()][:12] == [*range(9), *range(after, after + 3)]
    grown = reader.read()
    assert grown == world.open_ledger("whole").read()
    at = paths.checkpoint_path(FEED, grown.number)
    world.files[at] = checkpoint.dump(grown)
    assert world.open_ledger("from the checkpoint").read() == grown
    run(world, "later")
    check_complete(world)


def test_checkpoint_just_above_a_gap_identifies_its_newest_entry() -> None:
    world = shorten_ledger()
    accept_loss(world)
    state = world.open_ledger("folding").read()
    world.files[paths.checkpoint_path(FEED, state.number)] = checkpoint.dump(state)
    assert world.open_ledger("reader").read() == state
    del world.files[paths.log_path(FEED, 8)]
    with pytest.raises(EntriesLost, match=r"a checkpoint in .* names entry 10"):
        world.open_ledger("reader").read()


def test_missing_entry_outside_the_gap_is_still_corruption() -> None:
    world = shorten_ledger()
    accept_loss(world)
    run(world, "on")
    del world.files[list_entries(world)[-2]]
    with pytest.raises(LedgerCorrupt, match="is missing"):
        world.open_ledger("reader").read()


@pytest.mark.parametrize("count", [1, 3, 6])
def test_second_loss_of_entries_is_detected(count: int) -> None:
    world = shorten_ledger()
    first = accept_loss(world)
    run(world, "on")
    lose(world, count, Evidence(tip=True, fold=False))
    with pytest.raises(EntriesLost):
        run(world, "refused")
    assert accept_loss(world) > first
    run(world, "again")
    check_complete(world)
