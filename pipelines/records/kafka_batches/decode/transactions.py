"""Decides which transactional batches of a fetch response were aborted (KIP-98), as Kafka's own consumer does.

Under read_committed a response lists the aborted transactions that touch it, as (producer id, first offset). A
transaction ends at its producer's next control batch. Each response stands alone. Promise: the answer is also right
when a response comes in pieces with the same list, or again after an error, and when reading begins inside an aborted
transaction.
"""

from __future__ import annotations

from collections.abc import Iterable


class Aborted:
    """The aborted transactions of one partition, batch after batch in offset order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        self._open: set[int] = set()
        self._ended: dict[int, int] = {}

    def begin(self, aborted: Iterable[tuple[int, int]], position: int) -> None:
        """Begin a response that was fetched at `position`, with its (producer id, first offset) pairs in any order.

        A transaction that a marker below the position ended stays ended: a pair counts only if it begins above that
        marker.
        """
        pairs = list(aborted)
        ended = {producer: marker for producer, marker in self._ended.items() if marker < position}
        self._ended = {producer: ended.get(producer, -1) for producer, _ in pairs}
        self._waiting = sorted(((f, p) for p, f in pairs if f > self._ended[p]), reverse=True)
        self._open.clear()

    def covers(self, producer: int, last_offset: int) -> bool:
        """Whether the transactional batch of `producer` that ends at `last_offset` belongs to an aborted one."""
        while self._waiting and self._waiting[-1][0] <= last_offset:
            self._open.add(self._waiting.pop()[1])
        return producer in self._open

    def end(self, producer: int, marker: int) -> None:
        """Note that the producer's transaction ended with a commit or abort marker at this offset."""
        self.covers(producer, marker)
        self._open.discard(producer)
        if producer in self._ended:
            self._ended[producer] = marker
