"""Sluice lands Kafka topics in a Parquet lake, hour by hour, and proves that nothing is missing."""

from __future__ import annotations

import importlib
import os.path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sluice import errors
    from sluice.pipelines.model.plans import Request
    from sluice.pipelines.model.receipts import Progress
    from sluice.pipelines.operating.check_window import WindowCheck
    from sluice.pipelines.operating.event_hours import LateHours
    from sluice.pipelines.operating.feed_status import FeedStatus
    from sluice.reading import When, Windows
    from sluice.running import RunResult
    from sluice.streaming import Place, Stream

__all__ = ["__version__", "check", "errors", "find_late_hours", "read", "run", "status", "stream", "streams"]

__version__: str

_LINK = os.path.join(os.path.dirname(__file__), "pipelines")
if os.path.isfile(_LINK):
    # Git without symbolic links, or a zip, writes a file that contains the target's path.
    raise ImportError(
        f"{_LINK} should be a symbolic link to the folder pipelines/, but it is a file. This copy of the repository "
        "was made without symbolic links. Clone it with `git clone -c core.symlinks=true` (Windows: turn on "
        "Developer Mode first), or install a wheel of Sluice, which has no links."
    )


def __getattr__(name: str) -> Any:
    """Import `__version__`, `errors` and `dagster` on first use, so that `import sluice` stays cheap."""
    if name == "__version__":
        from sluice.pipelines.util.extras import VERSION

        return VERSION
    if name in ("dagster", "errors"):
        return importlib.import_module(f"sluice.{name}")
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
    """Returns a complete window of a feed, or with `to` all windows from `window` to `to`, exclusive.

        sluice.read("orders", "2026-11-20T14").arrow()
        # or .pandas(), .polars(), .duckdb(), .spark(session), .dataset(), .paths

    `window` and `to` are starts of windows: text in UTC, ms since the epoch, or datetimes with a zone. A date alone,
    such as `2026-11-20`, is all windows of the day; of a feed with a time zone, the day there. `project` is the
    folder of `feeds/`, or one below it (default: `$SLUICE_PROJECT`, or the current folder); `kind` is `landed` or
    `quarantined`.

    Raises FeedError, UsageError if the feed has no window of that start, and WindowIncomplete while records of it are
    missing, all from `sluice.errors`.
    """
    from sluice import reading  # late: `import sluice` stays cheap

    return reading.read(feed, window, to=to, project=project, kind=kind)


def check(
    feed: str,
    window: When | None = None,
    *,
    key: Sequence[str] = (),
    project: str | os.PathLike[str] | None = None,
) -> WindowCheck:
    """Check a window of a feed: whether it is complete, and its late and repeated records.

        hour = sluice.check("orders", "2026-11-20T14", key=["order_id"])
        print(hour.complete, hour.reasons, hour.counts.landed)
        print(hour.rows and (hour.rows.late.records, hour.rows.repeats.copied))

    `window` is one window as in `read`, by default the newest one that is due. `key` names the columns that identify a
    record, by default the Kafka key. `project` is as in `read`. Kafka is asked only about a due window that is not
    complete. The window is not complete if a file is missing or damaged: then `rows` is None, and `reasons` have the
    remedy.

    Raises FeedError, and UsageError for a window or column that the feed lacks.
    """
    from sluice import reading  # late: `import sluice` stays cheap

    return reading.check(feed, window, key=key, project=project)


def find_late_hours(
    feed: str, after: int | None = None, *, column: str = "", project: str | os.PathLike[str] | None = None
) -> LateHours:
    """Returns the hours whose rows have also landed in later windows since `after`: reports of them must be corrected.

        late = sluice.find_late_hours("orders", after)
        for hour, rows in late.hours.items():
            print(hour, rows)  # 2026-11-20T13:00 {'2026-11-20T14:00': 5}
        after = late.number

    `after` is the `number` of an earlier call; None: only begin here. `column` is a column with times, by default the
    Kafka timestamp; `project` is as in `read`. Raises FeedError.
    """
    from sluice import reading  # late: `import sluice` stays cheap

    return reading.find_late_hours(feed, after, column, project=project)


