"""The command `sluice offsets migrate` between a real ZooKeeper and a real Kafka."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from kafka.structs import OffsetAndMetadata

from sluice.cli.main import main
from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_stores
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperMembership
from tests.integration.support import FeedProject, commit_feed, fetch_committed, run
from tests.resources.kafka.tools import produce
from tests.zookeepers import LocalZooKeeper

Migrate = Callable[..., tuple[int, dict[str, Any]]]
THERE, BACK = ("--into", "kafka"), ("--into", "zookeeper")


class Group:
    """A feed over three partitions of ten records each, and its group's offsets in both stores, by other clients."""

    def __init__(self, project: FeedProject, zookeeper: LocalZooKeeper) -> None:
        self.project, self.zookeeper = project, zookeeper
        self.write("zookeeper")

    def write(self, store: str) -> None:
        settings = {"store": store, "connect": self.zookeeper.connect, "patience": "0s"}
        self.feed = self.project.write_feed(offsets=json.dumps(settings))
        self.name = self.feed.group

    def put(self, offsets: dict[int, str]) -> None:
        self.zookeeper.put(self.name, self.project.topic, offsets)

    def in_zookeeper(self) -> dict[int, str]:
        return self.zookeeper.read_offsets(self.name, self.project.topic)

    def in_kafka(self) -> dict[int, int]:
        committed = fetch_committed(self.project.kafka, self.name, self.project.topic, 3)
        return {p: offset for p, offset in enumerate(committed) if offset is not None}


@pytest.fixture
def group(tmp_path: Path, kafka: LocalKafka, zookeeper: LocalZooKeeper, fresh_topic: Callable[..., str]) -> Group:
    topic = fresh_topic(partitions=3, name="moving")
    for partition in range(3):
        produce(kafka, topic, 10, partition)
    return Group(FeedProject(tmp_path, kafka, topic), zookeeper)


@pytest.fixture
def migrate(group: Group, capfd: pytest.CaptureFixture[str]) -> Migrate:
    def call(*words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main(["offsets", "migrate", "orders", *words, "--project", str(group.project.root), "--json"])
        output = capfd.readouterr().out
        return code, json.loads(output) if output else {}

    return call


def test_dry_run_changes_nothing_and_offsets_migrate_both_ways(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "10", 2: "0"})
    code, document = migrate(*THERE, "--dry-run")
    assert (code, document["applied"], [o["step"] for o in document["offsets"]]) == (0, False, ["to move"] * 3)
    assert group.in_kafka() == {}
    code, document = migrate(*THERE, "--yes")
    assert (code, document["applied"], document["moved"]) == (0, True, 3)
    assert group.in_kafka() == {0: 4, 1: 10, 2: 0}
    assert group.in_zookeeper() == {0: "4", 1: "10", 2: "0"}
    assert migrate(*THERE, "--yes")[1]["moved"] == 0  # all offsets are there already

    group.write("kafka")
    run(group.feed)
    assert commit_feed(group.feed).status is CommitStatus.COMMITTED
    assert migrate(*BACK, "--yes")[1]["moved"] == 2
    assert group.in_zookeeper() == {0: "10", 1: "10", 2: "10"}
    group.write("zookeeper")
    assert commit_feed(group.feed).status is CommitStatus.UNCHANGED  # with the marks
    with open_stores(group.feed) as stores:
        committed = stores.zookeeper.fetch_committed([TopicPartition(group.project.topic, 0)])
    assert all(c is not None and "sluice" in c.metadata for c in committed.values())


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({0: "4", 1: "11", 2: "0"}, "beyond the end of the log: .*:1 .11, the log ends at 10"),
        ({0: "4", 2: "0"}, "without an offset in zookeeper, where their topic has others: .*:1"),
        ({0: "4", 1: "x", 2: "0"}, "/1 holds 'x'"),
    ],
)
def test_migration_of_an_invalid_tree_is_refused(
    group: Group, migrate: Migrate, offsets: dict[int, str], message: str
) -> None:
    group.put(offsets)
    for words in (("--dry-run",), ("--yes",)):
        code, document = migrate(*THERE, *words)
        assert code == 3
        assert re.search(message, (document.get("problem") or document)["message"])
    assert group.in_kafka() == {}


