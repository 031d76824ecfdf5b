"""A compiled schema as a text, and one of its messages as frozen types. Light: no Arrow, no compiled loops.

Descriptors are read by Google's own library, which resolves presence, packing, groups and closed enums for proto2,
proto3 and editions. A schema is input from outside: the message's nodes are bounded, and one that holds itself is
refused by name, since no table has room for it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sluice.pipelines.records.protobuf.compiling import MOST_COMPILED, make_descriptor_set
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.util.extras import name_missing
from sluice.pipelines.util.units import sanitize

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

MOST_NODES = 16_384
"""Fields of a message with all that is nested, each counted as often as it is used."""

MOST_DEPTH = 64
"""Messages inside one another."""


class ProtoKind(StrEnum):
    """The types of fields, by the words of `.proto` files."""

    DOUBLE = "double"
    FLOAT = "float"
    INT32 = "int32"
    INT64 = "int64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    SINT32 = "sint32"
    SINT64 = "sint64"
    FIXED32 = "fixed32"
    FIXED64 = "fixed64"
    SFIXED32 = "sfixed32"
    SFIXED64 = "sfixed64"
    BOOL = "bool"
    STRING = "string"
    BYTES = "bytes"
    ENUM = "enum"
    MESSAGE = "message"


class Meaning(StrEnum):
    """The role of a message besides a struct."""

    STRUCT = "struct"
    ENTRY = "entry"
    """Of a map: its key and its value."""
    EMPTY = "empty"
    """Without fields."""
    TIME = "time"
    """google.protobuf.Timestamp."""
    WRAPPER = "wrapper"
    """google.protobuf.StringValue and its like: a value that may be missing."""
    JSON = "json"
    """google.protobuf.Struct, Value, ListValue."""


_MEANINGS = {
    "google.protobuf.Timestamp": Meaning.TIME,
    **dict.fromkeys(
        (
            f"google.protobuf.{kind}Value"
            for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
        ),
        Meaning.WRAPPER,
    ),
    **dict.fromkeys((f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")), Meaning.JSON),
}


@dataclass(frozen=True)
class ProtoField:
    """A field.

    `presence` distinguishes a missing value from the default. `group` is whether a message is
    between tags instead of behind its length. `oneof` is empty unless others exclude it. `symbols` are an enum's
    numbers and names, ascending, and `first` is the number that it names first. `packed`: a list's numbers are written
    one after the other behind one tag.
    """

    name: str
    number: int
    kind: ProtoKind
    repeated: bool = False
    presence: bool = False
    required: bool = False
    group: bool = False
    oneof: str = ""
    symbols: tuple[tuple[int, str], ...] = ()
    first: int = 0
    message: ProtoMessage | None = None
    packed: bool = field(default=False, repr=False)  # readers read both, and their fingerprints are of this repr

    @property
    def entry(self) -> ProtoMessage | None:
        """The entries of a map; None for any other field."""
        return self.message if self.message and self.message.meaning is Meaning.ENTRY else None


@dataclass(frozen=True)
class ProtoMessage:
    """A message. `weight` counts its fields with all that is nested."""

    name: str
    meaning: Meaning
    fields: tuple[ProtoField, ...]
    weight: int = 1


def write_text(files: FileDescriptorSet, message: str = "") -> str:
    """A compiled schema as a text."""
    document = {"files": base64.b64encode(files.SerializeToString(deterministic=True)).decode()}
    return json.dumps(document | ({"message": message} if message else {}))


def is_compiled(text: str) -> bool:
    """Returns whether a text is a compiled schema, judged by its beginning. No `.proto` file begins so."""
    return text.lstrip().startswith("{")


def read_files(text: str) -> tuple[FileDescriptorSet, str]:
    """The descriptors in a compiled schema's text, and the name of its message (empty: none is named).

    Raises UnusableSchema.
    """
    try:
        document = json.loads(text)
        data, message = base64.b64decode(document["files"], validate=True), document.get("message", "")
        if len(data) > MOST_COMPILED or not isinstance(message, str):
            raise ValueError("too large")
        files = make_descriptor_set(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise UnusableSchema("", "is neither a .proto file nor a compiled schema") from None
    if not files.file:
        raise UnusableSchema("", "is a compiled schema without files")
    return files, message


@lru_cache(64)
def parse_descriptor(text: str) -> tuple[Any, str]:
    """The descriptor of a compiled schema's last file, and the name of its message. Raises UnusableSchema."""
    with name_missing():
        from google.protobuf.descriptor_pool import DescriptorPool
    files, message = read_files(text)
    pool = DescriptorPool()
    try:
        for file in files.file:
            pool.Add(file)
        return pool.FindFileByName(files.file[-1].name), message
    except (TypeError, KeyError, ValueError):
        raise UnusableSchema("", "has descriptors that contradict each other") from None


def read_message(text: str) -> ProtoMessage:
    """The message of a compiled schema. Raises UnusableSchema where none is named and the file has several."""
    file, name = parse_descriptor(text)
    return _Builder().message(_find_named(file, name), "")


def _find_named(file: Any, name: str) -> Any:
    top = list(file.message_types_by_name.values())
    if not top:
        raise UnusableSchema("", "has no message")
    if not name:
        if len(top) > 1:
            raise UnusableSchema("", f"has several messages: name one of them by `message:` ({_format_names(top)})")
        return top[0]
    for d in list_messages(file):
        if name in (d.full_name, d.full_name.removeprefix(f"{file.package}.")):
            return d
    raise UnusableSchema("", f"has no message {sanitize(name)}, which `message:` names; it has {_format_names(top)}")


