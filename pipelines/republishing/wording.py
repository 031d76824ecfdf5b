"""What somebody wrote about a republish, as values: for the command line and for Dagster's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.pipelines.errors import UsageError
from sluice.pipelines.republishing.republish_plan import PartitionBy
from sluice.pipelines.republishing.send_lane import Pace
from sluice.pipelines.util.units import parse_size

_BY = (PartitionBy.KEY, PartitionBy.ROUND_ROBIN)


def way_of(keep: bool, by: str) -> tuple[PartitionBy, str]:
    """How partitions are chosen, and the function that does, if one does. `by` empty: nothing was said."""
    if keep and by:
        raise UsageError(f"partitions are kept, and chosen by {by}", remedy="say one of them")
    if ":" in by:
        return PartitionBy.FUNCTION, by
    if by and by not in _BY:
        raise UsageError(
            f"{by!r} is no way to choose a partition", remedy=f"one of {', '.join(_BY)}, or MODULE:FUNCTION"
        )
    return (PartitionBy.SAME if keep else PartitionBy(by or "key")), ""


def pace_of(text: str) -> Pace:
    """`5000` (records a second) or `5MB` (bytes); empty: as fast as it goes."""
    if not text:
        return Pace()
    try:
        pace = Pace(float(text)) if text.replace(".", "", 1).isdigit() else Pace(bytes=parse_size(text))
    except ValueError as error:
        raise UsageError(f"rate {text!r} {error}", remedy="such as 5000 (records) or 5MB (bytes)") from None
    if not (pace.records or pace.bytes):
        raise UsageError("a rate of 0 sends nothing", remedy="such as 5000 (records) or 5MB (bytes)")
    return pace


def check_resumed(options: Mapping[str, Any]) -> None:
    """Raises UsageError if something is said, by its name, that the plan of a republish which goes on says already."""
    if conflicting := [name for name, value in options.items() if value]:
        raise UsageError(
            f"a republish goes on as it was planned, and these are said anew: {', '.join(conflicting)}",
            remedy="leave them out, or plan another one, without resuming",
        )


def name_of(text: str) -> str:
    """A name for a republish; empty: none was given."""
    if text and not (text.isascii() and text.replace("-", "").replace("_", "").isalnum()):
        raise UsageError(f"{text!r} is no name", remedy="letters, digits, - and _")
    return text
