"""Makes Dagster's definitions from a feed: assets by window, checks, jobs, a schedule. Opens no socket.

    kafka/<topic>  →  <feed>/landed  →  <feed>/committed
                      <feed>/quarantined      of feeds with a schema or a contract
                      <feed>/landed  →  <feed>/table      of feeds with a table

A topic that several feeds read is one asset. `land_<feed>` lands one window. `catch_up_<feed>` lands whatever is asked
for and reports the windows that it completes. The bodies are in `steps`. They take the feed from its file when they
run, so that addresses and secrets are those of the run.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `config` itself, not as text.

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from sluice.assets.checks import contract_checks
from sluice.assets.checks.feed_checks import ACCOUNT, FRONTIER, OF_WINDOW
from sluice.assets.events.ledger_view import quarantines
from sluice.assets.instance import internals
from sluice.assets.jobs.compaction_job import compact_job
from sluice.assets.jobs.republish_job import republish_job
from sluice.assets.runs.run_config import LandConfig, request_config
from sluice.assets.runs.run_session import FEED_TAG, RunSession, pool
from sluice.assets.runs.window_rows import LandedRows
from sluice.assets.schedules.window_scheduler import WINDOWS, feed_schedule
from sluice.assets.specs.asset_specs import AssetSpecs, attributes
from sluice.assets.steps.commit_step import commit_step
from sluice.assets.steps.land_step import land_step
from sluice.assets.steps.observe_step import observe_step
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.feed.feed import OWN, SHARED, Feed
from sluice.pipelines.model.plans import Request
from sluice.pipelines.util.units import show_instant

Windows = dg.TimeWindowPartitionsDefinition


_BACKFILL = dg.BackfillPolicy.multi_run(WINDOWS)
"""A backfill is one run for windows in a row, as many as a tick of the schedule asks for."""

_LAND_CONFIG = LandConfig.to_config_schema().as_field()
"""Made once: otherwise Dagster would infer it again for each op that is annotated with it."""


def run_config(feed: str, request: Request, skip: Skip | None = None) -> dict[str, Any]:
    """The configuration of `catch_up_<feed>` that asks for the request."""
    asked = request_config(request)
    if skip:
        asked |= {"skip_to": "latest" if skip.to is None else show_instant(skip.to), "reason": skip.reason}
    return {"ops": {_land_op(feed): {"config": asked}}}


def land_job(feed: str) -> str:
    return f"land_{feed}"


def catch_up_job(feed: str) -> str:
    return f"catch_up_{feed}"


def _land_op(feed: str) -> str:
    return f"{feed}__land"


def feed_definitions(
    feed: Feed,
    shown: AssetSpecs,
    topics: Sequence[str],
    readers: Mapping[str, Sequence[str]],
    windows: Windows,
    session: RunSession,
    sources: Mapping[str, Sequence[dg.AssetKey]],
) -> dg.Definitions:
    """All definitions of one feed, run in that session, which knows the keys. `readers`: all feeds of each topic that
    it reads first. `sources`: what was republished to each topic."""
    landed = _landed_asset(feed, shown, topics, windows, session)
    committed = _committed_asset(feed, shown, windows, session)
    observed = [_observed_topics(feed.name, shown, readers, session, sources)] if readers else []
    beside = [_quarantined_spec(shown, topics, windows)] if quarantines(feed) else []
    if feed.table:
        beside.append(shown.table.replace_attributes(deps=[shown.landed.key]))
    return dg.Definitions(
        assets=[*observed, landed, *beside, committed],
        jobs=[
            _land(feed, [landed, committed]),
            _catch_up(feed, session),
            compact_job(feed.name, session),
            republish_job(feed.name, session),
        ],
        schedules=[feed_schedule(feed, land_job(feed.name), windows, session)]
        if feed.schedule in (SHARED, OWN)
        else [],
    )


def _land(feed: Feed, assets: Sequence[dg.AssetsDefinition]) -> dg.JobDefinition:
    job = dg.define_asset_job(
        land_job(feed.name),
        selection=dg.AssetSelection.assets(*assets),
        description=f"Land a window of {feed.name}, then commit the offsets up to the frontier.",
        tags={FEED_TAG: feed.name},
    )
    return internals.resolve_among(job, assets)


def _landed_asset(
    feed: Feed, shown: AssetSpecs, topics: Sequence[str], windows: Windows, session: RunSession
) -> dg.AssetsDefinition:
    key = shown.landed.key

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            **attributes(shown.landed),
            deps=[shown.keys.topic(t) for t in topics],
            check_specs=[
                *(_check(name, key, check.description, windows) for name, check in OF_WINDOW.items()),
                *(_check(name, key, said, windows) for name, said in contract_checks.described_checks(feed).items()),
                dg.AssetCheckSpec(ACCOUNT, asset=key, description=_ACCOUNT),
            ],
            config_schema={"until": dg.Field(str, default_value="", description=_UNTIL)},
            pool=pool(feed.name),
            partitions_def=windows,
            backfill_policy=_BACKFILL,
            io_manager_def=LandedRows(session, feed.name),
            output_required=False,  # a window that has not settled is skipped
        )

    def landed(context: dg.AssetExecutionContext) -> Iterator[Any]:
        until = context.op_execution_context.op_config["until"]
        yield from land_step(context, session, feed.name, until=until)

    made: dg.AssetsDefinition = decorate(landed)
    return made


def _quarantined_spec(shown: AssetSpecs, topics: Sequence[str], windows: Windows) -> dg.AssetSpec:
    """The asset that landing reports beside the rows. It cannot be run by itself: it comes with what landed."""
    return shown.quarantined.replace_attributes(deps=[shown.keys.topic(t) for t in topics], partitions_def=windows)


def _committed_asset(feed: Feed, shown: AssetSpecs, windows: Windows, session: RunSession) -> dg.AssetsDefinition:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            **attributes(shown.committed),
            deps=[shown.landed.key],
            check_specs=[_check(FRONTIER, shown.committed.key, _FRONTIER, windows)],
            pool=pool(feed.name),
            partitions_def=windows,
            backfill_policy=_BACKFILL,
        )

    def committed(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from commit_step(context, session, feed.name)

    made: dg.AssetsDefinition = decorate(committed)
    return made


def _catch_up(feed: Feed, session: RunSession) -> dg.JobDefinition:
    land, commit = _catch_up_ops(feed, session)

    @dg.job(
        name=catch_up_job(feed.name),
        description=f"Land what {feed.name} owes, or any windows or offsets that you name, then commit.",
        tags={FEED_TAG: feed.name},
        executor_def=dg.in_process_executor,
    )
    def catch_up() -> None:
        commit(land())

    return catch_up


def _catch_up_ops(feed: Feed, session: RunSession) -> tuple[dg.OpDefinition, dg.OpDefinition]:
    @dg.op(name=_land_op(feed.name), config_schema=_LAND_CONFIG, pool=pool(feed.name), out=dg.Out(dg.Nothing))
    def land(context: dg.OpExecutionContext) -> Iterator[Any]:
        yield from land_step(context, session, feed.name, LandConfig(**context.op_config))

    @dg.op(
        name=f"{feed.name}__commit",
        pool=pool(feed.name),
        ins={"landed": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def commit(context: dg.OpExecutionContext) -> Iterator[Any]:
        yield from commit_step(context, session, feed.name)

    return land, commit


def _observed_topics(
    feed: str,
    shown: AssetSpecs,
    readers: Mapping[str, Sequence[str]],
    session: RunSession,
    sources: Mapping[str, Sequence[dg.AssetKey]],
) -> dg.AssetsDefinition:
    def observe(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from observe_step(context, session, feed, readers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.multi_observable_source_asset(
            name=f"observe_{feed}", specs=[_topic(shown, t, sources.get(t, ())) for t in readers], can_subset=True
        )
    made: dg.AssetsDefinition = decorate(observe)
    return made


def _topic(shown: AssetSpecs, topic: str, sources: Sequence[dg.AssetKey]) -> dg.AssetSpec:
    spec = shown.topic(topic)
    return spec.replace_attributes(deps=list(sources)) if sources else spec


def republished(
    shown: AssetSpecs, topics: Sequence[str], sources: Mapping[str, Sequence[dg.AssetKey]]
) -> list[dg.AssetSpec]:
    """What went back into Kafka, and those of the topics that it went to which no feed reads (`topics`)."""
    beside = [_topic(shown, t, sources[t]) for t in topics]
    return [shown.republished.replace_attributes(deps=[shown.landed.key]), *beside]


def _check(name: str, key: dg.AssetKey, description: str, windows: Windows) -> dg.AssetCheckSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return dg.AssetCheckSpec(name, asset=key, description=description, partitions_def=windows)


_UNTIL = (
    "Land also the windows after the run's partition, up to this one, which is not included: 2026-11-20T14:00. The"
    " schedule asks so for windows in a row."
)
_ACCOUNT = "The ledger has no holes, from each partition's origin to the last offset that landed."
_FRONTIER = "The committed offsets have passed the window. If not, it shows which earlier window holds them."
