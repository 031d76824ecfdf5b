"""What the assets do when they run: each makes one call into the pipelines and yields events with the result.

A step raises what stopped it as `dagster.Failure`. What it published before stays published and is reported. What an
earlier run could not report is reported before anything is committed (see `evidence`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import dagster as dg

from sluice.assets.checks import contract_checks, feed_checks, re_report
from sluice.assets.checks.contract_checks import Said
from sluice.assets.checks.feed_checks import ACCOUNT, COMPLETE, FRONTIER, WATCH, WHOLE, evaluation
from sluice.assets.events import evidence
from sluice.assets.events.audit_metadata import failures_metadata
from sluice.assets.events.committed_metadata import commit_metadata
from sluice.assets.events.evidence import Portion
from sluice.assets.events.ledger_view import Books
from sluice.assets.events.topics_metadata import TopicReader, topic_metadata
from sluice.assets.instance import internals
from sluice.assets.instance.instance import with_dagster_liveness
from sluice.assets.instance.internals import executes
from sluice.assets.runs.run_session import RunSession
from sluice.assets.runs.stop_signal import Stop
from sluice.assets.runs.tick_policy import MORE_TAG, PENDING_TAG
from sluice.assets.specs.feed_files import remember_topics
from sluice.assets.specs.last_seen import remember
from sluice.assets.specs.partitions_def import now
from sluice.assets.steps import batch_reports, task_logs
from sluice.assets.steps.table_step import bring_up_table
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import Landed, Skip
from sluice.pipelines.batch.survey import changed_partitions, open_ledger
from sluice.pipelines.committing.commit import CommitResult, CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import (
    BatchRefused,
    SluiceError,
    UnknownTopic,
    UsageError,
    WindowIncomplete,
    WindowPending,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import PartitionState, TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.progress import Progress
from sluice.pipelines.planning.origins import key_of
from sluice.pipelines.planning.windows import PendingWindows, earliest, settled_part
from sluice.pipelines.ports import Engine, Ports
from sluice.pipelines.quarantine.dead_letters import Outlet
from sluice.pipelines.status.outlook import Outlook, look_ahead
from sluice.pipelines.status.watch import WatchResult, view, watch
from sluice.pipelines.util.units import many, parse_window, show_duration, show_window
from sluice.resources.liveness import new_owner
from sluice.resources.observe import lineage
from sluice.resources.spark import shipping

Context = dg.AssetExecutionContext | dg.OpExecutionContext
Events = Iterator[Any]
Topics = Mapping[str, list[PartitionState]]


def _books(session: RunSession, feed: Feed, ledger: Ledger, edges: Ports) -> Books:
    return Books.open(feed, ledger, edges, session.keys(feed.name))


# -- landed


def land_window(context: dg.AssetExecutionContext, session: RunSession, name: str, until: int | None = None) -> Events:
    """Land the window that is the run's partition, and with `until` (ms) those after it up to that time, as far as they
    get in `session.catch_up`. It is materialized when it is complete, and only then. If the run has no step that
    commits, this step commits: nobody has to remember to commit what landed.

    Raises dagster.Failure, or an interrupt.
    """
    window = parse_window(context.partition_key)
    with session.step(context, name):
        feed = session.feed(name)
        asked = Request(RequestKind.WINDOW, window=window, until=until)
        _plan_windows(context, session, feed, _windows(feed, asked)[1:])
        with _in_lineage(context, session, feed, asked), session.open_ports(feed) as edges:
            if early := _too_early(feed, edges, asked):
                yield from _skip_pending(context, session, feed, asked, early)
                return
            try:
                own = _land_own(context, session, feed, edges, asked, window)
                yield from _else_commit(context, session, feed, edges, own)
            except Exception as error:
                yield from _told_again(context, session, feed, edges, [window], re_report.committed_again)
                yield _failed_event(context, session, name, error)
                raise
    if not executes(context, session.keys(name).committed):
        yield from _commit_after(context, session, name, window)


def land_range(context: dg.AssetExecutionContext, session: RunSession, name: str) -> Events:
    """Land the windows that are the run's range of partitions, the oldest first, in batches of bounded size. Each is
    materialized when it is complete, and only then. If the run has no step that commits, this step commits.

    Raises dagster.Failure, or an interrupt.
    """
    with session.step(context, name):
        feed = session.feed(name)
        asked = _range_of(context, feed)
        with session.open_ports(feed) as edges:
            if early := _too_early(feed, edges, asked):
                yield from _skip_pending(context, session, feed, asked, early)
                return
            try:
                own = _land_range(context, session, feed, edges, asked)
                yield from _else_commit(context, session, feed, edges, own)
            except Exception as error:
                windows = _windows(feed, asked)
                yield from _told_again(context, session, feed, edges, windows, re_report.committed_again)
                yield _failed_event(context, session, name, error)
                raise
    yield from internals.told_already(context, session.keys(name).landed)
    if not executes(context, session.keys(name).committed):
        books, result = _commit(context, session, name)
        yield from _range_committed(context, session, books, result)


def _range_of(context: dg.AssetExecutionContext, feed: Feed) -> Request:
    """The request for the run's range of partitions."""
    first, last = context.partition_key_range
    return Request(RequestKind.WINDOW, window=parse_window(first), until=parse_window(last) + feed.window.length)


