"""Logs that lose records, become others or are held back, while runs go on: refused by name, accepted, proven."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import LogTruncated, OffsetsLost, TopicRecreated, UsageError, WindowHeld
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.faults.nemeses import drawn, logs
from tests.faults.nemeses.logs import MADE_TO_LOSE, accepted, in_mid_read, written
from tests.integration.support import run as run_here

pytestmark = pytest.mark.faults
HOUR = 3_600_000
EACH = {0: 200, 1: 200, 2: 200}
New = Callable[..., Field]


@pytest.fixture
def topic(arena: Arena, account: Account, tmp_path: Path) -> New:
    """A feed over a topic of three partitions of its own, with settings and fewer replicas."""

    def made(replicas: int = 3, config: dict[str, str] | None = None, **settings: Any) -> Field:
        name = f"log-{SEED}-{tmp_path.name[-20:].replace('_', '-')}"
        arena.create(name, 3, config, first=SEED, replicas=replicas)
        return Field(arena, tmp_path, name, 3, account, settings)

    return made


def lost(said: dict[str, Any]) -> dict[int, tuple[int, int]]:
    return {r["partition"]: (r["start"], r["end"]) for r in said["lost"]}


# -- records are deleted


@pytest.mark.parametrize("on_loss", ["fail", "accept"])
def test_records_deleted_in_mid_read(field: Field, on_loss: str) -> None:
    """One partition loses the beginning of what is read, one all of it, one nothing."""
    field.settings["policies"] = f"{{on_loss: {on_loss}}}"
    with field.producing():
        field.normal(1)
        before = logs.log_ends(field)
        written(field, EACH)
        ends = logs.log_ends(field)
        with in_mid_read(field) as running:
            below = {0: ends[0] - 10, 1: ends[1]}
            field.arena.delete_records(field.topic, below)
            field.account.did(f"records below {below} were deleted; the log had been read up to {before}")
        ran = field.ended(running)
        if on_loss == "accept":
            assert ran.clean, ran
        else:
            ran.stopped_by(OffsetsLost, says="are gone from Kafka")
            assert field.run().error in ("OffsetsLost", "Refused")
            gone = lost(accepted(field, "lost"))
            assert {p: end for p, (_, end) in gone.items()} == below
        field.recovered()
    verdict = field.proven()
    assert verdict.counts["acknowledged values pending, passed over or named"]


def test_records_deleted_between_runs(field: Field) -> None:
    draw = drawn(field)
    with field.producing():
        field.normal(1)
        written(field, EACH)
        gone = draw.randrange(3)
        below = {gone: logs.log_ends(field)[gone] - draw.randrange(1, 50)}
        field.arena.delete_records(field.topic, below)
        field.account.did(f"records below {below} were deleted")
        refused = field.run()
        assert refused.error == "OffsetsLost"
        assert {
            p: end for p, (_, end) in lost(accepted(field, "lost", "--only", f"{field.topic}:{gone}")).items()
        } == below
        field.recovered()
    field.proven()


@pytest.mark.parametrize("by", ["time", "size"])
def test_retention_overtakes_runs(field: Field, by: str) -> None:
    field.settings["policies"] = "{on_loss: accept}"
    config = {"retention_ms": "2000"} if by == "time" else {"retention_bytes": "20000"}
    with field.producing():
        field.normal(1)
        with logs.retention(field, **config):
            for _ in range(3):
                field.run()
        field.recovered()
    field.proven()


# -- batches that cannot be read


def test_a_batch_that_is_corrupt_on_every_disk(topic: New) -> None:
    """Kafka's own consumer cannot pass it either: the checker looks once its records were deleted."""
    field = topic(1)
    written(field, EACH)
    field.normal(1)
    written(field, EACH)
    start, end = logs.flipped(field, 1, 300)
    written(field, EACH)
    refused = field.run()
    assert refused.error == "BatchIncomplete", refused
    remedy = next(line["remedy"] for line in refused.said if "error" in line)
    assert "sluice accept orders corrupt --offsets " in remedy
    said = accepted(field, "corrupt", "--offsets", remedy.partition("--offsets ")[2].split()[0])
    assert lost(said) == {1: (start, end)}
    field.recovered()
    assert logs.landed_up_to(field)[1] == 600
    field.arena.delete_records(field.topic, {1: end})
    assert field.proven().counts["rows"] == 1800 - (end - start)


def test_landing_again_beyond_the_limits_of_a_run(field: Field) -> None:
    written(field, EACH)
    field.normal(1)
    again = Request(RequestKind.OFFSETS, (AskedRange(field.topic, 0, 0, 200),), replace=True)
    field.settings["limits"] = "{records: 50}"
    with pytest.raises(UsageError, match="replaced only as a whole"):
        run_here(field.feed(), again)
    del field.settings["limits"]
    run_here(field.feed(), again)
    assert field.proven().counts["rows"] == 600


# -- logs that lost what was read


@pytest.mark.parametrize("grows", [0, 300])
def test_a_log_truncated_between_runs(topic: New, grows: int) -> None:
    """It ends below what landed, or has grown past it with other records."""
    field = topic(2, MADE_TO_LOSE)
    written(field, EACH)
    field.normal(1)
    victim = drawn(field).randrange(3)

    def meanwhile() -> None:
        written(field, dict.fromkeys(range(3), 30) | {victim: 60})
        assert field.run().clean

    logs.truncated(field, victim, meanwhile, lambda: written(field, {victim: grows}))
    written(field, dict.fromkeys(range(3), 20))
    refused = field.run()
    assert refused.error == "LogTruncated", refused
    said = accepted(field, "truncated")
    assert [(e["partition"], e["entered"].partition("#")[2]) for e in said["entered"]] == [(victim, "1")]
    field.recovered()
    assert field.proven().counts["rows that the log no longer holds"] == 60


