"""The project's `fleet.yaml`: limits of a run over many feeds. It may be missing; docs/scale.md explains each key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from sluice.pipelines.feed.optional import load_optional
from sluice.pipelines.feed.settings import Count, Duration, Settings
from sluice.pipelines.util.units import HOUR, MINUTE

FLEET = "fleet.yaml"
"""The name of the file, in the project's folder."""


def _lasting(ms: int) -> int:
    if ms < 1000:
        raise ValueError("should be a second or more")
    return ms


_Time = Annotated[Duration, AfterValidator(_lasting)]


class FleetSettings(Settings):
    """Limits of a run over many feeds. Durations in ms.

    `feeds_at_once` feeds are at work at the same time, `per_kafka` of them with one Kafka. Feeds that have not begun
    `deadline` after the run did are left to the next one. A feed's step that takes longer than `feed_time` is ended. A
    tick asks for `windows` windows of a feed at most. A feed that is far behind begins no other batch `catch_up` after
    it began, and goes on in the next run.
    """

    feeds_at_once: Count = 4
    per_kafka: Count = 4
    deadline: _Time = 50 * MINUTE
    feed_time: _Time = HOUR
    windows: Count = 1000
    catch_up: Duration = 10 * MINUTE


def load_fleet(folder: Path, environ: Mapping[str, str]) -> FleetSettings:
    """The settings in the folder's file, or those without one. Raises FeedError."""
    return load_optional(folder, FLEET, FleetSettings, environ, "scale")
