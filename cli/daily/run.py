"""`sluice run`: lands and commits pending offsets through Dagster, and reports the outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.options import window_options
from sluice.cli.options.request_options import Offsets, Only, PerRun, Replace, RequestedWork, WorkOptions
from sluice.cli.options.window_options import From, To, Window
from sluice.cli.shared import fleet_view, run_profile
from sluice.cli.shared import other_batches as met
from sluice.cli.shared import outlook_text as outlooks
from sluice.cli.terminal.fast_start import fast_imports
from sluice.cli.terminal.number_format import count, format_percent, rate, seconds, size
from sluice.cli.terminal.output import bad, facts, good, heading, limit_rows, remedy, table, warn
from sluice.cli.terminal.partition_labels import label_partitions
from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.contract.results import ExpectationOutcome, contract_results
from sluice.pipelines.errors import SluiceError, UsageError, WindowHeld, WindowIncomplete
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.ranges import Range, union
from sluice.pipelines.model.receipts import Counts, Drift, DriftKind, Met, Progress, Receipt, Reporter, count_files
from sluice.pipelines.records.compiled import cache
from sluice.pipelines.status.broker_traffic import notable
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import many
from sluice.pipelines.validation.drift import describe_drift, drift_of
from sluice.resources.local import process

if TYPE_CHECKING:
    from sluice.pipelines.batch.result import BatchResult, Landed, Skip
    from sluice.pipelines.committing.commit import CommitResult, Moved
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger.entries import KeyRange
    from sluice.pipelines.planning.windows import OpenWindows
    from sluice.pipelines.status.window_state import WindowStanding
    from sluice.running import RunResult


FeedNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FEED…",
        help="Feeds by name, as in feeds/FEED.yaml, or patterns.",
        show_default=False,
        autocompletion=completers.complete_feeds,
    ),
]
All = Annotated[bool, typer.Option("--all", metavar=" ", help="All feeds of the project, in one run.")]
Profile = Annotated[
    bool, typer.Option("--profile", help="Show where the time went: by stage, by activity of tasks, by broker.")
]
SkipTo = Annotated[
    str | None,
    typer.Option(
        "--skip-to",
        metavar="latest|TIME",
        help="Skip pending offsets, to the end or up to an ISO time with zone. Needs --reason.",
        show_default=False,
    ),
]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="The reason; the ledger keeps it.", show_default=False)
]


def register(app: typer.Typer) -> None:
    command(app)(run)


def run(
    session: Session,
    feeds: FeedNames = None,
    everything: All = False,
    offsets: Offsets = None,
    only: Only = None,
    window: Window = None,
    start: From = None,
    end: To = None,
    replace: Replace = False,
    per_run: PerRun = 1,
    skip_to: SkipTo = None,
    reason: Reason = None,
    profile: Profile = False,
) -> int:
    """Land pending offsets, publish them, and commit.

    Without options it catches up. It runs the feed's Dagster job on the project's instance, so the UI shows it.
    Several windows are several runs, and one that fails does not stop the others.

    Several feeds (--all, a list, or a pattern in quotes) are landed in one process and one run of Dagster, a few side
    by side. A feed that fails stops no other; the end names it, and the exit code is that of the worst. fleet.yaml
    bounds how many are at work at once (sluice docs scale).

    The next run finishes a run that died: nothing is read twice, and no row is visible twice. Windows and offsets may
    lie below the origin. Where the feed's limits end a run, the next run goes on.

    $ sluice run orders
    $ sluice run orders --window 2026-11-20T14
    $ sluice run orders --from 2026-11-20 --to 2026-11-21 --windows-per-run 6
    $ sluice run orders --window 2026-11-20T14 --only orders:3
    $ sluice run orders --window 2026-11-20T14 --replace
    $ sluice run orders --offsets orders:0:100-200 --offsets orders:1:0-50
    $ sluice run orders --skip-to 2026-11-20T00:00:00Z --reason "test data"
    $ sluice run orders --profile
    $ sluice run --all
    $ sluice run orders 'clicks_*'
    $ sluice run --all --from 2026-11-20 --to 2026-11-21
    """
    typed = WorkOptions(offsets, only, window, start, end, replace, per_run)
    if everything or len(feeds or ()) != 1 or fleet_view.is_pattern(*(feeds or ())):
        if offsets or only or skip_to or reason or profile:
            raise UsageError(
                "options of one feed, for several",
                remedy="several feeds catch up, or land windows: --window, --from, --to, --replace",
            )
        names = fleet_view.chosen(session.files, feeds or (), everything=everything)
        return _many(session, names, typed, list(session.files.broken.values()) if everything else [])
    feed = session.feed((feeds or [""])[0])
    requested, skip = typed.requests(session, feed), _skip(typed, skip_to, reason)
    return _run_one(session, feed, requested, skip, profile, in_lines=start is not None)


def _many(session: Session, names: Sequence[str], typed: WorkOptions, broken: Sequence[SluiceError]) -> int:
    """Land what is asked of these feeds; the worst exit code. `broken`: what is wrong with files of others that were
    meant. Several windows are several runs, each over all feeds."""
    spent, began = _so_far(), time.monotonic()
    session.project.fleet()  # one error, not one of each feed
    asked, wrong = _asked_of_each(session, names, typed)
    open_windows = {name: each.open_windows for name, each in asked.items() if each.open_windows}
    ran: dict[str, list[Ran]] = {name: [] for name in asked}
    for turn in zip_longest(*(each.requests for each in asked.values())):
        each = {name: request for name, request in zip(asked, turn, strict=True) if request is not None}
        for done in _together(session, each):
            ran[done.feed].append(done)
    whole = spent + time.monotonic() - began
    lines = [_line(name, each) for name, each in ran.items() if each]
    lines += [fleet_view.Line(name, (error,), "") for name, error in wrong.items()]
    session.terminal.show(*fleet_view.view(lines, whole))
    for name, unsettled in open_windows.items():
        session.terminal.show(*window_options.open_window_lines(name, unsettled, where=f"{name}: "))
    for error in (*broken, *fleet_view.named(lines)):
        session.terminal.fail(error)
    entries = [
        _make_feed_document(name, [document(r) for r in runs], open_windows.get(name), wrong.get(name))
        for name, runs in (ran | {name: [] for name in wrong}).items()
    ]
    session.terminal.print_document(_make_document(entries, lines, whole, broken))
    return max((e.exit_code for e in (*broken, *(e for line in lines for e in line.errors))), default=0)


def _line(feed: str, runs: Sequence[Ran]) -> fleet_view.Line:
    """A feed's runs, in a line of the table, and below it."""
    errors, last = tuple(r.outcome.error for r in runs if r.outcome.error), runs[-1].outcome
    held = last.landed.held if last.landed else ()
    beside: list[RenderableType] = [line for h in held for line in outlooks.held_back(h).lines(where=f"{feed}: ")]
    beside += [line for run in runs if run.outcome.landed for line in _lost(run.outcome.landed, f"{feed}: ")]
    beside += _not_committed(runs[-1], f"{feed}: ")
    return fleet_view.Line(feed, errors, _all_landed(runs), last.table, bool(held), tuple(beside))


