"""Makes a batch's report and stores it in the lake next to the ledger.

A run that cannot write a report logs a warning and continues. A report can be made again while the batch's files exist;
only the run that lands the batch adds the lag from Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sluice.pipelines.batch_report.batch_facts import BatchAccount, PartitionLag, account
from sluice.pipelines.batch_report.column_profiles import profiles
from sluice.pipelines.batch_report.rejects import rejects
from sluice.pipelines.batch_report.report_page import Page, html
from sluice.pipelines.contract import catalogue
from sluice.pipelines.errors import BatchRefused
from sluice.pipelines.feed.sections import Policies
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind, SliceFailure
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import check_quarantine
from sluice.pipelines.validation.drift import check_drift

TIMES = ("kafka_timestamp", "timestamp")
"""The column of the records' times, in typed feeds and in raw ones."""


def make(a: BatchAccount, lake: Lake, behind: Sequence[PartitionLag] | None = None) -> bytes:
    """The report of a batch, from its own files. Raises LakeUnavailable."""
    refused = rejects(a.parts(PartKind.QUARANTINED), lake, published=a.published)
    positions = [p for o in a.outcomes if not o.quarantines for p in o.first]
    landed = a.parts(PartKind.LANDED)
    spread = profiles(landed, lake, columns_to_profile(a), positions, published=a.published)
    return html(Page(a, refused, spread, None if behind is None else tuple(behind))).encode()


def columns_to_profile(a: BatchAccount) -> list[str]:
    """The columns whose values are shown: the records' times, and the contract's columns in its order."""
    checked = (c for e in (a.contract.expectations if a.contract else ()) for c in catalogue.columns(e))
    return list(dict.fromkeys([*_time(a), *checked]))


def _time(a: BatchAccount) -> list[str]:
    return [TIMES[1]] if all(r.format.startswith("raw") for r in a.receipts) else [TIMES[0]]


def with_reason(a: BatchAccount, policies: Policies, lake: Lake) -> BatchAccount:
    """An unpublished batch, with the reason why the feed's policies of today keep it from being published."""
    if a.published or a.why:
        return a
    try:
        check_quarantine(a.receipts, policies, lake)
        check_drift(a.receipts, policies)
    except BatchRefused as refused:
        return replace(a, why=refused.message)
    return a


def path_of(a: BatchAccount) -> str:
    """The lake path of the report. Each attempt at an unpublished batch has its own."""
    return paths.batch_page_path(a.feed, a.batch.id, _attempt(a))


def standing_report(a: BatchAccount, lake: Lake) -> str | None:
    """Returns the lake path of an existing report; None if there is none."""
    return receipt_files.find_batch_page(lake, a.feed, a.batch.id, _attempt(a))


def _attempt(a: BatchAccount) -> str:
    return "" if a.published else a.batch.owner.token


def keep(
    ledger: Ledger,
    lake: Lake,
    batch: int,
    behind: Sequence[PartitionLag] | None = None,
    why: str = "",
    failures: Sequence[SliceFailure] = (),
) -> str:
    """Make a batch's report, put it into the lake and return its path. Raises as `account` and `make` do."""
    facts = account(ledger, lake, batch, why, failures)
    lake.put(path := path_of(facts), make(facts, lake, behind))
    return path
