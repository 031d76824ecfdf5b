"""Avro schemas (specification 1.12), parsed from their JSON into frozen types. Light: no Arrow, no compiled loops.

`parse` takes the texts of a schema and of those that it refers to. What does not parse raises AvroSchemaError, which
says where. A schema is input from outside: its text, depth, names and nodes are bounded. Within a record, its own name
is a type of kind AGAIN. Logical types that their type cannot have are passed over, as the specification asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sluice.pipelines.records.rows.value_reader import UnusableSchema

MOST_TEXT = 1 << 20
"""Bytes of a schema's text."""
MOST_DEPTH = 64
"""Records, arrays, maps and unions inside one another."""
MOST_TYPES = 16_384
"""Types of a schema, each counted as often as it is used."""
MOST_FIXED = 1 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


class AvroKind(StrEnum):
    """The types of the specification."""

    NULL = "null"
    BOOLEAN = "boolean"
    INT = "int"
    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    BYTES = "bytes"
    STRING = "string"
    FIXED = "fixed"
    ENUM = "enum"
    RECORD = "record"
    ARRAY = "array"
    MAP = "map"
    UNION = "union"
    AGAIN = "again"
    """A record that this one is part of: the schema is recursive."""


NAMED = (AvroKind.RECORD, AvroKind.ENUM, AvroKind.FIXED)
_COMPLEX = (*NAMED, AvroKind.ARRAY, AvroKind.MAP, AvroKind.UNION, AvroKind.AGAIN)
_PRIMITIVES = {k.value: k for k in AvroKind if k not in _COMPLEX}
_LOGICAL = {
    "date": AvroKind.INT,
    "time-millis": AvroKind.INT,
    "time-micros": AvroKind.LONG,
    "timestamp-millis": AvroKind.LONG,
    "timestamp-micros": AvroKind.LONG,
    "timestamp-nanos": AvroKind.LONG,
    "local-timestamp-millis": AvroKind.LONG,
    "local-timestamp-micros": AvroKind.LONG,
    "local-timestamp-nanos": AvroKind.LONG,
}


