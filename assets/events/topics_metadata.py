"""Dagster's metadata of a topic: its state in Kafka and the lag of its readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.model.kafka import PartitionState


@dataclass(frozen=True)
class TopicReader:
    """A feed that reads a topic: the next pending offset by partition, how old (ms) the oldest pending record is
    there, where that is known, and what of the topic Kafka will delete before it lands.
    """

    feed: str
    frontiers: Mapping[int, int] = field(default_factory=dict)
    ages: Mapping[int, int] = field(default_factory=dict)
    at_risk: Sequence[str] = ()


def topic_metadata(partitions: Sequence[PartitionState], readers: Sequence[TopicReader]) -> Metadata:
    """Returns a topic's state in Kafka, and the lag of each feed in offsets and in time."""
    lags = {r.feed: [_lag(p, r) for p in partitions] for r in readers}
    rows: list[dict[str, str | int]] = [
        {
            "partition": p.partition,
            "leader": p.leader,
            "start": p.log_start,
            "end": p.last_stable_offset,
            **{f"lag of {feed}": lag[i] for feed, lag in lags.items()},
        }
        for i, p in enumerate(partitions)
    ]
    columns = dict.fromkeys(("partition", "leader", "start", "end", *(f"lag of {feed}" for feed in lags)), "int")
    return {
        "partitions": len(partitions),
        "offsets": sum(p.last_stable_offset - p.log_start for p in partitions),
        **{f"lag_{feed}": sum(lag) for feed, lag in lags.items()},
        **{f"lag_seconds_{r.feed}": age / 1000 for r in readers if (age := _age(r, sum(lags[r.feed]))) is not None},
        **{f"at_risk_{r.feed}": "\n".join(r.at_risk) for r in readers if r.at_risk},
        "log": table(rows, columns),
    }


def _lag(p: PartitionState, reader: TopicReader) -> int:
    return max(0, p.last_stable_offset - reader.frontiers.get(p.partition, p.log_start))


def _age(reader: TopicReader, lag: int) -> int | None:
    """How old (ms) the oldest pending record of the feed in the topic is; 0 when there is none."""
    return max(reader.ages.values(), default=None if lag else 0)
