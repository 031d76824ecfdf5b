"""Which files to read for a window: answered by the ledger, never by listing folders.

Guarantee: the files of a window are all of it, visible, and hold each record once. A window that is not complete, or of
which a part is still being made visible, raises WindowIncomplete, unless the caller asks for what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from sluice.pipelines.errors import WindowIncomplete
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.receipts import Part, PartKind
from sluice.pipelines.planning.windows import check_begun
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.manifest import WindowFiles
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
