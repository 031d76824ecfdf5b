"""Compares a republish with its target topic: `sluice audit --republished`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from sluice.cli.app.invocation import Session
from sluice.cli.terminal.number_format import count
from sluice.cli.terminal.output import bad, facts, good, heading, limit_rows, table, warn
from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.util.documents import document_of
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.republishing.republish_audit import RepublishAudit


def audit_republish(session: Session, feed: Feed, name: str) -> int:
    """Compare, show, and return the exit code. Raises as `pipelines.republishing.audit`, and UnknownTopic."""
    report = _compare_republish(session, feed, name)
    session.terminal.show(*_republish_view(report))
    session.terminal.print_document(_build_republish_document(report))
    return 0 if report.holds else 1


def _compare_republish(session: Session, feed: Feed, name: str) -> RepublishAudit:
    session.compile()
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.model.kafka import Isolation
    from sluice.pipelines.records.shape import RAW
    from sluice.pipelines.republishing import republish_audit as audit
    from sluice.pipelines.republishing import republish_plan as plan
    from sluice.resources.spark.executor import Wiring

    committed = Isolation.READ_COMMITTED
    with session.open_ports(feed) as edges, Wiring.of(feed).open(committed, RAW) as tools:
        republish = plan.load(edges.lake, feed.name, name)
        ledger = Ledger(edges.lake, feed.name, edges.clock)
        target = edges.cluster.partitions([republish.wishes.to], committed)
        with session.terminal.progress() as meter:

            def report_progress(done: int, total: int) -> None:
                meter(Progress("compare", done, total))

            return audit.audit(republish, ledger, edges.lake, feed.shape, target, tools.fetcher, report_progress)


def _republish_view(report: RepublishAudit) -> Iterator[RenderableType]:
    wishes = report.plan.wishes
    yield heading(f"Audit of republish {report.plan.id}", f"{report.plan.feed} → {wishes.to}")
    yield facts(
        ("rows", f"{count(report.rows)} {wishes.kind} in the lake"),
        ("compared", f"{many(report.compared, 'record')} of {wishes.to}"),
    )
    if report.findings:
        rows = [[f.old, f.new, f.text] for f in report.findings]
        yield table(["old", "new", "what is wrong"], limit_rows(rows, report.found))
    if report.gone:
        yield warn(f"{wishes.to} no longer keeps {many(report.gone, 'record')}: not compared")
    if report.hidden:
        yield warn(f"an open transaction of somebody else hides {many(report.hidden, 'record')}: audit again later")
    if report.replayed:
        yield warn(f"{many(report.replayed, 'row')} left the quarantine by a replay: not compared")
    if report.holds:
        yield good("every row was sent once, in order, and what was compared is equal, value by value")
    else:
        yield bad(f"the target is not what the lake holds: {many(report.found, 'finding')}")


def _build_republish_document(report: RepublishAudit) -> dict[str, Any]:
    plan = "feed=plan.feed republish=plan.id to=plan.wishes.to kind=plan.wishes.kind"
    return document_of(report, f"{plan} holds rows compared gone hidden replayed findings_in_all=found") | {
        "findings": [{"old": f.old or None, "new": f.new or None, "text": f.text} for f in report.findings],
    }
