"""The feed's own JSON Schema: its columns, and its rules for rows beyond their types. Light.

docs/formats.md has the table of types, and of keywords. What cannot be a column or an expectation is refused by the
place of its keyword.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

from sluice.pipelines.contract.arguments import flaws
from sluice.pipelines.contract.catalogue import RULES
from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.records.json.schema_document import Document, Subschema
from sluice.pipelines.records.rows.value_reader import MOST_PROBLEMS, UnusableSchema
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, parse_schema, path_below
from sluice.pipelines.schema.wider import MOST_DIGITS

_BETWEEN = "expect_column_values_to_be_between"
_IN_SET = "expect_column_values_to_be_in_set"
_LENGTHS = "expect_column_value_lengths_to_be_between"
_REGEX = "expect_column_values_to_match_regex"
_NULL = "expect_column_values_to_be_null"
_MOST_LONG = (1 << 63) - 1


@dataclass(frozen=True)
class JsonSchemaReader:
    """How records are read that are JSON, described by a JSON Schema: the last of `texts`; and the wire format.

    Raises UnusableSchema, when it is made, for a schema that columns and a contract cannot hold, and SchemaError for
    names that no column can have.
    """

    texts: tuple[str, ...]
    wire: WireFormat
    format = "json_schema"
    asks = False
    """JSON can be read without the schema that it was written by."""
    evolves = True

    def __post_init__(self) -> None:
        _ = self._document

    @cached_property
    def _document(self) -> _Made:
        return _read(Document(self.texts[-1]))

    @property
    def columns(self) -> Schema:
        """The columns of rows."""
        return self._document.columns

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Expectations of rows beyond their types."""
        return self._document.expectations

    @property
    def closed_paths(self) -> tuple[str, ...]:
        """The paths of objects that may have no other fields (`additionalProperties: false`); the record's is empty."""
        return self._document.closed

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits. Readers that make the same rows of the same records have the same ones."""
        makes = [*self.columns.texts().items(), self.wire, *([self.closed_paths] if self.closed_paths else [])]
        return hashlib.sha256(json.dumps(makes).encode()).hexdigest()[:16]


class _Made(NamedTuple):
    columns: Schema
    expectations: tuple[Expectation, ...]
    closed: tuple[str, ...]


class _Limit(NamedTuple):
    """An expectation of one column, and the keywords that it comes from."""

    type: str
    kwargs: Mapping[str, Any]
    paths: tuple[str, ...]


class _ColumnMeaning(NamedTuple):
    """The column of a schema: its type, whether it allows null, and its limits beyond the type. `closed` are the paths,
    from here, of objects that may have no other fields."""

    type: Type
    or_null: bool
    limits: tuple[_Limit, ...] = ()
    closed: tuple[str, ...] = ()


def _read(document: Document) -> _Made:
    node = document.root()
    if "properties" not in node or _list_kinds(node) - {"object"}:
        raise UnusableSchema(node.place, "is no object with properties, and these are the columns")
    columns = _Columns(document)
    columns.problems += node.refused
    fields, limits = [], []
    closed = [""] if node.get("additionalProperties") is False else []
    for name, member, required in columns.list_members(node):
        fields.append(Field(name, member.type, required and not member.or_null))
        limits += [(name, limit) for limit in member.limits]
        closed += [name + path for path in member.closed]
    expectations: list[Expectation] = []
    if node.get("additionalProperties") not in (None, True, False, {}):
        what = "limits other fields; they are kept unchanged in _extra"
        columns.problems.append(UnusableSchema(node.place_of("additionalProperties"), what))
    types = {f.name: f.type for f in fields}
    for name, limit in limits:
        with columns.collect_problems():
            expectations.append(_make_expectation(len(expectations), name, limit, types))
    if columns.problems:
        raise UnusableSchema.of_all(columns.problems)
    return _Made(parse_schema({f.name: f.text for f in fields}), tuple(expectations), tuple(closed))


def _make_expectation(path: int, column: str, limit: _Limit, types: Mapping[str, Type]) -> Expectation:
    kwargs = {"column": column, **limit.kwargs}
    for flaw in flaws(RULES[limit.type], kwargs, types):
        what = f"cannot be part of a contract for a column of {types[column]}: {flaw.name} {flaw.what}"
        raise UnusableSchema(limit.paths[0], what)
    return Expectation(path, limit.type, kwargs)


class _Columns:
    """Makes types of schemas. Continues after unusable ones and collects them in `problems`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.problems: list[UnusableSchema] = []

    @contextmanager
    def collect_problems(self) -> Iterator[None]:
        """Collect problems of the block, and go on after it."""
        try:
            yield
        except UnusableSchema as error:
            if len(self.problems) <= MOST_PROBLEMS:
                self.problems.append(error)

    def list_members(self, node: Subschema) -> Iterator[tuple[str, _ColumnMeaning, bool]]:
        """The properties of an object: the name, the type, and whether it must be there."""
        names, required = node.get("properties"), node.get("required") or []
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise UnusableSchema(node.place_of("required"), "is no list of names")
        for name in required:
            if name not in names:
                raise UnusableSchema(node.place_of("required"), "names a field that is none of the properties")
        for name in names:
            member = _ColumnMeaning(Type(Kind.JSON), True)
            with self.collect_problems():
                member = self._read_node(self._document.within(node, "properties", name))
            yield name, member, name in required

    def _read_node(self, node: Subschema) -> _ColumnMeaning:
        self.problems += node.refused
        kinds = _list_kinds(node)
        or_null = bool(node.or_null)
        kinds -= {"null"}
        if "integer" in kinds and "number" in kinds:
            kinds -= {"integer"}
        if len(kinds) > 1:
            where = node.place_of(next(k for k in ("type", "const", "enum") if k in node))
            raise UnusableSchema(where, "allows values of several kinds; a column has one type")
        if "const" in node and "enum" in node:
            raise UnusableSchema(node.place_of("const"), "is composed with an enum; leave one of them out")
        if not kinds and node.or_null is False:
            raise UnusableSchema(node.place, "allows no value")
        if not kinds:
            # Of no type: anything, as JSON text; or null alone.
            ignored = [keyword for keyword in node.keywords if keyword not in ("type", "const", "enum")]
            if ignored:
                raise UnusableSchema(node.place_of(ignored[0]), "needs a type")
            if not node.keywords:
                return _ColumnMeaning(Type(Kind.JSON), True)
            path = next(iter(node.keywords.values())).place
            return _ColumnMeaning(Type(Kind.JSON), True, (_Limit(_NULL, {}, (path,)),))
        kind = kinds.pop()
        if kind in ("array", "object") and (paths := _list_paths(node, "const", "enum")):
            raise UnusableSchema(paths[0], f"names whole values of an {kind}, which no contract can hold")
        meaning = _MAKERS[kind](self, node)
        return meaning._replace(or_null=or_null or meaning.or_null)

    def _read_boolean(self, node: Subschema) -> _ColumnMeaning:
        return _ColumnMeaning(Type(Kind.BOOL), False, (*_limit_members(node),))

    def _read_integer(self, node: Subschema) -> _ColumnMeaning:
        if node.get("multipleOf") not in (None, 1):
            raise UnusableSchema(node.place_of("multipleOf"), "has no counterpart in columns or a contract")
        minimum, maximum = node.get("minimum"), node.get("maximum")
        large = _is_number(maximum) and maximum > _MOST_LONG and _is_number(minimum) and minimum >= 0
        return _ColumnMeaning(
            Type(Kind.UINT64 if large else Kind.INT64), False, (*_limit_numbers(node), *_limit_members(node))
        )

    def _read_number(self, node: Subschema) -> _ColumnMeaning:
        kind = Type(Kind.FLOAT64)
        if "multipleOf" in node:
            scale = _scale(node.get("multipleOf"))
            if scale is None:
                raise UnusableSchema(node.place_of("multipleOf"), "is no power of ten such as 0.01, of a decimal")
            kind = Type(Kind.DECIMAL, MOST_DIGITS, scale)
        return _ColumnMeaning(kind, False, (*_limit_numbers(node), *_limit_members(node)))

    def _read_string(self, node: Subschema) -> _ColumnMeaning:
        kind = _FORMATS.get(str(node.get("format")), Type(Kind.STRING))
        if node.get("contentEncoding") == "base64":
            kind = Type(Kind.BINARY)
        limits = list(_limit_members(node))
        sizes = {k: node.get(w) for k, w in (("min_value", "minLength"), ("max_value", "maxLength")) if w in node}
        if sizes and sizes != {"min_value": 0}:
            limits.append(_Limit(_LENGTHS, sizes, _list_paths(node, "minLength", "maxLength")))
        if "pattern" in node:
            limits.append(_Limit(_REGEX, {"regex": node.get("pattern")}, _list_paths(node, "pattern")))
        return _ColumnMeaning(kind, False, tuple(limits))

    def _read_array(self, node: Subschema) -> _ColumnMeaning:
        if isinstance(node.get("items"), list):
            raise UnusableSchema(node.place_of("items"), "is a schema for each place; a list has one type")
        inside = self._read_inside(node, "items") if "items" in node else _ColumnMeaning(Type(Kind.JSON), True)
        return _make_holder(Kind.LIST, inside)

    def _read_object(self, node: Subschema) -> _ColumnMeaning:
        if node.get("properties"):
            if node.get("additionalProperties") not in (None, True, False, {}):
                raise UnusableSchema(
                    node.place_of("additionalProperties"), "is used with properties, which make a struct"
                )
            fields = []
            closed = [""] if node.get("additionalProperties") is False else []
            for name, member, required in self.list_members(node):
                self._refuse_limits(member)
                fields.append(Field(name, member.type, required and not member.or_null))
                closed += [f".{name}{path}" for path in member.closed]
            return _ColumnMeaning(Type(Kind.STRUCT, fields=tuple(fields)), False, closed=tuple(closed))
        rest = node.get(
            "additionalProperties",
        )
        if rest is False:
            raise UnusableSchema(node.place_of("additionalProperties"), "allows no fields at all")
        if node.get("required"):
            raise UnusableSchema(node.place_of("required"), "names a field that is none of the properties")
        if not rest or rest is True:
            return _ColumnMeaning(Type(Kind.MAP, fields=(Field("", Type(Kind.JSON)),)), False)
        return _make_holder(Kind.MAP, self._read_inside(node, "additionalProperties"))

    def _read_inside(self, node: Subschema, keyword: str) -> _ColumnMeaning:
        meaning = self._read_node(self._document.within(node, keyword))
        self._refuse_limits(meaning)
        return meaning

    def _refuse_limits(self, meaning: _ColumnMeaning) -> None:
        what = "limits a field inside another, and a contract is about columns"
        self.problems += [UnusableSchema(path, what) for limit in meaning.limits for path in limit.paths]


