"""Writes landed parts again without Kafka and Spark: compaction, replay from quarantine, and expiry.

It may know publishing, quarantine and landing, and nothing of batches that read Kafka. Start with
`rewrite`: what compaction and replay share, from plan to swap. `sorter` and `fixers` serve `replay`.
"""
