"""A feed for a topic whose values name schemas of a registry, proposed from a sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

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
from sluice.resources.registry import client_of
from sluice.resources.registry.confluent import file_of, find_written, read_key_fields, reader_of

_SUFFIXES = {"avro": ".avsc", "json_schema": ".json", "protobuf": ".proto"}


def propose_by_registry(
    request: SchemaAsked, sample: TopicSample, number: int, lake: Lake
) -> tuple[FeedProposal, dict[Path, str], WriterSchemas]:
    """Returns the proposed feed, the texts of its schema files, and the registry's schemas.

    The schema is the newest one of the subject, or that of this number. If values are of several messages, each has an
    output with the newest schema that its values name.

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
    files = dict[Path, str]()
    if len(frequent) <= 1:
        message = next(iter(messages), "")
        output, columns = _make_output(request, schema, message, total, files)
        title, key = identify_changes(sample.records, columns, read_key_fields(request))
        return FeedProposal(total, title, (output,), key=key), files, writers
    outputs = list[OutputProposal]()
    for message in frequent:
        if (own := client.schema(newest[message])) is not None:
            name = name_output(message, {o.name for o in outputs})
            outputs.append(_make_output(request, own, message, messages[message], files, name)[0])
    rest = {m: n for m, n in messages.items() if m not in frequent}
    rest |= {"": total - messages.total()} if total > messages.total() else {}
    return FeedProposal(total, "", tuple(outputs), {"message": "true"}, rest), files, writers


def _make_output(
    request: SchemaAsked, schema: RegisteredSchema, message: str, records: int, files: dict[Path, str], name: str = ""
) -> tuple[OutputProposal, Schema]:
    """Returns the output of the records of a message by this schema, and its columns. Adds the text to `files`."""
    file = request.schema_file.with_name("_".join(filter(None, (request.schema_file.name, name))))
    file = file.with_suffix(_SUFFIXES[request.format])
    if file.exists():
        raise UsageError(f"{file} is there already", remedy="give the new feed another name: sluice init NAME")
    own = message if request.format == "protobuf" else ""
    of_message = replace(request, schema_file=file, message=own)
    reader, files[file] = reader_of(schema, of_message), f"{file_of(schema, of_message)}\n"
    why = f"by subject {schema.subject}, version {schema.version}" if schema.subject else f"by schema {schema.id}"
    columns = tuple(ColumnProposal(f.name, f.text, records, "") for f in reader.columns.fields)
    values, path = (message,) if name else (), f"{file.parent.name}/{file.name}"
    format_ = Proposed(request.format, why)
    return OutputProposal(name, values, records, format_, columns, (), (), path, own), reader.columns
