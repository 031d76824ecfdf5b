"""The view and the JSON document of `sluice run`. The view shows less of each run, the more runs there are.

One run is shown with its partitions, several runs of a feed have a line each, and several feeds a row each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.shared import other_batches, run_profile, window_text
from sluice.cli.shared import outlook_text as outlooks
from sluice.cli.terminal.output import bad, facts, good, heading, limit_rows, remedy, table, warn
from sluice.cli.terminal.text_layout import count, format_percent, label_partitions, rate, seconds, size
from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.errors import NotReached, SluiceError, TableDiffers, UsageError, WindowIncomplete, WindowOpen
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Drift, DriftKind, Met, Scheduler, find_scheduler
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.util.documents import AsText, Derived, Flat, Internal
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import join_first, many
from sluice.pipelines.validation.drift import describe_drift

if TYPE_CHECKING:
    from sluice.cli.shared.run_profile import RunProfile
    from sluice.pipelines.batch.result import BatchResult, Landed, Skip
    from sluice.pipelines.committing.commit import CommitResult, CommittedMove
    from sluice.pipelines.contract.catalogue import ExpectationOutcome
    from sluice.pipelines.planning.windows import OpenWindows
    from sluice.pipelines.status.window_state import WindowStanding
    from sluice.running import RunResult

_FEEDS_SHOWN = 4
"""Maximum number of feeds that an error of several names."""
_BATCHES_SHOWN = 3
"""Maximum number of batches with a table each; more have one together."""
_FIELDS_SHOWN = 5
_EXPECTATIONS_SHOWN = 10


@dataclass(frozen=True)
class TimedRun:
    """One run of a feed. `seconds` are those of its stages, in order.

    `rules` is the contract that its rows were checked against; `other_batches` are those of other runs; `window` is the
    state of the requested window after the run; `skip` are the pending offsets that it was to skip. `profile` shows
    where the time went.
    """

    feed: Internal[str]
    request: AsText[Request]
    result: Internal[RunResult]
    seconds: Mapping[str, float]
    rules: Internal[Contract | None] = None
    other_batches: tuple[Met, ...] = ()
    window: WindowStanding | None = None
    skip: Internal[Skip | None] = None
    profile: RunProfile | None = None

    @property
    def run(self) -> Derived[str]:
        return self.result.run_id

    @property
    def drift(self) -> Derived[tuple[Drift, ...]]:
        return self.facts.drift

    @property
    def contract(self) -> Derived[list[ExpectationOutcome]]:
        return self.facts.outcomes

    @property
    def brokers_noted(self) -> Derived[list[str]]:
        return self.facts.broker_notes

    @property
    def landed(self) -> Derived[Flat[Landed]]:
        from sluice.pipelines.batch.result import Landed

        return self.result.landed or Landed((), (), ())

    @property
    def committed(self) -> Derived[CommitResult | None]:
        return self.result.committed

    @property
    def uncommitted(self) -> Derived[SluiceError | None]:
        return self.result.uncommitted

    @property
    def table(self) -> Derived[SluiceError | None]:
        return self.result.table

    @property
    def error(self) -> Derived[Flat[SluiceError | None]]:
        return self.result.error

    @property
    def batches(self) -> tuple[BatchResult, ...]:
        return self.result.batches

    @cached_property
    def facts(self) -> BatchFacts:
        return run_profile.facts_of(self.batches, self.rules)

    @property
    def is_cut(self) -> bool:
        """Returns True if only the feed's limits ended the run."""
        landed, error = self.result.landed, self.result.error
        if landed is None or self.request.kind is RequestKind.CATCH_UP or landed.stopped:
            return False
        published = any(b.number is not None for b in landed.batches)
        return landed.left > 0 and published and (error is None or isinstance(error, WindowIncomplete))


