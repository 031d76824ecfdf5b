"""Makes a feed's table what the ledger says: files that landed go in, files that no longer count go out.

What the table has is asked of the table. Its *mark* says which entries of the ledger are in it, and is set in the same
commit as their files, on the snapshot that was looked at; so a file is added once, however many publishers there are
and wherever one dies. When no answer comes, the table is looked at again: either the commit took effect, or it never
will, since the next one takes its place. A table that somebody else changed is noticed and named before anything is
added to it.

A batch that only adds files is an append. Whatever takes files out (merged, landed anew, replayed, retired) is one
commit with what takes their place, so that a reader of any snapshot meets each row once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice.pipelines.feed.table import unfit
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.publishing import kept
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.tables.check import check_owner, compare, differs, trusted_mark
from sluice.pipelines.tables.owed import (
    Owed,
    OwedBatch,
    about,
    addresses,
    column_types,
    columns,
    complete_until,
    groups,
    since,
)
from sluice.pipelines.tables.windows import CompleteWindows
from sluice.pipelines.vocabulary.errors import PartUnreadable, TableMoved, TableRefused, Unknown
from sluice.pipelines.vocabulary.progress import Progress, Reporter
from sluice.pipelines.vocabulary.side_by_side import each
from sluice.pipelines.vocabulary.tables import FEED, LEDGER, TableChange, TableHead, TableOperation
from sluice.pipelines.vocabulary.units import many

TRIES = 20
"""How often a commit is decided anew because somebody else was faster."""
UNANSWERED = 3
"""How often one is that got no answer: whoever waits longer waits in the next run."""
READ_BATCHES = 500
"""Batches that a backfill reads from the log before it adds them."""
MANY_PATHS = 1000
"""More files than that are found by listing rather than one by one."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync did: the table's head afterwards (None: there is none, since nothing has landed yet), its commits,
    files added and taken out, snapshots that expired and lake paths removed with them."""

    head: TableHead | None
    commits: int = 0
    added: int = 0
    removed: int = 0
    created: bool = False
    expired: int = 0
    cleaned: tuple[str, ...] = ()


def sync(
    ledger: Ledger,
    lake: Lake,
    table: Table,
    report: Reporter = lambda progress: None,
    *,
    windows: CompleteWindows | None = None,
    expire_before: int | None = None,
    repair: bool = False,
) -> Synced:
    """Bring the table up to the ledger, and let its snapshots from before a time (ms) expire. Then do the same to the
    table of complete windows, which names no window whose rows are not in it.

    With `repair`, a table that somebody else changed is made what the ledger says; without, it raises TableDiffers.
    Raises TableRefused, CatalogUnavailable, EntriesLost, PartUnreadable; TableMoved or Unknown after too many tries.
    Guarantee: stopped anywhere, the table is what some state of the ledger said, and the next call goes on.
    """
    done, tries, unanswered = Synced(None), 0, 0
    while True:
        state = ledger.read()
        roll_forward(ledger, lake, ledger.feed)  # what this state counts is visible, unless replaced since
        try:
            done = _up_to(ledger, lake, table, state, report, repair, done)
            break
        except TableMoved:
            if (tries := tries + 1) == TRIES:
                raise
        except Unknown:
            if (unanswered := unanswered + 1) == UNANSWERED:
                raise
        except PartUnreadable as lost:
            if (tries := tries + 1) == TRIES or not (lost.gone and ledger.read().number > state.number):
                raise
    if expire_before is not None and done.head is not None:
        done = _expire(ledger, lake, table, expire_before, done)
    if windows is not None and done.head is not None:
        windows.bring_up(ledger, lake, state, expire_before)
    return done


def _up_to(
    ledger: Ledger, lake: Lake, table: Table, state: State, report: Reporter, repair: bool, done: Synced
) -> Synced:
    """Piece by piece; before each the table is looked at anew, since others may commit in between."""
    while True:
        report(Progress("look", note=table.name))
        head = table.look()
        if head is None:
            if not since(ledger, state, 0, most=1).batches:
                return done
            _check_columns(state, table)
            table.create(columns(state), {FEED: ledger.feed, LEDGER: state.ledger_id})
            done = replace(done, created=True)
            continue
        if head.mark > state.number and ledger.read().number >= head.mark:
            raise TableMoved(f"{table.name} was brought up meanwhile", remedy="the next try decides anew")
        check_owner(table, head, state, ledger.feed)
        if not kept.has_table(lake, ledger.feed):
            kept.note(lake, ledger.feed, table.name)
        if trusted_mark(ledger, state, head):
            end, changes, never = _owed(ledger, lake, table, state, head)
            _note_removing(lake, ledger.feed, table, _present(lake, ledger.feed, never))
        else:
            end, changes = state.number, _difference(ledger, lake, table, state, head, repair)
        if changes:
            _check_columns(state, table)
        elif end == state.number:
            if (complete := complete_until(state)) > head.complete:
                table.tell(complete)
                head = table.look()
            return replace(done, head=head)
        total = done.added + sum(len(c.add) for c in changes)
        for change in changes:
            report(Progress("add files", done.added, total))
            table.commit(change)
            added, removed = done.added + len(change.add), done.removed + len(change.remove)
            done = replace(done, commits=done.commits + 1, added=added, removed=removed)


def _owed(
    ledger: Ledger, lake: Lake, table: Table, state: State, head: TableHead
) -> tuple[int, list[TableChange], set[str]]:
    """What a table that is what the ledger said at its mark lacks, and the mark afterwards. Then the lake paths of
    files that no longer count and are not in the table: replaced before it saw them, or of the quarantine."""
    owed = since(ledger, state, head.mark, READ_BATCHES)
    known: frozenset[str] = frozenset()
    if owed.rewrites and head.snapshot is not None:
        known = frozenset(table.files())
        if known.intersection(map(lake.locate, owed.gone)):
            owed = since(ledger, state, head.mark)
    never = {path for path in owed.gone if lake.locate(path) not in known}
    return owed.end, list(_changes(ledger, lake, state, owed, known)), never


def _changes(ledger: Ledger, lake: Lake, state: State, owed: Owed, known: frozenset[str]) -> Iterator[TableChange]:
    """One change with all that takes files out and what takes their place; then what only adds files. `known` are the
    files in the table, if any of them may be among what is owed."""

    def change(
        operation: TableOperation, mark: int, batches: Sequence[OwedBatch], remove: Iterable[str] = ()
    ) -> TableChange:
        add = tuple(a for a in addresses(lake, batches) if a not in known)
        said = about(ledger, state, batches)
        complete = complete_until(state) if mark == state.number else ""
        return TableChange(operation, mark, add, tuple(sorted(remove)), columns(state), said, complete)

    adding: Sequence[OwedBatch] = owed.batches
    if out := known.intersection(map(lake.locate, owed.gone)):
        rewriting = [b for b in owed.batches if b.rewrites]
        adding = [b for b in owed.batches if not b.rewrites]
        mark = adding[0].number if adding else owed.end  # what comes before is all in then
        yield change(_operation(owed, bool(rewriting)), mark, rewriting, out)
    some = list(groups(adding))
    ends = [group[0].number for group in some[1:]] + [owed.end][: len(some)]
    for group, mark in zip(some, ends, strict=True):
        found = change(TableOperation.APPEND, mark, group)
        if found.add:
            yield found


def _operation(owed: Owed, adds: bool) -> TableOperation:
    if not adds:
        return TableOperation.DELETE
    return TableOperation.REPLACE if owed.merged else TableOperation.OVERWRITE


def _difference(
    ledger: Ledger, lake: Lake, table: Table, state: State, head: TableHead, repair: bool
) -> list[TableChange]:
    """What makes a table like the ledger whose mark says nothing: all of its files are compared."""
    found = compare(ledger, lake, table, head, state)
    if found.deletes or not (found.sound or repair):
        raise differs(table, found, ledger.feed)
    add, remove = (*found.owed, *found.missing), (*found.stale, *found.foreign)
    wanted = set(add)
    batches = [b for b in found.batches if not wanted.isdisjoint(addresses(lake, [b]))]
    operation = TableOperation.OVERWRITE if remove else TableOperation.APPEND
    change = TableChange(operation, state.number, add, remove, columns(state), about(ledger, state, batches))
    return [change] if add or remove else []


def _check_columns(state: State, table: Table) -> None:
    """Raises TableRefused for columns that the table would hold as something else."""
    if wrong := list(unfit(column_types(state), table.format)):
        path, said, instead = wrong[0]
        more = f", and {many(len(wrong) - 1, 'more column')}" if len(wrong) > 1 else ""
        raise TableRefused(
            f"{table.name} cannot hold {path}, which has landed as {said}{more}",
            remedy=f"land it as {instead}, as a new feed: what has landed keeps its type",
        )


# -- what older snapshots named, and what no snapshot ever did


def _note_removing(lake: Lake, feed: str, table: Table, some: set[str]) -> None:
    """Note files that go once no snapshot names them, before the table's mark or its snapshots forget them."""
    if some and not some <= (noted := {*kept.removing(lake, feed)}):
        kept.note(lake, feed, table.name, noted | some)


