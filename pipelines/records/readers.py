"""The formats that have schemas of their own: a line for each. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.pipelines.records.avro.merged import merged
from sluice.pipelines.records.avro.reader import AvroReader
from sluice.pipelines.records.avro.schema import parse
from sluice.pipelines.records.json_schema.bundle import bundled
from sluice.pipelines.records.json_schema.reader import JsonSchemaReader
from sluice.pipelines.records.reader import Reader
from sluice.pipelines.records.wire import WireFormat
from sluice.pipelines.vocabulary.registered import AVRO, JSON, RegisteredSchema


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """A format: how a reader is made of its schema, what registries call such schemas, and one of theirs as a file,
    with all that it refers to (which raises UnusableSchema)."""

    make: Callable[[tuple[str, ...], WireFormat], Reader]
    registered: str
    whole: Callable[[RegisteredSchema], str]


def _merged(found: RegisteredSchema) -> str:
    parse(found.texts)
    return merged(found.texts)


READERS: Mapping[str, SchemaFormat] = {
    "avro": SchemaFormat(AvroReader, AVRO, _merged),
    "json_schema": SchemaFormat(JsonSchemaReader, JSON, lambda found: bundled(found.texts, found.names)),
}
"""By the feed's word for the format."""
