"""Runs over logs that lose records, are recreated, or are blocked by transactions. Losses are named and accepted."""

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
from tests.faults.nemeses import logs, seed_random
from tests.faults.nemeses.logs import UNCLEAN_ELECTION, accept_event, hold_in_mid_read, produce
from tests.integration.support import run as run_here

pytestmark = pytest.mark.faults
HOUR = 3_600_000
EACH = {0: 200, 1: 200, 2: 200}
CreateField = Callable[..., Field]


@pytest.fixture
def topic(arena: Arena, account: Account, tmp_path: Path) -> CreateField:
    """Creates a feed over a new topic of three partitions, with the given settings and replicas."""

    def create_field(replicas: int = 3, config: dict[str, str] | None = None, **settings: Any) -> Field:
        name = f"log-{SEED}-{tmp_path.name[-20:].replace('_', '-')}"
        arena.create(name, 3, config, first=SEED, replicas=replicas)
        return Field(arena, tmp_path, name, 3, account, settings)

    return create_field


def get_lost_ranges(document: dict[str, Any]) -> dict[int, tuple[int, int]]:
    return {r["partition"]: (r["start"], r["end"]) for r in document["lost"]}


# -- records are deleted


@pytest.mark.parametrize("on_loss", ["fail", "accept"])
def test_records_deleted_during_a_read(field: Field, on_loss: str) -> None:
    """Of the range to read, one partition loses the beginning, one loses all, one loses nothing."""
    field.settings["policies"] = f"{{on_loss: {on_loss}}}"
    with field.run_producers():
        field.run_baseline(1)
        before = logs.fetch_log_ends(field)
        produce(field, EACH)
        ends = logs.fetch_log_ends(field)
        with hold_in_mid_read(field) as running:
            below = {0: ends[0] - 10, 1: ends[1]}
            field.arena.delete_records(field.topic, below)
            field.account.log(f"records below {below} were deleted; the log had been read up to {before}")
        run = field.wait_for_run(running)
        if on_loss == "accept":
            assert run.clean, run
        else:
            run.expect_error(OffsetsLost, mentions="are gone from Kafka")
            assert field.run().error in ("OffsetsLost", "Refused")
            lost = get_lost_ranges(accept_event(field, "lost"))
            assert {p: end for p, (_, end) in lost.items()} == below
        field.run_until_clean()
    verdict = field.verify()
    assert verdict.counts["acknowledged values pending, passed over or named"]


def test_records_deleted_between_runs(field: Field) -> None:
    draw = seed_random(field)
    with field.run_producers():
        field.run_baseline(1)
        produce(field, EACH)
        partition = draw.randrange(3)
        below = {partition: logs.fetch_log_ends(field)[partition] - draw.randrange(1, 50)}
        field.arena.delete_records(field.topic, below)
        field.account.log(f"records below {below} were deleted")
        refused = field.run()
        assert refused.error == "OffsetsLost"
        assert {
            p: end
            for p, (_, end) in get_lost_ranges(
                accept_event(field, "lost", "--only", f"{field.topic}:{partition}")
            ).items()
        } == below
        field.run_until_clean()
    field.verify()


@pytest.mark.parametrize("by", ["time", "size"])
def test_retention_overtakes_runs(field: Field, by: str) -> None:
    field.settings["policies"] = "{on_loss: accept}"
    config = {"retention_ms": "2000"} if by == "time" else {"retention_bytes": "20000"}
    with field.run_producers():
        field.run_baseline(1)
        with logs.apply_retention(field, **config):
            for _ in range(3):
                field.run()
        field.run_until_clean()
    field.verify()


# -- corrupt batches


