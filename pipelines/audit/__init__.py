"""Proves where every offset is: landed, lost, skipped, retired, pending, or missing.

It reads the ledger, the lake and, if asked, Kafka, and writes nothing. It may know every room below it. Open `audit`
first, which needs no Kafka; `rescan` compares files with the log, `strict_audit` the ledger with Kafka. `feed_proof`
runs all in order. `explain_offset` answers for a single offset; `gaps` has the offsets without a batch.
"""
