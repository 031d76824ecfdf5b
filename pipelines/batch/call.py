"""What goes through one call of `land` or `preview` from its first line to its last."""

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
    """What is asked of a feed, and what answers it."""

    feed: Feed
    edges: Ports
    ledger: Ledger
    request: Request


@dataclass(frozen=True, slots=True)
class LandingRun(Call):
    """A call that writes: `owner` signs its entries, `report` hears of its progress."""

    owner: Owner
    report: Reporter
