"""Sluice lands Kafka topics in a Parquet lake, batch by batch, and can prove that it lost nothing."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.pipelines import errors
    from sluice.reading import When, Windows
    from sluice.stream import Place, Stream

__all__ = ["__version__", "errors", "read", "stream", "streams"]

__version__: str

_LINK = os.path.join(os.path.dirname(__file__), "pipelines")
if os.path.isfile(_LINK):
    # Git without symbolic links, or a zip, writes a file that holds the link's text.
    raise ImportError(
        f"{_LINK} should be a symbolic link to the folder pipelines/, but it is a file. This copy of the repository "
        "was made without symbolic links. Clone it with `git clone -c core.symlinks=true` (Windows: turn on "
        "Developer Mode first), or install a wheel of Sluice, which holds no links."
    )


def __getattr__(name: str) -> Any:
    """`__version__`, and `errors`: every way in which Sluice can stop. Late, so that `import sluice` stays cheap."""
    if name == "__version__":
        from importlib.metadata import version

        return version("sluice")
    if name == "errors":
        from sluice.pipelines import errors

        return errors
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def read(
    feed: str,
    window: When,
    *,
    to: When | None = None,
    project: str | os.PathLike[str] | None = None,
    kind: str = "landed",
) -> Windows:
    """A complete window of a feed, or with `to` all windows from `window` up to, not including, that one.

        sluice.read("orders", "2026-11-20T14").arrow()
        # or .pandas(), .polars(), .duckdb(), .spark(session), .dataset(), .paths

    `window` and `to` are starts of windows: text in UTC, ms since the epoch, or datetimes with a zone. `project` is the
    folder that holds `feeds/`, or one below it (the current one, or `$SLUICE_PROJECT`); `kind` is `landed` or
    `quarantined`. Raises FeedError, UsageError for what is no window of the feed, and WindowIncomplete while records
    of it are missing, all from `sluice.errors`.
    """
    from sluice import reading  # late: `import sluice` stays cheap

    return reading.read(feed, window, to=to, project=project, kind=kind)


def stream(
    feed: str,
    start: Place = "earliest",
    end: Place | None = None,
    *,
    follow: bool = False,
    typed: bool = False,
    timeout: float | None = None,
    project: str | os.PathLike[str] | None = None,
) -> Stream:
    """The records of a feed's topics from `start` up to, not including, `end`, as Arrow batches straight from Kafka.

        for batch in sluice.stream("orders", "2026-11-20T14", "2026-11-20T15"): ...
        with sluice.stream("orders", {"orders:0": 150}, follow=True, timeout=30) as records: ...

    `start` and `end` are `earliest`, `latest`, a time (text in UTC as windows are written, ms since the epoch, or a
    datetime with a zone), or offsets by partition, which also choose the partitions. Without `end` it is what is stable
    now; with `follow` there is none, and the stream waits for more, for `timeout` seconds at most (None: for ever).
    Batches have the columns of Spark's Kafka source, `typed` ones those that the feed lands.

    No group is joined, nothing is committed and nothing is written. Raises FeedError, UsageError, NotAuthorized and
    KafkaUnavailable, and while it is read OffsetsLost, LogTruncated and TopicRecreated.
    """
    (made,) = streams(feed, 1, start, end, follow=follow, typed=typed, timeout=timeout, project=project)
    return made


def streams(
    feed: str,
    count: int,
    start: Place = "earliest",
    end: Place | None = None,
    *,
    follow: bool = False,
    typed: bool = False,
    timeout: float | None = None,
    assignor: str = "range",
    project: str | os.PathLike[str] | None = None,
) -> list[Stream]:
    """`count` streams that share the partitions of a feed's topics, each for a thread of its own; else as `stream`.

    `assignor` is `range` or `round_robin`, as Kafka's consumers share them. Where there are fewer partitions than
    streams, the last ones are empty.
    """
    from pathlib import Path  # late: `import sluice` stays cheap

    from sluice.resources.project import Project
    from sluice.stream import of_feed

    found = Project.find(Path(project) if project else None).feed(feed)
    return of_feed(found, count, start, end, follow=follow, typed=typed, timeout=timeout, assignor=assignor)
