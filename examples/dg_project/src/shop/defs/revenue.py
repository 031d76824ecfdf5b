"""An asset of the project's own, downstream of what Sluice lands."""

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
    """What was ordered in an hour, by currency."""
    found = rows.duckdb().aggregate("currency, cast(sum(amount) as double)", "currency").fetchall()
    return dg.MaterializeResult(metadata={"orders": rows.rows, "revenue": dict(sorted(found))})
