"""The figures of feeds, for `sluice metrics`: from their status, their ledgers, and what Dagster knows of runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from sluice.pipelines.errors import LakeUnavailable, PartUnreadable, SluiceError
from sluice.pipelines.model.figures import Figure, build_figure
from sluice.pipelines.model.receipts import Life, PartKind
from sluice.pipelines.operating.feed_status import FeedStatus, read_status_through
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.parallel import map_parallel

if TYPE_CHECKING:
    from sluice.cli.app.invocation import OpenPorts, Session
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.ledger.entries import PublishEntry
    from sluice.pipelines.ports import Lake
    from sluice.pipelines.status.outlook import Outlook

LIVES = {Life.ALIVE: "alive", Life.DEAD: "dead", Life.UNKNOWN: "unknown"}


def take_figures(session: Session, feeds: Sequence[Feed], broken: int, last: int) -> list[Figure]:
    """Returns the figures of feeds and their `last` windows. A feed that cannot be inspected has `sluice_up` 0."""
    began = time.time()
    with session.shared_edges(feeds) as open_ports:
        figures = [f for of in map_parallel(lambda feed: of_feed(open_ports, feed, last), list(feeds)) for f in of]
    figures += _of_runs(session, feeds)
    figures.append(build_figure("broken_feed_files", broken))
    figures += [
        build_figure("look_timestamp_seconds", began),
        build_figure("look_duration_seconds", time.time() - began),
    ]
    return figures


def of_feed(open_ports: OpenPorts, feed: Feed, last: int) -> list[Figure]:
    """All figures of one feed."""
    from sluice.pipelines.ledger import Ledger

    try:
        with open_ports(feed) as edges:
            ledger = Ledger(edges.lake, feed.name, edges.clock)
            status = read_status_through(edges, feed, ledger, last)
            figures = [*_of_ledger(ledger, edges.lake)] if status.partitions or status.last else []
            return [build_figure("up", status.error is None, feed.name), *_of_status(status), *figures]
    except SluiceError:
        return [build_figure("up", 0, feed.name)]


# -- where a feed stands


def _of_status(s: FeedStatus) -> Iterator[Figure]:
    for state in Standing:
        yield build_figure("windows", sum(w.standing is state for w in s.windows), s.feed, str(state).replace(" ", "_"))
    lives = Counter(m.verdict.life for m in s.met.values())
    for life, word in LIVES.items():
        yield build_figure("live_batches", lives[life], s.feed, word)
    yield build_figure("refused_batches", len(s.refused), s.feed)
    yield build_figure("held_back_offsets", sum(h.offsets for h in s.held), s.feed)
    by_topic: Counter[str] = Counter()
    for p in s.partitions:
        if p.lag is not None:
            by_topic[p.key.topic] += p.lag
    for topic, lag in sorted(by_topic.items()):
        yield build_figure("lag_offsets", lag, s.feed, topic)
    if s.outlook:
        yield build_figure("uncommitted_offsets", s.uncommitted, s.feed)
        yield from _of_outlook(s.feed, s.outlook)


def _of_outlook(feed: str, outlook: Outlook) -> Iterator[Figure]:
    numbers = {
        "owed_age_seconds": None if outlook.age is None else outlook.age / 1000,
        "production_offsets_per_second": outlook.production,
        "landing_offsets_per_second": outlook.landing,
        "catch_up_seconds": None if outlook.eta is None else outlook.eta / 1000,
        "lost_offsets": sum(r.span for o in outlook.lost for r in o.lost),
    }
    yield from (build_figure(name, value, feed) for name, value in numbers.items() if value is not None)
    spans: Counter[str] = Counter()
    remaining: dict[str, float] = {}
    for risk in outlook.at_risk:
        topic, seconds = risk.key.topic, max(0, risk.at - outlook.now) / 1000
        spans[topic] += sum(r.span for r in risk.ranges)
        remaining[topic] = min(seconds, remaining.get(topic, seconds))
    for topic, seconds in sorted(remaining.items()):
        yield build_figure("retention_at_risk_offsets", spans[topic], feed, topic)
        yield build_figure("retention_left_seconds", seconds, feed, topic)


def _of_ledger(ledger: Ledger, lake: Lake) -> Iterator[Figure]:
    """Totals, and the newest batch that landed something. Raises LakeUnavailable."""
    from sluice.pipelines.status.ledger_figures import newest_landed, of_batch, of_batches

    batches = [b for b in ledger.read().batches.values() if not b.rewrites]
    yield from of_batches(ledger.feed, batches)
    if newest := newest_landed(batches):
        entry = ledger.publication(newest)
        yield from of_batch(ledger.feed, ledger.recall(newest), entry)
        with suppress(LakeUnavailable, PartUnreadable):
            yield from _refused_records(ledger.feed, entry, lake)


def _refused_records(feed: str, entry: PublishEntry, lake: Lake) -> Iterator[Figure]:
    """Of a batch, by reason, counted in its files."""
    from sluice.pipelines.quarantine.limit import faults_of

    parts = [p for r in entry.receipts for p in r.of(PartKind.QUARANTINED)]
    reasons: Counter[str] = Counter()
    for fault in faults_of([p.path for p in parts], lake):
        reasons[fault.kind.expectation or fault.kind.reason] += fault.records
    for reason, records in sorted(reasons.items()):
        yield build_figure("last_batch_quarantined_records", records, feed, reason)


# -- runs


def _of_runs(session: Session, feeds: Sequence[Feed]) -> list[Figure]:
    """What Dagster knows; nothing where it is not installed, not in use, or does not answer."""
    from sluice.pipelines.util.extras import require

    try:
        require("dagster")
        from sluice.assets.operations.dagster_health import recent_runs

        recent = recent_runs(session.project, feeds)
    except SluiceError:
        return []
    return [build_figure("runs", runs, *labels) for labels, runs in sorted(recent.items())]
