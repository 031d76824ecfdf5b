"""The strict audit: everything that Sluice can check beyond the account, against Kafka and the lake as they are now.

It checks the committed offsets in Kafka, and every commit in the ledger, against what was published by then (invariants
7 and 8); cluster, topic ids and the ends of logs (12, 3); windows and their manifests (4). What cannot be compared is
named, so that nobody takes silence for proof.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.pipelines.account.audit import AuditProblem, live_receipts
from sluice.pipelines.batch.survey import Survey
from sluice.pipelines.committing.commit import CommitVerdict, verdict
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import CommitEntry, Entry, IntentEntry
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.vocabulary.errors import LogTruncated
from sluice.pipelines.vocabulary.kafka import CommittedOffset, Key, PartitionState
from sluice.pipelines.vocabulary.ranges import Range, union
from sluice.pipelines.vocabulary.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Unseen:
    """Landed records that were not compared because Kafka no longer holds them, and why."""

    key: Key
    ranges: tuple[Range, ...]
    records: int
    why: str


@dataclass(frozen=True, slots=True)
class Strict:
    """The problems, and how much was checked: committed offsets (in Kafka and in the ledger), and windows."""

    problems: tuple[AuditProblem, ...]
    unseen: tuple[Unseen, ...]
    commits: int = 0
    """Partitions whose committed offset Kafka tells."""
    recorded: int = 0
    """Commit entries of the ledger."""
    windows: int = 0
    expired: tuple[Key, ...] = ()
    """Partitions whose committed offset the ledger knows and Kafka does not any more: nobody moved it."""


def strict(ledger: Ledger, lake: Lake, feed: Feed, found: Survey) -> Strict:
    """Check ledger, committed offsets and manifests against one another. `found` is Kafka as it is now.

    The survey has already refused a ledger that lost entries, so no mark is above the fold.
    """
    state = found.state
    by_ledger, recorded = _in_the_ledger(ledger)
    by_kafka = list(_in_kafka(ledger, state, found)) if feed.commit is not CommitMode.NONE else []
    shown = windows.manifest_windows(state, feed.window)
    expired = tuple(k for k in state.known() if k in state.commits and found.committed.get(k.tp, _OTHER) is None)
    return Strict(
        problems=(*_ids(state, found), *by_ledger, *by_kafka, *_manifests(lake, feed, state)),
        unseen=tuple(_unseen_receipts(live_receipts(ledger, state), found.partitions)),
        commits=sum(found.committed.get(k.tp) is not None for k in state.known() if k in found.partitions),
        recorded=recorded,
        windows=len(shown),
        expired=expired if feed.commit is not CommitMode.NONE else (),
    )


_OTHER = CommittedOffset(0)


# -- cluster, topics, ends


def _ids(state: State, found: Survey) -> Iterator[AuditProblem]:
    if state.cluster and state.cluster != found.cluster_id:
        yield AuditProblem(12, f"the ledger belongs to cluster {state.cluster}, Kafka answers as {found.cluster_id}")
    for r in found.refusals:
        yield AuditProblem(3 if isinstance(r.error, LogTruncated) else 12, r.error.message)
    there = {k.tp for k in found.partitions} | {r.tp for r in found.refusals}
    for key in state.known():
        if key.tp not in there:
            yield AuditProblem(12, f"{key}: the ledger knows topic id {key.topic_id}, and Kafka has no such partition")


# -- committed offsets


def _in_the_ledger(ledger: Ledger) -> tuple[list[AuditProblem], int]:
    """Check every commit entry against the fold below it; also how many there are."""
    problems, looked, state, waiting = list[AuditProblem](), 0, State(), list[Entry]()
    for number, entry in ledger.entries():
        if isinstance(entry, CommitEntry):
            state, waiting = state.extended(waiting), []
            looked += 1
            problems += _ahead(state, number, entry)
        waiting.append(entry)
    return problems, looked


def _ahead(state: State, number: int, entry: CommitEntry) -> Iterator[AuditProblem]:
    for item in entry.offsets:
        frontier = state.frontier(item.key) if item.key in state.origins else 0
        if item.offset > frontier:
            said = f"{item.key}: entry {number} records {item.offset} as committed"
            yield AuditProblem(7, f"{said}, and published was up to {frontier}")


def _in_kafka(ledger: Ledger, state: State, found: Survey) -> Iterator[AuditProblem]:
    """Check Kafka's offsets: none ahead of what was published when it was committed, none behind the ledger."""
    for key, frontier in state.frontiers().items():
        held = found.committed.get(key.tp)
        if held is None or key not in found.partitions:
            continue
        if held.offset > frontier:
            yield AuditProblem(7, f"{key}: the group holds {held.offset}, and published is up to {frontier}")
            continue
        yield from _check_verdict(ledger, state, key, frontier, held)


