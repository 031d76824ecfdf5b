"""A feed's rename, the move of a topic to another feed and back, and a ledger that is rebuilt from files, killed before
each of their effects.

After each kill the project's feeds are valid, and runs of them land nothing twice. The same command continues.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, TopicPartition

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feeds
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.facts import Evidence
from tests.checker.invariants import check
from tests.checker.lake import Folder
from tests.faults.effects import run_command, run_until_killed
from tests.integration.support import (
    FeedProject,
    commit_feed,
    open_feed_ledger,
    open_inline_ports,
    produce_values,
    read_rows,
    rescan_feed,
    run,
)

pytestmark = pytest.mark.faults
BROKERS = 1
EACH = 10


def list_feeds(root: Path) -> dict[str, Feed]:
    return load_feeds(root / "feeds", {})


def land(root: Path) -> None:
    """Land and commit all feeds. A topic that has left a feed is refused there, as long as its file names it."""
    for feed in list_feeds(root).values():
        with suppress(UsageError, Refused):
            run(feed)
        commit_feed(feed)


def list_coordinates(root: Path) -> list[tuple[str, int, int]]:
    rows = [row for feed in list_feeds(root).values() if (root / ".sluice/lake/data" / feed.stored).exists()
            for row in read_rows(feed)]  # fmt: skip
    return [(row["topic"], row["partition"], row["offset"]) for row in rows]


def check_sound(root: Path) -> None:
    for feed in list_feeds(root).values():
        verdict = check(Folder(root / ".sluice" / "lake", feed.stored), Evidence())
        assert verdict.holds, f"{feed.name}: {verdict}"


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2))


def test_rename_killed_before_each_effect(project: FeedProject) -> None:
    rule = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "id"}}
    project.write_feed("orders", format="json", schema="{id: int64}")
    (project.root / "feeds" / "orders.contract.json").write_text(json.dumps({"expectations": [rule]}))
    names, killed = ["orders", "sales"], True
    for effect in itertools.count(1):
        killed = run_until_killed(effect, run_command, project.root, "feeds", "rename", *names, "--yes")
        ((name, feed),) = list_feeds(project.root).items()
        assert feed.stored == "orders"
        assert feed.contract is not None
        if name == names[0]:
            run_command(project.root, "feeds", "rename", *names, "--yes")
        assert [*list_feeds(project.root)] == names[1:]
        names.reverse()
        if not killed:
            break
    assert effect > 3, "there are more effects than that"


def test_move_of_a_topic_killed_before_each_effect(project: FeedProject, fresh_topic: Callable[..., str]) -> None:
    topics, root, sent = [project.topic, fresh_topic(partitions=2), fresh_topic()], project.root, 0
    project.write_feed("orders", topics=json.dumps(topics[:2]))
    project.write_feed("web", topics=json.dumps(topics[2:]))
    names = ["orders", "web"]

    def produce() -> None:
        nonlocal sent
        for project.topic in topics[:2]:
            produce_values(project, EACH)
            sent += EACH

    for effect in itertools.count(1):
        produce()
        land(root)
        produce()
        killed = run_until_killed(effect, run_command, root, "feeds", "move-topic", topics[1], *names, "--yes")
        land(root)
        check_sound(root)
        rows = list_coordinates(root)
        assert len(rows) == len(set(rows)), f"killed before effect {effect}: rows landed twice"
        run_command(root, "feeds", "move-topic", topics[1], *names, "--yes")
        land(root)
        rows = list_coordinates(root)
        assert len(rows) == len(set(rows)) == sent, f"killed before effect {effect}"
        takes = {name: feed.topics.takes(topics[1]) for name, feed in list_feeds(root).items()}
        assert takes == {names[0]: False, names[1]: True}
        names.reverse()
        if not killed:
            break
    assert effect > 8, "there are more effects than that"
    check_sound(root)
    for feed in list_feeds(root).values():
        assert rescan_feed(feed).problems == ()


def test_ledger_rebuilt_from_files_killed_before_each_effect(project: FeedProject) -> None:
    feed, root = project.write_feed("orders"), project.root
    for _ in range(3):
        produce_values(project, EACH)
        run(feed)
    with closing(KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap)) as admin:
        admin.delete_records({TopicPartition(project.topic, 0): 12, TopicPartition(project.topic, 1): 7})
    rows, lake = read_rows(feed), root / ".sluice" / "lake"
    shutil.rmtree(lake / "_sluice" / "orders")
    shutil.copytree(lake, root / "copy")
    for effect in itertools.count(1):
        words = ("accept", "orders", "ledger", "--from-files", "--reason", "test", "--yes")
        if killed := run_until_killed(effect, run_command, root, *words):
            with suppress(AssertionError):  # nothing is left to accept
                run_command(root, *words)
        run(feed)
        commit_feed(feed)
        assert read_rows(feed) == rows, f"killed before effect {effect}"
        check_sound(root)
        with open_inline_ports(feed) as ports:
            assert audit(open_feed_ledger(feed, ports), ports.lake, hashes=True).problems == ()
        if not killed:
            break
        shutil.rmtree(lake)
        shutil.copytree(root / "copy", lake)
    assert effect > 8, "there are more effects than that"
