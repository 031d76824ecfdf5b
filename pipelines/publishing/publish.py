"""From proven receipts to visible files: the publish entry, and the roll-forward that makes `data/` agree with it.

The entry is the commit point of the data. The visible files follow from it: for every batch that still has staging,
`roll_forward` makes `data/` equal the live parts of the fold. Anyone may call it, any number of times, at the same time
as others, whichever run left the staging (docs/developers/design/publishing.md).

Code that meets another run's batch calls `judge_batches`, and reports by `report_met` and `build_busy_error`. A batch
is finished or given up only if its run is known to be dead; a suspicion is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.contract.catalogue import Result
from sluice.pipelines.errors import LedgerCorrupt, OwnershipLost, PlanBusy
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import Appended, Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.entries import AbandonEntry, PublishEntry
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import (
    NO_TRAFFIC,
    Fate,
    Life,
    Met,
    Outcome,
    Owner,
    Part,
    Progress,
    RangeFailure,
    Receipt,
    Reporter,
    Scheduler,
    Traffic,
    Verdict,
    find_scheduler,
)
from sluice.pipelines.ports import Lake, Liveness
from sluice.pipelines.publishing import lost_entries, published_files
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import HOUR, show_window

LATE = HOUR
"""The time (ms) after which a replaced file can no longer reappear by a late copy."""


def publish(
    ledger: Ledger,
    batch: int,
    owner: Owner,
    outcomes: Sequence[Outcome],
    results: Sequence[Result] = (),
    traffic: Traffic = NO_TRAFFIC,
) -> Appended | None:
    """Append the publish entry of the batch; None when it already stands. Raises OwnershipLost when we may not.

    `outcomes` are its receipts and failures, `results` those of the contract for the batch as a whole, `traffic` its
    requests to brokers. Guarantee: the decision is made on the state just below the entry's number, and again by every
    reader that folds it.
    """
    receipts = tuple(o for o in outcomes if isinstance(o, Receipt))
    failures = tuple(o for o in outcomes if isinstance(o, RangeFailure))
    entry = PublishEntry(
        batch=batch,
        token=owner.token,
        receipts=receipts,
        failures=failures,
        results=tuple(results),
        traffic=traffic,
    )

    # Decided again whenever another entry took the number: after a heartbeat that came too late, a run may have taken
    # the batch over, or given it up. Nothing but this decision separates the two runs.
    def decide(state: State) -> PublishEntry | None:
        current = state.batches[batch]
        if current.status is BatchStatus.PUBLISHED and current.owner.token == owner.token:
            # Our own entry: its append was answered late, or not at all.
            return None
        if not state.may_publish(entry):
            raise _build_ownership_error(current)
        return entry

    return ledger.append(decide)


def check_owner(ledger: Ledger, batch: int, owner: Owner) -> None:
    """Raises OwnershipLost once the batch is no longer ours to publish. Then its staging may be gone, too."""
    current = ledger.read().batches[batch]
    if current.status is not BatchStatus.PLANNED or current.owner.token != owner.token:
        raise _build_ownership_error(current)


def _build_ownership_error(batch: Batch) -> OwnershipLost:
    how = {
        BatchStatus.ABANDONED: "was abandoned",
        BatchStatus.PUBLISHED: f"was published by {batch.owner.describe()}",
        BatchStatus.PLANNED: f"now belongs to {batch.owner.describe()}, or its files were already replaced",
    }[batch.status]
    return OwnershipLost(
        f"batch {batch.id} {how}: the rows that this run landed stay unpublished",
        remedy="nothing to fix; the next run lands all pending offsets",
    )


def abandon(ledger: Ledger, batch: int, reason: str, owner: Owner | None = None) -> Appended | None:
    """Give the batch's ranges back; None when it is no longer live, or no longer belongs to `owner`."""

    def decide(state: State) -> AbandonEntry | None:
        current = state.batches[batch]
        same = owner is None or current.owner.token == owner.token
        return AbandonEntry(batch=batch, reason=reason) if current.status is BatchStatus.PLANNED and same else None

    return ledger.append(decide)


@dataclass(frozen=True, slots=True)
class RolledForward:
    """The effects of a roll-forward: lake paths shown and hidden, and the batches whose staging it removed."""

    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    cleaned: tuple[int, ...] = ()