@dataclass
class FeedRuns:
    """A feed of the command: its requests and runs. `error` keeps it from running.

    `open_windows` are requested windows whose grace period has not ended.
    """

    feed: str
    requests: Internal[Sequence[Request]] = ()
    open_windows: OpenWindows | None = None
    error: Flat[SluiceError | None] = None
    runs: list[TimedRun] = field(default_factory=list)

    @property
    def errors(self) -> list[SluiceError]:
        """The error of each request, by its last run."""
        last = [r.result.error for r in self.runs if not r.is_cut]
        return [e for e in (self.error, *last) if e is not None]

    @property
    def is_left(self) -> bool:
        """Returns True if the run did not reach the feed and has no other error."""
        return bool(self.errors) and all(isinstance(e, NotReached) for e in self.errors)

    @property
    def has_wrong_request(self) -> bool:
        return bool(self.runs) and isinstance(self.runs[-1].result.error, UsageError | WindowOpen)


# -- one run


def view(run: TimedRun) -> list[RenderableType]:
    landed, committed = run.result.landed, run.result.committed
    out: list[RenderableType] = [
        heading(f"Run of {run.feed}", str(run.request)),
        *other_batches.view(run.other_batches),
    ]
    groups = [[b] for b in run.batches] if len(run.batches) <= _BATCHES_SHOWN else [run.batches]
    out += [_partition_table(run_profile.facts_of(batches)) for batches in groups]
    if landed is not None:
        out += _list_notices(run, landed)
        if not run.batches and not landed.refusals and run.result.error is None:
            out.append(good("nothing stable is pending" if landed.held_back else "nothing is pending"))
        out += [line for h in landed.held_back for line in outlooks.show_problem(h.message, h.remedy)]
    if run.batches:
        out.append(facts(*_list_summary(run)))
    elif committed is not None and str(committed.status) == "committed":
        out.append(facts(*_commit_facts(committed)))
    if committed is not None:
        out += [warn(_describe_move(m)) for m in committed.put_by_others]
    out += _list_shortfalls(run)
    return [*out, window_text.verdict(run.window)] if run.window else out


def _partition_table(batches: BatchFacts) -> RenderableType:
    partitions = batches.by_partition
    labels = label_partitions(partitions)
    columns = {
        "partition": list(labels.values()),
        "range": [" ".join(map(str, p.ranges)) for p in partitions.values()],
        "landed": [count(p.counts.landed) for p in partitions.values()],
        "no record": [count(p.counts.no_record) for p in partitions.values()],
        "quarantined": [count(p.counts.quarantined) for p in partitions.values()],
        "files": [str(p.part_count) for p in partitions.values()],
        "size": [size(p.bytes) for p in partitions.values()],
    }
    if not batches.counts.quarantined:
        del columns["quarantined"]
    rows = limit_rows(list(zip(*columns.values(), strict=True)))
    return table(list(columns), rows, right="landed no quarantined files size")


def _list_notices(run: TimedRun, landed: Landed) -> list[RenderableType]:
    from sluice.pipelines.batch.result import describe_first

    alike = group_by(landed.failures, lambda f: f.message).items()
    all_of = f"all of them: sluice report {run.feed} --batch {landed.batches[-1].batch if landed.batches else 0} --json"
    return [
        *([warn(landed.start_not_used)] if landed.start_not_used else []),
        *(bad(f"{describe_first(of)} stay{'' if of[1:] else 's'} pending: {message}") for message, of in alike),
        *_list_losses(landed),
        *(
            warn(
                f"{s.key} {s.range} is skipped; to land it anyway: sluice run {run.feed}"
                f" --offsets {s.key}:{s.range.start}-{s.range.end}"
            )
            for s in landed.skipped
        ),
        *([warn("nothing was skipped: no offset before that is pending")] if run.skip and not landed.skipped else []),
        *(bad(refusal.error.message) for refusal in landed.refusals),
        *map(warn, (*_describe_drifts(run.facts, all_of), *_describe_breaches(run.facts, all_of))),
        *map(warn, run.facts.broker_notes),
        *([warn(landed.overridden)] if landed.overridden else []),
        *_list_left(run),
    ]


