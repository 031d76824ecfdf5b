"""Stores Dagster events as evidence: a batch is committed only with a stored materialization of `<feed>/landed`.

There are two kinds of events. A window's event is in its partition, and exists only once the window is complete: an
hour that landed in part must not show green. It comes with the results of the feed's checks. A batch's event has no
partition; it is stored if no window's event covers all of the batch. Both carry the data version
`<ledger>/<batch>/<plan hash>` of the newest batch, by which they are found again.

A run that ends between the publish entry and its events leaves a gap. `roll_forward` fills it from the ledger, with the
same metadata, and `require_reported` raises while there is one. A new event log is filled by runs in portions, the
newest windows first, or at once by `sluice repair`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import dagster as dg

from sluice.assets.events.landed_metadata import build_batch_metadata, build_quarantine_metadata, build_window_metadata
from sluice.assets.events.ledger_view import LedgerView, quarantines
from sluice.assets.instance import internals
from sluice.assets.specs.asset_specs import Keys
from sluice.assets.specs.metadata_tables import Metadata
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Batch, State
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.util.units import many, show_window

VERSION = "dagster/data_version"


def list_reported_assets(feed: Feed, keys: Keys) -> tuple[dg.AssetKey, ...]:
    """Returns the assets that landing reports: `landed` and, for feeds with a schema or contract, `quarantined`."""
    return (keys.landed, keys.quarantined) if quarantines(feed) else (keys.landed,)


# -- events of landed rows


Events = Iterator[dg.AssetMaterialization]


def build_landing_events(
    books: LedgerView, batches: Iterable[Batch], windows: Collection[int], why: str = ""
) -> Events:
    """Yields the events of complete windows, and of published batches that these windows do not cover."""
    covered = {(books.format_window_version(w), w) for w in windows}
    for batch in batches:
        of = books.list_windows(batch)
        if len(of) > 1 or not {(books.format_batch_version(batch), w) for w in of} <= covered:
            yield _build_batch_event(books, batch, why)
    for window in sorted(windows):
        yield from (build_window_event(books, key, window, why) for key in list_reported_assets(books.feed, books.keys))


def build_window_result(books: LedgerView, window: int) -> dg.MaterializeResult[None]:
    """Returns the step's result for the complete window that is the run's own partition."""
    key, version = books.keys.landed, dg.DataVersion(books.format_window_version(window))
    return dg.MaterializeResult(asset_key=key, metadata=_build_metadata(books, key, window), data_version=version)


def _build_batch_event(books: LedgerView, batch: Batch, why: str) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        books.keys.landed,
        description=why or None,
        metadata=build_batch_metadata(books, batch),
        tags={VERSION: books.format_batch_version(batch)},
    )


def build_window_event(books: LedgerView, key: dg.AssetKey, window: int, why: str = "") -> dg.AssetMaterialization:
    """Returns the event of a complete window, from the ledger, the same in every run. `key`: one of `outputs`."""
    return dg.AssetMaterialization(
        key,
        partition=show_window(window),
        description=why or None,
        metadata=_build_metadata(books, key, window),
        tags={VERSION: books.format_window_version(window)},
    )


def _build_metadata(books: LedgerView, key: dg.AssetKey, window: int) -> Metadata:
    of = build_quarantine_metadata if key == books.keys.quarantined else build_window_metadata
    return of(books, window)


# -- events missing from the log


def find_unreported_batches(instance: dg.DagsterInstance, books: LedgerView) -> list[Batch]:
    """Returns the batches published since the last `<feed>/committed` that the event log lacks."""
    return [
        b
        for b in _list_published_since(books.state, _read_last_reconciled(instance, books))
        if not _is_recorded(instance, books, b)
    ]


def find_unreported_windows(instance: dg.DagsterInstance, books: LedgerView, key: dg.AssetKey) -> set[int]:
    """Returns the complete windows for which the event log has no materialization of this asset."""
    reported = internals.list_materialized(instance, key) if books.complete else None
    return set() if reported is None else {w for w in books.complete if show_window(w) not in reported}


PORTION = 100
"""Limit of past windows that a run reports to a Dagster without them, such as a new one, besides its own work.
A window costs some 40 ms of CPU, twice with its commit."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The windows that are reported now, the newest ones, and those that remain for later runs."""

    windows: frozenset[int] = frozenset()
    remaining: frozenset[int] = frozenset()

    @classmethod
    def of(cls, unreported: Iterable[int], limit: int | None) -> Portion:
        """Splits unreported windows; `limit` None: all now."""
        newest = sorted(unreported, reverse=True)
        return cls(frozenset(newest[:limit]), frozenset(() if limit is None else newest[limit:]))

    def describe(self, feed: str) -> str:
        """Returns a line for the run's log; empty if none remains."""
        if not self.remaining:
            return ""
        total, more = many(len(self.windows) + len(self.remaining), "window"), f"{len(self.remaining):,}"
        return (
            f"Dagster's event log lacks {total} of {feed} that landed before: this run adds the newest"
            f" {len(self.windows):,}, later runs the other {more}. To add all now: sluice repair {feed}"
        )


