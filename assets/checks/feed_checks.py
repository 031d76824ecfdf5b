"""Checks of a feed by its ledger: complete windows, gaps, committed offsets, health.

Windows before the first landed one cause no warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from sluice.assets.checks import contract_checks
from sluice.assets.checks.contract_checks import CheckResult
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.specs.asset_specs import Metadata, plain, table
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.receipts import Met
from sluice.pipelines.operating.feed_status import WatchResult
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.windows import count_marker_searches
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.window_state import describe_empty
from sluice.pipelines.util.units import join_first, many, show_window

WINDOW_COMPLETE, BOUNDARIES = "window_complete", "window_boundaries"
"""Names of the checks of each window of `<feed>/landed`."""
NO_GAPS, FEED_HEALTH = "no_gaps", "feed_health"
"""Names of the checks of the whole feed, on `<feed>/landed`."""
OFFSETS_COMMITTED = "offsets_committed"
"""The name of the check of each window of `<feed>/committed`."""

ALL_LANDED: CheckResult = {"passed": True, "description": "every offset of the window is accounted for"}


def evaluate_window(view: LedgerView, window: int) -> dict[str, CheckResult]:
    """Returns the results of all checks of a complete window's rows, by name."""
    return {name: c.evaluate(view, window) for name, c in WINDOW_CHECKS.items()} | dict(
        contract_checks.evaluate(view, window)
    )


def check_complete(view: LedgerView, window: int) -> CheckResult:
    """Returns the result for a complete window: a warning if it lacks records."""
    if lacks := str(view.find_losses(window)):
        warning = dg.AssetCheckSeverity.WARN
        return {"passed": False, "severity": warning, "description": f"the window is complete, but {lacks}"}
    if not view.is_empty(window):
        return ALL_LANDED
    against = bool(windows.count_against(view.state, window, view.feed.window))
    return {"passed": True, "description": f"the window is complete and empty: {describe_empty(against)}"}


def check_boundaries(view: LedgerView, window: int) -> CheckResult:
    """Returns whether all boundaries of the window are exact."""
    searches = count_marker_searches(view.state, window, view.feed.window)
    clocks = windows.describe_against(view.state, window, view.feed.window)
    return {
        "passed": not searches and not clocks,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": f"in {many(searches, 'partition')}, transaction markers hid the first record from Kafka's lookup"
        " by time, so it was searched for by offset. The result is exact if timestamps increase with offsets; otherwise"
        " records of this window may be in an adjacent one (`sluice docs guarantees`)"
        if searches
        else clocks or "each boundary is the first record with its time or a later one",
    }


@dataclass(frozen=True, slots=True)
class WindowRule:
    """A check of each window's rows. `evaluate`: its result for a complete window."""

    description: str
    evaluate: Callable[[LedgerView, int], CheckResult]


WINDOW_CHECKS = {
    WINDOW_COMPLETE: WindowRule(
        "Passes when every offset of the window has landed or is accounted for in the ledger. Fails, or has no result,"
        " while some are pending: `sluice run FEED` lands them. Warns when offsets are lost by a named decision.",
        check_complete,
    ),
    BOUNDARIES: WindowRule(
        "Passes when the window begins at its first record in each partition. Warns when transaction markers hid that"
        " record from Kafka's lookup by time: if timestamps are out of order, check the adjacent windows, too.",
        check_boundaries,
    ),
}
"""The checks of every feed's windows; a contract adds its own."""


