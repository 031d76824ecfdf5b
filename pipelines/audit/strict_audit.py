"""The strict audit: every further check against Kafka and the lake in their current state.

It checks the committed offsets in Kafka and every commit in the ledger against the offsets published before (invariants
7 and 8); cluster, topic ids and log ends (12, 3); windows and their manifests (4). It reports everything that cannot be
compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.pipelines.audit.audit import AuditProblem, AuditReport
from sluice.pipelines.audit.audit_cache import Strictly, tag
from sluice.pipelines.audit.receipt_rows import ReceiptRow
from sluice.pipelines.batch.survey import Survey
from sluice.pipelines.committing.commit import CommitVerdict, judge
from sluice.pipelines.errors import LogTruncated
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State, checkpoint
from sluice.pipelines.ledger.entries import CommitEntry, Entry, IntentEntry
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.model.kafka import CommittedOffset, Key, PartitionState, Range, union
from sluice.pipelines.model.receipts import name_dataset
from sluice.pipelines.planning import origins, windows
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.publishing import manifest
from sluice.pipelines.tables.check import TableComparison, compare, load_both
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.pipelines.util.documents import AsText, Flat, Internal
from sluice.pipelines.util.units import many


@dataclass(frozen=True, slots=True)
class Unseen:
    """Landed records that were not compared because Kafka no longer holds them, and why."""

    key: Flat[Key]
    ranges: tuple[Range, ...]
    records: int
    why: str


@dataclass(frozen=True, slots=True)
class Strict:
    """The problems, and the number of checked committed offsets (in Kafka and in the ledger) and windows."""

    problems: Internal[tuple[AuditProblem, ...]]
    unseen: tuple[Unseen, ...]
    committed_offsets: int = 0
    """Partitions with a committed offset in Kafka."""
    commit_entries: int = 0
    """Commit entries of the ledger."""
    windows: int = 0
    strictly: Internal[Strictly | None] = None
    """The results that the next strict audit may rely on."""
    expired: AsText[tuple[Key, ...]] = ()
    """Partitions whose committed offset is in the ledger and has expired in Kafka."""


def strict(ledger: Ledger, lake: Lake, feed: Feed, survey: Survey, report: AuditReport) -> Strict:
    """Check ledger, committed offsets and manifests against each other. `report` is the audit with earlier results.

    The survey has already refused a ledger that lost entries, so no mark is above the fold.
    """
    state, before = survey.state, report.audited.strictly
    if before is not None and any(number >= before.number for number, _ in state.gaps):
        before = None  # entries were lost since: offsets may no longer be accounted for
    by_ledger, recorded, below = _in_the_ledger(ledger, before, state)
    by_kafka = list(_in_kafka(ledger, state, survey)) if feed.commit is not CommitMode.NONE else []
    expected = windows.list_manifest_windows(state, feed.window)
    by_manifest, read = _manifests(lake, feed, state, before)
    expired = tuple(k for k in state.known() if k in state.commits and survey.committed.get(k.tp, _OTHER) is None)
    return Strict(
        problems=(*_ids(feed, state, survey), *by_ledger, *by_kafka, *by_manifest),
        unseen=tuple(_list_unseen(report.list_uncompared(), survey.partitions)),
        committed_offsets=sum(survey.committed.get(k.tp) is not None for k in state.known() if k in survey.partitions),
        commit_entries=recorded,
        windows=len(expected),
        strictly=None if by_ledger else Strictly(below.number, recorded, checkpoint.dump(below), read),
        expired=expired if feed.commit is not CommitMode.NONE else (),
    )


_OTHER = CommittedOffset(0)


# -- cluster, topics, ends


def _ids(feed: Feed, state: State, survey: Survey) -> Iterator[AuditProblem]:
    if state.cluster and state.cluster != survey.cluster_id:
        yield AuditProblem(12, f"the ledger belongs to cluster {state.cluster}, Kafka answers as {survey.cluster_id}")
    for r in survey.refusals if not feed.retired else ():  # a retired feed lands nothing of these logs
        invariant = 3 if isinstance(r.error, LogTruncated) else 12
        yield AuditProblem(invariant, r.error.message, remedy=r.error.remedy)
    there = {k.tp for k in survey.partitions} | {r.tp for r in survey.refusals}
    for key in state.known():
        if key.tp not in there:
            text = f"windows wait for {key.tp}, which Kafka does not list for the feed any more"
            yield AuditProblem(12, text, remedy=origins.advise_absent(feed.name))


# -- committed offsets


def _in_the_ledger(ledger: Ledger, before: Strictly | None, now: State) -> tuple[list[AuditProblem], int, State]:
    """Check each unchecked commit entry against the fold below it. Returns the problems, the number of commit entries,
    and the fold up to the newest entry."""
    begun = checkpoint.load(before.state) if before else None
    sound = before is not None and begun is not None and begun.number == before.number <= now.number
    state, looked = (begun, before.recorded) if sound and begun and before else (State(), 0)
    problems, waiting = list[AuditProblem](), list[Entry]()
    for number, entry in ledger.entries(state.number) if state.number < now.number else ():
        if number >= now.number:
            break
        if isinstance(entry, CommitEntry):
            state, waiting = state.extend(waiting), []
            looked += 1
            problems += _ahead(state, number, entry)
        waiting.append(entry)
    return problems, looked, state.extend(waiting)


def _ahead(state: State, number: int, entry: CommitEntry) -> Iterator[AuditProblem]:
    for item in entry.offsets:
        frontier = state.frontier(item.key) if item.key in state.origins else 0
        if item.offset > frontier:
            message = f"{item.key}: entry {number} records {item.offset} as committed"
            yield AuditProblem(7, f"{message}, but only {frontier} was published")


def _in_kafka(ledger: Ledger, state: State, survey: Survey) -> Iterator[AuditProblem]:
    """Check Kafka's offsets: none is ahead of the published offsets or behind the ledger."""
    for key, frontier in state.frontiers().items():
        committed = survey.committed.get(key.tp)
        if committed is None or key not in survey.partitions:
            continue
        if committed.offset > frontier:
            yield AuditProblem(7, f"{key}: the group holds {committed.offset}, but only {frontier} is published")
            continue
        last = state.commits.get(key)
        match judge(state, key, frontier, committed):
            case CommitVerdict.MOVED:
                expected = last if last is not None else state.origins[key].committed
                yield AuditProblem(8, f"{key}: the group holds {committed.offset}, the ledger expects {expected}")
            case _:
                yield from _check_mark(ledger, state, key, committed)


