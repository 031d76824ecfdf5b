"""`sluice audit --strict`: its text, document and exit code."""

from __future__ import annotations

import pytest

from sluice.cli.daily import audit
from sluice.cli.inspect import explain, files
from sluice.cli.maintain import accept
from sluice.pipelines.audit import feed_proof
from sluice.pipelines.errors import NothingToAccept, UsageError, WindowRetired
from sluice.pipelines.lake import paths
from sluice.pipelines.model.kafka import CommittedOffset, Configs, TopicConfig
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from tests.assets.world import P0, World
from tests.cli.conftest import Invoke


@pytest.fixture(autouse=True)
def no_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the rescan, which is tested on a real Kafka."""
    monkeypatch.setattr(feed_proof, "_rescan", lambda feed, ports, ledger, report, report_progress: report)


def test_strict_audit_reports_compared_offsets_and_windows(world: World, invoke: Invoke) -> None:
    world.run()
    result = invoke(audit.audit, "orders", strict=True)
    assert (result.code, result.document["reconciled"]) == (0, True)
    assert result.document["strict"] == {
        "committed_offsets": 2, "commit_entries": 1, "windows": 5, "unseen": [], "expired": [],
    }  # fmt: skip
    assert "Compared with the ledger: the committed offsets of 2 partitions and 5 windows" in result.text


def test_damaged_file_is_reported_with_remedy(world: World, invoke: Invoke) -> None:
    world.run()
    path = next(p for p in world.lake.list("data/orders") if p.endswith(".parquet"))
    world.lake.put(path, b"")
    result = invoke(audit.audit, "orders", strict=True)
    (problem,) = result.document["problems"]
    assert (result.code, problem["file"]) == (1, path)
    assert "bring the file back from a backup; without one: sluice run orders --offsets orders:" in problem["remedy"]
    assert f"✗ I3: {path} has 0 bytes" in result.text
    assert "not reconciled: 1 problem\n" in result.text
    world.cluster.settings = Configs({"orders": TopicConfig()})
    result = invoke(audit.audit, "orders", strict=True)
    assert "→ land its offsets again: sluice run orders --offsets orders:" in result.text


def test_replacement_with_fewer_records_is_refused_until_the_rows_are_given_up(world: World, invoke: Invoke) -> None:
    world.run()
    path = next(p for p in world.lake.list("data/orders") if p.endswith(".parquet"))
    with pytest.raises(NothingToAccept, match="have the ledger's hashes"):
        invoke(accept.accept, "orders", event="damaged", offsets="orders:0:0-25", reason="INC-1", yes=True)
    world.lake.remove(path)
    part = paths.parse_part(path)
    assert part is not None
    offsets = f"orders:{part.partition}:{part.start}-{part.end}"
    part_range = AskedRange("orders", part.partition, part.start, part.end)
    again = Request(RequestKind.OFFSETS, (part_range,), replace=True)
    world.engine.absent = 2
    error = world.run(again).error
    assert error is not None
    assert "Kafka no longer has 2 records of it" in error.message
    assert f"sluice accept orders damaged --offsets {offsets} --reason" in error.remedy
    before = dict(world.lake.files)
    with pytest.raises(UsageError, match="not confirmed: Give up 25 offsets"):
        invoke(accept.accept, "orders", event="damaged", offsets=offsets, reason="INC-1")
    assert world.lake.files == before
    result = invoke(accept.accept, "orders", event="damaged", offsets=offsets, reason="INC-1", yes=True, text=False)
    assert [(r["start"], r["end"]) for r in result.document["retired"]] == [(part.start, part.end)]
    with pytest.raises(WindowRetired, match="INC-1") as retired:
        invoke(files.files, "orders", window=["2024-05-01T00"])
    assert f"sluice run orders --offsets {offsets} --replace" in retired.value.remedy
    assert world.run(again).error is None
    assert invoke(audit.audit, "orders").code == 0


def test_mismatched_offsets_fail_only_a_strict_audit(world: World, invoke: Invoke) -> None:
    world.run()
    world.group.offsets[P0] = CommittedOffset(500)
    result = invoke(audit.audit, "orders", strict=True)
    assert (result.code, result.document["reconciled"]) == (1, False)
    (problem,) = result.document["problems"]
    assert problem["invariant"] == 7
    assert "orders:0: the group holds 500" in result.text
    assert invoke(audit.audit, "orders").code == 0


def test_gaps_in_uncompacted_topic_are_reported(world: World, invoke: Invoke) -> None:
    """Control and aborted records are in batches, so that only compaction leaves offsets without a batch."""
    world.engine.absent = 2
    world.run()
    world.cluster.settings = Configs({"orders": TopicConfig()})
    result = invoke(audit.audit, "orders")
    gaps = result.document["gaps"]
    assert result.code == 0, "the topic may have been compacted once"
    assert [(g["topic"], g["partition"], g["offsets"] > 0, g["compacted"]) for g in gaps] == [
        ("orders", 0, True, False), ("orders", 1, True, False),
    ]  # fmt: skip
    assert gaps[0]["ranges"] == [[0, 100]]
    assert f"orders:0: {gaps[0]['offsets']} offsets in no batch of the log, within [0, 100)" in result.text
    assert "orders is not compacted: Kafka lost records there, unless it once was" in result.text
    assert "→ compare the replicas' logs there (kafka-dump-log)" in result.text
    result = invoke(explain.explain, "orders", "orders:0:0")
    assert result.document["class"] == "no record"
    assert "in no batch of the log" in result.document["text"]
    assert "Kafka does not compact this topic: it lost" in result.document["text"]


@pytest.mark.parametrize(
    ("topics", "compacted", "says"),
    [
        ({"orders": TopicConfig(compacts=True)}, True, ""),
        ({"orders": TopicConfig(deletes=False, compacts=True)}, True, ""),
        ({}, None, "of orders in no batch of the log: whether Kafka compacts it is unknown"),
    ],
    ids=["compact,delete", "compact", "may not be asked"],
)
def test_gaps_possibly_due_to_compaction_are_not_reported_as_lost(
    world: World, invoke: Invoke, topics: dict[str, TopicConfig], compacted: bool | None, says: str
) -> None:
    world.engine.absent = 1
    world.run()
    world.cluster.settings = Configs(topics)
    result = invoke(audit.audit, "orders")
    assert result.code == 0
    assert {g["compacted"] for g in result.document["gaps"]} == {compacted}
    assert says in result.text
    assert "lost" not in result.text


def test_audit_without_gaps_sends_no_kafka_request(world: World, invoke: Invoke) -> None:
    world.run()
    before = world.cluster.requests.copy()
    result = invoke(audit.audit, "orders")
    assert (result.document["gaps"], world.cluster.requests) == ([], before)
