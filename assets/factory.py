"""Builds Dagster's definitions of a project: feeds, reports, schedules, the sensor. Reads ledgers; never asks Kafka.

    kafka/<topic>  →  <feed>/landed  →  <feed>/committed
                      <feed>/quarantined      of feeds with a schema or a contract
                      <feed>/landed  →  <feed>/table      of feeds with a table
                      <feed>/table  →  <feed>/current     of feeds with a table of current rows

A topic that several feeds read is one asset. A run of a window selects a feed's `landed` and `committed`; any other
request is a run of a job for many feeds, whose configuration names one. A job for each feed would take longer to load
than all else. The bodies are in `steps`. They read the feed's file when they run, so that addresses and secrets are
those of the run. A broken file appears as an asset with the error; the others load.
"""

# No `from __future__ import annotations` here: Dagster reads the annotation of `context` itself, not as text.

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg

from sluice.assets.checks import contract_checks, feed_checks
from sluice.assets.checks.feed_checks import NO_GAPS, OFFSETS_COMMITTED, WINDOW_CHECKS, WINDOW_COMPLETE
from sluice.assets.events.ledger_view import LedgerView, quarantines
from sluice.assets.instance import internals
from sluice.assets.jobs.catch_up_job import catch_up_job
from sluice.assets.jobs.compaction_job import compact_job, schedule_maintenance
from sluice.assets.jobs.fleet_job import Fleet, many_job
from sluice.assets.jobs.report_assets import read_reports, report_definitions, report_key
from sluice.assets.jobs.republish_job import republish_job
from sluice.assets.runs.run_session import FEED_TAG, RunSession
from sluice.assets.schedules.sensors import watch_check, watch_sensor
from sluice.assets.schedules.window_scheduler import WINDOWS, FeedPartitions, feed_schedule, fleet_schedule
from sluice.assets.specs.asset_specs import (
    AssetOf,
    AssetSpecs,
    FeedAsset,
    Keys,
    Translate,
    attributes,
    find_source,
    get_spec,
    landed_key,
    now,
    partitions_of,
    trace_columns,
)
from sluice.assets.specs.feed_files import FeedFiles, Recalled, read_shapes, recall_feeds, topics_of
from sluice.assets.steps.commit_step import commit_step
from sluice.assets.steps.input_rows import LandedRows
from sluice.assets.steps.land_step import land_step
from sluice.assets.steps.observe_step import observe_step
from sluice.assets.steps.table_step import table_check
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.feed import OWN, SHARED, Feed
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import many
from sluice.resources.project import Project

Partitions = dg.TimeWindowPartitionsDefinition

_BACKFILL = dg.BackfillPolicy.multi_run(WINDOWS)
"""A backfill is one run for consecutive windows, up to the schedule's maximum."""


@dataclass(frozen=True, slots=True)
class FeedTopics:
    """A feed's topics. `readers`: all feeds of each topic whose first reader it is. `sources`: the assets republished
    to a topic."""

    names: Sequence[str]
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sources: Mapping[str, Sequence[dg.AssetKey]] = field(default_factory=dict)


def feed_definitions(
    feed: Feed,
    specs: AssetSpecs,
    topics: FeedTopics,
    windows: Partitions,
    session: RunSession,
    checks: Collection[str] | None = None,
) -> dg.Definitions:
    """Returns all definitions of one feed. `checks`: names of its contract and schema checks, otherwise today's."""
    names = contract_checks.list_checks(feed) if checks is None else checks
    described = {name: contract_checks.describe_check(feed, name) for name in names}
    landed = _build_landed(feed, specs, topics.names, windows, session, described)
    committed = _build_committed(feed, specs, windows, session)
    observed = [_build_observation(feed.name, specs, topics, session)] if topics.readers else []
    # Assets that landing reports together with the rows: they cannot run by themselves.
    read = [specs.keys.topic(t) for t in topics.names]
    others = [specs.quarantined.replace_attributes(deps=read, partitions_def=windows)] if quarantines(feed) else []
    split = [s.replace_attributes(deps=[specs.landed.key], partitions_def=windows) for s in specs.outputs.values()]
    for output in (d.output for d in feed.table_feeds):
        rows = specs.outputs[output].key if output else specs.landed.key
        others.append(trace_columns(specs.tables[output], [rows]).replace_attributes(deps=[rows]))
    if feed.table and feed.table.current:
        others.append(specs.current.replace_attributes(deps=[specs.tables[""].key]))
    assets: list[dg.AssetsDefinition | dg.AssetSpec] = [*observed, landed, *split, *others, committed]
    if feed.schedule == OWN:
        job = dg.define_asset_job(
            f"land_{feed.name}",
            selection=[landed, committed],
            description=f"Land a window of {feed.name}, then commit its offsets.",
            tags={FEED_TAG: feed.name},
            executor_def=dg.in_process_executor,
        )
        return dg.Definitions(assets, [feed_schedule(feed, job.name, windows, session)], jobs=[job])
    # Feeds of a project land together, by the shared jobs.
    if not session.steps.lone or feed.schedule != SHARED:
        return dg.Definitions(assets)
    return dg.Definitions(assets, [feed_schedule(feed, internals.ASSET_JOB, windows, session, [landed, committed])])


