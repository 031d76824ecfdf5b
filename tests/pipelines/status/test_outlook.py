"""The outlook of a feed."""

from __future__ import annotations

from pathlib import Path

from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.feed.sections import CommitMode, OffsetSettings, OffsetStore, OnGroupMoved
from sluice.pipelines.model.kafka import BrokerConfig, Configs
from sluice.pipelines.status.outlook import look_ahead
from sluice.testing.cluster import MemoryCluster
from sluice.testing.group import MemoryGroup
from tests.pipelines.landed_world import A, B, World


def test_offsets_in_zookeeper_do_not_expire(tmp_path: Path) -> None:
    world, cluster = World(tmp_path), MemoryCluster()
    world.land((A, 0, 100), (B, 0, 100))
    commit(world.ledger, MemoryGroup(), CommitSettings(CommitMode.PLAIN, "t", OnGroupMoved.REFUSE))
    cluster.settings = Configs(broker=BrokerConfig(60_000))
    in_kafka = world.feed.model_copy(update={"commit": CommitMode.PLAIN})
    there = OffsetSettings(store=OffsetStore.ZOOKEEPER, connect="127.0.0.1:9")
    ledger, state = world.ledger, world.state()
    for feed, count in ((in_kafka, 1), (in_kafka.model_copy(update={"offsets": there}), 0)):
        assert len(look_ahead(feed, ledger, state, cluster, {}, world.now).expires) == count