def test_batch_is_corrupt_on_every_disk(topic: CreateField) -> None:
    """Kafka's consumer cannot pass it either, so the checker runs after its records were deleted."""
    field = topic(1)
    produce(field, EACH)
    field.run_baseline(1)
    produce(field, EACH)
    start, end = logs.flip_bit(field, 1, 300)
    produce(field, EACH)
    refused = field.run()
    assert refused.error == "BatchIncomplete", refused
    remedy = next(line["remedy"] for line in refused.lines if "error" in line)
    assert "sluice accept orders corrupt --offsets " in remedy
    document = accept_event(field, "corrupt", "--offsets", remedy.partition("--offsets ")[2].split()[0])
    assert get_lost_ranges(document) == {1: (start, end)}
    field.run_until_clean()
    assert logs.read_frontiers(field)[1] == 600
    field.arena.delete_records(field.topic, {1: end})
    assert field.verify().counts["rows"] == 1800 - (end - start)


def test_landing_again_beyond_the_limits_of_a_run(field: Field) -> None:
    produce(field, EACH)
    field.run_baseline(1)
    repeated = Request(RequestKind.OFFSETS, (AskedRange(field.topic, 0, 0, 200),), replace=True)
    field.settings["limits"] = "{records: 50}"
    with pytest.raises(UsageError, match="replaced only as a whole"):
        run_here(field.write_feed(), repeated)
    del field.settings["limits"]
    run_here(field.write_feed(), repeated)
    assert field.verify().counts["rows"] == 600


# -- truncated logs


@pytest.mark.parametrize("grows", [0, 300])
def test_a_log_truncated_between_runs(topic: CreateField, grows: int) -> None:
    """The log ends below the landed offsets, or has grown past them with other records."""
    field = topic(2, UNCLEAN_ELECTION)
    produce(field, EACH)
    field.run_baseline(1)
    victim = seed_random(field).randrange(3)

    def produce_lost() -> None:
        produce(field, dict.fromkeys(range(3), 30) | {victim: 60})
        assert field.run().clean

    logs.truncate_log(field, victim, produce_lost, lambda: produce(field, {victim: grows}))
    produce(field, dict.fromkeys(range(3), 20))
    refused = field.run()
    assert refused.error == "LogTruncated", refused
    document = accept_event(field, "truncated")
    assert [(e["partition"], e["entered"].partition("#")[2]) for e in document["entered"]] == [(victim, "1")]
    field.run_until_clean()
    assert field.verify().counts["rows that the log no longer holds"] == 60


def test_log_truncated_during_a_read(topic: CreateField) -> None:
    """The truncated records had not landed: the feed continues without an `accept`."""
    field = topic(2, UNCLEAN_ELECTION)
    produce(field, EACH)
    field.run_baseline(1)
    with ExitStack() as stack:
        running = []

        def produce_lost() -> None:
            produce(field, {2: 60})
            running.append(stack.enter_context(hold_in_mid_read(field)))

        logs.truncate_log(field, 2, produce_lost, stack.close)
    field.wait_for_run(running[0]).expect_error(LogTruncated, mentions="run again")
    produce(field, {2: 100})
    field.run_until_clean()
    field.verify()


# -- recreated topics


def test_a_topic_recreated_between_runs(field: Field) -> None:
    produce(field, EACH)
    field.run_baseline(1)
    logs.recreate_topic(field)
    produce(field, {0: 300, 1: 50, 2: 0})
    refused = field.run()
    assert refused.error in ("TopicRecreated", "Refused"), refused
    assert len(accept_event(field, "recreated")["entered"]) == 3
    produce(field, {1: 20})
    field.run_until_clean()
    field.verify()


def test_topic_recreated_during_a_run(field: Field) -> None:
    produce(field, EACH)
    field.run_baseline(1)
    produce(field, EACH)
    with hold_in_mid_read(field) as running:
        logs.recreate_topic(field)
        produce(field, {0: 500, 1: 500, 2: 500})
    field.wait_for_run(running).expect_error(TopicRecreated, mentions="deleted and created again")
    assert field.run().error in ("TopicRecreated", "Refused")
    accept_event(field, "recreated")
    field.run_until_clean()
    field.verify()


