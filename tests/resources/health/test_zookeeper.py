"""Diagnoses of offsets in ZooKeeper: with a real server, and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.pipelines.errors import ZooKeeperUnavailable
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.health import Health
from sluice.resources.health.kafka_checks import examine_offsets
from sluice.resources.zookeeper import tree
from tests.zookeepers import LocalZooKeeper


def make_feed(root: Path, **offsets: object) -> Feed:
    settings = {"feed": "orders", "kafka": {"bootstrap": "127.0.0.1:9"}, "topics": "orders", "start": "fail"}
    return Feed.model_validate({**settings, "group": "examined", "offsets": offsets}, context={"root": root})


def test_zookeeper_offsets_and_active_consumers_are_reported(tmp_path: Path, zookeeper: LocalZooKeeper) -> None:
    assert list(examine_offsets(make_feed(tmp_path))) == []
    feed_in_zookeeper = make_feed(tmp_path, store="zookeeper", connect=zookeeper.connect)
    (fresh,) = examine_offsets(feed_in_zookeeper)
    assert (fresh.health, "is not there yet" in fresh.found) == (Health.OK, True)
    zookeeper.put("examined", "orders", {0: "4", 1: "5"})
    (with_offsets,) = examine_offsets(feed_in_zookeeper)
    assert with_offsets.found == f"ZooKeeper at {zookeeper.connect}; group examined has 2 offsets"
    about = {"version": 1, "subscription": {"orders": 1}, "pattern": "static", "timestamp": "1"}
    with zookeeper.open_client() as old:
        old.create("/consumers/examined/ids/somebody", json.dumps(about).encode(), ephemeral=True, makepath=True)
        (with_consumer,) = examine_offsets(feed_in_zookeeper)
    assert (with_consumer.health, "has 1 consumer: somebody" in with_consumer.found) == (Health.WARNING, True)


def test_unreachable_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree.Tree.__init__, "__defaults__", (12.0, 1.0))
    with pytest.raises(ZooKeeperUnavailable, match=r"no ZooKeeper answers at 127\.0\.0\.1:1"):
        list(examine_offsets(make_feed(tmp_path, connect="127.0.0.1:1", dual_commit=True)))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({"store": "zookeeper"}, "needs `connect`"),
        ({"store": "zookeeper", "connect": "nonsense"}, "is no address"),
        ({"store": "zookeeper", "connect": "a:1", "dual_commit": True}, "is for `store: kafka`"),
        ({"dual_commit": True}, "needs `connect`"),
    ],
)
def test_invalid_or_contradictory_settings_are_refused(
    tmp_path: Path, offsets: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_feed(tmp_path, **offsets)


def test_transactional_features_are_refused_with_offsets_in_zookeeper(tmp_path: Path) -> None:
    base = {"feed": "orders", "kafka": {"bootstrap": "127.0.0.1:9"}, "topics": "orders", "start": "fail"}
    offsets = {"store": "zookeeper", "connect": "a:1,b:2/kafka"}
    with pytest.raises(ValueError, match="the offsets are in ZooKeeper"):
        Feed.model_validate({**base, "offsets": offsets, "commit": "transactional"}, context={"root": tmp_path})
    with pytest.raises(ValueError, match="need the transaction"):
        Feed.model_validate({**base, "offsets": offsets, "dead_letters": {"topic": "dlq"}}, context={"root": tmp_path})
