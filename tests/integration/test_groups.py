"""`sluice groups` and `sluice offsets` compared with Kafka's own kafka-consumer-groups, on a real cluster."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer

from sluice.cli.main import main
from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.errors import GroupHeld, GroupMoved
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local import java, local_kafka
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import SLUICE, FeedProject, commit_feed, run
from tests.resources.kafka.tools import produce, wait_until

GET_OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"
Sluice = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def project(kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path, lake: Lines) -> FeedProject:
    topic = fresh_topic(partitions=2, name="grouped.topic")
    for partition in range(2):
        produce(kafka, topic, 100, partition)
    return FeedProject(tmp_path, kafka, topic, lake())


@pytest.fixture
def feed(project: FeedProject) -> Feed:
    """A feed that has landed and committed both partitions, up to 100."""
    landed_feed = project.write_feed()
    run(landed_feed)
    commit_feed(landed_feed)
    return landed_feed


@pytest.fixture
def sluice(project: FeedProject, capfd: pytest.CaptureFixture[str]) -> Sluice:
    """Runs a command, and returns its exit code and document."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main([*words, "--project", str(project.root), "--json"])
        return code, json.loads(capfd.readouterr().out)

    return call


def run_kafkas_tool(kafka: LocalKafka, *words: str) -> list[dict[str, str]]:
    """Run Kafka's own tool. Returns the rows of the table that it prints, by column name."""
    process = kafka.tool(TOOL, "--bootstrap-server", kafka.bootstrap, *words)
    assert process.returncode == 0, process.stderr
    header, *rows = [line for line in process.stdout.splitlines() if line.strip()]
    names = header.replace("COORDINATOR (ID)", "COORDINATOR ID").split()
    return [dict(zip(names, line.replace("(", " ").replace(")", " ").split(), strict=True)) for line in rows]


