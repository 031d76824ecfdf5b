"""Executors' answers and the findings from them: each names the hosts, both sides and a remedy."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.errors import SetupError
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.spark import executor_probe, preflight
from sluice.resources.spark.preflight import (
    ExecutorAnswer,
    ExecutorPorts,
    ExecutorProblem,
    Preflight,
    answers,
    explain_failure,
    findings,
)

DRIVER = ExecutorAnswer("driver", "3.11.7", "x86_64", {"sluice": "0.1.0", "pyspark": "4.3.0", "pyarrow": "26.0"})
SOUND = replace(DRIVER, host="worker-1", kafka={"broker-1:9092": ""})


@pytest.mark.parametrize(
    ("answer", "message", "fatal"),
    [
        (replace(SOUND, python="3.9.18"), "run Python 3.9, the driver 3.11", True),
        (replace(SOUND, machine="aarch64"), "are aarch64 machines, the driver is x86_64", True),
        (
            replace(SOUND, imports="ModuleNotFoundError: No module named 'sluice'"),
            "cannot import what tasks need",
            True,
        ),
        (replace(SOUND, releases=DRIVER.releases | {"sluice": "0.0.9"}), "have sluice 0.0.9, the driver 0.1.0", True),
        (replace(SOUND, releases=DRIVER.releases | {"pyspark": "4.1.1"}), "have pyspark 4.1.1, the driver 4.3.0", True),
        (replace(SOUND, releases=DRIVER.releases | {"pyarrow": ""}), "have pyarrow unknown, the driver 26.0", False),
        (replace(SOUND, kafka={"b:9092": "timed out"}), "do not reach Kafka at b:9092: timed out", True),
        (replace(SOUND, lake="LakeUnavailable: no answer"), "do not reach the lake: LakeUnavailable: no answer", True),
        (replace(SOUND, skew=-120_000), "have a clock 120 s behind the driver's", False),
    ],
)
def test_each_problem_is_a_finding(answer: ExecutorAnswer, message: str, fatal: bool) -> None:
    (finding,) = findings(DRIVER, [SOUND, answer])
    assert finding.message.startswith(f"executors on worker-1 {message}")
    assert finding.remedy
    assert finding.fatal is fatal


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("FileNotFoundError: there is no /ca.pem (ssl_cafile)", "at the same path on every host"),
        ("FeedError: company.tokens:T cannot be made (ModuleNotFoundError)", "spark: {modules: [NAME]}"),
        ("timed out", "advertised.listeners"),
    ],
)
def test_each_kafka_connection_problem_has_a_remedy(why: str, remedy: str) -> None:
    (finding,) = findings(DRIVER, [replace(SOUND, kafka={"": why})])
    assert finding.message == f"executors on worker-1 do not reach Kafka: {why}"
    assert remedy in finding.remedy


def test_missing_files_of_the_feed_are_reported(tmp_path: Path) -> None:
    access = KafkaAddress("127.0.0.1:9", {"security_protocol": "SSL", "ssl_cafile": str(tmp_path / "ca.pem")})
    ports = ExecutorPorts(access, LocalLake(tmp_path))
    question = {"releases": [], "ports": pickle.dumps(ports), "seconds": 5}
    assert executor_probe.answer(question)["kafka"] == {
        "": f"FileNotFoundError: there is no {tmp_path}/ca.pem (ssl_cafile)"
    }


def test_hosts_with_the_same_problem_share_a_finding() -> None:
    (finding,) = findings(DRIVER, [replace(SOUND, host=f"w{i}", python="3.9.1") for i in range(5)])
    assert finding.message == "executors on w0, w1, w2 and 2 more run Python 3.9, the driver 3.11"


def test_valid_setup_has_no_findings() -> None:
    assert findings(DRIVER, [SOUND]) == ()
    Preflight((SOUND,), ()).check()
    Preflight((SOUND,), (ExecutorProblem("late", "set it", fatal=False),)).check()


def test_fatal_findings_are_combined_into_one_error() -> None:
    with pytest.raises(SetupError) as e:
        Preflight(
            (),
            (ExecutorProblem("a", "do this"), ExecutorProblem("b", "do this"), ExecutorProblem("c", "x", fatal=False)),
        ).check()
    assert (e.value.message, e.value.remedy) == ("a\n    b", "do this")


MISMATCH = """Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.2 executor 1): RuntimeError: [PYTHON_VERSION_MISMATCH] \
Python in worker has different version: 3.9 than that in driver: 3.11, PySpark cannot run with different minors"""

FULL = "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.2 executor 1): java.io.IOException: No space left on device"
NO_PYTHON = (
    "Lost task 0.1 in stage 0.0 (TID 1) (10.0.0.3 executor 1): java.io.IOException:"
    ' Cannot run program "python3.11": error=2, No such file or directory'
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MISMATCH, "executors on 10.0.0.2 run Python 3.9, the driver 3.11"),
        ('java.io.IOException: Cannot run program "python3.11": error=2', "executors have no python3.11"),
        ("x\nModuleNotFoundError: No module named 'sluice'\n", "executors have no module sluice"),
        (FULL, "executors on 10.0.0.2 have no space left on their disks"),
        (
            f"cannot run anywhere due to node and executor excludeOnFailure.\nMost recent failure:\n{NO_PYTHON}",
            "executors on 10.0.0.3 have no python3.11; Spark has excluded every executor that there was",
        ),
        ("it broke", "executors do not answer: it broke"),
        ("it broke\n\tat java.base/java.lang.Thread.run(Thread.java:840)", "executors do not answer: it broke"),
    ],
)
def test_cause_of_missing_executor_answers_is_reported(error: str, message: str) -> None:
    problem = explain_failure(error, "python3.11")
    assert problem.message == message
    assert problem.remedy


def test_clock_skew_excludes_the_duration_of_the_job() -> None:
    probe = executor_probe.answer({"releases": [], "ports": b"", "seconds": 1})
    assert probe["imports"], "ports that cannot be loaded are reported"

    def measure_skew(clock: int) -> int:
        (answer,) = answers([probe | {"clock": clock}, probe | {"clock": clock}], 1000, 5000)
        return answer.skew

    assert [measure_skew(clock) for clock in (400, 1000, 3000, 5000, 5700)] == [-600, 0, 0, 0, 700]


def test_probe_is_pickled_by_value() -> None:
    from pyspark import cloudpickle

    sent = cloudpickle.dumps(preflight.build_probe("def answer(question): return question", {"a": 1}))
    assert b"_make_function" in sent, "it travels by value"
    assert list(cloudpickle.loads(sent)([0])) == [{"a": 1}]
