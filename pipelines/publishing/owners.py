"""The owners of live batches: whether their runs are alive, and the remedies.

All code that meets another run's batch (run, plan, status, repair, replay, compaction, expiry, accepting) calls
`judge_batches` and reports by `report_met` and `build_busy_error`: the run is alive, or dead with the evidence, or not
known yet. For a batch whose run is not alive, the report always has the commands to continue. A batch is finished or
given up only if its run is known to be dead; a suspicion is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sluice.pipelines.errors import PlanBusy
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import Batch, Ledger
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Fate, Life, Met, Owner, Progress, Reporter, Verdict
from sluice.pipelines.ports import Lake, Liveness
from sluice.pipelines.publishing.publish import abandon
from sluice.pipelines.util.units import show_window

AGAIN = {RequestKind.COMPACT: "sluice compact {feed}", RequestKind.REPLAY: "sluice quarantine replay {feed}"}
"""The commands for the requests that write parts again."""
NEW = Verdict(Life.ALIVE, "it has just begun")
"""The verdict for an owner that appeared after the owners were judged."""
AS_THEY_WERE = "the run that wrote these parts again died; they are as they were"


def judge_batches(liveness: Liveness, batches: Iterable[Batch], *, watch: bool = True) -> dict[int, Verdict]:
    """Judge whether each batch's run is alive. With `watch`, wait until that is known, for all suspects together."""
    all_batches = list(batches)
    verdicts = liveness.judge(dict.fromkeys(b.owner for b in all_batches), watch=watch) if all_batches else {}
    return {b.id: verdicts[b.owner.token] for b in all_batches}


def report_met(feed: str, batch: Batch, verdict: Verdict, fate: Fate = Fate.LEFT, why: str = "") -> Met:
    """Returns the report of another run's batch, with the remedies if it is left and its run is not alive."""
    is_stuck = fate is Fate.LEFT and verdict.life is not Life.ALIVE
    return Met(batch.id, batch.request, batch.owner, verdict, fate, why, list_commands(feed, batch) if is_stuck else ())


def build_busy_error(feed: str, batch: Batch, s: OffsetRange, verdict: Verdict) -> PlanBusy:
    """Returns the error for ranges that another run's live batch reserves, with its state and the remedy."""
    return PlanBusy(
        f"{report_met(feed, batch, verdict)}; it reserves {s}",
        remedy=find_remedy(feed, batch, verdict),
        topic=s.topic,
        partition=s.partition,
        start=s.start,
        end=s.end,
    )


def find_remedy(feed: str, batch: Batch, verdict: Verdict) -> str:
    """Returns the remedy for a conflicting live batch."""
    if verdict.life is Life.ALIVE:
        return _wait(batch.owner)
    either = "; or ".join(f"`{command}` {what}" for command, what in list_commands(feed, batch))
    if verdict.life is Life.DEAD:
        return either
    return f"`sluice repair {feed} --dry-run` watches it and says; when its run is dead, {either}"


def _wait(owner: Owner) -> str:
    wait = f"wait for it to end, or cancel it where it runs ({owner.host})"
    return f"{wait}; if Dagster only thinks so: sluice unstick --run {owner.run[:8]} --force" if owner.run else wait


def list_commands(feed: str, batch: Batch) -> tuple[tuple[str, str], ...]:
    """Returns the commands that finish a dead run's batch or give it up, each with its effect."""
    give_up = (f"sluice repair {feed} --abandon {batch.id}", "gives it up")
    if again := AGAIN.get(batch.request.kind):
        return (again.format(feed=feed), "gives it up and begins again"), give_up
    return (format_request(feed, batch.request), "finishes it, and reads only the missing records"), give_up


def format_request(feed: str, asked: Request) -> str:
    """The command that makes the same request."""
    words = ["sluice run", feed]
    match asked.kind:
        case RequestKind.OFFSETS:
            words += [f"--offsets {r.topic}:{r.partition}:{r.start}-{r.end}" for r in asked.ranges]
        case RequestKind.WINDOW if asked.until is not None:
            words.append(f"--from {show_window(asked.window or 0)} --to {show_window(asked.until)}")
        case RequestKind.WINDOW:
            words.append(f"--window {show_window(asked.window or 0)}")
    words += [f"--only {tp}" for tp in asked.only]
    return " ".join([*words, "--replace"] if asked.replace else words)


def describe_outlook(lake: Lake, feed: str, batch: Batch) -> tuple[str, tuple[str, ...]]:
    """Returns the progress of a dead run's live batch, and the commands that finish it or give it up."""
    commands = tuple(f"{command}   {what}" for command, what in list_commands(feed, batch))
    if batch.rewrites:
        return "nothing of it counts yet", commands
    finished, planned = count_finished(lake, feed, batch)
    return (
        f"{finished} of {planned} offset ranges are finished" if finished else "no offset range is finished",
        commands,
    )


def count_finished(lake: Lake, feed: str, batch: Batch) -> tuple[int, int]:
    """Returns the number of a live batch's offset ranges with a receipt in staging, and of all."""
    names = {paths.name_range(s) for s in batch.plan.offset_ranges} if batch.plan else set()
    return len(names & receipt_files.read_finished(lake, feed, batch.id, {})), len(names)


def give_up(
    ledger: Ledger, batches: Iterable[Batch], verdicts: Mapping[int, Verdict], report: Reporter, why: str = AS_THEY_WERE
) -> tuple[int, ...]:
    """Give up the batches whose run is dead, report them, and return their ids.

    A batch that another run has taken over since is left to it.
    """
    given_up = []
    for batch in batches:
        if verdicts.get(batch.id, NEW).dead and abandon(ledger, batch.id, why, batch.owner) is not None:
            tell(report, report_met(ledger.feed, batch, verdicts[batch.id], Fate.GIVEN_UP, why))
            given_up.append(batch.id)
    return tuple(given_up)


def tell(report: Reporter, batch: Met) -> None:
    """Report the fate of another run's batch."""
    report(Progress(str(batch.fate), note=str(batch), met=batch))
