"""The feeds of a folder as a component of a `dg` project."""

# No `from __future__ import annotations` here: Dagster reads the annotations of a component themselves, not as text.

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
    """Lands Kafka topics as Parquet, as the feed files of a folder say.

    `feeds` is the folder `feeds/`, or the one that holds it; a relative path counts from the folder of defs.yaml. By
    default it is the one in the project's folder.
    `translation` says how the assets are shown; in it, `kind` is topic, landed, quarantined, committed or table, and
    `name` is the feed's or the topic's. `schedules` land each window as it closes; `sensor` is the name of the one
    that looks at every feed, or null for none. Both are off until somebody switches them on.
    """

    feeds: str | None = None
    translation: (
        Annotated[TranslationFn[FeedAsset], TranslationFnResolver[FeedAsset](template_vars_for_translation_fn=_scope)]
        | None
    ) = None
    schedules: bool = True
    sensor: str | None = SENSOR

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """The spec of an asset. A subclass may say more than `translation` can."""
        return self.translation(asset.spec, asset) if self.translation else asset.spec

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        feeds = context.project_root / "feeds" if self.feeds is None else Path(context.path) / self.feeds
        shown = _Component(by=self.get_asset_spec)
        return feed_definitions(feeds, translator=shown, schedules=self.schedules, sensor=self.sensor)


@dataclass(frozen=True)
class _Component(FeedTranslator):
    """As the component says."""

    by: Callable[[FeedAsset], dg.AssetSpec] = lambda asset: asset.spec

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        return self.by(asset)
