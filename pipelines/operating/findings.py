"""The findings about a feed: each problem, its severity, its begin and the remedy.

This is the only list of them: `status`, `check`, `doctor`, the sensor, notifications and metrics print it. It covers
each state in which a run is refused (by ledger, group, topics, a batch or a commit), files that are missing or cut
short, lag, hanging transactions and retention. Nothing is changed. A feed that never ran has only findings that refuse
its first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.pipelines.audit.gaps import find_remedies
from sluice.pipelines.batch.result import describe_first_failure, find_remedy
from sluice.pipelines.committing.commit import CommitVerdict, explain_moved, judge
from sluice.pipelines.errors import BatchRefused, GroupHeld, GroupMoved, SluiceError, is_transient
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Life, Part, RangeFailure, sum_counts
from sluice.pipelines.planning import origins, windows
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import publish
from sluice.pipelines.publishing.manifest import find_wrong_files
from sluice.pipelines.status import strip
from sluice.pipelines.status.outlook import Outlook, read_recent
from sluice.pipelines.status.window_state import Standing, describe_pending
from sluice.pipelines.util.documents import Derived, Instant
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import many, show_about, show_duration, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.batch.survey import Survey
    from sluice.pipelines.operating.feed_status import FeedStatus

WINDOWS = 100
"""How many of the oldest pending windows are checked for those that stay partial."""

MOSTLY = 0.5
"""The share of the newest batch in quarantine that is a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` identifies a finding within its feed as long as the finding lasts. Its first word is the kind.

    `severe`: records are or will be lost, runs are refused, or files cannot be read. `since` (ms) is when it began, if
    known.
    """

    about: str
    text: str
    remedy: str
    severe: bool = False
    since: Instant | None = None

    @property
    def kind(self) -> Derived[str]:
        return self.about.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.text} → {self.remedy}"

    @property
    def as_alert(self) -> str:
        """Returns the line of a notification: also since when, and the outcome if nobody acts."""
        since = f"; since {show_instant(self.since // 1000 * 1000)}" if self.since is not None else ""
        return f"{self.text}{since}. If nobody acts: {OUTCOMES.get(self.kind, OUTCOMES[''])} → {self.remedy}"


OUTCOMES = {
    "": "runs stay refused, and Kafka deletes pending records at the topic's retention",
    "files": "readers of these windows fail, and the rows cannot land again once Kafka has deleted their records",
    "failed": "these offsets stay pending, and Kafka deletes their records at the topic's retention",
    "quarantine": "these records stay out of landed rows until a replay",
    "lost": "the records stay lost; runs of feeds with on_loss: fail stay refused",
    "retention": "Kafka deletes the records before they land",
    "settings": "a deletion of pending records is not announced",
    "gaps": "the offsets stay without rows, and the audit counts them as compacted",
    "lag": "the lag lasts or grows, until Kafka deletes pending records at the topic's retention",
    "transaction": "the windows behind the transaction stay open",
    "partial": "the windows stay incomplete, and their readers wait or fail",
    "unfinished": "its offsets stay reserved until a run takes them over",
    "partitions": "their records land with the next run",
    "topic": "its records land with the next run",
}
"""The outcome of a finding of each kind if nobody acts; of all others, by the empty kind."""


def list_findings(
    feed: Feed, ports: Ports, ledger: Ledger, state: State, survey: Survey | None, status: FeedStatus
) -> tuple[Finding, ...]:
    """Returns the findings, severe ones first. `survey` is None if it was refused or impossible: `status.error`.

    Raises KafkaUnavailable, LakeUnavailable, LedgerCorrupt.
    """
    findings = list(explain_error(status.error)) if survey is None else list(_find_changed(survey))
    # Before the first landing nothing can be wrong with files and batches.
    if state.origins:
        published = read_recent(ledger, state)
        findings += [
            *_find_refused(feed, status),
            *_find_failed(feed, ledger, state),
            *_find_wrong_files(feed, ports, ledger, state, published),
            *_find_quarantine(feed, published[-1][1] if published else None),
            *_find_unfinished(status),
        ]
    if status.outlook and (unwarned := status.outlook.unwarned):
        findings.append(Finding("settings", unwarned.text, unwarned.remedy))
    # These need Kafka's answer.
    if state.origins and survey is not None:
        outlook, now = status.outlook or Outlook(ports.clock()), ports.clock()
        findings += [
            *_find_absent(feed, state, survey),
            *_find_refused_commit(feed, ports, state, survey, status),
            *_find_lost(feed, outlook),
            *_find_at_risk(feed, outlook),
            *_find_gaps(feed, outlook),
            *_find_lag(feed, outlook),
            *_find_hanging(status),
            *_find_partial(feed, ledger, state, survey, now),
            *_find_new(feed, state, survey),
        ]
    return tuple(sorted(findings, key=lambda f: not f.severe))


# -- runs are refused


def explain_error(error: SluiceError | None) -> Iterator[Finding]:
    """Yields the finding of an error that refuses runs or keeps them from the feed."""
    if error is not None:
        about = _ABOUT.get(type(error).__name__, type(error).__name__)
        yield Finding(about, error.message, error.remedy, severe=not is_transient(error))


_ABOUT = {"ClusterChanged": "cluster", "UnknownTopic": "topics", "EntriesLost": "ledger", "ForeignMarks": "group"}
_ABOUT |= dict.fromkeys(("LedgerCorrupt", "LedgerTooNew"), "ledger")


def _find_changed(survey: Survey) -> Iterator[Finding]:
    for topic, refusals in group_by(survey.refusals, lambda r: r.tp.topic).items():
        error = refusals[0].error
        yield Finding(f"changed {topic}", error.message + _more("; ", refusals), error.remedy, severe=True)


def _find_absent(feed: Feed, state: State, survey: Survey) -> Iterator[Finding]:
    there = {k.tp for k in survey.partitions} | {r.tp for r in survey.refusals}
    absent = (k.tp for k in state.known() if k.tp not in there)
    for topic, tps in group_by(absent, lambda tp: tp.topic).items():
        text = f"windows wait for {tps[0]}, which Kafka does not list for the feed any more{_more('; nor ', tps)}"
        yield Finding(f"absent {topic}", text, origins.advise_absent(feed.name), severe=True)


def _find_refused(feed: Feed, status: FeedStatus) -> Iterator[Finding]:
    for batch in (b for b in status.live if b.id in status.refused):
        why = status.refused[batch.id]
        text = f"batch {batch.id} was refused and stays staged: {why.message}"
        remedy = f"{why.remedy}; then: sluice run {feed.name}"
        remedy += f"; or abandon it: sluice repair {feed.name} --abandon {batch.id}"
        yield Finding(f"refused {batch.id}", text, remedy, severe=True, since=batch.planned_at)


def _find_failed(feed: Feed, ledger: Ledger, state: State) -> Iterator[Finding]:
    """Yields the offset ranges that failed while the rest of their batch was published, and are still pending."""
    failed: dict[str, list[RangeFailure]] = {}
    since: dict[str, int] = {}
    for batch in state.batches.failed_in_part()[-strip.RECENT :]:
        entry = ledger.publication(batch)
        for f in (f for f in entry.failures if f.error != BatchRefused.__name__):
            s = f.offset_range
            if state.current.get(s.key.tp) == s.key and any(r.meets(s.range) for r in state.holes(s.key)):
                failed.setdefault(f.error, []).append(f)
                since.setdefault(f.error, entry.at)
    for error, failures in failed.items():
        remedy = find_remedy(feed.name, failures[-1]) or f"run again: sluice run {feed.name}"
        yield Finding(
            f"failed {error}", describe_first_failure(failures[::-1]), remedy, severe=True, since=since[error]
        )


def _find_refused_commit(
    feed: Feed, ports: Ports, state: State, survey: Survey, status: FeedStatus
) -> Iterator[Finding]:
    if feed.commit is CommitMode.NONE:
        return
    frontiers = {k: o for k, o in state.frontiers().items() if k in survey.partitions}
    moved = [k for k, o in frontiers.items() if judge(state, k, o, survey.committed.get(k.tp)) is CommitVerdict.MOVED]
    ends = {k.tp: p.high_watermark for k, p in survey.partitions.items()}
    try:
        policy = feed.policies.on_group_moved
        if moved and (error := explain_moved(feed.name, policy, state, moved, survey.committed, ends)):
            raise error
        if status.uncommitted:
            ports.group.check_alone()
    except (GroupMoved, GroupHeld) as refused:
        yield Finding("commit", refused.message, refused.remedy, severe=True)


# -- files


def _find_wrong_files(
    feed: Feed, ports: Ports, ledger: Ledger, state: State, published: Sequence[tuple[Batch, PublishEntry]]
) -> Iterator[Finding]:
    """Yields a finding for files of these batches that are missing, or whose size is not the ledger's."""
    ranges: dict[str, list[OffsetRange]] = {}
    parts: list[Part] = []
    for receipt in (r for b, e in published for r in state.receipts(b.published or 0, e)):
        for part in receipt.parts:
            ranges.setdefault(part.path, []).append(receipt.offset_range)
            parts.append(part)
    wrong = [error for error in find_wrong_files(ports.lake, parts).values() if error]
    replaced = ledger.list_replaced(error.path for error in wrong) if wrong else ()
    wrong = [error for error in wrong if error.path not in replaced]
    for error in wrong[:1]:
        remedy = find_remedies(feed.name, {error.path: ranges[error.path]}, state, ports.cluster).get(error.path)
        text = error.message + _more("; so are ", wrong, "file")
        if wrong[1:]:
            remedy = f"land their offsets again: sluice run {feed.name} --missing-files"
        yield Finding("files", text, remedy or error.remedy, severe=True)


def _find_quarantine(feed: Feed, newest: PublishEntry | None) -> Iterator[Finding]:
    counts = sum_counts(newest.receipts if newest else ())
    if newest and counts.quarantined > MOSTLY * counts.records:
        share = f"{counts.quarantined:,} of {counts.records:,} records of batch {newest.batch} are in quarantine"
        yield Finding("quarantine", share, f"list them by reason: sluice quarantine list {feed.name}", since=newest.at)


# -- records are lost, or will be


def _find_lost(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, lost in group_by(outlook.lost, lambda o: o.key.topic).items():
        start = lost[0].lost[0].start
        first = origins.explain_out_of_range(start, lost[0].key, lost[0].partition, feed.name)
        if first is not None:
            text = first.message + _more("; so it is in ", lost)
            yield Finding(f"lost {topic}", text, first.remedy, severe=True)


def _find_at_risk(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, risks in group_by(outlook.at_risk, lambda r: r.key.topic).items():
        text = risks[0].describe(outlook.now) + _more("; then ranges of ", risks)
        if outlook.falls_behind or (outlook.eta or 0) > max(risks[0].deleted_from - outlook.now, 0):
            text += "; landing takes longer than that: use more machines"
        elif outlook.eta is not None:
            text += f"; landing takes about {show_about(outlook.eta)}"
        yield Finding(f"retention {topic}", text, f"land it before: sluice run {feed.name}", severe=True)


def _find_gaps(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, offsets in outlook.gaps.items():
        yield Finding(
            f"gaps {topic}",
            f"{many(offsets, 'offset')} of {topic} that landed last were in no batch of the log, and Kafka does not"
            " compact the topic: it lost records there, unless it once did",
            f"compare the replicas' logs (kafka-dump-log) where this names them: sluice audit {feed.name}",
        )


# -- it is late


def _find_lag(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    late = feed.alerts.late(feed.window)
    if outlook.age is None or outlook.age <= late:
        return
    oldest = min((o for o in outlook.pending if o.since is not None), key=lambda o: o.since or 0)
    pace = "; more is produced than lands" if outlook.falls_behind else ""
    takes = "" if outlook.eta is None else f"; landing them takes about {show_about(outlook.eta)}"
    yield Finding(
        "lag",
        f"the oldest pending record ({oldest.key}) is {show_about(outlook.age)} old (alerts.lag "
        f"{show_duration(late)}); {many(outlook.lag, 'offset')} behind{pace}{takes}",
        f"catch up: sluice run {feed.name}; see that its schedule is on and its runs succeed",
        since=outlook.since,
    )


def _find_hanging(status: FeedStatus) -> Iterator[Finding]:
    """Yields transactions that hold records back and have been idle for long."""
    for item in status.held_back:
        if item.overdue and item.transaction is not None:
            about = f"transaction {item.transaction.producer_id} {item.partitions[0].tp}"
            yield Finding(about, item.message, item.remedy, since=item.transaction.last_written)


def _find_partial(feed: Feed, ledger: Ledger, state: State, survey: Survey, now: int) -> Iterator[Finding]:
    """Yields the oldest window that closed long ago and has landed only in part."""
    closed = now - feed.alerts.partial - feed.window.grace
    late = [w for w in windows.list_pending_windows(state, feed.window, now) if feed.window.end_of(w) <= closed][
        :WINDOWS
    ]
    ends = {k: p.last_stable_offset for k, p in survey.partitions.items()}
    facts = strip.outside_facts(ledger, state, ends, {}, ()) if late else strip.LEDGER_ALONE
    unfinished = (
        s for s in strip.standings(state, feed.window, late, now, facts) if s.accounted or s.batch is not None
    )
    partial = [s for s in unfinished if s.state in (Standing.PARTIAL, Standing.FAILED)]
    for s in partial[:1]:
        name, end = feed.window.name(s.start), feed.window.end_of(s.start)
        text = f"window {name} ended {show_about(now - end)} ago and is {s.state}: {describe_pending(s.pending)}"
        remedy = f"sluice check {feed.name} {name} says why; then sluice run {feed.name} --window {name}"
        yield Finding("partial", text + _more("; ", partial, "window"), remedy, since=end)


def _find_unfinished(status: FeedStatus) -> Iterator[Finding]:
    """Yields the batches of dead runs that the next run will finish."""
    for batch in (b for b in status.live if b.id not in status.refused):
        met = status.met[batch.id]
        if met.verdict.life is Life.DEAD:
            remedy = publish.find_remedy(status.feed, batch, met.verdict)
            yield Finding(f"unfinished {batch.id}", str(met), remedy, since=batch.planned_at)


# -- there is more to read


def _find_new(feed: Feed, state: State, survey: Survey) -> Iterator[Finding]:
    known_topics = {tp.topic for tp in state.current}
    new = group_by((p for k, p in survey.partitions.items() if k.tp not in state.current), lambda p: p.topic)
    for topic, unseen in new.items():
        run = f"the next run reads them: sluice run {feed.name}"
        if topic in known_topics:
            numbers = ", ".join(str(p.partition) for p in unseen[:5]) + (" …" if len(unseen) > 5 else "")
            yield Finding(f"partitions {topic}", f"{topic} has new partitions: {numbers}", run)
        else:
            text = f"{topic} is new and matches `{feed.topics}` ({many(len(unseen), 'partition')})"
            yield Finding(f"topic {topic}", text, f"{run}; then reload definitions to see the topic in the graph")


def _more(before: str, items: Sequence[object], what: str = "partition") -> str:
    """`; 2 more partitions`, where there are others than the first."""
    return f"{before}{many(len(items) - 1, f'more {what}')}" if len(items) > 1 else ""
