"""Diagnoses of Spark. A real cluster: tests/cluster/test_doctor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.health import Diagnosis, Health
from sluice.resources.health.spark_checks import examine_spark
from sluice.resources.spark.engine import SparkEngine
from sluice.resources.spark.preflight import ExecutorAnswer, ExecutorProblem, Preflight
from tests.resources.kafka.tools import free_port

HERE = ExecutorAnswer("w1", "3.11.7", "x86_64")


def make_feed(engine: str = "spark", **spark: Any) -> Feed:
    settings = {
        "feed": "orders",
        "kafka": {"bootstrap": "a:1"},
        "topics": "orders",
        "start": "earliest",
        "engine": engine,
        "spark": spark,
    }
    return Feed.model_validate(settings)


def list_healths(diagnoses: list[Diagnosis]) -> list[tuple[str, Health]]:
    return [(d.title, d.health) for d in diagnoses]


def test_session_is_started_only_on_request() -> None:
    assert list_healths(examine_spark(make_feed("processes"), start=False)) == [("master", Health.OK)]
    here = examine_spark(make_feed(master="local"), start=False)
    assert list_healths(here) == [("master", Health.OK), ("session", Health.SKIPPED)]
    assert examine_spark(make_feed(master="yarn"), start=False)[0].health is Health.SKIPPED


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_unreachable_master_is_reported(scheme: str) -> None:
    master = f"{scheme}://127.0.0.1:{free_port()}"
    diagnoses = examine_spark(make_feed(master=master), start=True)
    assert list_healths(diagnoses) == [("master", Health.FAILED), ("session", Health.FAILED)]
    assert f"answers at {master}: Connection refused" in diagnoses[0].found


def test_executor_problems_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine_with(answer: Callable[[], Preflight]) -> list[Diagnosis]:
        monkeypatch.setattr(SparkEngine, "preflight", lambda self: answer())
        return examine_spark(make_feed(), start=True)[1:]

    sound = examine_with(lambda: Preflight((HERE, HERE), ()))
    assert list_healths(sound) == [("session", Health.OK), ("executors", Health.OK)]
    assert sound[1].found.startswith("2 on w1: ")
    wrong = ExecutorProblem("executors on w1 run Python 3.9, the driver 3.11", "install Python 3.11 there")
    odd = ExecutorProblem("executors on w1 have another processor", "make the pack there", fatal=False)
    diagnoses = examine_with(lambda: Preflight((HERE,), (wrong, odd)))
    assert list_healths(diagnoses) == [
        ("session", Health.OK),
        ("executors", Health.FAILED),
        ("executors", Health.WARNING),
    ]
    assert (diagnoses[1].found, diagnoses[1].remedy) == (wrong.message, wrong.remedy)

    def raise_no_executor() -> Preflight:
        raise SetupError("gave no executor within 5s", remedy="ask for less")

    assert list_healths(examine_with(raise_no_executor)) == [("session", Health.FAILED)]
