"""Traces records: the class of each, the row in which it landed, and where republishes sent it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.pipelines.audit.explain_offset import Explanation, explain
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import Key, TopicPartition
from sluice.pipelines.ports import Ports
from sluice.pipelines.republishing.coordinates import SentRecord, whence_and_whither

if TYPE_CHECKING:
    from sluice.pipelines.operating.record_search import Matches


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """`row` is the landed record, a table of one row; None without one. `sent`: from or to this record."""

    explanation: Explanation
    row: pa.Table | None
    sent: tuple[SentRecord, ...]


def trace_record(feed: Feed, ports: Ports, tp: TopicPartition, offset: int) -> tuple[RecordTrace, ...]:
    """Trace an offset of the partition's current life, then of each earlier one that read it, the newest first.

    Kafka is asked only for the topic's policy. Raises PartUnreadable.
    """
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    state = ledger.read()
    former = [k for k in reversed(state.origins) if k.tp == tp and k != state.current.get(tp)]
    earlier = (_trace(ledger, ports, tp, offset, key) for key in former)
    unread = (OffsetClass.PENDING, OffsetClass.BELOW_ORIGIN)
    return _trace(ledger, ports, tp, offset), *(t for t in earlier if t.explanation.class_ not in unread)


def trace_matches(feed: Feed, ports: Ports, matches: Matches, number: int) -> Iterator[RecordTrace]:
    """Yields the traces of the first matching records, in the order of partitions and offsets."""
    records = (
        (key, o) for key, ranges in sorted(matches.offsets.items()) for r in ranges for o in range(r.start, r.end)
    )
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return (_trace(ledger, ports, key.tp, offset, key) for key, offset in islice(records, number))


def _trace(ledger: Ledger, ports: Ports, tp: TopicPartition, offset: int, life: Key | None = None) -> RecordTrace:
    lake, row = ports.lake, None
    explanation = explain(ledger, lake, tp, offset, ports.cluster, life)
    if explanation.path is not None and explanation.row_group is not None and explanation.row is not None:
        with parquet.open_parquet(lake, explanation.path) as file:
            row = file.read_row_group(explanation.row_group).slice(explanation.row, 1)
    sent = whence_and_whither(lake, ledger.feed, tp, offset, life or ledger.read().current.get(tp))
    return RecordTrace(explanation, row, tuple(sent))