def test_a_log_truncated_in_mid_read(topic: New) -> None:
    """Of what is truncated nothing had landed: nothing is to be accepted, and the feed goes on by itself."""
    field = topic(2, MADE_TO_LOSE)
    written(field, EACH)
    field.normal(1)
    with ExitStack() as held:
        running = []

        def meanwhile() -> None:
            written(field, {2: 60})
            running.append(held.enter_context(in_mid_read(field)))

        logs.truncated(field, 2, meanwhile, held.close)
    field.ended(running[0]).stopped_by(LogTruncated, says="run again")
    written(field, {2: 100})
    field.recovered()
    field.proven()


# -- other topics


def test_a_topic_recreated_between_runs(field: Field) -> None:
    written(field, EACH)
    field.normal(1)
    logs.recreated(field)
    written(field, {0: 300, 1: 50, 2: 0})
    refused = field.run()
    assert refused.error in ("TopicRecreated", "Refused"), refused
    assert len(accepted(field, "recreated")["entered"]) == 3
    written(field, {1: 20})
    field.recovered()
    field.proven()


def test_a_topic_recreated_in_mid_run(field: Field) -> None:
    written(field, EACH)
    field.normal(1)
    written(field, EACH)
    with in_mid_read(field) as running:
        logs.recreated(field)
        written(field, {0: 500, 1: 500, 2: 500})
    field.ended(running).stopped_by(TopicRecreated, says="deleted and created again")
    assert field.run().error in ("TopicRecreated", "Refused")
    accepted(field, "recreated")
    field.recovered()
    field.proven()


def test_a_topic_comes_back_with_fewer_partitions(field: Field) -> None:
    """The other partitions are committed. Windows wait for the absent one until somebody accepts that it is gone."""
    written(field, EACH)
    field.normal(1)
    logs.recreated(field, 2)
    written(field, {0: 300, 1: 50})
    assert field.run().error in ("TopicRecreated", "Refused")
    assert len(accepted(field, "recreated")["entered"]) == 2
    ran = field.run()
    assert ran.clean, ran
    assert len(accepted(field, "gone")["entered"]) == 1
    written(field, {1: 20})
    field.recovered()
    field.proven()


def test_partitions_added_between_and_in_mid_run(field: Field) -> None:
    with field.producing():
        field.normal(1)
        logs.partitions_added(field, 4)
        written(field, {3: 50})
        field.run()
        written(field, {3: 50})
        with in_mid_read(field) as running:
            logs.partitions_added(field, 6)
            written(field, {4: 50, 5: 50})
        assert field.ended(running).clean
        field.recovered()
    field.proven()


def test_a_topic_compacted_while_runs_go_on(topic: New) -> None:
    field = topic(1)
    written(field, EACH)
    field.normal(1)
    with logs.compaction(field):
        for _ in range(3):
            written(field, EACH)
            assert field.run().clean
    field.recovered()
    assert field.proven().counts["rows that the log no longer holds"]


# -- transactions


def test_a_transaction_left_open(field: Field) -> None:
    _stuck(field, unknown=False)


def test_a_transaction_that_nobody_knows_of(field: Field) -> None:
    with logs.unverified(field):
        _stuck(field, unknown=True)


def test_a_transactional_producer_that_lags(field: Field) -> None:
    """Markers carry the brokers' clock, and Kafka's look-up by time takes them for records: here of every minute."""
    field.settings["window"] = "{length: 1m, grace: 1s}"
    draw = drawn(field)
    for seconds in range(900, 0, -100):
        logs.lagging(field, seconds, draw)
    field.normal(1)
    for seconds in (240, 180, 120, 60):
        logs.lagging(field, seconds, draw)
        assert field.run().clean
    verdict = field.proven()
    assert verdict.counts["boundaries compared with stamps"] >= 3 * 12
    assert verdict.decided[16]


def _stuck(field: Field, *, unknown: bool) -> None:
    now = time.time_ns() // 1_000_000
    hour = now - now % HOUR - 3 * HOUR
    logs.stamped(field, hour, 20)
    with logs.left_open(field, 1, hour + HOUR, unknown=unknown) as (name, _):
        logs.stamped(field, hour + HOUR, 20)
        logs.stamped(field, hour + 2 * HOUR, 20)
        field.normal(1)
        assert logs.landed_up_to(field) == {0: 60, 1: 20, 2: 60}
        with pytest.raises(WindowHeld) as held:
            run_here(field.feed(), Request(RequestKind.WINDOW, window=hour + HOUR))
        error = held.value
        assert (error.partition, error.start) == (1, 20)
        assert unknown or name in error.message, error
        assert "transaction" in error.message
        logs.aborted_by_the_tool(field, error.remedy.partition("kafka-transactions.sh ")[2])
    written(field, EACH)
    field.recovered()
    assert field.proven().counts["rows"] == 180 + 600


def test_a_feed_that_reads_uncommitted_goes_through_aborts(field: Field) -> None:
    field.settings["isolation"] = "read_uncommitted"
    with field.producing():
        field.normal(1)
        with logs.left_open(field, 0, time.time_ns() // 1_000_000) as (_, first):
            assert field.run().clean
            assert logs.landed_up_to(field)[0] >= first + 5, "what is open landed, too"
        logs.aborted_by_the_tool(field, f"abort --topic {field.topic} --partition 0 --start-offset {first}")
        field.recovered()
    field.proven()
