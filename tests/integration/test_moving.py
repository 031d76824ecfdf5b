"""A feed moves from one store to another by the commands of docs/deploying.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject, consume_topic, read_rows

pytestmark = pytest.mark.usefixtures("default_engine")

PAIRS = [("local", "azure"), ("azure", "google"), ("google", "s3"), ("s3", "local")]
COUNT = 20


def produce(project: FeedProject) -> None:
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for number in range(COUNT):
            producer.send(project.topic, b"%d" % number, partition=number % 2)


def build_lines(request: pytest.FixtureRequest, kind: str, folder: Path) -> dict[str, str]:
    """The lines of a feed for a new lake of this kind."""
    if kind == "local":
        return {"lake": str(folder / "moved")}
    pytest.importorskip("boto3" if kind == "s3" else "obstore")
    lines: dict[str, str] = request.getfixturevalue(f"{kind}_store").build_feed_settings()
    return lines


def copy_lake(old: Feed, new: Feed) -> None:
    """Copy every object, as `azcopy`, `gcloud storage` and `aws s3` do: contents alone."""
    source, target = open_lake(old), open_lake(new)
    for path in source.list(""):
        target.put(path, source.get(path) or b"")


@pytest.mark.spark
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_feed_moves_to_another_store(
    before: str,
    after: str,
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2))

    def invoke(*words: str) -> dict[str, Any]:
        capfd.readouterr()
        code = main([*words, "--project", str(tmp_path), "--json"])
        out = capfd.readouterr().out
        assert code == 0, out
        return dict(json.loads(out))

    first = build_lines(request, before, tmp_path)
    produce(project)
    old = project.write_feed(**first)
    invoke("run", "orders")
    assert invoke("status", "orders")["feeds"][0]["live_batches"] == []

    new = project.write_feed(**build_lines(request, after, tmp_path))
    copy_lake(old, new)
    assert invoke("audit", "orders", "--strict")["reconciled"]
    assert read_rows(new) == read_rows(old) == consume_topic(kafka, project.topic)

    produce(project)
    invoke("run", "orders")
    assert invoke("audit", "orders", "--rescan")["reconciled"]
    assert read_rows(new) == consume_topic(kafka, project.topic)
    assert len(read_rows(old)) == COUNT, "the old lake is unchanged"
    if after != "local":
        assert "conditional writes" not in json.dumps(
            [c for g in invoke("doctor", "orders")["groups"] for c in g["checks"] if c["health"] == "skipped"]
        ), "the new store was tested, although the old note was copied"
