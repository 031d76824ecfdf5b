"""A feed for a topic whose values name schemas of a registry, proposed from a sample. Writes each `schema_file`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.load import SchemaAsked
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.operating.discriminators import LEAST_RECORDS, LEAST_SHARE
from sluice.pipelines.operating.propose_feed import (
    ColumnProposal,
    FeedProposal,
    OutputProposal,
    Proposed,
    TopicSample,
    identify_changes,
    name_output,
)
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.message_names import MessageNames
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.rows.wire_format import RegisteredSchema, WireFormat
from sluice.pipelines.schema.schema import Schema
from sluice.resources.registry.confluent import client_of, find_written, pull_schema, read_key_fields

_SUFFIXES = {"avro": ".avsc", "json_schema": ".json", "protobuf": ".proto"}


def propose_by_registry(
    request: SchemaAsked, sample: TopicSample, number: int, lake: Lake
) -> tuple[FeedProposal, WriterSchemas]:
    """Returns the feed of the schema with this number, or of its subject's newest one, and the registry's schemas. If
    values are of several messages, each has an output with the newest schema that its values name.

    The request's format and the suffix of its file are not known yet. Raises UsageError for a file that is there,
    Failed for a schema that makes no columns, RegistryUnavailable and NotAuthorized.
    """
    client, total = client_of(request.registry), len(sample.records)
    writers = KeptSchemas(lake, request.schema_file.name, client, keep=False)
    request, schema = find_written(request, number)
    names = MessageNames(request.format, WireFormat.CONFLUENT, writers)
    messages, newest = Counter[str](), dict[str, int]()
    for batch in sample.batches:
        read, values = names.read(batch.select(SCHEMA.names)), batch.column("value").to_pylist()
        for code, value in zip(read.codes.tolist(), values, strict=True):
            if code > 0 and (message := read.names[code]):
                messages[message] += 1
                newest[message] = max(newest.get(message, 0), int.from_bytes(value[1:5]))
    frequent = [m for m, n in messages.most_common() if n >= max(LEAST_RECORDS, LEAST_SHARE * total)]
    if len(frequent) <= 1:
        message = next(iter(messages), "")
        output, columns = _write_output(request, schema, message, total)
        title, key = identify_changes(sample.records, columns, read_key_fields(request))
        return FeedProposal(total, title, (output,), key=key), writers
    outputs = list[OutputProposal]()
    for message in frequent:
        if (own := client.schema(newest[message])) is not None:
            name = name_output(message, {o.name for o in outputs})
            outputs.append(_write_output(request, own, message, messages[message], name)[0])
    rest = {m: n for m, n in messages.items() if m not in frequent}
    rest |= {"": total - messages.total()} if total > messages.total() else {}
    return FeedProposal(total, "", tuple(outputs), {"message": "true"}, rest), writers


def _write_output(
    request: SchemaAsked, schema: RegisteredSchema, message: str, records: int, name: str = ""
) -> tuple[OutputProposal, Schema]:
    """Returns the output of the records of a message by this schema, which is written, and its columns."""
    file = request.schema_file.with_name("_".join(filter(None, (request.schema_file.name, name))))
    file = file.with_suffix(_SUFFIXES[request.format])
    if file.exists():
        raise UsageError(f"{file} is there already", remedy="give the new feed another name: sluice init NAME")
    own = message if request.format == "protobuf" else ""
    _, reader = pull_schema(replace(request, schema_file=file, message=own), schema)
    why = f"by subject {schema.subject}, version {schema.version}" if schema.subject else f"by schema {schema.id}"
    columns = tuple(ColumnProposal(f.name, f.text, records, "") for f in reader.columns.fields)
    values, path = (message,) if name else (), f"{file.parent.name}/{file.name}"
    format_ = Proposed(request.format, why)
    return OutputProposal(name, values, records, format_, columns, (), (), path, own), reader.columns