def _check_verdict(
    ledger: Ledger, state: State, key: Key, frontier: int, held: CommittedOffset
) -> Iterator[AuditProblem]:
    last = state.commits.get(key)
    match verdict(state, key, frontier, held):
        case CommitVerdict.MOVED:
            expected = last if last is not None else state.origins[key].committed
            yield AuditProblem(8, f"{key}: the group holds {held.offset}, the ledger expects {expected}")
        case _:
            yield from _check_mark(ledger, state, key, held)


def _check_mark(ledger: Ledger, state: State, key: Key, held: CommittedOffset) -> Iterator[AuditProblem]:
    """The mark beside the offset must name the intent that wrote it, in this life of the topic."""
    mark = Mark.parse(held.metadata)
    if mark is None or mark.ledger != state.ledger_id or mark.incarnation != key.incarnation:
        return
    if state.lost_entry(mark.number):
        return  # somebody accepted that it is gone; the next commit puts a mark that stands
    entry = ledger.entry(mark.number)
    meant = entry.offsets if isinstance(entry, IntentEntry) else ()
    if not any(o.key == key and o.offset == held.offset for o in meant):
        yield AuditProblem(
            11, f"{key}: committed {held.offset} names entry {mark.number}, which meant nothing of the kind"
        )


# -- windows


def _manifests(lake: Lake, feed: Feed, state: State) -> Iterator[AuditProblem]:
    """A window must have a manifest exactly when it is complete, with the pinned boundaries."""
    standing = set(lake.list(paths.manifest_folder(feed.name)))
    length = feed.window.length
    for window in windows.manifest_windows(state, feed.window):
        path = paths.window_path(feed.name, window, length)
        complete = windows.complete(state, window, feed.window)
        kept = complete and not manifest.is_retired(state, window, length)
        if kept and path not in standing:
            yield AuditProblem(4, f"{path} is missing, and its window is complete; the next run writes it")
    for path in sorted(standing):
        yield from _stands_right(lake, path, state)


def _stands_right(lake: Lake, path: str, state: State) -> Iterator[AuditProblem]:
    """A window declared complete must be accounted for, at the boundaries it names, in any life of the topic."""
    lasts, content = paths.manifest_window(path), lake.get(path)
    if lasts is None or content is None:
        yield AuditProblem(10, f"{path} is no window's manifest", path, "move that file out of the lake's folder")
        return
    try:
        said = json.loads(content)
        named = [
            (b["topic"], b["partition"], b["topic_id"], int(b["start"]), int(b["end"])) for b in said["boundaries"]
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        yield AuditProblem(4, f"{path} cannot be read", path, "remove that file; the next run writes it anew")
        return
    if manifest.is_retired(state, *lasts):
        yield AuditProblem(4, f"{path} stands, and rows of its window were retired")
    for topic, partition, topic_id, start, end in named:
        lives = [k for k in state.origins if (k.topic, k.partition, k.topic_id) == (topic, partition, topic_id)]
        held = union(r for k in lives for r in state.accounted(k))
        if start < end and not any(r.start <= start and end <= r.end for r in held):
            yield AuditProblem(4, f"{path} says complete, and of {topic}:{partition}:{start}-{end} something is owed")


# -- what cannot be compared


def _unseen_receipts(receipts: list[Receipt], partitions: Mapping[Key, PartitionState]) -> Iterator[Unseen]:
    found: dict[tuple[Key, str], list[Receipt]] = {}
    for r in receipts:
        if r.counts.landed and (why := _why_not(r, partitions)):
            found.setdefault((r.slice.key, why), []).append(r)
    for (key, why), mine in sorted(found.items()):
        yield Unseen(key, union(r.slice.range for r in mine), sum(r.counts.landed for r in mine), why)


def _why_not(r: Receipt, partitions: Mapping[Key, PartitionState]) -> str:
    today = partitions.get(r.slice.key)
    if today is None:
        return "of an earlier life of the topic, or of a partition that changed"
    if r.slice.start < today.log_start:
        return f"below the log start {today.log_start}"
    return f"beyond the log's end {today.high_watermark}" if r.slice.end > today.high_watermark else ""
