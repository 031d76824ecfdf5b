"""What keeps a cluster from landing is said before anything is read: what, where, and the way out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.spark_cluster import LocalSpark
from sluice.pipelines.errors import SetupError
from tests.cluster.conftest import landed, on
from tests.faults.nemeses.lakes import mounted
from tests.integration.support import Place
from tests.resources.kafka.tools import free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]


def refused(place: Place, spark: dict[str, str]) -> SetupError:
    with pytest.raises(SetupError) as e:
        landed(place.feed(**spark))
    return e.value


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_nobody_answers_at_the_masters_address(place: Place, scheme: str) -> None:
    master = f"{scheme}://127.0.0.1:{free_port()}"
    said = refused(place, {"spark": f"{{master: '{master}'}}"})
    assert said.message.endswith(f"answers at {master}: Connection refused")


def test_executors_larger_than_any_worker(place: Place, cluster: LocalSpark) -> None:
    said = refused(place, on(cluster, conf={"spark.executor.memory": "64g"}, start_timeout="5s"))
    assert "gave no executor within 5s: one asks for 64g of memory and all cores of its worker" in said.message
    assert "127.0.0.1 has 1024 of 1024 MiB and 1 of 1 core(s) free; 127.0.0.1 has" in said.message


def test_executors_that_start_and_do_not_report(place: Place, cluster: LocalSpark) -> None:
    said = refused(place, on(cluster, start_timeout="1s"))
    assert "the master started some, and none of them has reported to the driver at 127.0.0.1:" in said.message
    assert "open the driver's ports" in said.remedy


def test_executors_without_sluice(place: Place, cluster: LocalSpark) -> None:
    said = refused(place, on(cluster, environment="installed"))
    assert said.message == "executors on 127.0.0.1 have no module sluice"
    assert "spark: {environment: pack}" in said.remedy


def test_executors_without_the_interpreter(place: Place, cluster: LocalSpark) -> None:
    said = refused(place, on(cluster, python="/opt/nowhere/python3.11"))
    assert said.message == "executors on 127.0.0.1 have no /opt/nowhere/python3.11"


def test_executors_that_spark_excludes(place: Place, cluster: LocalSpark) -> None:
    conf = {
        "spark.excludeOnFailure.enabled": "true",
        "spark.scheduler.excludeOnFailure.unschedulableTaskSetTimeout": "1s",
    }
    said = refused(place, on(cluster, python="/opt/nowhere/python3.11", conf=conf))
    why = "have no /opt/nowhere/python3.11; Spark has excluded every executor that there was"
    assert said.message == f"executors on 127.0.0.1 {why}"
    assert "spark.excludeOnFailure" in said.remedy


def test_a_worker_whose_disk_is_full(place: Place, tmp_path: Path) -> None:
    """The pack does not fit: executors end as they start, and the master gives up after two."""
    folder = tmp_path / "spark"
    folder.mkdir()
    few = {"SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=2"}
    with mounted(folder / "worker-1", "64m"), LocalSpark(folder, workers=1, environment=few) as cluster:
        said = refused(place, on(cluster))
        assert said.message.startswith(f"{cluster.master} ended the application; ")
    assert said.message.endswith("on 127.0.0.1 ended: No space left on device")
    assert "SPARK_WORKER_DIR" in said.remedy


def test_another_python_there(place: Place, tmp_path: Path) -> None:
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3.1?")
    found = [p for p in sorted(beside) if p.name != f"python3.{sys.version_info[1]}"]
    if not found:
        pytest.skip("this machine has no other Python beside ours")
    with LocalSpark(tmp_path / "spark", workers=1) as cluster:
        said = refused(place, on(cluster, python=str(found[0])))
    theirs = found[0].name.removeprefix("python")
    assert said.message == f"executors run Python {theirs}, the driver 3.{sys.version_info[1]}"
