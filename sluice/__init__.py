"""Sluice lands Kafka topics in a Parquet lake, batch by batch, and can prove that it lost nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from sluice.resources.reading import When, Windows

__all__ = ["read"]


def read(
    feed: str,
    window: When,
    *,
    to: When | None = None,
    project: str | os.PathLike[str] | None = None,
    kind: str = "landed",
) -> Windows:
    """A complete window of a feed, or with `to` all windows from `window` up to, not including, that one.

        sluice.read("orders", "2026-11-20T14").arrow()          # or .paths, .dataset(), .duckdb(), .spark(session)

    `window` and `to` are starts of windows: text in UTC, ms since the epoch, or datetimes with a zone. `project` is the
    folder that holds `feeds/`, or one below it (the current one, or `$SLUICE_PROJECT`); `kind` is `landed` or
    `quarantined`. Raises FeedError, UsageError for what is no window of the feed, and WindowIncomplete while records
    of it are missing, all from `sluice.pipelines.errors`.
    """
    from sluice.resources import reading  # late: `import sluice` stays cheap

    return reading.read(feed, window, to=to, project=project, kind=kind)
