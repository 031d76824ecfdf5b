"""The mark in the metadata of a committed offset: the ledger and the entry that committed it.

It shows that entries are lost, or that the ledger is a different one: the lake was removed or replaced, two lakes share
a group, or a feed was renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.errors import ForeignMarks
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.tip import BEYOND, Trace, build_lost_error
from sluice.pipelines.model.kafka import CommittedOffset, Key, TopicPartition

Committed = Mapping[TopicPartition, CommittedOffset | None]
"""A group's committed offsets; None for a partition without one."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The metadata of a committed offset: the ledger, the intent's number, and the life of the topic."""

    ledger: str
    number: int
    incarnation: str

    def dump(self) -> str:
        return json.dumps({"sluice": self.ledger, "n": self.number, "i": self.incarnation}, separators=(",", ":"))

    @classmethod
    def parse(cls, metadata: str) -> Mark | None:
        """Returns None for metadata that is not a mark of Sluice."""
        try:
            raw = json.loads(metadata)
            return cls(str(raw["sluice"]), int(raw["n"]), str(raw["i"]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class OffsetNote:
    """Sluice's metadata of an offset, from a commit or a move by hand: entry `entry` of `ledger`."""

    ledger: str
    entry: int
    by_hand: bool

    @classmethod
    def parse(cls, metadata: str) -> OffsetNote | None:
        """Returns None for metadata that Sluice did not write."""
        try:
            if mark := Mark.parse(metadata):
                return cls(mark.ledger, mark.number, by_hand=False)
            raw = json.loads(metadata)
            return cls(str(raw["sluice"]), int(raw["moved"]), by_hand=True)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None


def by_hand(ledger: str, entry: int) -> str:
    """Returns the metadata of an offset moved by hand. It is not a commit's mark and proves nothing."""
    return json.dumps({"sluice": ledger, "moved": entry}, separators=(",", ":"))


# -- lost entries of this ledger


def check_marks(ledger: Ledger, state: State, committed: Committed) -> State:
    """Returns the newest state, read after the committed offsets.

    Raises EntriesLost if a committed offset has the mark of an entry that the state does not have.
    """
    if find_traces(state, committed) and (traces := find_traces(state := ledger.read(), committed)):
        raise build_lost_error(ledger.feed, state.newest, traces, other="a copy of this lake commits to its group")
    return state


def find_traces(state: State, committed: Committed, ledger_id: str = "") -> list[Trace]:
    """Returns the marks of this ledger's entries that the state does not have. `ledger_id` serves an empty state."""
    marks = {tp: (c, m) for tp, c in committed.items() if c and (m := Mark.parse(c.metadata))}
    return [
        Trace(m.number, f"{tp}: the committed offset {c.offset} has the mark of entry {m.number}")
        for tp, (c, m) in sorted(marks.items())
        if m.ledger == (state.ledger_id or ledger_id) and state.number <= m.number < BEYOND
    ]


# -- another ledger's


@dataclass(frozen=True, slots=True)
class Foreign:
    """A committed offset with the mark of another ledger: its entry `number`, and the topic id if the mark has one."""

    tp: TopicPartition
    offset: int
    ledger: str
    number: int
    topic_id: str = ""

    def __str__(self) -> str:
        mark = f"the mark of entry {self.number} of ledger {self.ledger[:40]}"
        return f"{self.tp}: the committed offset {self.offset} has {mark}"


def find_foreign_mark(state: State, tp: TopicPartition, committed: CommittedOffset | None) -> Foreign | None:
    """Returns the offset if it has the mark of another ledger that was not taken over up to that mark."""
    note = OffsetNote.parse(committed.metadata) if committed else None
    if committed is None or note is None or note.ledger == state.ledger_id:
        return None
    number = min(max(note.entry, 0), BEYOND)
    if number <= state.taken.get(note.ledger, -1):
        return None
    mark = Mark.parse(committed.metadata)
    topic_id = Key(tp.topic, tp.partition, mark.incarnation).topic_id if mark else ""
    return Foreign(tp, committed.offset, note.ledger, number, topic_id)


def find_foreign_marks(state: State, committed: Committed, *, commits: bool = True) -> list[Foreign]:
    """Returns the committed offsets with another ledger's mark.

    `commits`: whether the feed commits for the group. If not, only offsets of partitions without an origin matter.
    """
    marks = (
        find_foreign_mark(state, tp, c) for tp, c in sorted(committed.items()) if commits or tp not in state.current
    )
    return [mark for mark in marks if mark]


def check_owner(ledger: Ledger, state: State, committed: Committed, *, commits: bool = True) -> None:
    """Raises ForeignMarks if committed offsets carry another ledger's mark. The state was read after them."""
    if marks := find_foreign_marks(state, committed, commits=commits):
        raise build_foreign_error(ledger, state, marks)


def build_foreign_error(ledger: Ledger, state: State, marks: Sequence[Foreign]) -> ForeignMarks:
    """Returns the error for these marks, with their owner and the remedies."""
    feed, first = ledger.feed, marks[0]
    lines = [str(mark) for mark in marks[:5]] + ([f"and {len(marks) - 5} more"] if len(marks) > 5 else [])
    own = f"is {state.ledger_id}" if state.ledger_id else "is empty"
    former = ledger.neighbour(first.ledger)
    whose = _of_another_name(feed, former) if former else _of_another_lake(feed)
    return ForeignMarks(
        f"feed {feed}: its group's offsets belong to another ledger; nothing was changed.\n    "
        + "\n    ".join((*lines, f"the ledger of feed {feed} in {ledger.uri} {own}")),
        remedy="\n    ".join([*whose, *_list_take_over_commands(feed)]),
        topic=first.tp.topic,
        partition=first.tp.partition,
    )


def _of_another_lake(feed: str) -> list[str]:
    return [
        "if the lake was lost or replaced: restore it, or correct `lake:`",
        f"if a feed in another lake uses this group: give {feed} one of its own by `group:`",
    ]


def _of_another_name(feed: str, former: str) -> list[str]:
    return [
        f"the marks are those of feed {former} in this lake. If it was renamed, add to feeds/{feed}.yaml:",
        f"    stored_as: {former}",
        f"if both are in use: give {feed} a group of its own by `group:`",
    ]


def _list_take_over_commands(feed: str) -> list[str]:
    accept = f"    sluice accept {feed} group --begin"
    return [
        "or take the group over from its current offsets; lower ones stay with the other ledger:",
        f"{accept} committed --reason …",
        "or from `start:`, which lands again what Kafka still has:",
        f"{accept} start --reason …",
    ]
