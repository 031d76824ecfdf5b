"""The code location: every feed and report of the project. Loading it opens no socket and starts nothing.

A wrong file shows as an asset that says what is wrong; the others load. If there are files and none of them
loads, the location fails and names everything that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from sluice.assets.evidence import landed_key
from sluice.assets.factory import feed_definitions
from sluice.assets.feeds import FeedFiles, offline_environ, read_feeds, topics_of
from sluice.assets.instance import check_home
from sluice.assets.memory import recall
from sluice.assets.reports import read_reports, report_definitions, report_key
from sluice.assets.sensors import watch_check, watch_sensor
from sluice.assets.session import RunSession
from sluice.assets.windows import now, partitions_of
from sluice.pipelines.vocabulary.errors import FeedError
from sluice.resources.project import Project


def build(project: Project, session: RunSession | None = None) -> dg.Definitions:
    """Everything that Dagster sees of the project. Without a session, runs get a plain one.

    Raises FeedError when there are feed files and none of them is right.
    """
    files, session = read_feeds(project, offline_environ()), session or RunSession(project)
    if files.broken and not files.feeds:
        raise FeedError("no feed can be loaded:\n" + "\n".join(str(e) for e in files.broken.values()))
    windows = {name: partitions_of(feed, recall(project, name), now()) for name, feed in files.feeds.items()}
    reports = read_reports(project, files.feeds)
    return dg.Definitions.merge(
        *_feeds(project, files, windows, session),
        report_definitions(reports.reports.values(), windows),
        dg.Definitions(
            assets=[
                *(_broken("feed", landed_key(_name(p, files.feeds)), e) for p, e in files.broken.items()),
                *(_broken("report", report_key(_name(p, reports.reports)), e) for p, e in reports.broken.items()),
            ],
            asset_checks=[watch_check(feed) for feed in files.feeds.values()],
            sensors=[watch_sensor()],
            resources={"session": session},
            executor=dg.in_process_executor,
        ),
    )


def _feeds(
    project: Project, files: FeedFiles, windows: Mapping[str, dg.TimeWindowPartitionsDefinition], session: RunSession
) -> list[dg.Definitions]:
    topics = {name: topics_of(project, feed) for name, feed in files.feeds.items()}
    readers: dict[str, list[str]] = {}
    for name in sorted(topics):
        for topic in topics[name]:
            readers.setdefault(topic, []).append(name)
    owned = {name: {t: readers[t] for t in mine if readers[t][0] == name} for name, mine in topics.items()}
    return [
        feed_definitions(feed, topics[name], owned[name], windows[name], session) for name, feed in files.feeds.items()
    ]


def _name(path: Path, taken: Mapping[str, object]) -> str:
    return path.name if path.stem in taken else path.stem


def _broken(what: str, key: dg.AssetKey, error: FeedError) -> dg.AssetSpec:
    """An asset in place of the feed or report, with nothing to run; its description is the error."""
    dg.get_dagster_logger("sluice").error("%s file not loaded: %s", what, error)
    text = f"**This {what} is not loaded.**\n\n    {str(error).replace(chr(10), chr(10) + '    ')}"
    return dg.AssetSpec(key, group_name=f"broken_{what}s", description=text)


def load() -> dg.Definitions:
    """The project's definitions, for Dagster's servers. Raises FeedError, and UsageError if they show another home."""
    project = Project.find()
    check_home(project, sys.argv)
    return build(project)


defs = load()
