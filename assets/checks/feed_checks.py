"""A feed's checks, by the ledger: is a window whole, is the feed without holes, are its offsets committed?

Work that nobody has begun is no reason to warn: a new feed owes the windows before the first one that landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import dagster as dg

from sluice.assets.checks import contract_checks
from sluice.assets.checks.contract_checks import CheckResult
from sluice.assets.events.audit_metadata import (
    PartitionStanding,
    failures_metadata,
    live_metadata,
    standings,
    standings_metadata,
)
from sluice.assets.events.committed_metadata import PartitionBehind, behind, behind_metadata
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.events.watch_metadata import watch_metadata
from sluice.assets.instance import internals
from sluice.assets.specs.markdown import plain
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.planning.windows import count_marker_searches
from sluice.pipelines.status.watch import LAG, WatchResult
from sluice.pipelines.util.units import many, show_window

COMPLETE, BOUNDARY, ACCOUNT, FRONTIER, WATCH = "complete", "boundary", "account", "frontier", "watch"
"""Are a window's rows all there? Are its boundaries known to be first records, or was one searched for? Is the whole
feed's account without holes? Have the committed offsets passed a window? What does the sensor see?"""

WHOLE: CheckResult = {"passed": True, "description": "every offset of the window is accounted for"}


def of_window(books: LedgerView, window: int) -> dict[str, CheckResult]:
    """The result of each check of a complete window's rows."""
    return {name: c.says(books, window) for name, c in OF_WINDOW.items()} | dict(
        contract_checks.verdicts(books, window)
    )


def boundary_check(books: LedgerView, window: int) -> CheckResult:
    """Are the window's boundaries known to be first records?"""
    found = count_marker_searches(books.state, window, books.feed.window)
    return {
        "passed": not found,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": f"in {many(found, 'partition')} markers of transactions, stamped by the broker's clock, hid the"
        " first record from Kafka's look-up by time, and it was searched for by offset: right where stamps are in order"
        " by offset; else records of this window may lie in the one beside it (`sluice docs guarantees`)"
        if found
        else "each boundary is the first record stamped at its time or later",
    }


@dataclass(frozen=True, slots=True)
class WindowCheck:
    """A check of the rows of each window. `says`: its result for a window in which every offset is accounted for."""

    description: str
    says: Callable[[LedgerView, int], CheckResult]


OF_WINDOW = {
    COMPLETE: WindowCheck("The ledger accounts for every offset of the window.", lambda books, window: WHOLE),
    BOUNDARY: WindowCheck(
        "The window begins and ends at first records. It warns where a search had to find one that markers of"
        " transactions hid.",
        boundary_check,
    ),
}
"""The checks that every feed's windows have; a contract adds its own. Declared, reported and kept green from here."""


def window_evaluations(
    instance: dg.DagsterInstance, books: LedgerView, key: dg.AssetKey, windows: Iterable[int]
) -> Iterator[dg.AssetCheckEvaluation]:
    """The checks of complete windows whose materialization was reported before."""
    ordered = sorted(windows)
    targets = internals.targets(instance, key, map(show_window, ordered))
    for window in ordered:
        for name, said in of_window(books, window).items():
            yield evaluation(key, name, window, said, targets.get(show_window(window)))


def evaluation(
    key: dg.AssetKey, name: str, window: int | None, said: CheckResult, target: internals.Target | None = None
) -> dg.AssetCheckEvaluation:
    """A check's result for a partition other than the step's, or from a step without a partition. `target`: the
    materialization that it is about; without one, Dagster counts the partition as not checked."""
    partition = None if window is None else show_window(window)
    return dg.AssetCheckEvaluation(
        asset_key=key, check_name=name, partition=partition, target_materialization_data=target, **said
    )


def feed_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetKey, name: str, said: CheckResult
) -> dg.AssetCheckEvaluation:
    """The result of a check without partitions. It names the asset's newest materialization: without one, Dagster
    compares times, and SQLite keeps the times of checks only to the second."""
    return evaluation(key, name, None, said, internals.newest(instance, key))


def account(books: LedgerView, landed: Landed | None = None, run: str = "") -> CheckResult:
    """Has everything landed that was asked for, and is every account closed up to its end? `landed`: by the run that
    asks, `run`."""
    found, failed = standings(books), failures(landed) if landed else 0
    open_ = [s for s in found if not s.whole]
    return {
        "passed": not failed and not open_,
        "severity": dg.AssetCheckSeverity.ERROR if failed else dg.AssetCheckSeverity.WARN,
        "description": in_vain(failed) if failed else _standing(found, len(open_)),
        "metadata": standings_metadata(found)
        | live_metadata(books, run)
        | (failures_metadata(landed) if landed else {}),
    }


def failures(landed: Landed) -> int:
    """How many slices and partitions failed; if there are any, `landed.check` raises."""
    return len(landed.refusals) + len(landed.failures)


def in_vain(failed: int) -> str:
    return f"{failed} slices or partitions were asked for and did not land; they stay owed"


def _standing(found: list[PartitionStanding], open_: int) -> str:
    if open_:
        return f"{open_} of {len(found)} partitions have holes below what landed, or ranges that a live batch reserves"
    if waiting := sum(bool(s.holes) for s in found):
        return f"what lies before the first window that landed is owed in {waiting} of {many(len(found), 'partition')}"
    return f"every offset from origin to frontier is accounted for in all {len(found)} partitions"


def frontier_check(books: LedgerView, window: int) -> CheckResult:
    """Has the frontier, up to which offsets are committed, passed the window?"""
    held = behind(books, window)
    return {
        "passed": not held,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": _held_text(held, sum(books.untried(b.key) for b in held)),
        "metadata": behind_metadata(held),
    }


def _held_text(held: list[PartitionBehind], untried: int) -> str:
    if not held:
        return "the committed offsets have passed this window in all partitions"
    waiting = many(len(held), "partition")
    if untried == len(held):
        return f"the committed offsets have not passed this window in {waiting}: earlier windows have not landed yet"
    return f"{waiting} committed only up to an earlier window, which is owed"


def by_the_way(watched: WatchResult) -> WatchResult:
    """Returns the findings of a landing run, without lag, which the sensor reports."""
    return replace(watched, findings=tuple(f for f in watched.findings if f.about != LAG))


def failed_run(error: BaseException) -> CheckResult:
    """Returns the result of `watch` after a failed run; findings of earlier runs do not apply."""
    cause = f"unforeseen {type(error).__name__}"
    if isinstance(error, SluiceError):
        cause = f"{error.message} → {error.remedy}"
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": plain(f"the last run failed: {cause}"),
    }


def not_looked(run: str) -> CheckResult:
    """The result of `watch` after a run that ended before it came to it."""
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": f"run {run[:8]} ended before it looked at the feed: execute this check, or run the feed again",
    }


def watch_check(watched: WatchResult) -> CheckResult:
    """Returns the findings about the feed as a check's result."""
    first = watched.findings[0] if watched.findings else None
    more = f" ({len(watched.findings) - 1} more in the table)" if len(watched.findings) > 1 else ""
    severe = first is not None and first.severe
    return {
        "passed": first is None,
        "severity": dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
        "description": plain(f"{first}{more}") if first else "nothing to look at",
        "metadata": watch_metadata(watched),
    }
