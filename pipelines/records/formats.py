"""The formats that have schemas of their own: a line for each. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.model.registered_schema import AVRO, JSON, PROTOBUF, RegisteredSchema
from sluice.pipelines.records.avro.reader_schema import AvroReader, merge_texts
from sluice.pipelines.records.avro.schema import parse
from sluice.pipelines.records.json.schema_document import bundle_texts
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.protobuf import reader_schema as protobuf
from sluice.pipelines.records.rows.value_reader import Reader, WriterSchemas
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import Schema

if TYPE_CHECKING:
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
            from sluice.pipelines.records.json.format import JsonSchemaFormat

            names = None if closed else reader.closed_paths
            return JsonSchemaFormat(columns, reader.wire, dropping=dropping, closed=names, base=base)
        case protobuf.ProtobufReader():
            from sluice.pipelines.records.protobuf.format import ProtobufFormat

            return ProtobufFormat(reader, writers, dropping=dropping, closed=closed)
    raise TypeError(f"{reader.format} has no row format")


def prepare_schema(schema: RegisteredSchema) -> RegisteredSchema:
    """A registry's schema as readers take it. Raises UnusableSchema."""
    of = (form for form in READERS.values() if form.registered == schema.type)
    return next((form.compiled(schema) for form in of), schema)
