"""`sluice audit`: does the account close?

It compares ledger and files; with `--rescan` also Kafka itself; with `--strict` everything that Sluice can check. With
`--republished`, the records of a republish are compared instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import Session, SomeFeeds, command
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import bad, facts, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, label_partitions
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util.units import many, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.audit.audit import AuditedPartition, AuditReport
    from sluice.pipelines.audit.feed_proof import FeedProof
    from sluice.pipelines.audit.strict_audit import Strict
    from sluice.pipelines.republishing.republish_audit import RepublishAudit

SHOWN = 5
"""How many files of other writers people see; `--json` has all."""


def register(app: typer.Typer) -> None:
    command(app)(audit)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The checks of an audit, as typed."""

    rescan: Annotated[bool, typer.Option("--rescan", help="Read every offset from Kafka again and compare.")] = False
    hashes: Annotated[bool, typer.Option("--hashes", help="Read every file again and check its SHA-256.")] = False
    strict: Annotated[
        bool,
        typer.Option("--strict", help="--rescan and --hashes, and check committed offsets, topic ids and manifests."),
    ] = False
    everything: Annotated[
        bool, typer.Option("--all", help="Check everything again, including files that earlier audits checked.")
    ] = False

    @property
    def any(self) -> bool:
        return self.rescan or self.hashes or self.strict or self.everything


def audit(
    session: Session,
    feed: SomeFeeds,
    *,
    options: AuditOptions,
    republished_as: Annotated[
        str | None,
        option(
            "--republished", "NAME", "Compare the records of this republish with the lake, value by value, instead."
        ),
    ] = None,
    of_table: Annotated[bool, typer.Option("--table", help="Also compare the feed's table with the ledger.")] = False,
) -> int:
    """Prove that every offset is accounted for.

    Each offset must be accounted for exactly once, and each file must match the ledger. Exit 1 if they do not
    reconcile. Files that an earlier audit of the same kind checked, and that a listing shows unchanged, are not opened
    again without --all. Without --rescan, no record is read from Kafka; if offsets are in no batch of the log, Kafka is
    asked whether it compacts the topic, and a warning names partitions where it does not. With --strict, committed
    offsets must agree with the ledger, topics with their ids, and manifests with the windows; offsets that Kafka no
    longer has are listed.

    With --republished, it compares the target topic of a republish with the lake instead: readers of committed records
    must see every row once, in order.

    $ sluice audit orders
    $ sluice audit orders --all
    $ sluice audit "*"
    $ sluice audit orders --rescan --json
    $ sluice audit orders --rescan --strict
    $ sluice audit orders --republished 1f0c2a9b77de
    $ sluice audit orders --table
    """
    from sluice.pipelines.audit.feed_proof import AuditScope, prove_feed
    from sluice.resources.open_ports import list_tabled, open_tables

    definition = session.feed(feed)
    # Another question: the records of a target topic, rather than the feed's own offsets.
    if republished_as is not None:
        if options.any:
            raise UsageError("--republished together with another option", remedy="run two audits")
        from sluice.pipelines.republishing import republish_audit

        with session.open_ports(definition) as ports, session.terminal.progress() as meter:
            compared = republish_audit.audit(definition, ports, republished_as, meter)
        session.terminal.show(*_republish_view(compared))
        session.terminal.print_document(compared)
        return 0 if compared.holds else 1
    scope = AuditScope(options.rescan, options.hashes, options.strict, options.everything)
    tabled = list_tabled(definition) if of_table else ()
    with session.open_ports(definition) as ports, ExitStack() as stack, session.terminal.progress() as meter:
        tables = [stack.enter_context(open_tables(d, ports.lake)) for d in tabled]
        proof = prove_feed(definition, ports, scope, meter, tables)
    report, rescanned = proof.report, options.rescan or options.strict
    # Decimals that land as floats can only be compared as such.
    rounded = definition.shape.rounded if rescanned else ()
    session.terminal.show(*view(proof, rescanned=rescanned, rounded=rounded))
    session.terminal.print_document(report, rounded=rounded, strict=proof.strict)
    return 0 if report.reconciled else 1


# -- for people


