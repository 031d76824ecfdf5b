"""Compares a feed's columns with those of another schema: the changes that a new schema_file would make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.errors import SchemaChanged, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.planning.schema_changes import find_corrected_table
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.value_reader import Reader, UnusableSchema
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.util.units import sanitize


class ColumnChange(NamedTuple):
    """A column's type now, and then; None without one."""

    column: str
    now: str | None
    then: str | None


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """`changes` are columns that come, go or change.

    `added` and `dropped` describe rules beyond types. `refused` is the reason why rows of the new schema would not form
    one table with landed rows.
    """

    changes: tuple[ColumnChange, ...]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    refused: SchemaChanged | None

    @property
    def exit_code(self) -> int:
        return self.refused.exit_code if self.refused else int(bool(self.changes or self.added or self.dropped))


def compare_schema(feed: Feed, lake: Lake, after: Reader) -> SchemaDifference:
    """Compare the feed's own schema with another one, and the other one with the landed rows."""
    before, then = feed.reader.columns.texts() if feed.reader else {}, after.columns.texts()
    names = dict.fromkeys((*before, *then))
    now_expected, then_expected = list_expected(feed.reader), list_expected(after)
    ledger = Ledger(lake, feed.stored, lambda: 0)
    refused, state = None, ledger.read()
    try:
        find_corrected_table(feed, replace(feed.shape, columns=after.columns), ledger, state)
    except SchemaChanged as error:
        refused = error
    return SchemaDifference(
        tuple(ColumnChange(n, before.get(n), then.get(n)) for n in names if before.get(n) != then.get(n)),
        tuple(e for e in then_expected if e not in now_expected),
        tuple(e for e in now_expected if e not in then_expected),
        refused,
    )


def list_expected(reader: Reader | None) -> list[str]:
    """Describes the rules of a schema beyond types."""
    return [text(e) for e in reader.expectations] if reader else []


def read_schema_file(feed: Feed, file: Path) -> Reader:
    """Returns the reader of a schema in a file, in the feed's format. Raises UsageError."""
    reader = READERS[feed.format]
    try:
        texts = reader.read(file.read_text("utf-8"), file.parent, feed.message or "")
        return reader.make(texts, feed.reader.wire if feed.reader else WireFormat.BARE)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} cannot be read ({type(error).__name__})", remedy="choose a readable UTF-8 file"
        ) from None
    except ValueError as error:
        what = error.text if isinstance(error, UnusableSchema) else sanitize(str(error))
        raise UsageError(f"{file} makes no columns: {what}", remedy="sluice docs formats") from None