def evaluate_windows(
    instance: dg.DagsterInstance, view: LedgerView, key: dg.AssetKey, windows: Iterable[int]
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yields the checks of complete windows, and of their outputs, for their newest materialization."""
    ordered = sorted(windows)
    targets = internals.targets(instance, key, map(view.feed.window.name, ordered))
    for window in ordered:
        for name, result in evaluate_window(view, window).items():
            partition = view.feed.window.name(window)
            yield build_evaluation(key, name, partition, result, targets.get(partition))
    yield from evaluate_outputs(instance, view, view.feed.outputs, ordered)


def evaluate_outputs(
    instance: dg.DagsterInstance, view: LedgerView, outputs: Iterable[Feed], windows: Sequence[int]
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yields the checks of outputs of a split feed in complete windows, for their newest materialization."""
    for output in outputs:
        own, key = view.of_output(output), view.keys.output(output.output)
        targets = internals.targets(instance, key, map(view.feed.window.name, windows))
        for window in windows:
            partition = view.feed.window.name(window)
            for name, result in contract_checks.evaluate(own, window):
                yield build_evaluation(key, name, partition, result, targets.get(partition))


def evaluate_committed(
    instance: dg.DagsterInstance, view: LedgerView, windows: Iterable[int]
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yields the checks of windows' commits, for their newest materialization."""
    names, key = {w: view.feed.window.name(w) for w in windows}, view.keys.committed
    targets = internals.targets(instance, key, names.values())
    for window, name in names.items():
        yield build_evaluation(key, OFFSETS_COMMITTED, name, check_committed(view, window), targets.get(name))


def build_evaluation(
    key: dg.AssetKey, name: str, partition: str | None, result: CheckResult, target: internals.Target | None = None
) -> dg.AssetCheckEvaluation:
    """Returns a check's result for a partition other than the step's, or for none.

    `target`: the checked materialization; without it, Dagster counts the partition as not checked.
    """
    return dg.AssetCheckEvaluation(
        asset_key=key, check_name=name, partition=partition, target_materialization_data=target, **result
    )


def evaluate_feed(
    instance: dg.DagsterInstance, key: dg.AssetKey, name: str, result: CheckResult
) -> dg.AssetCheckEvaluation:
    """Returns the result of a check without partitions, for the asset's newest materialization.

    Without it, Dagster compares times, which SQLite stores to the second only.
    """
    return build_evaluation(key, name, None, result, internals.newest(instance, key))


def check_gaps(view: LedgerView, landed: Landed | None = None, run: str = "") -> CheckResult:
    """Returns whether all requested records landed, and no partition has gaps. `landed`: the result of `run`."""
    partitions, failed = find_gaps(view), count_failures(landed) if landed else 0
    open_ = [s for s in partitions if not s.is_complete]
    return {
        "passed": not failed and not open_,
        "severity": dg.AssetCheckSeverity.ERROR if failed else dg.AssetCheckSeverity.WARN,
        "description": describe_failures(failed) if failed else _describe_gaps(partitions, len(open_)),
        "metadata": build_gaps_metadata(partitions)
        | build_live_metadata(view, run)
        | (build_failures_metadata(landed) if landed else {}),
    }


def count_failures(landed: Landed) -> int:
    """Returns the number of failed offset ranges and partitions; `landed.check` raises for any."""
    return len(landed.refusals) + len(landed.failures)


def describe_failures(failed: int) -> str:
    return f"{failed} requested offset ranges or partitions did not land; they stay pending: run the feed again"


def _describe_gaps(partitions: list[PartitionGaps], open_: int) -> str:
    if open_:
        total = many(len(partitions), "partition")
        return f"{open_} of {total} have gaps between landed offsets, or offsets that an unfinished batch reserves"
    if waiting := sum(bool(s.holes) for s in partitions):
        total = many(len(partitions), "partition")
        return f"offsets before the first landed window are pending in {waiting} of {total}"
    return f"every offset from origin to frontier is accounted for in all {len(partitions)} partitions"


def check_committed(view: LedgerView, window: int) -> CheckResult:
    """Returns whether the committed offsets have passed the window in all partitions."""
    if view.feed.commit is CommitMode.NONE:
        return {
            "passed": False,
            "severity": dg.AssetCheckSeverity.WARN,
            "description": "nothing is committed: the feed has `commit: none`",
        }
    lagging = find_behind(view, window)
    return {
        "passed": not lagging,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": _describe_lagging(lagging, sum(view.is_untried(b.key) for b in lagging)),
        "metadata": build_behind_metadata(lagging),
    }


def _describe_lagging(lagging: list[PartitionBehind], untried: int) -> str:
    if not lagging:
        return "the committed offsets have passed this window in all partitions"
    waiting = many(len(lagging), "partition")
    if untried == len(lagging):
        return f"the committed offsets have not passed this window in {waiting}: earlier windows have not landed yet"
    return f"{waiting} committed only up to an earlier window, which is pending"


def without_lag(watched: WatchResult) -> WatchResult:
    """Returns the findings of a landing run without lag, which only the sensor reports."""
    return replace(watched, findings=tuple(f for f in watched.findings if f.kind != "lag"))


def report_failed_run(error: BaseException) -> CheckResult:
    """Returns the result of `feed_health` after a failed run; earlier findings do not apply."""
    cause = f"unexpected {type(error).__name__}"
    if isinstance(error, SluiceError):
        cause = f"{error.message} → {error.remedy}"
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": plain(f"the last run failed: {cause}"),
    }


def report_unchecked(run: str) -> CheckResult:
    """Returns the result of `feed_health` after a run that ended before the check."""
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": f"run {run[:8]} ended before it checked the feed: execute this check, or run the feed again",
    }


def check_health(watched: WatchResult) -> CheckResult:
    """Returns the findings about the feed as a check's result."""
    first = watched.findings[0] if watched.findings else None
    more = f" ({len(watched.findings) - 1} more in the table)" if len(watched.findings) > 1 else ""
    severe = first is not None and first.severe
    return {
        "passed": first is None,
        "severity": dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
        "description": plain(f"{first}{more}") if first else "no findings",
        "metadata": build_health_metadata(watched),
    }


@dataclass(frozen=True, slots=True)
class PartitionGaps:
    """The gaps of one partition, by the ledger.

    `holes` lie between the frontier and the last landed offset. `untried`: no batch has tried to land the first one.
    `reserved`: ranges of live batches.
    """

    key: Key
    origin: int
    frontier: int
    holes: tuple[Range, ...]
    reserved: tuple[Range, ...]
    untried: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.holes[self.untried :] and not self.reserved


