"""Writes landed files anew, slice by slice, so that engines which misread their statistics read them right.

A table names such files (`ports.Table.misread`). The batch is one of compaction: rows, order and coordinates stay, each
part is compared with its source, and the old files go as merged ones do.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.maintenance.compaction import REQUEST, Compacted, threads
from sluice.pipelines.maintenance.merging import Merge, Merger
from sluice.pipelines.maintenance.rewrite import RewriteMethod, Rewriting, company, give_up_dead
from sluice.pipelines.model.receipts import Owner, Progress, Reporter
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.publish import roll_forward


def renew(feed: Feed, edges: Ports, addresses: Collection[str], owner: Owner, report: Reporter) -> Compacted:
    """Write the files at these addresses anew, batch by batch; what one batch replaced stays replaced.

    Slices of a shared file get files of their own. A file that another live batch works on, or that holds a topic's
    earlier life, stays as it is. Raises as `compact`.
    """
    with edges.liveness.beat(owner):
        ledger = Ledger.offline(edges.lake, feed.name, edges.clock, owner.run)
        give_up_dead(ledger, edges.liveness, REQUEST.kind, report)
        roll_forward(ledger, edges.lake, feed.name)
        report(Progress("find"))
        state = ledger.read()
        at_once = threads(feed.compaction, os.cpu_count() or 1)
        method = RewriteMethod(REQUEST, "merge", lambda desk: Merger(desk).merge, at_once)
        run = Rewriting(feed, edges, ledger, owner, report, method, state.number)
        run.all(_pieces(ledger, state, edges.lake, addresses))
        met = company(feed.name, ledger, edges.liveness, run.busy.values())
    return Compacted(tuple(run.done), tuple(run.batches), run.busy, (), met)


def _pieces(ledger: Ledger, state: State, lake: Lake, addresses: Collection[str]) -> list[Merge]:
    """A piece for each slice with rows in these files, or in a file that it shares with such a slice."""
    receipts = manifest.receipts_in(ledger, state, {*state.published_in})
    chosen = [r for r in receipts if any(lake.locate(p.path) in addresses for p in r.parts)]
    return [Merge((r,)) for r in manifest.with_sharers(ledger, state, chosen)]
