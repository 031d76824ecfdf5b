"""Writes landed parts anew without Kafka and Spark: compaction, replay from quarantine, and expiry.

It may know publishing, quarantine and landing, and nothing of batches that read Kafka. Open `rewriting` first: it is
what compaction and replay share, from the plan to the swap. `candidates`, `sorter` and `mending` serve `replay`.
"""