def _check_mark(ledger: Ledger, state: State, key: Key, committed: CommittedOffset) -> Iterator[AuditProblem]:
    """Check that the mark in the offset's metadata names the intent that wrote it, in this life of the topic."""
    mark = Mark.parse(committed.metadata)
    if mark is None or mark.ledger != state.ledger_id or mark.incarnation != key.incarnation:
        return
    if state.lost_entry(mark.number):
        return  # its loss was accepted; the next commit writes a valid mark
    entry = ledger.entry(mark.number)
    meant = entry.offsets if isinstance(entry, IntentEntry) else ()
    if not any(o.key == key and o.offset == committed.offset for o in meant):
        yield AuditProblem(
            11, f"{key}: committed {committed.offset} names entry {mark.number}, which is not its intent"
        )


# -- windows


def _manifests(
    lake: Lake, feed: Feed, state: State, before: Strictly | None
) -> tuple[list[AuditProblem], tuple[int, ...]]:
    """Check that exactly the complete windows have a manifest, with the pinned boundaries. Returns the problems and
    the tags of correct manifests. Manifests read by an earlier audit are not read again."""
    standing = {s.path: tag(s) for s in lake.stats(paths.manifest_folder(feed.stored)) if not paths.is_ignored(s.path)}
    problems, right, length = list[AuditProblem](), list[int](), feed.window.length_of
    declared = set(map(paths.manifest_window, standing))
    missing = [w for w in windows.list_manifest_windows(state, feed.window) if (w, length(w)) not in declared]
    for window in windows.complete_of(state, missing, feed.window):
        if not manifest.is_retired(state, window, feed.window):
            path = paths.window_path(feed.stored, window, length(window))
            message = f"{path} is missing, and its window is complete"
            problems.append(AuditProblem(4, message, path, f"write it: sluice repair {feed.name}"))
    previous = set(before.manifests) if before else set()
    for path, now in sorted(standing.items()):
        lasts = paths.manifest_window(path)
        wrong = list(_stands_right(lake, path, state)) if now not in previous or lasts is None else []
        if now in previous and lasts and manifest.retires(state, *lasts):
            wrong = [AuditProblem(4, f"{path} stands, and rows of its window were retired")]
        problems += wrong
        right += [] if wrong else [now]
    return problems, tuple(right)


