"""What two feeds of a project must not share: a name; on one Kafka a group or transactional id; a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sluice.pipelines.errors import docs_command
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import UNKNOWN_KAFKA
from sluice.pipelines.feed.yaml_file import FileProblem


def clashes(feed: Feed, others: Iterable[tuple[Path, Feed]]) -> tuple[FileProblem, ...]:
    """What this feed shares with another and must not; the others come with their files."""
    return tuple(p for path, other in others if (p := _clash(feed, other, path)))


def _clash(feed: Feed, other: Feed, path: Path) -> FileProblem | None:
    if other.name == feed.name:
        return FileProblem("feed", f"is `{feed.name}` in {path.name} too", "give each feed a name of its own")
    if other.kafka.bootstrap == feed.kafka.bootstrap != UNKNOWN_KAFKA:
        if other.group == feed.group:
            rule = "each feed commits for a group of its own"
            return FileProblem("group", f"is shared with feed `{other.name}`", rule)
        if other.transactional_id == feed.transactional_id:
            return FileProblem("transactional_id", f"is shared with feed `{other.name}`", "they would fence each other")
    if both := _tables(feed) & _tables(other):
        _, shared = min(both)
        return FileProblem(
            "table.iceberg.name",
            f"`{shared}` would be a table of feed `{feed.name}` and of feed `{other.name}`",
            f"give each feed a table of its own; its windows and quarantine get their own: {docs_command('tables')}",
        )
    return None


def _tables(feed: Feed) -> set[tuple[str, str]]:
    """The tables that the feed keeps in catalogs, each as its catalog and its name."""
    if feed.table is None or feed.table.iceberg is None:
        return set()
    return {(feed.table.iceberg.where, name) for name in feed.table.names}
