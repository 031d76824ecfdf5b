"""Dagster's materializations as evidence, and their metadata."""