def _land_range(
    context: dg.AssetExecutionContext, session: RunSession, feed: Feed, edges: Ports, asked: Request
) -> Events:
    key, windows = session.keys(feed.name).landed, _windows(feed, asked)
    try:
        books, landed = yield from _land(context, session, feed, edges, asked)
    except Exception:
        yield from _told_again(context, session, feed, edges, windows, re_report.landed_again)
        raise
    said = feed_checks.account(books, landed, context.run.run_id)
    yield feed_checks.feed_evaluation(context.instance, key, ACCOUNT, said)
    left = [w for w in _settled(windows, landed) if not books.is_complete(w)]
    for window in left:
        yield evaluation(key, COMPLETE, window, _window_said(False, landed))
    landed.check()
    if left:
        raise _in_part(feed.name, left[0])


def _land_own(
    context: dg.AssetExecutionContext, session: RunSession, feed: Feed, edges: Ports, asked: Request, window: int
) -> Events:
    try:
        books, landed = yield from _land(context, session, feed, edges, asked)
    except Exception as error:
        if isinstance(error, BatchRefused):
            with internals.optional():
                yield from _refusal_events(context, session, feed, edges, error, window)
        yield from _told_again(context, session, feed, edges, [window], re_report.landed_again)
        raise
    yield from _own_window(context, books, landed, window)


def _failed_event(context: Context, session: RunSession, name: str, error: BaseException) -> dg.AssetCheckEvaluation:
    """The check `watch` after a run that failed: somebody should look, whether the sensor is on or off."""
    return feed_checks.feed_evaluation(
        context.instance, session.keys(name).landed, WATCH, feed_checks.failed_run(error)
    )


def _too_early(feed: Feed, edges: Ports, asked: Request) -> WindowPending | None:
    """Why nothing of the request can be landed yet: none of its windows has settled."""
    try:
        settled_part(asked, feed.window, edges.clock())
    except WindowPending as pending:
        return pending
    except UsageError:
        pass  # landing raises it
    return None


def _skip_pending(
    context: dg.AssetExecutionContext, session: RunSession, feed: Feed, asked: Request, early: WindowPending
) -> Events:
    """End the step without a materialization: its windows have not settled, which is no failure."""
    yield from _report_early(context, session, feed, asked, early)
    yield from internals.no_results(context, session.keys(feed.name).landed)


def _report_early(context: Context, session: RunSession, feed: Feed, asked: Request, early: WindowPending) -> Events:
    """`early` is the caller's result; for Dagster, the run succeeds."""
    session.witness.error = early
    yield from _report_pending(context, session, feed, PendingWindows.of_request(asked, feed.window))


