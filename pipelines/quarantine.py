"""Whether so many records broke the contract that a batch must not be published, and what they have in common.

Decided on proven receipts before anything is published: a batch that goes beyond the feed's limit stays staged. The
next run takes it over and publishes it when the limit allows, or reads it again when the feed's schema was mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed import OnUndecodable, Policies
from sluice.pipelines.ports import Lake
from sluice.pipelines.values import Counts, Part, PartKind, Receipt

LOOKED_AT = 20
"""Quarantined parts that are opened to say what is wrong."""
_SAID = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """Records that are wrong in the same way: how many, and the first of them as `topic:partition:offset`."""

    reason: str
    field: str | None
    detail: str
    records: int
    first: str

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.reason} ({self.detail}), {self.records:,} records, the first at {self.first}"


def check_quarantine(receipts: Sequence[Receipt], policies: Policies, lake: Lake) -> None:
    """Raises QuarantineExceeded when the receipts hold more quarantined records than the policies allow."""
    counts = sum((r.counts for r in receipts), Counts())
    if not _exceeds(counts, policies):
        return
    bad, all_ = counts.quarantined, counts.quarantined + counts.landed
    parts = _parts(receipts)
    lines = "".join(f"\n    {fault}" for fault in faults_of(parts[:LOOKED_AT], lake)[:_SAID])
    raise QuarantineExceeded(
        f"{bad:,} of {all_:,} records ({bad / all_:.1%}) do not fit, more than the feed allows; nothing is published:"
        f"{lines}\n    all are in {_places(parts, lake)}",
        remedy=f"look at them with `sluice peek TOPIC:PARTITION:OFFSET`; mend the schema, or {_way_out(policies)}, "
        "and run again: what was read is kept as long as the schema is the same",
    )


def _exceeds(counts: Counts, policies: Policies) -> bool:
    bad, limit = counts.quarantined, policies.quarantine_limit
    if policies.on_undecodable is OnUndecodable.FAIL:
        return bad > 0
    return bad > 0 and bad >= limit.at_least and bad > limit.share * (bad + counts.landed)


def _way_out(policies: Policies) -> str:
    if policies.on_undecodable is OnUndecodable.FAIL:
        return "set policies.on_undecodable to quarantine"
    return "raise policies.quarantine_limit"


def _parts(receipts: Sequence[Receipt]) -> list[Part]:
    return [p for r in receipts for p in r.parts if p.kind is PartKind.QUARANTINED]


def _places(parts: Sequence[Part], lake: Lake) -> str:
    more = f" and {len(parts) - 1} more files" if len(parts) > 1 else ""
    return lake.locate(parts[0].staged) + more


def faults_of(parts: Sequence[Part], lake: Lake) -> list[Fault]:
    """What is wrong with the records of staged parts, the most frequent first."""
    tables = list(_read(parts, lake))
    if not tables:
        return []
    rows = pa.concat_tables(tables)
    kinds = rows.group_by(["reason", "field", "detail"], use_threads=False)
    found = kinds.aggregate([("offset", "count"), ("topic", "first"), ("partition", "first"), ("offset", "first")])
    faults = [Fault(r["reason"], r["field"], r["detail"], r["offset_count"], _place(r)) for r in found.to_pylist()]
    return sorted(faults, key=lambda f: -f.records)


def _place(row: dict[str, object]) -> str:
    return f"{row['topic_first']}:{row['partition_first']}:{row['offset_first']}"


def _read(parts: Sequence[Part], lake: Lake) -> Iterator[pa.Table]:
    columns = ["reason", "field", "detail", "topic", "partition", "offset"]
    for part in parts:
        with lake.open(part.staged) as f:
            yield pq.ParquetFile(f).read(columns=columns)
