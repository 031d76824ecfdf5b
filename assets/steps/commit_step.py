"""Commits a feed's frontier, and reports it for the run's windows: none, one, or many.

Guarantee: nothing is committed before Dagster's event log holds every batch below the frontier (see `evidence`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import dagster as dg

from sluice.assets.checks import feed_checks, re_report
from sluice.assets.checks.feed_checks import FEED_HEALTH, OFFSETS_COMMITTED
from sluice.assets.events import landed_metadata
from sluice.assets.events.landed_metadata import Portion
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.instance import with_dagster_liveness
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import Metadata, table
from sluice.assets.steps.table_step import sync_table
from sluice.pipelines.committing.commit import CommitResult, CommitStatus
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.ports import Ports
from sluice.running import FeedRun

Context = dg.AssetExecutionContext | dg.OpExecutionContext
Events = Iterator[Any]


def commit_step(context: Context, session: RunSession, name: str) -> Events:
    """Commit the frontier, and report it for the run's partitions, and for other windows that it passed.

    Raises dagster.Failure, or an interrupt.
    """
    with session.hold_lock(context):
        yield from _commit_and_report(context, session, name)


def _commit_and_report(context: Context, session: RunSession, name: str) -> Events:
    try:
        view, result = _commit(context, session, name)
    except Exception as error:
        yield from _report_partitions_again(context, session, name)
        yield failed_event(context, session, name, session.result.failure or error)
        raise
    if context.has_partition_key:
        window = view.feed.window.parse_name(context.partition_key)
        metadata = _build_metadata(view.feed.group, result)
        yield dg.MaterializeResult(metadata=metadata, data_version=dg.DataVersion(view.version))
        yield dg.AssetCheckResult(check_name=OFFSETS_COMMITTED, **feed_checks.check_committed(view, window))
        yield from _report_others(context, session, view, result, own=window)
    else:
        if isinstance(context, dg.AssetExecutionContext):
            yield from internals.report_without_results(context, view.keys.committed)
        yield from _report_committed(context, session, view, result)
    yield from sync_table(context, session, name)


def commit_in_landing_step(context: Context, session: RunSession, name: str) -> Events:
    """Commit at the end of a step that landed, in a run without a step that commits.

    Raises dagster.Failure, or an interrupt.
    """
    with session.hold_lock(context):
        view, result = _commit(context, session, name)
        yield from _report_committed(context, session, view, result)
        yield from sync_table(context, session, name)


def partitions(context: Context, feed: Feed) -> Sequence[int]:
    """Returns the run's partitions: the starts (ms) of its windows."""
    if context.has_partition_key_range:
        first, last = context.partition_key_range
        return feed.window.list_starts(feed.window.parse_name(first), feed.window.end_of(feed.window.parse_name(last)))
    return (feed.window.parse_name(context.partition_key),) if context.has_partition_key else ()


def open_view(session: RunSession, feed: Feed, ledger: Ledger, ports: Ports) -> LedgerView:
    return LedgerView.open(feed, ports, session.keys(feed.name), ledger)


def open_run(context: Context, session: RunSession, feed: Feed, ports: Ports) -> FeedRun:
    """Returns the run of the feed, with the ledger that its steps share."""
    ports, run = with_dagster_liveness(ports, context.instance), context.run.run_id
    ledger = session.ledgers.of(feed, ports, run)
    return FeedRun(feed, ports, ledger, run, session.reporter(context.log), session.result)


def failed_event(context: Context, session: RunSession, name: str, error: BaseException) -> dg.AssetCheckEvaluation:
    """Returns the failed check `feed_health` after a failed run, whether the sensor is on or off."""
    return feed_checks.evaluate_feed(
        context.instance, session.keys(name).landed, FEED_HEALTH, feed_checks.report_failed_run(error)
    )


def report_again(
    context: Context, session: RunSession, feed: Feed, ports: Ports, windows: Sequence[int], again: re_report.Again
) -> Events:
    """Yields the complete windows of the run after a failure. If the lake is unreachable, the next run does.

    Errors are only logged, because the caller's error is the run's.
    """
    if not windows:
        return
    with internals.optional():
        try:
            ledger = Ledger(ports.lake, feed.stored, ports.clock)  # needs the lake only: Kafka may be unreachable
            yield from again(context.instance, open_view(session, feed, ledger, ports), windows)
        except SluiceError as error:
            context.log.warning("the windows' checks could not be reported again: %s", error.message)


def commit_quietly(context: Context, session: RunSession, feed: Feed, ports: Ports) -> None:
    """Commit without a report. If this is refused, so is the step that commits, which reports the reason."""
    try:
        _commit_landed(context, session, feed, ports)
    except SluiceError as error:
        context.log.warning("landed offsets are not committed yet: %s", error)


