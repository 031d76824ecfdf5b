"""A shop's Dagster project."""
