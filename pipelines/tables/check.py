"""Compares a table with its ledger file by file: missing files, and files of other writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sluice.pipelines.errors import EntriesLost, TableDiffers
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.tip import Trace, build_lost_error
from sluice.pipelines.model.receipts import Part, PartKind, name_dataset
from sluice.pipelines.model.tables import Remedy, TableFault, TableHead
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.tables.pending import PendingBatch, addresses, columns, rows_of, since, witness
from sluice.pipelines.util.documents import Derived, Flat, Internal
from sluice.pipelines.util.units import many


class RowDifference(NamedTuple):
    """The rows of a file by the table and by the ledger."""

    file: str
    table: int
    ledger: int


@dataclass(frozen=True, slots=True)
class TableComparison:
    """A table compared with its ledger. `head` is None if there is no table yet.

    `pending` files were published after the table's mark, and `stale` ones stopped counting: the next sync sees to
    both. `missing` ones were published before, and the table had them. `foreign` ones are no files of this feed that
    the ledger knows. `rows_differ` are files with other numbers of rows than by the ledger. `deletes` counts
    files that delete single rows. `twice` are files that the table lists more than once. `faults` are of the
    table as a whole. `misread` files have bounds that an engine misreads; only `comparison` finds them. Of a table of
    current rows, `pending` are landed files, and `keys` is the number of keys by a new fold: `keys_differ` have other
    rows in the table.
    """

    head: Flat[TableHead | None]
    live: Internal[Mapping[str, Part]]
    batches: Internal[tuple[PendingBatch, ...]]
    pending: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    rows_differ: tuple[Flat[RowDifference], ...] = ()
    deletes: int = 0
    twice: tuple[str, ...] = ()
    misread: tuple[str, ...] = ()
    keys_differ: tuple[str, ...] = ()
    keys: int | None = None
    faults: tuple[TableFault, ...] = ()

    @property
    def right(self) -> bool:
        """Returns whether every engine reads all landed rows from the table."""
        return self.sound and not (self.pending or self.stale or self.misread or self.faults)

    @property
    def same(self) -> Derived[bool]:
        """Returns whether the table matches the ledger exactly."""
        return self.sound and self.head is not None and not (self.pending or self.stale)

    @property
    def sound(self) -> Derived[bool]:
        """Returns whether no other writer changed the table."""
        changed = self.missing or self.foreign or self.rows_differ or self.twice or self.deletes or self.keys_differ
        return not changed and not any(f.blocks and f.remedy > Remedy.SYNC for f in self.faults)

    @property
    def remedy(self) -> Remedy:
        """Returns what makes the table right."""
        if self.deletes or any(f.remedy is Remedy.REBUILD for f in self.faults):
            return Remedy.REBUILD
        return Remedy.SYNC if self.sound and not self.misread else Remedy.REPAIR

    def describe(self) -> str:
        """Describes the differences."""
        differences = [
            (self.missing, f"{many(len(self.missing), 'file')} of the feed {_are(self.missing)} missing in it"),
            (self.foreign, f"{many(len(self.foreign), 'file')} in it {_are(self.foreign)} not of the feed"),
            (self.twice, f"{many(len(self.twice), 'file')} {_are(self.twice)} listed twice"),
            (
                self.rows_differ,
                f"{many(len(self.rows_differ), 'file')} {_are(self.rows_differ)} listed with other numbers of rows",
            ),
            (self.keys_differ, f"{many(len(self.keys_differ), 'key')} with other rows than by the landed changes"),
            (self.deletes, f"{many(self.deletes, 'file')} in it {'deletes' if self.deletes == 1 else 'delete'} rows"),
        ]
        return ", ".join([text for present, text in differences if present] + [f.text for f in self.faults])

    def find_erasure(self, feed: str) -> str:
        """Returns what to do first if rows were deleted on purpose; empty if none are missing."""
        if not (self.missing or self.rows_differ or self.deletes):
            return ""
        return f"rows deleted on purpose come back by that, unless erased first: sluice erase {feed} --where …"

    def find_remedy(self, feed: str) -> str:
        """Returns the command after which the table is right."""
        return self.remedy.format_command(feed)


def _are(items: tuple[object, ...]) -> str:
    return "is" if len(items) == 1 else "are"


def load_both(ledger: Ledger, table: Table) -> tuple[TableHead | None, State]:
    """The head of the table (None: there is none), and the ledger's state. That is read afterwards, since a publisher
    may be at work. Raises as `check_owner`, and CatalogUnavailable."""
    head = table.look()
    state = ledger.read()
    if head:
        check_owner(table, head, state, ledger.feed)
    return head, state


def comparison(ledger: Ledger, lake: Lake, table: Table, kind: PartKind = PartKind.LANDED) -> TableComparison:
    """Compare the current table with the ledger's entries for files of this kind. Opens all of its files.

    Raises as `load_both`."""
    head, state = load_both(ledger, table)
    compared = compare(ledger, lake, table, head, state, kind)
    is_empty = head is None or head.snapshot is None
    return compared if is_empty else replace(compared, misread=table.misread())


def compare(
    ledger: Ledger,
    lake: Lake,
    table: Table,
    head: TableHead | None,
    state: State,
    kind: PartKind = PartKind.LANDED,
) -> TableComparison:
    """Compare the table of this `head` with the ledger's entries for files of this kind. Reads the whole log."""
    batches = since(ledger, state, 0, kind=kind, output=table.output).batches
    live = addresses(lake, batches)
    if head is None:
        return TableComparison(None, live, batches, pending=tuple(sorted(live)))
    table_files = table.files() if head.snapshot is not None else {}
    # after a snapshot of somebody else, such as rewritten manifests, all files below the mark are compared
    is_known = trusted_mark(ledger, state, head) or (head.own_mark is None and head.mark > 0)
    mark = head.mark if is_known else state.number
    later = addresses(lake, (b for b in batches if b.number >= mark))
    lacking, others = live.keys() - table_files.keys(), table_files.keys() - live.keys()
    stale = _stale(ledger, lake, state, others, paths.part_path(ledger.feed, kind, table.output, ""))
    # A file that is in the table and not in the ledger is stale if the ledger once had it, else foreign. One that is
    # missing is pending if its entry is above the mark, else somebody took it out.
    both = [(a, table_files[a], live[a]) for a in sorted(live.keys() & table_files.keys())]
    return TableComparison(
        head,
        live,
        batches,
        pending=tuple(sorted(lacking & later.keys())),
        stale=tuple(sorted(stale)),
        missing=tuple(sorted(lacking - later.keys())),
        foreign=tuple(sorted(others - stale)),
        rows_differ=tuple(RowDifference(a, f.rows, rows_of(p)) for a, f, p in both if f.rows != f.listed * rows_of(p)),
        twice=tuple(a for a, f, _ in both if f.listed > 1),
        deletes=head.deletes,
        faults=table.find_faults(columns(state, kind, table.output)),
    )


