"""Kafka's record batches (message format v2): decoded into Arrow columns and encoded from them."""
