"""Races with small topics on a real Kafka, and what happens when a peer fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice.bench import suite
from sluice.bench.command import Asked, run
from sluice.bench.load import ensure
from sluice.bench.peers import Peer, named, running
from sluice.bench.stand import Assignment
from sluice.bench.workloads import ORDERS
from sluice.pipelines.errors import Failed, UsageError

NOWHERE = Assignment("127.0.0.1:1", "t", {0: 10}, 1)


def test_a_peer_that_ends_is_told_with_its_own_words(tmp_path: Path) -> None:
    broken = Peer("broken", "A broken peer", "sluice.bench.no_such_module")
    with (
        pytest.raises(Failed, match=r"A broken peer ended with 1(.|\n)*no_such_module"),
        running(broken, NOWHERE, tmp_path),
    ):
        pass


@pytest.mark.parametrize("asked", [Asked(names=("no such",)), Asked(peers=("no such",))])
def test_unknown_names_are_refused_before_anything_starts(asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        run(dataclasses.replace(asked, folder=tmp_path / "data"), [], print)
    assert not (tmp_path / "data").exists()


def test_an_assignment_survives_the_pipe() -> None:
    assert Assignment.from_json(NOWHERE.to_json()) == NOWHERE


def test_every_benchmark_compares_with_sluice() -> None:
    assert all(race.peers[0] is named("sluice") and race.name == name for name, race in suite.SUITE.items())


@pytest.mark.kafka
def test_a_topic_is_loaded_once_and_made_anew_when_it_is_not_whole(kafka: Any, tmp_path: Path) -> None:
    from kafka import KafkaProducer

    notes: list[str] = []
    loaded = ensure(ORDERS.of(400), kafka.bootstrap, tmp_path, notes.append)
    assert loaded.ends == {0: 100, 1: 100, 2: 100, 3: 100}
    assert ensure(ORDERS.of(400), kafka.bootstrap, tmp_path, notes.append) == loaded
    assert len(notes) == 1

    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        producer.send(loaded.topic, b"not ours", partition=2).get(timeout=30)
    again = ensure(ORDERS.of(400), kafka.bootstrap, tmp_path, notes.append)
    assert again.topic != loaded.topic
    assert again.digests == loaded.digests
    assert len(notes) == 2


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.soak
def test_sluice_and_spark_land_the_same_rows(tmp_path: Path) -> None:
    asked = Asked(records=4_000, repeat=1, warm_ups=0, cores=2, peers=("sluice", "spark"), folder=tmp_path)
    report = run(asked, ["bench"], print)
    (race,) = report.races
    assert [r.peer for r in race.results] == ["sluice", "spark"]
    assert race.records == 4_000
    assert all(len(r.landings) == 1 for r in race.results)
    assert race.results[0].landings[0].detail["stages"]
