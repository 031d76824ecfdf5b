"""`sluice contract`: proposals are never in force, and checks land nothing."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.contract.suite import read_contract
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.landing.sample import choose_newest, to_offset_ranges
from sluice.pipelines.model.kafka import Range, TopicPartition
from sluice.pipelines.util.scratch import get_root
from sluice.resources.great_expectations import refusals
from sluice.resources.local.events import Mix, SampleEvent, SendOptions, orders, send
from sluice.resources.local.local_kafka import LocalKafka
from sluice.testing.cluster import partition
from tests.cli.conftest import Sluice

START = 1_700_000_000_000
ORDERS = """\
format: json
schema: {order_id: string, customer: string, ts: timestamp, amount: "decimal(12,2)", currency: string, items: int32}
window: 15m
"""

Row = dict[str, Any]


def build_suite(*expectations: Row) -> str:
    return json.dumps({"name": "orders", "expectations": expectations})


def expect_between(column: str, low: Any, high: Any, **more: Any) -> Row:
    kwargs = {"column": column, "min_value": low, "max_value": high}
    return {"type": "expect_column_values_to_be_between", "kwargs": kwargs, **more}


# -- the choice of the sample


def test_sample_is_even_and_short_partitions_are_compensated() -> None:
    partitions = [
        partition(number=n, last_stable_offset=end, high_watermark=end) for n, end in enumerate((10, 1000, 1000, 0))
    ]
    assert [(s.partition, s.start, s.end) for s in choose_newest(to_offset_ranges(partitions), 500, 1 << 30)] == [
        (0, 0, 10),
        (1, 755, 1000),
        (2, 755, 1000),
    ]


def test_sample_is_bounded_by_bytes_when_log_size_is_available() -> None:
    partitions = [partition(last_stable_offset=1000, high_watermark=1000, log_bytes=1_000_000)]
    (chosen,) = choose_newest(to_offset_ranges(partitions), 1000, 100_000)
    assert (chosen.start, chosen.end, chosen.estimated_bytes) == (900, 1000, 100_000)


def test_range_is_cut_to_available_and_stable_offsets() -> None:
    partitions = [partition(log_start=50, last_stable_offset=80, high_watermark=100)]
    cut = to_offset_ranges(partitions, {TopicPartition("orders", 0): [Range(0, 60), Range(70, 200), Range(90, 95)]})
    assert [(s.start, s.end) for s in cut] == [(50, 60), (70, 80)]


# -- refusals before any record is read


def test_check_without_contract_suggests_init_command(project: Path, sluice: Sluice) -> None:
    result = sluice("contract", "check", "orders")
    assert result.code == 2
    assert "sluice contract init orders" in result.err


def test_contract_is_expected_next_to_the_feed_file(project: Path, sluice: Sluice) -> None:
    text = (project / "feeds" / "orders.yaml").read_text()
    (project / "feeds" / "orders.yaml").rename(project / "feeds" / "file.yaml").write_text(f"feed: sales\n{text}")
    assert "feeds/file.contract.json" in sluice("contract", "check", "sales").err


def test_every_problem_of_a_contract_is_named(project: Path, sluice: Sluice) -> None:
    file = project / "try.json"
    file.write_text(build_suite(expect_between("nowhere", 0, 1), {"type": "expect_the_unexpected", "kwargs": {}}))
    result = sluice("contract", "check", "orders", "--file", str(file))
    assert result.code == 2
    assert "try.json: expectations[0] expect_column_values_to_be_between" in result.err
    assert "expectations[1] expect_the_unexpected" in result.err


def test_proposal_is_refused_at_contract_path_and_over_existing_file(project: Path, sluice: Sluice) -> None:
    result = sluice("contract", "init", "orders", "--output", "feeds/orders.contract.json", "--force")
    assert (result.code, "feeds read contracts" in result.err) == (2, True)
    (project / "feeds" / "orders.contract.proposed.json").write_text("mine")
    result = sluice("contract", "init", "orders")
    assert (result.code, "--force" in result.err) == (2, True)
    assert (project / "feeds" / "orders.contract.proposed.json").read_text() == "mine"


def test_refusals_of_great_expectations_are_reported_by_index() -> None:
    wrong = {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "a"}}
    unknown = {"type": "expect_the_unexpected", "kwargs": {}}
    problems = [*refusals([expect_between("a", 0, 1), wrong, unknown])]
    assert problems == [(1, "value_set: field required"), (2, "Great Expectations has no expectation of this type")]


# -- on a real Kafka


@pytest.fixture
def shop(project: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose feed reads 3,000 orders of a real Kafka, 30 of which have a negative amount."""
    topic = fresh_topic(partitions=3)
    (project / "feeds" / "orders.yaml").write_text(
        f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\n{ORDERS}"
    )
    empty = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {fresh_topic()}\nstart: earliest\n"
    (project / "feeds" / "empty.yaml").write_text(empty)
    scratch = project / "scratch"
    scratch.mkdir()
    get_root()  # this process's own folder lies elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("COLUMNS", "140")
    mix = Mix(seed=7, bad=0.005, tombstones=0.01)
    send(KafkaSettings(bootstrap=kafka.bootstrap), _make_negative(orders(mix, 3000, START, START + 3_600_000)), mix,
         SendOptions((topic,)))  # fmt: skip
    return project


