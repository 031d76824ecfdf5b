"""Surprises of the first days, provoked on a real Kafka: each command states the cause and the next command."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.partition_status_cache import AssetPartitionStatus
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition

from sluice.assets.checks.feed_checks import OFFSETS_COMMITTED
from sluice.assets.instance.instance import open_instance
from sluice.cli.main import main
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.assets.world import read_checks
from tests.integration.support import FeedProject

Sluice = Callable[..., tuple[int, dict[str, Any]]]
FIRST, EMPTY, LAST = (time.time_ns() // 1_000_000 // HOUR * HOUR - hours * HOUR for hours in (5, 4, 3))


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    """A project, and a topic with records in its first and third hour, four per partition."""
    topic = fresh_topic(partitions=2)
    send(kafka, topic, FIRST)
    send(kafka, topic, LAST)
    return FeedProject(make_folder(tmp_path / "first"), kafka, topic)


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def send(kafka: LocalKafka, topic: str, stamp: int) -> None:
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for n in range(8):
            producer.send(topic, b"%d" % n, partition=n % 2, timestamp_ms=stamp + n)


@pytest.fixture
def sluice(project: FeedProject, capfd: pytest.CaptureFixture[str]) -> Sluice:
    """Runs a command, and returns its exit code and document; `root` selects another project's folder."""

    def call(*words: str, root: Path = project.root) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main([*words, "--project", str(root), "--json"])
        return code, json.loads(capfd.readouterr().out)

    return call


def land(sluice: Sluice, *words: str, root: Path) -> dict[str, Any]:
    """Run the feed, and expect success. Returns the run's document."""
    code, document = sluice("run", "orders", *words, root=root)
    assert code == 0, document
    ((run,),) = (feed["runs"] for feed in document["feeds"])
    return dict(run)


def read_status(sluice: Sluice, root: Path) -> dict[str, Any]:
    (feed,) = sluice("status", "orders", root=root)[1]["feeds"]
    return dict(feed)


def list_windows(sluice: Sluice, root: Path) -> dict[str, tuple[str, bool]]:
    """Returns each window's state, and whether the window is empty."""
    return {w["window"]: (w["state"], w["empty"]) for w in read_status(sluice, root)["windows"]}


def count_landed(run: dict[str, Any]) -> int:
    return sum(batch["landed"] for batch in run["batches"])


def test_start_is_not_used_where_another_client_committed(project: FeedProject, sluice: Sluice) -> None:
    feed = project.write_feed()
    with KafkaConsumer(bootstrap_servers=project.kafka.bootstrap, group_id=feed.group) as other:
        other.commit({TopicPartition(project.topic, 0): OffsetAndMetadata(3, "", -1)})
    planned, before = sluice("plan", "orders")[1], read_status(sluice, project.root)
    run = land(sluice, root=project.root)
    for document in (planned, before, run):
        assert "`start: earliest` is not used in 1 of 2 partitions" in document["start_not_used"]
        assert f"group {feed.group} has offsets there" in document["start_not_used"]
        assert "`group: NAME` in feeds/orders.yaml" in document["start_not_used"]
    assert (planned["offsets"], count_landed(run)) == (13, 13)
    assert read_status(sluice, project.root)["start_not_used"] == ""


def test_a_second_project_takes_the_group_over_by_the_named_command(
    project: FeedProject, sluice: Sluice, tmp_path: Path
) -> None:
    second = FeedProject(make_folder(tmp_path / "second"), project.kafka, project.topic)
    second.write_feed(group=project.write_feed().group)
    assert count_landed(land(sluice, root=project.root)) == 16
    send(project.kafka, project.topic, LAST)

    code, document = sluice("run", "orders", root=second.root)
    ((refused,),) = (feed["runs"] for feed in document["feeds"])
    assert (code, refused["error"]) == (3, "ForeignMarks")
    assert sluice("plan", "orders", root=second.root)[1]["error"] == "ForeignMarks"
    assert read_status(sluice, second.root)["error"]["error"] == "ForeignMarks"
    (command,) = re.findall(r"sluice (accept orders group --begin committed)", refused["remedy"])
    code, accepted = sluice(*shlex.split(command), "--reason", "moved", root=second.root)
    assert (code, accepted["applied"]) == (0, True)

    assert count_landed(land(sluice, root=second.root)) == 8
    assert read_status(sluice, second.root)["uncommitted"] == 0
    assert sluice("plan", "orders", root=project.root)[1]["error"] == "ForeignMarks"


def test_named_command_completes_a_partial_hour_and_empty_hour_lands(
    project: FeedProject, sluice: Sluice, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write_feed()
    first, empty, last = map(show_window, (FIRST, EMPTY, LAST))
    land(sluice, "--window", first, "--only", f"{project.topic}:0", root=project.root)
    assert list_windows(sluice, project.root)[first] == ("partial", False)
    main(["status", "orders", "--project", str(project.root)])
    (command,) = re.findall(r"to complete it: sluice (.+)", capfd.readouterr().out)
    assert count_landed(land(sluice, *shlex.split(command)[2:], root=project.root)) == 4
    assert list_windows(sluice, project.root)[first] == ("landed", False)

    land(sluice, root=project.root)
    states = list_windows(sluice, project.root)
    assert [states[w] for w in (first, empty, last)] == [("landed", False), ("landed", True), ("landed", False)]
    main(["status", "orders", "--project", str(project.root)])
    assert re.search(r" \d+ landed \([1-9] empty\)", capfd.readouterr().out)


def test_a_feed_that_commits_nothing_is_not_shown_as_committed(project: FeedProject, sluice: Sluice) -> None:
    project.write_feed(commit="none")
    run = land(sluice, "--window", show_window(FIRST), root=project.root)
    with open_instance(Project(project.root)) as instance:
        check = read_checks(instance, run["run"], OFFSETS_COMMITTED)[show_window(FIRST)]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert check.description == "nothing is committed: the feed has `commit: none`"
    summary = read_status(sluice, project.root)
    assert [p["committed"] for p in summary["partitions"]] == [None, None]
    assert summary["uncommitted"] == 8


def test_hours_that_had_landed_stay_green_in_a_run_with_a_failed_feed(project: FeedProject, sluice: Sluice) -> None:
    """The failed feed's own hours too: they are complete, whatever became of the topic."""
    project.write_feed(engine="processes")
    project.write_feed("web", engine="processes")
    hours = [show_window(h) for h in (FIRST, EMPTY, LAST)]
    request = ("run", "--all", "--from", hours[0], "--to", show_window(LAST + HOUR), "--windows-per-run", "3")
    assert sluice(*request)[0] == 0
    project.write_feed("web", topics="no-such-topic", engine="processes")
    code, document = sluice(*request)
    assert (code, "web" in document["failed"]) == (1, True), document
    with open_instance(Project(project.root)) as instance:
        assert instance.get_runs(limit=1)[0].status is dg.DagsterRunStatus.FAILURE
        for name in ("orders", "web"):
            partitions = dg.StaticPartitionsDefinition(hours)
            states = instance.get_status_by_partition(dg.AssetKey([name, "landed"]), hours, partitions)
            assert states == dict.fromkeys(hours, AssetPartitionStatus.MATERIALIZED), name