def _report_pending(context: Context, session: RunSession, feed: Feed, pending: PendingWindows | None) -> Events:
    """The windows of a request that have not settled: a line in the log, a tag, an observation of the first ones."""
    if pending is None:
        return
    context.log.warning("%s → %s", pending.text, pending.remedy(feed.name))
    if session.alone:
        context.instance.add_run_tags(context.run.run_id, {PENDING_TAG: show_window(pending.first)})
    for window in pending.windows(feed.window)[:_PLANNED]:
        yield _pending_event(feed, session.keys(feed.name).landed, window)


def _pending_event(feed: Feed, key: dg.AssetKey, window: int) -> dg.AssetObservation:
    pending = PendingWindows.of(window, 1, feed.window)
    return dg.AssetObservation(
        key,
        partition=show_window(window),
        description=pending.text,
        metadata={"lands_from": dg.MetadataValue.timestamp(pending.lands_from / 1000)},
    )


def _settled(requested: Sequence[int], landed: Landed) -> Sequence[int]:
    """The windows of a request without those that have not settled."""
    first = landed.pending.first if landed.pending else None
    return requested if first is None else [w for w in requested if w < first]


def _refusal_events(
    context: Context, session: RunSession, feed: Feed, edges: Ports, refused: BatchRefused, window: int
) -> Events:
    """The reason why the window is refused, in its checks; nothing if the batch was another window's, taken over."""
    slices = open_ledger(feed, edges).read().live_slices()
    mine = next((b for b, s in slices if s.window == window and b.owner.run == context.run.run_id), None)
    if mine is None:
        return
    page = paths.batch_page_path(feed.name, mine.id, mine.owner.token)
    report = edges.lake.locate(page) if edges.lake.size(page) is not None else None
    yield from _known_checks(context, session.keys(feed.name).landed, contract_checks.refusals(feed, refused, report))


def _known_checks(context: Context, key: dg.AssetKey, found: Iterable[tuple[str, Said]]) -> Events:
    """The results of checks, without those that came into the contract after definitions were loaded: Dagster takes no
    result of a check that it does not know. By the contract they decide all the same."""
    known = {k.name for k in context.selected_asset_check_keys if k.asset_key == key}
    new = []
    for name, said in found:
        if name in known:
            yield dg.AssetCheckResult(check_name=name, asset_key=key, **said)
        else:
            new.append(name)
    if new:
        shown = ", ".join(new)
        context.log.warning("not shown here yet: %s → reload the code location: the contract has changed", shown)


def _told_again(
    context: Context, session: RunSession, feed: Feed, edges: Ports, windows: Sequence[int], again: re_report.Again
) -> Events:
    """What stays true of the run's windows whatever failed. If the lake is unreachable, the next run reports it.

    The caller's own error is the run's: nothing that goes wrong here takes its place."""
    with internals.optional():
        try:
            ledger = Ledger(edges.lake, feed.name, edges.clock)  # needs the lake only: Kafka may be unreachable
            yield from again(context.instance, _books(session, feed, ledger, edges), windows)
        except SluiceError as error:
            context.log.warning("the windows' checks could not be reported again: %s", error.message)


def _own_window(context: dg.AssetExecutionContext, books: Books, landed: Landed, window: int) -> Events:
    feed, whole = books.feed, books.is_complete(window)
    key = books.keys.landed
    if whole:
        yield evidence.window_result(books, window)
        yield from (evidence.window_event(books, k, window) for k in evidence.outputs(feed, books.keys) if k != key)
    told = {name: check.says(books, window) for name, check in feed_checks.OF_WINDOW.items()}
    for name, said in (told | {COMPLETE: _window_said(whole, landed)}).items():
        yield dg.AssetCheckResult(check_name=name, asset_key=key, **said)
    yield dg.AssetCheckResult(
        check_name=ACCOUNT, asset_key=key, **feed_checks.account(books, landed, context.run.run_id)
    )
    yield from _known_checks(context, key, contract_checks.verdicts(books, window))
    landed.check()
    if not whole:
        raise _in_part(feed.name, window)


class RunConfig(Protocol):
    """What a run was configured to do. Both raise UsageError."""

    def request(self) -> Request: ...

    def skip(self) -> Skip | None: ...


