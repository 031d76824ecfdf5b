"""Keeps complete windows green whatever failed afterwards, with the last results of their checks.

When a run is made, Dagster notes what it is to materialize and to evaluate. If the run fails or is killed, the missing
events show as red. So whatever is complete by the ledger is reported again, from the ledger and with the same data
version: nothing runs again because of it. A failing run does this itself (`Again`). For a killed run, the next run
does it (`settle`), or a tick of the schedule or the sensor, or `sluice repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import dagster as dg

from sluice.assets.checks import contract_checks, feed_checks
from sluice.assets.checks.feed_checks import ACCOUNT, FRONTIER, WATCH
from sluice.assets.events import evidence
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.internals import PlannedEvaluation
from sluice.assets.specs.asset_specs import Keys
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.util.units import parse_window, show_window

WHY = "reported again: a run over this window ended without reporting it, and by the ledger it is complete"


Again = Callable[[dg.DagsterInstance, LedgerView, Sequence[int]], Iterator[Any]]
"""The events with which a failing run over windows, its partitions, ends."""


def landed_again(instance: dg.DagsterInstance, books: LedgerView, windows: Sequence[int]) -> Iterator[Any]:
    """The rows of those that are complete, and the feed's checks by the ledger."""
    key, whole = books.keys.landed, [w for w in windows if books.is_complete(w)]
    yield from (evidence.window_event(books, key, window, WHY) for window in whole)
    yield from feed_checks.window_evaluations(instance, books, key, whole)
    yield feed_checks.feed_evaluation(instance, key, ACCOUNT, feed_checks.account(books))


def committed_again(instance: dg.DagsterInstance, books: LedgerView, windows: Sequence[int]) -> Iterator[Any]:
    """The commits of those that are complete and were reported before."""
    key, told = books.keys.committed, list[int]()
    for window in windows:
        if books.is_complete(window) and (stood := _stood(instance, books.keys, window)) is not None:
            yield stood
            told.append(window)
    targets = internals.targets(instance, key, map(show_window, told))
    for window in told:
        said = feed_checks.frontier_check(books, window)
        yield feed_checks.evaluation(key, FRONTIER, window, said, targets.get(show_window(window)))


def settle(instance: dg.DagsterInstance, feed: Feed, keys: Keys, open_books: Callable[[], LedgerView]) -> set[int]:
    """Report the complete windows that ended runs left unreported, and evaluate the feed's checks that these left out.
    Returns the windows. Idempotent. The ledger is read only if something is left."""
    left = unsettled_windows(instance, feed, keys)
    planned = internals.planned_evaluations(instance, _unpartitioned_checks(keys), ())
    if not planned and not any(left.values()):
        return set()
    books = open_books()
    told = {key: _tell(instance, books, key, windows & books.complete) for key, windows in left.items()}
    for p in (*planned, *_planned_again(instance, feed, keys, told)):
        if (said := _evaluation(instance, books, p)) is not None:
            internals.evaluate(instance, p.run, said)
    return set().union(*told.values())


def unsettled_windows(instance: dg.DagsterInstance, feed: Feed, keys: Keys) -> dict[dg.AssetKey, set[int]]:
    """By asset, the windows that a run had planned to materialize and did not."""
    made = (*evidence.outputs(feed, keys), keys.committed)
    return {key: set(_windows(internals.unmaterialized_partitions(instance, key))) for key in made}


def _tell(instance: dg.DagsterInstance, books: LedgerView, key: dg.AssetKey, windows: set[int]) -> set[int]:
    """The windows that could be reported; for a commit, those that were reported before."""
    events = {w: _event(instance, books, key, w) for w in sorted(windows)}
    for event in filter(None, events.values()):
        instance.report_runless_asset_event(event)
    return {w for w, event in events.items() if event is not None}


def _event(
    instance: dg.DagsterInstance, books: LedgerView, key: dg.AssetKey, window: int
) -> dg.AssetMaterialization | None:
    if key == books.keys.committed:
        return _stood(instance, books.keys, window)
    return evidence.window_event(books, key, window, WHY)


def _stood(instance: dg.DagsterInstance, keys: Keys, window: int) -> dg.AssetMaterialization | None:
    """Returns the last report of a window's commit, regardless of later attempts."""
    of = dg.AssetRecordsFilter(keys.committed, asset_partitions=[show_window(window)])
    found = instance.fetch_materializations(of, limit=1).records
    return found[0].asset_materialization if found else None


# -- checks


def _unpartitioned_checks(keys: Keys) -> list[dg.AssetCheckKey]:
    return [dg.AssetCheckKey(keys.landed, name) for name in (ACCOUNT, WATCH)]


def _planned_again(
    instance: dg.DagsterInstance, feed: Feed, keys: Keys, told: dict[dg.AssetKey, set[int]]
) -> Iterator[PlannedEvaluation]:
    """The evaluations of the windows that were just reported again."""
    names = [*feed_checks.OF_WINDOW, *contract_checks.described_checks(feed)]
    for key, of in ((keys.landed, names), (keys.committed, [FRONTIER])):
        windows = [show_window(w) for w in told.get(key, ())]
        if windows:
            yield from internals.planned_evaluations(instance, [dg.AssetCheckKey(key, name) for name in of], windows)


def _evaluation(
    instance: dg.DagsterInstance, books: LedgerView, p: PlannedEvaluation
) -> dg.AssetCheckEvaluation | None:
    """Evaluates from the ledger. `watch` needs the sensor and keeps its last result."""
    key, name = p.check.asset_key, p.check.name
    if name == ACCOUNT:
        return feed_checks.feed_evaluation(instance, key, name, feed_checks.account(books))
    if name == WATCH:
        return feed_checks.feed_evaluation(instance, key, name, feed_checks.not_looked(p.run))
    if p.partition is None:
        return None
    window, target = parse_window(p.partition), internals.targets(instance, key, [p.partition]).get(p.partition)
    found = (
        {FRONTIER: feed_checks.frontier_check(books, window)}
        if name == FRONTIER
        else feed_checks.of_window(books, window)
    )
    return feed_checks.evaluation(key, name, window, found[name], target) if name in found else None


def _windows(partitions: Collection[str]) -> Iterator[int]:
    """The partitions that are windows: the feed may once have had windows of another length."""
    for text in partitions:
        try:
            yield parse_window(text)
        except ValueError:
            continue
