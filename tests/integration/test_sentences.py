"""Sentences of the commands on a real Kafka that were false once: each is read where it is true and where it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient

from sluice.cli.main import main
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject
from tests.resources.kafka.tools import open_producer, wait_until

Topics = Callable[..., str]


@dataclass
class Shell:
    """Runs commands in the project and returns their exit code and their output on both streams."""

    project: FeedProject
    capfd: pytest.CaptureFixture[str]
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.project.root

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self.capfd.readouterr()
        code = main([*arguments, "--project", str(self.root)])
        return code, " ".join(" ".join(self.capfd.readouterr()).split())

    def read_document(self, *arguments: str) -> dict[str, Any]:
        self.capfd.readouterr()
        main([*arguments, "--json", "--project", str(self.root)])
        return dict(json.loads(self.capfd.readouterr().out))

    def produce(self, values: list[bytes], topic: str = "", partition: int = 0) -> None:
        with open_producer(self.project.kafka) as producer:
            for value in values:
                producer.send(topic or self.project.topic, value, partition=partition)


@pytest.fixture
def shell(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, capfd: pytest.CaptureFixture[str]) -> Shell:
    (tmp_path / "fleet.yaml").write_text("scheduler: none\n")
    return Shell(FeedProject(tmp_path, kafka, fresh_topic(partitions=2)), capfd)


def make_numbers(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def test_lag_counts_pending_offsets_only(shell: Shell) -> None:
    shell.project.write_feed()
    shell.produce(make_numbers(100))
    assert shell("run", "orders", "--offsets", f"{shell.project.topic}:0:30-90")[0] == 0
    (feed,) = shell.read_document("status", "orders")["feeds"]
    assert (feed["lag"], [p["lag"] for p in feed["partitions"]]) == (40, [40, 0])
    figures = shell.read_document("metrics")["figures"]
    assert [f["value"] for f in figures if f["name"] == "sluice_lag_offsets"] == [40]


def test_catch_up_reports_the_offsets_beyond_its_limits(shell: Shell) -> None:
    shell.project.write_feed(limits="{records: 10}")
    shell.produce(make_numbers(25))
    code, text = shell("run", "orders")
    assert (code, "the feed's limits ended the run: 15 offsets remain → the next run continues" in text) == (0, True)
    shell("run", "orders")
    code, text = shell("run", "orders")
    assert (code, "limits" in text) == (0, False)


def test_skip_reports_that_it_skipped_nothing(shell: Shell) -> None:
    shell.project.write_feed()
    shell.produce(make_numbers(10))
    old = shell("run", "orders", "--skip-to", "2020-01-01T00:00:00Z", "--reason", "test")[1]
    assert "nothing was skipped: no offset before that is pending" in old
    shell.produce(make_numbers(10))
    assert "nothing was skipped" not in shell("run", "orders", "--skip-to", "latest", "--reason", "test")[1]


def test_check_of_a_feed_without_records_names_its_first_window(shell: Shell) -> None:
    shell.project.write_feed()
    shell("run", "orders")
    code, text = shell("check", "orders")
    assert (code, "it is open until" in text) == (75, True)


def test_audit_prints_accept_gone_for_partitions_that_kafka_does_not_list(shell: Shell, fresh_topic: Topics) -> None:
    other = fresh_topic(name="other")
    shell.project.write_feed(topics=f"[{shell.project.topic}, {other}]")
    shell.produce(make_numbers(10))
    shell("run", "orders")
    shell.project.write_feed()  # `other` is taken out
    remedy = "sluice accept orders gone --reason"
    code, text = shell("audit", "orders", "--strict")
    assert (code, f"windows wait for {other}:0, which Kafka does not list for the feed" in text) == (1, True)
    assert remedy in text
    assert shell("accept", "orders", "gone", "--reason", "test", "--yes")[0] == 0
    assert shell("audit", "orders", "--strict")[0] == 0

    with KafkaAdminClient(bootstrap_servers=shell.project.kafka.bootstrap) as admin:
        admin.delete_topics([shell.project.topic])
        wait_until(lambda: shell.project.topic not in admin.list_topics())
        admin.create_topics({shell.project.topic: {"num_partitions": 1}}, wait_for_metadata=True)
    assert "sluice accept orders recreated" in shell("audit", "orders", "--strict")[1]
    assert shell("accept", "orders", "recreated", "--reason", "test", "--yes")[0] == 0
    code, text = shell("audit", "orders", "--strict")
    assert (code, remedy in text, f"windows wait for {shell.project.topic}:1" in text) == (1, True, True)
    assert shell("accept", "orders", "gone", "--reason", "test", "--yes")[0] == 0
    assert shell("audit", "orders", "--strict")[0] == 0


def test_a_committing_copy_of_the_lake_is_named_as_a_cause(shell: Shell, tmp_path: Path) -> None:
    shell.project.write_feed()
    shell.produce(make_numbers(10))
    shell("run", "orders")
    copy = tmp_path / "copy"
    shutil.copytree(shell.root, copy, ignore=shutil.ignore_patterns("copy"))
    shell.produce(make_numbers(10))
    production, shell.root = shell.root, copy
    assert shell("run", "orders")[0] == 0
    shell.root = production
    code, text = shell("run", "orders")
    assert (code, "lost entries, or a copy of this lake commits to its group" in text) == (3, True)
    assert "give that one another `group:`" in text
    assert shell("accept", "orders", "ledger", "--reason", "a copy", "--yes")[0] == 0
    assert shell("run", "orders")[0] == 0
    assert "20 rows" in shell("audit", "orders", "--strict")[1]
    assert shell("audit", "orders", "--strict")[0] == 0


@pytest.mark.parametrize("name", [".DS_Store", ".nfs00000000017e3a"])
def test_hidden_files_of_the_system_are_ignored(shell: Shell, name: str) -> None:
    shell.project.write_feed()
    shell.produce(make_numbers(10))
    shell("run", "orders")
    lake = shell.root / ".sluice" / "lake"
    for folder in (lake, *(path for path in lake.rglob("*") if path.is_dir())):
        (folder / name).write_bytes(b"\0")
    assert shell("audit", "orders", "--strict")[0] == 0
    assert name not in shell("repair", "orders")[1]
    assert shell("run", "orders")[0] == 0
    (next(lake.glob("data/**/*.parquet")).parent / "copy.parquet").write_bytes(b"\0")
    assert shell("audit", "orders", "--all")[0] == 1


def test_rescan_names_columns_that_round(shell: Shell) -> None:
    shell.project.write_feed(
        format="json", schema="{id: int64, price: float64, tags: 'list<float32>', exact: 'decimal(20,10)'}"
    )
    shell.produce([b'{"id": 1, "price": 0.12345678901234567890, "tags": [0.1], "exact": 0.1234567890}'])
    assert shell("run", "orders")[0] == 0
    code, text = shell("audit", "orders", "--rescan")
    assert (code, "price, tags: compared as rounded to a float" in text) == (0, True)
    assert shell.read_document("audit", "orders", "--rescan")["rounded"] == ["price", "tags"]
    assert "rounded" not in shell("audit", "orders")[1]


def test_a_renamed_feed_lands_again_unless_it_names_its_group(shell: Shell) -> None:
    shell.project.write_feed()
    shell.produce(make_numbers(10))
    shell("run", "orders")
    group = shell.project.write_feed().group
    (shell.root / "feeds" / "orders.yaml").unlink()
    shell.project.write_feed("sales")
    assert shell("run", "sales")[0] == 0
    assert "10 rows" in shell("audit", "sales")[1]
    shell.project.write_feed("goods", group=group)
    assert shell("run", "goods")[0] == 3
