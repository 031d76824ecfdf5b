"""A feed for a topic whose values name schemas of a registry, proposed from a sample. Writes the feed's schema_file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.load import SchemaAsked
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.operating.propose_feed import FeedProposal, TopicSample, propose_registered
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.message_names import MessageNames
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.resources.registry.confluent import client_of, find_written, pull_schema, read_key_fields

_SUFFIXES = {"avro": ".avsc", "json_schema": ".json", "protobuf": ".proto"}


def propose_by_registry(
    request: SchemaAsked, sample: TopicSample, number: int, lake: Lake
) -> tuple[FeedProposal, WriterSchemas]:
    """Returns the feed of the schema with this number, or of its subject's newest one, and the registry's schemas.

    The request's format and the suffix of its file are not known yet. Of Protobuf, most records' message is the feed's.
    Raises UsageError for a file that is there, Failed for a schema that makes no columns, RegistryUnavailable and
    NotAuthorized.
    """
    writers = KeptSchemas(lake, request.schema_file.name, client_of(request.registry), keep=False)
    request, schema = find_written(request, number)
    file = request.schema_file.with_suffix(_SUFFIXES[request.format])
    if file.exists():
        raise UsageError(f"{file} is there already", remedy="give the new feed another name: sluice init NAME")
    names, messages = MessageNames(request.format, WireFormat.CONFLUENT, writers), Counter[str]()
    for batch in sample.batches:
        records = names.read(batch.select(SCHEMA.names))
        messages.update(name for code in records.codes.tolist() if code > 0 and (name := records.names[code]))
    message = max(messages, key=messages.__getitem__) if messages and request.format == "protobuf" else ""
    _, reader = pull_schema(replace(request, schema_file=file, message=message), schema)
    why = f"by subject {schema.subject}, version {schema.version}" if schema.subject else f"by schema {number}"
    if len(messages) > 1:
        why += f"; values are of {len(messages)} messages, to be split by message"
    proposal = propose_registered(sample.records, reader, why, read_key_fields(request))
    return replace(proposal, schema_file=f"{file.parent.name}/{file.name}", message=message), writers
