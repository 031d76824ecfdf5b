"""Keys with a schema of their own: their fields become columns `key_…` next to those of the value. Light."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.rows.value_reader import Reader
from sluice.pipelines.schema.schema import Field, Schema

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
        """What keys must be beyond their types, as expectations of these columns."""
        own = self.reader.expectations
        return tuple(replace(e, kwargs={**e.kwargs, "column": KEY_PREFIX + e.kwargs["column"]}) for e in own)

    def without(self, columns: Schema) -> Schema:
        """The columns that values make."""
        own = {f.name for f in self.columns}
        return Schema(tuple(f for f in columns.fields if f.name not in own))
