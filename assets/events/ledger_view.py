"""A feed's ledger at one moment, as events are made from it: complete windows and their content.

Of Dagster it knows only the keys that these events have. Each entry is read once, however many windows it concerns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sluice.assets.specs.asset_specs import Keys
from sluice.pipelines.contract.catalogue import ExpectationOutcome, Result, contract_results
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import receipt_files
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.model.kafka import Key, Range, subtract, union
from sluice.pipelines.model.plans import NO_LOSSES, Losses
from sluice.pipelines.model.receipts import Met, Receipt, Traffic
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.schema_changes import shape_named
from sluice.pipelines.ports import Lake, Liveness, Ports
from sluice.pipelines.publishing import publish
from sluice.pipelines.records.shape import RAW, Shape
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.util.grouping import group_by

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import WindowCheck


def quarantines(feed: Feed) -> bool:
    """Returns true if the feed can refuse records, by its schema, its contract, or the outputs that it has."""
    return feed.columns is not None or feed.contract is not None or feed.split is not None


@dataclass(frozen=True)
class LedgerView:
    """One feed: its ledger folded up to `state`, at the time `now` (ms), and the lake that its parts are in. `checks`:
    those of windows (by their starts, ms) that the run has just landed.
    """

    feed: Feed
    ledger: Ledger
    lake: Lake
    state: State
    now: int
    liveness: Liveness
    keys: Keys
    checks: dict[int, WindowCheck] = field(default_factory=dict, repr=False)
    _entries: dict[int, _PublishedBatch] = field(default_factory=dict, repr=False)
    _shapes: dict[str, Shape | None] = field(default_factory=dict, repr=False)
    _pages: dict[int, str | None] = field(default_factory=dict, repr=False)
    _judged: dict[int, Sequence[Judged]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, feed: Feed, ports: Ports, keys: Keys | None = None, ledger: Ledger | None = None) -> LedgerView:
        """`keys`: the feed's asset keys in Dagster; by default the untranslated ones. `ledger`: one that is open."""
        own_keys, ledger = keys or Keys.of(feed.name), ledger or Ledger(ports.lake, feed.stored, ports.clock)
        return cls(feed, ledger, ports.lake, ledger.read(), ports.clock(), ports.liveness, own_keys)

    def of_output(self, output: Feed) -> LedgerView:
        """Returns the view of one output of a split feed: its receipts are as if a feed of its own had landed them."""
        return replace(self, feed=output, checks={}, _shapes={}, _judged={})

    @cached_property
    def live(self) -> tuple[Met, ...]:
        """The live batches, and whether their runs are alive, as far as that is known without waiting."""
        verdicts = publish.judge_batches(self.liveness, self.state.live(), watch=False)
        return tuple(publish.report_met(self.feed.name, b, verdicts[b.id]) for b in self.state.live())

    @cached_property
    def complete(self) -> frozenset[int]:
        """The windows (their starts, ms) that get a manifest and have nothing pending, including quiet ones.

        The silence after a stray old stamp is not included: it may be half a million windows.
        """
        pending = set(windows.list_pending_windows(self.state, self.feed.window, self.now))
        listed, below = {*windows.list_manifest_windows(self.state, self.feed.window)}, set[int]()
        for key in self.state.known():  # what lies below an origin is not pending
            pinned = self.state.boundaries.get(key, NO_PINS)
            below.update(pinned.times[: bisect_left(pinned.offsets, self.state.origins[key].offset)])
        complete = windows.complete_of(self.state, sorted(below & listed), self.feed.window)
        return frozenset((*(listed - pending - below), *complete))

    def is_complete(self, window: int) -> bool:
        return windows.complete(self.state, window, self.feed.window)

    @cached_property
    def frontiers(self) -> Mapping[Key, int]:
        """The end of the contiguous accounted prefix of each current partition."""
        return self.state.frontiers()

    def is_untried(self, key: Key) -> bool:
        """Returns true if no run ever tried the first pending range of a partition.

        No batch reserves it, none published in its windows, and nothing landed on both sides of it.
        """
        at, holes = self.frontiers[key], self.state.holes(key)
        pending = holes[0] if holes else Range(at, at + 1)
        if (holes and at != self.state.origins[key].offset) or any(
            r.meets(pending) for r in self.state.list_reserved(key)
        ):
            return False
        return not any(p.window in self.state.published_in for p in windows.cut_at_boundaries(self.state, key, pending))

    def find_ends(self, window: int) -> Mapping[Key, int | None]:
        """Where a window ends in each current partition; None until that is resolved."""
        ranges = {k: windows.find_range(self.state, k, window, self.feed.window) for k in self.frontiers}
        return {k: r.end if r else None for k, r in ranges.items()}

    def is_empty(self, window: int) -> bool:
        """Returns whether no offset of any partition lies in a window whose ends are resolved."""
        ranges = [windows.find_range(self.state, k, window, self.feed.window) for k in self.frontiers]
        empty = bool(ranges) and all(r is not None and not r.span for r in ranges)
        return empty and self.find_losses(window) == NO_LOSSES

    def find_losses(self, window: int) -> Losses:
        """Returns the window's lost and unseen records, and its offsets in former lives of partitions."""
        return windows.find_losses(self.state, window, self.feed.window)

    def find_ending_windows(self, key: Key, after: int, until: int) -> Sequence[int]:
        """The windows whose end in a partition is above the offset `after`, and not above `until`."""
        pinned, window = self.state.boundaries.get(key), self.feed.window
        if pinned is None:
            return ()
        times = pinned.times[bisect_right(pinned.offsets, after) : bisect_right(pinned.offsets, until)]
        return window.list_starts(window.before(window.start_of(times[0])), times[-1]) if times else ()

    def read_entry(self, batch: Batch) -> PublishEntry:
        """Returns the publish entry of a batch."""
        return self._read(batch).entry

    def read_facts(self, batches: Sequence[Batch]) -> BatchFacts:
        """Returns the facts of published batches together."""
        entries = [(self.ledger.recall(b), self.read_entry(b)) for b in batches]
        took = sum(max(entry.at - batch.planned_at, 1) for batch, entry in entries)
        receipts = [r for _, entry in entries for r in entry.receipts]
        return BatchFacts(receipts, sum((entry.traffic for _, entry in entries), Traffic()), took=took)

    def list_batches(self, window: int) -> tuple[Batch, ...]:
        """Returns the batches that landed in a window, in order, without merges."""
        return tuple(b for b in self._list_publishing(window) if not b.merges)

    def list_receipts(self, window: int) -> list[Receipt]:
        """The receipts that count for the offset ranges in a window, in log order."""
        by_window = (self._read(b).receipts for b in self._list_publishing(window))
        current = [
            r
            for by_publication in by_window
            for w, receipts in by_publication.items()
            if self._contains(window, w)
            for r in receipts
        ]
        own = map(self._select, current) if self.feed.output else current
        return sorted(own, key=lambda r: (r.offset_range.key, r.offset_range.start))

    def _select(self, r: Receipt) -> Receipt:
        """Returns the receipt of the feed's output, and remembers the shape that it names."""
        shape = shape_named(self.ledger, self.state, r.format)
        if shape is None or shape.split is None:
            return r.of_output(self.feed.output)
        selected = shape.select(r, self.feed.output)
        self._shapes[selected.format] = shape.datasets.get(self.feed.output, RAW)
        return selected

    def list_windows(self, batch: Batch) -> set[int | None]:
        """The windows that a batch published in; None: outside windows."""
        return {r.offset_range.window for r in self.read_entry(batch).receipts}

    def list_complete(self, batches: Iterable[Batch]) -> set[int]:
        """The complete windows that these published batches landed in."""
        start = self.feed.window.start_of
        return {start(w) for b in batches for w in self.list_windows(b) if w is not None} & self.complete

    def find_shape(self, name: str) -> Shape | None:
        """The shape behind a receipt's format; None if neither the feed nor the ledger knows it."""
        if name not in self._shapes:
            own = self.feed.shape
            self._shapes[name] = own if own.name == name else shape_named(self.ledger, self.state, name)
        return self._shapes[name]

    def read_judged(self, window: int) -> Sequence[Judged]:
        """The result of each expectation that a window was checked against, of one contract or of several."""
        if window not in self._judged:
            self._judged[window] = self._judge(window)
        return self._judged[window]

    def _judge(self, window: int) -> list[Judged]:
        receipts = self.list_receipts(window)
        contracts = {c.hash: c for r in receipts if (c := self._find_contract(r.format)) is not None}
        judged = []
        for hash_, contract in contracts.items():
            results = [x for e in self._list_deciding(window) for x in self._list_results(e, contract)]
            judged += [Judged(o, hash_) for o in contract_results(contract, receipts, results)]
        return judged

    def _list_results(self, entry: PublishEntry, contract: Contract) -> Sequence[Result]:
        """Returns the results of a publish entry that were decided under this contract."""
        name = entry.receipts[0].format
        if not self.feed.output:
            return entry.results if self._find_contract(name) == contract else ()
        shape = shape_named(self.ledger, self.state, name)
        own = shape.datasets.get(self.feed.output, RAW) if shape else RAW
        if shape is None or shape.split is None or own.contract != contract:
            return ()
        first = shape.split.find_first_place(self.feed.output)
        own_range = range(first, first + len(contract.expectations))
        return [replace(r, expectation=r.expectation - first) for r in entry.results if r.expectation in own_range]

    def find_page(self, window: int) -> str | None:
        """Where the report of the last batch that landed in a window lies; None if there is none."""
        batches = self.list_batches(window)
        return self._find_batch_page(batches[-1].id) if batches else None

    def _find_batch_page(self, batch: int) -> str | None:
        if batch not in self._pages:
            path = receipt_files.find_batch_page(self.lake, self.feed.stored, batch)
            self._pages[batch] = None if path is None else self.lake.locate(path)
        return self._pages[batch]

    def _find_contract(self, format_: str) -> Contract | None:
        shape = self.find_shape(format_)
        return shape.contract if shape else None

    def _list_deciding(self, window: int) -> list[PublishEntry]:
        """Returns the publish entries behind the current content of a window, the oldest first.

        Merging decides nothing: the batch that landed the rows counts, not the one that merged them.
        """
        entries, newer = [], dict[Key, tuple[Range, ...]]()
        for entry in map(self.read_entry, reversed(self.list_batches(window))):
            ranges = [r.offset_range for r in entry.receipts if self._contains(window, r.offset_range.window)]
            if any(subtract(s.range, newer.get(s.key, ())) for s in ranges):
                entries.append(entry)
            for s in ranges:
                newer[s.key] = union((*newer.get(s.key, ()), s.range))
        return entries[::-1]

    def format_batch_version(self, batch: Batch) -> str:
        return f"{self.state.ledger_id}/{batch.id}/{self.ledger.recall(batch).hash}"

    def format_window_version(self, window: int) -> str:
        """A complete window's data version. It changes when another batch lands in the window, and only then."""
        batches = self.list_batches(window)
        return self.format_batch_version(batches[-1]) if batches else f"{self.state.ledger_id}/nothing"

    @property
    def version(self) -> str:
        """The version of the ledger, up to its newest entry."""
        return f"{self.state.ledger_id}/{self.state.number - 1}"

    def _contains(self, window: int, lay_in: int | None) -> bool:
        """Returns true if this window now contains that window: windows may have been shorter earlier."""
        return lay_in is not None and self.feed.window.start_of(lay_in) == window

    def _list_publishing(self, window: int) -> list[Batch]:
        """The batches that published something in a window, in order."""
        within = windows.list_windows_within(self.state, window, self.feed.window)
        numbers = {n for w in within for n in self.state.published_in.get(w, ())}
        return [self.state.batches[self._published[n]] for n in sorted(numbers)]

    @cached_property
    def _published(self) -> Mapping[int, int]:
        """By the number of its publish entry, each batch."""
        return self.state.batches.publications()

    def _read(self, batch: Batch) -> _PublishedBatch:
        if batch.id not in self._entries:
            entry = self.ledger.publication(batch)
            self._entries[batch.id] = _PublishedBatch(
                entry, group_by(self.state.receipts(batch.published or 0, entry), lambda r: r.offset_range.window)
            )
        return self._entries[batch.id]


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one expectation of the contract with that hash."""

    outcome: ExpectationOutcome
    contract: str


@dataclass(frozen=True, slots=True)
class _PublishedBatch:
    """A publish entry, and those of its receipts that still count, by window."""

    entry: PublishEntry
    receipts: Mapping[int | None, Sequence[Receipt]]