def _format_names(messages: Sequence[Any]) -> str:
    return ", ".join(sorted(m.full_name for m in messages)[:10])


def find_message(file: Any, path: tuple[int, ...]) -> Any:
    """The descriptor of the message at these indexes of a file and its messages, or None.

    Source: Confluent's wire format for Protobuf.
    """
    here, message = list(file.message_types_by_name.values()), None
    for index in path:
        if not 0 <= index < len(here):
            return None
        message = here[index]
        here = list(message.nested_types)
    return message


def list_messages(file: Any) -> list[Any]:
    """The descriptors of all messages of a file, also of those inside others."""
    messages = list(file.message_types_by_name.values())
    for d in messages:
        messages += d.nested_types
    return messages


def find_numbered_message(file: Any, number: int) -> Any:
    """The descriptor of the message with this number in AWS Glue, in the order of full names, or None.

    Source: `MessageIndexFinder` of aws-glue-schema-registry.
    """
    messages = sorted(list_messages(file), key=lambda d: str(d.full_name))
    return messages[number] if number < len(messages) else None


def find_path(file: Any, name: str) -> tuple[int, ...] | None:
    """The indexes by which `find_message` finds the message of that full name in a file; None where it has none."""
    queue: list[tuple[tuple[int, ...], Any]] = [((n,), d) for n, d in enumerate(file.message_types_by_name.values())]
    for path, d in queue:
        if d.full_name == name:
            return path
        queue += [((*path, n), inside) for n, inside in enumerate(d.nested_types)]
    return None


class _Builder:
    """Makes frozen types of descriptors."""

    def __init__(self) -> None:
        self._known: dict[str, ProtoMessage] = {}
        self._open: set[str] = set()

    def message(self, d: Any, path: str) -> ProtoMessage:
        if d.full_name in self._open:
            raise UnusableSchema(path, f"{d.full_name} holds itself, which no table has room for")
        if d.full_name not in self._known:
            if len(self._open) > MOST_DEPTH:
                raise UnusableSchema(path, f"has more than {MOST_DEPTH} messages inside one another")
            self._open.add(d.full_name)
            self._known[d.full_name] = self._make_message(d, path)
            self._open.discard(d.full_name)
        return self._known[d.full_name]

    def _make_message(self, d: Any, path: str) -> ProtoMessage:
        meaning = _MEANINGS.get(d.full_name, Meaning.STRUCT)
        if d.GetOptions().map_entry:
            meaning = Meaning.ENTRY
        elif meaning is Meaning.STRUCT and not d.fields:
            meaning = Meaning.EMPTY
        if meaning is Meaning.JSON:
            return ProtoMessage(d.full_name, meaning, ())
        own = sorted(d.fields, key=lambda f: f.index)
        fields = tuple(self._make_field(f, f"{path}.{f.name}" if path else f.name) for f in own)
        weight = 1 + sum(f.message.weight if f.message else 1 for f in fields)
        if weight > MOST_NODES:
            raise UnusableSchema(path, f"has more than {MOST_NODES:,} fields with all that is nested")
        return ProtoMessage(d.full_name, meaning, fields, weight)

    def _make_field(self, f: Any, path: str) -> ProtoField:
        kind, group = get_kind(f)
        repeated = is_repeated(f)
        oneof = f.containing_oneof
        return ProtoField(
            f.name,
            f.number,
            kind,
            repeated,
            presence=not repeated and f.has_presence,
            required=bool(f.is_required),
            group=group,
            oneof=oneof.name if oneof is not None and len(oneof.fields) > 1 else "",
            symbols=_list_symbols(f.enum_type) if kind is ProtoKind.ENUM else (),
            first=f.enum_type.values[0].number if kind is ProtoKind.ENUM else 0,
            message=self.message(f.message_type, path) if kind is ProtoKind.MESSAGE else None,
            packed=repeated and bool(f.is_packed),
        )


def is_repeated(f: Any) -> bool:
    """Returns whether a described field is a list or a map."""
    return bool(f.is_repeated)


def get_kind(f: Any) -> tuple[ProtoKind, bool]:
    """The type of a described field, and whether it is a group."""
    names = {
        f.TYPE_DOUBLE: ProtoKind.DOUBLE, f.TYPE_FLOAT: ProtoKind.FLOAT, f.TYPE_INT64: ProtoKind.INT64,
        f.TYPE_UINT64: ProtoKind.UINT64, f.TYPE_INT32: ProtoKind.INT32, f.TYPE_FIXED64: ProtoKind.FIXED64,
        f.TYPE_FIXED32: ProtoKind.FIXED32, f.TYPE_BOOL: ProtoKind.BOOL, f.TYPE_STRING: ProtoKind.STRING,
        f.TYPE_GROUP: ProtoKind.MESSAGE, f.TYPE_MESSAGE: ProtoKind.MESSAGE, f.TYPE_BYTES: ProtoKind.BYTES,
        f.TYPE_UINT32: ProtoKind.UINT32, f.TYPE_ENUM: ProtoKind.ENUM, f.TYPE_SFIXED32: ProtoKind.SFIXED32,
        f.TYPE_SFIXED64: ProtoKind.SFIXED64, f.TYPE_SINT32: ProtoKind.SINT32, f.TYPE_SINT64: ProtoKind.SINT64,
    }  # fmt: skip
    return names[f.type], f.type == f.TYPE_GROUP


def _list_symbols(d: Any) -> tuple[tuple[int, str], ...]:
    """An enum's numbers with their first names, ascending."""
    symbols: dict[int, str] = {}
    for value in d.values:
        symbols.setdefault(value.number, value.name)
    return tuple(sorted(symbols.items()))
