"""The table of a feed's current rows: the changes that have landed, folded by key (`tables/key_fold.py`).

Its files are its own. Each is a bucket: the rows of the keys with one hash, in the order of keys. The keys of a bucket
that are deleted are in a file next to it, which readers of the table do not see, so that a change that lands late
undoes no later one. A bucket whose keys do not change keeps its file.

A fold is the same in any order and however often a change is in it. So a window that lands late, lands again or is
merged is folded like any other. Rows that landed changes no longer justify, since these landed again with other rows,
are folded from all that has landed; so is a table with another key or order, or with files of another writer.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import TableMoved, TableRefused
from sluice.pipelines.feed.changes_section import ChangesSettings
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.lake.parquet import TimeBounds, open_parquet
from sluice.pipelines.landing.writer import choose_options
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.model.receipts import Progress, Reporter, name_dataset
from sluice.pipelines.model.tables import FEED, LEDGER, Remedy, TableChange, TableFault, TableHead, TableOperation
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.tables.check import TableComparison, check_faults, check_owner, differs, load_both, trusted_mark
from sluice.pipelines.tables.key_fold import Columns, Fold
from sluice.pipelines.tables.pending import PendingBatch, PendingFiles, about, columns, complete_until, since

ROW_GROUP = 1 << 15
"""Rows of a row group. A query for one key reads one of them in each file."""
NAMED_BATCHES = 100
"""The most batches that a snapshot names: the newest ones."""
MANY_ENTRIES = 200
"""After this many entries without changes, the mark alone moves, so that they are read once."""
_FILE = re.compile(r"([0-9a-f]{8})-([0-9]+)-([0-9]+)-([0-9]{20})-[0-9a-f]{16}\.parquet")


class Bucket(NamedTuple):
    """A file of the table by its name: its number among `buckets`, the ledger's number at that time, and a hash of
    the settings by which it was folded."""

    address: str
    digest: str
    number: int
    buckets: int
    mark: int


@dataclass(frozen=True)
class CurrentTable:
    """The table of current rows, and how changes make them."""

    table: Table
    changes: ChangesSettings
    landing: LandingSettings

    def sync(
        self, ledger: Ledger, lake: Lake, state: State, report: Reporter, *, repair: bool = False
    ) -> CurrentSynced:
        """Fold the changes of this state of the ledger that the table lacks, in one commit.

        With `repair`, a table that somebody else changed is folded again; without, it raises TableDiffers. Raises
        TableRefused for changes without a key or an order, PartUnreadable, and as `Table.commit`.
        Guarantee: stopped anywhere, the table is the fold of some state of the ledger.
        """
        return _FoldPublisher(self, ledger, lake, state, report, repair).bring_up()

    def compare(self, ledger: Ledger, lake: Lake, *, folds: bool = True) -> TableComparison:
        """Compare the table with the ledger: its files, and with `folds` the row of each key, by a new fold.

        Raises TableDiffers for a table of another feed, EntriesLost, CatalogUnavailable, and as `sync` for changes.
        """
        head, state = load_both(ledger, self.table)
        return _FoldPublisher(self, ledger, lake, state, lambda progress: None, False).compare(head, folds=folds)

    def check_foldable(self, state: State, head: TableHead | None) -> None:
        """Raises TableRefused if some of the table's rows are in expired history alone."""
        if state.retired and head and head.rows:
            raise TableRefused(
                f"{self.table.name} cannot be folded again: rows of its history have expired",
                remedy="land them again; or drop it in its catalog, and the next sync folds the rows that are left",
            )

    def clean(self, lake: Lake, feed: str, head: TableHead) -> tuple[str, ...]:
        """Remove files that no snapshot names, and that no publisher is about to add: those are of newer states."""
        root = paths.get_current_table_root(name_dataset(feed, self.table.output))
        files = {lake.locate(path): path for path in lake.list(root)}
        buckets, _ = split_files(lake, root, files)
        old = {b.address for b in buckets if b.mark < head.mark}
        if not old or self.table.look() is None:
            return ()
        cleaned = tuple(sorted(files[address] for address in old - self.table.find_named(old)))
        for path in cleaned:
            folder, _, name = path.rpartition("/")
            lake.remove(path)
            lake.remove(paths.join(folder, "deleted", name))
        return cleaned


@dataclass(frozen=True, slots=True)
class CurrentSynced:
    """The table's head after a sync (None: there is none), and whether it has a new snapshot."""

    head: TableHead | None
    snapshot: int | None = None
    created: bool = False
    added: int = 0
    removed: int = 0


