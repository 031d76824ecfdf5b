"""A window's manifest: the answer to "may I read hour 14?".

It says that every partition's range of the window is accounted for, names the boundaries and never the parts (a
replace or a compaction changes those), and is written once: a complete window stays complete. Parts come from the
ledger, so a reader never sees half of what is being made visible.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from sluice.pipelines import layout, windows
from sluice.pipelines.errors import UsageError, WindowIncomplete
from sluice.pipelines.feed import WindowSettings
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ports import Lake
from sluice.pipelines.units import show_window
from sluice.pipelines.values import Part, PartKind, Receipt

FORMAT = 1


@dataclass(frozen=True, slots=True)
class WindowFiles:
    """The parts of one window. `complete` says that nothing of it is owed any more."""

    window: int
    complete: bool
    parts: tuple[Part, ...]

    def of(self, kind: PartKind) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if p.kind is kind)


def write_manifests(ledger: Ledger, lake: Lake, feed: str, settings: WindowSettings) -> tuple[int, ...]:
    """Declare complete every window that is and has no manifest yet; returns those. Idempotent."""
    state = ledger.read()
    standing = set(lake.list(layout.manifest_folder(feed)))
    bounded = (t for t in sorted(state.boundaries) if t + settings.length in state.boundaries)
    missing = (t for t in bounded if layout.window_path(feed, t, settings.length) not in standing)
    done = tuple(t for t in missing if windows.complete(state, t, settings))
    for window in done:
        lake.put_if_absent(layout.window_path(feed, window, settings.length), _dump(state, feed, window, settings))
    return done


def _dump(state: State, feed: str, window: int, settings: WindowSettings) -> bytes:
    ranges = [(k, windows.range_of(state, k, window, settings)) for k in sorted(state.current.values())]
    content = {
        "format": FORMAT,
        "feed": feed,
        "window": show_window(window),
        "start_ms": window,
        "end_ms": window + settings.length,
        "complete": True,
        "ledger": state.ledger_id,
        "number": state.number,
        "boundaries": [
            {"topic": k.topic, "partition": k.partition, "topic_id": k.topic_id, "start": r.start, "end": r.end}
            for k, r in ranges
            if r is not None
        ],
    }
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


def files(ledger: Ledger, feed: str, window: int, settings: WindowSettings) -> WindowFiles:
    """The window's live parts, in log order, from the ledger. Raises UsageError for what is no window of the feed."""
    state = ledger.read()
    if window % settings.length:
        raise UsageError(
            f"{show_window(window)} is no start of a window of feed {feed}",
            remedy=f"ask for the window that begins at {show_window(settings.start_of(window))}",
        )
    receipts = sorted(receipts_of(ledger, state, window), key=lambda r: (r.slice.key, r.slice.start))
    parts = tuple(p for r in receipts for p in r.parts if p.path not in state.replaced)
    return WindowFiles(window, windows.complete(state, window, settings), parts)


def receipts_of(ledger: Ledger, state: State, window: int | None) -> list[Receipt]:
    """Receipts of the slices that lie in the window (None: outside windows), of every entry that counts."""
    entries = (ledger.entry(number) for number in state.published_in.get(window, ()))
    return [r for e in entries if isinstance(e, PublishEntry) for r in e.receipts if r.slice.window == window]


def demand_complete(found: WindowFiles, feed: str) -> None:
    """Raises WindowIncomplete while part of the window is owed, or a boundary of it not resolved."""
    if not found.complete:
        raise WindowIncomplete(
            f"window {show_window(found.window)} of feed {feed} is not complete",
            remedy=f"land it (sluice run {feed} --window …), or wait for it (sluice wait {feed} --window …)",
        )
