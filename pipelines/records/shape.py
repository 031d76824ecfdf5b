"""A shape: the schema and contract of a feed's rows, and what happens to records that do not fit.

Shapes of the same name make the same rows from the same records. Receipts carry the name, and the ledger stores
its meaning (`SchemaEntry`), so that a window can be explained and compared after the feed has changed. This module is
light: Arrow and the compiled loops are loaded with the first format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.records.avro.reader_schema import AvroReader, merge_texts
from sluice.pipelines.records.avro.schema import parse
from sluice.pipelines.records.json.schema_document import bundle_texts
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.protobuf import reader_schema as protobuf
from sluice.pipelines.records.rows.split_rule import OTHERWISE, SplitRule, Tombstones
from sluice.pipelines.records.rows.value_reader import KeyReader, Reader, WriterSchemas
from sluice.pipelines.records.rows.wire_format import AVRO, JSON, PROTOBUF, RegisteredSchema, WireFormat
from sluice.pipelines.schema.layout import make_layout
from sluice.pipelines.schema.protection import (
    RAW_KEY,
    ProtectedField,
    Protection,
    Rule,
    covers_path,
    get_landed_columns,
    protect_schema,
)
from sluice.pipelines.schema.schema import KAFKA, Field, Schema
from sluice.pipelines.schema.wider import RAW_TYPES

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.records.rows.row_format import Format


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """A format: how a reader is made of its schema, what registries call such schemas, and one of theirs as a file,
    with all that it refers to.

    `read` turns a file's text, its folder and a message's name into a reader's texts; `compiled` turns a registry's
    schema into the one that the lake stores. All raise UnusableSchema.
    """

    make: Callable[[tuple[str, ...], WireFormat], Reader]
    registered: str
    as_file: Callable[[RegisteredSchema], str]
    read: Callable[[str, Path, str], tuple[str, ...]] = lambda text, folder, message: (text,)
    compiled: Callable[[RegisteredSchema], RegisteredSchema] = lambda schema: schema


def _merge_file(schema: RegisteredSchema) -> str:
    parse(schema.texts)
    return merge_texts(schema.texts)


READERS: Mapping[str, SchemaFormat] = {
    "avro": SchemaFormat(AvroReader, AVRO, _merge_file),
    "json_schema": SchemaFormat(JsonSchemaReader, JSON, lambda schema: bundle_texts(schema.texts, schema.names)),
    "protobuf": SchemaFormat(
        protobuf.ProtobufReader,
        PROTOBUF,
        protobuf.as_file,
        read=protobuf.from_file,
        compiled=protobuf.compile_registered,
    ),
}
"""By the feed's word for the format."""


def make_format(
    reader: Reader,
    columns: Schema,
    writers: WriterSchemas | None,
    *,
    dropping: bool,
    closed: bool,
    base: Schema | None = None,
) -> Format:
    """Return a new format that makes rows of these columns. `writers` are the schemas that records name.

    With `closed`, a record with other fields does not fit, even if the schema allows it. `base` are the columns
    without fields that came from records, for formats that retain values which do not fit these. Protobuf has the
    columns of its message alone. Loads Arrow and the compiled loops of this format only.
    """
    match reader:
        case AvroReader():
            from sluice.pipelines.records.avro.format import AvroFormat

            return AvroFormat(reader.grown(columns), writers, dropping=dropping, closed=closed)
        case JsonSchemaReader():
            from sluice.pipelines.records.json.format import JsonFormat

            names = None if closed else reader.closed_paths
            return JsonFormat(columns, reader.wire, dropping=dropping, closed=names, base=base)
        case protobuf.ProtobufReader():
            from sluice.pipelines.records.protobuf.format import ProtobufFormat

            return ProtobufFormat(reader, writers, dropping=dropping, closed=closed)
    raise TypeError(f"{reader.format} has no row format")


def prepare_schema(schema: RegisteredSchema) -> RegisteredSchema:
    """A registry's schema as readers take it. Raises UnusableSchema."""
    of = (form for form in READERS.values() if form.registered == schema.type)
    return next((form.compiled(schema) for form in of), schema)


