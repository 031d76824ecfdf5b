"""A small table of a feed's complete windows, next to that of its rows: SQL alone then answers "is hour 14 complete?".

It has a row for each window that is complete in all partitions, and whose rows can be read. It is brought up after the
table of the rows, from the same state of the ledger, so the windows that it names are there. Its rows are one Parquet
file, written again when they change and named by its content. So two publishers write the same file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import PartUnreadable, TableMoved, Unknown
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.receipts import PartKind, name_dataset
from sluice.pipelines.model.tables import FEED, LEDGER, Remedy, TableChange, TableHead, TableOperation
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.publishing.manifest import is_retired
from sluice.pipelines.schema.arrays import fixed_width
from sluice.pipelines.tables.check import check_faults, check_owner

if TYPE_CHECKING:
    from sluice.pipelines.tables.current import CurrentTable

COLUMNS = {"window_start": "timestamp(us)", "window_end": "timestamp(us)"}
_FILE = re.compile(r"/([0-9a-f]{32})-([0-9]{20})\.parquet$")


@dataclass(frozen=True, slots=True)
class CompleteWindows:
    """The table of a feed's complete windows, and how long its windows are."""

    table: Table
    settings: WindowSettings

    def bring_up(self, ledger: Ledger, lake: Lake, state: State, expire_before: int | None = None) -> None:
        """Sync the table with this state of the ledger, and expire its snapshots from before a time (ms).

        Raises as `sync`. Guarantee: stopped anywhere, the table equals some state, and the next call continues.
        """
        # a missing file of ours was removed by a process with a newer state
        head = retry_outdated(lambda: self._up_to(ledger, lake, state), lambda lost: lost.gone)
        if head is not None and expire_before is not None:
            before = expire_before
            if retry_outdated(lambda: self.table.expire(before) if self.table.look() else 0, lambda lost: False):
                self._clean(lake, name_dataset(ledger.feed, self.table.output), head)

    def _up_to(self, ledger: Ledger, lake: Lake, state: State) -> TableHead | None:
        starts, dataset = complete_windows(state, self.settings), name_dataset(ledger.feed, self.table.output)
        head = self.table.look()
        if head is None:
            if not starts:
                return None
            self.table.create(COLUMNS, {FEED: dataset, LEDGER: state.ledger_id})
            head = self.table.look()
            if head is None:
                raise TableMoved(f"{self.table.name} was there, and is no more", remedy="the next try decides again")
        if head.ledger == state.ledger_id and head.mark > state.number:
            return None  # a publisher that knows more was here
        check_owner(self.table, head, state, ledger.feed)
        check_faults(self.table, COLUMNS, ledger.feed, Remedy.REPAIR)
        if self.table.repair(COLUMNS, undo=True):
            head = self.table.look() or head
        have = tuple(self.table.files())
        digest = hashlib.sha256(repr(("us", self.settings.grain, *starts)).encode()).hexdigest()[:32]
        digests = [match[1] if (match := _FILE.search(address)) else "" for address in have]
        if digests == ([digest] if starts else []) and not head.deletes:
            return head
        add = (self._write(lake, dataset, starts, f"{digest}-{state.number:020d}"),) if starts else ()
        operation = TableOperation.OVERWRITE if have else TableOperation.APPEND
        self.table.commit(TableChange(operation, state.number, add, have, COLUMNS, {FEED: dataset}))
        return self.table.look()

    def _write(self, lake: Lake, dataset: str, starts: tuple[int, ...], name: str) -> str:
        kind, path = pa.timestamp("us", "UTC"), f"{paths.windows_table_root(dataset)}/{name}.parquet"
        columns = [1000 * np.array(times, np.int64) for times in (starts, [*map(self.settings.end_of, starts)])]
        rows = pa.table([fixed_width(kind, times) for times in columns], names=list(COLUMNS))
        with lake.create(path) as file:  # in microseconds: Spark with Iceberg misreads bounds of milliseconds
            pq.write_table(rows, file)
        return lake.locate(path)

    def _clean(self, lake: Lake, dataset: str, head: TableHead) -> None:
        """Remove files that no snapshot names, and that no publisher is about to add: those are of newer states."""
        files = {lake.locate(p): p for p in lake.list(paths.windows_table_root(dataset))}
        old = [a for a in files if (match := _FILE.search(a)) and int(match[2]) < head.mark]
        if not old:
            return
        self.table.look()
        for address in {*old} - self.table.find_named(old):
            lake.remove(files[address])


class FeedTables(NamedTuple):
    """The tables of a feed, or of one output: of its rows, its quarantine and its current rows if it
    asks for them, its complete windows."""

    rows: Table
    quarantine: Table | None = None
    windows: CompleteWindows | None = None
    current: CurrentTable | None = None

    @property
    def all(self) -> tuple[Table, ...]:
        others = (t.table for t in (self.windows, self.current) if t)
        return tuple(t for t in (self.rows, self.quarantine, *others) if t)

    @property
    def of_parts(self) -> tuple[tuple[PartKind, Table], ...]:
        """Those that name parts, by the parts' kind."""
        of_rows = (PartKind.LANDED, self.rows)
        return (of_rows, (PartKind.QUARANTINED, self.quarantine)) if self.quarantine else (of_rows,)


def complete_windows(state: State, settings: WindowSettings) -> tuple[int, ...]:
    """The starts (ms) of the complete windows whose rows can be read, oldest first. Of a long silence, only the newest
    windows are among them."""
    done = windows.complete_of(state, windows.list_manifest_windows(state, settings), settings)
    return tuple(t for t in done if not is_retired(state, t, settings))


TRIES = 20
"""How often a commit is decided again because somebody else was faster."""
UNANSWERED = 3
"""Attempts without an answer; the next run waits further."""

T = TypeVar("T")


def retry_outdated(decide: Callable[[], T], outdated: Callable[[PartUnreadable], bool]) -> T:
    """Returns the result of `decide`, which reads the table and commits.

    It is called again while somebody else is faster, a commit gets no answer, or a file is missing because the decision
    is `outdated`. Raises the last error after too many tries.
    """
    tries = unanswered = 0
    while True:
        try:
            return decide()
        except TableMoved:
            if (tries := tries + 1) == TRIES:
                raise
        except Unknown:
            if (unanswered := unanswered + 1) == UNANSWERED:
                raise
        except PartUnreadable as lost:
            if (tries := tries + 1) == TRIES or not outdated(lost):
                raise