def _asked_of_each(
    session: Session, names: Sequence[str], typed: WorkOptions
) -> tuple[dict[str, RequestedWork], dict[str, SluiceError]]:
    """The requests of each feed, and what is wrong for others. Raises the first error if it is wrong for all."""
    asked, wrong = dict[str, RequestedWork](), dict[str, SluiceError]()
    for name in names:
        try:
            asked[name] = typed.requests(session, session.files.feed(name))
        except SluiceError as error:
            wrong[name] = error
    if not asked:
        raise next(iter(wrong.values()))
    return asked, wrong


def _together(session: Session, asked: Mapping[str, Request]) -> list[Ran]:
    """One run over these feeds."""
    first = session.files.feed(next(iter(asked)))
    compiled = _compile_locally(session, first.name)
    watches, heard = dict[str, Stopwatch](), dict[str, met.MetRecorder]()
    feeds = [session.files.feed(name) for name in asked]
    catching_up = feeds if all(r.kind is RequestKind.CATCH_UP for r in asked.values()) else ()
    with session.terminal.progress() as meter, session.shared_edges(feeds) as open_ports:
        session.begin_spark(first, catching_up, open_ports)
        with fast_imports():
            from sluice.assets.execution import run_feeds

        together = fleet_view.Together(meter, len(asked))

        def report_of(name: str) -> Reporter:
            heard[name] = met.MetRecorder(together.of(name))
            return watches.setdefault(name, Stopwatch(heard[name], {cache.STAGE: compiled} if compiled else {}, "wait"))

        outcomes = run_feeds(session.project, asked, report_of, open_ports)
    return [
        Ran(n, asked[n], o, watches[n].stopped(), session.files.feed(n).contract, heard[n].met)
        for n, o in outcomes.items()
    ]


