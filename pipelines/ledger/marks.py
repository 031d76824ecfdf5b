"""The mark beside a committed offset: it names the entry that committed it, and so tells when entries are lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.tip import BEYOND, Trace, entries_lost
from sluice.pipelines.vocabulary.kafka import CommittedOffset, TopicPartition

Committed = Mapping[TopicPartition, CommittedOffset | None]
"""What a group holds; None for a partition without an offset."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What we store beside a committed offset: the ledger, the intent's number, and the life of the topic."""

    ledger: str
    number: int
    incarnation: str

    def dump(self) -> str:
        return json.dumps({"sluice": self.ledger, "n": self.number, "i": self.incarnation}, separators=(",", ":"))

    @classmethod
    def parse(cls, metadata: str) -> Mark | None:
        """None for anything that we did not write."""
        try:
            raw = json.loads(metadata)
            return cls(str(raw["sluice"]), int(raw["n"]), str(raw["i"]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None


def check_marks(ledger: Ledger, state: State, committed: Committed) -> State:
    """The newest state, read after the committed offsets. Raises EntriesLost when a committed offset has the mark of an
    entry that the state does not hold."""
    if traces(state, committed) and (found := traces(state := ledger.read(), committed)):
        raise entries_lost(ledger.feed, state.newest, found)
    return state


def traces(state: State, committed: Committed, ledger_id: str = "") -> list[Trace]:
    """The marks of entries that the state does not hold. They are of its ledger, or of `ledger_id` when it is empty."""
    marks = {tp: (c, m) for tp, c in committed.items() if c and (m := Mark.parse(c.metadata))}
    return [
        Trace(m.number, f"{tp}: the committed offset {c.offset} has the mark of entry {m.number}")
        for tp, (c, m) in sorted(marks.items())
        if m.ledger == (state.ledger_id or ledger_id) and state.number <= m.number < BEYOND
    ]
