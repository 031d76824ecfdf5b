"""Batches that expand beyond a task's memory, on a real Kafka: each record is where the feed's policy puts it, and no
process grows above `task_memory`."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    query_files,
    read_rows,
    replay_feed,
    rescan_feed,
    run,
)

CODECS = ["gzip", "snappy", "lz4", "zstd"]
STAMP = 1_795_000_000_000
LARGE = 17 << 20
SMALL_TASK, LARGE_TASK = "{task_memory: 300MiB}", "{task_memory: 1GiB}"
"""Tasks that take batches of 16 MiB, and of more than 100 MiB."""
GOOD = [b"first", b"second"]
PRODUCED = [*GOOD, b"a" * LARGE, *GOOD]


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(config={"max.message.bytes": str(4 << 20)}))


def produce(project: FeedProject, codec: str, values: list[bytes] = PRODUCED, partitions: Iterable[int] = (0,)) -> None:
    """Produce the values to each partition, each value in a batch of its own."""
    producer = KafkaProducer(
        bootstrap_servers=project.kafka.bootstrap,
        compression_type=codec,
        max_request_size=1 << 30,
        linger_ms=0,
    )
    for partition in partitions:
        for n, value in enumerate(values):
            producer.send(project.topic, value, b"k", partition=partition, timestamp_ms=STAMP + n).get(60)
    producer.close()


def read_quarantine(feed: Feed) -> list[dict[str, Any]]:
    query = """select topic, partition, "offset", epoch_ms("timestamp") as timestamp, key, value, stage, reason, detail
        from read_parquet($files, hive_partitioning = false) order by partition, "offset" """
    paths = list(open_lake(feed).list(f"quarantine/{feed.name}"))
    return query_files(feed, query, paths).to_pylist() if paths else []


def read_values(feed: Feed) -> dict[int, bytes]:
    return {row["offset"]: row["value"] for row in read_rows(feed)}


def explain_offset(feed: Feed, project: FeedProject, offset: int) -> OffsetClass:
    with open_inline_ports(feed) as ports:
        return explain(open_feed_ledger(feed, ports), ports.lake, TopicPartition(project.topic, 0), offset).class_


def check_audit(feed: Feed, not_comparable: int = 0) -> None:
    report = rescan_feed(feed)
    assert (report.problems, report.not_comparable) == ((), not_comparable)


@pytest.mark.parametrize("codec", CODECS)
def test_oversized_batch_is_quarantined_and_lands_with_more_memory(project: FeedProject, codec: str) -> None:
    produce(project, codec)
    feed = project.write_feed(tuning=SMALL_TASK)
    run(feed)
    assert read_values(feed) == {0: b"first", 1: b"second", 3: b"first", 4: b"second"}
    (row,) = read_quarantine(feed)
    assert re.fullmatch(r"in a batch of [\d,]+ bytes with more than 16,777,216 bytes of records", row.pop("detail"))
    assert row == {
        "topic": project.topic,
        "partition": 0,
        "offset": 2,
        "timestamp": STAMP + 2,
        "key": None,
        "value": None,
        "stage": "decode",
        "reason": "oversized",
    }
    assert explain_offset(feed, project, 2) is OffsetClass.QUARANTINED
    check_audit(feed)

    feed = project.write_feed(tuning=LARGE_TASK)
    check_audit(feed)
    replayed = replay_feed(feed)
    assert (replayed.trial.tried.total(), replayed.trial.fit.total()) == (1, 0), "its bytes are only in Kafka"
    assert [kind.reason for kind in replayed.trial.why] == ["oversized"]
    run(feed, Request(RequestKind.OFFSETS, ranges=(AskedRange(project.topic, 0, 2, 3),), replace=True))
    assert read_values(feed) == dict(enumerate(PRODUCED))
    check_audit(feed)


def test_refused_batch_lands_after_the_memory_is_raised(project: FeedProject) -> None:
    produce(project, "zstd")
    feed = project.write_feed(tuning=SMALL_TASK, policies="{on_undecodable: fail}")
    with pytest.raises(SluiceError, match="oversized"):
        run(feed)
    assert read_rows(feed) == []
    run(project.write_feed(tuning=LARGE_TASK, policies="{on_undecodable: fail}"))
    assert read_values(feed) == dict(enumerate(PRODUCED))


def test_dropped_batch_is_counted(project: FeedProject) -> None:
    produce(project, "lz4")
    schema = '{id: "string"}'
    feed = project.write_feed(tuning=SMALL_TASK, format="json", schema=schema, policies="{on_undecodable: drop}")
    run(feed)
    assert explain_offset(feed, project, 2) is OffsetClass.DROPPED
    check_audit(feed)


def test_dead_letter_has_no_value(project: FeedProject, fresh_topic: Callable[..., str]) -> None:
    produce(project, "gzip")
    letters = fresh_topic(name="letters")
    feed = project.write_feed(tuning=SMALL_TASK, dead_letters=f"{{topic: {letters}}}")
    run(feed)
    commit_feed(feed)
    (letter,) = consume_topic(project.kafka, letters)
    assert (letter["key"], letter["value"], letter["timestamp"]) == (None, None, STAMP + 2)
    headers = {h["key"]: h["value"].decode() for h in letter["headers"]}
    assert (headers["sluice.offset"], headers["sluice.reason"]) == ("2", "oversized")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["staging", "log"])
def test_killed_run_leaves_each_offset_in_one_class(
    project: FeedProject, fresh_topic: Callable[..., str], stage: str
) -> None:
    """Kill a run at its first staged receipt, or its second entry in the ledger, and finish its batch."""
    project.topic = fresh_topic(partitions=4, config={"max.message.bytes": str(4 << 20)})
    produce(project, "zstd", partitions=range(4))
    feed = project.write_feed(tuning=SMALL_TASK, engine="processes", policies="{quarantine_limit: {share: 1}}")
    command, folder = [Path(sys.executable).with_name("sluice"), "run", "orders", "--no-dagster"], Path(feed.lake)
    number, pattern = (1, "*/*/*.json") if stage == "staging" else (2, "*.json")
    with subprocess.Popen(command, cwd=project.root, start_new_session=True) as process:
        while process.poll() is None:
            if len(list((folder / "_sluice" / "orders" / stage).glob(pattern))) >= number:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    run(feed)
    rows = [(r["partition"], r["offset"], r["value"]) for r in read_rows(feed)]
    assert rows == [(p, o, v) for p in range(4) for o, v in enumerate(PRODUCED) if o != 2]
    assert [(r["partition"], r["offset"]) for r in read_quarantine(feed)] == [(p, 2) for p in range(4)]
    check_audit(feed)


PARTITIONS, EXPANDING = 24, range(0, 24, 3)
MEMORY = 512
"""MiB: the default of `task_memory`."""
LANDING = 34 << 20
"""The value of a batch that such a task just takes."""


def read_peaks(root: int, peaks: dict[int, int]) -> None:
    """Note the peak of memory in MiB of each Python process below `root`, by pid."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        pid = int(status.parent.name)
        parents[pid] = int(fields["PPid"])
        if "VmHWM" in fields and "java" not in fields["Name"]:
            peaks[pid] = max(peaks.get(pid, 0), int(fields["VmHWM"].split()[0]) >> 10)
    below = {root}
    while grown := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= grown
    for pid in set(peaks) & set(parents) - below:
        del peaks[pid]


