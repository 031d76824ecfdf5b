"""`sluice run`: land what is owed and commit it, through Dagster, and say what became of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli import windows
from sluice.cli.plan import Offsets, Only, requests, shortened
from sluice.cli.session import FeedName, Session, command
from sluice.cli.terminal import bad, count, facts, good, heading, many, rate, seconds, size, table, warn
from sluice.cli.windows import From, To, Window
from sluice.pipelines.errors import UsageError, WindowHeld
from sluice.pipelines.ports import Progress, Reporter
from sluice.pipelines.ranges import Range, union
from sluice.pipelines.values import Counts, Key, Receipt, Request

if TYPE_CHECKING:
    from sluice.assets.execution import RunOutcome
    from sluice.pipelines.batch import BatchResult, Landed
    from sluice.pipelines.commit import CommitResult
    from sluice.pipelines.feed import Feed
    from sluice.pipelines.standing import WindowStanding


def register(app: typer.Typer) -> None:
    command(app)(run)


def run(
    session: Session,
    feed: FeedName,
    offsets: Offsets = None,
    only: Only = None,
    window: Window = None,
    start: From = None,
    end: To = None,
) -> int:
    """Land what is owed, publish it, commit its offsets.

    Without options it catches up. It executes the feed's Dagster job on the project's instance, so the UI shows it;
    of several windows each is a run of its own, and one that fails does not keep the others from theirs.
    A run that dies is finished by the next one: nothing is read twice, nothing twice visible.

    $ sluice run orders
    $ sluice run orders --window 2026-11-20T14
    $ sluice run orders --from 2026-11-20 --to 2026-11-21
    $ sluice run orders --only orders:3
    $ sluice run orders --offsets orders:0:100-200 --offsets orders:1:0-50
    """
    found = session.feed(feed)
    asked = requests(session, found, offsets, only, (window, start, end))
    if start or len(asked) > 1:
        return _each(session, found, asked)
    ran = execute(session, feed, asked[0])
    stands = stands_after(session, found, ran)
    session.terminal.show(*view(ran), *([windows.verdict(stands)] if stands else []))
    if ran.outcome.error:
        session.terminal.fail(ran.outcome.error)
    session.terminal.document(document(ran, stands))
    return ran.outcome.exit_code


def _each(session: Session, feed: Feed, asked: Sequence[Request]) -> int:
    """One run for each window, in order; the worst exit code. A request that is wrong ends it: so are the others."""
    done: list[tuple[Ran, WindowStanding | None]] = []
    session.terminal.show(heading(f"Run of {feed.name}", many(len(asked), "window")))
    for each in asked:
        ran = execute(session, feed.name, each)
        stands = stands_after(session, feed, ran)
        done.append((ran, stands))
        session.terminal.show(*_brief(ran, stands))
        if ran.outcome.error:
            session.terminal.fail(ran.outcome.error)
        if isinstance(ran.outcome.error, UsageError):
            break
    session.terminal.document({"feed": feed.name, "runs": [document(ran, stands) for ran, stands in done]})
    return max(ran.outcome.exit_code for ran, _ in done)


def stands_after(session: Session, feed: Feed, ran: Ran) -> WindowStanding | None:
    """How the window that a run was for stands now; None for other runs, and where there is no such window."""
    from sluice.pipelines.strip import Seen, standing

    if ran.asked.window is None or isinstance(ran.outcome.error, UsageError):
        return None
    refusals = ran.outcome.landed.refusals if ran.outcome.landed else ()
    held = {r.tp: r.error.start for r in refusals if isinstance(r.error, WindowHeld)}
    state, now = windows.ledger_state(session, feed)
    ends = {k: at for k in state.current.values() if (at := held.get(k.tp)) is not None}
    return standing(state, feed.window, ran.asked.window, now, Seen(stable_ends=ends))


@dataclass(frozen=True)
class Ran:
    """One run: what was asked, what came of it, and the seconds that each stage took, in order.

    `cold` says that it had to load and start Spark first.
    """

    feed: str
    asked: Request
    outcome: RunOutcome
    stages: Mapping[str, float]
    cold: bool

    @property
    def batches(self) -> tuple[BatchResult, ...]:
        return self.outcome.landed.batches if self.outcome.landed else ()


def execute(session: Session, feed: str, asked: Request) -> Ran:
    """One run of the feed's job, with a meter on a terminal."""
    from sluice.assets.execution import run_feed

    cold = "pyspark" not in sys.modules
    with session.terminal.progress() as meter:
        watch = Stopwatch(meter)
        outcome = run_feed(session.project, feed, asked, watch, session.open_edges)
    return Ran(feed, asked, outcome, watch.stopped(), cold)