def land_request(context: dg.OpExecutionContext, session: RunSession, name: str, asked: RunConfig) -> Events:
    """Land what is asked for and owed, in whatever windows it is, and report which of them are complete now. In a run
    over many feeds, the feed's windows that are asked for are red until they are complete, as in a run of its own.

    Raises dagster.Failure, or an interrupt.
    """
    with session.step(context, name):
        feed = session.feed(name)
        request = asked.request()
        if not session.alone:
            _plan_windows(context, session, feed, _windows(feed, request))
        with _in_lineage(context, session, feed, request), session.open_ports(feed) as edges:
            if early := _too_early(feed, edges, request):
                yield from _report_early(context, session, feed, request, early)
            else:
                landing = _land_asked(context, session, feed, edges, asked)
                try:
                    yield from _else_commit(context, session, feed, edges, landing)
                except Exception as error:
                    yield _failed_event(context, session, name, error)
                    raise
    yield dg.Output(None)


def _land_asked(
    context: dg.OpExecutionContext, session: RunSession, feed: Feed, edges: Ports, asked: RunConfig
) -> Events:
    books, landed = yield from _land(context, session, feed, edges, asked.request(), asked.skip())
    said = feed_checks.account(books, landed, context.run.run_id)
    yield feed_checks.feed_evaluation(context.instance, books.keys.landed, ACCOUNT, said)
    landed.check()
    if session.alone or landed.stopped:
        return
    if left := [w for w in _settled(_windows(feed, asked.request()), landed) if not books.is_complete(w)]:
        raise _in_part(feed.name, left[0])


def _in_lineage(context: Context, session: RunSession, feed: Feed, asked: Request) -> AbstractContextManager[None]:
    """OpenLineage is told of what the block lands, where somebody listens."""
    windows = _windows(feed, asked)
    window = (windows[0], windows[-1] + feed.window.length) if windows else None
    landing = lineage.Landing(feed, context.run.run_id, window, session.alone)
    return lineage.told(landing, lambda: session.witness.landed)


_PLANNED = 24
"""How many windows of a request are red while they are not complete: a run that fails has not come to those after."""


def _plan_windows(context: Context, session: RunSession, feed: Feed, windows: Sequence[int]) -> None:
    """Of those that have settled: a pending one is not red, whatever becomes of the run."""
    keys, at = evidence.outputs(feed, session.keys(feed.name)), now()
    planned = [show_window(w) for w in windows[:_PLANNED] if feed.window.closed(w, at)]
    internals.plan_partitions(context, keys, planned)


def _windows(feed: Feed, asked: Request) -> Sequence[int]:
    """The whole windows that a request names."""
    if asked.window is None or asked.only:
        return ()
    return range(asked.window, asked.until or asked.window + feed.window.length, feed.window.length)


def _land(
    context: Context, session: RunSession, feed: Feed, edges: Ports, request: Request, skip: Skip | None = None
) -> Generator[Any, None, tuple[Books, Landed]]:
    """Land, and report batches and completed windows. The caller reports the window that was asked for."""
    run, report = context.run.run_id, session.reporter(context.log)
    edges = with_dagster_liveness(edges, context.instance)
    ledger = session.ledgers.of(feed, edges, run)
    rolled = evidence.roll_forward(context.instance, _books(session, feed, ledger, edges), evidence.PORTION, report)
    if said := rolled.describe(feed.name):
        context.log.info(said)
    re_report.settle(context.instance, feed, session.keys(feed.name), lambda: _books(session, feed, ledger, edges))
    with _canceling(edges.engine, session.stop), _keeping_refused_report(context, ledger, edges):
        shipping.prepare(feed.spark, report)
        enough = _time_is_up(context, session, request)
        landed = land(feed, edges, request, new_owner(run), report, skip, ledger, enough)
    session.witness.landed, session.witness.stopped = landed, landed.stopped
    task_logs.tell(landed)
    if landed.stopped:
        _leave_rest(context, session, landed)
    if landed.start_not_used:
        context.log.warning("%s", landed.start_not_used)
    for held in landed.held:
        context.log.warning("%s → %s", held.text, held.remedy)
    if landed.overridden:
        context.log.warning("%s", landed.overridden)
    report(Progress("tell"))
    books = _books(session, feed, ledger, edges)
    _remember(session, feed, books, landed)
    watched = None
    if not landed.failures:  # else Kafka may not answer this either, and who asks it waits for minutes
        yield from _read_topics(context, edges, landed, books)
        watched = _watch_after_landing(context, feed, edges, ledger)
    if watched and watched.outlook:
        remember(session.project, feed.name, kept=watched.outlook.kept)
    batch_reports.keep_all(context, ledger, edges, landed.batches, watched.outlook if watched else None)
    own = request.window if context.has_partition_key else None
    asked = _windows(feed, request) if context.has_partition_key_range else ()
    yield from _publish_events(context, books, landed, own, rolled, asked)
    yield from _report_pending(context, session, feed, landed.pending)
    if watched:
        yield feed_checks.feed_evaluation(context.instance, books.keys.landed, WATCH, feed_checks.watch_check(watched))
    return books, landed


