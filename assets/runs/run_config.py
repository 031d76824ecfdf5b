"""A request as the configuration of a run, and back."""

# No `from __future__ import annotations` here: Dagster reads the annotations of `Config` themselves, not as text.

from typing import Any

import dagster as dg
from pydantic import Field

from sluice.pipelines.batch.result import Skip
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.util.units import parse_instant, parse_window, show_window


class PartitionConfig(dg.Config):
    topic: str
    partition: int


class OffsetsConfig(dg.Config):
    """Offsets from `start` up to `end`, which is not included."""

    topic: str
    partition: int
    start: int
    end: int


class LandConfig(dg.Config):
    """What to land. By default: everything that is owed."""

    offsets: list[OffsetsConfig] = Field(default=[], description="Land exactly these ranges, instead of catching up.")
    window: str = Field(default="", description="Land this window, such as 2026-11-20T14:00, instead of catching up.")
    until: str = Field(
        default="", description="With `window`: land all windows from it up to this one, which is not included."
    )
    only: list[PartitionConfig] = Field(default=[], description="Land these partitions only.")
    replace: bool = Field(default=False, description="Land again what has landed, instead of what is owed.")
    skip_to: str = Field(
        default="", description="Skip what is owed: to the end (`latest`), or up to an ISO time with zone."
    )
    reason: str = Field(default="", description="Why it is skipped; the ledger keeps the reason.")

    def request(self) -> Request:
        """The request that this configures. Raises UsageError."""
        ranges = tuple(AskedRange(o.topic, o.partition, o.start, o.end) for o in self.offsets)
        only = tuple(TopicPartition(p.topic, p.partition) for p in self.only)
        if self.window:
            until = window_start(self.until) if self.until else None
            return Request(RequestKind.WINDOW, (), window_start(self.window), only, until, self.replace)
        if self.until:
            raise UsageError("`until` without `window`", remedy="say where to begin: window: 2026-11-20T14:00")
        kind = RequestKind.OFFSETS if ranges else RequestKind.CATCH_UP
        return Request(kind, ranges, only=only, replace=self.replace)

    def skip(self) -> Skip | None:
        """What to skip first. Raises UsageError."""
        return skip_of(self.skip_to, self.reason)


def window_start(text: str) -> int:
    try:
        return parse_window(text)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}") from None


def skip_of(to: str, reason: str) -> Skip | None:
    """The skip that these words ask for. Raises UsageError."""
    if not to:
        return None
    if not reason.strip():
        raise UsageError("skipping records needs a reason", remedy="say why; the ledger keeps the reason")
    try:
        return Skip(None if to == "latest" else parse_instant(to), reason)
    except ValueError as error:
        raise UsageError(f"{to!r} {error}", remedy="skip to `latest`, or to such a time") from None


def request_config(request: Request) -> dict[str, Any]:
    """The fields of `LandConfig` that ask for the request."""
    offsets = [{"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in request.ranges]
    only = [{"topic": p.topic, "partition": p.partition} for p in request.only]
    asked = {"offsets": offsets, "only": only, "replace": request.replace}
    return asked | {name: show_window(at) for name in ("window", "until") if (at := getattr(request, name)) is not None}
