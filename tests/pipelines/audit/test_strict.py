"""The strict audit compares committed offsets, ids and manifests with the ledger, and names unchecked ranges."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.strict_audit import Strict, strict
from sluice.pipelines.batch.survey import take_survey
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.entries import CommitEntry, KeyOffset, KeyRange, RetireEntry
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.model.kafka import CommittedOffset, Key, Range
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log
from sluice.pipelines.operating.repairs import RepairKind, RepairTarget, repair
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World

KEY, TP = Key("orders", 0, "id-1"), PARTITIONS[0]
COMMITS = CommitSettings(CommitMode.TRANSACTIONAL, "tid", OnGroupMoved.REFUSE)


def run_strict_audit(world: World) -> Strict:
    survey = take_survey(world.feed, world.make_ports(), world.ledger)
    report = audit(world.ledger, world.lake)  # type: ignore[arg-type]
    return strict(world.ledger, world.lake, world.feed, survey, report)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A feed with two hours of two partitions, landed and committed."""
    (tmp_path / "orders.yaml").write_text("kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n")
    world = World(load_feed(tmp_path / "orders.yaml", {}))
    for hour in range(2):
        for tp in PARTITIONS:
            world.topic.write(tp, [START + hour * HOUR] * 5, False)
    world.now += 4 * HOUR
    world.land(Request(RequestKind.CATCH_UP))
    commit(world.ledger, world.group, COMMITS)  # type: ignore[arg-type]
    return world


def put(world: World, offset: int, mark: int | None = None, incarnation: str = "id-1") -> None:
    """Put another committed offset for partition 0 into the group."""
    ledger = world.ledger.read().ledger_id
    metadata = Mark(ledger, mark, incarnation).dump() if mark is not None else ""
    world.group.offsets[TP] = CommittedOffset(offset, 0, metadata)


def test_intact_feed(world: World) -> None:
    result = run_strict_audit(world)
    assert result.problems == ()
    assert (result.committed_offsets, result.commit_entries, result.unseen, result.expired) == (2, 1, (), ())
    assert result.windows == 3


def test_expired_offsets_of_an_idle_group_are_not_a_finding(world: World) -> None:
    del world.group.offsets[TP]
    result = run_strict_audit(world)
    assert (result.problems, result.expired) == ((), (KEY,))


def ahead(w: World) -> None:
    put(w, 11)


def back(w: World) -> None:
    put(w, 4)


def a_mark_of_nothing(w: World) -> None:
    put(w, 10, mark=1)


def put_mark_above_ledger(w: World) -> None:
    put(w, 9, mark=99)


def recorded_ahead(w: World) -> None:
    w.ledger.append(lambda s: CommitEntry(mode="plain", mark=0, offsets=(KeyOffset(key=KEY, offset=11),)))
    del w.group.offsets[TP]


def another_cluster(w: World) -> None:
    w.topic.id = "cluster-2"


def recreated(w: World) -> None:
    w.topic.topic_id = "id-2"


def truncated(w: World) -> None:
    w.topic.batches[TP].pop()


def no_manifest(w: World) -> None:
    w.lake.remove(next(iter(w.lake.list(paths.manifest_folder("orders")))))


def a_manifest_too_early(w: World) -> None:
    path = next(iter(w.lake.list(paths.manifest_folder("orders"))))
    manifest = json.loads(w.lake.files[path])
    manifest["boundaries"][0]["end"] = 30
    w.lake.put(path, json.dumps(manifest).encode())


def a_manifest_of_what_was_retired(w: World) -> None:
    ranges = (KeyRange(key=KEY, range=Range(0, 5)),)
    w.ledger.append(lambda s: RetireEntry(before=START + HOUR, ranges=ranges, parts=(), reason="old"))


def _plant_manifest(content: bytes) -> Callable[[World], None]:
    def plant(w: World) -> None:
        w.lake.put(next(iter(w.lake.list(paths.manifest_folder("orders")))), content)

    return plant


def no_manifest_at_all(w: World) -> None:
    w.lake.put(f"{paths.manifest_folder('orders')}/what.json", b"{}")