def _all_landed(ran: Sequence[Ran]) -> str:
    return _landed_text(ran[0]) if len(ran) == 1 else _sum_text(ran)


def _sum_text(ran: Sequence[Ran]) -> str:
    """What several runs of a feed landed."""
    landed = sum(_totals(r)[0].landed for r in ran)
    return f"{many(landed, 'record')} in {many(len(ran), 'run')}"


def _profile(ran: Ran, wanted: bool) -> list[RenderableType]:
    return run_profile.view(ran.batches, ran.stages) if wanted else []


def _profile_document(ran: Ran, wanted: bool) -> dict[str, Any]:
    return {"profile": run_profile.document(ran.batches)} if wanted else {}


def _skip(asked: WorkOptions, to: str | None, reason: str | None) -> Skip | None:
    if to is None:
        if reason is not None:
            raise UsageError("--reason without --skip-to", remedy="leave it out: only --skip-to takes a reason")
        return None
    if asked.offsets or asked.windows:
        raise UsageError(
            "--skip-to together with windows or offsets", remedy="skip first (with --only, if need be), then land those"
        )
    from sluice.assets.runs.run_config import skip_of

    return skip_of(to, reason or "")


def _run_one(
    session: Session, feed: Feed, requested: RequestedWork, skip: Skip | None, profile: bool, *, in_lines: bool
) -> int:
    """Run each request of one feed in order; the worst exit code of each request's last run.

    Several requests, and those that the feed's limits cut into several runs, have a line each, as with `in_lines`.
    A wrong request ends them all: the others are wrong, too.
    """
    requests, limited = requested.requests, feed.limits.records or feed.limits.bytes
    brief = len(requests) > 1 or in_lines or bool(limited and requests[0].kind is not RequestKind.CATCH_UP)
    runs, documents, codes = list[Ran](), list[dict[str, Any]](), list[int]()
    began = time.monotonic()
    if brief:
        session.terminal.show(heading(f"Run of {feed.name}", many(len(requests), "request")))
    for number, request in enumerate(requests, 1):
        ran = None
        while ran is None or (brief and _goes_on(ran)):
            ran = execute(session, feed.name, request, skip, spent=_so_far())
            stands = stands_after(session, feed, ran)
            runs.append(ran)
            documents.append(document(ran, stands) | _profile_document(ran, profile))
            if brief:
                rest = _rest(number, len(requests), time.monotonic() - began, ran)
                session.terminal.show(*_brief(ran, stands), *_left_behind(ran), *_profile(ran, profile), *rest)
            else:
                verdict = [window_options.verdict(stands)] if stands else []
                session.terminal.show(*view(ran), *verdict, *_profile(ran, profile))
        codes.append(ran.outcome.exit_code)
        if ran.outcome.error:
            session.terminal.fail(ran.outcome.error)
        if isinstance(ran.outcome.error, UsageError):
            break
    session.terminal.show(*(_all_of(feed.name, runs) if brief else ()))
    session.terminal.show(*window_options.open_window_lines(feed.name, requested.open_windows))
    entry = _make_feed_document(feed.name, documents, requested.open_windows)
    took = sum(sum(ran.stages.values()) for ran in runs)
    session.terminal.print_document(_make_document([entry], [_line(feed.name, runs)], took))
    return max(codes)


