"""The state of feeds as figures for a monitoring system: every name, its labels and its meaning.

`FAMILIES` is the one list of names. Names follow Prometheus: base units (seconds, bytes), `_total` for what only grows.
An unknown figure is left out, never shown as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """COUNTER: only grows. GAUGE: goes up and down."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Figures of one name. `labels` are the names of their labels, in order."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ("feed",)


@dataclass(frozen=True, slots=True)
class Figure:
    """One value, with a text for each label of its family."""

    name: str
    value: float
    labels: tuple[str, ...]


def _build_family(name: str, text: str, *more: str, kind: MetricKind = MetricKind.GAUGE) -> MetricFamily:
    return MetricFamily(f"sluice_{name}", kind, text, ("feed", *more))


FAMILIES = {
    f.name: f
    for f in (
        _build_family("up", "1 if the feed's ledger and Kafka were read, otherwise 0."),
        _build_family("findings", "Findings that need attention.", "finding", "severity", "remedy"),
        _build_family("lag_offsets", "Stable offsets in Kafka that have not landed.", "topic"),
        _build_family("pending_age_seconds", "Age of the oldest pending record; 0 if none is pending."),
        _build_family("uncommitted_offsets", "Landed offsets that the group has not committed."),
        _build_family("held_back_offsets", "Offsets held back by open transactions."),
        _build_family("windows", "The newest windows, by state.", "state"),
        _build_family("live_batches", "Batches neither published nor abandoned, by the state of their run.", "run"),
        _build_family("refused_batches", "Live batches that were refused and need a decision."),
        _build_family("production_offsets_per_second", "Offsets produced per second in the last day."),
        _build_family("landing_offsets_per_second", "Offsets landed per second while a batch runs."),
        _build_family("catch_up_seconds", "Time to catch up at these rates; absent if runs never do."),
        _build_family("lost_offsets", "Pending offsets that are gone from Kafka."),
        _build_family("retention_at_risk_offsets", "Pending offsets that Kafka will soon delete.", "topic"),
        _build_family("retention_left_seconds", "Time until Kafka may delete pending records.", "topic"),
        _build_family("batches_total", "Batches since the feed began, by outcome.", "outcome", kind=MetricKind.COUNTER),
        _build_family("landed_rows_total", "Rows landed since the feed began.", kind=MetricKind.COUNTER),
        _build_family("last_batch_published_timestamp_seconds", "Time when the newest landed batch was published."),
        _build_family("last_batch_duration_seconds", "Duration of that batch from plan to publish entry."),
        _build_family("last_batch_offsets", "Offsets of that batch, by outcome.", "outcome"),
        _build_family("last_batch_bytes", "Bytes of Parquet that the batch wrote."),
        _build_family("last_batch_files", "Parquet files that the batch wrote."),
        _build_family("last_batch_input_bytes", "Bytes that the batch read from brokers."),
        _build_family("last_batch_quarantined_records", "Records that the batch refused, by reason.", "reason"),
        _build_family("last_batch_task_seconds", "Time of the batch's tasks, by activity.", "activity"),
        _build_family("last_batch_throttled_seconds", "Pauses that brokers imposed on the batch's tasks."),
        _build_family("last_batch_failed_offset_ranges", "Offset ranges of the batch that failed and stay pending."),
        _build_family(
            "runs",
            "Runs of the last day in Dagster, by status and error.",
            "status",
            "error",
        ),
        MetricFamily("sluice_broken_feed_files", MetricKind.GAUGE, "Invalid feed files, which are ignored.", ()),
        MetricFamily("sluice_look_timestamp_seconds", MetricKind.GAUGE, "Time of these metrics.", ()),
        MetricFamily("sluice_look_duration_seconds", MetricKind.GAUGE, "Duration of their collection.", ()),
    )
}
"""All families by name, in output order."""


def build_figure(name: str, value: float, *labels: str) -> Figure:
    """Returns a value of the family `sluice_<name>`."""
    family = FAMILIES[f"sluice_{name}"]
    if len(labels) != len(family.labels):
        raise ValueError(f"{family.name} has the labels {family.labels}")
    return Figure(family.name, float(value), labels)