def roll_forward(
    instance: dg.DagsterInstance, books: LedgerView, limit: int | None = None, report: Reporter = lambda progress: None
) -> Portion:
    """Store the events that earlier runs left out. Idempotent.

    They are those of all batches that a commit rests on, of the windows that these changed, and of the newest `limit`
    windows without any event (None: all). A run still has to report the checks of the returned windows: for a check and
    partition, Dagster keeps one evaluation for each run, and one without a run.
    """
    batches = find_unreported_batches(instance, books)
    runs = " and ".join({b.owner.run: b.owner.describe() for b in batches}.values()) or "a run"
    why = f"rolled forward: {runs} ended before this was recorded here" if batches else REPORTED_LATE
    unknown = find_unreported_windows(instance, books, books.keys.landed)
    portion = Portion.of(unknown, limit)
    windows = portion.windows | (books.list_complete(batches) - unknown)
    for number, event in enumerate(build_landing_events(books, batches, windows, why)):
        report(Progress("tell", number, max(len(windows) * len(list_reported_assets(books.feed, books.keys)), number)))
        instance.report_runless_asset_event(event)
    return Portion(windows, portion.remaining)


REPORTED_LATE = "reported from the ledger: this event log lacked the window, which landed before"


def require_reported(instance: dg.DagsterInstance, books: LedgerView) -> None:
    """Raise Failed if any batch that a commit would cover has no stored materialization."""
    if missing := find_unreported_batches(instance, books):
        raise Failed(
            f"Dagster's event log holds no materialization of {books.feed.name}/landed for batch "
            + ", ".join(str(b.id) for b in missing[:10]),
            remedy="check that Dagster's storage accepts events, then run again: nothing was committed",
        )


def _list_published_since(state: State, reconciled: int | None) -> Iterable[Batch]:
    since = state.last_mark if reconciled is None else reconciled
    return (b for b in state.batches.published_since(since) if not b.merges)


def _read_last_reconciled(instance: dg.DagsterInstance, books: LedgerView) -> int | None:
    """Returns the ledger number in the last `<feed>/committed`; None if there is none of this ledger."""
    event = instance.get_latest_materialization_event(books.keys.committed)
    materialization = event.asset_materialization if event else None
    ledger, _, number = ((materialization.tags or {}).get(VERSION, "") if materialization else "").partition("/")
    return int(number) if ledger == books.state.ledger_id and number.isdigit() else None


def _is_recorded(instance: dg.DagsterInstance, books: LedgerView, batch: Batch) -> bool:
    tags = {VERSION: books.format_batch_version(batch)}
    return bool(instance.get_event_tags_for_asset(books.keys.landed, tags))
