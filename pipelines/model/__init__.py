"""The values that every stage shares: partitions and offsets, plans, receipts, offset ranges, progress.

Frozen values and pure functions over them. This room knows `schema`, `util` and `errors`, and nothing else of ours.
Start with `plans` (a run's request and its offset ranges), then `receipts` (the results).
"""
