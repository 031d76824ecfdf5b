"""From a feed to what Dagster sees of it: assets, a check, a job, a schedule. Opens no socket.

    kafka/<topic>  →  <feed>/landed  →  <feed>/committed

A topic that several feeds read is one asset. The bodies are in `steps`; they take the feed from its file when they
run, so that addresses and secrets are those of the run.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `config` as it stands.

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from sluice.assets import metadata, steps
from sluice.assets.evidence import committed_key, landed_key
from sluice.assets.steps import topic_key
from sluice.pipelines.feed import Feed
from sluice.pipelines.formats import RawFormat
from sluice.pipelines.values import AskedRange, Request, RequestKind, TopicPartition

FEED_TAG = "sluice/feed"


class PartitionConfig(dg.Config):
    topic: str
    partition: int


class OffsetsConfig(dg.Config):
    """Offsets `start` up to, not including, `end`."""

    topic: str
    partition: int
    start: int
    end: int


class LandConfig(dg.Config):
    """What to land; with nothing given, all that is owed."""

    offsets: list[OffsetsConfig] = Field(default=[], description="Land exactly these ranges, instead of catching up.")
    only: list[PartitionConfig] = Field(default=[], description="Catch up in these partitions only.")

    def request(self) -> Request:
        """The request that this configures."""
        ranges = tuple(AskedRange(o.topic, o.partition, o.start, o.end) for o in self.offsets)
        only = tuple(TopicPartition(p.topic, p.partition) for p in self.only)
        return Request(RequestKind.OFFSETS if ranges else RequestKind.CATCH_UP, ranges, only=only)


def run_config(feed: str, request: Request) -> dict[str, Any]:
    """The run configuration that asks for the request."""
    offsets = [{"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in request.ranges]
    only = [{"topic": p.topic, "partition": p.partition} for p in request.only]
    return {"ops": {f"{feed}__landed": {"config": {"offsets": offsets, "only": only}}}}


def job_name(feed: str) -> str:
    return f"land_{feed}"


def feed_definitions(
    feed: Feed,
    topics: Sequence[str],
    readers: Mapping[str, Sequence[str]],
    partitions: dg.PartitionsDefinition[Any] | None = None,
) -> dg.Definitions:
    """Everything for one feed. `readers`: for each topic that this feed is the first to read, all that do."""
    landed, committed = _landed(feed, topics, partitions), _committed(feed, partitions)
    job = dg.define_asset_job(
        job_name(feed.name),
        selection=dg.AssetSelection.assets(landed, committed),
        description=f"Land what is owed of {feed.name}, then commit its offsets.",
        tags={FEED_TAG: feed.name},
    )
    schedule = dg.ScheduleDefinition(
        name=f"{job_name(feed.name)}_hourly",
        job=job,
        cron_schedule="0 * * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )
    observed = [_observed(feed.name, readers)] if readers else []
    return dg.Definitions(assets=[*observed, landed, committed], jobs=[job], schedules=[schedule])


def _landed(feed: Feed, topics: Sequence[str], partitions: dg.PartitionsDefinition[Any] | None) -> dg.AssetsDefinition:
    key = landed_key(feed.name)

    @dg.asset(
        key=key,
        deps=[topic_key(t) for t in topics],
        check_specs=[dg.AssetCheckSpec(steps.COMPLETE, asset=key, description=_COMPLETE)],
        group_name=feed.name,
        description=f"The records of `{feed.topics}`, as Parquet, each exactly once.",
        kinds={"parquet", "spark"},
        metadata={"dagster/column_schema": metadata.columns_of(RawFormat.schema)},
        pool=f"sluice_{feed.name}",
        required_resource_keys={"session"},
        partitions_def=partitions,
    )
    def landed(context: dg.AssetExecutionContext, config: LandConfig) -> Iterator[Any]:
        yield from steps.land_step(context, feed.name, config.request())

    return landed


def _committed(feed: Feed, partitions: dg.PartitionsDefinition[Any] | None) -> dg.AssetsDefinition:
    @dg.asset(
        key=committed_key(feed.name),
        deps=[landed_key(feed.name)],
        group_name=feed.name,
        description=f"The committed offsets of group `{feed.group}`: never beyond what has landed.",
        kinds={"kafka"},
        pool=f"sluice_{feed.name}",
        required_resource_keys={"session"},
        partitions_def=partitions,
    )
    def committed(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        return steps.commit_step(context, feed.name)

    return committed


def _observed(feed: str, readers: Mapping[str, Sequence[str]]) -> dg.AssetsDefinition:
    def observe(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from steps.observe_step(context, feed, readers)

    specs = [dg.AssetSpec(topic_key(t), group_name="kafka", kinds={"kafka"}, description=_TOPIC) for t in readers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.multi_observable_source_asset(
            name=f"observe_{feed}", specs=specs, can_subset=True, required_resource_keys={"session"}
        )
    made: dg.AssetsDefinition = decorate(observe)
    return made


_COMPLETE = "By the ledger: all that was asked for has landed, without holes up to where it reaches."
_TOPIC = "A topic in Kafka. Observe it to see its partitions, ends and lag."
