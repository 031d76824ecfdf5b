"""Protocols for reading records of a format with its own schemas, and keys by a schema of their own. Light.

Fields of a key become columns `key_…` next to those of the value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from sluice.pipelines.schema.schema import Field, Schema
from sluice.pipelines.util.units import sanitize

MOST_PROBLEMS = 50
"""How many problems of one schema a message names."""


class UnusableSchema(ValueError):
    """A schema that does not parse, or that no table can hold. `place` is the path in it, and `problems` are all paths
    with their problems."""

    def __init__(self, path: str, what: str, more: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.place, self.what = path, what
        self.problems = (*dict.fromkeys([(path, what), *more]),)

    @classmethod
    def of_all(cls, errors: Iterable[UnusableSchema]) -> UnusableSchema:
        """One error of several."""
        (path, what), *more = (problem for error in errors for problem in error.problems)
        return cls(path, what, more)

    @property
    def text(self) -> str:
        """Returns all problems as text with safe names: one on the same line, several on separate lines."""
        lines = [sanitize(f"{path}: {what}" if path else what, limit=600) for path, what in self.problems]
        more = len(lines) - MOST_PROBLEMS
        listed = [*lines[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        return listed[0] if len(listed) == 1 else "".join(f"\n    {line}" for line in listed)


class WriterSchemas(Protocol):
    """Schemas that records were written by."""

    def texts(self, id: Named) -> tuple[str, ...] | None:
        """The schema of that number or GUID, after its references; None if it certainly does not exist.

        Raises UnusableSchema for one that can read no record, and a SluiceError when the registry is out of reach.
        """
        ...


@runtime_checkable
class Reader(Protocol):
    """Reads records by the feed's own schema, `texts` (referenced ones first), and the wire format.

    Readers are frozen, and compare by value. Making one raises UnusableSchema, or SchemaError for a schema
    that makes no columns.
    """

    @property
    def format(self) -> str:
        """The feed's word for it, such as `avro`."""
        ...

    @property
    def texts(self) -> tuple[str, ...]: ...

    @property
    def wire(self) -> WireFormat: ...

    @property
    def columns(self) -> Schema:
        """The columns of rows."""
        ...

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Expectations of rows beyond their types. They become part of the feed's contract."""
        ...

    @property
    def evolves(self) -> bool:
        """True if columns may also come from records."""
        ...

    @property
    def fingerprint(self) -> str:
        """16 hex digits. Readers that make the same rows of the same records have the same ones."""
        ...

    @property
    def asks(self) -> bool:
        """True if it needs writers' schemas."""
        ...


KEY_PREFIX = "key_"


@dataclass(frozen=True)
class KeyReader:
    """How records' keys are read. A key that is no record has the one column `key_value`."""

    reader: Reader

    @cached_property
    def columns(self) -> tuple[Field, ...]:
        """The columns that keys make."""
        return tuple(replace(f, name=KEY_PREFIX + f.name) for f in self.reader.columns.fields)

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Expectations of keys beyond their types, on these columns."""
        own = self.reader.expectations
        return tuple(replace(e, kwargs={**e.kwargs, "column": KEY_PREFIX + e.kwargs["column"]}) for e in own)

    def without(self, columns: Schema) -> Schema:
        """The columns that values make."""
        own = {f.name for f in self.columns}
        return Schema(tuple(f for f in columns.fields if f.name not in own))
