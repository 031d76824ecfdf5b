"""Checks ZooKeeper as the offset store of Kafka's old consumers: reachability and members of the group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.model.consumer_groups import GroupState
from sluice.pipelines.model.health import Diagnosis, ok, warning
from sluice.pipelines.util.units import many
from sluice.resources.kafka.connection.connection_settings import CLIENT_ID
from sluice.resources.zookeeper.zookeeper_groups import ZooKeeperGroups


def examine_offsets(feed: Feed) -> Iterator[Diagnosis]:
    """Yields nothing for a feed whose offsets are in Kafka alone. Raises SetupError without kazoo,
    ZooKeeperUnavailable."""
    if not feed.offsets.in_zookeeper or feed.offsets.connect is None:
        return
    with closing(ZooKeeperGroups(feed.offsets.connect)) as groups:
        view, count = groups.view(feed.group), len(groups.committed(feed.group))
    others = [m for m in view.members or () if m.client_id != CLIENT_ID]
    if others and feed.commit is not CommitMode.NONE:
        yield warning(
            "offsets",
            f"{view.coordinator}: group {feed.group} has {many(len(others), 'consumer')}: {others[0].member_id}. A run "
            "waits for them, and lands nothing while they are there",
            f"stop them; who they are: sluice groups describe --feed {feed.name}",
        )
    elif view.state == GroupState.DEAD:
        yield ok("offsets", f"{view.coordinator}; group {feed.group} is not there yet")
    else:
        yield ok("offsets", f"{view.coordinator}; group {feed.group} has {many(count, 'offset')}")
