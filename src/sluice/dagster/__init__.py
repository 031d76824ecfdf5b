"""Feeds in an existing Dagster project.

    import sluice.dagster

    defs = sluice.dagster.feed_definitions("feeds")

merges with any other definitions. An asset downstream takes the rows of a window as an argument:

    orders = sluice.dagster.feed_assets("orders", "feeds")

    @dg.asset(
        ins={"rows": dg.AssetIn(orders.landed)},
        partitions_def=orders.partitions_def,
        automation_condition=sluice.dagster.when_complete(),
    )
    def revenue(rows):
        return rows.duckdb().aggregate("sum(amount)").fetchall()

`FeedsComponent` does the same for `dg`, in YAML. `feed_spec` and `SluiceIOManager` are for other code locations, and
`SluiceResource` is for any asset. The import reads no file.
"""

from __future__ import annotations

from sluice.assets.specs.asset_specs import AssetOf, FeedAsset
from sluice.dagster.component import FeedsComponent
from sluice.dagster.definitions import (
    FeedAssets,
    FeedTranslator,
    feed_assets,
    feed_definitions,
    when_complete,
    when_late,
)
from sluice.dagster.resources import SluiceIOManager, SluiceResource, feed_spec

__all__ = [
    "AssetOf",
    "FeedAsset",
    "FeedAssets",
    "FeedTranslator",
    "FeedsComponent",
    "SluiceIOManager",
    "SluiceResource",
    "feed_assets",
    "feed_definitions",
    "feed_spec",
    "when_complete",
    "when_late",
]
