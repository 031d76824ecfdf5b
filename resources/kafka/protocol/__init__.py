"""Kafka's protocol: values to requests, responses to values, errors to remedies."""
