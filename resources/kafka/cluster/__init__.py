"""Reads the state of a cluster: topics, offsets, offsets by time, settings."""