def _present(lake: Lake, feed: str, some: Collection[str]) -> set[str]:
    """Those of the paths that are there. Most went at once if the feed had no table then."""
    if len(some) > MANY_PATHS:
        return {path for root in paths.visible_roots(feed) for path in lake.list(root)}.intersection(some)
    asked = sorted(some)
    return {path for path, size in zip(asked, each(lake.size, asked), strict=True) if size is not None}


def _expire(ledger: Ledger, lake: Lake, table: Table, before: int, done: Synced) -> Synced:
    """Let old snapshots expire, and remove the files that only they named.

    The names are noted before, so that whoever comes after a crash removes them.
    """
    feed, root = ledger.feed, lake.locate("data").removesuffix("data")
    _note_removing(lake, feed, table, {a.removeprefix(root) for a in table.expiring(before) if a.startswith(root)})
    removing = sorted(ledger.replaced(kept.removing(lake, feed)))
    expired = table.expire(before)
    if not removing:
        return replace(done, expired=expired, head=table.look() if expired else done.head)
    named = table.named(map(lake.locate, removing))
    cleaned = tuple(path for path in removing if lake.locate(path) not in named)
    for path in cleaned:
        lake.remove(path)
    kept.note(lake, feed, table.name, [path for path in removing if lake.locate(path) in named])
    return replace(done, expired=expired, cleaned=cleaned, head=table.look())
