"""The feed's own message, by which it reads records of every writer, and the columns that follow from it. Light.

docs/formats.md has the table of types. A field whose presence is known may be null; one without presence has its
default value where it is missing, and is `not null`, as lists and maps are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.protobuf.compiling import WELL_KNOWN, compile_schema, load_imports
from sluice.pipelines.records.protobuf.schema import (
    Meaning,
    ProtoField,
    ProtoKind,
    ProtoMessage,
    find_path,
    is_compiled,
    parse_descriptor,
    read_files,
    read_message,
    write_text,
)
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import RegisteredSchema, WireFormat, reference, varint
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, parse_schema


@dataclass(frozen=True)
class ProtobufReader:
    """How records are read: the text of the feed's compiled schema, which names the message, and the wire format.

    Raises UnusableSchema, when it is made, for a schema that no table has room for, and SchemaError for one that makes
    no columns.
    """

    texts: tuple[str, ...]
    wire: WireFormat
    format = "protobuf"
    expectations: ClassVar[tuple[Expectation, ...]] = ()
    evolves = False

    def __post_init__(self) -> None:
        _ = self.columns

    @cached_property
    def message(self) -> ProtoMessage:
        """The feed's message."""
        return read_message(self.texts[-1])

    @cached_property
    def columns(self) -> Schema:
        """The columns of rows."""
        if not self.message.fields:
            raise UnusableSchema(self.message.name, "is a message without fields, which makes no columns")
        return parse_schema({f.name: make_column(f).text for f in self.message.fields})

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits. Readers that make the same rows of the same records have the same ones."""
        identity = repr((self.message, self.columns.texts(), str(self.wire)))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def asks(self) -> bool:
        """True if records name their writers' schemas."""
        return self.wire is not WireFormat.BARE

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The message's indexes in its file and in messages of it."""
        file, _ = parse_descriptor(self.texts[-1])
        return find_path(file, self.message.name) or ()

    @property
    def naming(self) -> bytes:
        """The bytes behind a schema's number, which name the record's message."""
        if self.wire in (WireFormat.APICURIO, WireFormat.APICURIO3):
            return reference(self.message.name)
        if self.wire is not WireFormat.CONFLUENT:
            return b""
        return b"\0" if self.path == (0,) else b"".join(map(varint, (2 * len(self.path), *(2 * n for n in self.path))))

    def is_of(self, registered: RegisteredSchema) -> bool:
        """Returns whether this schema of a registry has the feed's message: the same rows, named alike.

        Raises UnusableSchema.
        """
        files, _ = read_files(compile_registered(registered).texts[-1])
        other = ProtobufReader((write_text(files, self.message.name),), self.wire)
        return (self.fingerprint, self.path) == (other.fingerprint, other.path)


def from_file(text: str, folder: Path, message: str) -> tuple[str, ...]:
    """The texts of a reader: from a `.proto` file, which may import others in its folder, or from a compiled schema.

    `message` names the one that the feed reads (empty: the file's only one). Raises UnusableSchema.
    """
    if is_compiled(text):
        files, own = read_files(text)
        return (write_text(files, message or own),)
    imported = load_imports(text, folder)
    return (write_text(compile_schema((*imported.values(), text), tuple(imported)), message),)


def compile_registered(registered: RegisteredSchema) -> RegisteredSchema:
    """A registry's schema, compiled, as the lake keeps it. Raises UnusableSchema."""
    if is_compiled(registered.texts[-1]):
        return registered
    return RegisteredSchema(
        registered.id,
        registered.type,
        (write_text(compile_schema(registered.texts, registered.names)),),
        registered.subject,
        registered.version,
    )


def as_file(registered: RegisteredSchema) -> str:
    """A registry's schema as one file: its text, where that is all there is to it, else compiled."""
    files = compile_schema(registered.texts, registered.names)
    plain = WELL_KNOWN.issuperset(registered.names) and "{" in registered.texts[-1]
    return registered.texts[-1].rstrip() if plain else write_text(files)


def make_column(f: ProtoField) -> Field:
    """The column, or the member of a struct, that a field makes."""
    entry = f.entry
    if entry is not None:
        value = entry.fields[1]
        return Field(f.name, Type(Kind.MAP, fields=(Field("", _get_type(value), True),)), True)
    if f.repeated:
        return Field(f.name, Type(Kind.LIST, fields=(Field("", _get_type(f), True),)), True)
    return Field(f.name, _get_type(f), f.required or not f.presence)


_KINDS = {
    ProtoKind.DOUBLE: Kind.FLOAT64,
    ProtoKind.FLOAT: Kind.FLOAT32,
    **dict.fromkeys((ProtoKind.INT32, ProtoKind.SINT32, ProtoKind.SFIXED32), Kind.INT32),
    **dict.fromkeys((ProtoKind.INT64, ProtoKind.SINT64, ProtoKind.SFIXED64), Kind.INT64),
    **dict.fromkeys((ProtoKind.UINT32, ProtoKind.FIXED32), Kind.UINT32),
    **dict.fromkeys((ProtoKind.UINT64, ProtoKind.FIXED64), Kind.UINT64),
    ProtoKind.BOOL: Kind.BOOL,
    ProtoKind.STRING: Kind.STRING,
    ProtoKind.BYTES: Kind.BINARY,
    ProtoKind.ENUM: Kind.STRING,
}


def _get_type(f: ProtoField) -> Type:
    """The type of one value of a field."""
    if f.message is None:
        return Type(_KINDS[f.kind])
    match f.message.meaning:
        case Meaning.TIME:
            return Type(Kind.TIMESTAMP, unit="us")
        case Meaning.JSON:
            return Type(Kind.JSON)
        case Meaning.EMPTY:
            return Type(Kind.BOOL)
        case Meaning.WRAPPER:
            return _get_type(f.message.fields[0])
    return Type(Kind.STRUCT, fields=tuple(map(make_column, f.message.fields)))
