"""The feed's own Avro schema, which reads records of every writer, and its columns. Light.

docs/formats.md has the table of types. A field that may be null is a union with null; any other is `not null`. A union
of several types lands as a struct with a member for each, of which one is not null. `merge_texts` joins several schemas
in one text: a referenced schema stands at its first use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.avro.schema import (
    AvroField,
    AvroKind,
    AvroSchemaError,
    AvroType,
    canonicalize,
    format_name,
    parse,
)
from sluice.pipelines.records.rows.wire_format import CONFLUENTS, WireFormat
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, parse_schema, path_below
from sluice.pipelines.schema.wider import MOST_DIGITS

VALUE = "value"
"""The column of a schema that is no record."""
DURATION = ("months", "days", "millis")


@dataclass(frozen=True)
class AvroReader:
    """Reads records by the texts of the feed's schema (referenced ones first) and its wire format.

    Raises AvroSchemaError, when it is made, for a schema that does not parse, and SchemaError for one that makes no
    columns.
    """

    texts: tuple[str, ...]
    wire: WireFormat
    format = "avro"
    expectations: ClassVar[tuple[Expectation, ...]] = ()

    def __post_init__(self) -> None:
        _ = self.columns

    @cached_property
    def type(self) -> AvroType:
        """The feed's schema, as a record."""
        return as_record(parse(self.texts))

    @cached_property
    def columns(self) -> Schema:
        """The columns of rows."""
        return parse_schema({f.name: _make_field(f, f.name).text for f in self.type.fields})

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits. Readers that make the same rows of the same records have the same ones."""
        identity = "\n".join((*map(canonicalize, self.texts), *map(str, self.columns.texts().items()), self.wire))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def evolves(self) -> bool:
        """True if columns may also come from fields that only writers have."""
        return self.asks and isinstance(json.loads(self.texts[-1]), dict)

    def grown(self, columns: Schema) -> AvroReader:
        """The reader with the columns that it lacks, each with null as its default."""
        own = {f.name for f in self.columns.fields}
        more = [{"name": f.name, "type": _or_null(f), "default": None} for f in columns.fields if f.name not in own]
        if not more:
            return self
        schema = json.loads(self.texts[-1])
        while isinstance(schema["type"], dict):  # a type may stand in an object of its own
            schema = schema["type"]
        return AvroReader((*self.texts[:-1], json.dumps(schema | {"fields": [*schema["fields"], *more]})), self.wire)

    @property
    def asks(self) -> bool:
        """True if records name their writers' schemas."""
        return self.wire is not WireFormat.BARE


def as_record(t: AvroType) -> AvroType:
    """The type, as a record of one field if it is none."""
    return t if t.kind is AvroKind.RECORD else wrap_in_record(t)


def wrap_in_record(t: AvroType) -> AvroType:
    """A record without a name, whose one field is of the type."""
    return AvroType(AvroKind.RECORD, fields=(AvroField(VALUE, t),), weight=t.weight + 1, depth=t.depth + 1)


def has_no_size(t: AvroType, wire: WireFormat) -> bool:
    """Returns whether a whole value of this type is bytes without their size: Confluent's serializers do not encode
    bytes, decimals included. A union with bytes is encoded."""
    return t.kind is AvroKind.BYTES and wire in CONFLUENTS


def get_nullable(t: AvroType) -> AvroType | None:
    """Returns the other type of a union of null and one other; else None."""
    others = [b for b in t.inner if b.kind is not AvroKind.NULL]
    return others[0] if t.kind is AvroKind.UNION and len(others) == 1 else None


def list_branches(t: AvroType) -> Sequence[AvroType]:
    """The branches of a union that are not null: the members of its struct, in order."""
    return [b for b in t.inner if b.kind is not AvroKind.NULL]


def is_addable(t: AvroType) -> bool:
    """Returns whether a field of this type may become a column without a schema of the feed (`AvroReader.grown`)."""
    match t.kind:
        case AvroKind.UNION:
            inside = get_nullable(t)
            return inside is not None and is_addable(inside)
        case AvroKind.ARRAY | AvroKind.MAP:
            return is_addable(t.inner[0])
        case AvroKind.NULL | AvroKind.RECORD | AvroKind.ENUM | AvroKind.FIXED | AvroKind.AGAIN:
            return False
    # The type of a column of times does not say local or not: only such a schema reads local ones.
    return t.logical != "decimal" and not t.logical.startswith("local-")


def _or_null(f: Field) -> list[Any]:
    return ["null", _spell_type(f.type)]


def _spell_type(t: Type) -> Any:
    """The Avro type that makes such a column, of those that are `is_addable`."""
    match t.kind:
        case Kind.DATE:
            return {"type": "int", "logicalType": "date"}
        case Kind.TIMESTAMP:
            return {"type": "long", "logicalType": f"timestamp-{_NAMES[t.unit]}"}
        case Kind.LIST | Kind.MAP:
            (inside,) = t.fields
            type_, items = ("array", "items") if t.kind is Kind.LIST else ("map", "values")
            return {"type": type_, items: _or_null(inside)}  # another writer may allow null
    return next(
        str(kind) for kind, column_kind in _KINDS.items() if column_kind is t.kind and kind is not AvroKind.FIXED
    )


def get_column_type(t: AvroType) -> Type:
    """The type of a column for it. Raises AvroSchemaError where no column can hold it."""
    return _get_type(t, "")[0]


def _make_field(f: AvroField, path: str) -> Field:
    kind, required = _get_type(f.type, path)
    return Field(f.name, kind, required)


