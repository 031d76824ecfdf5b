"""The figures of one feed for monitoring systems: its status, its findings, its outlook, and its newest batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from sluice.pipelines.errors import LakeUnavailable, PartUnreadable, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.figures import Figure, build_figure
from sluice.pipelines.model.receipts import Life, PartKind
from sluice.pipelines.operating.feed_status import FeedStatus, OpenPorts, read_status_through
from sluice.pipelines.operating.findings import Finding, explain_error
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import faults_of
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.window_state import Standing


def list_figures(open_ports: OpenPorts, feed: Feed, last: int) -> list[Figure]:
    """Returns all figures of one feed and its `last` windows. Of a feed that cannot be inspected, `sluice_up` is 0."""
    try:
        with open_ports(feed) as ports:
            ledger = Ledger(ports.lake, feed.stored, ports.clock)
            status = read_status_through(ports, feed, ledger, last)
            figures = [*_of_ledger(ledger, ports.lake)] if status.partitions or status.last_batch else []
            return [build_figure("up", status.error is None, feed.name), *_of_status(status), *figures]
    except SluiceError as error:
        return [build_figure("up", 0, feed.name), *_of_findings(feed.name, explain_error(error))]


def _of_status(s: FeedStatus) -> Iterator[Figure]:
    for state in Standing:
        yield build_figure("windows", sum(w.state is state for w in s.windows), s.feed, str(state).replace(" ", "_"))
    lives = Counter(m.verdict.life for m in s.met.values())
    for life in Life:
        yield build_figure("live_batches", lives[life], s.feed, life.name.lower())
    yield from _of_findings(s.feed, s.findings)
    yield build_figure("refused_batches", len(s.refused), s.feed)
    yield build_figure("held_back_offsets", sum(h.offsets for h in s.held_back), s.feed)
    by_topic: Counter[str] = Counter()
    for p in s.partitions:
        if p.lag is not None:
            by_topic[p.key.topic] += p.lag
    for topic, lag in sorted(by_topic.items()):
        yield build_figure("lag_offsets", lag, s.feed, topic)
    if s.outlook:
        yield build_figure("uncommitted_offsets", s.uncommitted, s.feed)
        yield from _of_outlook(s.feed, s.outlook)


def _of_findings(feed: str, findings: Iterable[Finding]) -> Iterator[Figure]:
    alike = Counter((f.kind, "error" if f.severe else "warning", f.remedy) for f in findings)
    for labels, number in alike.items():
        yield build_figure("findings", number, feed, *labels)


def _of_outlook(feed: str, outlook: Outlook) -> Iterator[Figure]:
    numbers = {
        "pending_age_seconds": outlook.lag_seconds,
        "production_offsets_per_second": outlook.production,
        "landing_offsets_per_second": outlook.landing,
        "catch_up_seconds": outlook.catch_up_seconds,
        "lost_offsets": sum(r.span for o in outlook.lost for r in o.lost),
    }
    yield from (build_figure(name, value, feed) for name, value in numbers.items() if value is not None)
    spans: Counter[str] = Counter()
    remaining: dict[str, float] = {}
    for risk in outlook.at_risk:
        topic, seconds = risk.key.topic, max(0, risk.deleted_from - outlook.now) / 1000
        spans[topic] += sum(r.span for r in risk.ranges)
        remaining[topic] = min(seconds, remaining.get(topic, seconds))
    for topic, seconds in sorted(remaining.items()):
        yield build_figure("retention_at_risk_offsets", spans[topic], feed, topic)
        yield build_figure("retention_left_seconds", seconds, feed, topic)


def _of_ledger(ledger: Ledger, lake: Lake) -> Iterator[Figure]:
    """Totals, and the newest batch that landed something. Raises LakeUnavailable."""
    batches = [b for b in ledger.read().batches.values() if not b.rewrites]
    landed = [b for b in batches if b.published is not None]
    for outcome in (BatchStatus.PUBLISHED, BatchStatus.ABANDONED):
        yield build_figure("batches_total", sum(b.status is outcome for b in batches), ledger.feed, str(outcome))
    yield build_figure("landed_rows_total", sum(b.rows for b in landed), ledger.feed)
    if landed:
        newest = max(landed, key=lambda b: b.published or 0)
        yield from _of_batch(ledger.feed, ledger.recall(newest), ledger.publication(newest), lake)


def _of_batch(feed: str, batch: Batch, entry: PublishEntry, lake: Lake) -> Iterator[Figure]:
    facts = BatchFacts(entry.receipts, entry.traffic)
    yield build_figure("last_batch_published_timestamp_seconds", entry.at / 1000, feed)
    yield build_figure("last_batch_duration_seconds", max(0, entry.at - batch.planned_at) / 1000, feed)
    for outcome in ("landed", "quarantined", "dropped", "no_record"):
        yield build_figure("last_batch_offsets", getattr(facts.counts, outcome), feed, outcome)
    yield build_figure("last_batch_bytes", facts.bytes, feed)
    yield build_figure("last_batch_files", facts.files, feed)
    yield build_figure("last_batch_input_bytes", facts.task_time.input_bytes, feed)
    for activity, ns in facts.task_time.ns.items():
        yield build_figure("last_batch_task_seconds", ns / 1e9, feed, activity)
    yield build_figure("last_batch_throttled_seconds", facts.all_brokers.throttle_ms / 1000, feed)
    yield build_figure("last_batch_failed_offset_ranges", len(entry.failures), feed)
    reasons: Counter[str] = Counter()
    with suppress(LakeUnavailable, PartUnreadable):
        for fault in faults_of([p.path for _, p in facts.parts(PartKind.QUARANTINED)], lake):
            reasons[fault.kind.expectation or fault.kind.reason] += fault.records
    for reason, records in sorted(reasons.items()):
        yield build_figure("last_batch_quarantined_records", records, feed, reason)
