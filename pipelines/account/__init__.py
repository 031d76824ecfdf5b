"""Proves where every offset is: landed, lost, skipped, retired, owed, or missing.

It reads the ledger, the lake and, if asked, Kafka, and writes nothing. It may know every room below it. Open `audit`
first, which needs no Kafka; `rescan` compares files with the log, `strict` compares the ledger with Kafka, and
`explain` answers for a single offset.
"""
