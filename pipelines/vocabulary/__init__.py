"""The values that every stage shares: partitions and offsets, plans, receipts, ranges, errors, units.

This room holds words, not work: frozen values and pure functions over them. It knows `schema` and nothing else of ours.
Open `plans` first (what a run is asked for and how it is cut), then `receipts` (the results) and `errors` (every
way to stop).
"""