def _time_is_up(context: Context, session: RunSession, request: Request) -> Callable[[], bool]:
    """Whether a run ends with the batch that it has just landed, and the next one goes on. So runs of a schedule tell
    and commit what they have from time to time. Who asks by hand wants all of it."""
    if request.until is None or internals.SCHEDULE_TAG not in context.run.tags:
        return lambda: False
    end = time.monotonic() + session.catch_up / 1000
    return lambda: time.monotonic() >= end


def _leave_rest(context: Context, session: RunSession, landed: Landed) -> None:
    left = many(landed.left, "offset")
    context.log.info("after %s %s are left to the next run", show_duration(session.catch_up), left)
    if session.alone:
        context.instance.add_run_tags(context.run.run_id, {MORE_TAG: "1"})


def _watch_after_landing(context: Context, feed: Feed, edges: Ports, ledger: Ledger) -> WatchResult | None:
    """What the sensor would find now. If that cannot be seen, it is only logged."""
    try:
        return feed_checks.by_the_way(watch(feed, ledger, edges.cluster, view(edges.cluster, [feed]), edges.clock()))
    except SluiceError as error:
        context.log.warning("the feed could not be looked at after landing: %s", error.message)
        return None


def _remember(session: RunSession, feed: Feed, books: Books, landed: Landed) -> None:
    remember_topics(session.project, feed, {k.topic for k in landed.frontiers})
    remember(session.project, feed.name, first_window=earliest(books.state))


def _publish_events(
    context: Context,
    books: Books,
    landed: Landed,
    own: int | None,
    rolled: Portion,
    asked: Collection[int] = (),
) -> Events:
    """The events of what was published and completed, whatever else failed: it is true, and stays so. `rolled`: the
    windows that were reported just before, without their checks, and those that are left to later runs. `asked`: the
    windows of a run over a range, which are reported whoever landed them."""
    batches = [books.state.batches[b.batch] for b in landed.batches if b.number is not None]
    key, mine = books.keys.landed, {*asked, *(() if own is None else (own,))} & books.complete
    tell = ({*landed.windows} & books.complete) | books.complete_of(batches) | mine
    tell |= evidence.untold_windows(context.instance, books, key) - rolled.left
    for event in evidence.landing_events(books, batches, tell):
        if own is None or event.partition != show_window(own):
            yield from internals.to_yield(context, event)
    yield from feed_checks.window_evaluations(context.instance, books, key, (tell | rolled.windows) - {own})


@contextmanager
def _keeping_refused_report(context: Context, ledger: Ledger, edges: Ports) -> Iterator[None]:
    """Leave a report of a batch that is refused."""
    try:
        yield
    except BatchRefused as refused:
        batch_reports.keep_refused(context, ledger, edges, context.run.run_id, refused)
        raise


@contextmanager
def _canceling(engine: Engine, stop: Stop) -> Iterator[None]:
    """An interrupt cancels what the engine is doing, and so does who asks the step to stop."""
    try:
        with stop.canceling(engine.cancel):
            yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        engine.cancel()
        raise


