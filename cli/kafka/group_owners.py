"""Owners of consumer groups: the feed that commits for a group, and members foreign to that feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.pipelines.model.consumer_groups import ZOOKEEPER

if TYPE_CHECKING:
    from sluice.cli.app.invocation import Session
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.consumer_groups import GroupMember, GroupView


def describe_store(feed: Feed) -> str:
    """The address where the feed's group is kept: that of Kafka, or of ZooKeeper."""
    from sluice.pipelines.feed.sections import OffsetStore

    in_kafka = feed.offsets.store is OffsetStore.KAFKA or feed.offsets.connect is None
    return feed.kafka.bootstrap if in_kafka else f"ZooKeeper {feed.offsets.connect}"


def list_owners(session: Session, feed: Feed) -> dict[str, str]:
    """The group of each feed whose groups are kept in the same place, with the feed's name."""
    return {f.group: f.name for f in session.files.feeds.values() if describe_store(f) == describe_store(feed)}


def list_strangers(feed: Feed, view: GroupView) -> tuple[GroupMember, ...]:
    """Members that are not a run of the feed: a commit waits for the feed's own, and refuses because of these."""
    from sluice.resources.kafka.connection.connection_settings import CLIENT_ID

    ours = CLIENT_ID if view.kind == ZOOKEEPER else feed.kafka.client_id or CLIENT_ID
    return tuple(m for m in view.members or () if m.client_id != ours)
