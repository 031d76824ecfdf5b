"""Republishing: landed or quarantined rows become records of a Kafka topic again, each once and in order.

    plan (ranges of offsets, where to) ─► rows in log order ─► records ─► transactions, each with its mark ─► map

A republish touches neither ledger nor rows. Its plan, and the map from old coordinates to new ones, lie in a
folder of their own next to the ledger; its progress is in Kafka, in the transactions of the records.
"""

CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
"""The names of Kafka's codecs, by number."""