def _list_left(run: TimedRun, where: str = "") -> list[Text]:
    """Describes the offsets that the feed's limits left to the next catch-up."""
    landed = run.result.landed
    if landed is None or not landed.left or landed.stopped or run.is_cut:
        return []
    return [
        warn(f"{where}the feed's limits ended the run: {many(landed.left, 'offset')} remain"),
        Text(f"  → the next run continues: sluice run {run.feed}", style="bold"),
    ]


def _list_losses(landed: Landed, where: str = "") -> list[Text]:
    return [warn(f"{where}{loss.key} {loss.range} is lost, as accepted") for loss in landed.losses]


def _describe_drifts(run: BatchFacts, all_of: str) -> Iterator[str]:
    """A line for each field that differs from the schema. A missing one does if the schema names its place."""
    drifts = [d for d in run.drift if d.kind is not DriftKind.MISSING or d.type]
    yield from map(describe_drift, drifts[:_FIELDS_SHOWN])
    if more := drifts[_FIELDS_SHOWN:]:
        yield f"and {many(len(more), 'further field')} differ from the schema; {all_of}"


def _describe_breaches(run: BatchFacts, all_of: str) -> Iterator[str]:
    """A line for each expectation of the contract that was not met."""
    broken = [o for o in run.outcomes if not o.passed]
    for o in broken[:_EXPECTATIONS_SHOWN]:
        result = f"broken by {count(o.unexpected)} of {many(o.checked, 'row')}" if o.checked else f"is {o.observed}"
        follows = "in quarantine" if o.quarantines else str(o.severity)
        first = f", the first at {o.first[0]}" if o.first else ""
        yield f"{text(o.expectation)}: {result}{first} ({follows})"
    if more := broken[_EXPECTATIONS_SHOWN:]:
        yield f"and {many(len(more), 'further expectation')} that did not hold; {all_of}"


def _list_summary(run: TimedRun) -> Iterator[tuple[str, str]]:
    speed = rate(run.facts.counts.total, run.seconds.get("land", 0.0), "offsets")
    yield "landed", f"{_describe_amount(run.facts)} ({speed})"
    if run.facts.counts.quarantined:
        yield "quarantined", _describe_quarantine(run.feed, run.facts)
    if adopted := _describe_adopted(run):
        yield "adopted", adopted
    if engines := run.facts.traffic.engines:
        yield "by", "; ".join(map(str, engines))
    published = [b for b in run.batches if b.number is not None]
    if replaced := sum(len(b.plan.replaces) for b in published):
        yield "replaced", many(replaced, "file")
    yield "published", _describe_batches([b.batch for b in published])
    if run.result.committed is not None:
        yield from _commit_facts(run.result.committed)
    stages = ", ".join(f"{name} {spent:.1f}" for name, spent in run.seconds.items() if spent >= 0.05)
    yield "took", f"{seconds(sum(run.seconds.values()))} ({stages})"
    yield ("Dagster run" if find_scheduler(run.result.run_id) is Scheduler.DAGSTER else "run"), run.result.run_id


def _describe_amount(run: BatchFacts) -> str:
    return f"{many(run.counts.landed, 'record')} in {many(run.files, 'file')}, {size(run.bytes)}"


def _describe_quarantine(feed: str, run: BatchFacts) -> str:
    """The quarantined records, and the command that shows them."""
    share = format_percent(run.counts.quarantined_share)
    return f"{many(run.counts.quarantined, 'record')} ({share}): sluice quarantine list {feed}"