def run(
    feeds: str | Iterable[str] | Mapping[str, Request],
    windows: When | None = None,
    *,
    to: When | None = None,
    project: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str, Progress], None] = lambda feed, progress: None,
) -> dict[str, RunResult]:
    """Land, publish and commit pending records of feeds, and return the result of each feed by its name.

        results = sluice.run(["orders", "clicks"])  # everything pending; or one window, or several:
        results = sluice.run("orders", "2026-11-20T14", to="2026-11-20T18")
        for feed, result in results.items():
            print(feed, result.landed, result.open_windows, result.error and result.error.remedy)

    `feeds` are names, or a mapping of names to requests. `windows` and `to` are as in `read`; without them a feed
    catches up. `project` is as in `read`. `on_progress` is called with the name of a feed and its progress.

    Feeds run one after the other in this process, each with its own engine, without Dagster. Offsets are committed only
    after the rows below them are published. A feed's error is in its result (`error`, with `remedy`) and stops no other
    feed; a later call continues. If Dagster runs the same feed, too, its next run there reports these rows.

    Raises FeedError and UsageError before anything runs, and KeyboardInterrupt after it has cancelled Spark's job.
    """
    from sluice import running  # late: `import sluice` stays cheap

    located = running.find_project(project)
    return running.run(running.make_requests(feeds, windows, to, located), located, on_progress)


def status(feed: str, *, windows: int = 24, project: str | os.PathLike[str] | None = None) -> FeedStatus:
    """Returns the status of a feed with its newest windows (their number), as `sluice status` shows it.

        orders = sluice.status("orders")
        print(orders.lag, orders.uncommitted, orders.error and orders.error.remedy)

    `project` is as in `read`. An error of Kafka is part of the status. Raises FeedError and UsageError.
    """
    from sluice import reading  # late: `import sluice` stays cheap

    return reading.read_status(feed, windows, project=project)


def stream(  # noqa: PLR0913 - keyword-only options, as in `pandas.read_csv`
    feed: str,
    start: Place = "earliest",
    end: Place | None = None,
    *,
    follow: bool = False,
    typed: bool = False,
    timeout: float | None = None,
    project: str | os.PathLike[str] | None = None,
) -> Stream:
    """Returns the records of a feed's topics from `start` to `end`, exclusive, as Arrow batches from Kafka.

        for batch in sluice.stream("orders", "2026-11-20T14", "2026-11-20T15"): ...
        with sluice.stream("orders", {"orders:0": 150}, follow=True, timeout=30) as records: ...

    `start` and `end` are `earliest`, `latest`, a time (text in UTC in the format of windows, ms since the epoch, or a
    datetime with a zone), or offsets by partition, which also select the partitions. The default end is the current
    last stable offset. With `follow` the stream has no end, and waits up to `timeout` seconds for more records (None:
    indefinitely). Batches have the columns of Spark's Kafka source, `typed` ones those of the feed.

    Joins no group, commits nothing and writes nothing. Raises FeedError, UsageError, NotAuthorized and
    KafkaUnavailable, and during iteration OffsetsLost, LogTruncated and TopicRecreated.
    """
    (single,) = streams(feed, 1, start, end, follow=follow, typed=typed, timeout=timeout, project=project)
    return single


def streams(  # noqa: PLR0913 - as `stream`
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
    """Returns `count` streams that share the partitions of a feed's topics, one for each thread; else as `stream`.

    `assignor` is `range` or `round_robin`, as in Kafka's consumers. With fewer partitions than streams, the last
    streams are empty.
    """
    from pathlib import Path  # late: `import sluice` stays cheap

    from sluice.resources.project import Project
    from sluice.streaming import StreamOptions, of_feed

    feed_settings = Project.find(Path(project) if project else None).feed(feed)
    return of_feed(feed_settings, count, start, end, StreamOptions(follow, typed, timeout), assignor)