class Stopwatch:
    """Passes progress on and keeps how long each stage took."""

    def __init__(self, report: Reporter) -> None:
        self._report, self._stage, self._since = report, "start", time.monotonic()
        self._spent: dict[str, float] = {}

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._close(progress.stage)
        self._report(progress)

    def stopped(self) -> Mapping[str, float]:
        """Seconds by stage; what came after the last one named is "finish"."""
        self._close("finish")
        return self._spent

    def _close(self, following: str) -> None:
        now = time.monotonic()
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = following, now


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What one batch landed of one partition."""

    key: Key
    ranges: tuple[Range, ...]
    counts: Counts
    files: int
    bytes: int


def by_partition(batch: BatchResult) -> Iterator[PartitionResult]:
    receipts: dict[Key, list[Receipt]] = {}
    for r in batch.receipts:
        receipts.setdefault(r.slice.key, []).append(r)
    for key, mine in sorted(receipts.items()):
        parts = [p for r in mine for p in r.parts]
        counts = sum((r.counts for r in mine), Counts())
        ranges = union(r.slice.range for r in mine)
        yield PartitionResult(key, ranges, counts, len(parts), sum(p.bytes for p in parts))


# -- for people


def view(ran: Ran) -> list[RenderableType]:
    landed = ran.outcome.landed
    out: list[RenderableType] = [heading(f"Run of {ran.feed}", str(ran.asked))]
    for batch in ran.batches:
        out += batch_view(batch)
    if landed is not None:
        out += _beside(landed)
        out.append(facts(*_summary(ran)) if ran.batches else good("nothing is owed"))
    return out


def _brief(ran: Ran, stands: WindowStanding | None) -> list[RenderableType]:
    """How the window stands, and what this run landed of it."""
    counts, files, volume = _totals(ran)
    landed = f"{many(counts.landed, 'record')} in {many(files, 'file')}, {volume}" if ran.batches else "nothing landed"
    line = windows.verdict(stands) if stands else Text(str(ran.asked))
    return [line.append(f"  {landed}, {seconds(sum(ran.stages.values()))}", style="dim")]


def _totals(ran: Ran) -> tuple[Counts, int, str]:
    counts = sum((b.counts for b in ran.batches), Counts())
    files = sum(len(r.parts) for b in ran.batches for r in b.receipts)
    return counts, files, size(sum(b.bytes for b in ran.batches))


def batch_view(batch: BatchResult) -> list[RenderableType]:
    found = list(by_partition(batch))
    columns = {
        "partition": [str(p.key) for p in found],
        "range": [" ".join(map(str, p.ranges)) for p in found],
        "landed": [count(p.counts.landed) for p in found],
        "invisible": [count(p.counts.invisible) for p in found],
        "quarantined": [count(p.counts.quarantined) for p in found],
        "files": [str(p.files) for p in found],
        "size": [size(p.bytes) for p in found],
    }
    if not batch.counts.quarantined:
        del columns["quarantined"]
    rows = shortened(list(zip(*columns.values(), strict=True)), len(columns))
    out: list[RenderableType] = [table(list(columns), rows, right="landed invisible quarantined files size")]
    return out + [bad(f"{f.slice} stays owed: {f.message}") for f in batch.failures]


def _beside(landed: Landed) -> list[RenderableType]:
    return [
        *(warn(f"{loss.key} {loss.range} is lost and accepted as such") for loss in landed.losses),
        *(bad(refusal.error.message) for refusal in landed.refusals),
    ]


def _summary(ran: Ran) -> Iterator[tuple[str, str]]:
    counts, files, volume = _totals(ran)
    speed = rate(counts.total, ran.stages.get("land", 0.0), "offsets") + (", with Spark's start" if ran.cold else "")
    yield "landed", f"{many(counts.landed, 'record')} in {many(files, 'file')}, {volume} ({speed})"
    if adopted := sum(b.adopted for b in ran.batches):
        yield "adopted", f"{many(adopted, 'slice')} that an earlier attempt had finished"
    yield "published", ", ".join(f"batch {b.batch}" for b in ran.batches if b.number is not None) or "nothing"
    if ran.outcome.committed is not None:
        yield "committed", _committed_text(ran.outcome.committed)
    stages = ", ".join(f"{name} {spent:.1f}" for name, spent in ran.stages.items() if spent >= 0.05)
    yield "took", f"{seconds(sum(ran.stages.values()))} ({stages})"
    yield "Dagster run", ran.outcome.run_id


def _committed_text(result: CommitResult) -> str:
    match str(result.status):
        case "disabled":
            return "not to Kafka (commit: none): the ledger alone says how far the feed is"
        case "unchanged":
            return "the frontier, as before"
    moved = [m for m in result.offsets if m.before != m.after]
    ends = ", ".join(f"{m.key} → {count(m.after)}" for m in moved[:6])
    return ends + (f" … {len(moved) - 6} more" if len(moved) > 6 else "")


# -- for programs


def document(ran: Ran, stands: WindowStanding | None = None) -> dict[str, Any]:
    landed, committed, error = ran.outcome.landed, ran.outcome.committed, ran.outcome.error
    return {
        "feed": ran.feed,
        "request": str(ran.asked),
        **({"window": windows.document(stands)} if stands else {}),
        "run": ran.outcome.run_id,
        "seconds": {name: round(spent, 3) for name, spent in ran.stages.items()},
        "batches": [_batch(b) for b in ran.batches],
        "refusals": [r.error.fields() for r in landed.refusals] if landed else [],
        "losses": [_range(loss.key, loss.range) for loss in landed.losses] if landed else [],
        "frontiers": [_place(k) | {"offset": o} for k, o in sorted(landed.frontiers.items())] if landed else [],
        "committed": _committed(committed) if committed else None,
        **(error.fields() if error else {}),
    }


def _batch(batch: BatchResult) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "published": batch.number,
        "plan": batch.plan.hash,
        "request": str(batch.plan.request),
        "adopted_slices": batch.adopted,
        "bytes": batch.bytes,
        **asdict(batch.counts),
        "partitions": [
            _place(p.key)
            | {"ranges": [list(r) for r in p.ranges], "files": p.files, "bytes": p.bytes}
            | asdict(p.counts)
            for p in by_partition(batch)
        ],
        "failures": [
            _range(f.slice.key, f.slice.range) | {"error": f.error, "message": f.message, "remedy": f.remedy}
            for f in batch.failures
        ],
    }


def _committed(result: CommitResult) -> dict[str, Any]:
    return {
        "status": str(result.status),
        "mark": result.mark,
        "offsets": [_place(m.key) | {"before": m.before, "after": m.after} for m in result.offsets],
    }


def _place(key: Key) -> dict[str, Any]:
    return {"topic": key.topic, "partition": key.partition}


def _range(key: Key, r: Range) -> dict[str, Any]:
    return _place(key) | {"start": r.start, "end": r.end}