def _make_document(
    feeds: Sequence[Mapping[str, Any]],
    lines: Sequence[fleet_view.Line],
    took: float,
    broken: Sequence[SluiceError] = (),
) -> dict[str, Any]:
    """The JSON document of a run, whether of one feed or many."""
    return {
        "feeds": feeds,
        "failed": fleet_view.failed(lines),
        "left": fleet_view.left(lines),
        "broken": [e.fields() for e in broken],
        "took": round(took, 3),
    }


def _make_feed_document(
    feed: str, runs: Sequence[Mapping[str, Any]], open_windows: OpenWindows | None, error: SluiceError | None = None
) -> dict[str, Any]:
    """One feed of the document; `error`: of a feed that could not run."""
    fields = error.fields() if error else {}
    return {"feed": feed, "runs": runs} | window_options.open_windows_document(open_windows) | fields


def _goes_on(ran: Ran) -> bool:
    """Whether only the feed's limits ended the run, and it got somewhere."""
    landed, error = ran.outcome.landed, ran.outcome.error
    ours = error is None or isinstance(error, WindowIncomplete)
    return ours and landed is not None and landed.left > 0 and any(b.number is not None for b in landed.batches)


def _rest(number: int, of: int, spent: float, ran: Ran) -> list[RenderableType]:
    """Describes the remaining offsets and an estimate of the time they take."""
    if _goes_on(ran):
        left, now = ran.outcome.landed.left if ran.outcome.landed else 0, _totals(ran)[0].total
        eta = seconds(left / now * sum(ran.stages.values())) if now else "an unknown time"
        return [Text(f"  the limits end a run here: {many(left, 'offset')} are left, about {eta}", style="dim")]
    if number < of:
        return [Text(f"  {number} of {of}, the rest in about {seconds(spent / number * (of - number))}", style="dim")]
    return []


def stands_after(session: Session, feed: Feed, ran: Ran) -> WindowStanding | None:
    """The state of the window that a run was for; None for other runs, and if there is no such window."""
    from sluice.pipelines.status.strip import OutsideFacts, standing

    if ran.asked.window is None or ran.asked.until is not None or isinstance(ran.outcome.error, UsageError):
        return None
    refusals = ran.outcome.landed.refusals if ran.outcome.landed else ()
    held = {r.tp: r.error.start for r in refusals if isinstance(r.error, WindowHeld)}
    state, now = window_options.ledger_state(session, feed)
    ends = {k: at for k in state.current.values() if (at := held.get(k.tp)) is not None}
    return standing(state, feed.window, ran.asked.window, now, OutsideFacts(last_stable_offsets=ends))


@dataclass(frozen=True)
class Ran:
    """One run: the request, the outcome, and the seconds that each stage took, in order.

    `contract` is the contract that its rows were checked against; `met` are other runs' batches that it found.
    """

    feed: str
    asked: Request
    outcome: RunResult
    stages: Mapping[str, float]
    contract: Contract | None = None
    met: tuple[Met, ...] = ()

    @property
    def batches(self) -> tuple[BatchResult, ...]:
        return self.outcome.landed.batches if self.outcome.landed else ()


def _so_far() -> float:
    """The seconds that this command has already taken, for which its first run has waited."""
    return 0.0 if _EXECUTION in sys.modules else process.age() or 0.0


def execute(session: Session, feed: str, asked: Request, skip: Skip | None = None, spent: float = 0.0) -> Ran:
    """One run of the feed's job, with a meter on a terminal; `spent` are seconds that it has waited for already."""
    before = {"start": spent, cache.STAGE: _compile_locally(session, feed)}
    with session.terminal.progress() as meter:
        heard = met.MetRecorder(meter)
        watch = Stopwatch(heard, {stage: s for stage, s in before.items() if s})
        found = session.feed(feed)
        session.begin_spark(found, [found] if asked == Request(RequestKind.CATCH_UP) and skip is None else ())
        with fast_imports():
            from sluice.assets.execution import run_feeds

        done = run_feeds(session.project, {feed: asked}, lambda _: watch, session.open_ports, skip)
    return Ran(feed, asked, done[feed], watch.stopped(), session.feed(feed).contract, heard.met)


