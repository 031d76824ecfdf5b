"""`sluice unstick`: end the runs that a kill left as started in Dagster, so that others need not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.options.request_options import DryRun
from sluice.cli.shared.other_batches import beneath
from sluice.cli.terminal.output import good, heading, safe, warn
from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    import dagster as dg

    from sluice.assets.operations.dead_runs import LeftBatch, UnderWay


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that was ended, the pools that this freed, and the batches that it had begun."""

    run: UnderWay
    pools: tuple[str, ...]
    batches: tuple[LeftBatch, ...]


@dataclass(frozen=True, slots=True)
class Unstuck:
    """The findings of one call. `freed`: runs that had ended and still held slots; `queued_runs`: how many wait."""

    ended: tuple[EndedRun, ...]
    others: tuple[UnderWay, ...]
    freed: tuple[str, ...]
    queued: int


def register(app: typer.Typer) -> None:
    command(app)(unstick)


def unstick(
    session: Session,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="ID", help="This run alone; the first characters do.", show_default=False),
    ] = None,
    feed: Annotated[
        str | None,
        typer.Option(
            "--feed",
            metavar="FEED",
            help="Runs of this feed alone.",
            show_default="all",
            autocompletion=completers.feeds,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --run: end it even if it is not known to be dead.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """End runs that Dagster shows as started and that are dead.

    There must be evidence: the lock of its process is free, its beat in the lake stopped, its process is gone from this
    machine, or it never had one. Waiting runs of its feed can then start, and the next run takes over what it began.

    No process is ended and no data is changed. If a run that was ended by force goes on after all, it publishes nothing
    once another run has taken over. Exit 3 for a run that is not known to be dead.

    $ sluice unstick
    $ sluice unstick --run 1f9c02d4 --force
    """
    from sluice.assets.instance.instance import open_instance

    if force and run is None:
        raise UsageError("--force without a run", remedy="name the run: sluice unstick --run ID --force")
    if feed is not None:
        session.feed(feed)
    looking = session.terminal.working("looking for dead runs: locks, beats, processes")
    with open_instance(session.project) as instance, looking:
        found = look(session, instance, run, feed, force=force, dry_run=dry_run)
    session.terminal.show(*view(found, dry_run=dry_run))
    session.terminal.document(document(found, dry_run=dry_run))


def look(
    session: Session, instance: dg.DagsterInstance, run: str | None, feed: str | None, *, force: bool, dry_run: bool
) -> Unstuck:
    """End dead runs, or list those that it would end. Raises Refused for a named run that is not known to be dead."""
    from sluice.assets.operations import dead_runs

    lakes = dead_runs.Lakes(session.files.feeds.values(), session.open_ports)
    named = _find_run(instance, run) if run else None
    found = dead_runs.under_way(instance, session.project, lakes.beats, feed)
    if named is not None:
        found = [f for f in found if f.id == named]
        _check(found, force=force)
    dead = [f for f in found if f.is_dead or force]
    pools = {
        f.id: dead_runs.pools(instance, f.run) if dry_run else dead_runs.end(instance, session.project, f) for f in dead
    }
    freed = () if dry_run or named else dead_runs.free_leaked_slots(instance)
    ended = tuple(EndedRun(f, pools[f.id], lakes.left_by(f.id)) for f in dead)
    return Unstuck(ended, tuple(f for f in found if f not in dead), freed, dead_runs.queued_runs(instance))


def _find_run(instance: dg.DagsterInstance, run: str) -> str:
    """The id of the run that begins so. Raises UsageError if none or several do, or if the run has ended."""
    import dagster as dg

    from sluice.assets.operations.dead_runs import BEGUN

    runs = instance.get_runs(dg.RunsFilter(statuses=list(BEGUN)))
    found = [r.run_id for r in runs if r.run_id.startswith(run)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{len(found)} runs begin with {run}", remedy=f"say more: {', '.join(found[:5])}")
    ended = instance.get_run_by_id(run)
    said = f"run {run[:8]} is {ended.status.value}" if ended else f"no run under way begins with {run}"
    raise UsageError(said, remedy=f"runs under way: {', '.join(r.run_id for r in runs[:5]) or 'none'}")


def _check(found: Sequence[UnderWay], *, force: bool) -> None:
    for each in found:
        if not each.is_dead and not force:
            why = f"is alive: {each.verdict.why}" if each.verdict else f"may be alive: {_NO_EVIDENCE}"
            raise Refused(
                f"run {each.id[:8]} ({_name(each)}) {why}",
                remedy=f"cancel it in the UI or where it runs; if you know it dead: sluice unstick --run {each.id[:8]} "
                "--force (what it publishes after another run took over counts for nothing)",
            )


_NO_EVIDENCE = "it does not run on this machine, and no beat of it is in a lake"


# -- for people


def view(found: Unstuck, *, dry_run: bool) -> list[RenderableType]:
    out: list[RenderableType] = [heading("Runs", "a dry run: nothing is touched")] if dry_run else []
    for each in found.ended:
        out += _ended_view(each, dry_run)
    if found.freed:
        out.append(good(f"slots of {many(len(found.freed), 'run')} that had ended: freed"))
    out += [_other(each) for each in found.others]
    if not found.ended and not found.freed:
        out.append(good("nothing is stuck"))
    if found.queued:
        waiting = f"· {many(found.queued, 'run')} queued: Dagster's daemon, which `sluice ui` starts, lets them go"
        out.append(Text(waiting, style="dim"))
    return out


def _ended_view(each: EndedRun, dry_run: bool) -> list[RenderableType]:
    run, why = each.run, each.run.verdict.why if each.run.verdict else _NO_EVIDENCE
    became = "canceled" if run.run.status.value == "CANCELING" else "failed"
    free = f"; {' and '.join(each.pools)} {'is' if len(each.pools) == 1 else 'are'} free" if each.pools else ""
    text = f"{_title(run)}, {'to be ' if dry_run else ''}marked as {became}{'' if dry_run else free}"
    lines: list[RenderableType] = [beneath(warn(text) if dry_run else good(text), why, ())]
    for left in each.batches:
        begun = f"    it left batch {left.batch} of {left.feed} ({left.request}) unfinished: {left.kept}"
        lines.append(beneath(Text(safe(begun)), "", left.remedy))
    return lines


def _other(each: UnderWay) -> Text:
    if each.verdict is not None:
        return beneath(Text(safe(f"· {_title(each)}"), style="dim"), each.verdict.why, ())
    way_out = f"sluice unstick --run {each.id[:8]} --force   ends it, if you know it dead"
    return beneath(warn(_title(each)), _NO_EVIDENCE, (way_out,))


def _title(each: UnderWay) -> str:
    status = each.run.status.value.lower().replace("_", " ")
    begun = status if status == "started" else f"{status} since"
    return f"run {each.id[:8]} ({_name(each)}), {begun} {show_instant(int(each.since) * 1000)}"


def _name(each: UnderWay) -> str:
    return f"{each.run.job_name} {each.window}" if each.window else each.run.job_name


# -- for programs


def document(found: Unstuck, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "ended": [_run(e.run) | {"pools": list(e.pools), "batches": list(map(_batch, e.batches))} for e in found.ended],
        "under_way": [_run(each) for each in found.others],
        "slots_freed": list(found.freed),
        "queued": found.queued,
    }


def _run(each: UnderWay) -> dict[str, Any]:
    return {
        "run": each.id,
        "job": each.run.job_name,
        "window": each.window,
        "status": each.run.status.value,
        "since": int(each.since * 1000),
        "dead": each.verdict.dead if each.verdict else None,
        "evidence": each.verdict.why if each.verdict else None,
    }


def _batch(left: LeftBatch) -> dict[str, Any]:
    return asdict(left)