def roll_forward(ledger: Ledger, lake: Lake, feed: str) -> RolledForward:
    """Make `data/` equal the live parts of the fold for every batch with staging; then remove that staging.

    Order matters. Staged files of replaced parts go first, so that none can come back. Then replaced parts are
    hidden and live ones shown. A part that was replaced while it was being shown is hidden again. Names that the fold
    does not know are newer than it and are left alone. Where a table may name replaced parts, they stay.
    Where the lake copies, a note in staging has replaced parts hidden again for an hour (`LATE`).
    Raises EntriesLost, with nothing touched, if staging proves it.
    """
    state = ledger.read()
    staged: dict[int, list[str]] = {}
    for path in lake.list(paths.staging_root(feed)):
        batch = paths.staged_batch(path)
        if batch is not None:
            staged.setdefault(batch, []).append(path)
    return _agree(ledger, lake, feed, state, staged)


def roll_forward_own(ledger: Ledger, lake: Lake, feed: str, batch: int) -> RolledForward:
    """As `roll_forward`, of a batch that was just published: no other staging is listed.

    For a batch that replaces nothing, in a run that began with a roll-forward: no staged file has to go first.
    """
    return _agree(ledger, lake, feed, ledger.read(), {batch: [*lake.list(paths.staging_folder(feed, batch))]})


def _agree(ledger: Ledger, lake: Lake, feed: str, state: State, staged: dict[int, list[str]]) -> RolledForward:
    state = lost_entries.check_names(ledger, state, (path for paths_ in staged.values() for path in paths_))
    published = [state.batches[b] for b in sorted(staged) if _find_status(state, b) is BatchStatus.PUBLISHED]
    receipts = [r for b in published for r in _read_receipts(ledger, b)]
    parts = list({part.staged: part for r in receipts for part in r.parts}.values())  # offset ranges may share a file
    not_live = ledger.list_replaced((p.path for p in parts), state)
    map_parallel(lake.remove, [p.staged for p in parts if p.path in not_live])
    replaced = [path for b in published for path in _list_replaced(ledger, b)]
    hidden = [path for path, size in zip(replaced, map_parallel(lake.size, replaced), strict=True) if size is not None]
    hidden = published_files.remove_unless_named(lake, feed, hidden)
    live = [p for p in parts if p.path not in not_live]
    new_paths = [p.path for p, ours in zip(live, map_parallel(lambda p: _show(lake, p), live), strict=True) if ours]
    late = ledger.list_replaced(new_paths) if new_paths else frozenset()
    published_files.remove_unless_named(
        lake, feed, sorted(late)
    )  # a run that hid it during the copy could not see it yet
    new_paths = [p for p in new_paths if p not in late]
    notes = _note_replaced(ledger, lake, [b for b in published if _list_replaced(ledger, b)], staged)
    ended = [b for b in sorted(staged) if _find_status(state, b) in (BatchStatus.PUBLISHED, BatchStatus.ABANDONED)]
    done = {b: [p for p in staged[b] if p not in notes] for b in ended}
    map_parallel(lake.remove, [path for names in done.values() for path in names])
    return RolledForward(tuple(new_paths), tuple(hidden), tuple(b for b, names in done.items() if names))


def _note_replaced(ledger: Ledger, lake: Lake, replacing: Sequence[Batch], staged: dict[int, list[str]]) -> set[str]:
    """Keep notes of the batches that replaced files which may still appear: a store continues a copy when the run
    that requested it is dead, and may have read its source before that was removed. Returns the notes' paths."""
    if not lake.copies:
        return set()
    late = [b for b in replacing if ledger.is_younger(ledger.publication(b), LATE)]
    notes = {paths.build_replaced_note_path(ledger.feed, b.id): b.id for b in late}
    for path, batch in notes.items():
        if path not in staged[batch]:
            lake.put(path, b"{}\n")
    return {*notes}


def _find_status(state: State, batch: int) -> BatchStatus | None:
    current = state.batches.get(batch)
    return current.status if current else None


