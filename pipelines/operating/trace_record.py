"""Traces one record: its class, the row in which it landed, and where republishes sent it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from sluice.pipelines.audit.explain_offset import Explanation, explain
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.ports import Ports
from sluice.pipelines.republishing.coordinates import SentRecord, whence_and_whither


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """`row` is the landed record, a table of one row; None without one. `sent`: from or to this record."""

    explanation: Explanation
    row: pa.Table | None
    sent: tuple[SentRecord, ...]


def trace_record(feed: Feed, ports: Ports, tp: TopicPartition, offset: int) -> RecordTrace:
    """Trace an offset by ledger and files; Kafka is asked only for the topic's policy. Raises PartUnreadable."""
    lake, ledger, row = ports.lake, Ledger(ports.lake, feed.name, ports.clock), None
    explanation = explain(ledger, lake, tp, offset, ports.cluster)
    if explanation.path is not None and explanation.row_group is not None and explanation.row is not None:
        with parquet.open_parquet(lake, explanation.path) as file:
            row = file.read_row_group(explanation.row_group).slice(explanation.row, 1)
    sent = whence_and_whither(lake, feed.name, tp, offset, ledger.read().current.get(tp))
    return RecordTrace(explanation, row, tuple(sent))
