"""Replaced files that a table's snapshots may still name: they stay until these have expired.

A note next to the ledger marks a feed with a table. It is written before the table names the first file, and while it
exists, only the table's publisher removes published files. So readers of older snapshots find all their files; readers
of the plain folder, instead of the table or `sluice files`, may read rows twice until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from sluice.pipelines.lake import paths
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.parallel import each


def remove(lake: Lake, feed: str, some: Sequence[str]) -> list[str]:
    """Remove visible parts that do not count, unless a table may name them. Returns those that were removed."""
    if not some or has_table(lake, feed):
        return []
    each(lake.remove, some)
    return list(some)


def has_table(lake: Lake, feed: str) -> bool:
    """Returns whether a table names files of the feed, or did once."""
    return lake.size(paths.table_note_path(feed)) is not None


def note(lake: Lake, feed: str, table: str, removing: Iterable[str] = (), foreign: Iterable[str] | None = None) -> None:
    """Note that the table names files of the feed, and which of them its publisher is about to remove; then the files
    of other writers that its snapshots name. Without `foreign`, those noted before stay."""
    others = _noted(lake, feed, "foreign") if foreign is None else foreign
    noted = {"table": table, "removing": sorted(removing), "foreign": sorted(others)}
    lake.put(paths.table_note_path(feed), json.dumps(noted).encode())


def removing(lake: Lake, feed: str) -> tuple[str, ...]:
    """The lake paths that a publisher was about to remove, and perhaps did not."""
    return _noted(lake, feed, "removing")


def foreign(lake: Lake, feed: str) -> frozenset[str]:
    """Returns the lake paths of other writers' files that snapshots of the feed's table name."""
    return frozenset(path for path in _noted(lake, feed, "foreign") if may_be_foreign(path))


def may_be_foreign(path: str) -> bool:
    """Returns whether no part of a feed is ever called so: the file may go although the ledger does not know it."""
    return paths.parse_part(path) is None and not paths.is_table_log(path)


def _noted(lake: Lake, feed: str, name: str) -> tuple[str, ...]:
    try:
        noted = json.loads(lake.get(paths.table_note_path(feed)) or b"{}")
    except ValueError:
        return ()
    listed = noted.get(name, ()) if isinstance(noted, dict) else ()
    return tuple(path for path in listed if isinstance(path, str) and path.startswith(paths.visible_roots(feed)))
