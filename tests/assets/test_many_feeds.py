"""One run lands what many feeds owe: each by itself, so that one that fails stops no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.execution import run_feeds
from sluice.assets.factory import MANY
from sluice.assets.instance import open_instance
from sluice.assets.location import build
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ports import Edges
from sluice.pipelines.vocabulary.errors import FeedError, KafkaUnavailable
from sluice.testing.group import MemoryGroup
from tests.assets.world import FEED, World

NAMES = ("orders", "refunds", "returns")


def feed(name: str) -> str:
    return FEED.replace("feed: orders", f"feed: {name}").replace("sluice-orders", f"sluice-{name}")


class Fleet(World):
    """Three feeds of one topic, each with a group of its own; what opens those in `away` finds no Kafka."""

    away: frozenset[str] = frozenset()
    bug: str = ""

    @contextmanager
    def open_edges(self, feed: Feed) -> Iterator[Edges]:
        if feed.name in self.away:
            raise KafkaUnavailable("no broker answers", remedy="start it")
        if feed.name == self.bug:
            raise ZeroDivisionError("a mistake of ours")
        groups = self.__dict__.setdefault("groups", {})
        group = groups.setdefault(feed.name, MemoryGroup())
        yield Edges(self.cluster, group, self.lake, self.engine, self.liveness, self.clock, None)


@pytest.fixture
def fleet(root: Path) -> Fleet:
    return Fleet(root, {name: feed(name) for name in NAMES})


def test_what_many_feeds_owe_lands_and_is_committed_in_one_run(fleet: Fleet) -> None:
    outcomes = run_feeds(fleet.project, NAMES, lambda name: fleet.progress.append, fleet.open_edges)
    assert [o.error for o in outcomes.values()] == [None] * 3
    assert len({o.run_id for o in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert outcome.landed
        assert sum(b.counts.landed for b in outcome.landed.batches) == 200
        assert outcome.committed
    with open_instance(fleet.project) as instance:
        (run,) = instance.get_runs()
        assert (run.job_name, run.status) == (MANY, dg.DagsterRunStatus.SUCCESS)
        for name in NAMES:
            assert len(instance.get_materialized_partitions(dg.AssetKey([name, "landed"]))) >= 4
            assert instance.fetch_materializations(dg.AssetKey([name, "committed"]), limit=1).records


def test_a_feed_that_fails_stops_no_other_and_lands_with_the_next_run(fleet: Fleet) -> None:
    fleet.away, fleet.bug = frozenset({"orders"}), "refunds"
    outcomes = run_feeds(fleet.project, NAMES, lambda name: fleet.progress.append, fleet.open_edges)
    assert isinstance(outcomes["orders"].error, KafkaUnavailable)
    assert "ZeroDivisionError: a mistake of ours" in str(outcomes["refunds"].error)
    assert outcomes["returns"].error is None
    assert outcomes["returns"].committed
    with open_instance(fleet.project) as instance:
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.FAILURE
        steps = {s.step_key: s.status.value if s.status else "" for s in instance.get_run_step_stats(run.run_id)}
        assert steps["orders__land_owed"] == steps["refunds__land_owed"] == "FAILURE"
        assert steps["returns__commit_owed"] == "SUCCESS"
        assert not instance.get_materialized_partitions(dg.AssetKey(["orders", "landed"]))
    fleet.away, fleet.bug = frozenset(), ""
    again = run_feeds(fleet.project, ["orders", "refunds"], lambda name: fleet.progress.append, fleet.open_edges)
    assert [o.error for o in again.values()] == [None, None]
    assert set(again) == {"orders", "refunds"}


def test_the_code_location_has_the_job_with_the_steps_of_every_feed(fleet: Fleet) -> None:
    location = build(fleet.project)
    dg.Definitions.validate_loadable(location)
    job = location.resolve_job_def(MANY)
    assert {n.name for n in job.nodes} == {f"{name}__{what}_owed" for name in NAMES for what in ("land", "commit")}


def test_a_feed_that_is_not_there_ends_it_before_anything_runs(fleet: Fleet) -> None:
    with pytest.raises(FeedError, match="no feed `ordres`"):
        run_feeds(fleet.project, ["orders", "ordres"], lambda name: fleet.progress.append, fleet.open_edges)
    with open_instance(fleet.project) as instance:
        assert not instance.get_runs()
