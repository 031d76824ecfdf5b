"""The section `split` of a feed file: one topic, read once, into several datasets of one feed."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sluice.pipelines.feed.sections import Description, LocalFile, Name, RecordFormat, Settings, Text
from sluice.pipelines.feed.table_section import TableSettings
from sluice.pipelines.records.rows.split_rule import OTHERWISE, Otherwise, SplitRule, Tombstones
from sluice.pipelines.schema.schema import SchemaError, parse_field

_RESERVED = frozenset({OTHERWISE, "landed", "quarantined", "committed", "republished", "table"})
"""Names of what every feed has: assets, and the output of records without one."""


class SplitBy(Settings):
    """The value that chooses a record's output: the text of its last header of that name, a field of its JSON value, a
    field at a path of such (`meta.kind`), or the full name of its message by the schema registry (`message`, or
    `subject`, which is the same under record-name strategies).
    """

    header: Text | None = None
    field: Text | None = None
    at: Text | None = None
    message: Literal[True] | None = None
    subject: Literal[True] | None = None

    @property
    def path(self) -> tuple[str, ...]:
        """The names from the value's object to the field; empty for a header or a message."""
        steps = parse_field("value", f"json at {self.at}").path if self.at else (self.field,) if self.field else ()
        return tuple(step for step in steps if isinstance(step, str))

    @property
    def by_message(self) -> bool:
        """Returns whether the name of the message chooses."""
        return bool(self.message or self.subject)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        sources = (self.header, self.field, self.at, self.message, self.subject)
        if sources.count(None) != len(sources) - 1:
            raise ValueError("needs one of `header: NAME`, `field: NAME`, `at: NAME.NAME` and `message: true`")
        try:
            path = parse_field("value", f"json at {self.at}").path if self.at else ()
        except SchemaError:
            path = (0,)
        if not all(isinstance(step, str) for step in path):
            raise ValueError("has `at` with another path than names and dots: meta.kind")
        return self


class OutputSettings(Settings):
    """One dataset: the values that lead to it (by default its name), and its rows, with the keys of a feed file."""

    values: tuple[Text, ...] | None = None
    format: RecordFormat | None = None
    columns: dict[str, Any] | None = Field(default=None, alias="schema")
    schema_file: LocalFile | None = None
    message: Text | None = None
    table: TableSettings | None = None
    description: Description | None = None
    descriptions: dict[str, Description] = Field(default_factory=dict)


class SplitSettings(Settings):
    """The rule that chooses a record's output, the outputs, and the place of records that the rule leads to none."""

    by: SplitBy
    into: dict[Name, OutputSettings] = Field(min_length=1)
    otherwise: Otherwise = Otherwise.QUARANTINE
    tombstones: Tombstones = Tombstones.OTHERWISE

    @property
    def rule(self) -> SplitRule:
        """The rule by which records are split."""
        values = {v: name for name, output in self.into.items() for v in output.values or (name,)}
        return SplitRule(
            values, self.by.header or "", self.by.path, self.otherwise, self.by.by_message, self.tombstones
        )

    @model_validator(mode="after")
    def _check_outputs(self) -> Self:
        values = [v for name, output in self.into.items() for v in output.values or (name,)]
        if len({*values}) < len(values):
            raise ValueError("has a value that leads to two outputs")
        if any("\ufffd" in v for v in values):
            raise ValueError("has a value with U+FFFD, which stands for bytes that are not text")
        if reserved := _RESERVED.intersection(self.into):
            raise ValueError(f"has an output `{min(reserved)}`, a name that Sluice gives itself")
        return self