def _window_said(whole: bool, landed: Landed) -> Said:
    """Is the window whole?"""
    if whole:
        return WHOLE
    failed = feed_checks.failures(landed)
    said = feed_checks.in_vain(failed) if failed else "it landed in part: the feed's limits end a run before"
    return {"passed": False, "description": said, "metadata": failures_metadata(landed)}


def _in_part(feed: str, window: int) -> WindowIncomplete:
    return WindowIncomplete(
        f"window {show_window(window)} landed in part: the feed's limits end a run before",
        remedy=f"run it again: sluice run {feed} --window {show_window(window)}; or raise `limits`",
    )


def _read_topics(context: Context, edges: Ports, landed: Landed, books: Books) -> Events:
    """The topics that were just read, as they are now. This is a convenience: if it fails, it is only logged."""
    feed, state = books.feed, books.state
    topics = {s.topic for b in landed.batches for s in b.plan.slices}
    try:
        seen = _look(edges, feed, topics)
        outlook = _outlook(edges, feed, state, seen)
    except SluiceError as error:
        context.log.warning("the topics could not be observed after landing: %s", error.message)
        return
    for topic, partitions in sorted(seen.items()):
        said = topic_metadata(partitions, [_reader(feed.name, state, topic, outlook)])
        yield dg.AssetObservation(books.keys.topic(topic), metadata=said)


# -- committed


def commit_window(context: dg.AssetExecutionContext, session: RunSession, name: str) -> Events:
    """Commit the frontier after a window has landed, wherever it is; a check says whether it has passed the window.

    Raises dagster.Failure, or an interrupt.
    """
    window = parse_window(context.partition_key)
    try:
        books, result = _commit(context, session, name)
    except Exception as error:
        yield from _stood(context, session, name, [window])
        yield _failed_event(context, session, name, session.witness.error or error)
        raise
    said = commit_metadata(books.feed.group, result)
    yield dg.MaterializeResult(metadata=said, data_version=dg.DataVersion(books.version))
    yield dg.AssetCheckResult(check_name=FRONTIER, **feed_checks.frontier_check(books, window))
    yield from _also_committed(context, session, books, result, window)
    yield from bring_up_table(context, session, name)


def commit_range(context: dg.AssetExecutionContext, session: RunSession, name: str) -> Events:
    """Commit the frontier after the windows have landed that are the run's range of partitions.

    Raises dagster.Failure, or an interrupt.
    """
    try:
        books, result = _commit(context, session, name)
    except Exception as error:
        feed = session.feed(name)
        yield from _stood(context, session, name, _windows(feed, _range_of(context, feed)))
        yield _failed_event(context, session, name, session.witness.error or error)
        raise
    yield from internals.told_already(context, books.keys.committed)
    yield from _range_committed(context, session, books, result)


def _range_committed(
    context: dg.AssetExecutionContext, session: RunSession, books: Books, result: CommitResult
) -> Events:
    told = [w for w in _windows(books.feed, _range_of(context, books.feed)) if books.is_complete(w)]
    for window in told:
        yield _committed_event(books, result, window)
    yield from _also_committed(context, session, books, result, None, told=told)


def _stood(context: Context, session: RunSession, name: str, windows: Sequence[int]) -> Events:
    """If a window's commit was reported before, report it again, whatever the outcome of this commit."""
    try:
        feed = session.feed(name)
        with session.open_ports(feed) as edges:
            yield from _told_again(context, session, feed, edges, windows, re_report.committed_again)
    except SluiceError as error:
        context.log.warning("the windows' commits could not be reported again: %s", error.message)


def _commit_after(context: Context, session: RunSession, name: str, window: int) -> Events:
    """Commit in the step that landed the window. Raises dagster.Failure, or an interrupt."""
    books, result = _commit(context, session, name)
    yield _committed_event(books, result, window)
    yield from _also_committed(context, session, books, result, None, told=(window,))
    yield from bring_up_table(context, session, name)