def _describe_adopted(run: TimedRun) -> str:
    """The offset ranges that were not read again; empty if there are none."""
    plans, adopted = [b.plan for b in run.batches], run.facts.adopted_receipts
    ranges = f"{len(adopted)} of {many(sum(len(p.offset_ranges) for p in plans), 'offset range')}"
    offsets = f"{sum(r.offset_range.span for r in adopted):,} of {sum(p.offsets for p in plans):,} offsets"
    return f"{ranges} adopted: {offsets} not read again" if adopted else ""


def _describe_batches(batches: Sequence[int]) -> str:
    if len(batches) > _BATCHES_SHOWN:
        return f"{many(len(batches), 'batch', 'batches')}, from {batches[0]} to {batches[-1]}"
    return ", ".join(f"batch {b}" for b in batches) or "nothing"


def _commit_facts(commit: CommitResult) -> Iterator[tuple[str, str]]:
    yield "committed", _describe_commit(commit)
    if commit.left_out:
        partitions = ", ".join(map(str, commit.left_out[:6])) + (" …" if len(commit.left_out) > 6 else "")
        yield "not committed", f"{partitions}: the log was replaced, or is no longer in Kafka"
    if commit.waiting:
        partitions = ", ".join(f"{m.key} stays at {count(m.before or 0)}" for m in commit.waiting[:6])
        more = " …" if len(commit.waiting) > 6 else ""
        yield (
            "not committed",
            f"{partitions}{more}: landing has not reached it yet",
        )
    if commit.dead_letters:
        yield "dead letters", f"{count(commit.dead_letters)} to {commit.dead_letters_to}"


def _describe_commit(commit: CommitResult) -> str:
    moved = [m for m in commit.offsets if m.before != m.after]
    if str(commit.status) == "disabled":
        return "not in Kafka (commit: none); the ledger keeps the progress"
    if str(commit.status) == "unchanged" or not moved:
        return "the frontier, unchanged"
    return join_first((f"{m.key} → {count(m.after)}" for m in moved), 6, " … {:,} more")


def _describe_move(m: CommittedMove) -> str:
    expected = "none" if m.before is None else count(m.before)
    return (
        f"{m.key}: another client moved the group's committed offset to {count(m.after)}, ahead of landing (the ledger"
        f" expects {expected}). Landing has reached it: nothing is skipped, and the next commit continues from there"
    )


def _list_shortfalls(run: TimedRun, where: str = "") -> list[RenderableType]:
    """Describe uncommitted offsets, unless the run's error does, and an outdated table."""
    uncommitted, behind = run.result.uncommitted, run.result.table
    out: list[RenderableType] = []
    if uncommitted:
        out += [bad(f"{where}landed offsets are not committed: {uncommitted.message}"), remedy(uncommitted)]
    if behind:
        what = "" if isinstance(behind, TableDiffers) else "the table is not up to date: "
        out += [warn(f"{where}{what}{behind.message}"), remedy(behind)]
    return out


# -- several runs of a feed


def line(run: TimedRun) -> list[RenderableType]:
    """The window's state, and the landed rows of this run."""
    status = good(str(run.request)) if run.result.error is None else bad(str(run.request))
    if run.window:
        status = window_text.verdict(run.window)
    status.append(f"  {_describe_landed(run)}, {seconds(sum(run.seconds.values()))}", style="dim")
    return [*other_batches.view(run.other_batches), status, *_list_shortfalls(run)]


def _describe_landed(run: TimedRun) -> str:
    landed = _describe_amount(run.facts) if run.batches else "nothing landed"
    if adopted := _describe_adopted(run):
        landed += f" ({adopted})"
    if quarantined := run.facts.counts.quarantined:
        landed += f", {count(quarantined)} in quarantine"
    return landed


def remaining(run: TimedRun, number: int, requests: int, took: float) -> list[RenderableType]:
    """Describe the rest of the request with this number (from 1), with an estimate of the time."""
    if run.is_cut and run.result.landed:
        pending, offsets = run.result.landed.left, run.facts.counts.total
        eta = seconds(pending / offsets * sum(run.seconds.values())) if offsets else "an unknown time"
        return [Text(f"  the feed's limits ended the run: {many(pending, 'offset')} remain, about {eta}", style="dim")]
    if number < requests:
        eta = seconds(took / number * (requests - number))
        return [Text(f"  {number} of {requests}, the rest in about {eta}", style="dim")]
    return []


