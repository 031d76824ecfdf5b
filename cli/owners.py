"""Who may be in a consumer group: the feed that commits for it, and members that are strangers to that feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.cli.session import Session
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.vocabulary.groups import GroupMember, GroupView


def group_owners(session: Session, feed: Feed) -> dict[str, str]:
    """The group of each feed that reads the same Kafka, with the feed's name."""
    return {f.group: f.name for f in session.files.feeds.values() if f.kafka.bootstrap == feed.kafka.bootstrap}


def strangers(feed: Feed, view: GroupView) -> tuple[GroupMember, ...]:
    """Members that are not a run of the feed: a commit waits for the feed's own, and refuses because of these."""
    from sluice.resources.kafka.settings import CLIENT_ID

    ours = feed.kafka.client_id or CLIENT_ID
    return tuple(m for m in view.members or () if m.client_id != ours)