@pytest.mark.parametrize(
    ("offsets", "ahead", "expected"),
    [
        ({0: "4", 1: "11", 2: "0"}, {}, {0: 4, 1: 10, 2: 0}),
        ({0: "4", 2: "0"}, {}, {0: 4, 1: 0, 2: 0}),
        ({0: "4", 1: "2", 2: "0"}, {1: 7}, {0: 4, 1: 7, 2: 0}),
    ],
    ids=["beyond the log", "missing", "behind the target"],
)
def test_an_invalid_offset_is_corrected_by_the_printed_command(
    group: Group, migrate: Migrate, offsets: dict[int, str], ahead: dict[int, int], expected: dict[int, int]
) -> None:
    group.put(offsets)
    with KafkaAdminClient(bootstrap_servers=group.project.kafka.bootstrap) as admin:
        moved = {KafkaPartition(group.project.topic, p): OffsetAndMetadata(o, "", None) for p, o in ahead.items()}
        admin.alter_group_offsets(group.name, moved)
    code, document = migrate(*THERE, "--yes")
    (command,) = re.findall(r"sluice (offsets reset [^;]+)", document["problem"]["remedy"])
    assert code == 3
    assert main([*command.split(), "--yes", "--project", str(group.project.root)]) == 0
    assert group.in_zookeeper() == {p: str(offset) for p, offset in expected.items()}
    assert migrate(*THERE, "--yes")[0] == 0
    assert group.in_kafka() == expected


def test_valid_partitions_can_be_migrated_alone(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 2: "99"})
    code, document = migrate(*THERE, "--only", f"{group.project.topic}:0", "--yes")
    assert (code, document["moved"], group.in_kafka()) == (0, 1, {0: 4})


def test_a_group_in_use_is_refused_by_name(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    registration = {"version": 1, "subscription": {group.project.topic: 1}, "pattern": "static", "timestamp": "1"}
    with group.zookeeper.open_client() as client:
        client.create(
            f"/consumers/{group.name}/ids/somebody", json.dumps(registration).encode(), ephemeral=True, makepath=True
        )
        for words in (("--dry-run",), ("--yes",)):
            code, document = migrate(*THERE, *words)
            assert (code, "somebody" in str(document)) == (3, True)
    server = group.project.kafka.bootstrap
    with KafkaConsumer(bootstrap_servers=server, group_id=group.name, enable_auto_commit=False) as member:
        member.subscribe([group.project.topic])
        while not member.assignment():
            member.poll(200)
        code, document = migrate(*THERE, "--yes")
        assert (code, "in Kafka" in str(document)) == (3, True)
    assert group.in_kafka() == {}


def test_newer_offsets_in_the_target_are_not_overwritten(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    migrate(*THERE, "--yes")
    group.put({0: "7", 1: "2", 2: "4"})
    code, document = migrate(*THERE, "--yes")
    assert (code, "further on in kafka than in zookeeper" in document["problem"]["message"]) == (3, True)
    assert group.in_kafka() == {0: 4, 1: 4, 2: 4}


def test_second_migration_is_refused_while_one_is_active(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    with open_stores(group.feed) as first:
        first.zookeeper.own(lambda: [TopicPartition(group.project.topic, p) for p in range(3)], lambda: None)
        code, document = migrate(*THERE, "--yes")
        assert (code, "sluice" in str(document), group.in_kafka()) == (3, True, {})
    assert migrate(*THERE, "--yes")[1]["moved"] == 3


class _Killed(BaseException):
    """As if the process had been killed here."""


@pytest.mark.parametrize("words", [THERE, BACK], ids=["to kafka", "to zookeeper"])
@pytest.mark.parametrize("step", ["before", "half", "after"])
def test_killed_migration_is_completed_by_the_same_command(
    group: Group, migrate: Migrate, monkeypatch: pytest.MonkeyPatch, step: str, words: tuple[str, ...]
) -> None:
    offsets = {0: "4", 1: "5", 2: "6"}
    group.put(offsets)
    if words is BACK:
        migrate(*THERE, "--yes")
        with group.zookeeper.open_client() as client:
            client.delete(f"/consumers/{group.name}/offsets", recursive=True)
    owner, name = (KafkaGroups, "put") if words is THERE else (ZooKeeperMembership, "commit_plain")
    commit = getattr(owner, name)

    def commit_part_and_die(self: Any, *arguments: Any) -> None:
        if step != "before":
            *others, committed = arguments
            part = dict(list(committed.items())[: 1 if step == "half" else 3])
            commit(self, *others, part)
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, commit_part_and_die)
        assert migrate(*words, "--yes")[0] != 0
    code, document = migrate(*words, "--yes")
    assert (code, document["moved"]) == (0, {"before": 3, "half": 2, "after": 0}[step])
    assert (group.in_zookeeper(), group.in_kafka()) == (offsets, {0: 4, 1: 5, 2: 6})
