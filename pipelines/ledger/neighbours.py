"""The ledgers of a lake: which feeds have one, and its identity. It costs the same however long they are."""

from __future__ import annotations

from collections.abc import Collection

from sluice.pipelines.errors import LedgerCorrupt, LedgerTooNew
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.entries import parse
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.parallel import map_parallel


def list_feeds_without_files(lake: Lake, names: Collection[str]) -> list[str]:
    """Returns the feeds, in order, that have a ledger in the lake and are not among `names`."""
    return [feed for feed in lake.folders(paths.SLUICE) if feed not in names and _has_entries(lake, feed)]


def _has_entries(lake: Lake, feed: str) -> bool:
    return next(iter(lake.list(paths.log_folder(feed))), None) is not None


def read_ledger_id(lake: Lake, feed: str) -> str:
    """Returns the identity of the feed's ledger; empty if its first entry is missing or unreadable."""
    path = paths.log_path(feed, 0)
    try:
        data = lake.get(path)
        return parse(data, path).write if data else ""
    except (LedgerCorrupt, LedgerTooNew):
        return ""


def find_feed_of_ledger(lake: Lake, identity: str) -> str:
    """Returns the name of the feed that has this ledger in the lake; empty if none has."""
    feeds = list(lake.folders(paths.SLUICE))
    identities = map_parallel(lambda feed: read_ledger_id(lake, feed), feeds)
    return next((feed for feed, other in zip(feeds, identities, strict=True) if other == identity), "")
