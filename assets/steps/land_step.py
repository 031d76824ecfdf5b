"""Lands a feed and reports it for the run's windows: none, one, or many.

A step raises its error as `dagster.Failure`. Published batches stay published and are reported in spite of other
failures. Events that an earlier run could not report are reported before anything is committed (see `evidence`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import dagster as dg

from sluice.assets.checks import contract_checks, feed_checks, re_report
from sluice.assets.checks.contract_checks import CheckResult
from sluice.assets.checks.feed_checks import (
    FEED_HEALTH,
    NO_GAPS,
    WINDOW_COMPLETE,
    build_evaluation,
    build_failures_metadata,
)
from sluice.assets.events import landed_metadata
from sluice.assets.events.landed_metadata import Portion
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.internals import executes
from sluice.assets.runs.run_config import MORE_TAG, OPEN_WINDOWS_TAG, window_start
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import now, plain
from sluice.assets.steps import commit_step
from sluice.assets.steps.commit_step import Context, Events
from sluice.assets.steps.observe_step import build_topic_metadata, outlook_of, partitions_of, reader_of
from sluice.pipelines.batch.result import BatchResult, Landed, Skip
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.errors import BatchRefused, Failed, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Request, RequestKind, Task
from sluice.pipelines.model.receipts import Progress, RangeFailure
from sluice.pipelines.operating.feed_status import WatchResult, build_failed_status, watch
from sluice.pipelines.planning.windows import OpenWindows, describe_unpinned
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.status.batch_facts import WorkTime, by_task
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import many, show_duration, show_window
from sluice.resources.observe import lineage
from sluice.running import FeedRun, find_open_error, list_requested, list_settled

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import WindowCheck


class RunConfig(Protocol):
    """The configured request of a run. Both methods raise UsageError."""

    def request(self, settings: WindowSettings | None = None) -> Request: ...

    def skip(self) -> Skip | None: ...


def land_step(
    context: Context, session: RunSession, name: str, config: RunConfig | None = None, until: str = ""
) -> Events:
    """Land the configured request, or without a configuration the run's partitions, and report it.

    A run of one partition also lands those after it, up to the window `until`, as far as `session.catch_up` allows.
    A partition is materialized when it is complete, and only then. If the run has no step that commits, this step
    commits, so that no landed rows are forgotten.

    Raises dagster.Failure, or an interrupt.
    """
    with session.step(context, name):
        feed = session.feed(name)
        request = config.request(feed.window) if config else _build_request(context, feed, until)
        skip = config.skip() if config else None
        landed = yield from LandStep(context, session, feed, request, skip).run()
    if not isinstance(context, dg.AssetExecutionContext):
        return
    if not landed:
        yield from internals.no_results(context, session.keys(name).landed)
        return
    if context.has_partition_key_range:
        yield from internals.report_without_results(context, session.keys(name).landed)
    if not executes(context, session.keys(name).committed):
        yield from commit_step.commit_in_landing_step(context, session, name)


def _build_request(context: Context, feed: Feed, until: str) -> Request:
    """Returns the request for the run's partitions, and for one partition those after it. Raises UsageError."""
    windows = commit_step.partitions(context, feed)
    if context.has_partition_key_range:
        return Request(RequestKind.WINDOW, window=windows[0], until=feed.window.end_of(windows[-1]))
    return Request(RequestKind.WINDOW, window=windows[0], until=window_start(until, feed.window) if until else None)


_PLANNED = 24
"""The most windows of a request that are red while they are not complete."""


