"""`sluice repair`: fix what dead runs left in ledger, lake and Dagster's event log, and list each thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import option
from sluice.cli.maintain import erase
from sluice.cli.options.request_options import DryRun
from sluice.cli.shared.other_batches import beneath
from sluice.cli.terminal.output import bad, format_error, good, heading, safe, warn
from sluice.pipelines.errors import PlanBusy, UsageError, choose_exit_code
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.util import scratch
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    import dagster as dg

    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.receipts import Reporter
    from sluice.pipelines.operating.repairs import RepairFinding
    from sluice.pipelines.ports import Ports


def register(app: typer.Typer) -> None:
    command(app)(repair)


def repair(
    session: Session,
    feed: Annotated[
        str | None,
        typer.Argument(
            metavar="FEED", help="Only this feed.", show_default="all", autocompletion=completers.complete_feeds
        ),
    ] = None,
    abandon: Annotated[
        list[int] | None,
        option("--abandon", "BATCH", "Abandon this batch of a dead run: its offsets are pending again; repeatable."),
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Clean up after dead runs.

    Published files become visible. Replaced files, and staged files without an owner, are removed. Erasures that were
    interrupted are finished. Dagster, where it is installed, gets missing events. The next run finishes the batch of a
    dead run, unless you abandon it here.

    Files of live runs, and files under data/ that the ledger does not list, stay. Kafka is not read. Exit 1 if
    published files are missing, which cannot be repaired.

    $ sluice repair
    $ sluice repair orders --dry-run
    $ sluice repair orders --abandon 57
    """
    if abandon and feed is None:
        raise UsageError(
            "--abandon without a feed", remedy="add the feed of the batch: sluice repair FEED --abandon BATCH"
        )
    feeds = [session.feed(feed)] if feed else list(session.files.every.values())
    findings: dict[str, list[RepairFinding]] = {}
    # Dagster's event log is opened once for all feeds.
    with session.open_dagster() as instance:
        dagster = "" if instance is None else ", Dagster's event log"
        for one in feeds:
            with session.terminal.progress() as meter:
                meter(Progress(f"checking {one.name}: ledger, lake{dagster}"))
                findings[one.name] = look(session, one, instance, abandon or (), meter, dry_run=dry_run)
            session.terminal.show(*view(one.name, findings[one.name], dry_run=dry_run))
    # Folders of this machine, whichever feed their processes worked for.
    temporary = scratch.dead() if dry_run else scratch.clear()
    texts = [f"the temporary folder {path} of a dead process" for path in temporary]
    session.terminal.show(*(warn(f"to be removed: {t}") if dry_run else good(f"removed: {t}") for t in texts))
    broken = {} if feed else session.files.broken
    session.terminal.show(*(line for e in broken.values() for line in format_error(e)))
    repaired = [RepairedFeed(name, list_) for name, list_ in findings.items()]
    session.terminal.print_document(dry_run=dry_run, feeds=repaired, broken=[*broken.values()], temporary=temporary)
    return max([choose_exit_code(broken.values()), *(_choose_exit_code(f) for f in findings.values())])


@dataclass(frozen=True, slots=True)
class RepairedFeed:
    feed: str
    findings: list[RepairFinding]


def look(
    session: Session,
    feed: Feed,
    instance: dg.DagsterInstance | None,
    abandon: Sequence[int],
    report: Reporter,
    *,
    dry_run: bool,
) -> list[RepairFinding]:
    """Repair one feed, or show the repairs. Raises PlanBusy, UsageError."""
    from sluice.pipelines.operating.repairs import Pretended, RepairKind, RepairTarget
    from sluice.pipelines.operating.repairs import repair as fix

    with session.open_ports(feed) as ports:
        if instance is not None:
            from sluice.assets.instance.instance import with_dagster_liveness

            ports = with_dagster_liveness(ports, instance)
        ports = replace(ports, lake=Pretended(ports.lake)) if dry_run else ports
        target = RepairTarget.of(feed, ports)
        findings = list(fix(target, abandon))
        # An erasure is finished here and not by the engine's repair, since tables have to drop their snapshots, too.
        findings = [
            _finish_erasure(session, feed, ports, f, report, dry_run=dry_run) if f.kind is RepairKind.ERASING else f
            for f in findings
        ]
        if any(f.kind is RepairKind.ERASING for f in findings):  # one that is finished now gave its batch up
            live = {str(b.id) for b in target.ledger.read().live()}
            findings = [f for f in findings if f.kind is not RepairKind.WAITING or f.items[0] in live]
        if instance is None:
            return findings
        from sluice.assets.events.ledger_view import LedgerView
        from sluice.assets.operations.event_log_repair import reconcile

        # Dagster comes last: its events follow from the ledger as the steps above leave it.
        view_ = LedgerView.open(feed, ports, ledger=target.ledger)
        return [*findings, *reconcile(instance, view_, report, dry_run=dry_run)]


def _finish_erasure(
    session: Session, feed: Feed, ports: Ports, finding: RepairFinding, report: Reporter, *, dry_run: bool
) -> RepairFinding:
    obstacles: tuple[str, ...] = ()
    if not dry_run:
        try:
            done, _, unclean = erase.carry_out(session, feed, ports, None, report)
            obstacles = (*map(str, unclean), *map(str, done.met))
        except PlanBusy as error:
            obstacles = (error.message,)
    if obstacles:
        return replace(finding, remedy=(*obstacles, *finding.remedy))
    return replace(finding, act="finished", remedy=finding.remedy * dry_run)


def _choose_exit_code(findings: Sequence[RepairFinding]) -> int:
    from sluice.pipelines.operating.repairs import RepairKind

    return int(any(f.kind is RepairKind.MISSING for f in findings))


# -- for people


def view(feed: str, findings: Sequence[RepairFinding], *, dry_run: bool) -> list[RenderableType]:
    note = "dry run: nothing changes" if dry_run else ""
    out: list[RenderableType] = [heading(f"Repair of {feed}", note), *(_line(f, dry_run) for f in findings)]
    fixed = sum(bool(f.act) for f in findings)
    remaining = sum(bool(f.remedy) for f in findings)
    if not fixed:
        out.append(good("nothing to repair") if not remaining else Text("nothing else to repair", style="dim"))
    elif dry_run:
        out.append(Text(f"{many(fixed, 'thing')} to fix: sluice repair {feed}", style="dim"))
    return out


def _line(finding: RepairFinding, dry_run: bool) -> Text:
    """Lists findings: the fix or the remedy of each, and its evidence."""
    from sluice.pipelines.operating.repairs import RepairKind

    if finding.act:
        line = warn(f"to be {finding.act}: {finding.text}") if dry_run else good(f"{finding.act}: {finding.text}")
    elif not finding.remedy:
        line = Text(f"· {safe(finding.text)}", style="dim")
    else:
        line = bad(finding.text) if finding.kind is RepairKind.MISSING else warn(finding.text)
    return beneath(line, finding.why, finding.remedy)
