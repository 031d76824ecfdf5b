"""Completions of the shell after Tab: feeds, windows and topics.

Promises: nothing is written, no error reaches the prompt, and Kafka or a lake is asked for no longer than WAIT. Feeds
come from the names of files, windows from the clock and the ledger's tip, the topics of a feed from its file or that
tip. Only `init --topic` asks Kafka. Neither Dagster nor Spark is loaded.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.resources.project import Project

T = TypeVar("T")

VARIABLE = "_SLUICE_COMPLETE"
WAIT = 1.5
"""Seconds to wait for Kafka or a lake: longer, and people think that Tab is broken."""
OFFERED = 48
"""The newest windows that are offered: two days of hours."""
_NAMED = re.compile(r"^feed:\s*[\"']?([a-z][a-z0-9_]*)", re.MULTILINE)

Offer = Callable[[typer.Context, str], Iterable[str]]


def prepare() -> bool:
    """Let typer answer if this process is a completion request of a shell. Returns whether it is."""
    if VARIABLE not in os.environ:
        return False
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    return True


def _suppress_errors(offer: Offer) -> Callable[[typer.Context, str], list[str]]:
    """Returns the values that begin with the typed text; none if the project, a file or Kafka cannot be read."""

    @functools.wraps(offer)
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            return [text for text in offer(ctx, incomplete) if text.startswith(incomplete)]
        except Exception:  # noqa: BLE001 - a prompt is no place for an error; the command itself will say it
            return []

    # typer chooses the arguments by these
    complete.__annotations__ = {"ctx": typer.Context, "incomplete": str, "return": list[str]}
    del complete.__wrapped__
    return complete


@_suppress_errors
def complete_feeds(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """The feeds of the project, by their files: none of them has to be right. After a dot, the feed's outputs."""
    from sluice.pipelines.feed.load import list_feed_files, list_outputs

    for path in list_feed_files(_find_project(ctx).feeds_folder):
        match = _NAMED.search(path.read_text(errors="replace"))
        name = match.group(1) if match else path.stem
        yield name
        if incomplete.startswith(f"{name}."):
            yield from (f"{name}.{output}" for output in list_outputs(path))


@_suppress_errors
def complete_windows(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """The feed's newest windows that have ended, newest first, back to the first in its ledger."""
    import time

    project = _find_project(ctx)
    feed = project.readable_feed(_find_feed_name(ctx) or "")
    first = next((window for window, _ in _call_within(WAIT, lambda: _read_facts(feed))), None)
    start = feed.window.last_boundary(time.time_ns() // 1_000_000)
    for _ in range(OFFERED):
        start = feed.window.before(start)
        if first is not None and start < first:
            return
        yield feed.window.name(start)


@_suppress_errors
def complete_partitions(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """The topics of the feed, or of all feeds where the command takes none, as the beginning of `topic:partition`."""
    for topic in dict.fromkeys(_read_topics(ctx)):
        yield f"{topic}:"


@_suppress_errors
def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics of the Kafka that `--bootstrap` or the environment names."""
    from sluice.pipelines.feed.kafka_section import KafkaSettings
    from sluice.pipelines.feed.sections import BOOTSTRAP
    from sluice.resources.project import Project

    folder = ctx.params.get("project") or Path.cwd()
    address = ctx.params.get("bootstrap") or Project(folder).environ().get(BOOTSTRAP)
    return _call_within(WAIT, functools.partial(_list_topics, KafkaSettings(bootstrap=address))) if address else []


def _list_topics(settings: Any) -> list[str]:
    from sluice.resources.open_ports import open_cluster

    with open_cluster(settings) as cluster:
        return sorted(name for name in cluster.topics() if not name.startswith("__"))


def _read_facts(feed: Feed) -> list[tuple[int | None, tuple[str, ...]]]:
    """The first window (ms) and the topics in the tip of the feed's ledger, if it has any."""
    from sluice.pipelines.publishing.lost_entries import read_tip
    from sluice.resources.lake import open_lake

    tip = read_tip(open_lake(feed), feed.stored)
    return [(tip.facts.first_window, tip.facts.topics or ())] if tip and tip.facts else []


def _call_within(seconds: float, ask: Callable[[], list[T]]) -> list[T]:
    """The answer, or nothing when the time is up; what still waits then ends with the process."""
    answer: list[T] = []

    def run() -> None:
        try:
            answer.extend(ask())
        except Exception:  # noqa: BLE001 - no answer
            return

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return [*answer]


def _read_topics(ctx: typer.Context) -> Iterator[str]:
    project, feed_name = _find_project(ctx), _find_feed_name(ctx)
    for feed in [project.readable_feed(feed_name)] if feed_name else project.feeds().values():
        if names := sorted(set(feed.topics.names)):
            yield from names
        else:
            facts = _call_within(WAIT, functools.partial(_read_facts, feed))
            yield from (topic for _, topics in facts for topic in topics)


def _find_project(ctx: typer.Context) -> Project:
    from sluice.resources.project import Project

    return Project.find(ctx.params.get("project"))


def _find_feed_name(ctx: typer.Context) -> str | None:
    """The feed that stands on the line. An option that still lacks its value leaves all words before it unread."""
    several = ctx.params.get("feeds") or ctx.args
    name = ctx.params.get("feed") or next(iter(several), None)
    return str(name) if name else None
