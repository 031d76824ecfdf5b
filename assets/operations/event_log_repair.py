"""Compares Dagster's event log with the ledger: reports missing events, and names those without ground in the ledger.

The ledger is right. An event log may know less: a run ended between publishing and reporting, or the instance is new.
Or it may know more: the lake was restored from a backup, or is another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg

from sluice.assets.checks import re_report
from sluice.assets.events import landed_metadata
from sluice.assets.events.landed_metadata import list_reported_assets
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.operating.repairs import RepairFinding, RepairKind, ends
from sluice.pipelines.publishing.publish import format_request
from sluice.pipelines.util.units import many


def reconcile(
    instance: dg.DagsterInstance, view: LedgerView, report: Reporter = lambda progress: None, *, dry_run: bool = False
) -> Iterator[RepairFinding]:
    """Report missing events of the feed to Dagster, and name events without ground in the ledger. Idempotent."""
    missing = landed_metadata.find_missing(instance, view, list_reported_assets(view.feed, view.keys))
    if not dry_run:
        landed_metadata.roll_forward(instance, view, report=report, missing=missing)
    if batches := missing.batches:
        text = many(len(batches), "published batch", "published batches")
        yield RepairFinding(RepairKind.UNTOLD, text, "reported to Dagster", items=tuple(str(b.id) for b in batches))
    if names := tuple(map(view.feed.window.name, sorted(missing.changed.union(*missing.windows.values())))):
        text = f"{many(len(names), 'complete window')}, {ends(names)}"
        yield RepairFinding(RepairKind.UNTOLD, text, "reported to Dagster", items=names)
    yield from _settle_windows(instance, view, dry_run)
    yield from _find_unfounded(instance, view)


def _settle_windows(instance: dg.DagsterInstance, view: LedgerView, dry_run: bool) -> Iterator[RepairFinding]:
    due = re_report.settle(instance, view.feed, view.keys, lambda: view, dry_run=dry_run)
    if names := tuple(map(view.feed.window.name, sorted(due.get(view.keys.landed, ())))):
        text = f"{many(len(names), 'complete window')} that ended runs left red, {ends(names)}"
        yield RepairFinding(RepairKind.UNTOLD, text, "reported to Dagster", items=names)


def _find_unfounded(instance: dg.DagsterInstance, view: LedgerView) -> Iterator[RepairFinding]:
    """Partitions that are green without reason: their window is not complete by the ledger."""
    partitions = instance.get_materialized_partitions(view.keys.landed)
    windows = sorted(
        w
        for w in internals.parse_windows(partitions, view.feed.window)
        # The ledger cannot name windows that once had another length.
        if w not in view.complete and view.feed.window.is_start(w) and not view.is_complete(w)
    )
    if windows:
        names, name = tuple(map(view.feed.window.name, windows)), view.feed.name
        text = f"{many(len(names), 'window')} green in Dagster and pending by the ledger, {ends(names)}"
        end = view.feed.window.end_of(windows[-1])
        request = Request(RequestKind.WINDOW, window=windows[0], until=end)
        ways = (
            f"{format_request(name, request)}   lands pending windows",
            "or check whether these runs wrote to another lake",
        )
        yield RepairFinding(RepairKind.OVERTOLD, text, remedy=ways, items=names)
