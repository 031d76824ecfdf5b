"""The newest number known to be used, stored next to the log to detect that the log lost its newest entries.

It is written after each entry as a best effort; errors are ignored. If it is late or missing, it proves nothing. If it
is ahead of the log, it proves that entries are lost. It repeats the facts that definitions need when they load, so that
one request to the lake answers for a feed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.fold import State
from sluice.pipelines.model.kafka import is_topic_name
from sluice.pipelines.util.units import parse_window, show_window

BEYOND = 1 << 61
"""Numbers from here on are invalid: no ledger grows to this length."""


MAX_TOPICS = 100
"""A ledger with more topics does not list them in its tip."""


class Facts(NamedTuple):
    """The start of the first known window (ms), the topics, and the time (ms) for which Kafka keeps their records.

    `topics` is None if the tip does not list them, `retention` if it is unknown or Kafka deletes nothing.
    """

    first_window: int | None = None
    topics: tuple[str, ...] | None = ()
    retention: int | None = None

    @classmethod
    def of(cls, state: State, retention: int | None = None) -> Facts:
        first = state.boundary_times[0] if state.boundary_times else None
        return cls(first, tuple(sorted({k.topic for k in state.known()})), retention)

    def to_document(self) -> dict[str, Any]:
        first = None if self.first_window is None else show_window(self.first_window)
        topics = None if self.topics is None or len(self.topics) > MAX_TOPICS else self.topics
        return {"first_window": first, "topics": topics, "kept_ms": self.retention}

    @classmethod
    def parse(cls, raw: Any) -> Facts | None:
        """Returns None for anything but the document of facts."""
        try:
            first, topics, retention = raw["first_window"], raw["topics"], raw["kept_ms"]
            start = None if first is None else parse_window(first)
        except (ValueError, LookupError, TypeError):
            return None
        names = tuple(topics) if isinstance(topics, list) else ()
        sound = all(isinstance(n, str) and is_topic_name(n) for n in names)
        sound &= topics is None or isinstance(topics, list)
        sound &= retention is None or (type(retention) is int and retention > 0)
        return cls(start, None if topics is None else names, retention) if sound else None


class Tip(NamedTuple):
    """Evidence that entry `number` of the ledger with this id was written. `facts` is None in older lakes."""

    ledger: str
    number: int
    facts: Facts | None = None

    def dump(self) -> bytes:
        facts = {"facts": self.facts.to_document()} if self.facts else {}
        return json.dumps({"ledger": self.ledger, "number": self.number} | facts).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes | None) -> Tip | None:
        """Returns None if the data is not a tip."""
        try:
            raw = json.loads(data or b"")
            tip = cls(raw["ledger"], raw["number"], Facts.parse(raw.get("facts")))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        sound = isinstance(tip.ledger, str) and type(tip.number) is int and 0 <= tip.number < BEYOND
        return tip if sound else None


class Trace(NamedTuple):
    """Evidence that an entry existed: its number, and a description with the place of the evidence. It is not `sure`
    if others may have put it there, for example by copying a file into the lake."""

    number: int
    said: str
    sure: bool = True


def find_lost_entry(feed: str, state: State, tip: Tip | None) -> Trace | None:
    """Returns the evidence, if the tip names an entry that the state does not have."""
    if tip is None or (tip.ledger == state.ledger_id and tip.number < state.number):
        return None
    whose = "" if tip.ledger == state.ledger_id or not state.number else f" of another ledger ({tip.ledger[:20]})"
    return Trace(tip.number, f"{paths.tip_path(feed)} names entry {tip.number}{whose}")


def build_lost_error(feed: str, newest: int, traces: Sequence[Trace], *, other: str = "") -> EntriesLost:
    """Returns the error for a ledger whose newest entry is `newest`, with the evidence.

    `other` names the other cause that evidence in Kafka may have.
    """
    last_known = max(t.number for t in traces)
    stands = f"its newest is entry {newest}" if newest >= 0 else "none of them stands"
    missing = f"entry {last_known} once existed" if last_known > newest else "others once existed"
    texts = [t.said for t in traces[:5]] + ([f"and {len(traces) - 5} more"] if len(traces) > 5 else [])
    if not any(t.sure for t in traces):
        return EntriesLost(
            f"the ledger of feed {feed} lost entries, or files in its folders are not its own: {stands}.\n    "
            + "\n    ".join(texts),
            remedy="if such a file was copied here from elsewhere, move it out of the lake; nothing was changed. Else"
            f" restore _sluice/{feed}/log from a backup of the lake, or go on without the lost entries:"
            f" sluice accept {feed} ledger --reason …   sets aside their files; the next run lands them again",
        )
    cause, first = "", ""
    if other:
        cause, first = f", or {other}", f"if {other}: give that one another `group:`, and accept here. Else "
    return EntriesLost(
        f"the ledger of feed {feed} lost entries{cause}: {stands}, and {missing}.\n    " + "\n    ".join(texts),
        remedy=f"{first}restore _sluice/{feed}/log from a backup of the lake; nothing was changed. Or go on without"
        f" them: sluice accept {feed} ledger --reason …   sets aside their files; the next run lands them again",
    )
