"""Dagster's metadata of the sensor: findings about a feed, and its lag."""

from __future__ import annotations

from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.watch import WatchResult


def watch_metadata(seen: WatchResult) -> Metadata:
    """Returns the findings about a feed and its position."""
    rows: list[dict[str, str | int]] = [
        {"finding": f.text, "way out": f.remedy, "severity": "error" if f.severe else "warning"} for f in seen.findings
    ]
    columns = dict.fromkeys(("finding", "way out", "severity"), "string")
    findings = {"findings": table(rows, columns)} if rows else {}
    return findings | ({} if seen.outlook is None else outlook_metadata(seen.outlook))


def outlook_metadata(outlook: Outlook) -> Metadata:
    """Returns a feed's lag and pace, without unknown values."""
    told = {
        "lag_offsets": outlook.lag,
        "lag_seconds": _seconds(outlook.age),
        "catch_up_seconds": _seconds(outlook.eta),
        "landing_offsets_per_second": _rate(outlook.landing),
        "production_offsets_per_second": _rate(outlook.production),
        "ranges_at_risk": len(outlook.at_risk),
    }
    return {name: value for name, value in told.items() if value is not None}


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