def _compile_locally(session: Session, feed: str) -> float:
    """The seconds that it took to make, on the machine where tasks run, what is made once: loops, Spark's classes."""
    from sluice.resources.spark.executors import is_local

    extras.require("dagster", "pyspark")  # said before minutes of compiling
    return session.compile() + session.lay_out_classes() if is_local(session.feed(feed).spark) else 0.0


_EXECUTION = "sluice.assets.execution"
"""Loaded by the first run of a process."""


class Stopwatch:
    """Passes progress on, and measures each stage, from one that began with it; `spent` is the time before."""

    def __init__(self, report: Reporter, spent: Mapping[str, float], first: str = "start Dagster") -> None:
        self._report, self._stage, self._since = report, first, time.monotonic()
        self._spent = dict(spent)

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._close(progress.stage)
        self._report(progress)

    def stopped(self) -> Mapping[str, float]:
        """Seconds by stage."""
        self._close("")
        return self._spent

    def _close(self, following: str) -> None:
        now = time.monotonic()
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = following, now


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What batches landed from one partition."""

    key: Key
    ranges: tuple[Range, ...]
    counts: Counts
    files: int
    bytes: int


def by_partition(batches: Iterable[BatchResult]) -> Iterator[PartitionResult]:
    receipts: dict[Key, list[Receipt]] = {}
    for r in (r for batch in batches for r in batch.receipts):
        receipts.setdefault(r.slice.key, []).append(r)
    for key, mine in sorted(receipts.items()):
        parts = [p for r in mine for p in r.parts]
        counts = sum((r.counts for r in mine), Counts())
        ranges = union(r.slice.range for r in mine)
        yield PartitionResult(key, ranges, counts, len(parts), sum(p.bytes for p in parts))


# -- for people


_BATCHES_SHOWN = 3
"""So many batches have a table each; more have one together."""


def view(ran: Ran) -> list[RenderableType]:
    landed = ran.outcome.landed
    out: list[RenderableType] = [heading(f"Run of {ran.feed}", str(ran.asked)), *met.view(ran.met)]
    apart = [[b] for b in ran.batches] if len(ran.batches) <= _BATCHES_SHOWN else [ran.batches]
    out += map(batch_view, apart)
    if landed is not None:
        out += _beside(ran, landed)
        if not ran.batches and not landed.refusals:
            out.append(good("nothing that is stable is owed" if landed.held else "nothing is owed"))
        out += [line for held in landed.held for line in outlooks.held_back(held).lines()]
    if told := [*(_summary(ran) if ran.batches else _commit_alone(ran))]:
        out.append(facts(*told))
    if ran.outcome.committed is not None:
        out += [warn(_put_by_others(m)) for m in ran.outcome.committed.put_by_others]
    return [*out, *_left_behind(ran)]


def _commit_alone(ran: Ran) -> Iterator[tuple[str, str]]:
    """Describes a commit of rows that earlier runs had landed."""
    if ran.outcome.committed is not None and str(ran.outcome.committed.status) == "committed":
        yield from _commit_facts(ran.outcome.committed)


def _left_behind(ran: Ran) -> list[RenderableType]:
    """Why what landed is not committed, if the run's own error is another one; why it is not in the feed's table."""
    return [*_not_committed(ran), *(fleet_view.table_behind(ran.outcome.table) if ran.outcome.table else ())]


def _not_committed(ran: Ran, of: str = "") -> list[RenderableType]:
    error = ran.outcome.uncommitted
    return [bad(f"{of}what landed is not committed: {error.message}"), remedy(error)] if error else []


def _brief(ran: Ran, stands: WindowStanding | None) -> list[RenderableType]:
    """The window's state, and what this run landed of it."""
    landed = _landed_text(ran)
    line = window_options.verdict(stands) if stands else _request_line(ran)
    line.append(f"  {landed}, {seconds(sum(ran.stages.values()))}", style="dim")
    return [*met.view(ran.met), line]


