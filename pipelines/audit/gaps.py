"""Offsets that no batch of the log held when they were read. Landing counts them as compacted.

Kafka leaves gaps only where it compacts a topic: control records and aborted records have offsets and batches of their
own. In another topic a gap is a loss in Kafka (a segment gone from a disk or from tiered storage), unless the topic was
compacted earlier. Only today's policy is known, and only with the right to DESCRIBE_CONFIGS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.ledger import State
from sluice.pipelines.model.kafka import Isolation, Key, Range, union
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.planning.origins import find_key
from sluice.pipelines.ports import Cluster
from sluice.pipelines.util.documents import Flat

if TYPE_CHECKING:
    from sluice.pipelines.audit.audit import AuditReport


@dataclass(frozen=True, slots=True)
class Gap:
    """The gaps of one partition: a number of offsets within `ranges`, landed offset ranges (without settled ones).

    `compacted`: whether Kafka compacts the topic today; None if that is unknown.
    """

    key: Flat[Key]
    offsets: int
    ranges: tuple[Range, ...]
    compacted: bool | None


def find_gaps(report: AuditReport, state: State, cluster: Cluster) -> tuple[Gap, ...]:
    """Returns the gaps in the current lives of topics. Kafka is asked for the policies of topics with gaps only."""
    current = set(state.current.values())
    sums = {a.key: a.account.counts.compacted for a in report.partitions if a.key in current}
    offsets = {key: compacted for key, compacted in sums.items() if compacted}
    compacted = read_policies(cluster, {key.topic for key in offsets})
    rows, ranges = report.audited.rows, dict[Key, list[Range]]()
    for row in rows.where(rows.column("compacted") > 0).to_rows():
        ranges.setdefault(row.key, []).append(row.range)
    for _, r in report.rest:
        if r.counts.compacted:
            ranges.setdefault(r.offset_range.key, []).append(r.offset_range.range)
    return tuple(
        Gap(key, count, union(ranges.get(key, ())), compacted.get(key.topic)) for key, count in sorted(offsets.items())
    )


def choose_remedies(report: AuditReport, state: State, cluster: Cluster) -> AuditReport:
    """Returns the report with the remedy of each missing or damaged file, by `find_remedies`."""
    remedies = find_remedies(report.feed, {p.file: p.ranges for p in report.problems if p.ranges}, state, cluster)
    problems = (replace(p, remedy=remedies.get(p.file, p.remedy)) if p.ranges else p for p in report.problems)
    return replace(report, problems=tuple(problems))


def find_remedies(
    feed: str, files: Mapping[str, Sequence[OffsetRange]], state: State, cluster: Cluster
) -> Mapping[str, str]:
    """Returns the remedy of each missing or damaged file, given its offset ranges, by the records that Kafka still has.
    Without an answer from Kafka, only of files with records of an earlier life of their topic.
    """
    topics = {s.topic for ranges in files.values() for s in ranges}
    if not topics:
        return {}
    try:
        there = cluster.partitions(topics & cluster.topics().keys(), Isolation.READ_COMMITTED)
    except SluiceError:
        there, current = (), {*state.current.values()}
        files = {path: ranges for path, ranges in files.items() if any(s.key not in current for s in ranges)}
    starts = {find_key(state, p): p.log_start for p in there}
    policies = read_policies(cluster, topics)

    def choose(ranges: Sequence[OffsetRange]) -> str:
        again = f"sluice run {feed} --offsets {ranges[0]} --replace"
        if not all(s.start >= starts.get(s.key, s.end) for s in ranges):
            return (
                "Kafka no longer has its records: bring the file back from a backup; without one, give its rows up:"
                f" sluice accept {feed} damaged --offsets {ranges[0]} --reason …"
            )
        if policies.get(ranges[0].topic, True):
            refused = "is refused if compaction has removed a record of it"
            return f"bring the file back from a backup; without one: {again}   {refused}"
        return f"land its offsets again: {again}"

    return {path: choose(ranges) for path, ranges in files.items()}


def read_policies(cluster: Cluster, topics: Collection[str]) -> Mapping[str, bool]:
    """Returns whether Kafka compacts each topic, without topics whose policy is unknown."""
    with suppress(SluiceError):  # without the extra `kafka`
        configs = cluster.configs(topics).topics if topics else {}
        return {topic: not config.only_deletes for topic, config in configs.items()}
    return {}