@dataclass(frozen=True)
class LandStep:
    """One step that lands a request of a feed."""

    context: Context
    session: RunSession
    feed: Feed
    request: Request
    skip: Skip | None = None

    @property
    def _windows(self) -> Sequence[int]:
        return commit_step.partitions(self.context, self.feed)

    @property
    def _own(self) -> int | None:
        """The window of a run with one partition, which the step reports as its own results."""
        return self._windows[0] if self.context.has_partition_key else None

    @property
    def _key(self) -> dg.AssetKey:
        return self.session.keys(self.feed.name).landed

    def run(self) -> Generator[Any, None, bool]:
        """Land, commit if landing fails, and report. Returns False if all requested windows are open."""
        # Dagster plans the run's partitions itself.
        keys = landed_metadata.list_reported_assets(self.feed, self.session.keys(self.feed.name))
        internals.plan_partitions(self.context, keys, [self.feed.window.name(w) for w in self._red_windows])
        windows = list_requested(self.feed, self.request)
        window = (windows[0], self.feed.window.end_of(windows[-1])) if windows else None
        landing = lineage.Landing(self.feed, self.context.run.run_id, window, self.session.alone)
        with (
            lineage.report_landing(landing, lambda: self.session.result.landed),
            self.session.open_ports(self.feed) as ports,
        ):
            if error := find_open_error(self.feed, ports, self.request):
                self.session.result.error = error
                yield from self._report_open(OpenWindows.of_request(self.request, self.feed.window))
                return False
            try:
                yield from self._land_or_commit(ports)
            except Exception as error:
                yield from self._report_again(ports, re_report.report_committed_again)
                yield commit_step.failed_event(self.context, self.session, self.feed.name, error)
                raise
        return True

    def _land_or_commit(self, ports: Ports) -> Events:
        """Land. If it fails, commit the frontier before the step fails, since `<feed>/committed` will not run.

        What failed is not part of the frontier. After an error that ended landing before it reached anything, nothing
        is committed: the same error would keep the commit from succeeding.
        """
        context, session, feed = self.context, self.session, self.feed
        try:
            yield from self._land_and_check(ports)
        except SluiceError as error:
            if session.result.can_commit_after(error):
                yield from commit_step.commit_after_failure(context, session, feed, ports)
            raise
        if feed.offsets.in_zookeeper:
            # This step owns the partitions until it ends; the next owner begins at the committed offsets.
            commit_step.commit_quietly(context, session, feed, ports)

    def _land_and_check(self, ports: Ports) -> Events:
        try:
            view, run, landed = yield from self._land(ports)
            if landed.refused:
                raise landed.refused
        except Exception as error:
            if isinstance(error, BatchRefused) and self._own is not None:
                with internals.optional():
                    yield from self._report_refusal(ports, error, self._own)
            yield from self._report_again(ports, re_report.report_landed_again)
            raise
        required = self._list_required(landed)
        if self._own is not None:
            yield from self._report_own(view, landed, self._own)
        else:
            account = feed_checks.check_gaps(view, landed, self.context.run.run_id)
            yield feed_checks.evaluate_feed(self.context.instance, self._key, NO_GAPS, account)
            for window in run.find_incomplete(required) if self._windows else ():
                result = _report_incomplete(landed, describe_unpinned(view.state, window, self.feed.window))
                yield build_evaluation(self._key, WINDOW_COMPLETE, self.feed.window.name(window), result)
        run.check(required)

    def _list_required(self, landed: Landed) -> Sequence[int]:
        """The windows without which the step fails: the run's partitions; in a run over many feeds, the requested."""
        if self._own is not None:
            return self._windows
        if not self._windows and (self.session.alone or landed.stopped):
            return ()
        return list_settled(self.feed, self.request, landed)

    @cached_property
    def _red_windows(self) -> Sequence[int]:
        """The requested windows without the run's partitions and open ones: red until this run reports them."""
        if not self._windows and self.session.alone:
            return ()
        windows = [w for w in list_requested(self.feed, self.request)[: _PLANNED + 1] if w not in self._windows]
        return [w for w in windows[:_PLANNED] if self.feed.window.is_closed(w, now())]

    def _report_open(self, open_windows: OpenWindows | None) -> Events:
        """Report the open windows of a request: a line in the log, a tag, an observation of the first ones."""
        if open_windows is None:
            return
        context = self.context
        context.log.warning("%s → %s", open_windows.text, open_windows.remedy(self.feed.name))
        if self.session.alone:
            context.instance.add_run_tags(context.run.run_id, {OPEN_WINDOWS_TAG: open_windows.window})
        for window in open_windows.list_starts(self.feed.window)[:_PLANNED]:
            yield _build_open_event(self.feed, self._key, window)

    def _report_refusal(self, ports: Ports, refused: BatchRefused, window: int) -> Events:
        """Yields the reason for the refusal as the window's checks; nothing if the batch belongs to another window."""
        context, feed = self.context, self.feed
        ranges = open_ledger(feed, ports).read().list_live_ranges()
        batch = next((b for b, s in ranges if s.window == window and b.owner.run == context.run.run_id), None)
        if batch is None:
            return
        page = paths.batch_page_path(feed.stored, batch.id, batch.owner.token)
        report = ports.lake.locate(page) if ports.lake.size(page) is not None else None
        yield from self._yield_known(window, contract_checks.evaluate_refused(feed, refused, report))

    def _report_again(self, ports: Ports, again: re_report.Again) -> Events:
        windows = (*self._windows, *self._red_windows)
        yield from commit_step.report_again(self.context, self.session, self.feed, ports, windows, again)

    def _report_own(self, view: LedgerView, landed: Landed, window: int) -> Events:
        """Report the run's only partition, and its checks."""
        feed, key, complete = view.feed, view.keys.landed, view.is_complete(window)
        if complete:
            yield landed_metadata.build_window_result(view, window)
            yield from (
                landed_metadata.build_window_event(view, k, window)
                for k in landed_metadata.list_reported_assets(feed, view.keys)
                if k != key
            )
        results = {name: check.evaluate(view, window) for name, check in feed_checks.WINDOW_CHECKS.items()}
        if not complete:
            results[WINDOW_COMPLETE] = _report_incomplete(landed, describe_unpinned(view.state, window, feed.window))
        results |= {NO_GAPS: feed_checks.check_gaps(view, landed, self.context.run.run_id)}
        for name, result in results.items():
            yield dg.AssetCheckResult(check_name=name, asset_key=key, **result)
        if complete:
            yield from feed_checks.evaluate_outputs(self.context.instance, view, feed.outputs, [window])
        evaluated = dict(contract_checks.evaluate(view, window))
        yield from self._yield_known(window, evaluated.items())
        for name in sorted(self._selected_checks - results.keys() - evaluated.keys()):
            yield dg.AssetCheckResult(check_name=name, asset_key=key, **contract_checks.GONE)

    @property
    def _selected_checks(self) -> set[str]:
        """The names of the asset's checks as the code location loaded them."""
        return {k.name for k in self.context.selected_asset_check_keys if k.asset_key == self._key}

    def _yield_known(self, window: int, results: Iterable[tuple[str, CheckResult]]) -> Events:
        """Yields the results of loaded checks. Those of new ones become an observation, and decide as well."""
        loaded, new = self._selected_checks, {}
        for name, result in results:
            if name in loaded:
                yield dg.AssetCheckResult(check_name=name, asset_key=self._key, **result)
            else:
                new[name] = f"{'passed' if result['passed'] else 'failed'}: {result['description']}"
        if new:
            message = f"the contract has checks that are not loaded: {contract_checks.RELOAD} to show them"
            self.context.log.warning("%s: %s", message, "; ".join(f"{n} {text}" for n, text in new.items()))
            name = self.feed.window.name(window)
            yield dg.AssetObservation(self._key, partition=name, description=message, metadata=new)

    def _land(self, ports: Ports) -> Generator[Any, None, tuple[LedgerView, FeedRun, Landed]]:
        """Land, and report batches and completed windows, but not the run's only partition."""
        context, session, feed = self.context, self.session, self.feed
        run = commit_step.open_run(context, session, feed, ports)
        ports, ledger = run.ports, run.ledger

        def books_now() -> LedgerView:
            return commit_step.open_view(session, feed, ledger, ports)

        # First what earlier runs published and did not report: the event log follows the ledger's order.
        rolled = landed_metadata.roll_forward(context.instance, books_now(), landed_metadata.PORTION, run.report)
        if message := rolled.describe(feed.name):
            context.log.info(message)
        re_report.settle(context.instance, feed, session.keys(feed.name), books_now)
        with _keep_refused_report(context, ledger, ports):
            landed = run.land(self.request, self.skip, self._time_is_up())
        log_tasks(landed)
        self._log(landed)
        run.report(Progress("report"))
        view = books_now()
        watched = None
        if not landed.failures:  # after failures Kafka may be unreachable, and a request would take minutes
            yield from _read_topics(context, ports, landed, view)
            watched = _watch_after_landing(context, feed, ports, ledger)
        outlook = watched.outlook if watched else None
        if outlook:
            ledger.note_retention(outlook.kept)
        view.checks.update(self._write_hours(ports, view, landed))
        BatchReports(context.log, ledger, ports.lake, view.checks).write_all(landed.batches, outlook)
        if landed.refused:
            BatchReports(context.log, ledger, ports.lake).write_refused(context.run.run_id, landed.refused)
        self._write_row(ports, ledger, landed, watched)
        # Events go last: if the process dies here, the next run rolls them forward.
        yield from self._publish_events(view, landed, rolled)
        yield from self._report_open(landed.open_windows)
        if watched:
            yield feed_checks.evaluate_feed(context.instance, self._key, FEED_HEALTH, feed_checks.check_health(watched))
        return view, run, landed

    def _write_hours(self, ports: Ports, view: LedgerView, landed: Landed) -> Mapping[int, WindowCheck]:
        """Write the pages of windows that this run is about, and return their checks. Errors are only logged."""
        from sluice.pipelines.operating.hour_page import build_page, check_hours

        ranges = (r.offset_range for b in landed.batches if b.number is not None for r in b.receipts)
        starts = {s.window for s in ranges if s.window is not None} | view.complete.intersection(self._windows)
        try:
            checks = check_hours(self.feed, ports, view.ledger, starts, complete_only=bool(landed.failures))
            for check in checks.values():
                build_page(self.feed, ports, check)
        except Exception as error:  # noqa: BLE001 - the rows have landed, and pages are optional
            self.context.log.warning("pages of windows were not written: %s: %s", type(error).__name__, error)
            return {}
        return checks

    def _write_row(self, ports: Ports, ledger: Ledger, landed: Landed, watched: WatchResult | None) -> None:
        """Write the feed's row on the page of all feeds. Errors are only logged."""
        from sluice.pipelines.operating.project_page import WINDOWS, refresh, store_row

        now, status = ports.clock(), None
        try:
            if watched and watched.status:
                status = replace(watched.status, findings=watched.findings)
            elif landed.failures:
                failure = landed.failures[0]
                error = Failed(f"{failure.offset_range}: {failure.message}", remedy=failure.remedy)
                status = build_failed_status(self.feed, ledger, now, WINDOWS, error)
            if status:
                store_row(ports.lake, self.feed.stored, status, now)
            if self.session.alone:
                refresh(ports.lake, now)
        except Exception as error:  # noqa: BLE001 - the rows have landed, and pages are optional
            self.context.log.warning("the page of all feeds was not written: %s: %s", type(error).__name__, error)

    def _time_is_up(self) -> Callable[[], bool]:
        """Returns a function that is true once the rest is left to the next run.

        Scheduled runs stop after `session.catch_up`, so that they report and commit from time to time. A run started
        manually lands everything.
        """
        if self.request.until is None or internals.SCHEDULE_TAG not in self.context.run.tags:
            return lambda: False
        end = time.monotonic() + self.session.catch_up / 1000
        return lambda: time.monotonic() >= end

    def _log(self, landed: Landed) -> None:
        """Log the remaining ranges and the reason, and tag a run that leaves the rest to the next one."""
        context, session = self.context, self.session
        if landed.stopped:
            remaining = many(landed.left, "offset")
            context.log.info("after %s %s are left to the next run", show_duration(session.catch_up), remaining)
            if session.alone:
                context.instance.add_run_tags(context.run.run_id, {MORE_TAG: "1"})
        if landed.start_not_used:
            context.log.warning("%s", landed.start_not_used)
        for transaction in landed.held_back:
            context.log.warning("%s → %s", transaction.message, transaction.remedy)
        if landed.overridden:
            context.log.warning("%s", landed.overridden)

    def _publish_events(self, view: LedgerView, landed: Landed, rolled: Portion) -> Events:
        """Yields the events of published and completed windows, even if others failed.

        `rolled`: the windows that were reported just before, without their checks, and those left to later runs. The
        run's partitions and planned windows are reported even if an earlier run landed them.
        """
        context, key, own = self.context, view.keys.landed, self._own
        batches = [view.state.batches[b.batch] for b in landed.batches if b.number is not None]
        windows = {*landed.windows, *self._windows, *self._red_windows} & view.complete | view.list_complete(batches)
        windows |= landed_metadata.find_unreported_windows(context.instance, view, key) - rolled.remaining
        yield from landed_metadata.build_landing_events(view, (), windows - {own})
        yield from feed_checks.evaluate_windows(context.instance, view, key, (windows | rolled.windows) - {own})
        for event in landed_metadata.build_batch_events(view, batches, windows):
            yield from internals.to_yield(context, event)


