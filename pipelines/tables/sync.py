"""Brings a feed's table up to its ledger: adds landed files, takes out files that no longer count.

The table's *mark* is the number below which the ledger's entries are in it. It is set in the same commit as their
files, on the snapshot that was read, so a file is added once, however many publishers there are and wherever one dies.
After a commit without an answer, the table is read again: either the commit took effect, or it never will, since the
next one takes its place. A table that somebody else changed is noticed and named before anything is
added to it.

A batch that only adds files is an append. Whatever takes files out (merged, landed again, replayed, retired) is one
commit with what takes their place, so that a reader of any snapshot meets each row once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sluice.pipelines.errors import TableDiffers, TableMoved, TableRefused
from sluice.pipelines.feed.table_section import find_invalid_names, unfit
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger, State
from sluice.pipelines.model.receipts import PartKind, Progress, Reporter, name_dataset
from sluice.pipelines.model.tables import FEED, LEDGER, WINDOWS, Remedy, TableChange, TableHead, TableOperation
from sluice.pipelines.planning.schema_changes import select_output
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.publishing import published_files
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.tables.check import check_faults, check_owner, compare, differs, trusted_mark
from sluice.pipelines.tables.current import CurrentSynced, CurrentTable
from sluice.pipelines.tables.pending import (
    PendingBatch,
    PendingFiles,
    about,
    addresses,
    column_types,
    columns,
    complete_until,
    groups,
    since,
)
from sluice.pipelines.tables.table_windows import COLUMNS, FeedTables, retry_outdated
from sluice.pipelines.util.documents import Flat, Internal
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import many

READ_BATCHES = 500
"""Batches that a backfill reads from the log before it adds them."""
MANY_ENTRIES = 200
"""After this many entries without changes for the table, the mark alone moves, so that they are read once."""
MANY_PATHS = 1000
"""More files than that are found by listing rather than one by one."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of a sync: the table's head afterwards (None: there is none, since nothing is in it yet), its commits,
    files added and taken out, snapshots that expired and lake paths removed with them. `windows`: the snapshot with
    which rows of a window came last, by the window's name. The same of the quarantine's table, if the feed has one."""

    head: Flat[TableHead | None]
    commits: int = 0
    added: int = 0
    removed: int = 0
    created: bool = False
    expired: int = 0
    cleaned: tuple[str, ...] = ()
    windows: Mapping[str, int] = field(default_factory=dict)
    quarantine: Internal[Synced | None] = None
    current: Internal[Synced | None] = None


def sync(
    ledger: Ledger,
    lake: Lake,
    tables: FeedTables,
    report: Reporter = lambda progress: None,
    *,
    expire_before: int | None = None,
    repair: bool = False,
) -> Synced:
    """Bring the table of rows up to the ledger, and let its snapshots from before a time (ms) expire. Then do the same
    to the quarantine's table, and to the table of complete windows, which names no window whose rows are not in the
    first one.

    With `repair`, a table that somebody else changed is made equal to the ledger; without, it raises TableDiffers.
    A table with a fault that does not block gets its rows before that is raised. Raises TableRefused,
    CatalogUnavailable, EntriesLost, PartUnreadable; TableMoved or Unknown after too many tries.
    Guarantee: stopped anywhere, the table equals some state of the ledger, and the next call continues.
    """
    table, quarantine, windows, current = tables
    cleans = (PartKind.LANDED,) if quarantine else tuple(PartKind)
    done, state = _Publisher(ledger, lake, table, PartKind.LANDED, cleans, report, repair).bring_up(expire_before)
    if quarantine:
        kind = PartKind.QUARANTINED
        quarantine_outcome, _ = _Publisher(ledger, lake, quarantine, kind, (kind,), report, repair).bring_up(
            expire_before
        )
        done = replace(done, quarantine=quarantine_outcome)
    if windows is not None and done.head is not None:
        windows.bring_up(ledger, lake, state, expire_before)
    # Only after all tables have their rows: a fault that does not block must not keep any of them behind.
    for kind, t in tables.of_parts:
        check_faults(t, columns(state, kind, t.output), ledger.feed)
    if windows is not None:
        check_faults(windows.table, COLUMNS, ledger.feed)
    return (
        replace(done, current=sync_current(ledger, lake, current, report, expire_before, repair)) if current else done
    )


def sync_current(
    ledger: Ledger, lake: Lake, current: CurrentTable, report: Reporter, expire_before: int | None, repair: bool
) -> Synced:
    """Bring the table of current rows up to the ledger. Raises as `sync`."""
    state = ledger.read()

    def decide() -> CurrentSynced:
        nonlocal state
        state = ledger.read()
        return current.sync(ledger, lake, state, report, repair=repair)

    done = retry_outdated(decide, lambda lost: lost.gone and ledger.read().number > state.number)
    if done.head is None:
        return Synced(None)
    expired = 0
    if (before := expire_before) is not None:
        expired = retry_outdated(
            lambda: current.table.expire(before) if current.table.look() else 0, lambda lost: False
        )
    cleaned = current.clean(lake, ledger.feed, done.head) if expired else ()
    commits, head = int(done.snapshot is not None), current.table.look() if expired else done.head
    return Synced(head, commits, done.added, done.removed, done.created, expired, cleaned)


def rebuild(ledger: Ledger, lake: Lake, tables: FeedTables, report: Reporter = lambda progress: None) -> Synced:
    """Drop the feed's tables and make them again from the ledger: without changes by other clients, and without older
    snapshots. No landed file is removed. Raises TableDiffers for a table that is not of this ledger, and as `sync`.
    """
    state, readable = ledger.read(), list[tuple[PartKind, Table]]()
    for table in tables.all:
        if (head := look_or_none(table)) is not None:
            check_owner(table, head, state, ledger.feed, replacing=True)
            if tables.current and table is tables.current.table:
                tables.current.check_foldable(state, head)
            readable += [(kind, t) for kind, t in tables.of_parts if t is table and head.snapshot is not None]
    for kind, table in readable:  # files of other writers, which nothing names afterwards
        with suppress(TableDiffers):
            _Publisher(ledger, lake, table, kind, (kind,), report, repair=True)._note_leftovers(state)
    for table in tables.all:
        table.drop()
    return sync(ledger, lake, tables, report, repair=True)


def look_or_none(table: Table) -> TableHead | None:
    """Returns the table's head; None without a table, or if its metadata cannot be read."""
    try:
        return table.look()
    except TableDiffers:
        return None


