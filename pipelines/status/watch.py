"""Findings that need attention: new and recreated topics, lag, hanging transactions, windows that stay partial, and
records that retention takes. The text of each finding includes its remedy.

Kafka is asked once for all feeds that read it (`view`); then each feed is checked against its ledger (`watch`). Nothing
is changed, and a feed that never ran has no findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sluice.pipelines.errors import SluiceError, UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import Isolation, Key, OpenTransaction, PartitionState, TopicPartition
from sluice.pipelines.planning import origins, windows
from sluice.pipelines.planning.held_back import HeldBack, find_unstable, list_held_back
from sluice.pipelines.ports import Cluster
from sluice.pipelines.status import strip
from sluice.pipelines.status.outlook import Outlook, look_ahead
from sluice.pipelines.status.window_state import Standing, WindowStanding
from sluice.pipelines.util.units import many, show_about, show_duration, show_window

T = TypeVar("T")

LAG = "lag"
"""The subject of the finding that a feed is late."""

WINDOWS = 100
"""How many of the oldest pending windows are checked for those that stay partial."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` identifies a finding within its feed, and stays the same as long as the finding lasts.

    `severe`: records are or will be lost, or nothing lands.
    """

    about: str
    text: str
    remedy: str
    severe: bool = False

    def __str__(self) -> str:
        return f"{self.text} → {self.remedy}"


@dataclass(frozen=True, slots=True)
class WatchResult:
    """One feed's findings, severe ones first, and its outlook (None: it never ran, or Kafka is another cluster)."""

    findings: tuple[Finding, ...]
    outlook: Outlook | None = None


@dataclass(frozen=True, slots=True)
class View:
    """One Kafka at one moment, for every feed that reads it. Partitions are seen as with read_committed."""

    cluster_id: str
    topics: Mapping[str, str]
    partitions: Mapping[str, Sequence[PartitionState]]
    holders: Mapping[TopicPartition, OpenTransaction]


def view(cluster: Cluster, feeds: Iterable[Feed]) -> View:
    """Everything the feeds need to know about their Kafka. Raises KafkaUnavailable and the like."""
    topics = cluster.topics()
    wanted = sorted({t for f in feeds for t in _matched_topics(f, topics)[0]})
    states: dict[str, list[PartitionState]] = {t: [] for t in wanted}
    for p in cluster.partitions(wanted, Isolation.READ_COMMITTED) if wanted else ():
        states[p.topic].append(p)
    waiting = [p.tp for ps in states.values() for p in find_unstable(ps)]
    return View(cluster.cluster_id(), topics, states, cluster.open_transactions(waiting) if waiting else {})


def watch(feed: Feed, ledger: Ledger, cluster: Cluster, previous: View, now: int) -> WatchResult:
    """The findings for one feed at `now` (ms). Raises KafkaUnavailable, LakeUnavailable, LedgerCorrupt."""
    state = ledger.read()
    if not state.origins:
        return WatchResult(())
    try:
        origins.check_cluster(state, previous.cluster_id, feed.name)
    except SluiceError as error:
        return WatchResult((Finding("cluster", error.message, error.remedy, severe=True),))
    topics, missing = _matched_topics(feed, previous.topics)
    partitions = [_under(feed, p) for t in topics for p in previous.partitions.get(t, ())]
    if _unlike(feed, state, partitions) or _find_absent(state, partitions, missing):
        cluster.forget()  # perhaps a run landed more since we asked Kafka: ask once more
        topics, missing = _matched_topics(feed, cluster.topics())
        partitions = [_under(feed, p) for p in cluster.partitions(topics, Isolation.READ_COMMITTED)]
    changed = _unlike(feed, state, partitions)
    sound = {origins.find_key(state, p): p for p in partitions if p.tp not in changed}
    outlook = look_ahead(feed, ledger, state, cluster, sound, now)
    findings = [
        *(Finding("topics", e.message, e.remedy, severe=True) for e in missing),
        *_changed_log_findings(changed),
        *_report_absent(feed, state, partitions, missing),
        *_lost(feed, outlook),
        *_at_risk(feed, outlook),
        *_unwarned_findings(outlook),
        *_find_gaps(feed, outlook),
        *_late(feed, outlook),
        *hanging(list_held_back(feed, sound.values(), previous.holders, outlook.broker, now)),
        *_partial(feed, ledger, state, sound, now),
        *_new(feed, state, partitions),
    ]
    return WatchResult(tuple(sorted(findings, key=lambda f: not f.severe)), outlook)


def _matched_topics(feed: Feed, available: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[UnknownTopic, ...]]:
    """The feed's topics that exist, and errors for those that do not."""
    try:
        return match(feed.topics, available), ()
    except UnknownTopic as error:
        return tuple(sorted(set(feed.topics.names) & available.keys())), (error,)


def _under(feed: Feed, p: PartitionState) -> PartitionState:
    return p if feed.isolation is Isolation.READ_COMMITTED else replace(p, last_stable_offset=p.high_watermark)


# -- the log is another, or short of records


def _unlike(feed: Feed, state: State, partitions: Iterable[PartitionState]) -> dict[TopicPartition, SluiceError]:
    return {r.tp: r.error for p in partitions if (r := origins.check_incarnation(state, p, {}, feed.name))}


