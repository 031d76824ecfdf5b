"""Lists the files of windows from the ledger, never from folders, and the files that snapshots of a table retain.

Guarantee: the files of a window are complete, visible, and hold each record once. A window that is not complete, or
whose files are not all visible, raises WindowIncomplete, unless the caller requests the visible files.

A note next to the ledger marks a feed with a table. It is written before the table names the first file, and while it
exists, only the table's publisher removes published files, after the snapshots that name them have expired. So readers
of older snapshots find all their files. Readers of the plain folder, instead of the table or `sluice files`, may read
rows twice until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.receipts import Part, PartKind
from sluice.pipelines.planning.windows import check_begun
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.manifest import WindowFiles
from sluice.pipelines.util.parallel import each
from sluice.pipelines.util.units import show_window


@dataclass(frozen=True, slots=True)
class File:
    """Rows of `[start, end)` of a partition, in offset order, in a Parquet file of a window.

    `address` is how other tools read the file (an absolute path or a URL), `path` its place in the lake. Slices may
    share a file: then the rows begin at row `first` of it, and `bytes` is their share of it.
    """

    window: int
    kind: PartKind
    address: str
    path: str
    topic: str
    partition: int
    start: int
    end: int
    rows: int
    bytes: int
    sha256: str
    first: int = 0


def one_each(found: Sequence[File]) -> list[File]:
    """An entry for each Parquet file, in an order in which the rows of each partition follow each other.

    There may be none where slices share files: if what lies before was landed later, beside what lies behind. Then the
    files come as their first slices do.
    """
    first: dict[str, File] = {}
    for f in found:
        first.setdefault(f.path, f)
    if len(first) == len(found):
        return list(found)
    last: dict[tuple[str, int], str] = {}
    after: dict[str, dict[str, None]] = {path: {} for path in first}
    for f in found:
        before = last.get((f.topic, f.partition), f.path)
        last[f.topic, f.partition] = f.path
        if before != f.path:
            after[before][f.path] = None
    return [first[path] for path in _in_order(after)]


def _in_order(after: Mapping[str, Mapping[str, None]]) -> list[str]:
    """The names so that each comes before those that are after it; as they are given, where this cannot be."""
    position = {name: i for i, name in enumerate(after)}
    waits = dict.fromkeys(after, 0)
    for name in (n for names in after.values() for n in names):
        waits[name] += 1
    ready = [i for name, i in position.items() if not waits[name]]
    names, out = list(after), list[str]()
    while ready:
        out.append(names[heappop(ready)])
        for name in after[out[-1]]:
            waits[name] -= 1
            if not waits[name]:
                heappush(ready, position[name])
    return out if len(out) == len(names) else names


def files(
    ledger: Ledger,
    lake: Lake,
    feed: str,
    windows: Sequence[int],
    settings: WindowSettings,
    kind: PartKind = PartKind.LANDED,
    *,
    partial: bool = False,
) -> tuple[File, ...]:
    """The files of the windows (their starts, ms), by window and in log order. With `partial`: those that are there.

    Raises WindowIncomplete, WindowRetired, and UsageError for a time that is not a window of the feed.
    """
    state = ledger.read()
    for window in windows:
        check_begun(window, settings, state)
        if not partial:
            manifest.demand_kept(ledger, state, feed, window, settings)
    window_files = manifest.files_of(ledger, windows, settings)
    missing = {p.path for p in manifest.missing(lake, (p for f in window_files for p in f.of(kind)))}
    if not partial:
        _demand(window_files, missing, feed)
    return tuple(_file(lake, w, s, p) for w, s, p in _placed_parts(window_files, kind) if p.path not in missing)


def _demand(found: Sequence[WindowFiles], missing: set[str], feed: str) -> None:
    for window in found:
        manifest.demand_complete(window, feed)
        if unseen := len({p.path for p in window.parts} & missing):
            window_text = show_window(window.window)
            raise WindowIncomplete(
                f"window {window_text} of feed {feed} has landed, but {unseen} of its files are not visible yet",
                remedy=f"wait for the run that does that; when it is dead, the next one does: sluice run {feed}",
            )


def _placed_parts(found: Sequence[WindowFiles], kind: PartKind) -> Iterator[tuple[int, Slice, Part]]:
    return ((f.window, s, p) for f in found for s, p in f.placed if p.kind is kind)


def _file(lake: Lake, window: int, s: Slice, p: Part) -> File:
    at, first = lake.locate(p.path), p.shared.first if p.shared else 0
    return File(window, p.kind, at, p.path, s.topic, s.partition, s.start, s.end, p.rows, p.bytes, p.sha256, first)


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