def _make_negative(events: Iterator[SampleEvent]) -> Iterator[SampleEvent]:
    remaining = 30
    for event in events:
        if remaining and event.value and not event.malformed and b'"amount":' in event.value:
            remaining, event = remaining - 1, event._replace(value=event.value.replace(b'"amount":', b'"amount":-1'))
        yield event


def test_contract_is_proposed_and_checked_without_landing(shop: Path, sluice: Sluice) -> None:
    proposed = sluice("contract", "init", "orders", "--json").document
    file = shop / "feeds" / "orders.contract.proposed.json"
    assert proposed["file"] == str(file)
    kinds = {(p["kwargs"]["column"], p["type"].removeprefix("expect_column_values_")) for p in proposed["proposals"]}
    assert kinds >= {("order_id", "to_be_unique"), ("currency", "to_be_in_set"), ("amount", "to_be_between")}
    assert {p["severity"] for p in proposed["proposals"]} == {"warning"}
    assert json.loads(file.read_text()) == proposed["suite"]
    feed = load_feed(shop / "feeds" / "orders.yaml", {})
    assert feed.contract is None, "it is in a file that no feed reads"
    assert read_contract(file, feed.columns)
    assert all(re.fullmatch(r"[^:]+:[012]:\d+", f["first"]) for f in proposed["unfit"])
    assert sum(f["records"] for f in proposed["unfit"]) == proposed["sample"]["quarantined"] > 5

    tried = sluice("contract", "check", "orders", "--file", str(file), "--json")
    assert (tried.code, tried.document["published"]) == (0, True)
    assert [e for e in tried.document["expectations"] if not e["passed"]] == []

    text = sluice("contract", "init", "orders", "--records", "1500", "--output", "my rules.json").out
    (move,) = [shlex.split(line) for line in text.splitlines() if line.startswith("    mv ")]
    assert move == ["mv", "my rules.json", str(shop / "feeds" / "orders.contract.json")]

    unfit = proposed["sample"]["quarantined"]
    (shop / "feeds" / "orders.contract.json").write_text(
        build_suite(expect_between("amount", 0, None), expect_between("items", 3, 8, severity="warning"))
    )
    result = sluice("contract", "check", "orders", "--json")
    amount, items = result.document["expectations"]
    assert (amount["unexpected"], amount["severity"], items["severity"]) == (30, "critical", "warning")
    examples = result.document["examples"]
    assert all(values.startswith("amount=-1") for _, values in examples[str(amount["place"])])
    assert items["unexpected"] > 100
    are_shown = [values in ("items=1", "items=2") for _, values in examples[str(items["place"])]]
    assert are_shown == [True] * len(items["first"])
    contract_faults = [f for f in result.document["quarantine"] if f["stage"] == "contract"]
    assert sum(f["records"] for f in contract_faults) == 30
    assert result.document["sample"]["quarantined"] == unfit + 30
    assert (result.code, result.document["published"]) == (0, True)
    assert "! items is between 3 and 8" in sluice("contract", "check", "orders").out

    window = sluice("contract", "check", "orders", "--window", "2023-11-14T22:00", "--json").document
    assert window["sample"]["complete"]
    assert 30 < window["sample"]["records"] < 100, "of the 100 seconds of the window after the first record"
    assert window["expectations"][0]["unexpected"] == 30, "they are the first, and all in it"

    expectation = expect_between("items", 3, 8)
    expectation["kwargs"]["mostly"] = 0.99
    (shop / "feeds" / "orders.contract.json").write_text(build_suite(expectation))
    refused = sluice("contract", "check", "orders", "--records", "300")
    assert refused.code == 1
    assert "300 records" in refused.out
    assert "would be refused" in refused.out

    assert not (shop / ".sluice" / "lake").exists()
    assert [*(shop / "scratch").iterdir()] == []


def test_contract_init_is_refused_for_empty_topic(shop: Path, sluice: Sluice) -> None:
    result = sluice("contract", "init", "empty")
    assert result.code == 1
    assert "has no stable record" in result.err
