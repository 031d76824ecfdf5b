"""A real Kafka with transactions: everything passes, by Kafka's own tools; a planted duplicate and a loss do not."""

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
from tests.checker.gather import checked
from tests.checker.invariants import Settings
from tests.checker.lake import Folder
from tests.checker.planted import land_again
from tests.checker.producers import Noting
from tests.integration.support import Place, commit_feed, run

pytestmark = pytest.mark.faults
HEALED = Settings(healed=True)
HOSTILE: list[dict[str, Any]] = [
    {"text": "a\nbaseOffset: 0 | offset: 1"},
    {"text": "\u2028é\x00"},
    {"text": "<l-0>\t"},
    {"tombstone": True},
]


@pytest.fixture
def place(kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=3, name="Checked.topic"))


def produce(place: Place, notes: Path, name: str, compression: str | None) -> None:
    """Plain values, a transaction that commits, one that aborts, in every partition."""
    plain = Noting(notes, f"{name}-plain", place.kafka.bootstrap, compression_type=compression)
    tied = Noting(notes, f"{name}-tied", place.kafka.bootstrap, f"{place.topic}-{name}", compression_type=compression)
    for partition in range(3):
        plain.send(place.topic, partition, 40, HOSTILE)
        for commits in (True, False):
            with tied.transaction(commits=commits):
                tied.send(place.topic, partition, 15)
    plain.close()
    tied.close()


def test_the_real_thing_passes_and_what_is_planted_does_not(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes, feed = tmp_path / "produced.jsonl", place.feed()
    for name, codec in (("a", None), ("b", "lz4"), ("c", "zstd")):
        produce(place, notes, name, codec)
        run(feed)
        commit_feed(feed)
    with KafkaAdminClient(bootstrap_servers=place.kafka.bootstrap) as admin:
        admin.delete_records({TopicPartition(place.topic, 2): 50})
    folder, evidence = Folder(Path(open_lake(feed).locate("data")).parent, feed.name), tmp_path / "evidence"
    found = checked(place.kafka, folder, evidence, [notes], HEALED)
    assert found.holds, str(found)
    assert set(found.decided) == {*range(1, 15), 16}
    assert found.undecided == {}
    assert (
        found.counts["rows"]
        == found.counts["records compared with the log"] + found.counts["rows that the log no longer holds"]
    )
    assert found.counts["rows"] == 3 * 3 * 55
    sluice = ("audit", feed.name, "--rescan", "--strict", "--json", "--project", str(place.root))
    capfd.readouterr()
    assert sluice_main(sluice) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["strict"]["committed_offsets"] == 3
    assert {(u["partition"], u["why"]) for u in said["strict"]["unseen"]} == {(2, "below the log start 50")}
    planted_duplicate(folder, evidence, notes, tmp_path)


def planted_duplicate(folder: Folder, evidence: Path, notes: Path, spare: Path) -> None:
    """The command, on the evidence that was kept, with a copy of the lake in which a range landed twice."""
    forged = Folder(Path(shutil.copytree(folder.root, spare / "forged")), folder.feed)
    kept = [f"--{name}={evidence / f'{name}.jsonl'}" for name in ("scan", "log", "offsets")]
    common = [f"--feed={folder.feed}", *kept, f"--produced={notes}", "--healed"]
    assert main([f"--lake={folder.root}", *common]) == 0
    land_again(forged)
    assert main([f"--lake={forged.root}", *common]) == 1
    assert json.loads((evidence / "log.jsonl").read_text().splitlines()[0])["topic_id"]
