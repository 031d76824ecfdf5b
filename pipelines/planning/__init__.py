"""What is owed, and how it is read: origins, windows, shapes, and the plan of a batch.

This room decides before anything is read, mostly by pure functions over the ledger's state and what Kafka says. It
knows the ledger, the feed, the ports and the rooms below. It lands and commits nothing. Open `plan` first; `windows`
and `origins` say where the ranges in it come from.
"""