def _build_open_event(feed: Feed, key: dg.AssetKey, window: int) -> dg.AssetObservation:
    open_windows = OpenWindows.of(window, 1, feed.window)
    return dg.AssetObservation(
        key,
        partition=open_windows.window,
        description=open_windows.text,
        metadata={"lands_from": dg.MetadataValue.timestamp(open_windows.lands_from / 1000)},
    )


def _watch_after_landing(context: Context, feed: Feed, ports: Ports, ledger: Ledger) -> WatchResult | None:
    """Returns the sensor's findings, with the windows for the page of all feeds. An error is only logged."""
    from sluice.pipelines.operating.project_page import WINDOWS

    try:
        return feed_checks.without_lag(watch(ports, feed, ledger, WINDOWS))
    except SluiceError as error:
        context.log.warning("the feed could not be checked after landing: %s", error.message)
        return None


@contextmanager
def _keep_refused_report(context: Context, ledger: Ledger, ports: Ports) -> Iterator[None]:
    """Write a report of a batch that the block refuses."""
    try:
        yield
    except BatchRefused as refused:
        BatchReports(context.log, ledger, ports.lake).write_refused(context.run.run_id, refused)
        raise


def _report_incomplete(landed: Landed, unpinned: str) -> CheckResult:
    """Returns the result of the check `window_complete` for an incomplete window; `unpinned`: without an end there."""
    failed = feed_checks.count_failures(landed)
    in_part = plain(unpinned) or "it landed in part: the run ended at the feed's limits"
    description = feed_checks.describe_failures(failed) if failed else in_part
    return {"passed": False, "description": description, "metadata": build_failures_metadata(landed)}


