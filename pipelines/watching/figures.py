"""What a ledger says, in figures: totals, and the newest batch that landed something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.vocabulary.figures import Figure, figure
from sluice.pipelines.vocabulary.receipts import Counts, count_files
from sluice.pipelines.watching import timings


def of_ledger(ledger: Ledger, state: State) -> Iterator[Figure]:
    """What the ledger says: totals, and the newest batch that landed something. Raises LakeUnavailable."""
    feed, batches = ledger.feed, [b for b in state.batches.values() if not b.rewrites]
    for outcome in (BatchStatus.PUBLISHED, BatchStatus.ABANDONED):
        yield figure("batches_total", sum(b.status is outcome for b in batches), feed, str(outcome))
    yield figure("landed_rows_total", sum(b.rows for b in batches if b.published is not None), feed)
    if newest := newest_landed(batches):
        yield from _of_batch(ledger, newest)


def newest_landed(batches: Iterable[Batch]) -> Batch | None:
    """The batch that was published last, of those that land something new."""
    published = ((b.published, b) for b in batches if b.published is not None and not b.rewrites)
    return max(published, key=lambda p: p[0], default=(0, None))[1]


def _of_batch(ledger: Ledger, batch: Batch) -> Iterator[Figure]:
    feed, batch, entry = ledger.feed, ledger.recall(batch), ledger.publication(batch)
    receipts = entry.receipts
    counts = sum((r.counts for r in receipts), Counts())
    yield figure("last_batch_published_timestamp_seconds", entry.at / 1000, feed)
    yield figure("last_batch_duration_seconds", max(0, entry.at - batch.planned_at) / 1000, feed)
    for outcome in ("landed", "quarantined", "dropped", "invisible"):
        yield figure("last_batch_offsets", getattr(counts, outcome), feed, outcome)
    yield figure("last_batch_bytes", sum(p.bytes for r in receipts for p in r.parts), feed)
    yield figure("last_batch_files", count_files(receipts), feed)
    spent = timings.spent(receipts)
    yield figure("last_batch_input_bytes", spent.input_bytes, feed)
    for activity, ns in spent.ns.items():
        yield figure("last_batch_task_seconds", ns / 1e9, feed, activity)
    throttled = sum(b.throttle_ms for b in entry.traffic.brokers) / 1000
    yield figure("last_batch_throttled_seconds", throttled, feed)
    yield figure("last_batch_failed_slices", len(entry.failures), feed)
