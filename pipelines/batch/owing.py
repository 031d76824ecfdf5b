"""A quick check whether a catch-up would read anything, before slow components start."""

from __future__ import annotations

from sluice.pipelines.batch.survey import topics_read
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.planning.origins import key_of
from sluice.pipelines.ports import Ports


def may_owe(feed: Feed, edges: Ports) -> bool:
    """False if a catch-up of the feed would find nothing to land, or fails before it reads. Nothing is changed.

    It only helps: a run that turns out to need an engine starts it by itself.
    """
    try:
        state = Ledger(edges.lake, feed.name, edges.clock).read()
        if state.live():
            return True
        partitions = edges.cluster.partitions(topics_read(feed, edges.cluster), feed.isolation)
    except SluiceError:
        return False
    keyed = {key_of(state, p): p for p in partitions}
    return any(k not in state.origins or state.frontier(k) < p.stable_end for k, p in keyed.items())
