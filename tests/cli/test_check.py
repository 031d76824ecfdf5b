"""`sluice check`: the completeness of a window, and its late and repeated records."""

from __future__ import annotations

import pytest

from sluice.cli.daily import check
from sluice.pipelines.errors import KafkaUnavailable, UsageError
from sluice.pipelines.ledger.entries import KeyRange, LossEntry
from sluice.pipelines.model.kafka import OpenTransaction, Range
from tests.assets.world import P0, P1, World, in_hour
from tests.cli.conftest import Invoke

DAY = "2024-05-01"


def test_a_complete_window_passes(world: World, invoke: Invoke) -> None:
    world.engine.bad = 2
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T01")
    document = answer.document
    assert (answer.code, document["complete"], document["empty"], document["reasons"]) == (0, True, False, [])
    assert (document["landed"], document["quarantined"], document["offsets"]) == (46, 4, 50)
    assert [(p["start"], p["end"], p["landed"], p["pending"]) for p in document["partitions"]] == [(25, 50, 23, 0)] * 2
    assert "window 2024-05-01T01:00 is complete: 50 offsets of 2 partitions accounted for" in answer.text
    assert "4 records (8.00 %): 4 not_json" in answer.text
    assert "sluice quarantine list orders" in answer.text


def test_an_hour_without_records_is_empty_and_complete(world: World, invoke: Invoke) -> None:
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T04")
    assert (answer.code, answer.document["complete"], answer.document["empty"]) == (0, True, True)
    assert "complete and empty: no record arrived in it" in answer.text


def test_a_window_of_lost_records_is_complete_and_not_empty(world: World, invoke: Invoke) -> None:
    world.run(in_hour(0))
    lost = tuple(KeyRange(key=key, range=Range(25, 50)) for key in world.state().known())
    world.open_ledger().append(lambda state: LossEntry(ranges=lost, reason="INC-7"))
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T01")
    assert (answer.code, answer.document["complete"], answer.document["empty"]) == (0, True, False)
    assert "50 lost" in answer.text


def test_pending_window_fails_and_suggests_run_command(world: World, invoke: Invoke) -> None:
    world.run(in_hour(0))
    answer = invoke(check.check, "orders", f"{DAY}T01")
    assert (answer.code, answer.document["complete"]) == (1, False)
    assert [p["pending"] for p in answer.document["partitions"]] == [25, 25]
    assert "pending: orders:0 lacks [25, 50); orders:1 lacks [25, 50)" in answer.text
    assert f"→ land it: sluice run orders --window {DAY}T01:00" in answer.text


def test_partial_window_reports_failure_and_pending_range(world: World, invoke: Invoke) -> None:
    world.engine.failing = {P1}
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T01")
    failure, rest = answer.document["reasons"]
    assert (answer.code, answer.document["landed"]) == (1, 25)
    assert "does not match its CRC" in failure["text"]
    assert "the broker's disk" in failure["remedy"]
    assert rest["text"] == "pending: orders:1 lacks [25, 50)"
    assert rest["remedy"] == f"complete it: sluice run orders --window {DAY}T01:00"


def test_open_window_reports_when_it_can_be_landed(world: World, invoke: Invoke) -> None:
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T06")
    (reason,) = answer.document["reasons"]
    assert (answer.code, answer.document["exit_code"]) == (75, 75)
    assert f"it is open until {DAY}T07:00:00Z, and lands from {DAY}T07:10:00Z on" in reason["text"]


def test_newest_due_window_is_checked_by_default(world: World, invoke: Invoke) -> None:
    answer = invoke(check.check, "orders", text=False)
    (reason,) = answer.document["reasons"]
    assert (answer.code, answer.document["window"]) == (1, f"{DAY}T04:00")
    assert reason["remedy"] == "land it: sluice run orders"


@pytest.mark.parametrize(
    ("window", "key", "message"),
    [
        ("2024-04-30T23", None, "before the feed's first window"),
        (f"{DAY}T01:30", None, "is not the start of a window"),
        ("hour 14", None, "is not a window"),
        (f"{DAY}T01", "order_id", "feed orders has no column `order_id`"),
    ],
)
def test_an_unknown_window_or_column_is_an_error(
    window: str, key: str | None, message: str, world: World, invoke: Invoke
) -> None:
    world.run(in_hour(1))
    with pytest.raises(UsageError, match=message):
        invoke(check.check, "orders", window, key=key)


def test_window_blocked_by_transaction_is_reported_with_remedy(world: World, invoke: Invoke) -> None:
    world.cluster.hold(P0, 30)
    world.cluster.open[P0] = OpenTransaction(30, 7, 0, 0, "payments")
    world.run()
    answer = invoke(check.check, "orders", f"{DAY}T01")
    blocked = answer.document["reasons"][0]
    assert (answer.code, answer.document["state"]) == (75, "held")
    assert "orders:0 is held at offset 30" in blocked["text"]
    assert "kafka-transactions.sh" in blocked["remedy"]


def test_check_answers_from_ledger_when_kafka_is_unavailable(
    world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(in_hour(0))

    def fail(*_: object) -> str:
        raise KafkaUnavailable("no answer", remedy="start it")

    monkeypatch.setattr(world.cluster, "cluster_id", fail)
    answer = invoke(check.check, "orders", f"{DAY}T01")
    assert (answer.code, answer.document["unchecked"]) == (1, ["no answer → start it"])
    assert "! not checked in Kafka: no answer → start it" in answer.text
    complete = invoke(check.check, "orders", f"{DAY}T00")
    assert (complete.code, complete.document["unchecked"]) == (0, [])


@pytest.mark.parametrize("width", [60, 120])
def test_output_fits_on_one_screen(width: int, world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    monkeypatch.setenv("COLUMNS", str(width))
    lines = invoke(check.check, "orders", f"{DAY}T01").text.splitlines()
    assert len(lines) <= 40
    assert max(len(line) for line in lines if "sluice" not in line) <= width
