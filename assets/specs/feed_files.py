"""The project's feed files for Dagster. Each is read by itself, so that a broken one does not take the others down.

Reading opens no socket. If a feed has patterns, its topics are those that the last run saw.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import clashes, list_feed_files, load_feed
from sluice.pipelines.feed.problems import raise_problems
from sluice.pipelines.feed.sections import BOOTSTRAP
from sluice.pipelines.model.kafka import is_topic_name
from sluice.pipelines.util.units import parse_window, show_window
from sluice.resources.project import Project


@dataclass(frozen=True, slots=True)
class Remembered:
    """The topics that the feed's patterns matched, the start (ms) of its first window, how long (ms) Kafka keeps
    records of its topics, and the topics that its rows were republished to."""

    topics: tuple[str, ...] = ()
    first_window: int | None = None
    retention: int | None = None
    targets: tuple[str, ...] = ()


def recall(project: Project, feed: str) -> Remembered:
    """The state that the last run saw."""
    try:
        document = json.loads(_get_path(project, feed).read_text())
    except (OSError, ValueError, RecursionError):
        return Remembered()
    return (
        Remembered(
            _parse_topics(document.get("topics")),
            _parse_start(document.get("first_window")),
            _parse_retention(document.get("kept_ms")),
            _parse_topics(document.get("targets")),
        )
        if isinstance(document, dict)
        else Remembered()
    )


def remember(project: Project, feed: str, **news: Any) -> None:
    """Keep fields of `Remembered` for the next time definitions load."""
    before = recall(project, feed)
    after = replace(before, **news)
    if after == before:
        return
    path = _get_path(project, feed)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    first = None if after.first_window is None else show_window(after.first_window)
    document = {"topics": after.topics, "first_window": first, "kept_ms": after.retention, "targets": after.targets}
    fresh.write_text(json.dumps(document))
    fresh.replace(path)


def remember_target(project: Project, feed: str, topic: str) -> None:
    """Keep that rows of the feed were republished to the topic."""
    remember(project, feed, targets=tuple(sorted({*recall(project, feed).targets, topic})))


def _get_path(project: Project, feed: str) -> Path:
    return project.state / "seen" / f"{feed}.json"


def _parse_topics(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else []
    return tuple(n for n in names if isinstance(n, str) and is_topic_name(n))


def _parse_start(value: object) -> int | None:
    try:
        return parse_window(value)
    except ValueError:
        return None


def _parse_retention(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


NOWHERE = "127.0.0.1:9"
"""Used for an unset address while definitions load: they need the shape of a feed, not where Kafka is."""

AT_RUN = frozenset({"kafka", "lake", "s3", "spark", "fetch"})
"""The sections that only runs need. Their variables and files may be missing where definitions load."""
_NAMED = 10
"""A message names no more feeds than these."""


@dataclass(frozen=True, slots=True)
class FeedFiles:
    """The folder's contents: feeds by name, and problems of the other files."""

    feeds: Mapping[str, Feed]
    broken: Mapping[Path, FeedError]

    def feed(self, name: str) -> Feed:
        """One feed. Raises FeedError: the error of its file, or that there is no feed of that name."""
        if name in self.feeds:
            return self.feeds[name]
        for path, error in self.broken.items():
            if path.stem == name:
                raise error
        raise FeedError(f"no feed `{name}`", remedy=self.instead_of(name))

    def instead_of(self, name: str) -> str:
        """What to type instead of the name of no feed: the nearest ones, or what there is."""
        if near := get_close_matches(name, self.feeds):
            return f"did you mean {' or '.join(f'`{n}`' for n in near)}?"
        if len(self.feeds) > _NAMED:
            return f"sluice feeds list shows the {len(self.feeds)} feeds here"
        return f"feeds here: {', '.join(sorted(self.feeds)) or 'none'}"


def read_shapes(project: Project) -> FeedFiles:
    """Every feed file, as definitions need it: without what only runs need, where that is not known here."""
    return read_feeds(project, offline_environ(), AT_RUN)


def read_feeds(project: Project, environ: Mapping[str, str], at_run: Container[str] = ()) -> FeedFiles:
    """Every feed file of the project, sound or broken. If two files clash, the later one is broken.

    `at_run`: sections that stay unknown where a variable of theirs is not set.
    """
    feeds: dict[str, tuple[Path, Feed]] = {}
    broken: dict[Path, FeedError] = {}
    for path in list_feed_files(project.feeds_folder):
        try:
            feed = load_feed(path, environ, at_run, project.feeds_folder)
            if problems := clashes(feed, feeds.values()):
                raise_problems([(str(path), p) for p in problems])
            feeds[feed.name] = path, feed
        except FeedError as error:
            broken[path] = error
    return FeedFiles({name: feed for name, (_, feed) in feeds.items()}, broken)


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
