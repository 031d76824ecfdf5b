"""How feeds stand, in figures for a monitoring system: every name, its labels and what it means.

`FAMILIES` is the one list of names. Names follow Prometheus: base units (seconds, bytes), `_total` for what only grows.
A figure that is not known is left out, never told as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """COUNTER: only grows. GAUGE: goes up and down."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Family:
    """Figures of one name. `labels` are the names of their labels, in order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("feed",)


@dataclass(frozen=True, slots=True)
class Figure:
    """One value, with a text for each label of its family."""

    name: str
    value: float
    labels: tuple[str, ...]


def _family(name: str, text: str, *more: str, kind: Kind = Kind.GAUGE) -> Family:
    return Family(f"sluice_{name}", kind, text, ("feed", *more))


FAMILIES = {
    f.name: f
    for f in (
        _family("up", "1 where the feed's ledger and its Kafka could be looked at, otherwise 0."),
        _family("lag_offsets", "Stable offsets in Kafka that have not landed.", "topic"),
        _family("owed_age_seconds", "Age of the oldest record that is owed; 0 where nothing is."),
        _family("uncommitted_offsets", "Offsets that have landed and that the group has not committed."),
        _family("held_back_offsets", "Offsets that open transactions keep from being landed."),
        _family("windows", "The newest windows, by how they stand.", "state"),
        _family("live_batches", "Batches that are neither published nor given up, by whether their run lives.", "run"),
        _family("refused_batches", "Live batches that were refused and wait for a decision."),
        _family("production_offsets_per_second", "Offsets a second produced in the last day."),
        _family("landing_offsets_per_second", "Offsets a second that land while a batch is at work."),
        _family("catch_up_seconds", "How long runs take to catch up at these rates; absent where they never do."),
        _family("lost_offsets", "Offsets that are owed and gone from Kafka."),
        _family("retention_at_risk_offsets", "Owed offsets that Kafka will soon delete.", "topic"),
        _family("retention_left_seconds", "Until Kafka may begin to delete what is owed.", "topic"),
        _family("batches_total", "Batches since the feed began, by how they ended.", "outcome", kind=Kind.COUNTER),
        _family("landed_rows_total", "Rows that batches have landed since the feed began.", kind=Kind.COUNTER),
        _family("last_batch_published_timestamp_seconds", "When the newest batch that landed was published."),
        _family("last_batch_duration_seconds", "From that batch's plan to its publish entry."),
        _family("last_batch_offsets", "Where that batch's offsets went.", "outcome"),
        _family("last_batch_bytes", "Bytes of Parquet that that batch wrote."),
        _family("last_batch_files", "Parquet files that that batch wrote."),
        _family("last_batch_input_bytes", "Bytes that came from brokers for that batch."),
        _family("last_batch_quarantined_records", "Records that that batch refused, by reason.", "reason"),
        _family("last_batch_task_seconds", "Where the time of that batch's tasks went.", "activity"),
        _family("last_batch_throttled_seconds", "How long brokers had that batch's tasks pause."),
        _family("last_batch_failed_slices", "Slices of that batch that failed and stay owed."),
        _family(
            "runs",
            "Runs of the last day in Dagster, by status and the error that ended them.",
            "status",
            "error",
        ),
        Family("sluice_broken_feed_files", Kind.GAUGE, "Feed files that are wrong and not looked at.", ()),
        Family("sluice_look_timestamp_seconds", Kind.GAUGE, "When these figures were taken.", ()),
        Family("sluice_look_duration_seconds", Kind.GAUGE, "How long taking them took.", ()),
    )
}
"""By name, all figures that there are, in the order in which they are told."""


def figure(name: str, value: float, *labels: str) -> Figure:
    """A value of the family `sluice_<name>`."""
    family = FAMILIES[f"sluice_{name}"]
    if len(labels) != len(family.labels):
        raise ValueError(f"{family.name} has the labels {family.labels}")
    return Figure(family.name, float(value), labels)
