"""Files in folders that have a level by time: found there, or, if an older Sluice wrote them, without that level."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.pipelines.lake import paths
from sluice.pipelines.ports import Lake


def manifest(lake: Lake, feed: str, window: int, length: int) -> str | None:
    """Where the manifest of the window stands; None where there is none."""
    return _first(lake, (path_of(feed, window, length) for path_of in (paths.window_path, paths.former_window_path)))


def batch_page(lake: Lake, feed: str, batch: int, attempt: str = "") -> str | None:
    """Where the report of a batch, or of an attempt that was not published, stands; None where there is none."""
    path_functions = (paths.batch_page_path, paths.former_batch_page_path)
    return _first(lake, (path_of(feed, batch, attempt) for path_of in path_functions))


def _first(lake: Lake, candidates: Iterable[str]) -> str | None:
    return next((path for path in candidates if lake.size(path) is not None), None)