@pytest.mark.parametrize(
    ("plant", "invariant", "says"),
    [
        (ahead, 7, "orders:0: the group holds 11, but only 10 is published"),
        (back, 8, "orders:0: the group holds 4, the ledger expects 10"),
        (a_mark_of_nothing, 11, "names entry 1, which is not its intent"),
        (recorded_ahead, 7, "records 11 as committed, but only 10 was published"),
        (another_cluster, 12, "belongs to cluster cluster-1, Kafka answers as cluster-2"),
        (recreated, 12, "was deleted and created again"),
        (truncated, 3, "it was truncated"),
        (no_manifest, 4, "is missing, and its window is complete"),
        (a_manifest_too_early, 4, "is pending"),
        (a_manifest_of_what_was_retired, 4, "rows of its window were retired"),
        (_plant_manifest(b"[" * 50_000), 4, "cannot be read"),
        (
            _plant_manifest(b'{"boundaries":[{"topic":0,"partition":0,"topic_id":0,"start":[],"end":1}]}'),
            4,
            "cannot be read",
        ),
        (no_manifest_at_all, 10, "is not the manifest of a window"),
    ],
)
def test_contradictions_are_named(world: World, plant: Callable[[World], None], invariant: int, says: str) -> None:
    plant(world)
    result = run_strict_audit(world)
    assert {p.invariant for p in result.problems} == {invariant}
    assert says in result.problems[0].text


@pytest.mark.parametrize("plant", [no_manifest, _plant_manifest(b"{")], ids=["missing", "unreadable"])
def test_the_remedy_for_a_manifest_writes_it(world: World, plant: Callable[[World], None]) -> None:
    """The remedy is a repair: a run checks only windows that became complete since the last run."""
    plant(world)
    (problem,) = run_strict_audit(world).problems
    assert "sluice repair orders" in problem.remedy
    world.lake.remove(problem.file)
    target = RepairTarget("orders", world.ledger, world.lake, world.liveness, world.feed.window)  # type: ignore[arg-type]
    assert [f.kind for f in repair(target)] == [RepairKind.MANIFEST]
    assert run_strict_audit(world).problems == ()


def audit_again(world: World, before: AuditReport, earlier: Strict) -> tuple[AuditReport, Strict]:
    """Audit again with the earlier audit as proof. Returns both reports."""
    previous = replace(before.audited, strictly=earlier.strictly)
    report = audit(world.ledger, world.lake, previous=previous)  # type: ignore[arg-type]
    survey = take_survey(world.feed, world.make_ports(), world.ledger)
    return report, strict(world.ledger, world.lake, world.feed, survey, report)  # type: ignore[arg-type]


def test_strictly_checked_entries_are_not_read_again(world: World) -> None:
    report = audit(world.ledger, world.lake)  # type: ignore[arg-type]
    first = strict(
        world.ledger, world.lake, world.feed, take_survey(world.feed, world.make_ports(), world.ledger), report
    )  # type: ignore[arg-type]
    read: list[str] = []
    world.lake.before["get"] = read.append
    report, second = audit_again(world, report, first)
    assert (second.problems, second.commit_entries, second.windows) == ((), first.commit_entries, first.windows)
    assert not [p for p in read if p.startswith(paths.manifest_folder("orders"))]
    a_manifest_too_early(world)
    recorded_ahead(world)
    for _ in range(2):
        report, result = audit_again(world, report, second)
        assert sorted({p.invariant for p in result.problems}) == [4, 7], "each time, until it is fixed"
        second = result


def test_a_ledger_that_lost_entries_is_not_audited(world: World) -> None:
    put_mark_above_ledger(world)
    with pytest.raises(EntriesLost, match="has the mark of entry"):
        run_strict_audit(world)


def test_records_deleted_from_kafka_are_named(world: World) -> None:
    world.topic.log_start = 7
    (first, second) = run_strict_audit(world).unseen
    assert (first.key, first.why) == (KEY, "below the log start 7")
    assert first.ranges[0].start == 0
    assert first.records + second.records == 20
    assert run_strict_audit(world).problems == ()


@pytest.mark.parametrize("event", [AcceptEvent.RECREATED, AcceptEvent.TRUNCATED])
def test_accepted_life_of_the_log_is_not_a_finding(world: World, event: AcceptEvent) -> None:
    recreated(world) if event is AcceptEvent.RECREATED else truncated(world)
    accept_log(world.feed, world.make_ports(), event, "a test")
    world.topic.write(TP, [world.now] * 3, False)
    world.now += 2 * HOUR
    world.land(Request(RequestKind.CATCH_UP))
    commit(world.ledger, world.group, COMMITS)  # type: ignore[arg-type]
    result = run_strict_audit(world)
    assert result.problems == ()
    assert {u.why for u in result.unseen} == {"an earlier life of the topic, or a changed partition"}


def test_group_is_not_queried_without_commits(world: World) -> None:
    put(world, 99)
    world.feed = world.feed.model_copy(update={"commit": CommitMode.NONE})
    assert run_strict_audit(world).problems == ()
    assert replace(run_strict_audit(world), unseen=()).expired == ()
