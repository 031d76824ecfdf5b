"""The limit of quarantined records in a published batch, and the common faults of these records.

This is decided on proven receipts, before anything is published. A batch beyond the feed's limit stays staged. The next
run takes it over and publishes it if the limit then allows, or reads it again if schema or contract were fixed. Texts
say where records are and why, never a record's value, and hold nothing that a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import Breach, QuarantineExceeded
from sluice.pipelines.feed.sections import OnUndecodable, Policies
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.model.receipts import Counts, PartKind, Receipt, sum_counts
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import OVERSIZED
from sluice.pipelines.schema.arrays import int64s, view_int32s
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import escape_unprintable, many

MOST_FAULTS = 1000
"""The maximum number of distinct kinds of fault; all later ones count as one more kind."""
ROWS_AT_ONCE = 1 << 16
_SAID = 5
_MOST_TEXT = 120


class QuarantineKind(NamedTuple):
    """The common fault of quarantined records: the stage that refused them, and the reason."""

    stage: str
    reason: str
    expectation: str | None
    field: str | None
    detail: str

    @property
    def is_oversized(self) -> bool:
        return self.reason == OVERSIZED

    def __str__(self) -> str:
        what = self.expectation or self.reason
        return f"{self.field}: {what}" if self.field else what


@dataclass(frozen=True, slots=True)
class Fault:
    """Records that are wrong in the same way: how many, and the first as `topic:partition:offset`. The kind's texts
    are short and on one line."""

    kind: Flat[QuarantineKind]
    records: int
    first: str

    def __str__(self) -> str:
        what = f"{self.kind.reason} ({self.kind.detail})"
        where = f"{self.kind.field}: {what}" if self.kind.field else what
        return f"{where}, {many(self.records, 'record')}, the first at {self.first}"

    def __add__(self, other: Fault) -> Fault:
        return replace(self, records=self.records + other.records)


def check_quarantine(receipts: Sequence[Receipt], policies: Policies, lake: Lake) -> None:
    """Raises QuarantineExceeded when the receipts hold more quarantined records than the policies allow."""
    counts = sum_counts(receipts)
    if not _exceeds(counts, policies):
        return
    bad, all_ = counts.quarantined, counts.records
    ordered = sorted(receipts, key=lambda r: (r.offset_range.tp, r.offset_range.start))
    parts = [p for r in ordered for p in r.of(PartKind.QUARANTINED)]
    faults = faults_of([p.staged for p in parts], lake)
    lines = [str(fault) for fault in faults[:_SAID]]
    if rest := faults[_SAID:]:
        lines.append(f"… and {many(sum(f.records for f in rest), 'record')} for {many(len(rest), 'other reason')}")
    fix = "raise `tuning.task_memory`, " if any(f.kind.reason == OVERSIZED for f in faults) else ""
    files = {p.staged for p in parts}
    more = f" and {many(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    raise QuarantineExceeded(
        f"{bad:,} of {all_:,} records ({bad / all_:.1%}) do not fit, more than the feed allows; nothing is published:"
        "\n    " + "\n    ".join([*lines, f"all are in {lake.locate(parts[0].staged) + more}"]),
        remedy=f"list them by reason: sluice quarantine list {paths.feed_of(parts[0].staged)}; see the first:"
        f" sluice peek {faults[0].first} -n 1; {fix}fix the schema or the contract, or {_way_out(counts, policies)},"
        " and run again: records already read are reused unless these change",
        breaches=[Breach(f.kind.stage, str(f), f.kind.expectation or "", f.records, all_, (f.first,)) for f in faults],
    )


def _exceeds(counts: Counts, policies: Policies) -> bool:
    bad, limit = counts.quarantined, policies.quarantine_limit
    if policies.on_undecodable is OnUndecodable.FAIL:
        return bad > 0
    many_ = bad >= limit.at_least and bad > limit.share * counts.records
    return bad > 0 and (many_ or _too_many(counts, policies))


def _too_many(counts: Counts, policies: Policies) -> bool:
    limit = policies.quarantine_limit.at_most
    return limit is not None and counts.quarantined > limit


def _way_out(counts: Counts, policies: Policies) -> str:
    if policies.on_undecodable is OnUndecodable.FAIL:
        return "set `policies: {on_undecodable: quarantine}`"
    if _too_many(counts, policies):
        return f"raise the limit: `policies: {{quarantine_limit: {{at_most: {counts.quarantined}}}}}`"
    return f"raise the limit: `{show_share(counts)}`"


def show_share(counts: Counts) -> str:
    """The keys of a feed file under which these records would be published, rounded up to a percent."""
    percent = min(100, 100 * counts.quarantined // counts.records + 1)
    return f"policies: {{quarantine_limit: {{share: {percent / 100:g}}}}}"


def list_faults_beyond(counts: Counts, policies: Policies, faults: Sequence[Fault]) -> list[str]:
    """The frequent faults of a sample, if a batch with this share of them could be refused; otherwise empty."""
    if counts.quarantined <= policies.quarantine_limit.share * counts.records:
        return []
    return [str(fault) for fault in faults[:_SAID]]


def faults_of(files: Iterable[str], lake: Lake) -> list[Fault]:
    """Returns the faults in quarantined files (lake paths), the most frequent first. Each file counts once.

    Reads reasons and no values; memory is bounded by `MOST_FAULTS` and a row group. Raises PartUnreadable.
    """
    return rank_faults(fault for path in dict.fromkeys(files) for fault in _faults(path, lake))


def rank_faults(faults: Iterable[Fault]) -> list[Fault]:
    """The faults, added up by kind, the most frequent first."""
    by_kind: dict[QuarantineKind, Fault] = {}
    for fault in faults:
        if fault.kind not in by_kind and len(by_kind) >= MOST_FAULTS:
            fault = replace(fault, kind=_OTHERS)
        by_kind[fault.kind] = by_kind[fault.kind] + fault if fault.kind in by_kind else fault
    return sorted(by_kind.values(), key=lambda f: -f.records)


_OTHERS = QuarantineKind("", "others", None, None, "of further kinds")


def _faults(path: str, lake: Lake) -> Iterator[Fault]:
    """The faults in one file, whose rows lie partition by partition."""
    columns = ["topic", "partition", "offset", *QuarantineKind._fields]
    for batch in parquet.read_batches(lake, path, ROWS_AT_ONCE, columns):
        for rows in _by_partition(batch):
            for kind, records, first in kinds_of(rows):
                topic, partition = (rows.column(name)[0].as_py() for name in ("topic", "partition"))
                expectation, field = (text and _plain(text) for text in (kind.expectation, kind.field))
                yield Fault(
                    QuarantineKind(_plain(kind.stage), _plain(kind.reason), expectation, field, _plain(kind.detail)),
                    records,
                    f"{_plain(topic)}:{partition}:{first}",
                )


def _by_partition(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows, cut where another partition begins. Offsets increase within each, so none is cut but there."""
    topics = rows.column("topic").to_pylist()
    partitions = rows.column("partition").to_pylist()
    positions = list(zip(topics, partitions, strict=True))
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1]]
    for start, end in pairwise([0, *cuts, len(positions)]):
        yield rows.slice(start, end - start)


def kinds_of(rows: pa.RecordBatch) -> list[tuple[QuarantineKind, int, int]]:
    """Returns the kinds among the rows in the order of their first rows, each with its rows and lowest offset."""
    if not rows.num_rows:
        return []
    names = QuarantineKind._fields
    groups = np.zeros(rows.num_rows, np.int64)
    for name in names:  # not Table.group_by(), which imports pandas
        values = rows.column(name).cast(pa.string()).dictionary_encode("encode")
        groups = np.unique(groups * len(values.dictionary) + view_int32s(values.indices), return_inverse=True)[1]
    _, firsts, counts = np.unique(groups, return_index=True, return_counts=True)
    lowest = np.full(len(firsts), np.iinfo(np.int64).max)
    np.minimum.at(lowest, groups, int64s(rows.column("offset")))
    return [
        (QuarantineKind(*(rows.column(n)[int(firsts[g])].as_py() for n in names)), int(counts[g]), int(lowest[g]))
        for g in np.argsort(firsts)
    ]


def _plain(text: str) -> str:
    """A short text without control characters: names of fields come from records."""
    short = text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"
    return escape_unprintable(short)