@dataclass(frozen=True, slots=True)
class Split:
    """The outputs of a feed, in the order of its file, each with the shape of its rows."""

    rule: SplitRule
    shapes: Mapping[str, Shape]

    @property
    def fingerprint(self) -> str:
        rule = self.rule
        of = [rule.header, *rule.path, rule.by_message, rule.otherwise, sorted(rule.outputs.items())]
        of += [rule.tombstones] if rule.tombstones is not Tombstones.OTHERWISE else []
        shapes = [(output, shape.name) for output, shape in self.shapes.items()]
        return hashlib.sha256(repr((of, shapes)).encode()).hexdigest()[:12]

    @property
    def reader(self) -> Reader | None:
        """A reader of an output's values; None if no output has one. All have its wire format."""
        return next((shape.reader for shape in self.shapes.values() if shape.reader), None)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of all outputs with their types, as `output/column`, without their places in records."""
        columns: dict[str, str] = {}
        for output, shape in self.shapes.items():
            own = shape.landed_columns
            fields = [Field(f.name, f.type, f.required) for f in own.fields] if own else ()
            texts = {f.name: f.text for f in fields} if fields else RAW_TYPES
            columns |= {f"{output}/{name}": text for name, text in texts.items()}
        return columns

    def find_first_place(self, output: str) -> int:
        """Returns the place of the output's first expectation among those of all outputs."""
        before = takewhile(lambda name: name != output, self.shapes)
        return sum(len(c.expectations) for name in before if (c := self.shapes[name].contract))