def totals(feed: FeedRuns) -> RenderableType:
    """The sum of several runs."""
    total = BatchFacts([r for run in feed.runs for r in run.facts.receipts])
    lines = [("landed", _describe_sum(feed.runs))]
    if total.counts.quarantined:
        lines.append(("quarantined", _describe_quarantine(feed.feed, total)))
    return facts(*lines)


def _describe_sum(runs: Sequence[TimedRun]) -> str:
    return f"{many(sum(r.facts.counts.landed for r in runs), 'record')} in {many(len(runs), 'run')}"


# -- several feeds


def feeds_view(feeds: Sequence[FeedRuns], took: float) -> list[RenderableType]:
    rows = [(f.feed, _format_outcome(f), _describe_feed(f)) for f in feeds]
    total = f"{many(len(feeds), 'feed')} in {seconds(took)}"
    wrong = [(list_failed(feeds), "failed"), (list_unreached(feeds), "not reached")]
    parts = [f"{len(names)} {what}: {', '.join(names)}" for names, what in wrong if names]
    end = bad("; ".join([total, *parts])) if parts else good(total)
    notices = [notice for f in feeds for notice in _list_feed_notices(f)]
    return [heading("Run of many feeds"), table(("feed", "outcome", "landed"), rows, optional="landed"), *notices, end]


def _format_outcome(feed: FeedRuns) -> Text:
    if feed.is_left:
        return warn("not reached")
    if feed.errors:
        return bad(", ".join(dict.fromkeys(type(e).__name__ for e in feed.errors)))
    if feed.runs[-1].result.table:
        return warn("done, table not up to date")
    landed = feed.runs[-1].result.landed
    return warn("done, some on hold") if landed and landed.held_back else good("done")


def _describe_feed(feed: FeedRuns) -> str:
    if len(feed.runs) == 1:
        return _describe_landed(feed.runs[0])
    return _describe_sum(feed.runs) if feed.runs else ""


def _list_feed_notices(feed: FeedRuns) -> list[RenderableType]:
    where, landed = f"{feed.feed}: ", [r.result.landed for r in feed.runs if r.result.landed]
    held_back = landed[-1].held_back if landed else ()
    out: list[RenderableType] = [
        line for h in held_back for line in outlooks.show_problem(h.message, h.remedy, where=where)
    ]
    out += [loss for of_run in landed for loss in _list_losses(of_run, where)]
    return [*out, *_list_left(feed.runs[-1], where), *_list_shortfalls(feed.runs[-1], where)] if feed.runs else out


def list_failed(feeds: Sequence[FeedRuns]) -> list[str]:
    return [f.feed for f in feeds if f.errors and not f.is_left]


def list_unreached(feeds: Sequence[FeedRuns]) -> list[str]:
    return [f.feed for f in feeds if f.is_left]


def errors_with_feeds(feeds: Sequence[FeedRuns]) -> Iterator[SluiceError]:
    """Returns each error once, with the feeds that have it in front of its message."""
    alike = dict[tuple[str, str, str], tuple[SluiceError, dict[str, None]]]()
    for feed in feeds:
        for error in feed.errors:
            key = type(error).__name__, error.message, error.remedy
            alike.setdefault(key, (error, {}))[1][feed.feed] = None
    for error, names in alike.values():
        ordered, more = list(names), len(names) - _FEEDS_SHOWN
        text = ", ".join(ordered) if more <= 1 else f"{', '.join(ordered[:_FEEDS_SHOWN])} and {more} more"
        error = copy(error)
        error.message = f"{text}: {error.message}"
        yield error
