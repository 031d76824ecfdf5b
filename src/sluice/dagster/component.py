"""A component of a `dg` project with the feeds of a folder."""

# No `from __future__ import annotations`: Dagster evaluates the annotations of a component.

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver

from sluice.assets.schedules.sensors import SENSOR
from sluice.assets.specs.asset_specs import FeedAsset
from sluice.dagster.definitions import feed_definitions
from sluice.dagster.scaffolder import FeedsScaffolder
from sluice.dagster.translator import FeedTranslator


def _scope(asset: FeedAsset) -> dict[str, Any]:
    return {"kind": str(asset.kind), "name": asset.name}


@dg.scaffold_with(FeedsScaffolder)
@dataclass
class FeedsComponent(dg.Component, dg.Resolvable):
    """Land Kafka topics as Parquet, as configured by the feed files of a folder.

    `feeds` is the folder `feeds/` or its parent, relative to the folder of defs.yaml; the default is in the project's
    folder. `translation` changes the specs of the assets; in it, `kind` is topic, landed, quarantined, committed or
    table, and `name` is that of the feed or topic. `schedules` land each window when it closes. `sensor` is the name of
    the sensor that watches all feeds, or null for none. Both are off until they are turned on in Dagster.
    """

    feeds: str | None = None
    translation: (
        Annotated[TranslationFn[FeedAsset], TranslationFnResolver[FeedAsset](template_vars_for_translation_fn=_scope)]
        | None
    ) = None
    schedules: bool = True
    sensor: str | None = SENSOR

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """Returns the spec of an asset. Override it for changes beyond `translation`."""
        return self.translation(asset.spec, asset) if self.translation else asset.spec

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        feeds = context.project_root / "feeds" if self.feeds is None else Path(context.path) / self.feeds
        translator = _Component(by=self.get_asset_spec)
        return feed_definitions(feeds, translator=translator, schedules=self.schedules, sensor=self.sensor)


@dataclass(frozen=True)
class _Component(FeedTranslator):
    """Translator that calls the component's `get_asset_spec`."""

    by: Callable[[FeedAsset], dg.AssetSpec] = lambda asset: asset.spec

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        return self.by(asset)