def _read_topics(context: Context, ports: Ports, landed: Landed, view: LedgerView) -> Events:
    """Yields observations of the topics that were just read. An error is only logged."""
    feed, state = view.feed, view.state
    topics = {s.topic for b in landed.batches for s in b.plan.offset_ranges}
    try:
        states = partitions_of(ports, feed, topics)
        outlook = outlook_of(ports, feed, state, states)
    except SluiceError as error:
        context.log.warning("the topics could not be observed after landing: %s", error.message)
        return
    for topic, partitions in sorted(states.items()):
        metadata = build_topic_metadata(partitions, [reader_of(feed.name, state, topic, outlook)])
        yield dg.AssetObservation(view.keys.topic(topic), metadata=metadata)


@dataclass(frozen=True, slots=True)
class BatchReports:
    """Writes the reports of a feed's batches. Errors are logged only. `checks`: windows of them, by their starts."""

    log: dg.DagsterLogManager
    ledger: Ledger
    lake: Lake
    checks: Mapping[int, WindowCheck] = field(default_factory=dict)

    def write_all(self, batches: Sequence[BatchResult], outlook: Outlook | None) -> None:
        """Write reports of batches, whatever their outcome. `outlook`: the feed's now, if known."""
        for b in batches:
            failed = f"{many(len(b.failures), 'offset range')} failed, and nothing is published."
            why = b.refused or ("" if b.number is not None else failed)
            self._write(b.batch, why, b.failures, outlook)

    def write_refused(self, run: str, refused: BatchRefused) -> None:
        """Write the report of the batch that was refused in this run."""
        for b in self.ledger.read().live():
            if b.owner.run == run:
                self._write(b.id, refused.message)

    def _write(
        self, batch: int, why: str, failures: Sequence[RangeFailure] = (), outlook: Outlook | None = None
    ) -> None:
        from sluice.pipelines.batch_report import report_page
        from sluice.pipelines.batch_report.batch_account import behind, read_account
        from sluice.pipelines.operating.hour_page import list_hour_figures

        try:
            account = read_account(self.ledger, self.lake, batch, why, failures)
            pending, hours = behind(outlook) if outlook else None, list_hour_figures(self.checks)
            path = report_page.keep(account, self.lake, pending, hours)
        except Exception as error:  # noqa: BLE001 - the batch is decided, and its report is optional
            self.log.warning("the report of batch %d was not written: %s: %s", batch, type(error).__name__, error)
            return
        self.log.info("the report of batch %d: %s", batch, self.lake.locate(path))


