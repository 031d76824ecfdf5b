"""Which files to read for a window: answered by the ledger, never by listing folders.

Guarantee: the files of a window are all of it, visible, and hold each record once. A window that is not complete, or of
which a part is still being made visible, raises WindowIncomplete, unless the caller asks for what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.planning.windows import check_begun
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.manifest import WindowFiles
from sluice.pipelines.vocabulary.errors import WindowIncomplete
from sluice.pipelines.vocabulary.plans import Slice
from sluice.pipelines.vocabulary.receipts import Part, PartKind
from sluice.pipelines.vocabulary.units import show_window


@dataclass(frozen=True, slots=True)
class File:
    """One Parquet file of a window: rows of `[start, end)` of a partition, in offset order.

    `address` is how other tools read it (an absolute path or a URL), `path` its place in the lake.
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
    found = manifest.files_of(ledger, windows, settings)
    missing = {p.path for p in manifest.missing(lake, (p for f in found for p in f.of(kind)))}
    if not partial:
        _demand(found, missing, feed)
    return tuple(_file(lake, w, s, p) for w, s, p in _placed_parts(found, kind) if p.path not in missing)


def _demand(found: Sequence[WindowFiles], missing: set[str], feed: str) -> None:
    for window in found:
        manifest.demand_complete(window, feed)
        if unseen := sum(p.path in missing for p in window.parts):
            shown = show_window(window.window)
            raise WindowIncomplete(
                f"window {shown} of feed {feed} has landed, but {unseen} of its files are still being made visible",
                remedy=f"wait for the run that does that; when it is dead, the next one does: sluice run {feed}",
            )


def _placed_parts(found: Sequence[WindowFiles], kind: PartKind) -> Iterator[tuple[int, Slice, Part]]:
    return ((f.window, s, p) for f in found for s, p in f.placed if p.kind is kind)


def _file(lake: Lake, window: int, s: Slice, p: Part) -> File:
    address = lake.locate(p.path)
    return File(window, p.kind, address, p.path, s.topic, s.partition, s.start, s.end, p.rows, p.bytes, p.sha256)