def _build_landed(
    feed: Feed,
    specs: AssetSpecs,
    topics: Sequence[str],
    windows: Partitions,
    session: RunSession,
    checks: Mapping[str, str],
) -> dg.AssetsDefinition:
    key, spec = specs.landed.key, specs.landed
    if feed.columns is not None:
        spec = trace_columns(spec, map(specs.keys.topic, topics), find_source)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            **attributes(spec),
            deps=[specs.keys.topic(t) for t in topics],
            check_specs=[
                *(_build_check(name, key, check.description, windows) for name, check in WINDOW_CHECKS.items()),
                *(_build_check(name, key, text, windows) for name, text in checks.items()),
                dg.AssetCheckSpec(NO_GAPS, asset=key, description=_NO_GAPS),
            ],
            op_tags=session.steps.tags,
            config_schema={"until": dg.Field(str, default_value="", description=_UNTIL)},
            pool=session.get_pool(feed.name),
            partitions_def=windows,
            backfill_policy=_BACKFILL,
            io_manager_def=LandedRows(session, feed.name),
            output_required=False,  # a window in its grace period is skipped
        )

    def landed(context: dg.AssetExecutionContext) -> Iterator[Any]:
        until = context.op_execution_context.op_config["until"]
        yield from session.steps.execute(context, land_step(context, session, feed.name, until=until))

    asset: dg.AssetsDefinition = decorate(landed)
    return asset


