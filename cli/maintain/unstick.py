"""`sluice unstick`: end the runs that a kill left as started in Dagster, so that others need not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import option
from sluice.cli.options.request_options import DryRun
from sluice.cli.shared.other_batches import beneath
from sluice.cli.terminal.output import good, heading, safe, warn
from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    import dagster as dg

    from sluice.assets.operations.dead_runs import LeftBatch, UnderWay


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that was ended, the pools that this freed, and the batches that it had begun."""

    run: Flat[UnderWay]
    pools: tuple[str, ...]
    batches: tuple[LeftBatch, ...]


@dataclass(frozen=True, slots=True)
class Unstuck:
    """The findings of one call. `slots_freed`: runs that had ended and still held slots; `queued`: how many wait."""

    ended: tuple[EndedRun, ...]
    under_way: tuple[UnderWay, ...]
    slots_freed: tuple[str, ...]
    queued: int


def register(app: typer.Typer) -> None:
    command(app)(unstick)


def unstick(
    session: Session,
    run: Annotated[str | None, option("--run", "ID", "Only this run; a prefix of the id is enough.")] = None,
    feed: Annotated[
        str | None,
        option(
            "--feed", "FEED", "Only runs of this feed.", show_default="all", autocompletion=completers.complete_feeds
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --run: mark it even if it is not known to be dead.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Mark dead runs as failed in Dagster.

    It needs evidence: the lock of the run's process is free, its heartbeat in the lake stopped, or its process no
    longer exists on this machine or never did. Queued runs of the feed can then start, and the next run takes over its
    batch.

    No process is killed and no data changes. If a run that was marked by force is alive after all, it publishes nothing
    once another run has taken over. Exit 3 for a run that is not known to be dead.

    $ sluice unstick
    $ sluice unstick --run 1f9c02d4 --force
    """
    from sluice.assets.instance.instance import open_instance

    if force and run is None:
        raise UsageError("--force without --run", remedy="add the run: sluice unstick --run ID --force")
    if feed is not None:
        session.feed(feed)
    looking = session.terminal.working("looking for dead runs: locks, heartbeats, processes")
    with open_instance(session.project) as instance, looking:
        result = look(session, instance, run, feed, force=force, dry_run=dry_run)
    session.terminal.show(*view(result, dry_run=dry_run))
    session.terminal.print_document(result, dry_run=dry_run)


def look(
    session: Session, instance: dg.DagsterInstance, run: str | None, feed: str | None, *, force: bool, dry_run: bool
) -> Unstuck:
    """End dead runs, or list those that it would end. Raises Refused for a named run that is not known to be dead."""
    from sluice.assets.operations import dead_runs

    lakes = dead_runs.Lakes(session.files.feeds.values(), session.open_ports)
    wanted = _find_run(instance, run) if run else None
    runs = dead_runs.under_way(instance, session.project, lakes.heartbeats, feed)
    if wanted is not None:
        runs = [f for f in runs if f.id == wanted]
        _check(runs, force=force)
    dead = [f for f in runs if f.is_dead or force]
    pools = {
        f.id: dead_runs.pools(instance, f.run) if dry_run else dead_runs.end(instance, session.project, f) for f in dead
    }
    freed = () if dry_run or wanted else dead_runs.free_leaked_slots(instance)
    ended = tuple(EndedRun(f, pools[f.id], lakes.left_by(f.id)) for f in dead)
    return Unstuck(ended, tuple(f for f in runs if f not in dead), freed, dead_runs.queued_runs(instance))


def _find_run(instance: dg.DagsterInstance, run: str) -> str:
    """The id of the run that begins so. Raises UsageError if none or several do, or if the run has ended."""
    import dagster as dg

    from sluice.assets.operations.dead_runs import BEGUN

    runs = instance.get_runs(dg.RunsFilter(statuses=list(BEGUN)))
    matches = [r.run_id for r in runs if r.run_id.startswith(run)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{len(matches)} runs begin with {run}", remedy=f"say more: {', '.join(matches[:5])}")
    ended = instance.get_run_by_id(run)
    message = f"run {run[:8]} is {ended.status.value}" if ended else f"no active run begins with {run}"
    raise UsageError(message, remedy=f"active runs: {', '.join(r.run_id for r in runs[:5]) or 'none'}")


def _check(runs: Sequence[UnderWay], *, force: bool) -> None:
    for run in runs:
        if not run.is_dead and not force:
            why = f"is alive: {run.verdict.why}" if run.verdict else f"may be alive: {_NO_EVIDENCE}"
            raise Refused(
                f"run {run.id[:8]} ({run.title}) {why}",
                remedy="cancel it in the UI or on its machine; if you know that it is dead: sluice unstick --run "
                f"{run.id[:8]} --force (after a takeover it cannot publish)",
            )


_NO_EVIDENCE = "it does not run on this machine, and has no heartbeat in a lake"


# -- for people


def view(result: Unstuck, *, dry_run: bool) -> list[RenderableType]:
    out: list[RenderableType] = [heading("Runs", "dry run: nothing changes")] if dry_run else []
    for ended in result.ended:
        out += _format_ended(ended, dry_run)
    if result.slots_freed:
        out.append(good(f"slots of {many(len(result.slots_freed), 'run')} of ended runs: freed"))
    out += [_format_other(ended) for ended in result.under_way]
    if not result.ended and not result.slots_freed:
        out.append(good("no dead runs"))
    if result.queued:
        waiting = f"· {many(result.queued, 'run')} queued: Dagster's daemon, which `sluice ui` starts, lets them go"
        out.append(Text(waiting, style="dim"))
    return out


def _format_ended(ended: EndedRun, dry_run: bool) -> list[RenderableType]:
    run, why = ended.run, ended.run.verdict.why if ended.run.verdict else _NO_EVIDENCE
    became = "canceled" if run.run.status.value == "CANCELING" else "failed"
    free = f"; {' and '.join(ended.pools)} {'is' if len(ended.pools) == 1 else 'are'} free" if ended.pools else ""
    text = f"{_format_title(run)}, {'to be ' if dry_run else ''}marked as {became}{'' if dry_run else free}"
    lines: list[RenderableType] = [beneath(warn(text) if dry_run else good(text), why, ())]
    for batch in ended.batches:
        begun = f"    left batch {batch.batch} of {batch.feed} ({batch.request}) unfinished: {batch.progress}"
        lines.append(beneath(Text(safe(begun)), "", batch.remedy))
    return lines


def _format_other(run: UnderWay) -> Text:
    if run.verdict is not None:
        return beneath(Text(safe(f"· {_format_title(run)}"), style="dim"), run.verdict.why, ())
    way_out = f"sluice unstick --run {run.id[:8]} --force   if you know that it is dead"
    return beneath(warn(_format_title(run)), _NO_EVIDENCE, (way_out,))


def _format_title(run: UnderWay) -> str:
    status = run.run.status.value.lower().replace("_", " ")
    begun = status if status == "started" else f"{status} since"
    return f"run {run.id[:8]} ({run.title}), {begun} {show_instant(int(run.since) * 1000)}"