def view(proof: FeedProof, *, rescanned: bool, rounded: Sequence[str]) -> list[RenderableType]:
    report, more, unkept = proof.report, proof.strict, proof.unkept
    labels = label_partitions(a.key for a in report.partitions)
    rows = [_build_row(labels[a.key], a) for a in report.partitions]
    names = (
        "partition",
        "origin",
        "frontier",
        "landed",
        "quarantined",
        "no record",
        "lost",
        "skipped",
        "retired",
        "dropped",
        "erased",
        "holes",
    )
    # Classes without an offset have no column.
    columns = [n for n in names if n not in _OPTIONAL or any(r[names.index(n)] != "0" for r in rows)]
    cells = [[r[names.index(n)] for n in columns] for r in rows]
    out: list[RenderableType] = [
        heading(f"Audit of {report.feed}", f"{many(report.files, 'file')}, {many(report.rows, 'row')}"),
    ]
    if cells:
        out.append(table(columns, limit_rows(cells), right=" ".join(columns[1:])))
    for p in report.problems:
        out += [bad(str(p)), *([f"  → {p.remedy}"] if p.remedy else [])]
    # One command for all of them is shorter than theirs one by one.
    if sum(p.by_size for p in report.problems) > 1:
        which = "missing and cut files" if any(p.ranges and not p.by_size for p in report.problems) else "files"
        out.append(f"  → all {which} that Kafka can replace, in one run: sluice run {report.feed} --missing-files")
    if again := sum(a.relanded for a in report.partitions):
        fixed = sum(a.fixed for a in report.partitions)
        out.append(
            Text(f"  {count(again)} of the landed records had been in quarantine, {count(fixed)} of them fixed.")
        )
    if report.foreign:
        out += _format_foreign(report.foreign)
    # Former lives of a log: records behind their known end cannot be proved.
    ended = [(a, at) for a in report.partitions if (at := a.ended) is not None]
    for a, at in ended[:SHOWN]:
        text = f"records beyond {count(a.known_end)}, if there were any, are unknown"
        replaced = warn(f"{labels[a.key]}: its log was replaced, accepted on {show_instant(at)}: {text}")
        moved = Text(f"  {labels[a.key]}: from {count(a.frontier)} on in feed {a.new_feed}, since {show_instant(at)}")
        out.append(moved if a.new_feed else replaced)
    if len(ended) > SHOWN:
        out.append(Text(f"    … {many(len(ended) - SHOWN, 'more partition')}"))
    out += _format_gaps(report)
    out += _format_strict(more) if more else []
    out += _format_proven(report)
    if rounded and report.compared:
        text = f"{', '.join(rounded)}: compared as rounded to a float; digits beyond it are not in the rows"
        out.append(warn(f"{text} (`decimal(p,s)` keeps them)"))
    if unkept:
        out.append(warn(f"the next audit checks everything again: {unkept.message}"))
    out.append(_format_verdict(report, rescanned, more is not None))
    return out


def _format_foreign(files: Sequence[str]) -> list[RenderableType]:
    """The files of other writers of the feed's table."""
    text = f"{many(len(files), 'file')} of another writer, in old snapshots of the table"
    more = [f"… {len(files) - SHOWN} more"] if len(files) > SHOWN else []
    return [
        warn(f"{text}, and `sluice table sync` removes them once these have expired:"),
        indent(*files[:SHOWN], *more),
    ]


def _format_gaps(report: AuditReport) -> Iterator[RenderableType]:
    """Describes the gaps that compaction does not explain, and those of topics whose policy is unknown."""
    suspect = [g for g in report.gaps if g.compacted is False]
    for g in suspect[:SHOWN]:
        within = ", ".join(map(str, g.ranges[:3])) + (" …" if len(g.ranges) > 3 else "")
        text = f"{g.key}: {many(g.offsets, 'offset')} in no batch of the log{f', within {within}' if within else ''}"
        yield warn(f"{text}; {g.key.topic} is not compacted: Kafka lost records there, unless it once was")
    if len(suspect) > SHOWN:
        yield Text(f"    … {many(len(suspect) - SHOWN, 'more partition')}")
    if suspect:
        yield f"  → compare the replicas' logs there (kafka-dump-log), then: sluice audit {report.feed} --rescan --all"
    if unknown := [g for g in report.gaps if g.compacted is None]:
        topics = ", ".join(sorted({g.key.topic for g in unknown}))
        offsets = many(sum(g.offsets for g in unknown), "offset")
        yield Text(f"  {offsets} of {topics} in no batch of the log: whether Kafka compacts it is unknown.")


