"""Plan, run, status, audit and explain with ports in memory: their texts, documents and exit codes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from sluice.cli.daily import audit, run, status
from sluice.cli.inspect import explain, plan
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.audit.audit import list_live_receipts
from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.model.kafka import CommittedOffset, Isolation
from sluice.pipelines.model.plans import AskedRange, Plan, Request, RequestKind, Task
from sluice.testing.cluster import partition
from sluice.testing.engine import owner
from tests.assets.world import P1, SECRET, World
from tests.cli.conftest import FEED, Invoke, WorldSession, run_body

# -- plan


def test_plan_shows_origin_pending_and_tasks_and_writes_nothing(world: World, invoke: Invoke) -> None:
    result = invoke(plan.plan, "orders")
    assert result.code == 0
    first, second = result.document["partitions"]
    assert (first["position"], first["pending"], first["leader"]) == (0, [[0, 100]], 1)
    assert first["origin"] == {"offset": 0, "why": "start: 2024-05-01T00:00:00Z", "new": True}
    assert second["committed"] is None
    assert result.document["offsets"] == 200
    assert sum(s["end"] - s["start"] for t in result.document["tasks"] for s in t["offset_ranges"]) == 200
    assert result.document["blocked"] is None
    assert "start: 2024-05-01" in result.text
    assert result.document["hash"][:12] in result.text
    assert world.lake.files == {}


def test_plan_shows_offsets_that_are_not_stable_yet(world: World, invoke: Invoke) -> None:
    world.cluster.states[P1] = partition(number=1, last_stable_offset=80, high_watermark=100)
    result = invoke(plan.plan, "orders")
    assert result.document["partitions"][1]["pending"] == [[0, 80]]
    assert "20 not stable yet" in result.text


def test_plan_names_the_exact_loss_and_exits_as_the_run_would(world: World, invoke: Invoke) -> None:
    world.group.offsets[P1] = CommittedOffset(10)
    world.cluster.states[P1] = partition(number=1, log_start=40)
    result = invoke(plan.plan, "orders")
    assert result.code == 3
    assert result.document["partitions"][1]["lost"] == [[10, 40]]
    assert [r["error"] for r in result.document["refusals"]] == ["OffsetsLost"]
    assert "lost [10, 40)" in result.text
    assert "on_loss: accept" in result.text


def test_plan_reports_when_nothing_is_pending(world: World, invoke: Invoke) -> None:
    world.run()
    result = invoke(plan.plan, "orders")
    assert (result.code, result.document["hash"], result.document["tasks"]) == (0, None, [])
    assert "nothing is pending" in result.text


def test_plan_covers_exactly_the_requested_offsets(invoke: Invoke) -> None:
    result = invoke(plan.plan, "orders", offsets=["orders:0:10-20", "orders:1:0-5"])
    ranges = [s for t in result.document["tasks"] for s in t["offset_ranges"]]
    assert sorted((s["partition"], s["start"], s["end"]) for s in ranges) == [(0, 10, 20), (1, 0, 5)]
    only = invoke(plan.plan, "orders", only=["orders:1"])
    assert only.document["offsets"] == 100


# -- run


def test_run_lands_commits_and_reports_result(world: World, invoke: Invoke) -> None:
    result = invoke(run.run, ["orders"], text=False)
    assert result.code == 0
    (batch,) = result.run["batches"]
    assert (batch["landed"], batch["failures"], batch["adopted_offset_ranges"]) == (200, [], 0)
    assert [(p["partition"], p["ranges"], p["files"]) for p in batch["partitions"]] == [
        (0, [[0, 100]], 4),
        (1, [[0, 100]], 4),
    ], "a file for each hour"
    assert result.run["committed"]["status"] == "committed"
    assert [o["after"] for o in result.run["committed"]["offsets"]] == [100, 100]
    assert [*result.run["frontiers"].values()] == [100, 100]
    assert "error" not in result.run
    world.grow(1, 130)
    again = invoke(run.run, ["orders"], text=False).run
    assert [p["ranges"] for p in again["batches"][0]["partitions"]] == [[[100, 130]]]


def test_profile_reports_time_by_activity(world: World, invoke: Invoke, capfd: pytest.CaptureFixture[str]) -> None:
    result = invoke(run.run, ["orders"], only=["orders:0"], profile=True, text=False)
    profile = result.run["profile"]
    assert (profile["records"], profile["offset_ranges"], profile["ns"]["encode"]) == (100, 4, 3000)
    assert (profile["ns_per_record"]["wait"], profile["ns_per_record"]["validate"]) == (10.0, 0.0)
    assert sum(t["ns"]["wait"] for t in profile["tasks"]) == 1000
    assert list(result.run["seconds"])[-2:] == ["commit", "finish"]
    assert "start workers" in result.run["seconds"]
    world.grow(0, 130)
    run_body(
        run.run,
        WorldSession(CommandOutput(), world.project.root, False, world),
        ["orders"],
        only=["orders:0"],
        profile=True,
    )
    out = capfd.readouterr().out
    assert "Waiting" in out
    assert "ns a record" in out


def test_run_is_limited_to_selected_partitions_and_offsets(invoke: Invoke) -> None:
    result = invoke(run.run, ["orders"], only=["orders:0"])
    assert "nothing is pending" in result.text  # the second call
    result = invoke(run.run, ["orders"], offsets=["orders:1:20-30"], text=False)
    assert result.run["request"] == "offsets orders:1:20-30"


def test_partial_run_lands_other_partitions_and_fails(
    world: World, invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    world.engine.failing.add(P1)
    result = invoke(run.run, ["orders"], text=False)
    assert result.code == 1
    assert result.run["error"] == "BatchIncomplete"
    (batch,) = result.run["batches"]
    assert batch["landed"] == 100
    assert {(f["partition"], f["error"]) for f in batch["failures"]} == {(1, "CorruptBatch")}
    code = run_body(run.run, WorldSession(CommandOutput(), world.project.root, False, world), ["orders"])
    out, err = capfd.readouterr()
    assert code == 1
    assert "orders:1:0-25 stays pending" in out
    assert "error: " in err
    assert "→" in err


def test_outcome_of_batches_of_other_runs_is_reported(world: World, invoke: Invoke) -> None:
    """A killed replacement blocked its range, and the next catch-up succeeded without mentioning it."""
    world.run()
    (receipt,) = (
        r
        for r in list_live_receipts(world.open_ledger(), world.state())
        if (r.offset_range.partition, r.offset_range.start) == (0, 0)
    )
    request = Request(
        RequestKind.OFFSETS,
        (AskedRange("orders", 0, receipt.offset_range.start, receipt.offset_range.end),),
        replace=True,
    )
    parts = tuple(p.path for p in receipt.parts)
    tasks = (Task(0, 1, (receipt.offset_range,)),)
    stale = Plan("orders", world.cluster.id, request, Isolation.READ_COMMITTED, tasks, parts)
    batch = world.open_ledger().append(lambda s: PlanEntry(plan=stale, hash=stale.hash, owner=owner("killed"))).number  # type: ignore[union-attr]
    world.liveness.dead.add("killed")
    planned = invoke(plan.plan, "orders")
    assert [(o["batch"], o["fate"]) for o in planned.document["other_batches"]] == [(batch, "taken over")]
    assert "is dead; to be taken over" in planned.text
    aside = invoke(run.run, ["orders"], only=["orders:1"])
    (other,) = aside.run["other_batches"]
    assert (aside.code, other["fate"], len(other["ways"])) == (0, "left as it is", 2)
    assert f"→ sluice repair orders --abandon {batch}   gives it up" in aside.text
    result = invoke(run.run, ["orders"], text=False)
    assert (result.code, [o["fate"] for o in result.run["other_batches"]]) == (0, ["taken over"])
    assert [(b["batch"], b["replaced_files"]) for b in result.run["batches"]] == [(batch, len(parts))]
    assert invoke(run.run, ["orders"], text=False).run["other_batches"] == []


def test_run_lands_but_commit_is_refused_while_foreign_member_is_active(world: World, invoke: Invoke) -> None:
    world.group.others.append(make_member())
    result = invoke(run.run, ["orders"], text=False)
    assert result.code == 3
    assert result.run["error"] == "GroupHeld"
    assert result.run["batches"][0]["landed"] == 200  # landing never waits for the commit
    assert result.run["committed"] is None


def make_member() -> Any:
    from sluice.pipelines.ports import Member

    return Member("m-1", "someone", "/10.0.0.1")


# -- status


def test_status_reports_feeds_and_partitions(world: World, invoke: Invoke) -> None:
    before = invoke(status.status)
    assert before.document["feeds"][0]["last_batch"] is None
    assert "nothing landed yet" in before.text
    world.run()
    world.grow(0, 150)
    result = invoke(status.status, "orders")
    (feed,) = result.document["feeds"]
    assert (feed["lag"], feed["uncommitted"], feed["error"]) == (50, 0, None)
    assert [(p["frontier"], p["committed"], p["last_stable_offset"], p["lag"]) for p in feed["partitions"]] == [
        (100, 100, 150, 50),
        (100, 100, 100, 0),
    ]
    assert feed["last_batch"]["rows"] == 200
    assert "50 offsets behind, the oldest " in result.text


def test_status_reports_ledger_when_kafka_does_not_answer(
    world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()

    def fail(*_: object) -> str:
        raise KafkaUnavailable("no answer", remedy="start it")

    monkeypatch.setattr(world.cluster, "cluster_id", fail)
    result = invoke(status.status, "orders")
    assert result.code == 1
    (feed,) = result.document["feeds"]
    assert (feed["lag"], feed["error"]["error"]) == (None, "KafkaUnavailable")
    assert [p["frontier"] for p in feed["partitions"]] == [100, 100]
    assert "no answer" in result.text


# -- audit, explain


def test_audit_reconciles_and_shows_only_classes_that_occur(world: World, invoke: Invoke) -> None:
    world.run()
    result = invoke(audit.audit, "orders")
    assert (result.code, result.document["reconciled"], result.document["rows"]) == (0, True, 200)
    assert [p["landed"] for p in result.document["partitions"]] == [100, 100]
    assert "reconciled: every offset" in result.text
    assert "quarantined" not in result.text


def test_audit_that_does_not_reconcile_exits_with_1(world: World, invoke: Invoke) -> None:
    world.run()
    victim = next(p for p in world.lake.files if p.startswith("data/"))
    del world.lake.files[victim]
    result = invoke(audit.audit, "orders")
    assert (result.code, result.document["reconciled"]) == (1, False)
    assert victim in result.document["problems"][0]["text"]
    assert "not reconciled" in result.text


def test_explain_shows_the_row(world: World, invoke: Invoke) -> None:
    world.run()
    result = invoke(explain.explain, "orders", "orders:1:42")
    assert (result.document["class"], result.document["row"]) == ("landed", 17)
    assert result.document["record"]["value"] == "dg=="
    assert result.document["record"]["timestamp"] == 0
    assert "1970-01-01" in result.text
    pending = invoke(explain.explain, "orders", "orders:1:100")
    assert (pending.document["class"], pending.document["record"]) == ("not read yet", None)


def test_no_secret_is_ever_shown(world: World, invoke: Invoke) -> None:
    from sluice.cli.rules import feeds

    for body, arguments in ((feeds.list_, ()), (plan.plan, ("orders",)), (status.status, ())):
        result = invoke(body, *arguments)
        assert SECRET not in result.text + json.dumps(result.document)


def test_status_reports_problem_of_each_unchecked_feed_on_one_line(project, sluice, monkeypatch):
    folder = project / "feeds"
    (folder / "broken.yaml").write_text("topics: [")
    (folder / "remote.yaml").write_text(f"{FEED}lake: s3://bucket/lake\ngroup: another\n")
    monkeypatch.delitem(sys.modules, "sluice.resources.lake.s3", raising=False)
    monkeypatch.setitem(sys.modules, "botocore", None)  # as without the extra
    result = sluice("status", "--json")
    problems = {f["feed"]: f["error"] for f in result.document["feeds"]}
    assert [e["error"] for e in result.document["broken"]] == ["FeedError"]
    assert problems["orders"]["error"] == "KafkaUnavailable"
    assert problems["remote"]["error"] == "SetupError"
    assert "kafka-sluice[s3]" in problems["remote"]["remedy"]
    assert result.code == 2
    lines = sluice("status").out.splitlines()
    assert sum(line.strip().startswith(("orders", "remote")) for line in lines) == 2
