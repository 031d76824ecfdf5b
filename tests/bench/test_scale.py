"""The planner on a cluster in memory: the requests and bytes that it counts, over a complete run."""

from __future__ import annotations

from bench.scale import BEGINS, Balance, Topology, run
from bench.simulated_cluster import EvenCluster
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.util.units import DAY

SMALL = Topology(partitions=12, brokers=3)


def test_small_topology_is_measured_from_first_plan_to_file_proof() -> None:
    (scaled,) = run(lambda text: None, [SMALL]).scaled
    assert {"plan at first", "plan an hour", "first: publish", "hour: prove", "proof of a file"} <= set(scaled.cpu)
    assert scaled.requests["plan an hour"]["DescribeLogDirs"] == 3
    assert scaled.first.offset_ranges >= 12 * 6, "an offset range for each partition and hour"
    assert {"plan", "publish", "boundary", "checkpoint"} <= set(scaled.bytes)
    assert scaled.peak_bytes > 0


def test_balance_of_a_plan_is_computed() -> None:
    ranges = [OffsetRange("t", p, "id", 0, 10, estimated_bytes=size) for p, size in enumerate((300, 100, 200))]
    tasks = (Task(0, 1, (ranges[0],)), Task(1, 2, (ranges[1], ranges[2])), Task(2, 3, ()))
    plan = Plan("f", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, tasks)
    balance = Balance.of(plan)
    assert (balance.tasks, balance.offset_ranges, balance.heaviest, balance.most_ranges) == (3, 3, 1.5, 2)


def test_each_leader_gets_one_request_for_each_query() -> None:
    cluster = EvenCluster(partitions=100, brokers=4, topics=2, begins=BEGINS, day_bytes=1 << 30)
    cluster.now += DAY
    states = cluster.partitions(cluster.topics(), Isolation.READ_COMMITTED)
    assert len(states) == 100
    assert sum(s.high_watermark for s in states) * 200 <= 1 << 30
    assert cluster.requests == {"Metadata": 2, "ListOffsets": 12, "DescribeLogDirs": 4}


def test_offsets_by_time_are_within_the_log() -> None:
    cluster = EvenCluster(partitions=1, brokers=1, topics=1, begins=BEGINS, day_bytes=200 * 24)
    cluster.now += DAY
    (state,) = cluster.partitions(cluster.topics(), Isolation.READ_COMMITTED)
    hits = [cluster.offsets_at({state.tp: BEGINS + hour * DAY // 24})[state.tp] for hour in (0, 12, 24)]
    assert [h and h.offset for h in hits] == [0, 12, None]