def _landed_text(ran: Ran) -> str:
    counts, files, volume = _totals(ran)
    landed = f"{many(counts.landed, 'record')} in {many(files, 'file')}, {volume}" if ran.batches else "nothing landed"
    if saved := _adopted_text(ran):
        landed += f" ({saved})"
    if counts.quarantined:
        landed += f", {count(counts.quarantined)} in quarantine"
    return landed


def _all_of(feed: str, runs: Sequence[Ran]) -> list[RenderableType]:
    """The sum of several runs."""
    counts = sum((_totals(ran)[0] for ran in runs), Counts())
    told = [("landed", f"{many(counts.landed, 'record')} in {many(len(runs), 'run')}")]
    if counts.quarantined:
        told.append(("quarantined", _quarantined_text(feed, counts)))
    return [facts(*told)]


def _request_line(ran: Ran) -> Text:
    return bad(str(ran.asked)) if ran.outcome.error else good(str(ran.asked))


def _adopted_text(ran: Ran) -> str:
    """Describes rows that a rerun did not read again; empty if there are none."""
    adopted = [r for b in ran.batches for r in b.receipts if r.adopted]
    spans = sum(r.slice.span for r in adopted), sum(b.plan.span for b in ran.batches)
    slices = f"{len(adopted)} of {many(sum(len(b.plan.slices) for b in ran.batches), 'slice')}"
    return f"{slices} adopted: {spans[0]:,} of {spans[1]:,} offsets were not read again" if adopted else ""


def _totals(ran: Ran) -> tuple[Counts, int, str]:
    counts = sum((b.counts for b in ran.batches), Counts())
    files = count_files(r for b in ran.batches for r in b.receipts)
    return counts, files, size(sum(b.bytes for b in ran.batches))


def batch_view(batches: Sequence[BatchResult]) -> RenderableType:
    """Returns the landed rows of the batches, by partition."""
    found = list(by_partition(batches))
    known = label_partitions(p.key for p in found)
    columns = {
        "partition": [known[p.key] for p in found],
        "range": [" ".join(map(str, p.ranges)) for p in found],
        "landed": [count(p.counts.landed) for p in found],
        "invisible": [count(p.counts.invisible) for p in found],
        "quarantined": [count(p.counts.quarantined) for p in found],
        "files": [str(p.files) for p in found],
        "size": [size(p.bytes) for p in found],
    }
    if not any(b.counts.quarantined for b in batches):
        del columns["quarantined"]
    rows = limit_rows(list(zip(*columns.values(), strict=True)))
    return table(list(columns), rows, right="landed invisible quarantined files size")


def _beside(ran: Ran, landed: Landed) -> list[RenderableType]:
    from sluice.pipelines.batch.result import by_message, first_of

    alike = by_message(landed.failures).items()
    return [
        *([warn(landed.start_not_used)] if landed.start_not_used else []),
        *(bad(f"{first_of(of)} stay{'' if of[1:] else 's'} owed: {message}") for message, of in alike),
        *_lost(landed),
        *(warn(f"{s.key} {s.range} is skipped; {_after_all(ran.feed, s)}") for s in landed.skipped),
        *(bad(refusal.error.message) for refusal in landed.refusals),
        *(warn(line) for line in _drifting(ran)),
        *(warn(line) for line in _broken(ran)),
        *(warn(line) for line in notable(run_profile.traffic(ran.batches).brokers)),
        *([warn(landed.overridden)] if landed.overridden else []),
    ]


def _lost(landed: Landed, of: str = "") -> list[Text]:
    return [warn(f"{of}{loss.key} {loss.range} is lost and accepted as such") for loss in landed.losses]


_DRIFT_SAID = 5
_BROKEN_SAID = 10