def _build_committed(feed: Feed, specs: AssetSpecs, windows: Partitions, session: RunSession) -> dg.AssetsDefinition:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            **attributes(specs.committed),
            deps=[specs.landed.key],
            check_specs=[_build_check(OFFSETS_COMMITTED, specs.committed.key, _OFFSETS_COMMITTED, windows)],
            pool=session.get_pool(feed.name),
            partitions_def=windows,
            backfill_policy=_BACKFILL,
        )

    def committed(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from commit_step(context, session, feed.name)

    asset: dg.AssetsDefinition = decorate(committed)
    return asset


def _build_observation(feed: str, specs: AssetSpecs, topics: FeedTopics, session: RunSession) -> dg.AssetsDefinition:
    observed = [_build_topic(specs, t, topics.sources.get(t, ())) for t in topics.readers]

    def observe(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from observe_step(context, session, feed, topics.readers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.multi_observable_source_asset(name=f"observe_{feed}", specs=observed, can_subset=True)
    asset: dg.AssetsDefinition = decorate(observe)
    return asset


def _build_topic(specs: AssetSpecs, topic: str, sources: Sequence[dg.AssetKey]) -> dg.AssetSpec:
    spec = specs.topic(topic)
    return spec.replace_attributes(deps=list(sources)) if sources else spec


def build_republished(
    specs: AssetSpecs, topics: Sequence[str], sources: Mapping[str, Sequence[dg.AssetKey]]
) -> list[dg.AssetSpec]:
    """Returns the asset of rows that went back into Kafka, and their target topics without a reader (`topics`)."""
    targets = [_build_topic(specs, t, sources[t]) for t in topics]
    return [specs.republished.replace_attributes(deps=[specs.landed.key]), *targets]


def _build_output_checks(
    output: Feed, specs: AssetSpecs, windows: Partitions, session: RunSession
) -> Iterator[dg.AssetChecksDefinition]:
    """Yields the contract and schema checks of an output, if it has any. Landing reports them; executed, they evaluate
    the newest complete window, or that of the run."""
    key, texts = specs.keys.output(output.output), contract_checks.list_checks(output)
    if not texts:
        return

    @dg.multi_asset_check(
        name=f"{key.to_python_identifier()}_checks",
        specs=[_build_check(name, key, text, windows) for name, text in texts.items()],
        can_subset=True,
    )
    def evaluate(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckEvaluation]:
        feed = session.feed(output.name)
        with session.open_ports(feed) as ports:
            view = LedgerView.open(feed, ports, specs.keys)
            chosen = map(feed.window.parse_name, context.partition_keys) if context.has_partition_key else view.complete
            complete = sorted(view.complete.intersection(chosen))
            own = [d for d in feed.outputs if d.output == output.output]
            for result in feed_checks.evaluate_outputs(context.instance, view, own, complete[-1:]):
                if result.asset_check_key in context.selected_asset_check_keys:
                    yield result

    yield evaluate


def _build_check(name: str, key: dg.AssetKey, description: str, windows: Partitions) -> dg.AssetCheckSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        blocking = name == WINDOW_COMPLETE  # the step fails, too
        return dg.AssetCheckSpec(name, asset=key, description=description, partitions_def=windows, blocking=blocking)


_UNTIL = (
    "Also land the windows after the run's partition, up to this one (exclusive), such as 2026-11-20T14:00. The"
    " schedule sets it for consecutive windows."
)
_NO_GAPS = (
    "Passes when every offset between a partition's first and last landed one is accounted for. Warns about gaps, and"
    " fails when requested offsets did not land: `sluice run FEED` lands them."
)
_OFFSETS_COMMITTED = (
    "Passes when the group's committed offsets have passed the window. Warns while an earlier window is pending, and"
    " names it: `sluice run FEED` lands it."
)


def build(project: Project, session: RunSession | None = None) -> dg.Definitions:
    """Returns all definitions of the project. Raises FeedError if it has feed files and none of them loads."""
    files, session = read_shapes(project), session or RunSession(project)
    if files.broken and not files.feeds:
        raise FeedError("no feed can be loaded:\n" + "\n".join(str(e) for e in files.broken.values()))
    specs = {name: AssetSpecs.of(feed) for name, feed in files.feeds.items()}
    memory = recall_all(files, specs, session)
    windows = windows_of(files.feeds, memory)
    reports = read_reports(project, files.feeds)
    broken = [
        broken_asset("report", report_key(_choose_name(p, reports.reports)), e) for p, e in reports.broken.items()
    ]
    return dg.Definitions.merge(
        feeds_of(files, specs, memory, windows, session),
        report_definitions(reports.reports.values(), windows, session),
        fleets_of(files, windows, session),
        dg.Definitions(assets=broken, sensors=[watch_sensor(session)], executor=dg.in_process_executor),
    )


def fleets_of(files: FeedFiles, windows: FeedPartitions, session: RunSession) -> dg.Definitions:
    """Returns the jobs over the feeds of each schedule: landing and compaction with their schedules, republishing.

    In a code location of feeds alone, one job lands any request, and a single feed needs no shared schedule.
    """
    lone = session.steps.lone
    by_name = group_by(files.feeds.values(), lambda feed: feed.schedule)
    landing = [n for n in by_name if not lone or (n != OWN and (n != SHARED or len(files.feeds) > 1))]
    others = [job(name, session.apart()) for name in by_name for job in (compact_job, republish_job)]
    if lone and files.feeds:
        others.append(catch_up_job(session.apart()))
    return dg.Definitions(
        jobs=[*(many_job(Fleet(session, name), name) for name in landing), *others],
        schedules=[
            *(fleet_schedule(name, by_name[name], windows, session) for name in landing if name != OWN),
            *(schedule_maintenance(name, feeds) for name, feeds in by_name.items()),
        ],
    )


def recall_all(files: FeedFiles, specs: Mapping[str, AssetSpecs], session: RunSession) -> Mapping[str, Recalled]:
    """Returns the facts of each feed's ledger. A ledger that cannot be read costs a warning: then partitions begin with
    the first one that Dagster's storage has, or where the feed's `start` points."""
    recalled, errors = recall_feeds(files, session.open_lake)
    if errors:
        firsts = internals.find_first_partitions(
            {name: (specs[name].landed.key, files.feeds[name].window) for name in errors}
        )
        recalled |= {name: Recalled(first_window=firsts.get(name)) for name in errors}
        name, error = next(iter(errors.items()))
        others = f" and {many(len(errors) - 1, 'other feed')}" if len(errors) > 1 else ""
        dg.get_dagster_logger("sluice").warning(
            "the ledger of %s was not read, so old windows may be missing here: %s → %s, then reload the code location",
            f"{name}{others}",
            error.message,
            error.remedy or "check the lake",
        )
    return recalled


def windows_of(feeds: Mapping[str, Feed], memory: Mapping[str, Recalled]) -> FeedPartitions:
    """Returns the partitions of each feed."""
    return {name: partitions_of(feed, memory[name].first_window, now()) for name, feed in feeds.items()}


def knowing(session: RunSession, specs: Mapping[str, AssetSpecs]) -> RunSession:
    """Returns the session with the asset keys of the feeds."""
    keys = {name: s.keys for name, s in specs.items()}
    return replace(session, keys=lambda name: keys[name] if name in keys else Keys.of(name))


def feeds_of(
    files: FeedFiles,
    specs: Mapping[str, AssetSpecs],
    memory: Mapping[str, Recalled],
    windows: FeedPartitions,
    session: RunSession,
    translate: Translate = get_spec,
) -> dg.Definitions:
    """Returns the assets and checks of the feeds, their own jobs and schedules, and an asset for each broken file."""
    wrong = [(_find_key(_choose_name(p, files.feeds), translate), e) for p, e in files.broken.items()]
    topics = {name: topics_of(feed, memory[name]) for name, feed in files.feeds.items()}
    # Dagster takes one definition of each topic's asset: the first feed that reads it, by name, defines it.
    readers: dict[str, list[str]] = {}
    for name in sorted(topics):
        for topic in topics[name]:
            readers.setdefault(topic, []).append(name)
    # Topics that feeds republish to: assets of their own unless another feed reads them.
    targets = {name: t for name in files.feeds if (t := memory[name].targets)}
    sources: dict[str, list[dg.AssetKey]] = {}
    for name, sent_to in targets.items():
        for topic in sent_to:
            sources.setdefault(topic, []).append(specs[name].republished.key)
    unread: dict[str, list[str]] = {name: [] for name in targets}
    for topic in sorted(sources.keys() - readers.keys()):
        unread[next(name for name, sent_to in targets.items() if topic in sent_to)].append(topic)
    checks = internals.list_loaded_checks(
        {specs[n].landed.key.to_user_string(): [*contract_checks.list_checks(f)] for n, f in files.feeds.items()}
    )
    back = [spec for name in targets for spec in build_republished(specs[name], unread[name], sources)]
    return dg.Definitions.merge(
        *(
            feed_definitions(
                feed,
                specs[name],
                FeedTopics(names, {t: readers[t] for t in names if readers[t][0] == name}, sources),
                windows[name],
                session.apart(),
                checks[specs[name].landed.key.to_user_string()],
            )
            for name, feed in files.feeds.items()
            for names in (topics[name],)
        ),
        dg.Definitions(
            assets=[*back, *(broken_asset("feed", key, error) for key, error in wrong)],
            asset_checks=[
                *(watch_check(feed, session) for feed in files.feeds.values()),
                *(table_check(dataset, session) for feed in files.feeds.values() for dataset in feed.table_feeds),
                *(
                    check
                    for name, feed in files.feeds.items()
                    for output in feed.outputs
                    for check in _build_output_checks(output, specs[name], windows[name], session)
                ),
            ],
        ),
    )


def _find_key(name: str, translate: Translate) -> dg.AssetKey:
    """Returns the key that the feed would have."""
    return translate(FeedAsset(AssetOf.LANDED, name, None, dg.AssetSpec(landed_key(name)))).key


def _choose_name(path: Path, taken: Mapping[str, object]) -> str:
    return path.name if path.stem in taken else path.stem


def broken_asset(what: str, key: dg.AssetKey, error: FeedError) -> dg.AssetSpec:
    """Returns an asset in place of a feed or report, with the error as its description."""
    dg.get_dagster_logger("sluice").error("%s file not loaded: %s", what, error)
    text = f"**This {what} is not loaded.**\n\n    {str(error).replace(chr(10), chr(10) + '    ')}"
    return dg.AssetSpec(key, group_name=f"broken_{what}s", description=text)