def _get_type(t: AvroType, path: str) -> tuple[Type, bool]:
    """The type of a column, and whether it is always there."""
    match t.kind:
        case AvroKind.UNION:
            return _union(t, path)
        case AvroKind.NULL:
            return Type(Kind.STRING), False
        case AvroKind.AGAIN:
            raise AvroSchemaError(path, f"holds itself: {format_name(t.name)} is recursive, and a table is not")
        case AvroKind.RECORD:
            if not t.fields:
                raise AvroSchemaError(path, "is a record without fields, which no column can be")
            return Type(Kind.STRUCT, fields=tuple(_make_field(f, f"{path}.{f.name}") for f in t.fields)), True
        case AvroKind.ARRAY | AvroKind.MAP:
            kind = Kind.LIST if t.kind is AvroKind.ARRAY else Kind.MAP
            inside, required = _get_type(t.inner[0], path_below(path, kind, ""))
            return Type(kind, fields=(Field("", inside, required),)), True
    return _get_scalar(t, path), True


def _union(t: AvroType, path: str) -> tuple[Type, bool]:
    others = list_branches(t)
    required = len(others) == len(t.inner)
    if not others:
        return Type(Kind.STRING), False
    if len(others) == 1:
        return _get_type(others[0], path)[0], required
    members = tuple(Field(b.short, _get_type(b, f"{path}.{b.short}")[0]) for b in others)
    if len({m.name.casefold() for m in members}) < len(members):
        raise AvroSchemaError(path, "is a union of types whose names differ by their namespace or case only")
    return Type(Kind.STRUCT, fields=members), required


_KINDS = {
    AvroKind.BOOLEAN: Kind.BOOL,
    AvroKind.INT: Kind.INT32,
    AvroKind.LONG: Kind.INT64,
    AvroKind.FLOAT: Kind.FLOAT32,
    AvroKind.DOUBLE: Kind.FLOAT64,
    AvroKind.BYTES: Kind.BINARY,
    AvroKind.STRING: Kind.STRING,
    AvroKind.FIXED: Kind.BINARY,
    AvroKind.ENUM: Kind.STRING,
}
_UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}
_NAMES = {unit: name for name, unit in _UNITS.items()}


def _get_scalar(t: AvroType, path: str) -> Type:
    if t.logical == "decimal":
        if t.precision > MOST_DIGITS:
            raise AvroSchemaError(path, f"is a decimal of {t.precision} digits; a column has at most {MOST_DIGITS}")
        return Type(Kind.DECIMAL, t.precision, t.scale)
    if t.logical == "date":
        return Type(Kind.DATE)
    if t.logical == "duration":
        return Type(Kind.STRUCT, fields=tuple(Field(name, Type(Kind.UINT32), True) for name in DURATION))
    if "timestamp" in t.logical:
        return Type(Kind.TIMESTAMP, unit=_UNITS[t.logical.rpartition("-")[2]])
    return Type(_KINDS[t.kind])


_NAMED = ("record", "error", "enum", "fixed")


def merge_texts(texts: Sequence[str]) -> str:
    """Returns the last of the texts as readable JSON, with the others in it. They are parsed (`schema.parse`)."""
    types: dict[str, Any] = {}
    for text in texts[:-1]:
        _collect(json.loads(text), "", types)
    return json.dumps(_inline_types(json.loads(texts[-1]), "", types), indent=2, ensure_ascii=False)


def _qualify(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _get_full_name(node: Any, space: str) -> str:
    """The full name of a named type. An empty `namespace` is none, also inside of another type's."""
    namespace = node.get("namespace")
    return _qualify(node["name"], namespace if isinstance(namespace, str) else space)


def _get_namespace(node: Any, space: str) -> str:
    """The namespace inside of a named type."""
    return _get_full_name(node, space).rpartition(".")[0]


def _collect(node: Any, space: str, types: dict[str, Any]) -> None:
    """Every named type of a schema that others may refer to, by its full name."""
    if isinstance(node, list):
        for branch in node:
            _collect(branch, space, types)
    elif isinstance(node, dict):
        if node.get("type") in _NAMED:
            types[_get_full_name(node, space)] = (node, space)
            space = _get_namespace(node, space)
        for inside in (node.get("type"), node.get("items"), node.get("values"), *node.get("fields", ())):
            _collect(inside, space, types)


def _inline_types(node: Any, space: str, types: dict[str, Any]) -> Any:
    """Returns the schema with each known name's first use replaced by its type. Used names have None from then on."""
    if isinstance(node, str):
        name = next((name for name in (_qualify(node, space), node) if name in types), "")
        if named_type := types.get(name):
            definition, around = named_type
            types[name] = None
            return _inline_types(
                definition | {"name": name.rpartition(".")[2], "namespace": name.rpartition(".")[0]}, around, types
            )
        return _qualify(node, space) if "." in node else node
    if isinstance(node, list):
        return [_inline_types(branch, space, types) for branch in node]
    if not isinstance(node, dict):
        return node
    out = dict(node)
    if node.get("type") in _NAMED:
        types[_get_full_name(node, space)] = None
        space = _get_namespace(node, space)
    else:
        out["type"] = _inline_types(node.get("type"), space, types)
    for key in ("items", "values"):
        if key in node:
            out[key] = _inline_types(node[key], space, types)
    if "fields" in node:
        out["fields"] = [_inline_types(f, space, types) for f in node["fields"]]
    return out