def _stands_right(lake: Lake, path: str, state: State) -> Iterator[AuditProblem]:
    """Check that a window declared complete is accounted for at its boundaries, in any life of the topic."""
    lasts, content = paths.manifest_window(path), lake.get(path)
    if lasts is None or content is None:
        yield AuditProblem(
            10, f"{path} is not the manifest of a window", path, "move that file out of the lake's folder"
        )
        return
    try:
        document = json.loads(content)
        boundaries = [
            (b["topic"], b["partition"], b["topic_id"], int(b["start"]), int(b["end"])) for b in document["boundaries"]
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        remedy = f"remove that file, then: sluice repair {paths.feed_of(path)}   writes it again"
        yield AuditProblem(4, f"{path} cannot be read", path, remedy)
        return
    if manifest.retires(state, *lasts):
        yield AuditProblem(4, f"{path} stands, and rows of its window were retired")
    for topic, partition, topic_id, start, end in boundaries:
        lives = [k for k in state.origins if (k.topic, k.partition, k.topic_id) == (topic, partition, topic_id)]
        accounted = union(r for k in lives for r in state.list_accounted(k))
        if start < end and not any(r.start <= start and end <= r.end for r in accounted):
            yield AuditProblem(
                4, f"{path} declares the window complete, but {topic}:{partition}:{start}-{end} is pending"
            )


# -- what cannot be compared


def _list_unseen(rows: list[ReceiptRow], partitions: Mapping[Key, PartitionState]) -> Iterator[Unseen]:
    by_reason: dict[tuple[Key, str], list[ReceiptRow]] = {}
    for r in rows:
        if r.landed and (why := _why_not(r, partitions)):
            by_reason.setdefault((r.key, why), []).append(r)
    for (key, why), mine in sorted(by_reason.items()):
        yield Unseen(key, union(r.range for r in mine), sum(r.landed for r in mine), why)


def _why_not(r: ReceiptRow, partitions: Mapping[Key, PartitionState]) -> str:
    today = partitions.get(r.key)
    if today is None:
        return "an earlier life of the topic, or a changed partition"
    if r.range.start < today.log_start:
        return f"below the log start {today.log_start}"
    return f"beyond the log's end {today.high_watermark}" if r.range.end > today.high_watermark else ""


def table_problems(ledger: Ledger, lake: Lake, tables: FeedTables) -> Iterator[AuditProblem]:
    """Yields the problems of a feed's tables. Files that the next sync will add are none.

    Raises TableDiffers for a table of somebody else's, EntriesLost, CatalogUnavailable, LedgerCorrupt.
    """
    for kind, table in tables.of_parts:
        head, state = load_both(ledger, table)
        if head is not None:
            yield from _list_differences(ledger, table, compare(ledger, lake, table, head, state, kind))
    if tables.current:
        yield from _list_differences(ledger, tables.current.table, tables.current.compare(ledger, lake))


def _list_differences(ledger: Ledger, table: Table, comparison: TableComparison) -> Iterator[AuditProblem]:
    fix = comparison.find_remedy(name_dataset(ledger.feed, table.output))
    for address in comparison.missing:
        yield AuditProblem(17, f"{address} is missing in {table.name}", address, fix)
    for address in comparison.foreign:
        yield AuditProblem(17, f"{address} is in {table.name}, and is not a file of the feed", address, fix)
    for address, expected, counted in comparison.rows_differ:
        yield AuditProblem(
            17, f"{address} has {expected} rows in {table.name}, the ledger says {counted}", address, fix
        )
    for address in comparison.twice:
        yield AuditProblem(17, f"{address} is listed twice in {table.name}", address, fix)
    if keys := comparison.keys_differ:
        yield AuditProblem(
            17, f"{many(len(keys), 'key')} in {table.name} with other rows than by a new fold", remedy=fix
        )
    if comparison.deletes:
        yield AuditProblem(17, f"{table.name} deletes rows, by {comparison.deletes} of its files", remedy=fix)
    for fault in comparison.faults:
        yield AuditProblem(17, f"{table.name}: {fault.text}", remedy=fix)