def find_gaps(view: LedgerView) -> list[PartitionGaps]:
    """Returns the gaps of each current partition."""
    state, gaps = view.state, list[PartitionGaps]()
    for key in state.known():
        origin, holes, reserved = state.origins[key].offset, state.holes(key), state.list_reserved(key)
        untried = bool(holes) and view.is_untried(key)
        gaps.append(PartitionGaps(key, origin, view.frontiers[key], holes, reserved, untried))
    return gaps


def build_gaps_metadata(partitions: Sequence[PartitionGaps]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(p.key),
            "origin": p.origin,
            "frontier": p.frontier,
            "holes": join_first(p.holes, 3, " … {:,} more"),
            "reserved": join_first(p.reserved, 3, " … {:,} more"),
        }
        for p in sorted(partitions, key=lambda p: (p.is_complete, p.key))
    ]
    columns = {"partition": "string", "origin": "int", "frontier": "int", "holes": "string", "reserved": "string"}
    holes = sum(len(p.holes) for p in partitions)
    return {"partitions": len(partitions), "holes": holes, "account": table(rows, columns)}


def build_live_metadata(view: LedgerView, run: str) -> Metadata:
    """Returns the live batches of other runs: their state, and the commands that continue or end them."""
    rows: list[dict[str, str | int]] = [
        {
            "batch": m.batch,
            "state": str(m),
            "remedy": " or ".join(f"`{command}` {effect}" for command, effect in m.ways) or "wait for it to end",
        }
        for m in view.live
        if m.owner.run != run
    ]
    return {"live_batches": table(rows, {"batch": "int", "state": "string", "remedy": "string"})} if rows else {}


def build_failures_metadata(landed: Landed) -> Metadata:
    """Returns the offset ranges and partitions that a run did not land, and the losses that it accepted."""
    rows: list[dict[str, str | int]] = [
        {"range": str(f.offset_range), "error": f.error, "message": f.message}
        for b in landed.batches
        for f in b.failures
    ]
    rows += [{"range": str(r.tp), "error": type(r.error).__name__, "message": r.error.message} for r in landed.refusals]
    rows += [{"range": f"{x.key}:{x.range}", "error": "loss", "message": "accepted as lost"} for x in landed.losses]
    return {"failed": table(rows, dict.fromkeys(("range", "error", "message"), "string"))} if rows else {}


# -- partitions behind a window


@dataclass(frozen=True, slots=True)
class PartitionBehind:
    """A partition whose frontier has not reached a window's end.

    `window`: the window (ms) that contains the frontier. `live`: the batch that reserves the offsets there.
    """

    key: Key
    frontier: int
    end: int | None
    window: int | None
    live: Met | None


def find_behind(view: LedgerView, window: int) -> list[PartitionBehind]:
    """Returns the partitions whose frontier has not passed a window."""
    ends, at = view.find_ends(window), view.frontiers
    return [_find_behind(view, k, at[k], end) for k, end in ends.items() if end is None or at[k] < end]


def _find_behind(view: LedgerView, key: Key, frontier: int, end: int | None) -> PartitionBehind:
    here = Range(frontier, frontier + 1)
    pieces = windows.cut_at_boundaries(view.state, key, here)
    owners = {b.id for b, s in view.state.list_live_ranges() if s.key == key and s.range.meets(here)}
    live = next((m for m in view.live if m.batch in owners), None)
    return PartitionBehind(key, frontier, end, pieces[0].window if pieces else None, live)


def build_behind_metadata(partitions: Sequence[PartitionBehind]) -> Metadata:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(b.key),
            "frontier": b.frontier,
            "window_end": "not resolved" if b.end is None else str(b.end),
            "waits_for": ("offsets before the first window" if b.window is None else f"window {show_window(b.window)}")
            + f", {f'reserved by {b.live},' if b.live else 'pending'} from offset {b.frontier} on",
        }
        for b in partitions
    ]
    columns = {"partition": "string", "frontier": "int", "window_end": "string", "waits_for": "string"}
    return {"partitions_behind": len(partitions)} | ({"behind": table(rows, columns)} if rows else {})


# -- health


def build_health_metadata(watched: WatchResult) -> Metadata:
    """Returns the findings about a feed, and its lag."""
    rows: list[dict[str, str | int]] = [
        {"finding": f.text, "remedy": f.remedy, "severity": "error" if f.severe else "warning"}
        for f in watched.findings
    ]
    columns = dict.fromkeys(("finding", "remedy", "severity"), "string")
    findings = {"findings": table(rows, columns)} if rows else {}
    return findings | ({} if watched.outlook is None else _build_outlook_metadata(watched.outlook))


def _build_outlook_metadata(outlook: Outlook) -> Metadata:
    """Returns a feed's lag and pace, without unknown values."""
    values = {
        "lag_offsets": outlook.lag,
        "lag_seconds": outlook.lag_seconds,
        "catch_up_seconds": outlook.catch_up_seconds,
        "landing_offsets_per_second": _round_rate(outlook.landing),
        "production_offsets_per_second": _round_rate(outlook.production),
        "ranges_at_risk": len(outlook.at_risk),
    }
    return {name: value for name, value in values.items() if value is not None}


def _round_rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
