"""Dagster definitions for a folder of feeds, the keys that assets downstream need, and changes of specs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg

from sluice.assets.factory import feeds_of, fleets_of, knowing, recall_all, windows_of
from sluice.assets.jobs.report_assets import WHEN
from sluice.assets.runs.run_session import RunSession, StepSettings
from sluice.assets.schedules.sensors import SENSOR, watch_sensor
from sluice.assets.specs.asset_specs import AssetSpecs, FeedAsset
from sluice.assets.specs.feed_files import read_shapes
from sluice.pipelines.errors import UsageError
from sluice.pipelines.operating.event_hours import find_late_hours
from sluice.resources.open_ports import open_ports
from sluice.resources.project import Project


@dataclass(frozen=True)
class FeedTranslator:
    """Change the specs of assets: all alike with these fields, or each in a subclass.

    `key_prefix` prefixes each key. `group_name` replaces the group: the feed's name, or `kafka` for topics. `owners`,
    `tags` and `kinds` are added.
    """

    key_prefix: str | Sequence[str] = ()
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ()

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """Returns the spec of an asset; `asset.spec` is the default.

        Dependencies, partitions and checks of the returned spec are ignored.
        """
        spec = asset.spec
        if self.key_prefix:
            spec = spec.replace_attributes(key=spec.key.with_prefix(self.key_prefix))
        if self.group_name:
            spec = spec.replace_attributes(group_name=self.group_name)
        if self.kinds:
            spec = spec.replace_attributes(kinds={*spec.kinds, *self.kinds})
        return spec.merge_attributes(owners=[*self.owners], tags=dict(self.tags))


Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class FeedAssets:
    """Keys of one feed's assets, for assets downstream, and their partitions: the windows of the feed.

    `dagster.AssetIn(landed)` loads the rows of the run's windows lazily, as `sluice.read` does.
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
    steps: StepSettings | None = None,
) -> dg.Definitions:
    """Returns assets and checks of every feed in a folder, and jobs for each schedule, for `dg.Definitions.merge`.

    `feeds` is the folder `feeds/` or its parent, relative to the current folder. `schedules` land each window when it
    closes, and `sensor` is the name of the sensor that watches all feeds, or None. Both are off until they are turned
    on in Dagster. `steps` has tags, pool and a wrapper of the steps that land. The definitions have no executor and no
    resources.

    Reads each feed's ledger once, for its first window; without the lake it warns and goes on. Never asks Kafka: its
    addresses and secrets may be missing until a run needs them. An invalid file
    becomes an asset with the error as its description. Raises UsageError if the folder does not exist.
    """
    project = find_feeds(feeds)
    files, translate = read_shapes(project), (translator or FeedTranslator()).get_asset_spec
    specs = {name: AssetSpecs.of(feed, translate) for name, feed in files.feeds.items()}
    steps = replace(steps or StepSettings(), lone=False)
    session = knowing(RunSession(project, steps=steps), specs)
    # Loading asks no Kafka: topics are those of each feed's last landing.
    memory = recall_all(files, specs, session)
    windows = windows_of(files.feeds, memory)
    definitions = feeds_of(files, specs, memory, windows, session, translate)
    shared = fleets_of(files, windows, session)
    sensors = [] if sensor is None else [watch_sensor(session, sensor)]
    return dg.Definitions(
        assets=definitions.assets,
        asset_checks=definitions.asset_checks,
        jobs=[*(definitions.jobs or ()), *(shared.jobs or ())],
        schedules=[*(definitions.schedules or ()), *(shared.schedules or ())] if schedules else [],
        sensors=sensors,
    )


def feed_assets(name: str, feeds: Folder, *, translator: FeedTranslator | None = None) -> FeedAssets:
    """Returns the keys of one feed's assets, as in `feed_definitions` with the same translator.

    Raises FeedError if the feed's file is invalid or missing, and UsageError if the folder does not exist.
    """
    specs, windows = read_specs(find_feeds(feeds), name, translator)
    return FeedAssets(specs.keys.landed, specs.keys.quarantined, specs.keys.committed, windows)


def read_specs(
    project: Project, name: str, translator: FeedTranslator | None
) -> tuple[AssetSpecs, dg.TimeWindowPartitionsDefinition]:
    """Returns the specs of one feed, and its windows by the ledger. Raises FeedError."""
    files = read_shapes(project)
    feed = files.feed(name)
    specs = AssetSpecs.of(feed, (translator or FeedTranslator()).get_asset_spec)
    memory = recall_all(replace(files, feeds={name: feed}), {name: specs}, RunSession(project))
    return specs, windows_of({name: feed}, memory)[name]


def when_complete() -> dg.AutomationCondition[Any]:
    """Run an asset for each window that is complete upstream, and again when its rows change.

    Like `AutomationCondition.eager`, but for every partition instead of the latest, so also for backfills.
    """
    return WHEN


def when_late(name: str, feeds: Folder, target: Any, *, column: str = "", seconds: int = 300) -> dg.SensorDefinition:
    """Returns a sensor that runs `target` again for each of the feed's windows whose late rows landed in later ones.

        corrections = sluice.dagster.when_late("orders", "feeds", [hourly_report])

    `target` is a job or assets with the feed's partitions. `column` is a column with times, by default the Kafka
    timestamp. Rows that landed before the first tick are not reported. Raises FeedError and UsageError.
    """
    project = find_feeds(feeds)
    windows = read_specs(project, name.partition(".")[0], None)[1]

    @dg.sensor(name=f"{name.replace('.', '_')}_late", target=target, minimum_interval_seconds=seconds)
    def request_corrections(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        dataset = project.find_dataset(name)
        with open_ports(dataset) as ports:
            late = find_late_hours(dataset, ports, int(context.cursor) if context.cursor else None, column)
        due = {hour: rows for hour, rows in sorted(late.hours.items()) if windows.has_partition_key(hour)}
        requests = [
            dg.RunRequest(
                f"{hour} {late.number}", partition_key=hour, tags={"sluice/late_rows": str(sum(rows.values()))}
            )
            for hour, rows in due.items()
        ]
        return dg.SensorResult(requests, cursor=str(late.number))

    return request_corrections


def find_feeds(feeds: Folder) -> Project:
    """Returns the project of these feeds. Folders above are not searched: they may have another project."""
    folder = Path(feeds).resolve()
    for root in (folder, folder.parent):
        if (root / "feeds").is_dir() and folder in (root, root / "feeds"):
            return Project(root)
    raise UsageError(
        f"no folder `feeds` at {folder}",
        remedy=f"pass the folder `feeds/` or its parent, relative to {Path.cwd()}, or as Path(__file__).parent / …",
    )
