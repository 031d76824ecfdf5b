"""Plan, run, status, audit and explain over ports in memory: what they print, their documents, their exit codes."""

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
from tests.cli.conftest import FEED, Over, Tell, run_body

# -- plan


def test_plan_shows_origin_pending_and_tasks_and_writes_nothing(world: World, tell: Tell) -> None:
    told = tell(plan.plan, "orders")
    assert told.code == 0
    first, second = told.document["partitions"]
    assert (first["position"], first["pending"], first["leader"]) == (0, [[0, 100]], 1)
    assert first["origin"] == {"offset": 0, "why": "start: 2024-05-01T00:00:00Z", "new": True}
    assert second["committed"] is None
    assert told.document["offsets"] == 200
    assert sum(s["end"] - s["start"] for t in told.document["tasks"] for s in t["offset_ranges"]) == 200
    assert told.document["blocked"] is None
    assert "start: 2024-05-01" in told.text
    assert told.document["hash"][:12] in told.text
    assert world.lake.files == {}


def test_plan_shows_what_is_not_stable_yet(world: World, tell: Tell) -> None:
    world.cluster.states[P1] = partition(number=1, last_stable_offset=80, high_watermark=100)
    told = tell(plan.plan, "orders")
    assert told.document["partitions"][1]["pending"] == [[0, 80]]
    assert "20 not stable yet" in told.text


def test_plan_names_the_exact_loss_and_exits_as_the_run_would(world: World, tell: Tell) -> None:
    world.group.offsets[P1] = CommittedOffset(10)
    world.cluster.states[P1] = partition(number=1, log_start=40)
    told = tell(plan.plan, "orders")
    assert told.code == 3
    assert told.document["partitions"][1]["lost"] == [[10, 40]]
    assert [r["error"] for r in told.document["refusals"]] == ["OffsetsLost"]
    assert "lost [10, 40)" in told.text
    assert "on_loss: accept" in told.text


def test_plan_says_when_nothing_is_pending(world: World, tell: Tell) -> None:
    world.run()
    told = tell(plan.plan, "orders")
    assert (told.code, told.document["hash"], told.document["tasks"]) == (0, None, [])
    assert "nothing is pending" in told.text


def test_plan_covers_exactly_what_is_asked_for(tell: Tell) -> None:
    told = tell(plan.plan, "orders", offsets=["orders:0:10-20", "orders:1:0-5"])
    ranges = [s for t in told.document["tasks"] for s in t["offset_ranges"]]
    assert sorted((s["partition"], s["start"], s["end"]) for s in ranges) == [(0, 10, 20), (1, 0, 5)]
    only = tell(plan.plan, "orders", only=["orders:1"])
    assert only.document["offsets"] == 100


# -- run


def test_run_lands_commits_and_tells(world: World, tell: Tell) -> None:
    told = tell(run.run, ["orders"], text=False)
    assert told.code == 0
    (batch,) = told.run["batches"]
    assert (batch["landed"], batch["failures"], batch["adopted_offset_ranges"]) == (200, [], 0)
    assert [(p["partition"], p["ranges"], p["files"]) for p in batch["partitions"]] == [
        (0, [[0, 100]], 4),
        (1, [[0, 100]], 4),
    ], "a file for each hour"
    assert told.run["committed"]["status"] == "committed"
    assert [o["after"] for o in told.run["committed"]["offsets"]] == [100, 100]
    assert [f["offset"] for f in told.run["frontiers"]] == [100, 100]
    assert "error" not in told.run
    world.grow(1, 130)
    again = tell(run.run, ["orders"], text=False).run
    assert [p["ranges"] for p in again["batches"][0]["partitions"]] == [[[100, 130]]]


