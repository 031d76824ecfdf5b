"""Converts Protobuf records with the format, and reads them with Google's library; a registry in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from sluice.pipelines.records.protobuf.format import ProtobufFormat
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader, from_file
from sluice.pipelines.records.protobuf.schema import read_files
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from tests.pipelines.records.json.rows import FIRST, by_offset, convert_chunk, make_chunk, with_headers
from tests.pipelines.records.protobuf import wild

NOWHERE = Path("/nowhere")


class Schemas:
    """`WriterSchemas` from a mapping of `.proto` texts. `requests` has the ids that were looked up."""

    def __init__(self, schemas: Mapping[Any, str]) -> None:
        self._schemas, self.requests = schemas, list[Named]()

    def texts(self, id: Named) -> tuple[str, ...] | None:
        self.requests.append(id)
        return from_file(self._schemas[id], NOWHERE, "") if id in self._schemas else None


def make_reader(text: str, message: str = "", wire: WireFormat = WireFormat.BARE) -> ProtobufReader:
    """Return a reader of a `.proto` text, in proto3 unless it names another syntax."""
    return ProtobufReader(from_file(add_syntax(text), NOWHERE, message), wire)


def add_syntax(text: str) -> str:
    return text if text.lstrip().startswith(("syntax", "edition", "{")) else f'syntax = "proto3";\n{text}'


@lru_cache(64)
def make_message_class(text: str) -> Any:
    """Return Google's class for the message that a compiled schema names."""
    files, name = read_files(text)
    pool = DescriptorPool()
    for file in files.file:
        pool.Add(file)
    last = pool.FindFileByName(files.file[-1].name)
    name = name or next(iter(last.message_types_by_name.values())).full_name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def convert(
    reader: ProtobufReader,
    values: Sequence[bytes | None],
    schemas: Schemas | None = None,
    headers: Sequence[Sequence[tuple[str, bytes]]] | None = None,
    **options: bool,
) -> tuple[pa.Table, pa.Table | None, list[Any]]:
    """Return the landed rows, the quarantined rows and the drift of one chunk. Each record is in one of the two."""
    records = make_chunk(values) if headers is None else with_headers(make_chunk(values), headers)
    return convert_chunk(ProtobufFormat(reader, schemas, **options), records)


def convert_rows(reader: ProtobufReader, values: Sequence[bytes | None], **options: Any) -> list[dict[str, Any] | None]:
    """Return the row of each value, with the columns of the message alone; None for a quarantined one."""
    landed, _, _ = convert(reader, values, **options)
    rows, names = by_offset(landed, "kafka_offset"), [f.name for f in reader.columns.fields]
    return [{n: rows[FIRST + i][n] for n in names} if FIRST + i in rows else None for i in range(len(values))]


class Refused(Exception):
    """A record that may not land."""


def read_by_google(kind: Any, data: bytes) -> dict[str, Any] | None:
    """Return the row that Google's library reads from a record, or None if the record must be in quarantine."""
    try:
        message = kind.FromString(data)
        if not message.IsInitialized():
            return None
        return _convert_struct(message)
    except (DecodeError, Refused, UnicodeDecodeError, json_format.SerializeToJsonError):
        return None


def _convert_struct(message: Any) -> dict[str, Any]:
    return {f.name: _convert_field(message, f) for f in sorted(message.DESCRIPTOR.fields, key=lambda f: f.index)}


def _convert_field(message: Any, f: Any) -> Any:
    value = getattr(message, f.name)
    if f.message_type is not None and f.message_type.GetOptions().map_entry:
        kind = f.message_type.fields_by_name["value"]
        return sorted((_convert_key(k), _convert_value(value[k], kind)) for k in value)
    if f.is_repeated:
        return [_convert_value(v, f) for v in value]
    if f.has_presence and not message.HasField(f.name):
        return None
    return _convert_value(value, f)


def _convert_key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _convert_value(value: Any, f: Any) -> Any:
    if f.enum_type is not None:
        if value not in f.enum_type.values_by_number:
            raise Refused
        return next(v.name for v in f.enum_type.values if v.number == value)
    if f.type == f.TYPE_STRING and isinstance(value, bytes):
        raise Refused  # proto2 allows strings that are not UTF-8
    if f.message_type is None:
        return repr(value) if isinstance(value, float) else value
    match f.message_type.full_name:
        case "google.protobuf.Timestamp":
            if not (-62135596800 <= value.seconds <= 253402300799 and 0 <= value.nanos <= 999_999_999):
                raise Refused
            return value.seconds * 1_000_000 + value.nanos // 1000
        case "google.protobuf.Struct" | "google.protobuf.Value" | "google.protobuf.ListValue":
            try:
                return json.dumps(json_format.MessageToDict(value), sort_keys=True, allow_nan=False)
            except ValueError:
                raise Refused from None
        case name if name.startswith("google.protobuf.") and name.endswith("Value"):
            return _convert_value(value.value, f.message_type.fields[0])
    return _convert_struct(value) if f.message_type.fields else True


def normalize(value: Any, type_: Any) -> Any:
    """Return a landed value in the form of `read_by_google`: floats as text, maps sorted, documents as sorted JSON."""
    if value is None:
        return None
    match str(type_.kind):
        case "struct":
            return {f.name: normalize(value[f.name], f.type) for f in type_.fields}
        case "list":
            return [normalize(v, type_.fields[0].type) for v in value]
        case "map":
            return sorted((k, normalize(v, type_.fields[0].type)) for k, v in value)
        case "json":
            return json.dumps(json.loads(value), sort_keys=True)
        case "float32" | "float64":
            return repr(value)
    return value


def make_wild_message(rnd: Random) -> tuple[ProtobufReader, Any]:
    """Return the reader of a random message with fields, and Google's class for it."""
    while True:
        text = wild.make_schema(rnd)
        if (kind := make_message_class(text)).DESCRIPTOR.fields:
            return ProtobufReader((text,), WireFormat.BARE), kind
