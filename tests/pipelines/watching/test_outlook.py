"""What is about to happen to a feed."""

from __future__ import annotations

from pathlib import Path

from sluice.assets.feeds import read_feeds
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.feed.sections import CommitMode, OffsetSettings, OffsetStore, OnGroupMoved
from sluice.pipelines.vocabulary.kafka import BrokerConfig, Configs
from sluice.pipelines.watching.outlook import look_ahead
from tests.assets.world import World


def test_offsets_in_zookeeper_do_not_expire(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land_unrecorded()
    commit(world.ledger(), world.group, CommitSettings(CommitMode.PLAIN, "t", OnGroupMoved.REFUSE))
    world.cluster.settings = Configs(broker=BrokerConfig(60_000))
    in_kafka = read_feeds(world.project, {}).feed("orders").model_copy(update={"commit": CommitMode.PLAIN})
    there = OffsetSettings(store=OffsetStore.ZOOKEEPER, connect="127.0.0.1:9")
    ledger, state = world.ledger(), world.ledger().read()
    for feed, count in ((in_kafka, 1), (in_kafka.model_copy(update={"offsets": there}), 0)):
        assert len(look_ahead(feed, ledger, state, world.cluster, {}, world.clock()).expiries) == count