def test_a_profile_says_where_the_time_went(world: World, tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    told = tell(run.run, ["orders"], only=["orders:0"], profile=True, text=False)
    profile = told.run["profile"]
    assert (profile["records"], profile["offset_ranges"], profile["ns"]["encode"]) == (100, 4, 3000)
    assert (profile["ns_per_record"]["wait"], profile["ns_per_record"]["validate"]) == (10.0, 0.0)
    assert sum(t["ns"]["wait"] for t in profile["tasks"]) == 1000
    assert list(told.run["seconds"])[-2:] == ["commit", "finish"]
    assert "start workers" in told.run["seconds"]
    world.grow(0, 130)
    run_body(
        run.run, Over(CommandOutput(), world.project.root, False, world), ["orders"], only=["orders:0"], profile=True
    )
    out = capfd.readouterr().out
    assert "Waiting" in out
    assert "ns a record" in out


def test_run_prints_what_landed_by_partition(tell: Tell) -> None:
    told = tell(run.run, ["orders"], only=["orders:0"])
    assert "nothing is pending" in told.text  # the second call
    told = tell(run.run, ["orders"], offsets=["orders:1:20-30"], text=False)
    assert told.run["request"] == "offsets orders:1:20-30"


def test_a_partial_run_lands_the_rest_and_fails(world: World, tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    world.engine.failing.add(P1)
    told = tell(run.run, ["orders"], text=False)
    assert told.code == 1
    assert told.run["error"] == "BatchIncomplete"
    (batch,) = told.run["batches"]
    assert batch["landed"] == 100
    assert {(f["partition"], f["error"]) for f in batch["failures"]} == {(1, "CorruptBatch")}
    code = run_body(run.run, Over(CommandOutput(), world.project.root, False, world), ["orders"])
    out, err = capfd.readouterr()
    assert code == 1
    assert "orders:1:0-25 stays pending" in out
    assert "error: " in err
    assert "→" in err


def test_what_became_of_another_run_s_batch_is_in_the_summary_and_in_the_document(world: World, tell: Tell) -> None:
    """A killed replacing stayed in the way, and the next catch-up ended well without a word of it."""
    world.run()
    (receipt,) = (
        r
        for r in list_live_receipts(world.ledger(), world.state())
        if (r.offset_range.partition, r.offset_range.start) == (0, 0)
    )
    asked = Request(
        RequestKind.OFFSETS,
        (AskedRange("orders", 0, receipt.offset_range.start, receipt.offset_range.end),),
        replace=True,
    )
    parts = tuple(p.path for p in receipt.parts)
    tasks = (Task(0, 1, (receipt.offset_range,)),)
    left = Plan("orders", world.cluster.id, asked, Isolation.READ_COMMITTED, tasks, parts)
    batch = world.ledger().append(lambda s: PlanEntry(plan=left, hash=left.hash, owner=owner("killed"))).number  # type: ignore[union-attr]
    world.liveness.dead.add("killed")
    planned = tell(plan.plan, "orders")
    assert [(o["batch"], o["became"]) for o in planned.document["other_batches"]] == [(batch, "taken over")]
    assert "is dead; to be taken over" in planned.text
    aside = tell(run.run, ["orders"], only=["orders:1"])
    (other,) = aside.run["other_batches"]
    assert (aside.code, other["became"], len(other["ways"])) == (0, "left as it is", 2)
    assert f"→ sluice repair orders --abandon {batch}   gives it up" in aside.text
    told = tell(run.run, ["orders"], text=False)
    assert (told.code, [o["became"] for o in told.run["other_batches"]]) == (0, ["taken over"])
    assert [(b["batch"], b["replaced_files"]) for b in told.run["batches"]] == [(batch, len(parts))]
    assert tell(run.run, ["orders"], text=False).run["other_batches"] == []


def test_a_run_that_another_one_blocks_is_refused(world: World, tell: Tell) -> None:
    world.group.others.append(_member())
    told = tell(run.run, ["orders"], text=False)
    assert told.code == 3
    assert told.run["error"] == "GroupHeld"
    assert told.run["batches"][0]["landed"] == 200  # landing never waits for the commit
    assert told.run["committed"] is None


def _member() -> Any:
    from sluice.pipelines.ports import Member

    return Member("m-1", "someone", "/10.0.0.1")


# -- status


def test_status_by_feed_and_by_partition(world: World, tell: Tell) -> None:
    before = tell(status.status)
    assert before.document["feeds"][0]["last_batch"] is None
    assert "nothing landed yet" in before.text
    world.run()
    world.grow(0, 150)
    told = tell(status.status, "orders")
    (feed,) = told.document["feeds"]
    assert (feed["lag"], feed["uncommitted"], feed["problem"]) == (50, 0, None)
    assert [(p["frontier"], p["committed"], p["last_stable_offset"], p["lag"]) for p in feed["partitions"]] == [
        (100, 100, 150, 50),
        (100, 100, 100, 0),
    ]
    assert feed["last_batch"]["rows"] == 200
    assert "50 offsets behind, the oldest " in told.text


def test_status_goes_on_without_kafka(world: World, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()

    def gone(*_: object) -> str:
        raise KafkaUnavailable("no answer", remedy="start it")

    monkeypatch.setattr(world.cluster, "cluster_id", gone)
    told = tell(status.status, "orders")
    assert told.code == 1
    (feed,) = told.document["feeds"]
    assert (feed["lag"], feed["problem"]["error"]) == (None, "KafkaUnavailable")
    assert [p["frontier"] for p in feed["partitions"]] == [100, 100]
    assert "no answer" in told.text


# -- audit, explain


def test_audit_closes_and_shows_only_classes_that_occur(world: World, tell: Tell) -> None:
    world.run()
    told = tell(audit.audit, "orders")
    assert (told.code, told.document["reconciled"], told.document["rows"]) == (0, True, 200)
    assert [p["landed"] for p in told.document["partitions"]] == [100, 100]
    assert "reconciled: every offset" in told.text
    assert "quarantined" not in told.text


def test_an_audit_that_does_not_close_exits_with_1(world: World, tell: Tell) -> None:
    world.run()
    victim = next(p for p in world.lake.files if p.startswith("data/"))
    del world.lake.files[victim]
    told = tell(audit.audit, "orders")
    assert (told.code, told.document["reconciled"]) == (1, False)
    assert victim in told.document["problems"][0]["text"]
    assert "not reconciled" in told.text


def test_explain_finds_the_row(world: World, tell: Tell) -> None:
    world.run()
    told = tell(explain.explain, "orders", "orders:1:42")
    assert (told.document["class"], told.document["row"]) == ("landed", 17)
    assert told.document["record"]["value"] == "dg=="
    assert told.document["record"]["timestamp"] == 0
    assert "1970-01-01" in told.text
    pending = tell(explain.explain, "orders", "orders:1:100")
    assert (pending.document["class"], pending.document["record"]) == ("not read yet", None)


def test_no_secret_is_ever_shown(world: World, tell: Tell) -> None:
    from sluice.cli.rules import feeds

    for body, arguments in ((feeds.list_, ()), (plan.plan, ("orders",)), (status.status, ())):
        told = tell(body, *arguments)
        assert SECRET not in told.text + json.dumps(told.document)


def test_status_of_all_feeds_says_on_its_own_line_what_keeps_one_from_being_looked_at(project, sluice, monkeypatch):
    folder = project / "feeds"
    (folder / "broken.yaml").write_text("topics: [")
    (folder / "remote.yaml").write_text(f"{FEED}lake: s3://bucket/lake\ngroup: another\n")
    for module in [m for m in sys.modules if m.startswith("sluice.resources.lake.s3_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "botocore", None)  # as without the extra
    said = sluice("status", "--json")
    problems = {f["feed"]: f["problem"] for f in said.document["feeds"]}
    assert [e["error"] for e in said.document["broken"]] == ["FeedError"]
    assert problems["orders"]["error"] == "KafkaUnavailable"
    assert problems["remote"]["error"] == "SetupError"
    assert "kafka-sluice[s3]" in problems["remote"]["remedy"]
    assert said.code == 2
    lines = sluice("status").out.splitlines()
    assert sum(line.strip().startswith(("orders", "remote")) for line in lines) == 2
