"""Figures from a ledger: totals, and the newest batch that landed something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sluice.pipelines.ledger import Batch, BatchStatus
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.figures import Figure, build_figure
from sluice.pipelines.status.batch_facts import BatchFacts


def of_batches(feed: str, batches: Sequence[Batch]) -> Iterator[Figure]:
    """Totals of these batches."""
    for outcome in (BatchStatus.PUBLISHED, BatchStatus.ABANDONED):
        yield build_figure("batches_total", sum(b.status is outcome for b in batches), feed, str(outcome))
    yield build_figure("landed_rows_total", sum(b.rows for b in batches if b.published is not None), feed)


def newest_landed(batches: Iterable[Batch]) -> Batch | None:
    """The batch that was published last, of these."""
    published = ((b.published, b) for b in batches if b.published is not None)
    return max(published, key=lambda p: p[0], default=(0, None))[1]


def of_batch(feed: str, batch: Batch, entry: PublishEntry) -> Iterator[Figure]:
    """Returns the figures of a finished batch, by its publish entry."""
    facts = BatchFacts(entry.receipts, entry.traffic)
    yield build_figure("last_batch_published_timestamp_seconds", entry.at / 1000, feed)
    yield build_figure("last_batch_duration_seconds", max(0, entry.at - batch.planned_at) / 1000, feed)
    for outcome in ("landed", "quarantined", "dropped", "no_record"):
        yield build_figure("last_batch_offsets", getattr(facts.counts, outcome), feed, outcome)
    yield build_figure("last_batch_bytes", facts.bytes, feed)
    yield build_figure("last_batch_files", facts.files, feed)
    yield build_figure("last_batch_input_bytes", facts.task_time.input_bytes, feed)
    for activity, ns in facts.task_time.ns.items():
        yield build_figure("last_batch_task_seconds", ns / 1e9, feed, activity)
    yield build_figure("last_batch_throttled_seconds", facts.all_brokers.throttle_ms / 1000, feed)
    yield build_figure("last_batch_failed_offset_ranges", len(entry.failures), feed)