def _read_receipts(ledger: Ledger, batch: Batch) -> tuple[Receipt, ...]:
    receipts = ledger.publication(batch).receipts
    parts = [part for r in receipts for part in r.parts]
    _check_below((paths.staging_folder(ledger.feed, batch.id),), [p.staged for p in parts], batch.published or 0)
    _check_below(paths.visible_roots(ledger.feed), [p.path for p in parts], batch.published or 0)
    return receipts


def _list_replaced(ledger: Ledger, batch: Batch) -> tuple[str, ...]:
    replaced = ledger.plan(batch.id).replaces
    _check_below(paths.visible_roots(ledger.feed), replaced, batch.id)
    return replaced


def _check_below(roots: Sequence[str], names: Sequence[str], number: int) -> None:
    """Raises LedgerCorrupt for an entry that names a file outside this feed's folders."""
    for path in names:
        if not path.startswith(tuple(f"{root}/" for root in roots)):
            raise LedgerCorrupt(
                f"entry {number} names {ascii(path)[:300]}, which is not below {' or '.join(roots)}",
                remedy="another program wrote to this ledger: nothing was changed; check write access to the lake",
            )


def _show(lake: Lake, part: Part) -> bool:
    """Returns whether this call made the part visible. If the source is missing, another run showed or replaced it.

    Raises ProofFailed for a file of another size in its place: staging has the only copy then.
    """
    if lake.size(part.path) == part.file_bytes:
        return False
    try:
        lake.show(part.staged, part.path)
    except FileNotFoundError:
        return False
    return True


AGAIN = {
    RequestKind.COMPACT: "sluice compact {feed}",
    RequestKind.REPLAY: "sluice quarantine replay {feed}",
    RequestKind.ERASE: "sluice erase {feed} --yes",
}
"""The commands for the requests that write parts again."""
NEW = Verdict(Life.ALIVE, "it has just begun")
"""The verdict for an owner that appeared after the owners were judged."""
AS_THEY_WERE = "the run that wrote these parts again died; they are as they were"


def judge_batches(liveness: Liveness, batches: Iterable[Batch], *, watch: bool = True) -> dict[int, Verdict]:
    """Judge whether each batch's run is alive. With `watch`, wait until that is known, for all suspects together."""
    all_batches = list(batches)
    verdicts = liveness.judge(dict.fromkeys(b.owner for b in all_batches), watch=watch) if all_batches else {}
    return {b.id: verdicts[b.owner.token] for b in all_batches}


def report_met(
    feed: str, batch: Batch, verdict: Verdict, fate: Fate = Fate.LEFT, why: str = "", *, refused: bool = False
) -> Met:
    """Returns the report of another run's batch, with the remedies if it is left and its run is not alive."""
    is_stuck = fate is Fate.LEFT and verdict.life is not Life.ALIVE
    ways = list_commands(feed, batch) if is_stuck else ()
    return Met(batch.id, batch.request, batch.owner, verdict, fate, why, ways, refused)


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
    if owner.run and find_scheduler(owner.run) is Scheduler.DAGSTER:
        return f"{wait}; if Dagster only thinks so: sluice unstick --run {owner.run[:8]} --force"
    return wait


def list_commands(feed: str, batch: Batch) -> tuple[tuple[str, str], ...]:
    """Returns the commands that finish a dead run's batch or give it up, each with its effect."""
    give_up = (f"sluice repair {feed} --abandon {batch.id}", "gives it up")
    if again := AGAIN.get(batch.request.kind):
        return (again.format(feed=feed), "gives it up and begins again"), give_up
    return (format_request(feed, batch.request), "finishes it, and reads only the missing records"), give_up


def format_request(feed: str, request: Request) -> str:
    """The command that makes the same request."""
    words = ["sluice run", feed]
    match request.kind:
        case RequestKind.OFFSETS:
            words += [f"--offsets {r.topic}:{r.partition}:{r.start}-{r.end}" for r in request.ranges]
        case RequestKind.WINDOW if request.until is not None:
            words.append(f"--from {show_window(request.window or 0)} --to {show_window(request.until)}")
        case RequestKind.WINDOW:
            words.append(f"--window {show_window(request.window or 0)}")
    words += [f"--only {tp}" for tp in request.only]
    return " ".join([*words, "--replace"] if request.replace else words)


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
