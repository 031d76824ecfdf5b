"""An asset downstream of landed orders."""

from pathlib import Path
from typing import Any

import dagster as dg

import sluice.dagster

orders = sluice.dagster.feed_assets("orders", Path(__file__).parents[3] / "feeds")


@dg.asset(
    ins={"rows": dg.AssetIn(orders.landed)},
    partitions_def=orders.partitions_def,
    automation_condition=sluice.dagster.when_complete(),
)
def revenue(rows: Any) -> dg.MaterializeResult[None]:
    """Revenue of an hour, by currency."""
    revenue_by_currency = rows.duckdb().aggregate("currency, cast(sum(amount) as double)", "currency").fetchall()
    return dg.MaterializeResult(metadata={"orders": rows.rows, "revenue": dict(sorted(revenue_by_currency))})
