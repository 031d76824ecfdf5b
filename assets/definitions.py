"""The code location: every feed of the project. Loading it opens no socket and starts nothing.

A feed file that is wrong shows as an asset that says so; the other feeds load. When there are files and none of them
loads, the location fails with all that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from sluice.assets.evidence import landed_key
from sluice.assets.factory import feed_definitions
from sluice.assets.feeds import FeedFiles, offline_environ, read_feeds, topics_of
from sluice.assets.memory import recall
from sluice.assets.session import Session
from sluice.assets.windows import now, partitions_of
from sluice.pipelines.errors import FeedError
from sluice.resources.project import Project


def build(project: Project, session: Session | None = None) -> dg.Definitions:
    """What Dagster sees of the project, run in a plain session unless given one.

    Raises FeedError when there are feed files and none of them is right.
    """
    files = read_feeds(project, offline_environ())
    if files.broken and not files.feeds:
        raise FeedError("no feed can be loaded:\n" + "\n".join(str(e) for e in files.broken.values()))
    return dg.Definitions.merge(
        *_feeds(project, files),
        dg.Definitions(
            assets=[_broken(path, error, files.feeds) for path, error in files.broken.items()],
            resources={"session": session or Session(project)},
            executor=dg.in_process_executor,
        ),
    )


def _feeds(project: Project, files: FeedFiles) -> list[dg.Definitions]:
    topics = {name: topics_of(project, feed) for name, feed in files.feeds.items()}
    readers: dict[str, list[str]] = {}
    for name in sorted(topics):
        for topic in topics[name]:
            readers.setdefault(topic, []).append(name)
    return [
        feed_definitions(
            feed,
            topics[name],
            {t: readers[t] for t in topics[name] if readers[t][0] == name},
            partitions_of(feed, recall(project, name), now()),
        )
        for name, feed in files.feeds.items()
    ]


def _broken(path: Path, error: FeedError, feeds: Mapping[str, object]) -> dg.AssetSpec:
    """Stands where the feed would, with nothing to run; its description is the error."""
    dg.get_dagster_logger("sluice").error("feed file not loaded: %s", error)
    name = path.name if path.stem in feeds else path.stem
    text = f"**This feed is not loaded.**\n\n    {str(error).replace(chr(10), chr(10) + '    ')}"
    return dg.AssetSpec(landed_key(name), group_name="broken_feeds", description=text)


defs = build(Project.find())
