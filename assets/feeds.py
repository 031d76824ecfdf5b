"""The project's feed files for Dagster. Each is read by itself, so that a broken one does not take the others down.

Reading opens no socket. If a feed has patterns, its topics are those that the last run saw.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.assets.memory import recall, remember
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import BOOTSTRAP
from sluice.pipelines.vocabulary.errors import FeedError
from sluice.resources.project import Project

NOWHERE = "127.0.0.1:9"
"""Used for an unset address while definitions load: they need the shape of a feed, not where Kafka is."""


@dataclass(frozen=True, slots=True)
class FeedFiles:
    """The folder's contents: feeds by name, and what is wrong with the other files."""

    feeds: Mapping[str, Feed]
    broken: Mapping[Path, FeedError]

    def feed(self, name: str) -> Feed:
        """One feed. Raises FeedError: the error of its file, or that there is no feed of that name."""
        if name in self.feeds:
            return self.feeds[name]
        for path, error in self.broken.items():
            if path.stem == name:
                raise error
        raise FeedError(f"no feed `{name}`", remedy=f"feeds here: {', '.join(sorted(self.feeds)) or 'none'}")


def read_feeds(project: Project, environ: Mapping[str, str]) -> FeedFiles:
    """Every feed file of the project, sound or broken. If two files clash, the later one is broken."""
    feeds: dict[str, Feed] = {}
    broken: dict[Path, FeedError] = {}
    for path in sorted(project.feeds_folder.iterdir()):
        if path.suffix not in (".yaml", ".yml") or path.name.startswith("."):
            continue
        try:
            feed = load_feed(path, environ)
            _check_alone(path, feed, feeds.values())
            feeds[feed.name] = feed
        except FeedError as error:
            broken[path] = error
    return FeedFiles(feeds, broken)


def _check_alone(path: Path, feed: Feed, others: Iterable[Feed]) -> None:
    for other in others:
        if other.name == feed.name:
            raise FeedError(f"{path}: another file describes feed `{feed.name}` too", remedy="rename one of them")
        if other.kafka.bootstrap == feed.kafka.bootstrap and other.group == feed.group:
            raise FeedError(
                f"{path}: group: is shared with feed `{other.name}`",
                remedy="each feed commits for a group of its own",
            )


def offline_environ() -> dict[str, str]:
    """The environment for loading definitions, which need no address of Kafka."""
    return {BOOTSTRAP: NOWHERE, **os.environ}


def topics_of(project: Project, feed: Feed) -> tuple[str, ...]:
    """The feed's topics as far as known without asking Kafka, sorted."""
    return tuple(sorted(set(feed.topics.names))) or recall(project, feed.name).topics


def remember_topics(project: Project, feed: Feed, topics: Iterable[str]) -> None:
    """Keep the topics that the feed's patterns matched, for the next time definitions load."""
    if not feed.topics.names:
        remember(project, feed.name, topics=tuple(sorted(set(topics))))
