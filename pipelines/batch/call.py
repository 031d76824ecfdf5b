"""The context of one call of `land` or `preview`."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Request
from sluice.pipelines.model.progress import Reporter
from sluice.pipelines.model.receipts import Owner
from sluice.pipelines.ports import Ports


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a feed, with the ports and the ledger."""

    feed: Feed
    edges: Ports
    ledger: Ledger
    request: Request


@dataclass(frozen=True, slots=True)
class LandingRun(Call):
    """A call that writes: `owner` signs its entries, `report` hears of its progress."""

    owner: Owner
    report: Reporter
