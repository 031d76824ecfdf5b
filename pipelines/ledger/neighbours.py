"""The ledgers of a lake: which feeds have one, and its identity. One listing for each ledger, however long they are."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.entries import parse
from sluice.pipelines.ports import Lake
from sluice.pipelines.vocabulary.errors import LedgerCorrupt, LedgerTooNew


def feeds_with_ledgers(lake: Lake) -> Iterator[str]:
    """The names of all feeds whose ledger has an entry in the lake, in order."""
    after = ""
    while (path := next(iter(lake.list(paths.SLUICE, after)), None)) is not None:
        feed = path.split("/")[1]
        if "/" in path.removeprefix(f"{paths.SLUICE}/") and next(iter(lake.list(paths.log_folder(feed))), None):
            yield feed
        after = f"{paths.SLUICE}/{feed}0"  # the character after the slash


def ledger_id(lake: Lake, feed: str) -> str:
    """The identity of the feed's ledger; empty where its first entry is missing or cannot be read."""
    path = paths.log_path(feed, 0)
    try:
        data = lake.get(path)
        return parse(data, path).write if data else ""
    except (LedgerCorrupt, LedgerTooNew):
        return ""


def feed_of_ledger(lake: Lake, identity: str) -> str:
    """The name of the feed that has this ledger in the lake; empty if none has."""
    return next((feed for feed in feeds_with_ledgers(lake) if ledger_id(lake, feed) == identity), "")
