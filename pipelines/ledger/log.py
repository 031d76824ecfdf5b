"""How an entry gets its number: optimistic concurrency over files that are created only if absent.

    read → decide on the state just below number N → create N
                 ↑ taken: read on, decide again

Guarantee: one creator for each number (invariant 11), total order, and an entry that was decided on exactly the
state below it. A lost answer is resolved by reading back and comparing the write id.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sluice.pipelines import layout
from sluice.pipelines.errors import LedgerCorrupt, Unknown
from sluice.pipelines.ledger import checkpoint
from sluice.pipelines.ledger.entries import Entry, dump, parse
from sluice.pipelines.ledger.fold import State
from sluice.pipelines.ports import Clock, Lake

CHECKPOINT_EVERY = 200
"""Entries that a reader folds before it leaves a checkpoint behind for the next one."""


class Appended(NamedTuple):
    """The entry stands at `number`; `state` is the fold including it."""

    number: int
    entry: Entry
    state: State


class Ledger:
    """One feed's ledger as one run sees it. `run` and `cluster` are stamped on what it writes."""

    def __init__(self, lake: Lake, feed: str, clock: Clock, run: str = "", cluster: str = "") -> None:
        self._lake, self._feed, self._clock = lake, feed, clock
        self._run, self._cluster = run, cluster
        self._state = State()

    def read(self) -> State:
        """The fold of everything written so far. Raises LedgerTooNew, LedgerCorrupt."""
        if self._state.number == 0:
            self._state = self._checkpoint() or self._state
        fresh = [entry for _, entry in self.entries(self._state.number)]
        if fresh:
            self._state = self._state.extended(fresh)
        if len(fresh) >= CHECKPOINT_EVERY:
            self._lake.put_if_absent(
                layout.checkpoint_path(self._feed, self._state.number), checkpoint.dump(self._state)
            )
        return self._state

    def _checkpoint(self) -> State | None:
        """The newest fold that stands as a checkpoint and can be read."""
        for path in reversed(list(self._lake.list(layout.checkpoint_folder(self._feed)))):
            state = checkpoint.load(self._lake.get(path) or b"")
            if state is not None and state.number == layout.checkpoint_number(path):
                return state
        return None

    def entries(self, first: int = 0) -> Iterator[tuple[int, Entry]]:
        """(number, entry) from `first` on. A missing number is LedgerCorrupt: entries are never removed."""
        expected = first
        after = layout.log_path(self._feed, first - 1) if first else ""
        for path in self._lake.list(layout.log_folder(self._feed), after):
            number = layout.log_number(path)
            if number is None:
                continue
            if number != expected:
                raise self._hole(expected, path)
            yield number, self._entry(path)
            expected += 1

    def entry(self, number: int) -> Entry:
        """The entry at `number`. Raises LedgerCorrupt when there is none."""
        return self._entry(layout.log_path(self._feed, number))

    def append(self, decide: Callable[[State], Entry | None]) -> Appended | None:
        """Write what `decide` makes of the newest state; it is asked again each time the number was taken.

        None when it decides on nothing. `decide` may raise to refuse.
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
        path = layout.log_path(self._feed, number)
        try:
            return self._lake.put_if_absent(path, dump(entry))
        except Unknown:
            standing = self._lake.get(path)
            return standing is not None and parse(standing, path).write == entry.write

    def _stamped(self, entry: Entry) -> Entry:
        stamp = {"write": secrets.token_hex(8), "run": self._run, "at": self._clock(), "cluster": self._cluster}
        return entry.model_copy(update=stamp)

    def _entry(self, path: str) -> Entry:
        data = self._lake.get(path)
        if data is None:
            raise self._hole(layout.log_number(path) or 0, path)
        return parse(data, path)

    def _hole(self, expected: int, path: str) -> LedgerCorrupt:
        return LedgerCorrupt(
            f"ledger of feed {self._feed}: entry {expected} is missing ({path} stands)",
            remedy="restore the missing file from a backup of the lake; Sluice changes nothing until then",
        )
