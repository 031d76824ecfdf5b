"""`sluice offsets migrate`, by the command itself, between a real ZooKeeper and a real Kafka."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition

from sluice.cli.main import main
from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_stores
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperMembership
from tests.integration.support import Place, commit_feed, run
from tests.resources.kafka.tools import produce
from tests.zookeepers import LocalZooKeeper

Migrate = Callable[..., tuple[int, dict[str, Any]]]
THERE, BACK = ("--into", "kafka"), ("--into", "zookeeper")


class Group:
    """A feed over three partitions of ten records each, and its group in both stores as others see it."""

    def __init__(self, place: Place, zookeeper: LocalZooKeeper) -> None:
        self.place, self.zookeeper = place, zookeeper
        self.write("zookeeper")

    def write(self, store: str) -> None:
        told = {"store": store, "connect": self.zookeeper.connect, "patience": "0s"}
        self.feed = self.place.feed(offsets=json.dumps(told))
        self.name = self.feed.group

    def put(self, offsets: dict[int, str]) -> None:
        self.zookeeper.put(self.name, self.place.topic, offsets)

    def in_zookeeper(self) -> dict[int, str]:
        return self.zookeeper.held(self.name, self.place.topic)

    def in_kafka(self) -> dict[int, int]:
        consumer = KafkaConsumer(
            bootstrap_servers=self.place.kafka.bootstrap, group_id=self.name, enable_auto_commit=False
        )
        try:
            found = {p: consumer.committed(KafkaPartition(self.place.topic, p)) for p in range(3)}
        finally:
            consumer.close()
        return {p: at for p, at in found.items() if at is not None}


@pytest.fixture
def group(tmp_path: Path, kafka: LocalKafka, zookeeper: LocalZooKeeper, fresh_topic: Callable[..., str]) -> Group:
    topic = fresh_topic(partitions=3, name="moving")
    for partition in range(3):
        produce(kafka, topic, 10, partition)
    return Group(Place(tmp_path, kafka, topic), zookeeper)


@pytest.fixture
def migrate(group: Group, capfd: pytest.CaptureFixture[str]) -> Migrate:
    def call(*words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main(["offsets", "migrate", "orders", *words, "--project", str(group.place.root), "--json"])
        out = capfd.readouterr().out
        return code, json.loads(out) if out else {}

    return call


def test_a_dry_run_changes_nothing_and_the_command_moves_and_back(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "10", 2: "0"})
    code, said = migrate(*THERE, "--dry-run")
    assert (code, said["applied"], [o["step"] for o in said["offsets"]]) == (0, False, ["to move"] * 3)
    assert group.in_kafka() == {}
    code, said = migrate(*THERE, "--yes")
    assert (code, said["applied"], said["moved"]) == (0, True, 3)
    assert group.in_kafka() == {0: 4, 1: 10, 2: 0}
    assert group.in_zookeeper() == {0: "4", 1: "10", 2: "0"}
    assert migrate(*THERE, "--yes")[1]["moved"] == 0  # all of it is there already

    group.write("kafka")
    run(group.feed)
    assert commit_feed(group.feed).status is CommitStatus.COMMITTED
    assert migrate(*BACK, "--yes")[1]["moved"] == 2
    assert group.in_zookeeper() == {0: "10", 1: "10", 2: "10"}
    group.write("zookeeper")
    assert commit_feed(group.feed).status is CommitStatus.UNCHANGED  # marks and all
    with open_stores(group.feed) as stores:
        held = stores.zookeeper.fetch_committed([TopicPartition(group.place.topic, 0)])
    assert all(c is not None and "sluice" in c.metadata for c in held.values())


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({0: "4", 1: "11", 2: "0"}, "beyond the end of the log: .*:1 .11, the log ends at 10"),
        ({0: "4", 2: "0"}, "without an offset in zookeeper, where their topic has others: .*:1"),
        ({0: "4", 1: "x", 2: "0"}, "/1 holds 'x'"),
    ],
)
def test_a_tree_that_is_not_sound_is_refused_whole(
    group: Group, migrate: Migrate, offsets: dict[int, str], said: str
) -> None:
    import re

    group.put(offsets)
    for words in (("--dry-run",), ("--yes",)):
        code, found = migrate(*THERE, *words)
        assert code == 3
        assert re.search(said, (found.get("problem") or found)["message"])
    assert group.in_kafka() == {}


def test_partitions_that_are_sound_can_be_moved_alone(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 2: "99"})
    code, said = migrate(*THERE, "--only", f"{group.place.topic}:0", "--yes")
    assert (code, said["moved"], group.in_kafka()) == (0, 1, {0: 4})


def test_a_group_in_use_is_refused_by_name(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    about = {"version": 1, "subscription": {group.place.topic: 1}, "pattern": "static", "timestamp": "1"}
    with group.zookeeper.client() as old:
        old.create(f"/consumers/{group.name}/ids/somebody", json.dumps(about).encode(), ephemeral=True, makepath=True)
        for words in (("--dry-run",), ("--yes",)):
            code, said = migrate(*THERE, *words)
            assert (code, "somebody" in str(said)) == (3, True)
    server = group.place.kafka.bootstrap
    with KafkaConsumer(bootstrap_servers=server, group_id=group.name, enable_auto_commit=False) as member:
        member.subscribe([group.place.topic])
        while not member.assignment():
            member.poll(200)
        code, said = migrate(*THERE, "--yes")
        assert (code, "in Kafka" in str(said)) == (3, True)
    assert group.in_kafka() == {}


def test_what_has_gone_on_in_the_target_is_not_put_back(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    migrate(*THERE, "--yes")
    group.put({0: "7", 1: "2", 2: "4"})
    code, said = migrate(*THERE, "--yes")
    assert (code, "further on in kafka than in zookeeper" in said["problem"]["message"]) == (3, True)
    assert group.in_kafka() == {0: 4, 1: 4, 2: 4}


def test_a_second_migration_is_refused_while_one_is_at_work(group: Group, migrate: Migrate) -> None:
    group.put({0: "4", 1: "4", 2: "4"})
    with open_stores(group.feed) as first:
        first.zookeeper.own(lambda: [TopicPartition(group.place.topic, p) for p in range(3)], lambda: None)
        code, said = migrate(*THERE, "--yes")
        assert (code, "sluice" in str(said), group.in_kafka()) == (3, True, {})
    assert migrate(*THERE, "--yes")[1]["moved"] == 3


class _Killed(BaseException):
    """As if the process had been killed here."""


@pytest.mark.parametrize("words", [THERE, BACK], ids=["to kafka", "to zookeeper"])
@pytest.mark.parametrize("step", ["before", "half", "after"])
def test_a_migration_that_is_killed_is_finished_by_the_same_command(
    group: Group, migrate: Migrate, monkeypatch: pytest.MonkeyPatch, step: str, words: tuple[str, ...]
) -> None:
    offsets = {0: "4", 1: "5", 2: "6"}
    group.put(offsets)
    if words is BACK:
        migrate(*THERE, "--yes")
        with group.zookeeper.client() as client:
            client.delete(f"/consumers/{group.name}/offsets", recursive=True)
    where, name = (KafkaGroups, "put") if words is THERE else (ZooKeeperMembership, "commit_plain")
    real = getattr(where, name)

    def killed(self: Any, *given: Any) -> None:
        if step != "before":
            *others, all_of_them = given
            some = dict(list(all_of_them.items())[: 1 if step == "half" else 3])
            real(self, *others, some)
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        assert migrate(*words, "--yes")[0] != 0
    code, said = migrate(*words, "--yes")
    assert (code, said["moved"]) == (0, {"before": 3, "half": 2, "after": 0}[step])
    assert (group.in_zookeeper(), group.in_kafka()) == (offsets, {0: 4, 1: 5, 2: 6})
