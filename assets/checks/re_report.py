"""Keeps complete windows green after later failures, with the last results of their checks.

Dagster records the planned events of each run, and shows missing ones as red. Therefore windows that are complete by
the ledger are reported again with the same data version, so that nothing runs again. A failing run does this itself
(`Again`). For a killed run, the next run does it (`settle`), a tick of a schedule or the sensor, or `sluice repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import dagster as dg

from sluice.assets.checks import contract_checks, feed_checks
from sluice.assets.checks.feed_checks import FEED_HEALTH, NO_GAPS, OFFSETS_COMMITTED
from sluice.assets.events import landed_metadata
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.internals import PlannedEvaluation
from sluice.assets.specs.asset_specs import Keys
from sluice.pipelines.feed.feed import Feed

WHY = "reported again: a run over this window ended without reporting it, and by the ledger it is complete"


Again = Callable[[dg.DagsterInstance, LedgerView, Sequence[int]], Iterator[Any]]
"""Yields the last events of a failing run, for its partitions."""


def report_landed_again(instance: dg.DagsterInstance, view: LedgerView, windows: Sequence[int]) -> Iterator[Any]:
    """Yields the complete windows again, and the feed's checks."""
    key, complete = view.keys.landed, [w for w in windows if view.is_complete(w)]
    yield from _build_events(instance, view, key, complete).values()
    yield from feed_checks.evaluate_windows(instance, view, key, complete)
    yield feed_checks.evaluate_feed(instance, key, NO_GAPS, feed_checks.check_gaps(view))


def report_committed_again(instance: dg.DagsterInstance, view: LedgerView, windows: Sequence[int]) -> Iterator[Any]:
    """Yields the reported commits of complete windows again."""
    events = _build_events(instance, view, view.keys.committed, [w for w in windows if view.is_complete(w)])
    yield from events.values()
    yield from feed_checks.evaluate_committed(instance, view, events)


def settle(
    instance: dg.DagsterInstance,
    feed: Feed,
    keys: Keys,
    open_view: Callable[[], LedgerView],
    *,
    dry_run: bool = False,
) -> Mapping[dg.AssetKey, Set[int]]:
    """Report complete windows and checks that ended runs had planned and left out. Returns the windows by asset.

    Idempotent. The ledger is read only if something is missing.
    """
    assets = (*landed_metadata.list_reported_assets(feed, keys), keys.committed)
    partitions = {key: internals.unmaterialized_partitions(instance, key) for key in assets}
    unreported = {key: set(internals.parse_windows(of, feed.window)) for key, of in partitions.items()}
    planned = internals.planned_evaluations(
        instance, [dg.AssetCheckKey(keys.landed, name) for name in (NO_GAPS, FEED_HEALTH)], ()
    )
    # The usual case: the ledger need not be read.
    if not planned and not any(unreported.values()):
        return {}
    view = open_view()
    # An incomplete window has nothing to report yet: the run that completes it does.
    due = {key: windows & view.complete for key, windows in unreported.items()}
    if dry_run:
        return due
    reported = dict[dg.AssetKey, Set[int]]()
    for key, windows in due.items():
        events = _build_events(instance, view, key, sorted(windows))
        for event in events.values():
            # Killed between two reports, the next call finds the rest unmaterialized.
            instance.report_runless_asset_event(event)
        reported[key] = events.keys()
    # Evaluations that a run planned and never made keep a check pending in the UI until they are reported.
    for p in (*planned, *_list_planned(instance, feed, keys, reported)):
        if (result := _evaluate(instance, view, p)) is not None:
            internals.evaluate(instance, p.run, result)
    return due


def _build_events(
    instance: dg.DagsterInstance, view: LedgerView, key: dg.AssetKey, windows: Iterable[int]
) -> dict[int, dg.AssetMaterialization]:
    """Returns the events of complete windows; of commits, those that were reported before."""
    if key != view.keys.committed:
        return {w: landed_metadata.build_window_event(view, key, w, WHY) for w in windows}
    commits = {w: _read_last_commit(instance, view, w) for w in windows}
    return {w: event for w, event in commits.items() if event is not None}


def _read_last_commit(instance: dg.DagsterInstance, view: LedgerView, window: int) -> dg.AssetMaterialization | None:
    """Returns the last report of a window's commit, regardless of later attempts."""
    of = dg.AssetRecordsFilter(view.keys.committed, asset_partitions=[view.feed.window.name(window)])
    records = instance.fetch_materializations(of, limit=1).records
    return records[0].asset_materialization if records else None


# -- checks


def _list_planned(
    instance: dg.DagsterInstance, feed: Feed, keys: Keys, reported: Mapping[dg.AssetKey, Set[int]]
) -> Iterator[PlannedEvaluation]:
    """Yields the evaluations of the windows that were just reported again."""
    names = [*feed_checks.WINDOW_CHECKS, *contract_checks.list_checks(feed)]
    for key, of in ((keys.landed, names), (keys.committed, [OFFSETS_COMMITTED])):
        windows = [feed.window.name(w) for w in reported.get(key, ())]
        if windows:
            yield from internals.planned_evaluations(instance, [dg.AssetCheckKey(key, name) for name in of], windows)


def _evaluate(instance: dg.DagsterInstance, view: LedgerView, p: PlannedEvaluation) -> dg.AssetCheckEvaluation | None:
    """Evaluates from the ledger. `feed_health` needs the sensor."""
    key, name = p.check.asset_key, p.check.name
    if name == NO_GAPS:
        return feed_checks.evaluate_feed(instance, key, name, feed_checks.check_gaps(view))
    if name == FEED_HEALTH:
        return feed_checks.evaluate_feed(instance, key, name, feed_checks.report_unchecked(p.run))
    if p.partition is None:
        return None
    window = view.feed.window.parse_name(p.partition)
    target = internals.targets(instance, key, [p.partition]).get(p.partition)
    results = (
        {OFFSETS_COMMITTED: feed_checks.check_committed(view, window)}
        if name == OFFSETS_COMMITTED
        else feed_checks.evaluate_window(view, window)
    )
    return feed_checks.build_evaluation(key, name, p.partition, results[name], target) if name in results else None
