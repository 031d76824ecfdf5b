"""Landed windows as arguments of assets downstream: each gets the windows of its own partition, read lazily.

Dagster asks the asset upstream how it is loaded, so `AssetIn(key)` is all that an asset downstream says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from sluice.assets.runs.run_session import RunSession, as_failure
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.util.units import parse_window

if TYPE_CHECKING:
    from sluice.reading import Windows


class LandedRows(dg.IOManager):
    """Loads a feed's landed rows. Landing stores them, not this manager."""

    def __init__(self, session: RunSession, feed: str) -> None:
        self._session, self._feed = session, feed

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Nothing: landing hands over no rows."""

    def load_input(self, context: dg.InputContext) -> Windows:
        """The windows of the run's partition, as `sluice.read` gives them. Kafka is not asked.

        Raises dagster.Failure for a window that is not complete.
        """
        from sluice.reading import Windows  # late: definitions load without it

        try:
            feed = self._session.readable_feed(self._feed)
            lake = self._session.open_lake(feed)
            starts = [parse_window(key) for key in context.asset_partition_keys]
            return Windows.of(feed, Ledger(lake, feed.name, lambda: 0), lake, starts, PartKind.LANDED)
        except SluiceError as error:
            raise as_failure(error) from error
