"""Everything that a code location shows of a project: its feeds, its reports, the sensor. Opens no socket.

A wrong file shows as an asset that says what is wrong; the others load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import dagster as dg

from sluice.assets.factory.feed_definitions import feed_definitions, republished
from sluice.assets.jobs.fleet_job import Fleet, many_job
from sluice.assets.jobs.report_assets import read_reports, report_definitions, report_key
from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.sensors import watch_check, watch_sensor
from sluice.assets.schedules.window_scheduler import fleet_schedule
from sluice.assets.specs.asset_specs import AssetOf, AssetSpecs, FeedAsset, Keys, Translate, landed_key, untranslated
from sluice.assets.specs.feed_files import FeedFiles, read_shapes, topics_of
from sluice.assets.specs.last_seen import recall
from sluice.assets.specs.partitions_def import now, partitions_of
from sluice.assets.steps.table_step import table_check
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.feed import OWN, SHARED, Feed
from sluice.resources.project import Project

Windows = Mapping[str, dg.TimeWindowPartitionsDefinition]


def build(project: Project, session: RunSession | None = None) -> dg.Definitions:
    """Everything that Dagster sees of the project. Without a session, runs get a plain one.

    Raises FeedError when there are feed files and none of them is right.
    """
    files, session = read_shapes(project), session or RunSession(project)
    if files.broken and not files.feeds:
        raise FeedError("no feed can be loaded:\n" + "\n".join(str(e) for e in files.broken.values()))
    windows = windows_of(project, files.feeds)
    shown = {name: AssetSpecs.of(feed) for name, feed in files.feeds.items()}
    reports = read_reports(project, files.feeds)
    broken = [broken_asset("report", report_key(_name(p, reports.reports)), e) for p, e in reports.broken.items()]
    return dg.Definitions.merge(
        feeds_of(project, files, shown, windows, session),
        report_definitions(reports.reports.values(), windows, session),
        fleets_of(files, windows, session),
        dg.Definitions(assets=broken, sensors=[watch_sensor(session)], executor=dg.in_process_executor),
    )


def fleets_of(files: FeedFiles, windows: Windows, session: RunSession, without: Collection[str] = ()) -> dg.Definitions:
    """A job and a schedule for the feeds of each schedule that several may share, `without` some. A single feed shares
    its schedule only if it names one."""
    by_name: dict[str, list[Feed]] = {}
    for feed in files.feeds.values():
        if feed.schedule not in (OWN, *without) and (feed.schedule != SHARED or len(files.feeds) > 1):
            by_name.setdefault(feed.schedule, []).append(feed)
    return dg.Definitions(
        jobs=[many_job(Fleet(session, name), name) for name in by_name],
        schedules=[fleet_schedule(name, feeds, windows, session) for name, feeds in by_name.items()],
    )


def windows_of(project: Project, feeds: Mapping[str, Feed]) -> Windows:
    """The partitions of each feed."""
    return {name: partitions_of(feed, recall(project, name), now()) for name, feed in feeds.items()}


def knowing(session: RunSession, shown: Mapping[str, AssetSpecs]) -> RunSession:
    """The session, which knows under which keys the feeds are shown."""
    keys = {name: s.keys for name, s in shown.items()}
    return replace(session, keys=lambda name: keys[name] if name in keys else Keys.of(name))


def feeds_of(
    project: Project,
    files: FeedFiles,
    shown: Mapping[str, AssetSpecs],
    windows: Windows,
    session: RunSession,
    translate: Translate = untranslated,
) -> dg.Definitions:
    """The assets, checks, jobs and schedules of the feeds, and an asset for each file that is wrong."""
    wrong = [(_wrong_key(_name(p, files.feeds), translate), e) for p, e in files.broken.items()]
    topics = {name: topics_of(project, feed) for name, feed in files.feeds.items()}
    readers: dict[str, list[str]] = {}
    for name in sorted(topics):
        for topic in topics[name]:
            readers.setdefault(topic, []).append(name)
    owned = {name: {t: readers[t] for t in mine if readers[t][0] == name} for name, mine in topics.items()}
    targets = {name: t for name in files.feeds if (t := recall(project, name).targets)}
    sources: dict[str, list[dg.AssetKey]] = {}
    for name, sent_to in targets.items():
        for topic in sent_to:
            sources.setdefault(topic, []).append(shown[name].republished.key)
    unread: dict[str, list[str]] = {name: [] for name in targets}
    for topic in sorted(sources.keys() - readers.keys()):
        unread[next(name for name, sent_to in targets.items() if topic in sent_to)].append(topic)
    back = [spec for name in targets for spec in republished(shown[name], unread[name], sources)]
    return dg.Definitions.merge(
        *(
            feed_definitions(feed, shown[name], topics[name], owned[name], windows[name], session.apart(), sources)
            for name, feed in files.feeds.items()
        ),
        dg.Definitions(
            assets=[*back, *(broken_asset("feed", key, error) for key, error in wrong)],
            asset_checks=[
                *(watch_check(feed, session) for feed in files.feeds.values()),
                *(table_check(feed, session) for feed in files.feeds.values() if feed.table),
            ],
        ),
    )


def _wrong_key(name: str, translate: Translate) -> dg.AssetKey:
    """The key that the feed would have."""
    return translate(FeedAsset(AssetOf.LANDED, name, None, dg.AssetSpec(landed_key(name)))).key


def _name(path: Path, taken: Mapping[str, object]) -> str:
    return path.name if path.stem in taken else path.stem


def broken_asset(what: str, key: dg.AssetKey, error: FeedError) -> dg.AssetSpec:
    """An asset in place of the feed or report, with nothing to run; its description is the error."""
    dg.get_dagster_logger("sluice").error("%s file not loaded: %s", what, error)
    text = f"**This {what} is not loaded.**\n\n    {str(error).replace(chr(10), chr(10) + '    ')}"
    return dg.AssetSpec(key, group_name=f"broken_{what}s", description=text)
