"""A component of a `dg` project with the feeds of a folder, and the files of `dg scaffold defs`."""

# No `from __future__ import annotations`: Dagster evaluates the annotations of a component.

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster.components.resolved.core_models import OpSpec
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field

from sluice.assets.runs.run_session import StepSettings
from sluice.assets.schedules.sensors import SENSOR
from sluice.assets.specs.asset_specs import FeedAsset
from sluice.dagster.definitions import FeedTranslator, feed_definitions
from sluice.pipelines.errors import UsageError


class FeedsScaffoldParams(BaseModel):
    """Options of the scaffold command."""

    topic: str | None = Field(default=None, description="A Kafka topic: writes a first feed file for it.")


FEED = """\
# A feed: a Kafka topic, landed as Parquet, hour by hour. `sluice feeds check` validates it;
# `sluice init` proposes column types from a sample of the topic.
kafka:
  bootstrap: ${{KAFKA_BOOTSTRAP}}
topics: {topic}
start: earliest
"""


class FeedsScaffolder(dg.Scaffolder[FeedsScaffoldParams]):
    """Write defs.yaml, and `feeds/` in the project's folder, with a first feed for the option `topic`."""

    @classmethod
    def get_scaffold_params(cls) -> type[FeedsScaffoldParams]:
        return FeedsScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[FeedsScaffoldParams]) -> None:
        root = request.project_root or request.target_path
        feeds = Path(root) / "feeds"
        feeds.mkdir(parents=True, exist_ok=True)
        topic = request.params.topic if request.params else None
        if topic and not (path := feeds / f"{topic.replace('.', '_')}.yaml").exists():
            path.write_text(FEED.format(topic=topic))
        where = {"feeds": "{{ context.project_root }}/feeds"} if request.project_root else {"feeds": "feeds"}
        dg.scaffold_component(request=request, yaml_attributes=where)


def _scope(asset: FeedAsset) -> dict[str, Any]:
    return {"kind": str(asset.kind), "name": asset.name, "output": asset.feed.output if asset.feed else ""}


@dg.scaffold_with(FeedsScaffolder)
@dataclass
class FeedsComponent(dg.Component, dg.Resolvable):
    """Land Kafka topics as Parquet, as configured by the feed files of a folder.

    `feeds` is the folder `feeds/` or its parent, relative to the folder of defs.yaml; the default is in the project's
    folder. `translation` changes the specs of the assets; in it, `kind` is topic, landed, output, quarantined,
    committed, table or current, `name` is that of the feed or topic, and `output` that of a split feed. `schedules`
    land each window when it closes. `sensor` is the name of the sensor that watches all feeds, or null for none. Both
    are off until they are turned on in Dagster. `op` has the `tags` of the steps that land, and a `pool` in place of
    one for each feed.
    """

    feeds: str | None = None
    translation: (
        Annotated[TranslationFn[FeedAsset], TranslationFnResolver[FeedAsset](template_vars_for_translation_fn=_scope)]
        | None
    ) = None
    schedules: bool = True
    sensor: str | None = SENSOR
    op: OpSpec | None = None

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """Returns the spec of an asset. Override it for changes beyond `translation`."""
        return self.translation(asset.spec, asset) if self.translation else asset.spec

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        feeds = context.project_root / "feeds" if self.feeds is None else Path(context.path) / self.feeds
        return feed_definitions(
            feeds,
            translator=_Component(by=self.get_asset_spec),
            schedules=self.schedules,
            sensor=self.sensor,
            steps=self._build_steps(),
        )

    def _build_steps(self) -> StepSettings:
        op = self.op or OpSpec()
        if op.name or op.description or op.backfill_policy:
            raise UsageError("`op` of FeedsComponent has `tags` and `pool` only", remedy="remove its other keys")
        return StepSettings(op.tags or {}, op.pool, self.execute)

    def execute(
        self, context: dg.AssetExecutionContext | dg.OpExecutionContext, events: Iterator[Any]
    ) -> Iterator[Any]:
        """Run a step that lands one feed: iterating over `events` lands, and they must all be yielded.

        Override it for work before and after, with `yield from super().execute(context, events)` between.
        """
        yield from events


@dataclass(frozen=True)
class _Component(FeedTranslator):
    """Translator that calls the component's `get_asset_spec`."""

    by: Callable[[FeedAsset], dg.AssetSpec] = lambda asset: asset.spec

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        return self.by(asset)
