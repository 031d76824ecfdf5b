"""A folder of feeds as Dagster's definitions, and what an asset downstream needs of a feed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from sluice.assets.factory.location import feeds_of, fleets_of, knowing, windows_of
from sluice.assets.jobs.report_assets import WHEN
from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.sensors import SENSOR, watch_sensor
from sluice.assets.specs.asset_specs import Shown
from sluice.assets.specs.feed_files import read_shapes
from sluice.dagster.translator import FeedTranslator
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import SHARED
from sluice.resources.project import Project

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class FeedAssets:
    """One feed's assets, for assets downstream: their keys, and their partitions, which are the feed's windows.

    `dagster.AssetIn(landed)` gives the rows of the run's windows, read lazily (`sluice.read` says how).
    """

    landed: dg.AssetKey
    quarantined: dg.AssetKey
    committed: dg.AssetKey
    partitions_def: dg.TimeWindowPartitionsDefinition


def feed_definitions(
    feeds: Folder,
    *,
    translator: FeedTranslator | None = None,
    schedules: bool = True,
    sensor: str | None = SENSOR,
) -> dg.Definitions:
    """Assets, checks, jobs and schedules of every feed in a folder, to be merged with any other definitions.

    `feeds` is the folder `feeds/`, or the one that holds it; a relative path counts from the current folder. The
    `schedules` land each window as it closes, and `sensor` is the name of the one that looks at every feed; both are
    off until somebody switches them on. No executor and no resource comes with them.

    Opens no socket. Addresses and secrets of Kafka and the lake may be missing here: a run needs them, and says so. A
    file that is wrong shows as an asset that says what is wrong. Raises UsageError if there is no such folder.
    """
    project = _project(feeds)
    files, translate = read_shapes(project), (translator or FeedTranslator()).get_asset_spec
    shown = {name: Shown.of(feed, translate) for name, feed in files.feeds.items()}
    session = knowing(RunSession(project), shown)
    windows = windows_of(project, files.feeds)
    made = feeds_of(project, files, shown, windows, session, translate)
    shared = fleets_of(files, windows, session, without=[SHARED])
    sensors = [] if sensor is None else [watch_sensor(session, sensor)]
    return dg.Definitions(
        assets=made.assets,
        asset_checks=made.asset_checks,
        jobs=[*(made.jobs or ()), *(shared.jobs or ())],
        schedules=[*(made.schedules or ()), *(shared.schedules or ())] if schedules else [],
        sensors=sensors,
    )


def feed_assets(name: str, feeds: Folder, *, translator: FeedTranslator | None = None) -> FeedAssets:
    """One feed's assets, as `feed_definitions` shows them with the same translator.

    Raises FeedError if the feed's file is wrong or there is none, and UsageError if there is no such folder.
    """
    project = _project(feeds)
    feed = read_shapes(project).feed(name)
    keys = Shown.of(feed, (translator or FeedTranslator()).get_asset_spec).keys
    return FeedAssets(keys.landed, keys.quarantined, keys.committed, windows_of(project, {name: feed})[name])


def when_complete() -> dg.AutomationCondition[Any]:
    """Run an asset for each window that is complete upstream, also a backfilled one, and again when its rows changed.

    Like `AutomationCondition.eager`, but for every partition instead of only the latest.
    """
    return WHEN


def _project(feeds: Folder) -> Project:
    """The project whose feeds these are. No folder above is searched: that would find another one's."""
    named = Path(feeds).resolve()
    for root in (named, named.parent):
        if (root / "feeds").is_dir() and named in (root, root / "feeds"):
            return Project(root)
    raise UsageError(
        f"no folder `feeds` at {named}",
        remedy="name the folder `feeds/` of your feed files, or the one that holds it; relative to "
        f"{Path.cwd()}, or as Path(__file__).parent / …",
    )