@pytest.fixture(scope="module")
def large_topic(kafka: LocalKafka, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A topic with batches that just fit into a task's memory, and some that expand far beyond it."""
    project = FeedProject(tmp_path_factory.mktemp("large"), kafka, f"large-{secrets.token_hex(4)}")
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        settings = {"num_partitions": PARTITIONS, "configs": {"retention.ms": "-1"}}
        admin.create_topics({project.topic: settings}, wait_for_metadata=True)
    fitting, too_large = b"b" * LANDING, b"a" * (240 << 20)
    for partition in range(PARTITIONS):
        beyond = [too_large] if partition in EXPANDING else []
        produce(project, "zstd", [*GOOD, *beyond, fitting, *GOOD], [partition])
    return project.topic


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", pytest.param("spark", marks=pytest.mark.spark)])
def test_no_process_grows_above_task_memory(tmp_path: Path, kafka: LocalKafka, large_topic: str, engine: str) -> None:
    project = FeedProject(tmp_path, kafka, large_topic)
    settings = {"engine": engine, "group": f"g-{large_topic}-{engine}"}
    feed = project.write_feed(**settings, policies="{quarantine_limit: {share: 1}}")
    command = [Path(sys.executable).with_name("sluice"), "run", "orders", "--no-dagster"]
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, cwd=project.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            read_peaks(process.pid, peaks)
            time.sleep(0.05)  # a peak stays until its process ends, and workers wait for the end of the run
        output = process.stdout.read() if process.stdout else b""
    assert process.returncode == 0, output.decode()
    assert len(peaks) > 1, "the workers were seen"
    assert max(peaks.values()) < MEMORY, peaks
    query = "select count(*) as n, sum(octet_length(value)) as bytes from read_parquet($files)"
    (landed,) = query_files(feed, query, list_files(feed)).to_pylist()
    assert landed == {"n": 5 * PARTITIONS, "bytes": PARTITIONS * (LANDING + 2 * len(b"".join(GOOD)))}
    assert [(r["partition"], r["offset"]) for r in read_quarantine(feed)] == [(p, 2) for p in EXPANDING]