def _stale(ledger: Ledger, lake: Lake, state: State, others: set[str], root: str) -> set[str]:
    """Those of the addresses that are parts below the lake path `root` which no longer count."""
    base = lake.locate(f"{root}/x").removesuffix("x")
    names = {a: f"{root}/{a.removeprefix(base)}" for a in others if a.startswith(base)}
    replaced = ledger.list_replaced(names.values(), state)
    return {a for a, path in names.items() if path in replaced}


def trusted_mark(ledger: Ledger, state: State, head: TableHead) -> bool:
    """Returns whether the mark holds: the newest snapshot is ours, set the mark, and has this ledger's batches.

    Otherwise somebody wrote to the table, rolled it back, or the ledger lost entries.
    """
    if head.mark == 0 and head.snapshot is None:
        return True
    if head.own_mark != head.mark or any(first < head.mark < after for first, after in state.gaps):
        return False
    id, _, _ = head.batch.partition("/")
    batch = state.batches.get(int(id)) if id.isdecimal() else None
    return not head.batch or (batch is not None and witness(ledger, batch) == head.batch)


def check_owner(table: Table, head: TableHead, state: State, feed: str, *, replacing: bool = False) -> None:
    """Raises TableDiffers for a table that is not of this ledger and output. If it knows newer entries, raises
    EntriesLost, except with `replacing`."""
    dataset = name_dataset(feed, table.output)
    if head.ledger != state.ledger_id or head.dataset not in ("", dataset):
        whose = "an unknown writer" if not head.ledger else head.dataset if head.ledger == state.ledger_id else ""
        raise TableDiffers(
            f"{table.name} is there and belongs to {whose or 'another ledger'}, not to feed {dataset}",
            remedy="give the feed's table another name, or drop that one if it is unused",
        )
    if head.mark > state.number and not replacing:
        trace = Trace(head.mark - 1, f"{table.name} names entry {head.mark - 1}")
        error = build_lost_error(feed, state.newest, [trace])
        restored = f"if the lake was restored from an older copy than the catalog: sluice table rebuild {dataset} --yes"
        raise EntriesLost(error.message, remedy=f"{restored}. Else {error.remedy}")


def check_faults(table: Table, columns: Mapping[str, str], feed: str, blocks: Remedy | None = None) -> None:
    """Check the table as `look` last returned it. Raises TableDiffers for faults; with `blocks`, only for those that
    prevent commits and need more than this remedy."""
    faults = table.find_faults(columns)
    if faults := tuple(f for f in faults if blocks is None or (f.blocks and f.remedy > blocks)):
        remedy = max(f.remedy for f in faults).format_command(name_dataset(feed, table.output))
        raise TableDiffers(f"{table.name} was changed by others: {', '.join(f.text for f in faults)}", remedy=remedy)


def differs(table: Table, comparison: TableComparison, feed: str) -> TableDiffers:
    """The error for a table that somebody else changed."""
    dataset = name_dataset(feed, table.output)
    remedy = f"to see the files: sluice table check {dataset}; to make the table match the ledger: "
    remedy += "; ".join(filter(None, [comparison.find_remedy(dataset), comparison.find_erasure(dataset)]))
    return TableDiffers(f"{table.name} was changed, and not by feed {feed}: {comparison.describe()}", remedy=remedy)
