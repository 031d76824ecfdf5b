"""A feed's first hour, and a day of an hourly feed, by the CLI and in Python, on a real Kafka."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

import sluice as package
from sluice.errors import UsageError, WindowIncomplete
from sluice.pipelines.util.units import DAY, HOUR, show_instant, show_window
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from tests.cli.conftest import CommandResult, Sluice

YESTERDAY = (now() - HOUR) // DAY * DAY - DAY  # its last hour is closed also just after midnight
pytestmark = pytest.mark.slow


@pytest.fixture
def topic(kafka: LocalKafka) -> str:
    """A topic with a record every quarter of an hour of the day before, whose value is its number."""
    name = f"hours-{secrets.token_hex(4)}"
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for number in range(96):
        producer.send(name, b"%d" % number, partition=0, timestamp_ms=YESTERDAY + number * HOUR // 4)
    producer.close()
    return name


def hour(number: int) -> str:
    return show_window(YESTERDAY + number * HOUR)


def read_numbers(window: str, feed: str = "orders", to: str | None = None) -> list[int]:
    return [int(v) for v in package.read(feed, window, to=to).arrow()["value"].to_pylist()]


Begin = Callable[[str], CommandResult]


@pytest.fixture
def begin(project: Path, kafka: LocalKafka, topic: str, sluice: Sluice) -> Begin:
    """Returns a function that lands the feed from its start on."""

    def land(start: str) -> CommandResult:
        text = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: {start}\ngroup: g-{topic}\n"
        (project / "feeds" / "orders.yaml").write_text(text)
        return sluice("run", "orders", "--no-dagster", "--json")

    return land


def begin_at(begin: Begin, minutes: int) -> None:
    assert begin(show_instant(YESTERDAY + minutes * 60_000)).code == 0


def test_first_hour_is_incomplete_until_its_own_run_joins_it(begin: Begin, sluice: Sluice) -> None:
    begin_at(begin, 16 * 60 + 30)
    check = sluice("check", "orders", hour(16), "--json")
    assert (check.code, check.document["complete"]) == (1, False)
    assert (check.document["state"], check.document["landed"]) == ("from the origin on", 2)
    (reason,) = check.document["reasons"]
    assert "lacks [64, 66)" in reason["text"]
    assert f"sluice run orders --window {hour(16)}" in reason["remedy"]
    waited = sluice("wait", "orders", "--window", hour(16), "--timeout", "1s", "--json")
    assert (waited.code, waited.document["error"]) == (75, "WindowIncomplete")
    assert f"sluice run orders --window {hour(16)}" in waited.document["remedy"]
    assert sluice("files", "orders", "--window", hour(16)).code == 75
    with pytest.raises(WindowIncomplete):
        read_numbers(hour(16))
    assert package.check("orders", hour(16)).complete is False
    assert sluice("check", "orders", hour(17)).code == 0

    assert sluice("run", "orders", "--no-dagster", "--window", hour(16)).code == 0
    assert read_numbers(hour(16)) == [64, 65, 66, 67]
    assert sluice("check", "orders", hour(16), "--json").document["landed"] == 4
    assert sluice("wait", "orders", "--window", hour(16)).code == 0
    assert sluice("audit", "orders", "--rescan", "--strict").code == 0


def test_a_backfill_before_the_first_hour_leaves_it_its_records(begin: Begin, sluice: Sluice) -> None:
    begin_at(begin, 16 * 60 + 30)
    assert sluice("run", "orders", "--no-dagster", "--from", hour(14), "--to", hour(16)).code == 0
    assert read_numbers(hour(14), to=hour(16)) == list(range(56, 64))
    assert sluice("check", "orders", hour(16)).code == 1
    assert sluice("run", "orders", "--no-dagster", "--window", hour(16)).code == 0
    assert [read_numbers(hour(n)) for n in (15, 16, 17)] == [[*range(4 * n, 4 * n + 4)] for n in (15, 16, 17)]
    assert sluice("audit", "orders", "--rescan", "--strict").code == 0


def test_first_hour_whose_beginning_kafka_deleted_is_completed_by_an_accepted_loss(
    begin: Begin, sluice: Sluice, kafka: LocalKafka, topic: str
) -> None:
    begin_at(begin, 16 * 60 + 30)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.delete_records({TopicPartition(topic, 0): 65})
    admin.close()
    refused = sluice("run", "orders", "--no-dagster", "--window", hour(16), "--json")
    assert refused.code != 0
    assert "accept orders lost" in refused.run["remedy"]
    assert sluice("accept", "orders", "lost", "--reason", "gone", "--yes").code == 0
    assert sluice("run", "orders", "--no-dagster", "--window", hour(16)).code == 0
    check = sluice("check", "orders", hour(16), "--json")
    assert (check.code, check.document["landed"], check.document["lost"]) == (0, 3, 1)


def test_renamed_feed_completes_the_hour_in_which_it_began(
    begin: Begin, sluice: Sluice, project: Path, kafka: LocalKafka, topic: str
) -> None:
    """Follow the steps of docs/deploying.md: rows of the old name lie below the new one's origin."""
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    assert begin("earliest").code == 0
    last = YESTERDAY + 23 * HOUR + 50 * 60_000
    for number in range(96, 100):
        producer.send(topic, b"%d" % number, partition=0, timestamp_ms=last)
    producer.close()
    (project / "feeds" / "orders.yaml").rename(project / "feeds" / "sales.yaml")
    assert sluice("accept", "sales", "group", "--begin", "committed", "--reason", "renamed", "--yes").code == 0
    assert sluice("run", "sales", "--no-dagster").code == 0
    assert sluice("check", "sales", hour(23), "--json").document["state"] == "from the origin on"
    assert sluice("run", "sales", "--no-dagster", "--window", hour(23)).code == 0
    assert read_numbers(hour(23), feed="sales") == list(range(92, 100))


def test_a_date_is_all_hours_of_the_day(begin: Begin, sluice: Sluice) -> None:
    assert begin("earliest").code == 0
    day, following = show_window(YESTERDAY)[:10], show_window(YESTERDAY + DAY)[:10]
    assert read_numbers(day) == read_numbers(day, to=following) == list(range(96))
    assert read_numbers(f"{day}T00") == [0, 1, 2, 3]
    assert len(sluice("files", "orders", "--window", day).out.split()) == 24
    waited = sluice("wait", "orders", "--window", day, "--json").document
    assert [w["window"] for w in waited["windows"]] == [hour(n) for n in range(24)]
    check = sluice("check", "orders", day, "--json")
    assert (check.code, check.document["error"]) == (2, "UsageError")
    assert f"sluice wait orders --window {day}" in check.document["remedy"]
    with pytest.raises(UsageError, match="24 windows"):
        package.check("orders", day)
    again = sluice("run", "orders", "--no-dagster", "--window", day, "--replace", "--json")
    assert (again.code, len(again.runs)) == (0, 24)
    result = package.run("orders", day)["orders"]
    assert result.error is None
