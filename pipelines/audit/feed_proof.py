"""The audit of a feed: ledger and files, and on request the records in Kafka and all further checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sluice.pipelines.audit import audit_cache
from sluice.pipelines.audit.audit import AuditProblem, AuditReport, audit
from sluice.pipelines.audit.gaps import choose_remedies, find_gaps, read_policies
from sluice.pipelines.audit.strict_audit import Strict, strict, table_problems
from sluice.pipelines.batch.survey import take_survey
from sluice.pipelines.errors import LogTruncated, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import lost_entries
from sluice.pipelines.tables.table_windows import FeedTables


@dataclass(frozen=True, slots=True)
class AuditScope:
    """The checks of an audit. `strict` includes the others; `everything` also what earlier audits checked."""

    rescan: bool = False
    hashes: bool = False
    strict: bool = False
    everything: bool = False


@dataclass(frozen=True, slots=True)
class FeedProof:
    """The report, the strict audit's further findings, and the reason why the next audit cannot rely on this one."""

    report: AuditReport
    strict: Strict | None
    unkept: SluiceError | None


def prove_feed(
    feed: Feed,
    ports: Ports,
    scope: AuditScope,
    report_progress: Reporter = lambda progress: None,
    tables: Iterable[FeedTables] = (),
) -> FeedProof:
    """Audit a feed, and these tables of it. Raises EntriesLost, LedgerCorrupt, LakeUnavailable, KafkaUnavailable."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    report_progress(Progress("checking files"))
    before = audit_cache.load_audited(ports.lake, feed.stored)
    previous = None if scope.everything else before
    if previous and previous.settled:
        lost_entries.check_recent(ledger, ports.lake, feed)
    else:
        lost_entries.check_all(ledger, ports.lake)
    hashes, rescanning = scope.hashes or scope.strict, scope.rescan or scope.strict
    quick, at = not (rescanning or hashes), ports.clock()
    report = audit(ledger, ports.lake, hashes=hashes, previous=previous, at=at, quick=quick)
    report = replace(report, gaps=find_gaps(report, ledger.read(), ports.cluster))
    report = _rescan(feed, ports, ledger, report, report_progress) if rescanning else report
    more = strict(ledger, ports.lake, feed, take_survey(feed, ports, ledger), report) if scope.strict else None
    if more:
        audited = replace(report.audited, strictly=more.strictly)
        report = replace(report, problems=tuple(dict.fromkeys(report.problems + more.problems)), audited=audited)
    report = choose_remedies(replace(report, feed=feed.name), ledger.read(), ports.cluster)
    unkept = audit_cache.keep(ports.lake, feed.stored, report.audited, before, report.at)
    of_tables = tuple(p for of in tables for p in table_problems(ledger, ports.lake, of))
    return FeedProof(replace(report, problems=report.problems + of_tables), more, unkept)


def _rescan(feed: Feed, ports: Ports, ledger: Ledger, report: AuditReport, report_progress: Reporter) -> AuditReport:
    from sluice.pipelines.audit.rescan import CurrentLog, rescan  # late: the extra `kafka`

    survey = take_survey(feed, ports, ledger)
    truncated = [r.error for r in survey.refusals if isinstance(r.error, LogTruncated)]
    problems = tuple(AuditProblem(3, e.message, remedy=e.remedy) for e in truncated)
    report = replace(report, problems=report.problems + problems)
    policies = read_policies(ports.cluster, {key.topic for key in survey.partitions})
    with ports.open_fetcher(feed.isolation) as fetcher:
        log = CurrentLog(fetcher, feed.isolation, survey.partitions, policies)
        return rescan(report, ledger, ports.lake, feed.shape, log, report_progress)