def _make_holder(kind: Kind, inside: _ColumnMeaning) -> _ColumnMeaning:
    """A list or map of these."""
    path = path_below("", kind, "")
    element = Field("", inside.type, not inside.or_null)
    return _ColumnMeaning(Type(kind, fields=(element,)), False, closed=tuple(path + below for below in inside.closed))


_MAKERS: Mapping[str, Callable[[_Columns, Subschema], _ColumnMeaning]] = {
    "boolean": _Columns._read_boolean,
    "integer": _Columns._read_integer,
    "number": _Columns._read_number,
    "string": _Columns._read_string,
    "array": _Columns._read_array,
    "object": _Columns._read_object,
}
_FORMATS = {"date-time": Type(Kind.TIMESTAMP, unit="us"), "date": Type(Kind.DATE)}


def _list_kinds(node: Subschema) -> set[str]:
    """The types that a schema allows; those of its values where it names values only."""
    declared = node.get("type")
    if declared is None:
        if "properties" in node:
            return {"object"}
        values = [*_list_values(node)]
        return {_get_kind(v, node) for v in values}
    names = declared if isinstance(declared, list) else [declared]
    kinds = {kind for kind in names if isinstance(kind, str)}
    if not kinds or len(kinds) < len(names) or not kinds <= {*_MAKERS, "null"}:
        raise UnusableSchema(node.place_of("type"), "is no type that we know")
    return kinds


