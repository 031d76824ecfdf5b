"""Each state in which runs are refused or a file is missing, on a real Kafka: every report names it with one remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka import TopicPartition as Plain
from kafka.structs import OffsetAndMetadata

from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.sensors import SensorCursor, Tick
from sluice.cli.main import main
from sluice.pipelines.util.units import show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.integration.support import FeedProject
from tests.integration.test_operator import HOUR, find_first_hour
from tests.resources.kafka.tools import open_producer, wait_until

Topics = Callable[..., str]
GOOD, BAD = b'{"id": 1}', b"nonsense"
LIMIT = "{quarantine_limit: {share: 0.1, at_least: 1}}"


class State:
    """A feed whose first hour has landed and is committed; the second hour is pending in Kafka."""

    def __init__(self, project: FeedProject, capfd: pytest.CaptureFixture[str], *values: bytes) -> None:
        self.project, self._capfd, self.start = project, capfd, find_first_hour()
        (project.root / "fleet.yaml").write_text("scheduler: none\n")
        self.feed = project.write_feed(format="json", schema="{id: int64}", policies=LIMIT)
        self.lake = project.root / ".sluice" / "lake"
        for hour, value in enumerate(values):
            self.produce(hour, value)
        self.run("run", "orders", "--window", show_window(self.start))
        self.pending = self.start + HOUR

    def produce(self, hour: int, value: bytes) -> None:
        with open_producer(self.project.kafka) as producer:
            for i in range(20):
                producer.send(self.project.topic, value, partition=i % 2, timestamp_ms=self.start + hour * HOUR + i)

    def run(self, *arguments: str) -> int:
        return main([*(arguments or ("run", "orders")), "--project", str(self.project.root)])

    def read_document(self, *arguments: str) -> dict[str, Any]:
        self._capfd.readouterr()
        self.run(*arguments, "--json")
        return dict(json.loads(self._capfd.readouterr().out))

    def commit(self, offset: int) -> None:
        """Move the group's offset, as another client does."""
        consumer = KafkaConsumer(bootstrap_servers=self.project.kafka.bootstrap, group_id=self.feed.group)
        consumer.commit({Plain(self.project.topic, 0): OffsetAndMetadata(offset, "", -1)})
        consumer.close(autocommit=False)

    def open_admin(self) -> KafkaAdminClient:
        return KafkaAdminClient(bootstrap_servers=self.project.kafka.bootstrap)


def lose_entries(state: State) -> None:
    log = sorted((state.lake / "_sluice" / "orders" / "log").iterdir())
    for entry in log[-2:]:
        entry.unlink()


def lose_ledger(state: State) -> None:
    shutil.rmtree(state.lake)


def refuse_batch(state: State) -> None:
    state.run()


def move_offsets(state: State) -> None:
    state.commit(3)


def recreate_topic(state: State) -> None:
    with state.open_admin() as admin:
        admin.delete_topics([state.project.topic])
        wait_until(lambda: state.project.topic not in admin.list_topics())
        admin.create_topics({state.project.topic: {"num_partitions": 2}}, wait_for_metadata=True)


def delete_topic(state: State) -> None:
    with state.open_admin() as admin:
        admin.delete_topics([state.project.topic])
        wait_until(lambda: state.project.topic not in admin.list_topics())


def lose_records(state: State) -> None:
    with state.open_admin() as admin:
        admin.delete_records({Plain(state.project.topic, 0): 15})


def delete_file(state: State) -> None:
    next(state.lake.glob("data/**/*.parquet")).unlink()


def cut_file(state: State) -> None:
    path = next(state.lake.glob("data/**/*.parquet"))
    path.write_bytes(path.read_bytes()[:-7])


STATES: dict[Callable[[State], None], tuple[str, str, str]] = {
    lose_entries: ("ledger", "sluice accept orders ledger", "pending"),
    lose_ledger: ("group", "sluice accept orders group", "pending"),
    refuse_batch: ("refused", "sluice repair orders --abandon", "pending"),
    move_offsets: ("commit", "sluice accept orders moved", ""),
    recreate_topic: ("changed", "sluice accept orders recreated", "pending"),
    delete_topic: ("topics", "", "pending"),
    lose_records: ("lost", "sluice accept orders lost", "pending"),
    delete_file: ("files", "--replace", "start"),
    cut_file: ("files", "--replace", "start"),
}
"""By state: the kind of its finding, part of the remedy, and the window that `check` reports for it."""


@pytest.mark.slow
@pytest.mark.parametrize("enter", STATES, ids=lambda enter: enter.__name__)
def test_every_report_names_the_state_with_the_same_remedy(
    enter: Callable[[State], None],
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Topics,
    capfd: pytest.CaptureFixture[str],
) -> None:
    state = State(
        FeedProject(tmp_path, kafka, fresh_topic(partitions=2)), capfd, GOOD, BAD if enter is refuse_batch else GOOD
    )
    enter(state)
    kind, part, window = STATES[enter]

    (feed,) = state.read_document("status", "orders")["feeds"]
    remedies = [f["remedy"] for f in feed["findings"] if f["kind"] == kind and f["severe"]]
    assert len(remedies) == 1, feed["findings"]
    assert part in remedies[0]

    state.run("status")
    text = " ".join(capfd.readouterr().out.split())
    assert "✗ orders: " in text
    assert "caught up" not in text

    doctor = state.read_document("doctor")
    checks = [c for g in doctor["groups"] for c in g["checks"]]
    assert remedies[0] in [c["remedy"] for c in checks if c["health"] == "failed"]
    assert not doctor["healthy"]

    figures = state.read_document("metrics", "orders")["figures"]
    labels = [f["labels"] for f in figures if f["name"] == "sluice_findings"]
    assert {"feed": "orders", "finding": kind, "severity": "error", "remedy": remedies[0]} in labels

    with dg.DagsterInstance.ephemeral() as instance:
        tick = Tick(RunSession(Project(state.project.root)), SensorCursor())
        tick.run(instance, lambda: 0.0)
    assert any(line.startswith("orders: ") and line.endswith(remedies[0]) for line in tick.news), tick.news

    if window:
        checked = state.read_document("check", "orders", show_window(getattr(state, window)))
        assert not checked.get("passed")
        reasons = checked.get("reasons") or [checked]
        assert remedies[0] in [r["remedy"] for r in reasons]
