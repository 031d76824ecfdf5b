"""A cluster that cannot land is refused before anything is read. The error names cause, host and remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.spark_cluster import LocalSpark
from sluice.pipelines.errors import SetupError
from tests.cluster.conftest import configure_spark, land_feed
from tests.faults.nemeses.lakes import mount_tmpfs
from tests.integration.support import FeedProject
from tests.resources.kafka.tools import free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]


def expect_refusal(project: FeedProject, spark: dict[str, str]) -> SetupError:
    with pytest.raises(SetupError) as e:
        land_feed(project.write_feed(**spark))
    return e.value


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_unreachable_master_is_refused(project: FeedProject, scheme: str) -> None:
    master = f"{scheme}://127.0.0.1:{free_port()}"
    error = expect_refusal(project, {"spark": f"{{master: '{master}'}}"})
    assert error.message.endswith(f"answers at {master}: Connection refused")


def test_executors_larger_than_any_worker_are_refused(project: FeedProject, cluster: LocalSpark) -> None:
    error = expect_refusal(project, configure_spark(cluster, conf={"spark.executor.memory": "64g"}, start_timeout="5s"))
    assert "gave no executor within 5s: one asks for 64g of memory and all cores of its worker" in error.message
    assert "127.0.0.1 has 1024 of 1024 MiB and 1 of 1 core(s) free; 127.0.0.1 has" in error.message


def test_executors_that_do_not_report_to_the_driver_are_refused(project: FeedProject, cluster: LocalSpark) -> None:
    error = expect_refusal(project, configure_spark(cluster, start_timeout="1s"))
    assert "the master started some, and none of them has reported to the driver at 127.0.0.1:" in error.message
    assert "open the driver's ports" in error.remedy


def test_executors_without_sluice_are_refused(project: FeedProject, cluster: LocalSpark) -> None:
    error = expect_refusal(project, configure_spark(cluster, environment="installed"))
    assert error.message == "executors on 127.0.0.1 have no module sluice"
    assert "spark: {environment: pack}" in error.remedy


def test_executors_without_the_interpreter_are_refused(project: FeedProject, cluster: LocalSpark) -> None:
    error = expect_refusal(project, configure_spark(cluster, python="/opt/nowhere/python3.11"))
    assert error.message == "executors on 127.0.0.1 have no /opt/nowhere/python3.11"


def test_executors_excluded_by_spark_are_refused(project: FeedProject, cluster: LocalSpark) -> None:
    conf = {
        "spark.excludeOnFailure.enabled": "true",
        "spark.scheduler.excludeOnFailure.unschedulableTaskSetTimeout": "1s",
    }
    error = expect_refusal(project, configure_spark(cluster, python="/opt/nowhere/python3.11", conf=conf))
    why = "have no /opt/nowhere/python3.11; Spark has excluded every executor that there was"
    assert error.message == f"executors on 127.0.0.1 {why}"
    assert "spark.excludeOnFailure" in error.remedy


def test_full_disk_of_a_worker_is_reported(project: FeedProject, tmp_path: Path) -> None:
    """The pack does not fit: executors end as they start, and the master gives up after two."""
    folder = tmp_path / "spark"
    folder.mkdir()
    few = {"SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=2"}
    with mount_tmpfs(folder / "worker-1", "64m"), LocalSpark(folder, workers=1, environment=few) as cluster:
        error = expect_refusal(project, configure_spark(cluster))
        assert error.message.startswith(f"{cluster.master} ended the application; ")
    assert error.message.endswith("on 127.0.0.1 ended: No space left on device")
    assert "SPARK_WORKER_DIR" in error.remedy


def test_different_python_version_on_executors_is_refused(project: FeedProject, tmp_path: Path) -> None:
    interpreters = Path(sys.base_prefix).parent.glob("*/bin/python3.1?")
    pythons = [p for p in sorted(interpreters) if p.name != f"python3.{sys.version_info[1]}"]
    if not pythons:
        pytest.skip("this machine has no second Python version")
    with LocalSpark(tmp_path / "spark", workers=1) as cluster:
        error = expect_refusal(project, configure_spark(cluster, python=str(pythons[0])))
    theirs = pythons[0].name.removeprefix("python")
    assert error.message == f"executors run Python {theirs}, the driver 3.{sys.version_info[1]}"
