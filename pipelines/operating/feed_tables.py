"""A feed's tables by name and its ledger: brings them up, compares them, and counts missing files."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.model.tables import TableHead
from sluice.pipelines.ports import Ports
from sluice.pipelines.tables.check import TableComparison, compare, comparison, load_both, trusted_mark
from sluice.pipelines.tables.drop_history import drop_history
from sluice.pipelines.tables.pending import since
from sluice.pipelines.tables.sync import Synced, rebuild, sync, sync_current
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.pipelines.util.documents import Derived, Flat, Internal


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """The numbers of missing batches and files, and of files to take out."""

    batches: int
    files: int
    gone: int


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table's newest snapshot, and the numbers of batches and files that it lacks.

    `comparison` is of all files: another client wrote the newest snapshot. None if its mark holds.
    """

    name: Internal[str]
    head: Flat[TableHead | None]
    comparison: Flat[TableComparison | None]
    pending: PendingFiles

    @property
    def trusted(self) -> Derived[bool]:
        return self.comparison is None


def sync_tables(
    feed: Feed,
    ports: Ports,
    tables: FeedTables,
    report: Reporter = lambda progress: None,
    *,
    repair: bool = False,
    expire: bool = True,
) -> tuple[Synced, tuple[str, ...]]:
    """Bring the tables up to the ledger. `expire`: let snapshots older than the feed's `keep_snapshots` expire.

    Returns the changes and, for a repair, the files that Spark misreads. Raises as `sync`.
    """
    before = ports.clock() - feed.table.keep_snapshots if feed.table and expire else None
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    done = sync(ledger, ports.lake, tables, report, expire_before=before, repair=repair)
    standing = [table for _, table in tables.of_parts if repair and table.look()]
    return done, tuple(address for table in standing for address in table.misread())


def sync_current_rows(
    feed: Feed, ports: Ports, tables: FeedTables, report: Reporter = lambda progress: None, *, repair: bool = False
) -> Synced | None:
    """Bring the table of current rows up to the ledger, after the others, if the feed has one. Raises as `sync`."""
    if tables.current is None or feed.table is None:
        return None
    before = ports.clock() - feed.table.keep_snapshots
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return sync_current(ledger, ports.lake, tables.current, report, before, repair)


def forget_snapshots(feed: Feed, ports: Ports, tables: FeedTables) -> Synced:
    """Bring the tables up to the ledger, and let all older snapshots expire, with their files. Raises as `sync`."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return drop_history(ledger, ports.lake, tables, ports.clock())


def rebuild_tables(feed: Feed, ports: Ports, tables: FeedTables, report: Reporter = lambda progress: None) -> Synced:
    """Drop the feed's tables and make them again from the ledger. Raises as `rebuild`."""
    return rebuild(Ledger(ports.lake, feed.stored, ports.clock), ports.lake, tables, report)


def compare_tables(feed: Feed, ports: Ports, tables: FeedTables) -> list[tuple[str, TableComparison]]:
    """Compares the feed's tables of rows, quarantine and current rows with its ledger, by name. Opens all files.

    Raises TableDiffers, EntriesLost, CatalogUnavailable.
    """
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    compared = [(table.name, comparison(ledger, ports.lake, table, kind)) for kind, table in tables.of_parts]
    if tables.current:
        compared.append((tables.current.table.name, tables.current.compare(ledger, ports.lake)))
    return compared


def read_table_statuses(feed: Feed, ports: Ports, tables: FeedTables) -> list[TableStatus]:
    """Returns the status of each table of parts, by the ledger's entries since its mark. Raises as `compare_tables`."""
    ledger, statuses = Ledger(ports.lake, feed.stored, ports.clock), list[TableStatus]()
    for kind, table in tables.of_parts:
        head, state = load_both(ledger, table)
        if head is None or trusted_mark(ledger, state, head):
            pending = since(ledger, state, head.mark if head else 0, kind=kind, output=table.output)
            root = paths.part_path(feed.stored, kind, table.output, "")
            files = sum(len(b.parts) for b in pending.batches)
            removed = sum(path.startswith(f"{root}/") for path in pending.removed)
            statuses.append(TableStatus(table.name, head, None, PendingFiles(len(pending.batches), files, removed)))
        else:
            c = compare(ledger, ports.lake, table, head, state, kind)
            statuses.append(
                TableStatus(table.name, head, c, PendingFiles(len(c.batches), len(c.pending), len(c.stale)))
            )
    if tables.current:
        c = tables.current.compare(ledger, ports.lake, folds=False)
        counts = PendingFiles(len(c.batches), len(c.pending), 0)
        statuses.append(TableStatus(tables.current.table.name, c.head, None if c.sound else c, counts))
    return statuses
