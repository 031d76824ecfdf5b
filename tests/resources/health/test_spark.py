"""What is told of a Spark. A real cluster: tests/cluster/test_doctor.py."""

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


def feed(**spark: Any) -> Feed:
    said = {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest", "spark": spark}
    return Feed.model_validate(said)


def told(found: list[Diagnosis]) -> list[tuple[str, Health]]:
    return [(d.title, d.health) for d in found]


def test_a_session_is_started_only_when_asked_for() -> None:
    assert told(examine_spark(feed(), start=False)) == [("master", Health.OK)]
    here = examine_spark(feed(master="local"), start=False)
    assert told(here) == [("master", Health.OK), ("session", Health.SKIPPED)]
    assert examine_spark(feed(master="yarn"), start=False)[0].health is Health.SKIPPED


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_a_master_that_is_away(scheme: str) -> None:
    master = f"{scheme}://127.0.0.1:{free_port()}"
    found = examine_spark(feed(master=master), start=True)
    assert told(found) == [("master", Health.FAILED), ("session", Health.FAILED)]
    assert f"answers at {master}: Connection refused" in found[0].found


def test_executors_say_what_they_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def answering(answer: Callable[[], Preflight]) -> list[Diagnosis]:
        monkeypatch.setattr(SparkEngine, "preflight", lambda self: answer())
        return examine_spark(feed(), start=True)[1:]

    sound = answering(lambda: Preflight((HERE, HERE), ()))
    assert told(sound) == [("session", Health.OK), ("executors", Health.OK)]
    assert sound[1].found.startswith("2 on w1: ")
    wrong = ExecutorProblem("executors on w1 run Python 3.9, the driver 3.11", "install Python 3.11 there")
    odd = ExecutorProblem("executors on w1 have another processor", "make the pack there", fatal=False)
    found = answering(lambda: Preflight((HERE,), (wrong, odd)))
    assert told(found) == [("session", Health.OK), ("executors", Health.FAILED), ("executors", Health.WARNING)]
    assert (found[1].found, found[1].remedy) == (wrong.message, wrong.remedy)

    def none() -> Preflight:
        raise SetupError("gave no executor within 5s", remedy="ask for less")

    assert told(answering(none)) == [("session", Health.FAILED)]