def _broken(ran: Ran) -> Iterator[str]:
    """The expectations of the contract that did not hold, a line for each."""
    found = [o for o in _outcomes(ran) if not o.passed]
    for o in found[:_BROKEN_SAID]:
        what = f"broken by {count(o.unexpected)} of {many(o.checked, 'row')}" if o.checked else f"is {o.observed}"
        follows = "in quarantine" if o.quarantines else str(o.severity)
        first = f", the first at {o.first[0]}" if o.first else ""
        yield f"{text(o.expectation)}: {what}{first} ({follows})"
    if found[_BROKEN_SAID:]:
        yield f"and {many(len(found) - _BROKEN_SAID, 'further expectation')} that did not hold"


def _outcomes(ran: Ran) -> list[ExpectationOutcome]:
    receipts = [r for b in ran.batches for r in b.receipts]
    return contract_results(ran.contract, receipts, [r for b in ran.batches for r in b.results]) if ran.contract else []


def _drifting(ran: Ran) -> Iterator[str]:
    """How records differ from the schema, a line for each field."""
    found = [d for d in _drift(ran) if d.kind is not DriftKind.MISSING]
    yield from (describe_drift(d) for d in found[:_DRIFT_SAID])
    if found[_DRIFT_SAID:]:
        yield f"and {many(len(found) - _DRIFT_SAID, 'further field')} that differ from the schema"


def _drift(ran: Ran) -> tuple[Drift, ...]:
    return drift_of([r for b in ran.batches for r in b.receipts])


def _after_all(feed: str, passed: KeyRange) -> str:
    """The command that lands a skipped range after all."""
    return f"to land it after all: sluice run {feed} --offsets {passed.key}:{passed.range.start}-{passed.range.end}"


def _summary(ran: Ran) -> Iterator[tuple[str, str]]:
    counts, files, volume = _totals(ran)
    speed = rate(counts.total, ran.stages.get("land", 0.0), "offsets")
    yield "landed", f"{many(counts.landed, 'record')} in {many(files, 'file')}, {volume} ({speed})"
    if counts.quarantined:
        yield "quarantined", _quarantined_text(ran.feed, counts)
    if saved := _adopted_text(ran):
        yield "adopted", saved
    if replaced := sum(len(b.plan.replaces) for b in ran.batches if b.number is not None):
        yield "replaced", many(replaced, "file")
    yield "published", _published_text([b.batch for b in ran.batches if b.number is not None])
    if ran.outcome.committed is not None:
        yield from _commit_facts(ran.outcome.committed)
    stages = ", ".join(f"{name} {spent:.1f}" for name, spent in ran.stages.items() if spent >= 0.05)
    yield "took", f"{seconds(sum(ran.stages.values()))} ({stages})"
    yield "Dagster run", ran.outcome.run_id


def _published_text(batches: Sequence[int]) -> str:
    if len(batches) > _BATCHES_SHOWN:
        return f"{many(len(batches), 'batch', 'batches')}, from {batches[0]} to {batches[-1]}"
    return ", ".join(f"batch {b}" for b in batches) or "nothing"


def _commit_facts(result: CommitResult) -> Iterator[tuple[str, str]]:
    yield "committed", _committed_text(result)
    if result.left_out:
        named = ", ".join(map(str, result.left_out[:6])) + (" …" if len(result.left_out) > 6 else "")
        yield "not committed", f"{named}: the log is another one by now"
    if result.waiting:
        named = ", ".join(f"{m.key} stays at {count(m.before or 0)}" for m in result.waiting[:6])
        more = " …" if len(result.waiting) > 6 else ""
        yield "not committed", f"{named}{more}: entries that the ledger lost put it there; landing reaches it again"
    if result.letters:
        yield "dead letters", f"{count(result.letters)} to {result.letters_to}"


def _quarantined_text(feed: str, counts: Counts) -> str:
    """How much went into quarantine, and the command that shows it."""
    share = format_percent(counts.quarantined / max(counts.landed + counts.quarantined, 1))
    return f"{many(counts.quarantined, 'record')} ({share}): sluice quarantine list {feed}"


