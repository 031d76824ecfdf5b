"""Views of commands that search or rewrite windows: matching records, sums by window, the table afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import Session
from sluice.cli.terminal.output import good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.receipts import count_files
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.maintenance.compaction import Compacted
    from sluice.pipelines.maintenance.merging import Merge
    from sluice.pipelines.model.receipts import Receipt
    from sluice.pipelines.operating.record_search import Matches


@dataclass(frozen=True)
class FileSums:
    """Merges of a window, or of all; files and bytes before and after. `bytes_after` is None while unknown."""

    merges: int
    files: int
    files_after: int
    bytes: int
    bytes_after: int | None

    @classmethod
    def of(cls, merged: Sequence[tuple[Merge, Receipt | None]]) -> FileSums:
        from sluice.pipelines.maintenance.merging import count_files_after

        receipts = [r for _, r in merged if r is not None]
        return cls(
            len(merged),
            sum(len(m.parts) for m, _ in merged),
            count_files(receipts) + count_files_after(m for m, r in merged if r is None),
            sum(m.bytes for m, _ in merged),
            sum(p.bytes for r in receipts for p in r.parts) if len(receipts) == len(merged) else None,
        )


@dataclass(frozen=True)
class WindowSums:
    window: str | None
    sums: Flat[FileSums]


@dataclass(frozen=True)
class BusyWindow:
    """A window that was left alone, and the batch that reserves it."""

    window: str | None
    batch: int


def list_busy(feed: Feed, busy: Mapping[int | None, int]) -> list[BusyWindow]:
    return [BusyWindow(format_window(feed, w), batch) for w, batch in busy.items()]


def by_window(done: Compacted) -> dict[int | None, FileSums]:
    by_start = group_by(done.merged, lambda merged: merged[0].offset_range.window)
    return {w: FileSums.of(merges) for w, merges in by_start.items()}


def name(feed: Feed, window: int | None) -> str:
    return format_window(feed, window) or "outside windows"


def format_window(feed: Feed, window: int | None) -> str | None:
    return None if window is None else feed.window.name(window)


def view_matches(dataset: Feed, matches: Matches, title: str) -> Iterator[RenderableType]:
    yield heading(title, f"{many(matches.records, 'record')} in {many(matches.files, 'file')}")
    if matches.windows:
        rows = [[name(dataset, w), count(n)] for w, n in matches.windows.items()]
        yield table(("window", "records"), limit_rows(rows), right="records")
    if matches.quarantined:
        yield Text(f"  Of them in quarantine: {count(matches.quarantined)}.")
    if matches.unsearchable:
        records = many(matches.unsearchable, "quarantined record")
        yield warn(f"{records} could be searched by key only: the value is no JSON that fits the columns, or not there")
    if matches.skipped:
        yield warn(f"not searched, without these columns: {', '.join(matches.skipped)}")
    if not matches.records:
        yield good("no record matches")


def table_after(session: Session, feed: Feed) -> Iterator[Text]:
    """Bring the feed's tables up to date after a rewrite, if it has any. Reports a failure."""
    from sluice.pipelines.operating.feed_tables import sync_tables
    from sluice.resources.open_ports import open_tables

    for dataset in feed.table_feeds:
        try:
            with session.open_ports(feed) as ports, open_tables(dataset, ports.lake) as tables:
                done, _ = sync_tables(dataset, ports, tables, expire=False)
        except SluiceError as error:
            yield warn(f"the table is not up to date: {error.message}; sluice table sync {dataset.dataset}")
            continue
        if done.commits:
            yield good(f"{tables.rows.name}: {many(done.added, 'file')} added, {many(done.removed, 'file')} removed")
