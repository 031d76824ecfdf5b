"""A request as the configuration of a run."""

from __future__ import annotations

from typing import Any

from sluice.pipelines.model.plans import Request
from sluice.pipelines.util.units import show_window


def request_config(request: Request) -> dict[str, Any]:
    """The fields of `LandConfig` that ask for the request."""
    offsets = [{"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in request.ranges]
    only = [{"topic": p.topic, "partition": p.partition} for p in request.only]
    asked = {"offsets": offsets, "only": only, "replace": request.replace}
    return asked | {name: show_window(at) for name in ("window", "until") if (at := getattr(request, name)) is not None}