@contextmanager
def poll_in_background(consumer: KafkaConsumer) -> Iterator[KafkaConsumer]:
    """Poll the consumer in a thread until the block ends; it has partitions when the block begins."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            consumer.poll(100)

    thread = threading.Thread(target=poll)
    wait_until(consumer.topics)
    thread.start()
    try:
        wait_until(consumer.assignment)
        yield consumer
    finally:
        stopped.set()
        thread.join()
        consumer.close()


def make_consumer(feed: Feed, topic: str) -> KafkaConsumer:
    return KafkaConsumer(
        topic, bootstrap_servers=feed.kafka.bootstrap, group_id=feed.group, client_id="loader", enable_auto_commit=False
    )


def get_offsets(document: dict[str, Any], key: str = "committed") -> list[Any]:
    return [row[key] for row in document["offsets"]]


def test_group_with_a_member_matches_kafka_command_line_tool(kafka: LocalKafka, feed: Feed, sluice: Sluice) -> None:
    produce(kafka, feed.topics.names[0], 20)
    with poll_in_background(make_consumer(feed, feed.topics.names[0])):
        printed = run_kafkas_tool(kafka, "--describe", "--group", feed.group)
        (state,) = run_kafkas_tool(kafka, "--describe", "--group", feed.group, "--state")
        code, document = sluice("groups", "describe", feed.group)
    assert code == 0
    assert [
        (r["topic"], r["partition"], r["committed"], r["log_end"], r["lag"], r["held_by"]) for r in document["offsets"]
    ] == [
        *(
            (
                r["TOPIC"],
                *(int(r[n]) for n in ("PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")),
                r["CONSUMER-ID"],
            )
            for r in sorted(printed, key=lambda r: r["PARTITION"])
        )
    ]
    assert [(m["client_id"], f"/{m['host']}") for m in document["members"]] == [
        (printed[0]["CLIENT-ID"], printed[0]["HOST"])
    ]
    assert (state["STATE"], state["ASSIGNMENT-STRATEGY"], state["#MEMBERS"]) == ("Stable", document["assignor"], "1")
    assert (state["COORDINATOR"], state["ID"]) == (
        document["coordinator"]["address"],
        str(document["coordinator"]["id"]),
    )
    assert (document["state"], document["feed"], get_offsets(document, "lag")) == ("Stable", feed.name, [20, 0])


def test_watch_reports_each_change_until_the_group_is_free(
    kafka: LocalKafka, feed: Feed, project: FeedProject, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    with poll_in_background(make_consumer(feed, feed.topics.names[0])) as consumer:
        words = ("groups", "watch", feed.group, "--until", "Empty", "--timeout", "60s", "--project", str(project.root))
        watching = subprocess.Popen([*SLUICE, *words, "--json"], stdout=subprocess.PIPE, text=True)
        assert watching.stdout
        first = json.loads(watching.stdout.readline())
        assert (first["after"], first["text"].startswith("Stable, 1 member")) == ("Stable", True)
        assert consumer.assignment()
    changes = [json.loads(line) for line in watching.stdout]
    assert watching.wait(60) == 0
    states = [r for r in changes if r["what"] == "state"]
    assert states[-1]["after"] == "Empty"
    assert all(r["allowed"] for r in states)
    assert [r["text"].partition(" at ")[0] for r in changes if r["what"] == "left"] == ["loader"]
    command = ["groups", "watch", feed.group, "--project", str(project.root)]
    assert main([*command, "--until", "Stable", "--timeout", "1s"]) == 1
    assert main([*command, "--until", "Asleep"]) == 2


def test_offsets_before_a_time_match_kafka_command_line_tool(kafka: LocalKafka, feed: Feed, sluice: Sluice) -> None:
    (topic,) = feed.topics.names
    between = time.time_ns() // 1_000_000 + 1
    time.sleep(0.05)
    produce(kafka, topic, 5, 1)
    process = kafka.tool(GET_OFFSETS, "--bootstrap-server", kafka.bootstrap, "--topic", topic, "--time", str(between))
    expected = {int(line.split(":")[1]): line.split(":")[2] for line in process.stdout.split()}
    code, document = sluice("offsets", "before", feed.name, datetime.fromtimestamp(between / 1000, UTC).isoformat())
    assert code == 0
    assert [(row["partition"], row["offset"]) for row in document["offsets"]] == [(0, 100), (1, int(expected[1]))]
    assert 0 not in expected, "Kafka's tool prints no offset where no record is later"
    code, same = sluice("offsets", "diff", feed.name, "--with", feed.group)
    assert (code, same["same"]) == (0, True)


def test_member_is_not_disturbed_and_its_offsets_are_not_moved(kafka: LocalKafka, feed: Feed, sluice: Sluice) -> None:
    with poll_in_background(make_consumer(feed, feed.topics.names[0])) as consumer:
        assignment, member = consumer.assignment(), sluice("groups", "describe")[1]["members"]
        code, refused = sluice("offsets", "reset", feed.name, "--to-earliest", "--yes")
        assert (code, refused["problem"]["error"], refused["applied"]) == (3, "GroupHeld", False)
        assert "loader at 127.0.0.1" in refused["problem"]["message"]
        assert sluice("offsets", "show", feed.name)[0] == 0, "there is nothing to commit"
        produce(kafka, feed.topics.names[0], 20)
        run(feed)
        assert sluice("offsets", "show", feed.name)[0] == 3
        with pytest.raises(GroupHeld):
            commit_feed(feed)
        code, after = sluice("groups", "describe")
        assert (after["members"], get_offsets(after), consumer.assignment()) == (member, [100, 100], assignment)
    assert wait_until(lambda: sluice("offsets", "show", feed.name)[0] == 0)
    assert commit_feed(feed).status is CommitStatus.COMMITTED


def test_moved_offsets_are_detected_reset_and_committed_again(
    kafka: LocalKafka, feed: Feed, sluice: Sluice, project: FeedProject
) -> None:
    topic = f"{project.topic}:1"
    run_kafkas_tool(kafka, "--group", feed.group, "--topic", topic, "--reset-offsets", "--to-offset", "40", "--execute")
    code, document = sluice("offsets", "show", feed.name)
    assert (code, get_offsets(document), get_offsets(document, "stands")) == (
        3,
        [100, 40],
        ["at the frontier", "moved by somebody"],
    )
    with pytest.raises(GroupMoved):
        commit_feed(feed)
    code, moved = sluice("offsets", "reset", feed.name, "--shift", "-5", "--yes", "--reason", "a look back")
    assert (code, get_offsets(moved, "after"), moved["entry"] is not None) == (0, [95, 35], True)
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert get_offsets(sluice("offsets", "show", feed.name)[1]) == [100, 100]
    assert run(feed).batches == (), "nothing is read again"


def test_kafka_command_line_tool_reads_the_export(
    kafka: LocalKafka, feed: Feed, sluice: Sluice, tmp_path: Path
) -> None:
    file = tmp_path / "offsets.csv"
    sluice("offsets", "reset", feed.name, "--to-offset", "60", "--yes")
    assert sluice("offsets", "export", feed.name, "--file", str(file))[0] == 0
    sluice("offsets", "reset", feed.name, "--to-earliest", "--yes")
    printed = run_kafkas_tool(kafka, "--group", feed.group, "--reset-offsets", "--from-file", str(file), "--dry-run")
    assert sorted((r["TOPIC"], r["PARTITION"], r["NEW-OFFSET"]) for r in printed) == [
        (feed.topics.names[0], p, "60") for p in ("0", "1")
    ]
    code, done = sluice("offsets", "import", feed.name, str(file), "--yes")
    assert (code, get_offsets(done, "committed"), get_offsets(done, "after")) == (0, [0, 0], [60, 60])


def test_group_of_the_newer_protocol_is_reported_and_never_moved(
    kafka: LocalKafka, feed: Feed, sluice: Sluice, project: FeedProject
) -> None:
    with run_newer_consumer(kafka, project.topic, feed.group):
        (member,) = wait_until(lambda: sluice("groups", "describe", feed.group)[1]["members"])
        wait_until(lambda: sluice("groups", "describe", feed.group)[1]["members"][0]["partitions"])
        described = sluice("groups", "describe", feed.group)[1]
        assert (described["kind"], described["assignor"], member["client_id"]) == ("consumer", "uniform", "newer")
        assert [p["partition"] for p in described["members"][0]["partitions"]] == [0, 1]
        listed = sluice("groups", "list")[1]["groups"]
        assert [(g["kind"], g["feed"]) for g in listed if g["group"] == feed.group] == [("consumer", feed.name)]
        code, refused = sluice("offsets", "reset", feed.name, "--to-earliest", "--yes")
        assert (code, refused["problem"]["error"]) == (3, "GroupHeld")


@contextmanager
def run_newer_consumer(kafka: LocalKafka, topic: str, group: str) -> Iterator[None]:
    """Run Kafka's own console consumer with the protocol of KIP-848 until the block ends."""
    words = ["--bootstrap-server", kafka.bootstrap, "--topic", topic, "--group", group]
    for setting in ("group.protocol=consumer", "client.id=newer", "enable.auto.commit=false"):
        words += ["--command-property", setting]
    jars = java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS)
    command = [str(java.find_java()), "-Xmx128m", "-cp", f"{jars}/*", CONSOLE, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
            assert process.poll() is None, "it was disturbed"
        finally:
            process.terminate()
