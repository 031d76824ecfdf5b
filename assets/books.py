"""A feed's ledger at one moment, as events are made from it: which windows are whole, and what is in each.

Nothing here knows Dagster. Publish entries are read once, however many windows one of them tells of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sluice.pipelines import windows
from sluice.pipelines.batch import Edges
from sluice.pipelines.errors import LedgerCorrupt
from sluice.pipelines.feed import Feed
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ports import Lake
from sluice.pipelines.values import Key, Receipt


@dataclass(frozen=True)
class Books:
    """One feed: its ledger folded up to `state`, at the time `now` (ms), and the lake that its parts are in."""

    feed: Feed
    ledger: Ledger
    lake: Lake
    state: State
    now: int
    _entries: dict[int, _Entry] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, feed: Feed, ledger: Ledger, edges: Edges) -> Books:
        return cls(feed, ledger, edges.lake, ledger.read(), edges.clock())

    @cached_property
    def complete(self) -> frozenset[int]:
        """The windows (their starts, ms) that get a manifest and of which nothing is owed, quiet ones included.

        The silence after a stray old stamp is not among them: it may be half a million windows.
        """
        owed = set(windows.owed(self.state, self.feed.window, self.now))
        listed, first = windows.listed(self.state, self.feed.window), self.state.first_window or 0
        return frozenset(w for w in listed if w not in owed and (w >= first or self.is_complete(w)))

    def is_complete(self, window: int) -> bool:
        return windows.complete(self.state, window, self.feed.window)

    @cached_property
    def frontiers(self) -> Mapping[Key, int]:
        """The end of the contiguous accounted prefix of each current partition."""
        return self.state.frontiers()

    def ends(self, window: int) -> Mapping[Key, int | None]:
        """Where a window ends in each current partition; None while that is not resolved."""
        ranges = {k: windows.range_of(self.state, k, window, self.feed.window) for k in self.frontiers}
        return {k: r.end if r else None for k, r in ranges.items()}

    def ending(self, key: Key, after: int, until: int) -> range:
        """The windows that end in a partition beyond the offset `after`, and not beyond `until`."""
        pinned, window = self.state.boundaries.get(key), self.feed.window
        if pinned is None:
            return range(0)
        times = pinned.times[bisect_right(pinned.offsets, after) : bisect_right(pinned.offsets, until)]
        return range(window.start_of(times[0]) - window.length, times[-1], window.length) if times else range(0)

    def entry(self, batch: Batch) -> PublishEntry:
        """What a published batch published."""
        return self._read(-1 if batch.published is None else batch.published).entry

    def batches_in(self, window: int) -> tuple[Batch, ...]:
        """The batches that landed in a window, in that order: not those that merged what others had landed."""
        return tuple(b for n in self._numbers(window) if not (b := self._published[n]).merges)

    def receipts_in(self, window: int) -> list[Receipt]:
        """The receipts that count of the slices that lie in a window, in log order."""
        by_window = (self._read(n).receipts for n in self._numbers(window))
        found = [r for held in by_window for w, receipts in held.items() if self._holds(window, w) for r in receipts]
        return sorted(found, key=lambda r: (r.slice.key, r.slice.start))

    def windows_of(self, batch: Batch) -> set[int | None]:
        """The windows that a batch published in; None: outside windows."""
        return {r.slice.window for r in self.entry(batch).receipts}

    def complete_of(self, batches: Iterable[Batch]) -> set[int]:
        """The complete windows that these published batches landed in."""
        start = self.feed.window.start_of
        return {start(w) for b in batches for w in self.windows_of(b) if w is not None} & self.complete

    def batch_version(self, batch: Batch) -> str:
        return f"{self.state.ledger_id}/{batch.id}/{batch.hash}"

    def window_version(self, window: int) -> str:
        """A complete window's data version: another batch that landed in it changes it, and nothing else does."""
        batches = self.batches_in(window)
        return self.batch_version(batches[-1]) if batches else f"{self.state.ledger_id}/nothing"

    @property
    def version(self) -> str:
        """The ledger, up to its newest entry."""
        return f"{self.state.ledger_id}/{self.state.number - 1}"

    def _holds(self, window: int, lay_in: int | None) -> bool:
        """Whether what lay in a window lies in this one now: windows may have been shorter once."""
        return lay_in is not None and self.feed.window.start_of(lay_in) == window

    def _numbers(self, window: int) -> list[int]:
        return sorted({n for w, ns in self.state.published_in.items() if self._holds(window, w) for n in ns})

    @cached_property
    def _published(self) -> Mapping[int, Batch]:
        return {b.published: b for b in self.state.batches.values() if b.published is not None}

    def _read(self, number: int) -> _Entry:
        if number not in self._entries:
            entry = self.ledger.entry(number)
            if not isinstance(entry, PublishEntry):
                raise LedgerCorrupt(f"entry {number} of feed {self.feed.name} is no publish entry")
            self._entries[number] = _Entry(entry, _by_window(self.state.receipts(number, entry)))
        return self._entries[number]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A publish entry, and those of its receipts that still count by window."""

    entry: PublishEntry
    receipts: Mapping[int | None, Sequence[Receipt]]


def _by_window(receipts: Sequence[Receipt]) -> Mapping[int | None, Sequence[Receipt]]:
    out: dict[int | None, list[Receipt]] = {}
    for r in receipts:
        out.setdefault(r.slice.window, []).append(r)
    return out
