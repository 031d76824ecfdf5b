"""Fetches bounded offset ranges, raw, from the leaders of their partitions."""