def commit_after_failure(context: Context, session: RunSession, feed: Feed, ports: Ports) -> Events:
    """Commit landed offsets, without partitions whose log has changed. A failure is reported, not raised."""
    try:
        changed = open_run(context, session, feed, ports).find_changed()
        view, result = _commit_landed(context, session, feed, ports, changed)
    except SluiceError as error:
        session.result.uncommitted = error
        context.log.error("landed offsets could not be committed: %s", error)
        return
    if result.status is not CommitStatus.UNCHANGED:
        yield from internals.to_yield(context, _build_event(view, result, None))
    yield from _report_others(context, session, view, result)


def _commit(context: Context, session: RunSession, name: str) -> tuple[LedgerView, CommitResult]:
    with session.step(context, name):
        feed = session.feed(name)
        with session.open_ports(feed) as ports:
            view, result = _commit_landed(context, session, feed, ports)
    session.reporter(context.log)(Progress("finish"))
    return view, result


def _commit_landed(
    context: Context, session: RunSession, feed: Feed, ports: Ports, changed: Collection[TopicPartition] = ()
) -> tuple[LedgerView, CommitResult]:
    """Commit, once the event log holds every batch below the frontier."""
    run = open_run(context, session, feed, ports)
    run.report(Progress("commit"))
    view = open_view(session, feed, run.ledger, run.ports)
    missing = landed_metadata.find_missing(context.instance, view, [view.keys.landed])
    limit = 0 if session.result.landed else landed_metadata.PORTION
    landed_metadata.roll_forward(context.instance, view, limit, missing=missing)
    if missing.batches:
        landed_metadata.require_reported(context.instance, view)
    result = run.commit(changed)
    for moved in result.put_by_others:
        context.log.warning("%s: somebody else had committed %s, which landing has reached", moved.key, moved.after)
    return view, result


def _report_committed(context: Context, session: RunSession, view: LedgerView, result: CommitResult) -> Events:
    """Report the commit for the run's complete partitions, or once if it has none."""
    windows = partitions(context, view.feed)
    complete = [w for w in windows if view.is_complete(w)]
    for window in complete:
        yield _build_event(view, result, window)
    if not windows:
        yield _build_event(view, result, None)
    yield from _report_others(context, session, view, result, reported=complete)


def _report_partitions_again(context: Context, session: RunSession, name: str) -> Events:
    """Report earlier commits of the run's partitions again, regardless of the outcome of this one."""
    try:
        feed = session.feed(name)
        if windows := partitions(context, feed):
            with session.open_ports(feed) as ports:
                yield from report_again(context, session, feed, ports, windows, re_report.report_committed_again)
    except SluiceError as error:
        context.log.warning("the windows' commits could not be reported again: %s", error.message)


def _report_others(
    context: Context,
    session: RunSession,
    view: LedgerView,
    result: CommitResult,
    own: int | None = None,
    reported: Collection[int] = (),
) -> Events:
    """Report other windows: those that this run landed, and a portion of those landed before and not yet reported.

    Also evaluate the check of windows that were just passed. `reported`: windows without their check yet."""
    key, landed = view.keys.committed, session.result.landed
    unreported = landed_metadata.find_unreported_windows(context.instance, view, key) - {own}
    mine = unreported & {*landed.windows} if landed else set()
    portion = Portion.of(unreported - mine, landed_metadata.PORTION)
    windows = sorted(mine | portion.windows)
    for window in windows:
        yield _build_event(view, result, window)
    # Complete windows that the committed offsets passed with this commit, in some partition.
    moved = (view.find_ending_windows(m.key, m.before or 0, m.after) for m in result.offsets)
    passed = {w for of_partition in moved for w in of_partition} & view.complete
    evaluated = {*reported, *windows, *(passed - portion.remaining)} - {own}
    yield from feed_checks.evaluate_committed(context.instance, view, sorted(evaluated))


def _build_event(view: LedgerView, result: CommitResult, window: int | None) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        view.keys.committed,
        partition=None if window is None else view.feed.window.name(window),
        metadata=_build_metadata(view.feed.group, result),
        tags={landed_metadata.VERSION: view.version},
    )


def _build_metadata(group: str, result: CommitResult) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {"partition": str(m.key), "before": "none" if m.before is None else str(m.before), "after": m.after}
        for m in result.offsets
    ]
    return {
        "group": group,
        "status": str(result.status),
        "committed_offsets": sum(m.after for m in result.offsets),
        **({"mark": result.mark} if result.mark >= 0 else {}),
        **(
            {"dead_letters": result.dead_letters, "dead_letters_to": result.dead_letters_to}
            if result.dead_letters
            else {}
        ),
        "frontier": table(rows, {"partition": "string", "before": "string", "after": "int"}),
    }