def _changed_log_findings(changed: Mapping[TopicPartition, SluiceError]) -> Iterator[Finding]:
    for topic, errors in _by(changed.values(), lambda e: e.topic or "").items():
        text = errors[0].message + _more("; ", errors)
        yield Finding(f"changed {topic}", text, errors[0].remedy, severe=True)


def _find_absent(
    state: State, partitions: Iterable[PartitionState], missing: Sequence[UnknownTopic]
) -> list[TopicPartition]:
    """Returns the partitions of the ledger that Kafka lacks; none while a topic of the feed's list is missing."""
    there = {p.tp for p in partitions}
    return [] if missing else [k.tp for k in state.known() if k.tp not in there]


def _report_absent(
    feed: Feed, state: State, partitions: Iterable[PartitionState], missing: Sequence[UnknownTopic]
) -> Iterator[Finding]:
    for topic, tps in _by(_find_absent(state, partitions, missing), lambda tp: tp.topic).items():
        text = f"windows wait for {tps[0]}, which Kafka does not list for the feed any more{_more('; nor ', tps)}"
        yield Finding(f"absent {topic}", text, origins.advise_absent(feed.name), severe=True)


def _lost(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, lost in _by(outlook.lost, lambda o: o.key.topic).items():
        start = lost[0].lost[0].start
        first = origins.explain_out_of_range(start, lost[0].key, lost[0].partition, feed.name)
        if first is not None:
            text = first.message + _more("; so it is in ", lost)
            yield Finding(f"lost {topic}", text, first.remedy, severe=True)


def _at_risk(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, risks in _by(outlook.at_risk, lambda r: r.key.topic).items():
        text = risks[0].describe(outlook.now) + _more("; then ranges of ", risks)
        yield Finding(f"retention {topic}", text, f"land it before: sluice run {feed.name}", severe=True)


def _unwarned_findings(outlook: Outlook) -> Iterator[Finding]:
    if outlook.unwarned:
        yield Finding("settings", outlook.unwarned.text, outlook.unwarned.remedy)


def _find_gaps(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    for topic, offsets in outlook.gaps.items():
        yield Finding(
            f"gaps {topic}",
            f"{many(offsets, 'offset')} of {topic} that landed last were in no batch of the log, and Kafka does not"
            " compact the topic: it lost records there, unless it once did",
            f"compare the replicas' logs (kafka-dump-log) where this names them: sluice audit {feed.name}",
        )


# -- it is late


def _late(feed: Feed, outlook: Outlook) -> Iterator[Finding]:
    late = feed.alerts.late(feed.window)
    if outlook.age is None or outlook.age <= late:
        return
    oldest = min((o for o in outlook.pending if o.since is not None), key=lambda o: o.since or 0)
    pace = "; more is produced than lands" if outlook.falls_behind else ""
    takes = "" if outlook.eta is None else f", which takes about {show_about(outlook.eta)}"
    yield Finding(
        LAG,
        f"the oldest record that is pending, of {oldest.key}, is {show_about(outlook.age)} old (alerts.lag "
        f"{show_duration(late)}); {outlook.lag} offsets are behind{pace}",
        f"catch up: sluice run {feed.name}{takes}; see that its schedule is on and its runs succeed",
    )


def hanging(held_back: Iterable[HeldBack]) -> Iterator[Finding]:
    """Findings for transactions that hold records back and have been idle for long."""
    for item in held_back:
        if item.overdue and item.by is not None:
            yield Finding(f"transaction {item.by.producer_id} {item.held[0].tp}", item.text, item.remedy)


def _partial(
    feed: Feed, ledger: Ledger, state: State, sound: Mapping[Key, PartitionState], now: int
) -> Iterator[Finding]:
    """A finding for the oldest window that closed long ago and has landed only in part."""
    closed = now - feed.alerts.partial - feed.window.grace - feed.window.length
    late = [w for w in windows.list_pending_windows(state, feed.window, now) if w <= closed][:WINDOWS]
    ends = {k: p.last_stable_offset for k, p in sound.items()}
    facts = strip.outside_facts(ledger, state, ends, {}, ()) if late else strip.LEDGER_ALONE
    unfinished = (s for s in strip.standings(state, feed.window, late, now, facts) if s.done or s.batch is not None)
    partial = [s for s in unfinished if s.standing in (Standing.PARTIAL, Standing.FAILED)]
    for s in partial[:1]:
        name, since = show_window(s.window), show_about(now - s.window - feed.window.length)
        rest = _more("; ", partial, "window")
        text = f"window {name} ended {since} ago and is {s.standing}: {_show_pending(s)}{rest}"
        remedy = f"sluice status {feed.name} says why; then sluice run {feed.name} --window {name}"
        yield Finding("partial", text, remedy)


def _show_pending(s: WindowStanding) -> str:
    first = s.pending[0]
    ranges = "its end is not resolved" if not first.ranges else f"lacks {first.ranges[0]}"
    return f"{first.key} {ranges}" + _more(", and ", s.pending)


# -- there is more to read


def _new(feed: Feed, state: State, partitions: Sequence[PartitionState]) -> Iterator[Finding]:
    known_topics = {tp.topic for tp in state.current}
    new = _by((p for p in partitions if p.tp not in state.current), lambda p: p.topic)
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


def _by(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
