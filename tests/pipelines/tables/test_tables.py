"""A feed's table has each file of its ledger once, with rival publishers and with a crash at any step.

Each format is read by its own library, and by DuckDB over the files that a snapshot names.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import CatalogUnavailable, EntriesLost, TableDiffers, TableRefused, Unknown
from sluice.pipelines.lake import paths
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.tables import TableChange
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake.local_lake import LocalLake
from tests.pipelines.landed_world import HOUR, START, A, B, Died, World, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld


@pytest.fixture(params=["iceberg", "delta"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    return IcebergWorld(tmp_path) if request.param == "iceberg" else DeltaWorld(tmp_path)


def test_landed_files_are_added_once_with_one_commit_per_batch(world: TableWorld) -> None:
    assert world.sync() == Synced(None), "nothing has landed: no table"
    world.land(*split_offsets(A, 50), bad=3)
    world.land(*split_offsets(B, 100))
    done = world.sync()
    assert (done.created, done.commits, done.added) == (True, 2, 6)
    world.check_same()
    (first, _, _), (second, _, summary) = world.list_snapshots()
    assert done.windows == {"2015-08-19T16:00": second, "2015-08-19T17:00": second}
    assert json.loads(summary["sluice.offsets"]) == {"orders": {"1": ["0-200"]}}
    assert summary["sluice.windows"] == "2015-08-19T16:00 2015-08-19T17:00"
    batch = world.state().batches[max(world.state().batches)]
    assert summary["sluice.batches"] == f"{batch.id}/{batch.hash}"
    assert (summary["sluice.feed"], summary["sluice.ledger"]) == ("orders", world.state().ledger_id)
    assert (len(world.read_offsets(first)), len(world.read_offsets(second))) == (188, 388)
    assert world.get_properties()["sluice.complete-until"] == "2015-08-19T18:00:00Z"
    again = world.sync()
    assert (again.commits, again.head) == (0, done.head)


def test_merged_and_retired_files_are_one_commit_each(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    world.sync()
    before, rows = world.snapshot, world.read_offsets()
    world.compact()
    assert world.sync().commits == 1
    world.check_same()
    assert world.read_offsets() == world.read_offsets(before) == rows, "the older snapshot is still there to read"
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    done = world.sync()
    assert (done.commits, done.added, done.removed) == (1, 0, 2)
    assert world.list_operations() == ["append", "replace", "delete"]
    assert world.read_offsets() == [o for o in rows if o[1] >= 100]
    assert world.read_offsets(before) == rows


def test_replaced_files_are_removed_after_their_snapshots_expire(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    world.sync()
    count = len(world.list_parts())
    world.compact()
    done = world.sync(expire_before=0)
    assert (done.expired, len(world.list_parts())) == (0, count + 4)
    later = world.list_snapshots()[-1][1] + 1
    done = world.sync(expire_before=later)
    assert (done.expired > 0, len(done.cleaned), len(world.list_parts())) == (True, count, 4)
    world.check_same()
    world.check()
    assert world.sync(expire_before=later).expired == 0


def test_two_publishers_can_expire_the_same_snapshots(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20))
    world.sync()
    world.land(*split_offsets(B, 50))
    world.compact()
    world.sync()
    later, slow, met = world.list_snapshots()[-1][1] + 1, world.open_table(), list[Synced]()

    def expire_after_rival(before: int) -> int:
        if not met:
            met.append(world.sync(expire_before=later))
        return type(slow).expire(slow, before)

    slow.__dict__["expire"] = expire_after_rival
    done = sync(world.reopen_ledger(), world.lake, FeedTables(slow), expire_before=later)
    assert (met[0].expired > 0, done.expired) == (True, 0)
    assert len(world.list_parts()) == 4
    world.check_same()
    world.check()


def test_file_merged_before_first_sync_is_never_added(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20), *split_offsets(B, 100))
    world.compact()
    world.land((A, 200, 300))
    done = world.sync()
    assert (done.added, done.removed, world.list_operations()) == (5, 0, ["append"] * 3)
    world.check_same()


@pytest.mark.parametrize("many", [0, 1000])
def test_replaced_files_never_added_to_table_are_removed(
    world: TableWorld, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were merged before the table was synced, or belong to the quarantine, which the table does not name."""
    monkeypatch.setattr("sluice.pipelines.tables.sync.MANY_PATHS", many)
    world.land(*split_offsets(A, 50), bad=2)
    world.sync()
    world.land(*split_offsets(B, 20), bad=3)
    world.compact()
    commit = type(world.open_table()).commit
    with monkeypatch.context() as patched:
        patched.setattr(
            type(world.open_table()), "commit", lambda *arguments: (commit(*arguments), (_ for _ in ()).throw(Died()))
        )
        with pytest.raises(Died):
            world.sync()
    done = world.sync(expire_before=0)
    assert sorted(p.partition("/")[0] for p in done.cleaned) == ["data"] * 10 + ["quarantine"] * 14
    assert len(world.list_parts()) == 4 + 4 + 4, "four of the older snapshot stay"
    world.check_same()
    world.check()