def _format_proven(report: AuditReport) -> list[Text]:
    """Describes the parts that earlier audits have proven."""
    if report.proven is None:
        return []
    first, last = (show_instant(at)[:10] for at in report.proven)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    looked = f"{count(report.looked_at)} of {many(report.batches, 'batch', 'batches')}"
    out = [Text(f"  Checked {looked}; earlier audits proved the others {when}. --all checks everything.")]
    if report.unlisted:
        whose, since = many(report.unlisted, "batch", "batches"), show_instant(report.seen)[:10]
        out.append(Text(f"  The files of {whose} were last listed on {since} or later."))
    return out


def _format_strict(more: Strict) -> list[RenderableType]:
    """Describe further checks, and records that could not be checked."""
    counts = f"the committed offsets of {many(more.committed_offsets, 'partition')} and {many(more.windows, 'window')}"
    entries = many(more.commit_entries, "commit entry", "commit entries")
    summary = f"  Compared with the ledger: {counts}; with earlier publications: {entries}."
    out: list[RenderableType] = [Text(summary)]
    for u in more.unseen:
        ranges = ", ".join(map(str, u.ranges))
        out.append(warn(f"{u.key} {ranges}: {many(u.records, 'record')} not compared with Kafka: {u.why}"))
    if more.expired:
        out.append(warn(f"Kafka no longer has committed offsets of {', '.join(map(str, more.expired))}"))
    return out


_OPTIONAL = {"quarantined", "lost", "skipped", "retired", "dropped", "erased", "holes"}
"""Columns that are shown only if one of their cells is not zero."""


def _build_row(name: str, a: AuditedPartition) -> list[str]:
    c, of = a.account.counts, a.account
    numbers = (c.landed, c.quarantined, c.no_record, of.lost, of.skipped, of.retired, c.dropped, c.erased)
    holes = ", ".join(map(str, a.holes)) or "0"
    return [name, count(a.origin), count(a.frontier), *map(count, numbers), holes]


def _format_verdict(report: AuditReport, rescanned: bool, strict: bool) -> RenderableType:
    if not report.reconciled:
        return bad(f"not reconciled: {many(len(report.problems), 'problem')}")
    if not report.partitions:
        return good(f"no offset is accounted for yet: nothing has landed → sluice run {report.feed}")
    before = f", {count(report.compared_before)} by earlier audits" if report.compared_before else ""
    compared = f"; {many(report.compared, 'record')} compared with Kafka, value by value{before}" if rescanned else ""
    missing = f", {count(report.not_comparable)} no longer in Kafka" if report.not_comparable else ""
    # A lake that was restored reconciles with itself: only the group knows of entries that it lacks.
    group = "" if strict else "; the group was not compared (--strict)"
    return good(f"reconciled: every offset from origin to frontier in exactly one class{compared}{missing}{group}")


# -- a republish


def _republish_view(report: RepublishAudit) -> Iterator[RenderableType]:
    wishes = report.plan.wishes
    yield heading(f"Audit of republish {report.plan.id}", f"{report.plan.feed} → {wishes.to}")
    yield facts(
        ("rows", f"{count(report.rows)} {wishes.kind} in the lake"),
        ("compared", f"{many(report.compared, 'record')} of {wishes.to}"),
    )
    if report.findings:
        rows = [[f.old, f.new, f.text] for f in report.findings]
        yield table(["old", "new", "problem"], limit_rows(rows, report.findings_in_all))
    if report.gone:
        yield warn(f"{wishes.to} no longer has {many(report.gone, 'record')}: not compared")
    if report.hidden:
        yield warn(f"an open transaction hides {many(report.hidden, 'record')}: audit again later")
    if report.replayed:
        yield warn(f"{many(report.replayed, 'row')} left the quarantine by a replay: not compared")
    if report.holds:
        yield good("every row was sent once, in order, and compared values are equal")
    else:
        yield bad(f"the target differs from the lake: {many(report.findings_in_all, 'finding')}")
