"""Ledgers that this process has read before: a run's, which its steps share, and what ticks found owed."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.s3_section import S3Settings
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.tip import Tip
from sluice.pipelines.planning.origins import check_cluster
from sluice.pipelines.planning.windows import list_owed_windows
from sluice.pipelines.ports import Ports


class RunLedgers:
    """The ledgers that steps write to, by feed and run: a later step reads on where an earlier one was."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], Ledger] = {}

    def of(self, feed: Feed, edges: Ports, run: str) -> Ledger:
        """The ledger, opened for the run. Raises ClusterChanged when it was begun with another cluster."""
        known = self._opened.get((feed.name, run))
        if known is None:
            known = self._opened[feed.name, run] = open_ledger(feed, edges, run)
        else:
            check_cluster(known.read(), edges.cluster.cluster_id(), feed.name)
        return known

    def forget(self) -> None:
        """Drop ledgers that the run no longer needs."""
        self._opened.clear()


@dataclass(frozen=True, slots=True)
class _Found:
    """The pending windows of a ledger with `number` entries, of windows that closed before `until` (ms)."""

    place: tuple[str, S3Settings, WindowSettings]
    ledger: str
    number: int
    owed: list[int]
    until: int


class OwedWindows:
    """Caches the pending windows of feeds by their ledgers. Thread-safe.

    Where nothing came into a ledger since the last look, it owes what it owed, and the windows that closed since: this
    takes two requests to the lake, and little is kept. Otherwise the ledger is read again, with all that this checks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, _Found] = {}

    def of(self, feed: Feed, edges: Ports) -> list[int]:
        """The closed windows (their starts, ms) that the feed owes, oldest first."""
        place, until = (feed.lake, feed.s3, feed.window), feed.window.last_boundary(edges.clock())
        with self._lock:
            known = self._found.pop(feed.name, None)  # what fails below is read again the next time
        if known is not None and known.place == place and not _is_newer(known, feed, edges):
            closed = range(known.until, until, feed.window.length)
            found = _Found(place, known.ledger, known.number, [*known.owed, *closed], max(until, known.until))
        else:
            state, now = Ledger(edges.lake, feed.name, edges.clock).read(), edges.clock()
            owed = list_owed_windows(state, feed.window, now)
            found = _Found(place, state.ledger_id, state.number, owed, feed.window.last_boundary(now))
            if not state.known():
                return owed  # nothing has begun: only the newest window is owed
        with self._lock:
            self._found[feed.name] = found
        return found.owed


def _is_newer(known: _Found, feed: Feed, edges: Ports) -> bool:
    """Whether the lake's ledger has a newer entry, or is another one, by its tip."""
    tip = Tip.parse(edges.lake.get(paths.tip_path(feed.name)))
    if tip is None or (tip.ledger, tip.number) != (known.ledger, known.number - 1):
        return True
    return edges.lake.size(paths.log_path(feed.name, known.number)) is not None
