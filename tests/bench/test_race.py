"""Races with small topics on a real Kafka, and the handling of peers that fail."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import suite
from bench.__main__ import app
from bench.command import BenchRequest, run, run_start
from bench.load import ensure
from bench.peers import PEERS, Peer, find_peer, running, select_available
from bench.results import BenchReport
from bench.stand import PeerTask
from bench.workloads import ORDERS
from sluice.pipelines.errors import Failed, UsageError

NOWHERE = PeerTask("127.0.0.1:1", "t", {0: 10}, 1)


def test_error_output_of_ended_peer_is_reported(tmp_path: Path) -> None:
    broken = Peer("broken", "A broken peer", "bench.no_such_module")
    with (
        pytest.raises(Failed, match=r"A broken peer ended with 1(.|\n)*no_such_module"),
        running(broken, NOWHERE, tmp_path),
    ):
        pass


@pytest.mark.parametrize("bench_request", [BenchRequest(names=("no such",)), BenchRequest(peers=("no such",))])
def test_unknown_names_are_refused_before_anything_starts(bench_request: BenchRequest, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        run(dataclasses.replace(bench_request, folder=tmp_path / "data"), [], print, print)
    assert not (tmp_path / "data").exists()


def test_peer_outside_requested_benchmarks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dlt takes no part"):
        run(BenchRequest(names=("gzip", "flat"), peers=("dlt",), folder=tmp_path / "data"), [], print, print)


def test_peer_without_its_tool_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    notes: list[str] = []
    sluice, rust = find_peer("sluice"), find_peer("rust")
    assert select_available((sluice, rust), notes.append) == [sluice]
    assert notes == [f"{rust.title}: left out, since cargo is not on this machine"]
    with pytest.raises(UsageError, match="no peer is left") as refused:
        select_available((rust,), notes.append)
    assert "install cargo" in refused.value.remedy


def test_format_adds_its_packages_to_peers() -> None:
    spark, loop = find_peer("spark"), find_peer("confluent-kafka")
    assert spark.of("") is spark
    assert [a.name for a in spark.of("avro").artifacts] == [*(a.name for a in spark.artifacts), "spark-avro_2.13"]
    assert {*loop.of("avro").packages} - {*loop.packages} == {"fastavro==1.13.1"}


def test_start_benchmark_refuses_peers_without_typed_records(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="daft takes no part in start"):
        run_start(BenchRequest(peers=("rust", "daft"), folder=tmp_path / "data"), print)
    assert not (tmp_path / "data").exists()


def test_peer_task_survives_json_round_trip() -> None:
    assert PeerTask.from_json(NOWHERE.to_json()) == NOWHERE


def test_every_benchmark_compares_with_sluice() -> None:
    assert all(race.peers[0] is find_peer("sluice") and race.name == name for name, race in suite.SUITE.items())


def test_main_benchmarks_are_selected_by_default() -> None:
    assert [r.name for r in suite.races(())] == ["raw", "typed", "contract"]
    assert [r.name for r in suite.races(["gzip", "raw"])] == ["gzip", "raw"]
    assert suite.races(["all"]) == [*suite.SUITE.values(), *suite.flat()]
    assert [r.workload.records for r in suite.races(["typed"], 1_000)] == [1_000]
    assert len({r.workload.name for r in suite.SUITE.values()}) == len(suite.SUITE)


@pytest.mark.parametrize(
    ("limit", "records"), [(None, [1_000_000, 3_000_000, 10_000_000]), (50_000_000, [1_000_000, 7_000_000, 50_000_000])]
)
def test_flat_benchmark_grows_in_records_then_in_partitions(limit: int | None, records: list[int]) -> None:
    sizes = [(r.workload.records, len(r.workload.weights)) for r in suite.flat(limit)]
    assert sizes == [*((n, 4) for n in records), (1_000_000, 1), (1_000_000, 32), (1_000_000, 200)]


def test_help_names_every_benchmark_and_peer() -> None:
    help_text = re.sub(r"-\s+", "-", CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout)
    assert all(re.search(rf"\b{name}\b", help_text) for name in (*suite.SUITE, *PEERS, suite.FLAT, suite.ALL, "lake"))


@pytest.mark.parametrize("name", ["lake", "scale", "age"])
def test_write_is_refused_for_benchmarks_without_table(name: str) -> None:
    refused = CliRunner().invoke(app, [name, "--write"]).exception
    assert isinstance(refused, UsageError)
    assert "leave out --write" in refused.remedy


@pytest.mark.kafka
def test_topic_is_loaded_once_and_replaced_when_modified(kafka: Any, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("name", ["raw", "typed", "contract", "nested", "escapes", "dlt"])
def test_every_peer_lands_all_sent_records(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "bench"  # one Kafka, and packages fetched once, for all of them
    reports: list[BenchReport] = []
    bench_request = BenchRequest(names=(name,), records=4_000, repeat=1, warm_ups=0, cores=2, folder=folder)
    report = run(bench_request, ["bench"], print, reports.append)
    assert reports == [report]
    (race,) = report.races
    assert [r.peer for r in race.results] == [p.name for p in suite.SUITE[name].peers]
    assert race.records == 4_000
    assert all(len(r.landings) == 1 for r in race.results)
    assert race.results[0].landings[0].detail["stages"]
