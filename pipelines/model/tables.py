"""Values exchanged with a table publisher: the head of a table, a file in it, one change of it.

A table lists files of the lake, so that its readers find rows by SQL. A *mark* is a ledger number: every entry below it
is in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from sluice.pipelines.util.documents import Instant, Internal

FEED, LEDGER, MARK = "sluice.feed", "sluice.ledger", "sluice.mark"
BATCHES, OFFSETS, WINDOWS = "sluice.batches", "sluice.offsets", "sluice.windows"
COMPLETE = "sluice.complete-until"
"""What tables and their snapshots say of themselves, in every format."""
ICEBERG, DELTA = "Iceberg", "Delta"
"""The formats, as people write them."""


class TableOperation(StrEnum):
    """The effect of a change on rows, as readers of snapshots understand it.

    REPLACE: the same rows in other files. OVERWRITE: rows out and other rows in.
    """

    APPEND = "append"
    REPLACE = "replace"
    OVERWRITE = "overwrite"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class TableHead:
    """A table at the moment at which its catalog was asked.

    `ledger` and `mark` are its properties; `ledger` is empty if no Sluice made the table. `own_mark` and `batch` are
    properties of the newest snapshot: its mark and the newest batch that it added, as `<id>/<plan hash>`. They are
    None and empty if something else made that snapshot. `at` is its time (ms). A table without a snapshot has none
    of these, and no rows. `dataset` is the feed, or the output as FEED.OUTPUT, for which the table was made.
    """

    ledger: Internal[str]
    mark: int
    snapshot: int | None = None
    own_mark: Internal[int | None] = None
    batch: str = ""
    at: Instant | None = None
    rows: int = 0
    files: int = 0
    snapshots: int = 0
    deletes: int = 0
    """Files that delete single rows. Sluice writes none."""
    complete: str = ""
    """Every window that ends at this time or before is complete and in the table; empty: none is known to be."""
    forged: Internal[int | None] = None
    """The mark in the table's properties, where another client changed it: `mark` is that of our newest commit."""
    dataset: Internal[str] = ""


class Remedy(IntEnum):
    """A command that makes a table match its ledger: a sync, one with `--repair`, or a rebuild. Each includes those
    before it."""

    SYNC = 0
    REPAIR = 1
    REBUILD = 2

    def format_command(self, feed: str) -> str:
        return f"sluice table {('sync {0}', 'sync {0} --repair', 'rebuild {0}')[self].format(feed)}"


@dataclass(frozen=True, slots=True)
class TableFault:
    """A change by another client to a table as a whole: `text` continues "table …: ". If it does not `block`, rows can
    still be added."""

    text: str
    remedy: Internal[Remedy] = Remedy.REBUILD
    blocks: bool = True


def build_forged_mark(forged: int, mark: int) -> TableFault:
    return TableFault(f"its mark was set to entry {forged - 1}, and it ends at {mark - 1}", Remedy.SYNC)


@dataclass(frozen=True, slots=True)
class TableChange:
    """One atomic change: files in and files out, by address, and the mark afterwards.

    `columns` are those that the table must have, by name, with types as a schema spells them. `about` goes into the
    snapshot's summary. `complete` is as in the head; where it is empty, it stays as it is.
    """

    operation: TableOperation
    mark: int
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    complete: str = ""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A data file that a snapshot names."""

    address: str
    rows: int
    bytes: int
    listed: int = 1
    """How often the snapshot names it."""
