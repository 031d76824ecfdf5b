"""Partitions as tables and documents name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sluice.pipelines.model.kafka import Key


def label_partitions(keys: Iterable[Key]) -> dict[Key, str]:
    """The partitions' names in a table. If two incarnations of a partition are listed, names include them."""
    listed = list(keys)
    several = Counter(k.tp for k in dict.fromkeys(listed))
    return {k: f"{k} (topic id {k.life})" if several[k.tp] > 1 else str(k) for k in listed}


def list_ranges(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    return [[start, end] for start, end in pairs]
