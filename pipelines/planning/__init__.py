"""Pending offsets and how to read them: origins, windows, schema changes, and the plan of a batch.

This room decides before anything is read, mostly by pure functions over the ledger's state and Kafka's answers. It
depends on the ledger, the feed, the ports and the rooms below. It lands and commits nothing. Read `plan` first;
`windows` and `origins` determine its ranges.
"""