@dataclass(frozen=True, slots=True)
class Shape:
    """The rows of a feed's records.

    `columns` is the schema of typed rows, None for raw rows. `reader` is how records of a format with schemas of its
    own are read as these; None for JSON. `key` is how keys are read, whose columns are among `columns`. With
    `dropping`, records that do not fit are counted and kept nowhere. With `closed`, a record with a field that the
    schema does not name, at any depth, does not fit. `base` are the columns without fields that came from records, if
    there are any: a value that does not fit such a field stays in `_extra`. `protection` replaces or leaves out values
    of fields, keys and headers: rows land with `landed_columns`. With `split`, the rows are those of its outputs'
    shapes; `protection` is then that of records which no output takes.
    """

    columns: Schema | None = None
    contract: Contract | None = None
    dropping: bool = False
    closed: bool = False
    reader: Reader | None = None
    key: KeyReader | None = None
    base: Schema | None = None
    protection: Protection | None = None
    split: Split | None = None

    @property
    def rounded(self) -> tuple[str, ...]:
        """Returns the columns in which the decimal numbers of JSON are rounded to binary ones."""
        columns = self.columns if self.reader is None or self.reader.format.startswith("json") else None
        return tuple(f.name for f in columns.fields if f.type.is_rounding) if columns else ()

    @property
    def name(self) -> str:
        """A few words. They differ where the same records would become other rows."""
        if self.split:
            return f"{SPLIT} {self.split.fingerprint}"
        words = ["raw" if self.columns is None else f"json {self.columns.fingerprint}"]
        if self.reader is not None:
            words = [f"{self.reader.format} {self.reader.fingerprint}"]
            columns = self.of_values
            words += [f"columns {columns.fingerprint}"] if columns and columns != self.reader.columns else []
        words += [f"key {self.key.reader.format} {self.key.reader.fingerprint}"] if self.key else []
        words += ["closed"] if self.closed else []
        words += [f"base {self.base.fingerprint}"] if self.base else []
        words += [f"protect {self.protection.fingerprint}"] if self.protection else []
        words += [f"contract {self.contract.hash}"] if self.contract else []
        words += ["dropping"] if self.dropping else []
        return " ".join(words)

    @property
    def of_values(self) -> Schema | None:
        """The columns that values make: keys may make others."""
        return self._of_values(self.columns)

    @property
    def landed_of_values(self) -> Schema | None:
        """The columns of landed rows that values make."""
        return self._of_values(self.landed_columns)

    def _of_values(self, columns: Schema | None) -> Schema | None:
        return self.key.without(columns) if self.key and columns else columns

    @property
    def landed_columns(self) -> Schema | None:
        """The columns of landed rows; None for raw rows. Contracts see `columns`."""
        return get_landed_columns(self.protected) if self.protected is not None else self.columns

    @property
    def protected(self) -> tuple[ProtectedField, ...] | None:
        """The columns as they are protected; None if the rows are raw or not protected."""
        if self.protection is None or self.columns is None:
            return None
        return protect_schema(self.columns, self.protection, self._key_names)

    @property
    def column_rules(self) -> dict[str, Rule]:
        """The rules of whole columns, by their names."""
        rules = {p.own.name: p.rule for p in self.protected or () if p.rule}
        if self.protection and (rule := self.protection.find(RAW_KEY)):
            rules[KAFKA + "key" if self.columns else "key"] = rule
        return rules

    @property
    def _key_names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.key.columns) if self.key else frozenset()

    @property
    def landed(self) -> pa.Schema:
        """The Arrow schema of landed rows; of a split feed, of those that no output takes."""
        from sluice.pipelines.records.rows.row_format import landed_schema

        return landed_schema(self.landed_columns)

    @property
    def is_bare_json(self) -> bool:
        """Returns whether the values are read as JSON without a prefix, and the keys are not read."""
        bare = self.reader is None or (
            isinstance(self.reader, JsonSchemaReader) and self.reader.wire is WireFormat.BARE
        )
        return self.columns is not None and self.key is None and bare

    @property
    def datasets(self) -> Mapping[str, Shape]:
        """The shapes of the outputs and of raw records without one, by name; of a feed without `split` its own."""
        return {**self.split.shapes, OTHERWISE: Shape(protection=self.protection)} if self.split else {"": self}

    def select(self, r: Receipt, output: str) -> Receipt:
        """Returns the receipt of one output, as if a feed of its own had landed it; without `split` the same."""
        if self.split is None:
            return r
        shape, first = self.datasets.get(output, RAW), self.split.find_first_place(output)
        own = range(first, first + (len(shape.contract.expectations) if shape.contract else 0))
        tallies = tuple(replace(t, expectation=t.expectation - first) for t in r.tallies if t.expectation in own)
        return replace(r.of_output(output), format=shape.name, tallies=tallies)

    def format(self, writers: WriterSchemas | None = None) -> Format:
        """A new format that makes such rows. `writers` tells records' schemas; without it, none is known."""
        from sluice.pipelines.records.rows.row_format import RawFormat

        if self.split is not None:
            from sluice.pipelines.records.split_format import Output, Router, SplitFormat

            split = self.split
            outputs = {
                name: Output(shape.format(writers), split.find_first_place(name), shape.is_bare_json)
                for name, shape in split.shapes.items()
            }
            source, rest = split.rule.source_path, self.datasets[OTHERWISE].format()
            shapes = [(shape.protected or (), shape.protection) for shape in split.shapes.values()]
            conceals = any(p and covers_path(columns, p, source) for columns, p in shapes)
            names = None
            if split.rule.by_message and split.reader:
                from sluice.pipelines.records.message_names import MessageNames

                names = MessageNames(split.reader.format, split.reader.wire, writers)
            wire = split.reader.wire if split.reader else WireFormat.BARE
            return SplitFormat(split.rule, outputs, Router(split.rule, [*outputs], wire, names), rest, conceals)
        # Layers, from the bytes up: the values, the names and places of columns, the key, the contract, protection.
        form: Format = RawFormat()
        of_values, base = self.of_values, self._of_values(self.base)
        columns = make_layout(of_values).reading if of_values else None
        base = make_layout(base).reading if base else None
        if self.reader is not None and columns is not None:
            form = make_format(self.reader, columns, writers, dropping=self.dropping, closed=self.closed, base=base)
        elif columns is not None:
            from sluice.pipelines.records.json.format import JsonFormat

            form = JsonFormat(columns, dropping=self.dropping, closed=None if self.closed else (), base=base)
        # Columns that are renamed, or taken out of structs, are read as the records have them, and put in place here.
        if of_values is not None and columns != of_values:
            from sluice.pipelines.records.columns.placed_format import PlacedFormat

            form = PlacedFormat(form, of_values, dropping=self.dropping)
        # Columns of the key are read by a format of their own, which may be another one than that of the values.
        if self.key is not None and self.columns is not None:
            from sluice.pipelines.records.rows.keyed import KeyedFormat

            read = self.key.reader
            keys = make_format(read, read.columns, writers, dropping=False, closed=False)
            form = KeyedFormat(form, keys, self.columns, read.wire, dropping=self.dropping)
        if self.contract is not None:
            from sluice.pipelines.records.contract_rows.contract_format import ContractFormat

            form = ContractFormat(form, self.contract, dropping=self.dropping)
        return self._protect(form)

    def _protect(self, form: Format) -> Format:
        """The format whose rows are protected: the last one, so that nothing else has rows to write."""
        if self.protection is None:
            return form
        from sluice.pipelines.records.rows.protected import ProtectedFormat

        columns = self.protected
        hides_keys = any(p.rule or p.landed != p.own for p in columns or () if p.own.name in self._key_names)
        return ProtectedFormat(form, columns, self.protection.with_places(self.columns), hides_keys=hides_keys)


RAW = Shape()
"""Every record, as it is."""
SPLIT = "split"
"""The first word of the names of shapes with outputs."""