def test_topic_is_recreated_with_fewer_partitions(field: Field) -> None:
    """The other partitions are committed. Windows wait for the absent one until its loss is accepted."""
    produce(field, EACH)
    field.run_baseline(1)
    logs.recreate_topic(field, 2)
    produce(field, {0: 300, 1: 50})
    assert field.run().error in ("TopicRecreated", "Refused")
    assert len(accept_event(field, "recreated")["entered"]) == 2
    run = field.run()
    assert run.clean, run
    assert len(accept_event(field, "gone")["entered"]) == 1
    produce(field, {1: 20})
    field.run_until_clean()
    field.verify()


def test_partitions_added_between_and_during_runs(field: Field) -> None:
    with field.run_producers():
        field.run_baseline(1)
        logs.add_partitions(field, 4)
        produce(field, {3: 50})
        field.run()
        produce(field, {3: 50})
        with hold_in_mid_read(field) as running:
            logs.add_partitions(field, 6)
            produce(field, {4: 50, 5: 50})
        assert field.wait_for_run(running).clean
        field.run_until_clean()
    field.verify()


def test_topic_compacted_during_runs(topic: CreateField) -> None:
    field = topic(1)
    produce(field, EACH)
    field.run_baseline(1)
    with logs.compact_topic(field):
        for _ in range(3):
            produce(field, EACH)
            assert field.run().clean
    field.run_until_clean()
    assert field.verify().counts["rows that the log no longer holds"]


# -- transactions


def test_a_transaction_left_open(field: Field) -> None:
    land_around_open_transaction(field, unknown=False)


def test_transaction_unknown_to_the_coordinator(field: Field) -> None:
    with logs.disable_verification(field):
        land_around_open_transaction(field, unknown=True)


def test_a_transactional_producer_that_lags(field: Field) -> None:
    """Transaction markers have the brokers' clock, and Kafka's lookup by time takes them for records."""
    field.settings["window"] = "{length: 1m, grace: 1s}"
    draw = seed_random(field)
    for seconds in range(900, 0, -100):
        logs.produce_lagging(field, seconds, draw)
    field.run_baseline(1)
    for seconds in (240, 180, 120, 60):
        logs.produce_lagging(field, seconds, draw)
        assert field.run().clean
    verdict = field.verify()
    assert verdict.counts["boundaries compared with stamps"] >= 3 * 12
    assert verdict.decided[16]


def land_around_open_transaction(field: Field, *, unknown: bool) -> None:
    now = time.time_ns() // 1_000_000
    hour = now - now % HOUR - 3 * HOUR
    logs.produce_stamped(field, hour, 20)
    with logs.leave_transaction_open(field, 1, hour + HOUR, unknown=unknown) as (name, _):
        logs.produce_stamped(field, hour + HOUR, 20)
        logs.produce_stamped(field, hour + 2 * HOUR, 20)
        field.run_baseline(1)
        assert logs.read_frontiers(field) == {0: 60, 1: 20, 2: 60}
        with pytest.raises(WindowHeld) as blocked:
            run_here(field.write_feed(), Request(RequestKind.WINDOW, window=hour + HOUR))
        error = blocked.value
        assert (error.partition, error.start) == (1, 20)
        assert unknown or name in error.message, error
        assert "transaction" in error.message
        logs.abort_by_tool(field, error.remedy.partition("kafka-transactions.sh ")[2])
    produce(field, EACH)
    field.run_until_clean()
    assert field.verify().counts["rows"] == 180 + 600


def test_read_uncommitted_feed_continues_through_aborts(field: Field) -> None:
    field.settings["isolation"] = "read_uncommitted"
    with field.run_producers():
        field.run_baseline(1)
        with logs.leave_transaction_open(field, 0, time.time_ns() // 1_000_000) as (_, first):
            assert field.run().clean
            assert logs.read_frontiers(field)[0] >= first + 5, "records of open transactions land, too"
        logs.abort_by_tool(field, f"abort --topic {field.topic} --partition 0 --start-offset {first}")
        field.run_until_clean()
    field.verify()
