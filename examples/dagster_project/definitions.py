"""Feeds beside assets of one's own: Sluice lands `orders`; `revenue` is computed from each hour that is complete."""

from pathlib import Path
from typing import Any

import dagster as dg

import sluice.dagster

FEEDS = Path(__file__).parent / "feeds"
orders = sluice.dagster.feed_assets("orders", FEEDS)


@dg.asset(
    ins={"rows": dg.AssetIn(orders.landed)},
    partitions_def=orders.partitions_def,
    automation_condition=sluice.dagster.when_complete(),
)
def revenue(rows: Any) -> dg.MaterializeResult[None]:
    """What was ordered in an hour, by currency."""
    found = rows.duckdb().aggregate("currency, cast(sum(amount) as double)", "currency").fetchall()
    return dg.MaterializeResult(metadata={"orders": rows.rows, "revenue": dict(sorted(found))})


defs = dg.Definitions.merge(sluice.dagster.feed_definitions(FEEDS), dg.Definitions(assets=[revenue]))
