"""Queues of tasks: each task is in one queue, queues per broker are bounded, and brokers take turns."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.model.kafka import FetchLimits, Isolation
from sluice.pipelines.records.shape import RAW
from sluice.resources.spark import executor
from sluice.resources.spark.executor import queues
from sluice.testing.lake import MemoryLake

LEADERS = st.lists(st.integers(-1, 4), max_size=30)


@given(LEADERS, st.none() | st.integers(1, 5))
def test_each_task_is_in_one_queue_within_broker_limits(leaders: list[int], bound: int | None) -> None:
    task_queues = queues(leaders, bound)
    assert sorted(chain.from_iterable(task_queues)) == list(range(len(leaders)))
    assert all(len({leaders[task] for task in queue}) == 1 for queue in task_queues)
    of_each = Counter(leaders[queue[0]] for queue in task_queues)
    assert all(count == min(leaders.count(b), bound or count) for b, count in of_each.items())
    assert bound or all(len(queue) == 1 for queue in task_queues)


@given(LEADERS)
def test_first_queues_alternate_between_brokers(leaders: list[int]) -> None:
    first = [leaders[queue[0]] for queue in queues(leaders)][: len(set(leaders))]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("feeds", "machines", "used"), [("r1", "", "r1"), ("r1", "r2", "r2"), ("", "", "")])
def test_rack_of_the_machine_overrides_rack_of_the_feed(
    feeds: str, machines: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    racks: list[str] = []
    monkeypatch.setenv(executor.RACK, machines)
    monkeypatch.setattr("sluice.resources.kafka.fetch.fetch.KafkaFetcher.__init__", lambda *_, rack: racks.append(rack))
    monkeypatch.setattr("sluice.resources.kafka.fetch.fetch.KafkaFetcher.close", lambda _: None)
    kafka = KafkaSettings(bootstrap="127.0.0.1:9")
    wiring = executor.Wiring(kafka, MemoryLake(), LandingSettings(), FetchLimits(), feeds, 1 << 30)
    with wiring.open(Isolation.READ_COMMITTED, RAW):
        assert racks == [used]
