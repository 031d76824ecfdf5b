"""Kafka's idempotent and transactional producer over sealed batches."""