def _put_by_others(m: Moved) -> str:
    expected = "none" if m.before is None else count(m.before)
    return (
        f"{m.key}: somebody moved the group's committed offset to {count(m.after)}, ahead of what had landed then (the"
        f" ledger expects {expected}); landing has reached it by now. Nothing is passed over, and the next commit goes"
        " on from there; who moved it may do so again"
    )


def _committed_text(result: CommitResult) -> str:
    match str(result.status):
        case "disabled":
            return "not to Kafka (commit: none): the ledger alone says how far the feed is"
        case "unchanged":
            return "the frontier, as before"
    moved = [m for m in result.offsets if m.before != m.after]
    if not moved:
        return "the frontier, as before"
    ends = ", ".join(f"{m.key} → {count(m.after)}" for m in moved[:6])
    return ends + (f" … {len(moved) - 6} more" if len(moved) > 6 else "")


# -- for programs


def document(ran: Ran, stands: WindowStanding | None = None) -> dict[str, Any]:
    landed, committed, error = ran.outcome.landed, ran.outcome.committed, ran.outcome.error
    return {
        "request": str(ran.asked),
        **({"window": window_options.build_document(stands)} if stands else {}),
        "run": ran.outcome.run_id,
        "seconds": {name: round(spent, 3) for name, spent in ran.stages.items()},
        "batches": [_batch(b) for b in ran.batches],
        "other_batches": met.document(ran.met),
        "drift": [asdict(d) for d in _drift(ran)],
        "contract": [_outcome(o) for o in _outcomes(ran)],
        "brokers_noted": notable(run_profile.traffic(ran.batches).brokers),
        "refusals": [r.error.fields() for r in landed.refusals] if landed else [],
        "losses": [_range(loss.key, loss.range) for loss in landed.losses] if landed else [],
        "skipped": [_range(passed.key, passed.range) for passed in landed.skipped] if landed else [],
        "held_back": [h.document() for h in landed.held] if landed else [],
        "left": landed.left if landed else 0,
        "start_not_used": landed.start_not_used if landed else "",
        "frontiers": [_place(k) | {"offset": o} for k, o in sorted(landed.frontiers.items())] if landed else [],
        "committed": _commit_document(committed) if committed else None,
        "uncommitted": ran.outcome.uncommitted.fields() if ran.outcome.uncommitted else None,
        "table": ran.outcome.table.fields() if ran.outcome.table else None,
        **(error.fields() if error else {}),
    }


def _outcome(o: ExpectationOutcome) -> dict[str, Any]:
    said = {name: getattr(o, name) for name in ("passed", "observed", "checked", "unexpected", "first")}
    return {"expectation": text(o.expectation), "severity": str(o.severity)} | said


def _batch(batch: BatchResult) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "published": batch.number,
        "plan": batch.plan.hash,
        "request": str(batch.plan.request),
        "adopted_slices": batch.adopted,
        "replaced_files": len(batch.plan.replaces) if batch.number is not None else 0,
        "bytes": batch.bytes,
        **asdict(batch.counts),
        "partitions": [
            _place(p.key)
            | {"ranges": [list(r) for r in p.ranges], "files": p.files, "bytes": p.bytes}
            | asdict(p.counts)
            for p in by_partition([batch])
        ],
        "failures": [
            _range(f.slice.key, f.slice.range) | {"error": f.error, "message": f.message, "remedy": f.remedy}
            for f in batch.failures
        ],
    }


def _commit_document(result: CommitResult) -> dict[str, Any]:
    return {
        "status": str(result.status),
        "mark": result.mark,
        "letters": result.letters,
        "letters_to": result.letters_to or None,
        "offsets": [_place(m.key) | {"before": m.before, "after": m.after} for m in result.offsets],
        "left_out": [_place(k) for k in result.left_out],
        "put_by_others": [_place(m.key) | {"expected": m.before, "offset": m.after} for m in result.put_by_others],
    }


def _place(key: Key) -> dict[str, Any]:
    return {"topic": key.topic, "partition": key.partition}


def _range(key: Key, r: Range) -> dict[str, Any]:
    return _place(key) | {"start": r.start, "end": r.end}
