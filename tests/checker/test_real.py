"""A real Kafka with transactions, checked by Kafka's own tools: a correct feed passes, a planted duplicate fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, TopicPartition

from sluice.cli.main import main as sluice_main
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.checker.__main__ import main
from tests.checker.gather import check_local
from tests.checker.invariants import Settings
from tests.checker.lake import Folder
from tests.checker.planted import land_again
from tests.checker.producers import Noting
from tests.integration.support import FeedProject, commit_feed, run

pytestmark = pytest.mark.faults
HEALED = Settings(healed=True)
HOSTILE: list[dict[str, Any]] = [
    {"text": "a\nbaseOffset: 0 | offset: 1"},
    {"text": "\u2028é\x00"},
    {"text": "<l-0>\t"},
    {"tombstone": True},
]


@pytest.fixture
def project(kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3, name="Checked.topic"))


def produce(project: FeedProject, notes: Path, name: str, compression: str | None) -> None:
    """Send plain values, a committed and an aborted transaction to every partition."""
    plain = Noting(notes, f"{name}-plain", project.kafka.bootstrap, compression_type=compression)
    transactional = Noting(
        notes, f"{name}-tied", project.kafka.bootstrap, f"{project.topic}-{name}", compression_type=compression
    )
    for partition in range(3):
        plain.send(project.topic, partition, 40, HOSTILE)
        for commits in (True, False):
            with transactional.run_transaction(commits=commits):
                transactional.send(project.topic, partition, 15)
    plain.close()
    transactional.close()


def test_correct_feed_passes_and_planted_duplicate_fails(
    project: FeedProject, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes, feed = tmp_path / "produced.jsonl", project.write_feed()
    for name, codec in (("a", None), ("b", "lz4"), ("c", "zstd")):
        produce(project, notes, name, codec)
        run(feed)
        commit_feed(feed)
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(project.topic, 2): 50})
    folder, evidence = Folder(Path(open_lake(feed).locate("data")).parent, feed.name), tmp_path / "evidence"
    verdict = check_local(project.kafka, folder, evidence, [notes], HEALED)
    assert verdict.holds, str(verdict)
    assert set(verdict.decided) == {*range(1, 15), 16, 19, 20}
    assert verdict.undecided == {}
    assert (
        verdict.counts["rows"]
        == verdict.counts["records compared with the log"] + verdict.counts["rows that the log no longer holds"]
    )
    assert verdict.counts["rows"] == 3 * 3 * 55
    sluice = ("audit", feed.name, "--rescan", "--strict", "--json", "--project", str(project.root))
    capfd.readouterr()
    assert sluice_main(sluice) == 0
    output = json.loads(capfd.readouterr().out)
    assert output["strict"]["committed_offsets"] == 3
    assert {(u["partition"], u["why"]) for u in output["strict"]["unseen"]} == {(2, "below the log start 50")}
    check_planted_duplicate(folder, evidence, notes, tmp_path)


def check_planted_duplicate(folder: Folder, evidence: Path, notes: Path, spare: Path) -> None:
    """Run the command on the stored evidence, with the lake and with a copy in which a range landed twice."""
    forged = Folder(Path(shutil.copytree(folder.root, spare / "forged")), folder.feed)
    stored = [f"--{name}={evidence / f'{name}.jsonl'}" for name in ("scan", "log", "offsets")]
    common = [f"--feed={folder.feed}", *stored, f"--produced={notes}", "--healed"]
    assert main([f"--lake={folder.root}", *common]) == 0
    land_again(forged)
    assert main([f"--lake={forged.root}", *common]) == 1
    assert json.loads((evidence / "log.jsonl").read_text().splitlines()[0])["topic_id"]
