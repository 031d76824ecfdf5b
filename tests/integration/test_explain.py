"""`sluice explain` by condition, key, run and window, in all lives of a topic, compared with DuckDB over the files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.pipelines.util.units import show_window
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, list_files, query_files, run
from tests.integration.test_groups import make_consumer, poll_in_background
from tests.integration.test_lives import find_hour, recreate

pytestmark = pytest.mark.kafka


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})


def produce(project: FeedProject, first: int, count: int, hour: int) -> None:
    """Write objects with numbers from `first` on and five keys, and one value that is no JSON, to two partitions."""
    with KafkaProducer(bootstrap_servers=project.kafka.bootstrap) as producer:
        for i in range(first, first + count):
            value = b'{"id": %d}' % i if i != first + 3 else b"no json"
            producer.send(project.topic, value, b"k%d" % (i % 5), partition=i % 2, timestamp_ms=hour + i)


def list_coordinates(document: dict[str, Any]) -> list[tuple[int, int]]:
    return sorted((r["partition"], r["offset"]) for r in document["records"])


def test_records_of_all_lives_are_searched_as_duckdb_reads_them(project: FeedProject, call: Call) -> None:
    settings = {"format": "json", "schema": "{id: int64}", "policies": "{quarantine_limit: {share: 1.0}}"}
    feed = project.write_feed(**settings)
    produce(project, 0, 40, find_hour(4))
    run(feed, owner=new_owner("none:first-run"))
    recreate(project, project.topic, partitions=2)
    assert call("accept", "orders", "recreated", "--reason", "INC-1", "--yes")[0] == 0
    produce(project, 100, 20, find_hour(2))
    run(feed)
    query = """select kafka_partition, kafka_offset from read_parquet($files, hive_partitioning = false)
        where {} order by all"""

    for where in ("id % 7 = 3", "id < 40", "kafka_partition = 1 and kafka_offset < 5"):
        code, document = call("explain", "orders", "--where", where, "-n", "1000", "--json")
        expected = [tuple(r.values()) for r in query_files(feed, query.format(where), list_files(feed)).to_pylist()]
        landed = [r for r in document["records"] if r["class"] == "landed"]
        assert (code, document["landed"]) == (0, len(expected)), where
        assert sorted((r["partition"], r["offset"]) for r in landed) == expected
    assert document["quarantined"] == 2, "a record without values meets what its coordinates meet"

    code, document = call("explain", "orders", "--key", "k3", "-n", "1000", "--json")
    assert (code, document["landed"], document["quarantined"]) == (0, 10, 2)
    assert {r["class"] for r in document["records"]} == {"landed", "quarantined"}
    assert len({r["topic_id"] for r in document["records"]}) == 2

    window = show_window(find_hour(4))
    for by in (["--run", "first"], ["--window", window]):
        code, document = call("explain", "orders", *by, "-n", "1000", "--json")
        assert (code, document["landed"], document["quarantined"]) == (0, 39, 1)
        assert list_coordinates(document) == [(p, o) for p in (0, 1) for o in range(20)]
    code, text = call("explain", "orders", "--where", "id = 17")
    assert (code, "1 record in 1 file" in text) == (0, True), text
    assert re.search(r"id +17\n", text), text
    code, text = call("explain", "orders", "--where", "id = 17000")
    assert (code, "no record matches" in text) == (1, True)


def test_a_replaced_topic_shows_an_offset_in_each_life(project: FeedProject, call: Call) -> None:
    feed = project.write_feed(format="json", schema="{id: int64}", policies="{quarantine_limit: {share: 1.0}}")
    produce(project, 0, 40, find_hour(4))
    run(feed)
    recreate(project, project.topic, partitions=2)
    assert call("accept", "orders", "recreated", "--reason", "INC-1", "--yes")[0] == 0
    produce(project, 100, 20, find_hour(2))
    run(feed)

    code, both = call("explain", "orders", f"{project.topic}:0:4", "--json")
    assert (code, both["record"]["id"], [e["record"]["id"] for e in both["earlier"]]) == (0, 108, [8])
    assert both["topic_id"] != both["earlier"][0]["topic_id"]
    code, former = call("explain", "orders", f"{project.topic}:0:15", "--json")
    assert (former["class"], [e["record"]["id"] for e in former["earlier"]]) == ("not read yet", [30])
    code, text = call("explain", "orders", f"{project.topic}:0:15")
    assert re.search(r"not read yet.*landed by batch", text, re.DOTALL), text


@pytest.mark.parametrize(("by", "printed"), [("--run", r"run +(none:\S+)"), ("--window", r"window (\S+) ")])
def test_output_of_a_failed_run_leads_to_its_records(project: FeedProject, call: Call, by: str, printed: str) -> None:
    feed = project.write_feed(format="json", schema="{id: int64}", policies="{quarantine_limit: {share: 1.0}}")
    produce(project, 0, 40, find_hour(4))
    produce(project, 100, 20, find_hour(2))
    produce(project, 200, 20, find_hour(0))
    run(feed)
    hour = show_window(find_hour(2))
    with poll_in_background(make_consumer(feed, project.topic)):
        code, text = call("run", "orders", "--window", hour, "--replace", "--no-dagster")
    assert code == 3, text
    value = re.findall(printed, text)[-1]
    code, listed = call("explain", "orders", by, value, "-n", "100")
    (command,) = re.findall(r"sluice (explain orders \S+)", listed)
    coordinates = re.findall(rf"{project.topic}:(\d+):(\d+) .*landed", listed)
    query = """select kafka_partition, kafka_offset from read_parquet($files, hive_partitioning = false)
        where id between 100 and 199"""
    expected = {tuple(map(str, r.values())) for r in query_files(feed, query, list_files(feed)).to_pylist()}
    assert (code, {*coordinates}) == (0, expected)
    code, document = call(*command.split(), "--json")
    assert (code, document["record"]["id"] // 100) == (0, 1)


def test_id_of_a_refused_run_leads_to_its_records(project: FeedProject, call: Call) -> None:
    project.write_feed(format="json", schema="{id: string}", policies="{quarantine_limit: {share: 0, at_least: 1}}")
    produce(project, 0, 40, find_hour(4))
    code, document = call("run", "orders", "--no-dagster", "--json")
    name = document["feeds"][0]["runs"][0]["run"]
    assert code == 3
    code, text = call("explain", "orders", "--run", name)
    (command,) = re.findall(r"sluice (status \S+)", text)
    assert (code, "no record matches" in text) == (1, True)
    code, text = call(*command.split())
    record = " ".join(re.search(r"sluice peek (\S+) -n 1", " ".join(text.split()))[1].split())
    code, document = call("peek", record, "-n", "1", "--json")
    assert (code, document["records"][0]["offset"]) == (0, 0)
    assert f"run {name.partition(':')[2][:8]}" in call("explain", "orders", record)[1]


def test_an_offset_and_a_search_exclude_each_other(project: FeedProject, call: Call) -> None:
    project.write_feed()
    assert call("explain", "orders", "t:0:1", "--key", "a")[0] == 2
    assert call("explain", "orders")[0] == 2