def commit_frontier(context: dg.OpExecutionContext, session: RunSession, name: str) -> Events:
    """Commit the frontier. Raises dagster.Failure, or an interrupt."""
    try:
        books, result = _commit(context, session, name)
    except Exception as error:
        yield _failed_event(context, session, name, session.witness.error or error)
        raise
    yield _committed_event(books, result, None)
    yield from _also_committed(context, session, books, result, None)
    yield from bring_up_table(context, session, name)
    yield dg.Output(None)


def _commit(context: Context, session: RunSession, name: str) -> tuple[Books, CommitResult]:
    with session.step(context, name):
        feed = session.feed(name)
        with session.open_ports(feed) as edges:
            books, result = _commit_landed(context, session, feed, edges)
    session.reporter(context.log)(Progress("finish"))
    return books, result


def _commit_landed(
    context: Context, session: RunSession, feed: Feed, edges: Ports, changed: Collection[TopicPartition] = ()
) -> tuple[Books, CommitResult]:
    """Commit, once the event log holds every batch below the frontier."""
    session.reporter(context.log)(Progress("commit"))
    edges = with_dagster_liveness(edges, context.instance)
    ledger = session.ledgers.of(feed, edges, context.run.run_id)
    books = _books(session, feed, ledger, edges)
    evidence.roll_forward(context.instance, books, 0 if session.witness.landed else evidence.PORTION)
    evidence.demand(context.instance, books)
    settings = CommitSettings(feed.commit, feed.transactional_id, feed.policies.on_group_moved)
    result = commit(ledger, edges.group, settings, Outlet.of(feed, edges.lake), edges.cluster, changed)
    if result.status is CommitStatus.UNCHANGED and session.witness.committed is not None:
        result = session.witness.committed  # the step that landed has committed already
    session.witness.committed = result
    for moved in result.put_by_others:
        context.log.warning("%s: somebody else had committed %s, which landing has reached", moved.key, moved.after)
    return books, result


def _else_commit(context: Context, session: RunSession, feed: Feed, edges: Ports, landing: Events) -> Events:
    """Run landing. If it fails, commit the frontier before the step fails, since `<feed>/committed` will not run.

    What failed is not part of the frontier, so what landed waits for nobody. After an error that ended landing before
    it got anywhere, nothing is committed: what kept it from landing would keep it from this.
    """
    try:
        yield from landing
    except SluiceError as failed:
        if session.witness.landed is not None or isinstance(failed, BatchRefused):
            yield from _commit_what_landed(context, session, feed, edges)
        raise
    if feed.offsets.in_zookeeper:
        # This step owns the partitions, and lets go when it ends: whoever takes them then begins where it came to.
        _commit_now(context, session, feed, edges)


def _commit_now(context: Context, session: RunSession, feed: Feed, edges: Ports) -> None:
    """Commit, without a report. If this is refused, so is the step that commits and reports: it tells why."""
    try:
        _commit_landed(context, session, feed, edges)
    except SluiceError as error:
        context.log.warning("what landed is not committed yet: %s", error)


def _commit_what_landed(context: Context, session: RunSession, feed: Feed, edges: Ports) -> Events:
    """Leaves out a log that is another one by now. If it fails, the reason is reported, not raised."""
    try:
        changed = changed_partitions(feed, edges, open_ledger(feed, edges).read())
        books, result = _commit_landed(context, session, feed, edges, changed)
    except SluiceError as error:
        session.witness.uncommitted = error
        context.log.error("what landed could not be committed: %s", error)
        return
    if result.status is not CommitStatus.UNCHANGED:
        yield from internals.to_yield(context, _committed_event(books, result, None))
    yield from _also_committed(context, session, books, result, None)


