"""What goes through one call of `land` or `preview` from its first line to its last."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ports import Edges
from sluice.pipelines.vocabulary.plans import Request
from sluice.pipelines.vocabulary.progress import Reporter
from sluice.pipelines.vocabulary.receipts import Owner


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of a feed, and what answers it."""

    feed: Feed
    edges: Edges
    ledger: Ledger
    request: Request


@dataclass(frozen=True, slots=True)
class LandingRun(Call):
    """A call that writes: `owner` signs its entries, `report` hears of its progress."""

    owner: Owner
    report: Reporter