def test_two_publishers_add_each_file_once(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20))
    world.sync()
    world.land(*split_offsets(B, 20))
    slow, rival = world.open_table(), world.open_table()
    met: list[Synced] = []

    def commit_after_rival(change: TableChange) -> int:
        slow.__dict__.pop("commit")
        met.append(sync(world.reopen_ledger(), world.lake, FeedTables(rival)))
        return slow.commit(change)

    slow.__dict__["commit"] = commit_after_rival
    done = sync(world.reopen_ledger(), world.lake, FeedTables(slow))
    assert (done.added, met[0].added) == (0, 10)
    world.check_same()


def test_slow_publisher_does_not_add_retired_and_removed_file(
    world: TableWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land(*split_offsets(A, 100, 100), *split_offsets(B, 100, 100))
    world.sync()
    world.land(*split_offsets(A, 100, 0, 100), *split_offsets(B, 100, 0, 100))
    kind, name = world.get_commit_method()
    commit = getattr(kind, name)

    def sleep_then_commit(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(kind, name, commit)
        expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
        assert len(world.sync(expire_before=world.now).cleaned) == 2
        try:
            return commit(*args, **options)
        finally:
            assert len(world.read_offsets()) == 200

    monkeypatch.setattr(kind, name, sleep_then_commit)
    world.sync()
    world.check_same()


def test_concurrent_publishers_keep_all_removal_notes(world: TableWorld) -> None:
    world.land(*split_offsets(A, 20))
    world.sync()
    world.land(*split_offsets(B, 20, 0, 100))
    world.compact()
    slow = LocalLake(world.lake.root)

    def sleep_then_put(path: str, data: bytes) -> None:
        del slow.__dict__["put"]
        world.land(*split_offsets(B, 20, 100))
        world.compact()
        world.sync()
        slow.put(path, data)

    slow.__dict__["put"] = sleep_then_put
    sync(world.reopen_ledger(), slow, FeedTables(world.open_table()))
    assert "put" not in slow.__dict__
    world.sync()
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1)
    world.check_same()
    world.check()
    assert world.run_audit().problems == ()
    assert not [p for p in world.list_parts() if p in world.ledger.list_replaced(world.list_parts())]


def test_table_created_during_removal_of_replaced_files_is_complete(world: TableWorld) -> None:
    """The run finds no note of a table, and removes files after the table has its first snapshot."""
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    checked, begun = threading.Event(), threading.Event()
    rival = threading.Thread(target=world.compact)
    size, slow = world.lake.size, world.open_table()

    def check_then_sleep(path: str) -> int | None:
        answer = size(path)
        if path == paths.table_note_path("orders") and threading.current_thread() is rival:
            checked.set()
            begun.wait(60)
        return answer

    def create(*arguments: Any) -> None:
        rival.start()
        assert checked.wait(60)
        type(slow).create(slow, *arguments)

    world.lake.size, slow.create = check_then_sleep, create  # type: ignore[method-assign]
    try:
        sync(world.reopen_ledger(), world.lake, FeedTables(slow))
    finally:
        begun.set()
        rival.join()
    world.check_same()


def test_parallel_publishers_add_each_file_once(world: TableWorld) -> None:
    for piece in split_offsets(A, 50):
        world.land(piece)
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(world.sync().added)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(done) == 3
    world.check_same()


@pytest.mark.parametrize("when", ["before", "after"])
def test_outcome_of_commit_without_response_is_checked(
    world: TableWorld, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land(*split_offsets(A, 50))
    world.sync()
    world.land(*split_offsets(B, 50))
    owner, name = world.get_commit_method()
    commit, lost = getattr(owner, name), [1]

    def commit_without_answer(*arguments: Any, **options: Any) -> Any:
        if not lost:
            return commit(*arguments, **options)
        lost.pop()
        if when == "after":
            commit(*arguments, **options)
        raise ConnectionResetError("no answer")

    monkeypatch.setattr(owner, name, commit_without_answer)
    done = world.sync()
    assert done.commits == (0 if when == "after" else 1)
    world.check_same()


@pytest.mark.parametrize("at", range(4))
def test_sync_resumes_after_publisher_is_killed_at_any_step(
    world: TableWorld, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction and a landing are pending: the publisher dies before or after one of its two commits."""
    world.land(*split_offsets(A, 20), *split_offsets(B, 100))
    world.sync()
    world.compact()
    world.land((A, 200, 300))
    ours = type(world.open_table())
    commit, steps = ours.commit, iter(range(9))

    def commit_or_die(table: Any, change: TableChange) -> int:
        if next(steps) == at:
            raise Died
        snapshot = commit(table, change)
        if next(steps) == at:
            raise Died
        return snapshot

    with monkeypatch.context() as patched:
        patched.setattr(ours, "commit", commit_or_die)
        with pytest.raises(Died):
            world.sync()
    world.sync()
    world.check_same()
    assert world.list_operations() == ["append", "replace", "append"]


def test_rolled_back_table_is_reported_and_repaired(world: TableWorld) -> None:
    world.land(*split_offsets(A, 100))
    world.land(*split_offsets(B, 100))
    world.sync()
    world.roll_back(world.list_snapshots()[0][0])
    with pytest.raises(TableDiffers, match="2 files of the feed are missing in it"):
        world.sync()
    assert len(world.read_offsets()) == 200
    world.sync(repair=True)
    world.check_same()


def test_dropped_table_is_created_again(world: TableWorld) -> None:
    """Files that only its old snapshots named are removed."""
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    world.sync()
    world.compact()
    world.sync()
    world.drop()
    done = world.sync(expire_before=0)
    assert (done.created, done.added, len(done.cleaned), len(world.list_parts())) == (True, 4, 14, 4)
    world.check_same()
    world.check()


def test_foreign_rows_are_reported_and_removed_by_repair(world: TableWorld) -> None:
    world.land(*split_offsets(A, 100))
    world.sync()
    world.append(world.read().slice(0, 7))
    world.land(*split_offsets(B, 100))
    with pytest.raises(TableDiffers, match="1 file in it is not of the feed"):
        world.sync()
    world.sync(repair=True)
    world.check_same()
    world.delete('partition = 1 and "offset" < 10')
    with pytest.raises(TableDiffers, match=r"1 file of the feed is missing in it, 1 file in it is not of the feed"):
        world.sync()


def test_file_listed_twice_is_reported_and_repaired(world: TableWorld) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    world.sync()
    world.list_again(world.list_table_files()[0])
    text = "listed twice" if isinstance(world, IcebergWorld) else "listed with other numbers of rows"
    with pytest.raises(TableDiffers, match=f"1 file is {text}"):
        world.sync()
    world.sync(repair=True)
    world.check_same()
    assert world.sync().commits == 0


FOREIGN: dict[str, Callable[[TableWorld], object]] = {
    "append": lambda world: world.append(world.read().slice(0, 7)),
    "delete": lambda world: world.delete('partition = 1 and "offset" < 10'),
    "optimize": lambda world: isinstance(world, DeltaWorld) and world.delta.optimize.compact(),
    "overwrite": lambda world: isinstance(world, DeltaWorld) and world.replace_rows(world.read().slice(0, 7)),
    "change data": lambda world: isinstance(world, DeltaWorld) and world.delete_with_change_data("partition = 1"),
    "all": lambda world: [change(world) for name, change in FOREIGN.items() if name != "all"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_writers_are_removed_after_their_snapshots_expire(world: TableWorld, name: str) -> None:
    world.land(*split_offsets(A, 50, 0, 100), *split_offsets(B, 50))
    world.sync()
    ours = sorted(world.list_parts())
    FOREIGN[name](world)
    foreign = sorted({*world.list_parts()} - {*ours})
    assert bool(foreign) is isinstance(world, DeltaWorld)
    if foreign:
        assert all("table sync orders --repair" in p.remedy for p in world.run_audit().problems)
        assert len(world.run_audit().problems) == len(foreign)
    before = world.count_rows()
    world.sync(repair=True)
    world.check_same()
    world.check()
    assert list(world.run_audit().foreign) == foreign
    assert world.count_rows().items() >= before.items(), "each older snapshot can be read as before"
    world.land(*split_offsets(A, 50, 100))
    world.sync(expire_before=0)
    assert list(world.run_audit().foreign) == foreign
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1)
    world.check_same()
    world.check()
    assert world.run_audit().foreign == ()
    assert not {*foreign} & {*world.list_parts()}


def test_repair_removes_files_of_snapshots_expired_by_other_program(tmp_path: Path) -> None:
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    world.sync()
    world.compact()
    world.sync()
    world.land((A, 200, 300))
    world.sync()
    snapshots = [s for s, _, _ in world.list_snapshots()[:-1]]
    world.iceberg.maintenance.expire_snapshots().by_ids(snapshots).commit()
    done = world.sync(expire_before=0, repair=True)
    assert (len(done.cleaned), len(world.list_parts())) == (14, 5)
    world.check_same()
    world.check()


def test_repair_notes_foreign_files_that_older_release_dropped(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    world.land(*split_offsets(A, 100))
    world.sync()
    world.append(world.read().slice(0, 7))
    world.sync(repair=True)
    for path in world.lake.list(paths.get_removals_folder("orders")):
        world.lake.remove(path)
    world.lake.put(paths.table_note_path("orders"), b'{"table": "table data/orders", "removing": [], "foreign": []}')
    (problem,) = world.run_audit().problems
    assert "table sync orders --repair" in problem.remedy
    assert world.sync(repair=True).commits == 0
    world.check()
    assert len(world.run_audit().foreign) == 1


def test_unknown_part_is_not_treated_as_file_of_other_writer(tmp_path: Path) -> None:
    """It may be a part that lost ledger entries had published."""
    world = DeltaWorld(tmp_path)
    world.land(*split_offsets(A, 100))
    world.sync()
    data = (tmp_path / "lake" / world.list_parts()[0]).read_bytes()
    strange = world.list_parts()[0].replace("-b", "-b9")
    world.lake.put(strange, data)
    world.sync(repair=True, expire_before=world.list_snapshots()[-1][1] + 1)
    assert [p.text for p in world.run_audit().problems] == [f"{strange} is in no publish entry of the ledger"]
    assert strange in world.list_parts()


def test_property_set_by_other_writer_does_not_affect_sync(world: TableWorld) -> None:
    world.land(*split_offsets(A, 100))
    world.sync()
    world.put_property("owner", "somebody")
    world.land(*split_offsets(B, 100))
    assert world.sync().added == 2
    world.check_same()
    world.append(world.read().slice(0, 3))
    world.put_property("owner", "nobody")
    with pytest.raises(TableDiffers, match="1 file in it is not of the feed"):
        world.sync()


def test_foreign_snapshot_without_file_changes_is_accepted(world: TableWorld) -> None:
    """An example is a rewrite of manifests."""
    world.land(*split_offsets(A, 20), *split_offsets(B, 100))
    world.sync()
    world.append(world.read().slice(0, 0))
    world.compact([START])
    world.land(*split_offsets(A, 50, 200, 300))
    done = world.sync()
    assert (done.added, done.removed) == (3, 5)
    world.check_same()
    world.append(world.read().slice(0, 0))
    assert world.sync().commits == 0
    world.delete("partition = 1")
    world.land(*split_offsets(B, 50, 200, 300))
    with pytest.raises(TableDiffers, match="2 files of the feed are missing in it"):
        world.sync()


def test_table_of_other_ledger_is_refused(world: TableWorld, tmp_path: Path) -> None:
    world.land(*split_offsets(A, 100))
    world.sync()
    world.put_property("sluice.ledger", "another")
    with pytest.raises(TableDiffers, match="belongs to another ledger"):
        world.sync()
    world.put_property("sluice.ledger", world.state().ledger_id)
    if isinstance(world, DeltaWorld):  # our commits have marks, too
        world.put_mark(99999, {"sluice.mark": "99999"})
    elif isinstance(world, IcebergWorld):
        world.iceberg.append(world.read().slice(0, 0), snapshot_properties={"sluice.mark": "99999"})
        world.put_mark(99999)
    with pytest.raises(EntriesLost, match="names entry 99998"):
        world.sync()


def test_unavailable_catalog_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 100))
    (world.root / "catalog.db").mkdir()
    with pytest.raises(CatalogUnavailable, match="does not answer"):
        world.sync()
    (world.root / "catalog.db").rmdir()
    assert world.sync().added == 2


@pytest.mark.parametrize(
    ("answer", "kind", "message", "tries"),
    [
        ("BadRequestError", TableRefused, "refuses the rows to be added", 1),
        ("ServerError", Unknown, r"outcome of a commit to table db.orders is unknown \(ServerError\)", 3),
    ],
)
def test_catalog_error_is_reported_as_refusal_or_unknown_outcome(
    answer: str, kind: type[Exception], message: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is not retried; after a server error the outcome of the commit is unknown."""
    pytest.importorskip("pyiceberg")
    from pyiceberg import exceptions

    world, calls = IcebergWorld(tmp_path), list[Any]()
    world.land(*split_offsets(A, 100))
    world.sync()
    world.land(*split_offsets(B, 100))

    def fail_with_answer(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        raise getattr(exceptions, answer)("no")

    with monkeypatch.context() as patched:
        patched.setattr(*world.get_commit_method(), fail_with_answer)
        with pytest.raises(kind, match=message):
            world.sync()
    assert len(calls) == tries
    assert world.sync().added == 2
    world.check_same()


def test_sync_makes_published_parts_visible_before_adding(world: TableWorld) -> None:
    """A sync first makes published parts visible."""
    world.land(*split_offsets(A, 100))
    show = world.lake.show
    try:
        world.lake.show = lambda *arguments: (_ for _ in ()).throw(Died())  # type: ignore[method-assign]
        with pytest.raises(Died):
            world.land(*split_offsets(B, 100))
    finally:
        world.lake.show = show  # type: ignore[method-assign]
    assert world.sync().added == 4
    world.check_same()


def test_replaced_files_are_hidden_in_lake_without_table(tmp_path: Path) -> None:
    world = World(tmp_path, lake=LocalLake(tmp_path / "lake"))
    world.land(*split_offsets(A, 20), *split_offsets(B, 100))
    world.compact()
    assert len(world.list_files()) == 4
    assert roll_forward(world.ledger, world.lake, "orders").hidden == ()
