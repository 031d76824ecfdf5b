"""Sluice lands Kafka topics in a Parquet lake, batch by batch, and can prove that it lost nothing."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.resources.reading import When, Windows

__all__ = ["read"]

_LINK = os.path.join(os.path.dirname(__file__), "pipelines")
if os.path.isfile(_LINK):
    # Git without symbolic links, or a zip, writes a file that holds the link's text.
    raise ImportError(
        f"{_LINK} should be a symbolic link to the folder pipelines/, but it is a file. This copy of the repository "
        "was made without symbolic links. Clone it with `git clone -c core.symlinks=true` (Windows: turn on "
        "Developer Mode first), or install a wheel of Sluice, which holds no links."
    )


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
    of it are missing, all from `sluice.pipelines.vocabulary.errors`.
    """
    from sluice.resources import reading  # late: `import sluice` stays cheap

    return reading.read(feed, window, to=to, project=project, kind=kind)
