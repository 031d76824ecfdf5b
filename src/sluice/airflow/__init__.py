"""Operators, a sensor and a DAG factory for Airflow 2.10 and later, and 3. Docs: docs/airflow.md.

    from sluice.airflow import make_dags
    globals().update(make_dags("/srv/sluice"))

Runs in Airflow land, prove, publish and commit as `sluice run --no-dagster` does, in the process of the task.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "SluiceHook": "hooks",
    "make_asset": "hooks",
    "LandWindowOperator": "operators",
    "CommitOperator": "operators",
    "BatchReportLink": "operators",
    "WindowCompleteSensor": "sensors",
    "WindowTrigger": "sensors",
    "make_dags": "dags",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Import a class on first use: Airflow asks `get_provider_info` of every package at its start."""
    if name not in _PLACES:
        raise AttributeError(f"module 'sluice.airflow' has no attribute {name!r}")
    return getattr(import_module(f"sluice.airflow.{_PLACES[name]}"), name)


def get_provider_info() -> dict[str, Any]:
    """Returns the description of the provider, which Airflow reads by the entry point `apache_airflow_provider`."""
    return {
        "package-name": "kafka-sluice",
        "name": "Sluice",
        "description": "Land Kafka topics as Parquet, hour by hour, and prove that nothing is missing.",
        "connection-types": [
            {"connection-type": "sluice", "hook-class-name": "sluice.airflow.hooks.SluiceHook"},
        ],
        "extra-links": ["sluice.airflow.operators.BatchReportLink"],
    }