def _list_values(node: Subschema) -> Iterator[Any]:
    if "const" in node:
        yield node.get("const")
    elif isinstance(values := node.get("enum"), list):
        yield from values


def _get_kind(value: Any, node: Subschema) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
    path = node.place_of("const" if "const" in node else "enum")
    raise UnusableSchema(path, "has an object or a list among its values")


def _limit_members(node: Subschema) -> Iterator[_Limit]:
    """The values that are allowed by name."""
    values = [*_list_values(node)]
    if values:
        allowed = [v for v in values if v is not None]
        yield _Limit(_IN_SET, {"value_set": allowed}, _list_paths(node, "const", "enum"))


def _limit_numbers(node: Subschema) -> Iterator[_Limit]:
    """The limits of a number. In draft 4, `exclusiveMinimum` is a flag that excludes `minimum` itself."""
    kwargs: dict[str, Any] = {}
    for side, edge, open_ in (("min", "minimum", "exclusiveMinimum"), ("max", "maximum", "exclusiveMaximum")):
        bound, strict = node.get(edge), node.get(open_)
        if isinstance(strict, bool):
            strict, bound = (bound, None) if strict else (None, bound)
        if _is_number(bound) and _is_number(strict):
            inner = max if side == "min" else min
            bound, strict = (None, strict) if inner(bound, strict) == strict else (bound, None)
        if strict is not None:
            kwargs |= {f"{side}_value": strict, f"strict_{side}": True}
        elif bound is not None:
            kwargs |= {f"{side}_value": bound}
    if kwargs:
        yield _Limit(_BETWEEN, kwargs, _list_paths(node, "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))


def _list_paths(node: Subschema, *keywords: str) -> tuple[str, ...]:
    return tuple(node.place_of(k) for k in keywords if k in node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale(step: Any) -> int | None:
    """How many digits follow the point in multiples of this power of ten; None if it is none."""
    if not _is_number(step):
        return None
    _, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
    return -exponent if digits == (1,) and isinstance(exponent, int) and -MOST_DIGITS < exponent <= 0 else None