class AvroSchemaError(UnusableSchema):
    """An Avro schema that does not parse, or that no table has room for."""


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record. `default` is as JSON has it, and means something only if `has_default`."""

    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class AvroType:
    """One type.

    `name` and `aliases` of a named type are full names. `inner` is an array's element, a map's value or a union's
    branches. `size` is a fixed one's bytes. `logical` is empty unless the type can have it; `precision` and `scale` are
    a decimal's. `weight` counts the types in it, itself included.
    """

    kind: AvroKind
    name: str = ""
    aliases: tuple[str, ...] = ()
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = 0
    symbols: tuple[str, ...] = ()
    default: str | None = None
    fields: tuple[AvroField, ...] = ()
    inner: tuple[AvroType, ...] = ()
    weight: int = field(default=1, compare=False)
    depth: int = field(default=1, compare=False)

    @property
    def short(self) -> str:
        """The name without its namespace; of a type without a name, its kind."""
        return self.name.rpartition(".")[2] or str(self.kind)


def parse(texts: Sequence[str]) -> AvroType:
    """Parse the last of these texts; the others are its references, each after its own.

    Raises AvroSchemaError.
    """
    parser = _Parser()
    schema = None
    for text in texts:
        schema = parser.parse_schema(_load_json(text), "", "", 0)
    if schema is None:
        raise AvroSchemaError("", "there is no schema")
    return schema


def list_records(t: AvroType) -> dict[str, AvroType]:
    """The records of a type, by their full names."""
    records: dict[str, AvroType] = {}
    queue = [t]
    for inside in queue:
        if inside.kind is AvroKind.RECORD:
            if inside.name in records:
                continue
            records[inside.name] = inside
        queue += [*inside.inner, *(f.type for f in inside.fields)]
    return records


def canonicalize(text: str) -> str:
    """The schema without what changes nothing (documentation, white space, the order of attributes), as text."""
    return json.dumps(_without_docs(_load_json(text)), sort_keys=True, separators=(",", ":"))


def _without_docs(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {k: v if k == "default" else _without_docs(v) for k, v in node.items() if k != "doc"}
    return [_without_docs(n) for n in node] if isinstance(node, list) else node


def _load_json(text: str) -> Any:
    if len(text) > MOST_TEXT:
        raise AvroSchemaError("", f"is longer than {MOST_TEXT} characters")
    try:
        return json.loads(text)
    except RecursionError:
        raise AvroSchemaError("", "is nested too deeply") from None
    except ValueError:
        if text.strip() in _PRIMITIVES:
            return text.strip()
        raise AvroSchemaError("", "is not JSON") from None


class _Parser:
    """Parses one text after another, and keeps the named types."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._open: list[str] = []

    def parse_schema(self, node: Any, space: str, path: str, depth: int) -> AvroType:
        if depth > MOST_DEPTH:
            raise AvroSchemaError(path, f"is nested deeper than {MOST_DEPTH} types")
        if isinstance(node, str):
            return self._resolve_name(node, space, path)
        if isinstance(node, list):
            if not node:
                raise AvroSchemaError(path, "is a union of nothing")
            branches = tuple(self.parse_schema(n, space, path, depth + 1) for n in node)
            names = [b.name or str(b.kind) for b in branches]
            if AvroKind.UNION in (b.kind for b in branches) or len(set(names)) < len(names):
                raise AvroSchemaError(path, "is a union of unions, or has a type twice")
            return _make_holder(AvroKind.UNION, branches, path)
        if not isinstance(node, Mapping):
            raise AvroSchemaError(path, "is no type")
        kind = node.get("type")
        if isinstance(kind, Mapping | list):
            return self.parse_schema(kind, space, path, depth + 1)
        match kind:
            case "record" | "error":
                return self._record(node, space, path, depth)
            case "enum":
                return self._parse_enum(node, space, path)
            case "fixed":
                name, _, aliases = self._name(node, space, path)
                size = node.get("size")
                if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST_FIXED:
                    raise AvroSchemaError(path, "is fixed, without a size that can be")
                return self._keep(_read_logical(AvroType(AvroKind.FIXED, name, aliases, size=size), node), path)
            case "array" | "map":
                inside = self.parse_schema(node.get("items" if kind == "array" else "values"), space, path, depth + 1)
                return _make_holder(AvroKind(kind), (inside,), path)
            case str():
                return _read_logical(self._resolve_name(kind, space, path), node)
        raise AvroSchemaError(path, "has no type")

    def _resolve_name(self, name: str, space: str, path: str) -> AvroType:
        if name in _PRIMITIVES:
            return AvroType(_PRIMITIVES[name])
        full = name if "." in name or not space else f"{space}.{name}"
        for candidate in (full, name):
            if candidate in self._open:
                return AvroType(AvroKind.AGAIN, candidate)
            if candidate in self._named:
                return self._named[candidate]
        raise AvroSchemaError(path, f"is a type that nothing defines: {format_name(name)}")

    def _record(self, node: Mapping[str, Any], space: str, path: str, depth: int) -> AvroType:
        name, space, aliases = self._name(node, space, path)
        fields = node.get("fields")
        if not isinstance(fields, list):
            raise AvroSchemaError(path, "is a record without fields")
        self._open.append(name)
        members = tuple(self._parse_field(f, space, path, depth) for f in fields)
        self._open.pop()
        names = [f.name for f in members]
        if len(set(names)) < len(names):
            raise AvroSchemaError(path, "has a field twice")
        weight, depth = _get_size([f.type for f in members], path)
        return self._keep(AvroType(AvroKind.RECORD, name, aliases, fields=members, weight=weight, depth=depth), path)

    def _parse_field(self, node: Any, space: str, path: str, depth: int) -> AvroField:
        name = node.get("name") if isinstance(node, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise AvroSchemaError(path, "has a field without a name that Avro allows")
        where = f"{path}.{name}" if path else name
        kind = self.parse_schema(node.get("type"), space, where, depth + 1)
        return AvroField(name, kind, _read_strings(node, "aliases", where), "default" in node, node.get("default"))

    def _parse_enum(self, node: Mapping[str, Any], space: str, path: str) -> AvroType:
        name, _, aliases = self._name(node, space, path)
        symbols, default = _read_strings(node, "symbols", path), node.get("default")
        if not symbols or len(set(symbols)) < len(symbols) or not all(map(_NAME.fullmatch, symbols)):
            raise AvroSchemaError(path, "is an enum without symbols that Avro allows")
        if default is not None and default not in symbols:
            raise AvroSchemaError(path, "has a default that is none of its symbols")
        return self._keep(AvroType(AvroKind.ENUM, name, aliases, symbols=symbols, default=default), path)

    def _name(self, node: Mapping[str, Any], space: str, path: str) -> tuple[str, str, tuple[str, ...]]:
        """The full name of a type, the namespace inside of it, and its aliases as full names."""
        spelled, namespace = node.get("name"), node.get("namespace")
        if not isinstance(spelled, str) or not all(map(_NAME.fullmatch, spelled.split("."))):
            raise AvroSchemaError(path, "is a type without a name that Avro allows")
        own, _, name = spelled.rpartition(".")
        space = own or (namespace if isinstance(namespace, str) else space)
        aliases = _read_strings(node, "aliases", path)
        full = tuple(a if "." in a or not space else f"{space}.{a}" for a in aliases)
        return (f"{space}.{name}" if space else name), space, full

    def _keep(self, type_: AvroType, path: str) -> AvroType:
        if type_.name in self._named and self._named[type_.name] != type_:
            raise AvroSchemaError(path, f"defines {format_name(type_.name)} a second time, in another way")
        self._named[type_.name] = type_
        return type_


def _make_holder(kind: AvroKind, inside: tuple[AvroType, ...], path: str) -> AvroType:
    weight, depth = _get_size(inside, path)
    return AvroType(kind, inner=inside, weight=weight, depth=depth)


def _get_size(inside: Sequence[AvroType], path: str) -> tuple[int, int]:
    """Weight and depth of what holds these types, checked."""
    weight, depth = 1 + sum(t.weight for t in inside), 1 + max((t.depth for t in inside), default=0)
    if weight > MOST_TYPES:
        raise AvroSchemaError(path, f"has more than {MOST_TYPES} types, each counted as often as it is used")
    if depth > MOST_DEPTH:
        raise AvroSchemaError(path, f"is nested deeper than {MOST_DEPTH} types")
    return weight, depth


def _read_strings(node: Mapping[str, Any], name: str, path: str) -> tuple[str, ...]:
    values = node.get(name, [])
    if not isinstance(values, list) or not all(isinstance(s, str) for s in values):
        raise AvroSchemaError(path, f"has {name} that are no list of names")
    return tuple(values)


def _read_logical(t: AvroType, node: Mapping[str, Any]) -> AvroType:
    """The type with its logical type, where it can have it; else the type alone."""
    logical = node.get("logicalType")
    if not isinstance(logical, str):
        return t
    if _LOGICAL.get(logical) is t.kind:
        return replace(t, logical=logical)
    if logical == "uuid" and (t.kind is AvroKind.STRING or (t.kind is AvroKind.FIXED and t.size == 16)):
        return replace(t, logical=logical)
    if logical == "duration" and t.kind is AvroKind.FIXED and t.size == 12:
        return replace(t, logical=logical)
    if logical == "decimal" and t.kind in (AvroKind.BYTES, AvroKind.FIXED):
        precision, scale = _read_integer(node.get("precision")), _read_integer(node.get("scale", 0))
        if precision >= 1 and 0 <= scale <= precision:
            return replace(t, logical=logical, precision=precision, scale=scale)
    return t


def _read_integer(number: Any) -> int:
    """The number, −1 if it is no whole one or absurd."""
    return number if isinstance(number, int) and not isinstance(number, bool) and number < 1 << 31 else -1


def format_name(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else "a name that cannot be shown"