@dataclass(frozen=True, slots=True)
class _Publisher:
    """Brings up one table, of files of one `kind`. Removes files of the kinds in `cleans` that no longer count."""

    ledger: Ledger
    lake: Lake
    table: Table
    kind: PartKind
    cleans: tuple[PartKind, ...]
    report: Reporter
    repair: bool

    def bring_up(self, expire_before: int | None) -> tuple[Synced, State]:
        """Returns the result, and the state that the table is brought up to."""
        state = self.ledger.read()

        def decide() -> Synced:
            nonlocal state
            state = self.ledger.read()
            roll_forward(self.ledger, self.lake, self.ledger.feed)  # its files are visible, unless replaced since
            return self._up_to(state, Synced(None))

        done = retry_outdated(decide, lambda lost: lost.gone and self.ledger.read().number > state.number)
        if expire_before is not None and done.head is not None:
            so_far, before = done, expire_before
            done = retry_outdated(lambda: self._expire(before, so_far), lambda lost: False)
        return done, state

    def _up_to(self, state: State, done: Synced) -> Synced:
        """Sync piece by piece; reload the table before each, since others may commit in between."""
        ledger, lake, table = self.ledger, self.lake, self.table
        while True:
            self.report(Progress("look", note=table.name))
            head = table.look()
            if head is None:
                if not self._begins(state):
                    return done
                self._check_names(state)
                self._check_columns(state)
                dataset = name_dataset(ledger.feed, table.output)
                table.create(self._list_columns(state), {FEED: dataset, LEDGER: state.ledger_id})
                done = replace(done, created=True)
                continue
            # A mark ahead of our state, but not of the ledger, is a newer publisher's. Ahead of both, entries were
            # lost, which `check_owner` reports.
            if head.mark > state.number and ledger.read().number >= head.mark:
                raise TableMoved(
                    f"{table.name} was updated by another process", remedy="the next attempt compares again"
                )
            check_owner(table, head, state, ledger.feed)
            wanted = self._list_columns(state)
            check_faults(table, wanted, ledger.feed, Remedy.REPAIR if self.repair else Remedy.SYNC)
            if self.repair and table.repair(wanted, undo=True):
                continue
            noted = published_files.note_table(lake, ledger.feed, table)
            if (noted or head.snapshot is None) and ledger.read().number > state.number:
                # a run that met no note may remove files replaced since
                raise TableMoved(f"{table.name} begins while files are replaced", remedy="the next try decides again")
            if self.repair and head.snapshot is not None:
                self._note_leftovers(state)
            if trusted_mark(ledger, state, head):
                end, changes, never = self._find_pending(state, head)
                going = self._find_present(never)
                self._note_removals(going)
                if going and not changes:  # a publisher that is about to add one of them must not succeed
                    changes = [self._change(state, TableOperation.APPEND, end, ())]
            else:
                end, changes = state.number, self._difference(state, head)
            if changes:
                self._check_columns(state)
            elif end == state.number:
                if table.repair(wanted):
                    continue
                if (complete := complete_until(state)) > head.complete:
                    table.tell(complete)
                    head = table.look()
                return replace(done, head=head)
            total = done.added + sum(len(c.add) for c in changes)
            # Each commit has a mark of its own. Killed between two, the next sync reads it and goes on from there.
            for change in changes:
                self.report(Progress("add files", done.added, total))
                snapshot = table.commit(change)
                added, removed = done.added + len(change.add), done.removed + len(change.remove)
                windows = {**done.windows, **dict.fromkeys(change.about.get(WINDOWS, "").split(), snapshot)}
                done = replace(done, commits=done.commits + 1, added=added, removed=removed, windows=windows)

    def _begins(self, state: State) -> bool:
        """Returns whether there is a table to make. The quarantine's and an output's are made empty: to look for a
        record of theirs in all entries, each time again, would cost an old feed too much."""
        if self.kind is PartKind.QUARANTINED:
            return any(b.status is BatchStatus.PUBLISHED for b in state.batches.values())
        if output := self.table.output:
            return bool(select_output(state.table, output))
        return bool(since(self.ledger, state, 0, limit=1).batches)

    def _list_columns(self, state: State) -> dict[str, str]:
        return columns(state, self.kind, self.table.output)

    def _find_pending(self, state: State, head: TableHead) -> tuple[int, list[TableChange], set[str]]:
        """Returns the next mark, the missing changes, and the lake paths of replaced files outside the table."""
        pending = since(self.ledger, state, head.mark, READ_BATCHES, self.kind, self.table.output)
        present: frozenset[str] = frozenset()
        if pending.rewrites and head.snapshot is not None:
            present = frozenset(self.table.files())
            if present.intersection(map(self.lake.locate, pending.removed)):
                pending = since(self.ledger, state, head.mark, kind=self.kind, output=self.table.output)
        never = {path for path in pending.removed if self.lake.locate(path) not in present}
        changes = list(self._changes(state, pending, present))
        if not changes and pending.end - head.mark >= MANY_ENTRIES:
            changes.append(self._change(state, TableOperation.APPEND, pending.end, ()))
        return pending.end, changes, never

    def _changes(self, state: State, pending: PendingFiles, present: frozenset[str]) -> Iterator[TableChange]:
        """One change with all that takes files out and what takes their place; then what only adds files. `present`
        are the files in the table, if any of them may be pending."""
        adding: Sequence[PendingBatch] = pending.batches
        if out := present.intersection(map(self.lake.locate, pending.removed)):
            rewriting = [b for b in pending.batches if b.rewrites]
            adding = [b for b in pending.batches if not b.rewrites]
            mark = adding[0].number if adding else pending.end  # everything before is in the table then
            replaces = TableOperation.REPLACE if pending.merged else TableOperation.OVERWRITE
            operation = replaces if rewriting else TableOperation.DELETE
            yield self._change(state, operation, mark, rewriting, present, out)
        batches = list(groups(adding))
        ends = [group[0].number for group in batches[1:]] + [pending.end][: len(batches)]
        for group, mark in zip(batches, ends, strict=True):
            change = self._change(state, TableOperation.APPEND, mark, group, present)
            if change.add:
                yield change

    def _change(
        self,
        state: State,
        operation: TableOperation,
        mark: int,
        batches: Sequence[PendingBatch],
        present: Collection[str] = (),
        remove: Iterable[str] = (),
    ) -> TableChange:
        add = tuple(a for a in addresses(self.lake, batches) if a not in present)
        properties = about(self.ledger, state, batches, self.table.output)
        complete = complete_until(state) if mark == state.number else ""
        return TableChange(operation, mark, add, tuple(sorted(remove)), self._list_columns(state), properties, complete)

    def _difference(self, state: State, head: TableHead) -> list[TableChange]:
        """Returns the changes that make a table without a valid mark equal to the ledger, by comparing all files."""
        comparison = compare(self.ledger, self.lake, self.table, head, state, self.kind)
        if not comparison.sound and (comparison.remedy is Remedy.REBUILD or not self.repair):
            raise differs(self.table, comparison, self.ledger.feed)
        again = tuple({*comparison.twice, *(address for address, _, _ in comparison.rows_differ)})
        add = (*comparison.pending, *comparison.missing, *again)
        remove = (*comparison.stale, *comparison.foreign, *again)
        wanted = set(add)
        batches = [b for b in comparison.batches if not wanted.isdisjoint(addresses(self.lake, [b]))]
        properties = about(self.ledger, state, batches, self.table.output)
        operation = TableOperation.OVERWRITE if remove else TableOperation.APPEND
        change = TableChange(operation, state.number, add, remove, self._list_columns(state), properties)
        return [change] if add or remove else []

    def _check_names(self, state: State) -> None:
        """Raises TableRefused for a column that a new table cannot have. An existing table stays as it is."""
        for path, why in find_invalid_names(column_types(state, self.kind, self.table.output), self.table.format):
            raise TableRefused(
                f"{self.table.name} cannot hold {path}: {why}",
                remedy="give the feed a table of the other format, or land it without this column, as a new feed",
            )

    def _check_columns(self, state: State) -> None:
        """Raises TableRefused for columns that the table would hold as something else."""
        name = self.table.name
        if wrong := list(unfit(column_types(state, self.kind, self.table.output), self.table.format)):
            path, type_text, instead = wrong[0]
            more = f", and {many(len(wrong) - 1, 'more column')}" if len(wrong) > 1 else ""
            raise TableRefused(
                f"{name} cannot hold {path}, which has landed as {type_text}{more}",
                remedy=f"land it as {instead}, as a new feed: landed columns keep their type",
            )

    # -- what older snapshots named, and what no snapshot ever did

    def _note_removals(self, parts: Collection[str] = (), foreign: Collection[str] = ()) -> None:
        """Note parts, and files of other writers, that go once no snapshot names them: before the table's mark or its
        snapshots forget them."""
        if parts or foreign:
            pending = published_files.read_pending_removals(self.lake, self.ledger.feed)
            new = {*parts} - pending.parts, {*foreign} - pending.foreign
            published_files.note_removals(self.lake, self.ledger.feed, *new)

    def _note_leftovers(self, state: State) -> None:
        """Note files that no longer count and that no snapshot names: another program let the snapshots expire by
        which expiry finds them, and left the files. Note other writers' files that a snapshot names."""
        files = [*self._list_files()]
        replaced, others = self.ledger.list_replaced(files, state), {*filter(published_files.may_be_foreign, files)}
        candidates = {self.lake.locate(path): path for path in replaced | others}
        still_named = {candidates[a] for a in self.table.find_named(candidates)} if candidates else set()
        self._note_removals(replaced - still_named, others & still_named)

    def _list_files(self) -> Iterator[str]:
        return (path for root in self._roots for path in self.lake.list(root))

    def _find_present(self, files: Iterable[str]) -> set[str]:
        """Those of the paths that are there and ours to remove. Most went at once if the feed had no table then."""
        candidates = sorted(filter(self._ours, files))
        if len(candidates) > MANY_PATHS:
            return {*self._list_files()}.intersection(candidates)
        return {
            path
            for path, size in zip(candidates, map_parallel(self.lake.size, candidates), strict=True)
            if size is not None
        }

    @property
    def _roots(self) -> tuple[str, ...]:
        return tuple(paths.part_path(self.ledger.feed, kind, self.table.output, "") for kind in self.cleans)

    def _ours(self, path: str) -> bool:
        return path.startswith(tuple(f"{root}/" for root in self._roots))

    def _expire(self, before: int, done: Synced) -> Synced:
        """Let old snapshots expire, and remove the files that only they named.

        The names are noted before, so that the next sync after a crash removes them.
        """
        feed, lake, table = self.ledger.feed, self.lake, self.table
        if table.look() is None:
            return done
        root = lake.locate("data").removesuffix("data")
        going = [a.removeprefix(root) for a in table.expiring(before) if a.startswith(root)]
        foreign = [*filter(published_files.may_be_foreign, going)]
        self._note_removals({*going}.difference(foreign), [*filter(self._ours, foreign)])
        noted = published_files.read_pending_removals(lake, feed)
        replaced = self.ledger.list_replaced(filter(self._ours, noted.parts))
        removing = [*replaced, *filter(self._ours, noted.foreign)]
        expired = table.expire(before)
        if not removing:
            return replace(done, expired=expired, head=table.look() if expired else done.head)
        still_named = table.find_named(map(lake.locate, removing))
        cleaned = tuple(path for path in sorted(removing) if lake.locate(path) not in still_named)
        for path in cleaned:
            lake.remove(path)
        stay = {path for path in removing if lake.locate(path) in still_named}
        still = [[p for p in files if p in stay or not self._ours(p)] for files in (noted.parts, noted.foreign)]
        published_files.settle_removals(lake, feed, noted, *still)
        return replace(done, expired=expired, cleaned=cleaned, head=table.look())
