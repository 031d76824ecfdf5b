"""The last-seen state of a feed, so that definitions load without Kafka: `.sluice/seen/<feed>.json`.

It is a convenience, never evidence: a damaged file counts as missing, and the next run writes it again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sluice.pipelines.model.kafka import is_topic_name
from sluice.pipelines.util.units import parse_window, show_window
from sluice.resources.project import Project


@dataclass(frozen=True, slots=True)
class Remembered:
    """The topics that the feed's patterns matched, the start (ms) of its first window, how long (ms) Kafka keeps
    records of its topics, and the topics that its rows were republished to."""

    topics: tuple[str, ...] = ()
    first_window: int | None = None
    kept: int | None = None
    targets: tuple[str, ...] = ()


def recall(project: Project, feed: str) -> Remembered:
    """The state that the last run saw."""
    try:
        said = json.loads(_path(project, feed).read_text())
    except (OSError, ValueError, RecursionError):
        return Remembered()
    return (
        Remembered(
            _topics(said.get("topics")),
            _window(said.get("first_window")),
            _kept(said.get("kept_ms")),
            _topics(said.get("targets")),
        )
        if isinstance(said, dict)
        else Remembered()
    )


def remember(project: Project, feed: str, **news: Any) -> None:
    """Keep fields of `Remembered` for the next time definitions load."""
    before = recall(project, feed)
    after = replace(before, **news)
    if after == before:
        return
    path = _path(project, feed)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    first = None if after.first_window is None else show_window(after.first_window)
    said = {"topics": after.topics, "first_window": first, "kept_ms": after.kept, "targets": after.targets}
    fresh.write_text(json.dumps(said))
    fresh.replace(path)


def remember_target(project: Project, feed: str, topic: str) -> None:
    """Keep that rows of the feed were republished to the topic."""
    remember(project, feed, targets=tuple(sorted({*recall(project, feed).targets, topic})))


def _path(project: Project, feed: str) -> Path:
    return project.state / "seen" / f"{feed}.json"


def _topics(said: object) -> tuple[str, ...]:
    names = said if isinstance(said, list) else []
    return tuple(n for n in names if isinstance(n, str) and is_topic_name(n))


def _window(said: object) -> int | None:
    try:
        return parse_window(said)
    except ValueError:
        return None


def _kept(said: object) -> int | None:
    return said if isinstance(said, int) and said > 0 else None