@dataclass(frozen=True)
class _FoldPublisher:
    of: CurrentTable
    ledger: Ledger
    lake: Lake
    state: State
    report: Reporter
    repair: bool

    def bring_up(self) -> CurrentSynced:
        table, state, created = self.of.table, self.state, False
        self.report(Progress("look", note=table.name))
        head = table.look()
        if head is None:
            if not since(self.ledger, state, 0, limit=1).batches:
                return CurrentSynced(None)
            table.create(self.columns.texts, {FEED: self.dataset, LEDGER: state.ledger_id})
            # Looked up again: another publisher may have created it at the same moment, with a mark of its own.
            created, head = True, table.look()
            if head is None:
                raise TableMoved(f"{table.name} was there, and is no more", remedy="the next try decides again")
        if head.ledger == state.ledger_id and head.mark > state.number:
            return CurrentSynced(head)  # a publisher with a newer state was here
        check_owner(table, head, state, self.ledger.feed)
        check_faults(table, self.columns.texts, self.ledger.feed, Remedy.REPAIR if self.repair else Remedy.SYNC)
        if self.repair and table.repair(self.columns.texts, undo=True):
            head = table.look() or head
        buckets, foreign = self.list_buckets()
        is_sound = trusted_mark(self.ledger, state, head) and not foreign
        if not is_sound and not self.repair:
            raise differs(table, self.compare(head), self.ledger.feed)
        if is_sound and self.repair and head.snapshot is not None:
            is_sound = not self.compare(head).keys_differ
        # Buckets of another digest were folded by other settings or key types: positions cannot be compared with
        # theirs.
        if not is_sound or any(b.digest != self.digest for b in buckets):
            return self._fold_all(head, [*(b.address for b in buckets), *foreign], created)
        pending = since(self.ledger, state, head.mark)
        # Rows of replaced offsets may have won their keys, and earlier changes of these are in no bucket. So these
        # offsets are excluded from the table's rows, and all of history is folded into the rest.
        replaced = [*self._list_replaced(head.mark)]
        if not pending.batches and not replaced:
            # An empty commit moves the mark. For fewer entries it would cost more than reading them again.
            if state.number - head.mark >= MANY_ENTRIES:
                self._commit((), (), ())
            elif not table.repair(self.columns.texts) and (complete := complete_until(state)) > head.complete:
                table.tell(complete)
            return CurrentSynced(table.look(), created=created)
        with Fold.create(self.columns) as fold:
            for topic, partition, r in replaced:
                fold.exclude(topic, partition, r)
            fold.add(self.lake, self._list_files(since(self.ledger, state, 0) if replaced else pending))
            return self._merge(fold, buckets, head, pending.batches, created)

    def _fold_all(self, head: TableHead, remove: list[str], created: bool) -> CurrentSynced:
        """Fold all that has landed, in place of all files."""
        self.of.check_foldable(self.state, head)
        everything = since(self.ledger, self.state, 0)
        with Fold.create(self.columns) as fold:
            fold.add(self.lake, self._list_files(everything))
            return self._merge(fold, [], None, everything.batches, created, remove)

    def _merge(
        self,
        fold: Fold,
        buckets: list[Bucket],
        head: TableHead | None,
        batches: tuple[PendingBatch, ...],
        created: bool,
        remove: Iterable[str] = (),
    ) -> CurrentSynced:
        size = sum(f.bytes for f in self.of.table.files().values()) if head else 0
        fold.decide(buckets[0].buckets if buckets else 0, head.rows if head else 0, size)
        fold.take(self.lake)
        files = {b.number: b for b in buckets}
        touched, add, removed = fold.changed_buckets, list[str](), {*remove}
        for done, number in enumerate(touched):
            self.report(Progress("fold changes", done, len(touched)))
            before = files.get(number % buckets[0].buckets) if buckets else None
            after = fold.merge(number, *self._read(before))
            if after is not None or (before and before.buckets != fold.buckets):
                add.append(self._write(number, fold.buckets, *(after or self._read(before))))
                removed |= {before.address} if before else set()
        snapshot = self._commit(batches, add, sorted(removed))
        return CurrentSynced(self.of.table.look(), snapshot, created, len(add), len(removed))

    def _commit(self, batches: tuple[PendingBatch, ...], add: Iterable[str], remove: Iterable[str]) -> int:
        state, operation = self.state, TableOperation.OVERWRITE if remove else TableOperation.APPEND
        summary = about(self.ledger, state, batches[-NAMED_BATCHES:], self.of.table.output)
        change = TableChange(
            operation, state.number, tuple(add), tuple(remove), self.columns.texts, summary, complete_until(state)
        )
        return self.of.table.commit(change)

    def compare(self, head: TableHead | None, *, folds: bool = True) -> TableComparison:
        """Compare the table of this head with a new fold of all that has landed, unless a sync is due."""
        table, everything = self.of.table, since(self.ledger, self.state, 0)
        if head is None or head.snapshot is None:
            return TableComparison(head, {}, everything.batches, pending=tuple(self._list_files(everything)))
        buckets, foreign = self.list_buckets()
        later = since(self.ledger, self.state, head.mark)
        is_trusted = trusted_mark(self.ledger, self.state, head)
        # A mark that cannot be trusted excuses no difference: nothing is pending, and the remedy is a repair.
        pending = tuple(self._list_files(later)) if is_trusted else ()
        faults = table.find_faults(self.columns.texts)
        if not is_trusted:
            faults += (TableFault("its newest snapshot is of another writer, or it was rolled back", Remedy.REPAIR),)
        compared = TableComparison(
            head,
            {},
            later.batches,
            pending=pending,
            foreign=tuple(sorted(foreign)),
            deletes=head.deletes,
            faults=faults,
        )
        # Each of these explains why rows of keys would differ, and has a remedy; a fold reads all of history.
        if (
            not folds
            or not is_trusted
            or pending
            or foreign
            or head.deletes
            or any(b.digest != self.digest for b in buckets)
        ):
            return compared
        names = [*self.columns.deletion_schema.names]
        with Fold.create(self.columns) as fold:
            # Rows of expired windows stay in the table, but their changes are gone: they cannot be folded again.
            for key, ranges in self.state.retired.items():
                for r in ranges:
                    fold.exclude(key.topic, key.partition, r)
            fold.add(self.lake, self._list_files(everything))
            keys, differing = fold.compare(table.rows(names).select(names))
        return replace(compared, keys=keys, keys_differ=tuple(differing))

    # -- landed files

    def _list_files(self, pending: PendingFiles) -> list[str]:
        return [path for batch in pending.batches for path in batch.parts]

    def _list_replaced(self, mark: int) -> Iterator[tuple[str, int, Range]]:
        """Yields offsets that landed again, or were replayed, since the mark: their former rows no longer count."""
        for batch in self.state.batches.published_since(mark - 1):
            if (batch.request.replace or batch.rewrites) and not batch.merges:
                for s in self.ledger.plan(batch.id).offset_ranges:
                    yield s.topic, s.partition, s.range

    @cached_property
    def columns(self) -> Columns:
        return Columns.of(self.of.changes, columns(self.state))

    @cached_property
    def digest(self) -> str:
        """A hash of the settings and key types by which rows are folded."""
        keys = [str(self.columns.rows[k]) for k in self.columns.keys]
        return hashlib.sha256(json.dumps([self.of.changes.model_dump(mode="json"), keys]).encode()).hexdigest()[:8]

    @property
    def dataset(self) -> str:
        return name_dataset(self.ledger.feed, self.of.table.output)

    # -- files of the table

    @property
    def root(self) -> str:
        return paths.get_current_table_root(self.dataset)

    def list_buckets(self) -> tuple[list[Bucket], list[str]]:
        """Returns the files of the table's newest snapshot, and those of other writers."""
        return split_files(self.lake, self.root, self.of.table.files())

    def _read(self, bucket: Bucket | None) -> tuple[pa.Table, pa.Table]:
        """Returns the rows of a bucket, and its deleted keys."""
        of, out = self.columns, []
        for schema, folder in ((of.schema, ""), (of.deletion_schema, "deleted")):
            if bucket is None:
                out.append(schema.empty_table())
                continue
            path = paths.join(self.root, folder, bucket.address.rpartition("/")[2])
            with open_parquet(self.lake, path) as file:
                rows = file.read()
            missing = [f for f in schema if f.name not in rows.schema.names]
            for f in missing:
                rows = rows.append_column(f, pa.nulls(rows.num_rows, f.type))
            out.append(rows.select(schema.names).cast(schema))
        return out[0], out[1]

    def _write(self, number: int, buckets: int, rows: pa.Table, deleted: pa.Table) -> str:
        name = f"{self.digest}-{buckets}-{number}-{self.state.number:020d}-{secrets.token_hex(8)}.parquet"
        self._write_file(paths.join(self.root, "deleted", name), deleted)
        path = paths.join(self.root, name)
        self._write_file(path, rows)
        return self.lake.locate(path)

    def _write_file(self, path: str, rows: pa.Table) -> None:
        options = choose_options(rows, self.of.landing) if rows.num_rows else {"store_schema": False}
        times = TimeBounds(rows.schema)
        with self.lake.create(path) as file, pq.ParquetWriter(file, rows.schema, **options) as writer:
            for first in range(0, rows.num_rows, ROW_GROUP):
                group = rows.slice(first, ROW_GROUP)
                writer.write_table(group, row_group_size=ROW_GROUP)
                times.add(group)
            writer.add_key_value_metadata(times.metadata())


def split_files(lake: Lake, root: str, addresses: Iterable[str]) -> tuple[list[Bucket], list[str]]:
    """Returns the buckets among the addresses, and the addresses of other files."""
    folder, buckets, foreign = lake.locate(f"{root}/x").removesuffix("x"), list[Bucket](), list[str]()
    for address in addresses:
        match = _FILE.fullmatch(address.removeprefix(folder)) if address.startswith(folder) else None
        if match:
            buckets.append(Bucket(address, match[1], int(match[3]), int(match[2]), int(match[4])))
        else:
            foreign.append(address)
    return buckets, foreign