def _also_committed(
    context: Context,
    session: RunSession,
    books: Books,
    result: CommitResult,
    own: int | None,
    told: Collection[int] = (),
) -> Events:
    """The other windows: those that this run landed, a portion of those landed before and not yet reported here, and
    the check of those that were just passed. `told`: windows that were just reported without their check."""
    key, landed = books.keys.committed, session.witness.landed
    untold = evidence.untold_windows(context.instance, books, key) - {own}
    mine = untold & {*landed.windows} if landed else set()
    portion = Portion.of(untold - mine, evidence.PORTION)
    report = sorted(mine | portion.windows)
    for window in report:
        yield _committed_event(books, result, window)
    evaluated = sorted({*told, *report, *(_just_passed(books, result) - portion.left)} - {own})
    targets = internals.targets(context.instance, key, map(show_window, evaluated))
    for window in evaluated:
        yield evaluation(
            key, FRONTIER, window, feed_checks.frontier_check(books, window), targets.get(show_window(window))
        )


def _committed_event(books: Books, result: CommitResult, window: int | None) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        books.keys.committed,
        partition=None if window is None else show_window(window),
        metadata=commit_metadata(books.feed.group, result),
        tags={evidence.VERSION: books.version},
    )


def _just_passed(books: Books, result: CommitResult) -> set[int]:
    """Complete windows that the committed offsets passed with this commit, in some partition."""
    moved = (books.ending(m.key, m.before or 0, m.after) for m in result.offsets)
    return {w for windows in moved for w in windows} & books.complete


# -- topics


def observe_step(
    context: dg.AssetExecutionContext, session: RunSession, owner: str, readers: Mapping[str, Sequence[str]]
) -> Events:
    """Partitions, ends, lag and what is at risk of the selected topics. `readers`: each topic's feeds.

    Shows the Kafka of the feed that owns the topic.

    Raises dagster.Failure for topics that are not there, after it has shown the others.
    """
    key_of = session.keys(owner).topic
    topics = {t: feeds for t, feeds in readers.items() if key_of(t) in context.selected_asset_keys}
    with session.step(context):
        seen, lags = _survey(session, owner, topics)
        for topic, partitions in sorted(seen.items()):
            said = topic_metadata(partitions, lags[topic])
            yield dg.ObserveResult(asset_key=key_of(topic), metadata=said)
        if gone := sorted(topics.keys() - seen.keys()):
            raise UnknownTopic(f"no topic {', '.join(gone[:10])} in Kafka", remedy="create it, or mend the feed")


def _survey(
    session: RunSession, owner: str, topics: Mapping[str, Sequence[str]]
) -> tuple[Topics, dict[str, list[TopicReader]]]:
    seen: Topics = {}
    lags: dict[str, list[TopicReader]] = {t: [] for t in topics}
    for name in (owner, *sorted({r for feeds in topics.values() for r in feeds} - {owner})):
        feed, mine = session.feed(name), [t for t, feeds in topics.items() if name in feeds]
        with session.open_ports(feed) as edges:
            seen = seen or _look(edges, feed, mine)
            state = Ledger(edges.lake, name, edges.clock).read()
            outlook = _outlook(edges, feed, state, {t: seen[t] for t in mine if t in seen})
        for topic in mine:
            lags[topic].append(_reader(name, state, topic, outlook))
    return seen, lags


def _look(edges: Ports, feed: Feed, topics: Iterable[str]) -> Topics:
    """The partitions of those topics that exist."""
    there = set(topics) & edges.cluster.topics().keys()
    found: dict[str, list[PartitionState]] = {t: [] for t in there}
    for p in edges.cluster.partitions(sorted(there), feed.isolation) if there else ():
        found[p.topic].append(p)
    return found


def _outlook(edges: Ports, feed: Feed, state: State, seen: Topics) -> Outlook:
    """What is about to happen to the feed in these topics."""
    partitions = {key_of(state, p): p for ps in seen.values() for p in ps}
    now = edges.clock()
    return look_ahead(feed, Ledger(edges.lake, feed.name, edges.clock), state, edges.cluster, partitions, now)


def _reader(feed: str, state: State, topic: str, outlook: Outlook) -> TopicReader:
    frontiers = {k.partition: state.frontier(k) for k in state.known() if k.topic == topic}
    ages = {k.partition: age for k, age in outlook.ages().items() if k.topic == topic}
    at_risk = [r.describe(outlook.now) for r in outlook.at_risk if r.key.topic == topic]
    return TopicReader(feed, frontiers, ages, at_risk)
