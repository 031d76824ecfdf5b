"""The newest number known to be used, kept beside the log: it tells when the log lost its newest entries.

It is written after each entry, as a best effort: nobody waits for it and nothing fails with it. When it is late or
missing, it is behind the log and says nothing. When it is ahead of the log, it proves that entries once stood there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.fold import State

BEYOND = 1 << 61
"""Numbers from here on belong to no entry: no ledger grows so long."""


class Tip(NamedTuple):
    """Entry `number` of the ledger with this id stood once."""

    ledger: str
    number: int

    def dump(self) -> bytes:
        return json.dumps({"ledger": self.ledger, "number": self.number}).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes | None) -> Tip | None:
        """None for anything that is not a tip."""
        try:
            raw = json.loads(data or b"")
            tip = cls(raw["ledger"], raw["number"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        sound = isinstance(tip.ledger, str) and type(tip.number) is int and 0 <= tip.number < BEYOND
        return tip if sound else None


class Trace(NamedTuple):
    """Evidence that an entry once stood: its number, and in words what shows it, and where. It is not `sure` where
    somebody else may have put it there: a file that was copied into the lake."""

    number: int
    said: str
    sure: bool = True


def beyond(feed: str, state: State, tip: Tip | None) -> Trace | None:
    """The evidence, if the tip names an entry that the state does not hold."""
    if tip is None or (tip.ledger == state.ledger_id and tip.number < state.number):
        return None
    whose = "" if tip.ledger == state.ledger_id or not state.number else f" of another ledger ({tip.ledger[:20]})"
    return Trace(tip.number, f"{paths.tip_path(feed)} names entry {tip.number}{whose}")


def entries_lost(feed: str, newest: int, traces: Sequence[Trace]) -> EntriesLost:
    """The error for a ledger whose newest entry is `newest`: what is missing, and how we know."""
    known = max(t.number for t in traces)
    stands = f"its newest is entry {newest}" if newest >= 0 else "none of them stands"
    missing = f"entry {known} once stood" if known > newest else "others once stood"
    texts = [t.said for t in traces[:5]] + ([f"and {len(traces) - 5} more"] if len(traces) > 5 else [])
    if not any(t.sure for t in traces):
        return _lost_or_strange(feed, stands, texts)
    return EntriesLost(
        f"the ledger of feed {feed} lost entries: {stands}, and {missing}.\n    " + "\n    ".join(texts),
        remedy=f"restore _sluice/{feed}/log from a backup of the lake; nothing was changed. Or go on without them: "
        f"sluice accept {feed} ledger --reason …   sets aside what they told of; the next run lands it again",
    )


def _lost_or_strange(feed: str, stands: str, texts: Sequence[str]) -> EntriesLost:
    """The error where nothing but names of files speaks for it."""
    return EntriesLost(
        f"the ledger of feed {feed} lost entries, or files in its folders are not its own: {stands}.\n    "
        + "\n    ".join(texts),
        remedy="if such a file was copied here from elsewhere, move it out of the lake; nothing was changed. Else"
        f" restore _sluice/{feed}/log from a backup of the lake, or go on without the lost entries:"
        f" sluice accept {feed} ledger --reason …   sets aside what they told of; the next run lands it again",
    )
