"""Utilities without a domain: units, logs, scratch folders, extras, parallel calls."""

COLLECTING = (100_000, 4)
"""New objects before Python collects garbage, and collections before one of older objects. A plan of 10,000 partitions
is a million objects and no garbage: with Python's 700 and 10, a third of its time is spent on them, and more the larger
it is."""