log = logging.getLogger(f"{logs.OURS}.tasks")


def log_tasks(landed: Landed) -> None:
    """Log a line for each task, each failed offset range and each batch, if logs are JSON."""
    if not logs.as_json():
        return
    for batch in landed.batches:
        with logs.log_context(batch=batch.batch):
            _log_batch(batch)


def _log_batch(batch: BatchResult) -> None:
    failed = {f.offset_range: f for f in batch.failures}
    for task, spent in by_task(batch.plan, batch.receipts):
        windows = {s.window for s in task.offset_ranges}
        only = windows.pop() if len(windows) == 1 else None
        with logs.log_context(task=task.index, window=None if only is None else show_window(only)):
            _log_task(task, spent)
            for f in (failed[s] for s in task.offset_ranges if s in failed):
                about = {"offset_range": str(f.offset_range), "error": f.error, "remedy": f.remedy}
                log.error("%s: %s", f.offset_range, f.message, extra={"about": about})
    counts = batch.counts
    fields = {"rows": counts.landed, "quarantined": counts.quarantined, "bytes": batch.bytes, "entry": batch.number}
    published = "published" if batch.number is not None else "not published"
    log.info("%s: %s", published, many(counts.landed, "row"), extra={"about": fields})


def _log_task(task: Task, spent: WorkTime) -> None:
    fields: dict[str, Any] = {
        "leader": task.leader,
        "offset_ranges": spent.offset_ranges,
        "records": spent.records,
        "bytes": spent.input_bytes,
        "seconds": round(spent.total / 1e9, 6),
        "activities": {a: round(ns / 1e9, 6) for a, ns in spent.ns.items()},
    }
    log.info(
        "landed %s of %s", many(spent.offset_ranges, "offset range"), len(task.offset_ranges), extra={"about": fields}
    )
