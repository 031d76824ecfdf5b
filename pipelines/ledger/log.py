"""How an entry gets its number: optimistic concurrency over files that are created only if absent.

    read → decide on the state just below number N → create N
                 ↑ taken: read on, decide again

Guarantee: one creator for each number (invariant 11), total order, and an entry that was decided on exactly the
state below it. A lost answer is resolved by reading back and comparing the write id; where nothing stands the write may
still arrive, and stays unknown.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from sluice.pipelines import layout
from sluice.pipelines.errors import LedgerCorrupt, Unknown
from sluice.pipelines.ledger import checkpoint
from sluice.pipelines.ledger.entries import Entry, PlanEntry, PublishEntry, dump, parse
from sluice.pipelines.ledger.fold import Batch, State
from sluice.pipelines.ports import Clock, Lake
from sluice.pipelines.side_by_side import AT_ONCE, each
from sluice.pipelines.values import Plan

CHECKPOINT_EVERY = 200
CHECKPOINT_BYTES = 2 << 20
"""Entries, or bytes of them, that a reader folds before it leaves a checkpoint behind for the next one."""
CHECKPOINTS_KEPT = 3
READ_AHEAD = 64
"""Entries read before they are folded."""


class Appended(NamedTuple):
    """The entry stands at `number`; `state` is the fold including it."""

    number: int
    entry: Entry
    state: State


class Ledger:
    """One feed's ledger as one run sees it. `run` and `cluster` are stamped on what it writes."""

    def __init__(self, lake: Lake, feed: str, clock: Clock, run: str = "", cluster: str = "") -> None:
        self._lake, self.feed, self._clock = lake, feed, clock
        self._run, self._cluster = run, cluster
        self._state = State()

    @classmethod
    def offline(cls, lake: Lake, feed: str, clock: Clock, run: str) -> Ledger:
        """For what is decided without asking Kafka: what it writes names the cluster that the ledger knows."""
        ledger = cls(lake, feed, clock, run)
        ledger._cluster = ledger.read().cluster
        return ledger

    def read(self) -> State:
        """The fold of everything written so far. Raises LedgerTooNew, LedgerCorrupt.

        The first time a listing shows what there is, and that no entry is missing; later reads go on from there.
        """
        begins = self._state.number == 0
        if begins:
            self._state = self._checkpoint() or self._state
        data = list(self._listed(self._state.number) if begins else self._following(self._state.number))
        if data:
            self._state = self._state.extended(parse(d, path) for path, d in data)
        if len(data) >= CHECKPOINT_EVERY or sum(len(d) for _, d in data) >= CHECKPOINT_BYTES:
            self._leave_checkpoint()
        return self._state

    def _leave_checkpoint(self) -> None:
        """One that stands could not be read, and is replaced. Older ones go, but for a few that somebody may read."""
        self._lake.put(layout.checkpoint_path(self.feed, self._state.number), checkpoint.dump(self._state))
        for old in list(self._lake.list(layout.checkpoint_folder(self.feed)))[:-CHECKPOINTS_KEPT]:
            self._lake.remove(old)

    def _checkpoint(self) -> State | None:
        """The newest fold that stands as a checkpoint and can be read."""
        for path in reversed(list(self._lake.list(layout.checkpoint_folder(self.feed)))):
            state = checkpoint.load(self._lake.get(path) or b"")
            if state is not None and state.number == layout.checkpoint_number(path):
                return state
        return None

    def entries(self, first: int = 0) -> Iterator[tuple[int, Entry]]:
        """(number, entry) from `first` on. A missing number is LedgerCorrupt: entries are never removed."""
        for number, (path, data) in enumerate(self._listed(first), first):
            yield number, parse(data, path)

    def _listed(self, first: int) -> Iterator[tuple[str, bytes]]:
        """(path, content) of the entries from `first` on, without a hole."""
        paths = self._numbered(first)
        while some := list(islice(paths, READ_AHEAD)):
            yield from zip(some, self._contents(some), strict=True)

    def _numbered(self, first: int) -> Iterator[str]:
        """The paths of the entries from `first` on. A missing number is LedgerCorrupt."""
        expected = first
        after = layout.log_path(self.feed, first - 1) if first else ""
        for path in self._lake.list(layout.log_folder(self.feed), after):
            number = layout.log_number(path)
            if number is None:
                continue
            if number != expected:
                raise self._hole(expected, path)
            yield path
            expected += 1

    def _contents(self, paths: list[str]) -> list[bytes]:
        """What stands at the paths; many are read side by side."""
        if len(paths) <= AT_ONCE:
            return [self._content(path) for path in paths]
        return each(self._content, paths)

    def _following(self, number: int) -> Iterator[tuple[str, bytes]]:
        """The same until a number is not there: one question where nothing is new, however long the log is."""
        while (data := self._lake.get(path := layout.log_path(self.feed, number))) is not None:
            yield path, data
            number += 1

    def entry(self, number: int) -> Entry:
        """The entry at `number`. Raises LedgerCorrupt when there is none."""
        path = layout.log_path(self.feed, number)
        return parse(self._content(path), path)

    def plan(self, batch: int) -> Plan:
        """The plan of the batch. Raises LedgerCorrupt when none stands there."""
        entry = self.entry(batch)
        if not isinstance(entry, PlanEntry):
            raise LedgerCorrupt(f"entry {batch} is not the plan of batch {batch}")
        return entry.plan

    def publication(self, batch: Batch) -> PublishEntry:
        """What the batch published. Raises LedgerCorrupt when that does not stand, as of one that is not published."""
        entry = None if batch.published is None else self.entry(batch.published)
        if not isinstance(entry, PublishEntry):
            raise LedgerCorrupt(f"entry {batch.published} is not the publish entry of batch {batch.id}")
        return entry

    def append(self, decide: Callable[[State], Entry | None]) -> Appended | None:
        """Write what `decide` makes of the newest state; it is asked again each time the number was taken.

        None when it decides on nothing. `decide` may raise to refuse. Raises Unknown when nobody said whether the entry
        was written, and it is not there.
        """
        while True:
            state = self.read()
            entry = decide(state)
            if entry is None:
                return None
            if self._create(state.number, entry := self._stamped(entry)):
                self._state = state.extended([entry])
                return Appended(state.number, entry, self._state)

    def _create(self, number: int, entry: Entry) -> bool:
        path = layout.log_path(self.feed, number)
        try:
            return self._lake.put_if_absent(path, dump(entry))
        except Unknown:
            if (standing := self._lake.get(path)) is None:
                raise
            return parse(standing, path).write == entry.write

    def _stamped(self, entry: Entry) -> Entry:
        stamp = {"write": secrets.token_hex(8), "run": self._run, "at": self._clock(), "cluster": self._cluster}
        return entry.model_copy(update=stamp)

    def _content(self, path: str) -> bytes:
        data = self._lake.get(path)
        if data is None:
            raise self._hole(layout.log_number(path) or 0, path)
        return data

    def _hole(self, expected: int, path: str) -> LedgerCorrupt:
        return LedgerCorrupt(
            f"ledger of feed {self.feed}: entry {expected} is missing ({path} stands)",
            remedy="restore the missing file from a backup of the lake; Sluice changes nothing until then",
        )
