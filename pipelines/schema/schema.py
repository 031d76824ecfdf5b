"""The schema of a typed feed: parsed from the feed file into frozen types, and turned into Arrow types.

`parse_schema` reads a mapping of names to types. A type is text, such as `decimal(12,2)` or
`list<struct<sku:string, quantity:int32 not null>>`, or a mapping, which is a struct. What does not parse raises
SchemaError. It gives, for each field, the place, the position in the text and what would be understood.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

MOST_LEVELS = 32
"""The most lists, structs and maps inside one another."""
MOST_NODES = 4096
"""The most fields, elements and values of a schema, over all levels."""
MOST_NAME = 200
MOST_JSON_NAME = 1000
EXTRA = "_extra"
KAFKA = "kafka_"


class TypeFamily(StrEnum):
    """Groups of kinds that expectations treat alike."""

    NUMBER = "numbers"
    TIME = "timestamps"
    DAY = "dates"
    TEXT = "strings"
    TRUTH = "booleans"
    BYTES = "binary"
    NESTED = "lists, structs, maps and json"


class Kind(StrEnum):
    """The kind of a type: its name, or the word that it begins with if it has parameters.

    `family` is its group, `arrow` the function of pyarrow that makes its type, and `delta` its name in Delta's log; the
    latter are empty where the type's parameters are needed.
    """

    INT8 = "int8", TypeFamily.NUMBER, "int8", "byte"
    INT16 = "int16", TypeFamily.NUMBER, "int16", "short"
    INT32 = "int32", TypeFamily.NUMBER, "int32", "integer"
    INT64 = "int64", TypeFamily.NUMBER, "int64", "long"
    # Delta's integers are signed. Its tables hold no larger ones (`feed/table_section.py`).
    UINT8 = "uint8", TypeFamily.NUMBER, "uint8", "short"
    UINT16 = "uint16", TypeFamily.NUMBER, "uint16", "integer"
    UINT32 = "uint32", TypeFamily.NUMBER, "uint32"
    UINT64 = "uint64", TypeFamily.NUMBER, "uint64"
    FLOAT32 = "float32", TypeFamily.NUMBER, "float32", "float"
    FLOAT64 = "float64", TypeFamily.NUMBER, "float64", "double"
    BOOL = "bool", TypeFamily.TRUTH, "bool_", "boolean"
    STRING = "string", TypeFamily.TEXT, "string", "string"
    BINARY = "binary", TypeFamily.BYTES, "binary", "binary"
    DATE = "date", TypeFamily.DAY, "date32", "date"
    JSON = "json", TypeFamily.NESTED, "string", "string"
    DECIMAL = "decimal", TypeFamily.NUMBER
    TIMESTAMP = "timestamp", TypeFamily.TIME, "", "timestamp"
    EPOCH = "epoch", TypeFamily.TIME, "", "timestamp"
    LIST = "list", TypeFamily.NESTED
    STRUCT = "struct", TypeFamily.NESTED
    MAP = "map", TypeFamily.NESTED

    family: TypeFamily
    arrow: str
    delta: str

    def __new__(cls, name: str, family: TypeFamily, arrow: str = "", delta: str = "") -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.family, kind.arrow, kind.delta = name, family, arrow, delta
        return kind


_ALIASES = {"float": Kind.FLOAT32, "double": Kind.FLOAT64, "int": Kind.INT32, "long": Kind.INT64, "boolean": Kind.BOOL}
_NAMED = {str(k): k for k in Kind} | _ALIASES
_UNITS = {Kind.TIMESTAMP: ("ms", "us", "ns"), Kind.EPOCH: ("s", "ms", "us", "ns")}


class Encoding(StrEnum):
    """How JSON records hold values of a type, where it is not the type's usual form."""

    TEXT = "text"
    """A number as text."""
    BASE64 = "base64"
    """A decimal as its unscaled number: big-endian bytes in two's complement, as Base64."""
    DAYS = "days"
    """A date as its days since 1970."""


_INTEGERS = frozenset(k for k in Kind if "int" in k)
_ENCODABLE = {
    Encoding.TEXT: _INTEGERS | {Kind.DECIMAL, Kind.EPOCH},
    Encoding.BASE64: {Kind.DECIMAL},
    Encoding.DAYS: {Kind.DATE},
}


@dataclass(frozen=True, slots=True)
class Type:
    """One type.

    `precision` and `scale` belong to a decimal, `unit` to a time. `fields` are a struct's members, a list's one element
    or a map's one value; a map's keys are strings. `encoding` is how records hold the values, None for the usual form.
    """

    kind: Kind
    precision: int = 0
    scale: int = 0
    unit: str = ""
    fields: tuple[Field, ...] = ()
    encoding: Encoding | None = None

    @property
    def is_rounding(self) -> bool:
        """Returns whether the type, or one inside it, holds a decimal number only as the nearest binary one."""
        return self.kind in (Kind.FLOAT32, Kind.FLOAT64) or any(f.type.is_rounding for f in self.fields)

    def __str__(self) -> str:
        return f"{self._plain_text} from {self.encoding}" if self.encoding else self._plain_text

    @property
    def _plain_text(self) -> str:
        match self.kind:
            case Kind.DECIMAL:
                return f"decimal({self.precision},{self.scale})"
            case Kind.TIMESTAMP | Kind.EPOCH:
                return f"{self.kind}({self.unit})"
            case Kind.LIST:
                return f"list<{self.fields[0].text}>"
            case Kind.MAP:
                return f"map<string, {self.fields[0].text}>"
            case Kind.STRUCT:
                return f"struct<{', '.join(f'{quote_name(f.name)}:{f.text}' for f in self.fields)}>"
            case kind:
                return str(kind)


Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A type with a name; the name is empty for elements of lists and values of maps.

    If a `required` field is missing or null, the record is quarantined. `source` is the field's name in JSON records,
    None if it is `name`. `path` leads from the record to the values of a column `at` a path: names of members, keys of
    maps and indices of lists. `header` is the name of the header that the column is read from.
    """

    name: str
    type: Type
    required: bool = False
    source: str | None = None
    path: Path = ()
    header: str | None = None

    @property
    def json_name(self) -> str:
        """The field's name in JSON records."""
        return self.name if self.source is None else self.source

    @property
    def place(self) -> str:
        """The place of the values as a feed file spells it; empty if they have the column's name."""
        if self.path:
            return f"at {spell_path(self.path)}"
        if self.header is not None:
            return f"header {_spell(self.header, _HEADER)}"
        return "" if self.source is None else f"from {_quote(self.source)}"

    @property
    def text(self) -> str:
        """The type as a feed file spells it."""
        text = f"{self.type} not null" if self.required else str(self.type)
        return f"{text} {self.place}" if self.place else text


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a typed feed, in the order of its columns."""

    fields: tuple[Field, ...]

    def texts(self) -> dict[str, str]:
        """The schema as a feed file spells it: names to types."""
        return {f.name: f.text for f in self.fields}

    @property
    def fingerprint(self) -> str:
        """16 hex digits. Schemas that land the same columns from the same values have the same ones."""
        identity = json.dumps(list(self.texts().items()))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


class SchemaProblem(ValueError):
    """A problem of one field. `place` is its path in the schema, `remedy` what to write instead.

    Never quotes the text of a type.
    """

    def __init__(self, path: str, what: str, remedy: str) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.place, self.what, self.remedy = path, what, remedy


class SchemaError(ValueError):
    """The schema does not parse. `problems` holds everything that is wrong."""

    def __init__(self, problems: Sequence[SchemaProblem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def parse_schema(document: object) -> Schema:
    """The schema given by a mapping of names to types. Raises SchemaError."""
    if not isinstance(document, Mapping) or not document:
        raise SchemaError([SchemaProblem("", "is not a mapping of names to types", "write such as `order_id: string`")])
    fields: list[Field] = []
    problems: list[SchemaProblem] = []
    for name, value in document.items():
        try:
            fields.append(_top(str(name), value))
        except SchemaProblem as problem:
            problems.append(problem)
    problems += _clashes(fields)
    if not problems and any(f.path for f in fields):
        from sluice.pipelines.schema.layout import make_layout  # late: it imports this module

        try:
            make_layout(Schema(tuple(fields)))
        except SchemaProblem as problem:
            problems.append(problem)
    if not problems and (nodes := count_fields(tuple(fields))) > MOST_NODES:
        problems.append(SchemaProblem("", f"has {nodes} fields with all that is nested", f"at most {MOST_NODES}"))
    if problems:
        raise SchemaError(problems)
    return Schema(tuple(fields))


def parse_field(name: str, value: object) -> Field:
    """One column by itself: its path may lead into another one. Raises SchemaError."""
    try:
        return _top(name, value)
    except SchemaProblem as problem:
        raise SchemaError([problem]) from None


def _top(name: str, value: object) -> Field:
    if name.lower().startswith(KAFKA) or name.lower() == EXTRA:
        raise SchemaProblem(name, f"`{EXTRA}` and names that begin with `{KAFKA}` are Sluice's own", _RENAME)
    return _parse_field(name, value, "", 0)


def _clashes(fields: Sequence[Field], path: str = "") -> Iterator[SchemaProblem]:
    """Yield problems of names that are equal or differ by case only, and of fields that two columns read."""
    names: set[str] = set()
    sources: set[Path] = set()
    for f in fields:
        where = f"{path}.{f.name}" if path else f.name
        if f.name.casefold() in names:
            what = "differs from another field by case only, or not at all"
            yield SchemaProblem(where, what, f"Spark and others ignore case: {_RENAME}")
        elif (source := f.path or (f.json_name,)) in sources:
            yield SchemaProblem(where, "is read from a field that another column is read from", "keep one of the two")
        names.add(f.name.casefold())
        if f.header is None:
            sources.add(source)


def _walk(fields: tuple[Field, ...]) -> Iterator[Field]:
    for f in fields:
        yield f
        yield from _walk(f.type.fields)


def count_fields(fields: tuple[Field, ...]) -> int:
    """Returns the number of fields, elements and values, over all levels."""
    return sum(1 for _ in _walk(fields))


def has_sources(fields: tuple[Field, ...]) -> bool:
    """Returns whether any field, at any depth, has another name in records."""
    return any(f.source is not None for f in _walk(fields))


def has_places(fields: tuple[Field, ...]) -> bool:
    """Returns whether any field has a path, a header or an encoding."""
    return any(f.path or f.header is not None or f.type.encoding for f in _walk(fields))


def _members(document: Mapping[str, object], path: str, level: int) -> tuple[Field, ...]:
    if not document:
        raise SchemaProblem(path, "has no fields", "name at least one, such as `order_id: string`")
    fields = tuple(_parse_field(str(name), value, path, level) for name, value in document.items())
    for problem in _clashes(fields, path):
        raise problem
    return fields


def _parse_field(name: str, value: object, path: str, level: int) -> Field:
    where = f"{path}.{name}" if path else name
    _check_name(name, where)
    if isinstance(value, Mapping):
        if level + 1 > MOST_LEVELS:
            raise SchemaProblem(where, "is nested too deeply", f"at most {MOST_LEVELS} levels; `json` keeps the rest")
        return Field(name, Type(Kind.STRUCT, fields=_members(value, where, level + 1)))
    if not isinstance(value, str):
        raise SchemaProblem(where, "is not a type", "write a type such as `string`, or a mapping of names to types")
    return _TypeParser(value, where, level).parse_field(name)


def _check_name(name: str, where: str) -> None:
    if not name or len(name) > MOST_NAME or not name.isprintable() or "." in name or "`" in name:
        remedy = f"names have 1 to {MOST_NAME} printable characters, without dots and backquotes: {_RENAME}"
        raise SchemaProblem(where or "a field", "has a name that cannot be a column's", remedy)


_RENAME = (
    'give the column another name, and write the field\'s behind its type: `http_method: string from "http.method"`'
)
_TOKEN = re.compile(r'\s*(?:([A-Za-z_]\w*)|`([^`]+)`|([0-9]+)|([<>(),:])|("(?:[^"\\]|\\.)*"))')
_STEP = re.compile(r"""[^\s."'\[\]`<>(),:{}]+""")
_NEXT_STEP = re.compile(r"\s*(?:\.|\[\s*(\d{1,9})\s*\])")
_HEADER = re.compile(r"""[^\s"'`<>(),]+""")
_TYPES = (
    "types: int8 to int64, uint8 to uint64, float32, float64, decimal(p,s), bool, string, binary, date, "
    "timestamp(ms|us|ns), epoch(s|ms|us|ns), json, list<T>, struct<name:T, …>, map<string, T>; "
    '`not null` behind one where it must be there, `from "name"` where the field has another name, `at repo.name` for '
    "a path, `header NAME` for a header, `from text`, `from base64` or `from days` for other forms of numbers and dates"
)


_ELSEWHERE = {
    "string": "str text varchar nvarchar char nchar character clob utf8 large_string uuid enum keyword",
    "timestamp": "datetime timestamptz timestamp_ntz timestamp_ltz datetime64 instant",
    "int8": "tinyint byte",
    "int16": "smallint short",
    "int32": "integer mediumint",
    "int64": "bigint hugeint serial bigserial",
    "float32": "real float4 half",
    "float64": "double_precision float8",
    "float64`, or `decimal(p,s)` to keep digits exactly, or `int64": "number num",
    "decimal(p,s)": "numeric decimal128 money bignumeric bigdecimal",
    "bool": "bit logical",
    "binary": "bytes blob bytea varbinary large_binary",
    "date": "date32 date64 localdate day",
    "epoch(s)": "unixtime unix_timestamp epoch_s epoch_seconds",
    "epoch(ms)": "epoch_ms epoch_millis timestamp_millis unix_millis",
    "epoch(us)": "epoch_us epoch_micros",
    "epoch(ns)": "epoch_ns epoch_nanos",
    "timestamp(ms)": "timestamp_ms datetime3",
    "timestamp(us)": "timestamp_us timestamp_micros datetime6",
    "timestamp(ns)": "timestamp_ns timestamp_nanos",
    "json": "any variant jsonb super raw mixed null",
    "list<T>": "array repeated sequence set",
    "struct<name:T, …>": "object record row tuple message nested",
    "map<string, T>": "dict dictionary hash hstore",
}
"""For our types, their names in databases, languages and other formats."""
_FOREIGN = {word: ours for ours, words in _ELSEWHERE.items() for word in words.split()}


class _TypeParser:
    """Parses one type's text by recursive descent. MOST_LEVELS bounds nesting."""

    def __init__(self, text: str, path: str, level: int) -> None:
        self._text, self._path, self._level, self._at = text, path, level, 0

    def parse_field(self, name: str) -> Field:
        parsed = self._parse_named(name, self._level)
        if self._text[self._at :].strip():
            raise self._problem("more than a type")
        return parsed

    def _parse_named(self, name: str, level: int) -> Field:
        """A type and the words behind it, in any order."""
        f, words = Field(name, self._type(level)), set[str]()
        while (word := self._peek()) in ("not", "from", "at", "header"):
            begin = self._at
            self._take(word)
            if word == "not":
                self._take("null")
                f = replace(f, required=True)
            elif word == "from" and self._peek() in [*Encoding]:
                f, word = replace(f, type=self._encode(f.type)), "encoding"
            elif not name:
                raise self._problem("elements and values have no names")
            else:
                f = self._place(f, word, level)
                word = "place"
            if word in words:
                self._at = begin
                raise self._problem("a second place, form or `not null`")
            words.add(word)
        return f

    def _encode(self, t: Type) -> Type:
        begin = self._at
        encoding = Encoding(self._word().lower())
        if t.kind not in _ENCODABLE[encoding]:
            self._at = begin
            fits = {Encoding.TEXT: "integers, decimals and epochs", Encoding.BASE64: "decimals", Encoding.DAYS: "dates"}
            raise self._problem(f"{fits[encoding]} alone can be `from {encoding}`")
        return replace(t, encoding=encoding)

    def _place(self, f: Field, word: str, level: int) -> Field:
        """The field with the place that stands behind `from`, `at` or `header`."""
        if word == "from":
            source = self._parse_json_name()
            return replace(f, source=source if source != f.name else None)
        if level:
            raise self._problem(f"only a column can have `{word}`")
        if word == "at":
            name, *steps = path = self._parse_path()
            return replace(f, path=path) if steps else replace(f, source=None if name == f.name else str(name))
        if f.type.kind not in (Kind.STRING, Kind.BINARY) or f.type.encoding:
            raise self._problem("a header lands as string or binary")
        return replace(f, header=self._parse_step(_HEADER, "a header's name"))

    def _parse_path(self) -> Path:
        path: list[str | int] = [self._parse_step(_STEP, "a path such as repo.full_name or items[0].sku")]
        while match := _NEXT_STEP.match(self._text, self._at):
            self._at = match.end()
            path.append(int(match[1]) if match[1] else self._parse_step(_STEP, "a name behind the point"))
        if len(path) > MOST_LEVELS:
            raise self._problem(f"more than {MOST_LEVELS} steps")
        return tuple(path)

    def _parse_step(self, plain: re.Pattern[str], what: str) -> str:
        """A name that stands as it is, or in double quotes."""
        if self._text[self._at :].lstrip().startswith('"'):
            return self._parse_json_name()
        match = plain.match(rest := self._text[self._at :].lstrip())
        if not match or len(match[0].encode()) > MOST_JSON_NAME:
            raise self._problem(f"expected {what}")
        self._at = len(self._text) - len(rest) + match.end()
        return match[0]

    def _parse_json_name(self) -> str:
        begin, match = self._at, _TOKEN.match(self._text, self._at)
        source = ""
        if match and match[5]:
            self._advance()
            with contextlib.suppress(ValueError):  # an escape that JSON does not have, or half of a surrogate pair
                source = json.loads(match[5])
                if len(source.encode()) <= MOST_JSON_NAME:
                    return str(source)
        self._at = begin
        raise self._problem(f"expected a field's name in double quotes, of {MOST_JSON_NAME} bytes at most")

    def _type(self, level: int) -> Type:
        if level > MOST_LEVELS:
            raise self._problem(f"more than {MOST_LEVELS} levels")
        begin = self._at
        kind = _NAMED.get(self._word().lower())
        match kind:
            case None:
                word = self._text[begin : self._at].strip().lower()
                self._at = begin
                near = get_close_matches(word, [*_NAMED, *_FOREIGN], n=1, cutoff=0.7)
                chosen = next((w for w in (word, *near) if w in _FOREIGN or w in _NAMED), "")
                raise self._problem(
                    "no type that we know", f"did you mean `{_FOREIGN.get(chosen, chosen)}`?" if chosen else _TYPES
                )
            case Kind.DECIMAL:
                return self._decimal()
            case Kind.TIMESTAMP | Kind.EPOCH:
                return self._time(kind)
            case Kind.LIST:
                return Type(kind, fields=(self._parse_bracketed(level),))
            case Kind.MAP:
                return self._map(level)
            case Kind.STRUCT:
                return self._struct(level)
        return Type(kind)

    def _decimal(self) -> Type:
        begin = self._at
        self._take("(")
        precision, scale = self._number(), 0
        if self._peek() == ",":
            self._take(",")
            scale = self._number()
        self._take(")")
        if not 1 <= precision <= 38 or scale > precision:
            self._at = begin
            raise self._problem("a decimal has 1 to 38 digits, and no more of them can follow the point")
        return Type(Kind.DECIMAL, precision, scale)

    def _time(self, kind: Kind) -> Type:
        if self._peek() != "(":
            if kind is Kind.EPOCH:
                raise self._problem("an epoch needs its unit: epoch(s), epoch(ms), epoch(us) or epoch(ns)")
            return Type(kind, unit="us")
        self._take("(")
        begin = self._at
        unit = self._word()
        if unit not in _UNITS[kind]:
            self._at = begin
            raise self._problem(f"no unit of {kind}: {', '.join(_UNITS[kind])}")
        self._take(")")
        return Type(kind, unit=unit)

    def _parse_bracketed(self, level: int) -> Field:
        self._take("<")
        inner = self._parse_named("", level + 1)
        self._take(">")
        return inner

    def _map(self, level: int) -> Type:
        self._take("<")
        begin = self._at
        if self._word().lower() != Kind.STRING:
            self._at = begin
            raise self._problem("keys of JSON objects are strings: map<string, …>")
        self._take(",")
        inner = self._parse_named("", level + 1)
        self._take(">")
        return Type(Kind.MAP, fields=(inner,))

    def _struct(self, level: int) -> Type:
        self._take("<")
        members = [self._member(level)]
        while self._peek() == ",":
            self._take(",")
            members.append(self._member(level))
        if any(_clashes(members)):
            raise self._problem("two members that differ by case only, or not at all, or are read from one field")
        self._take(">")
        return Type(Kind.STRUCT, fields=tuple(members))

    def _member(self, level: int) -> Field:
        name = self._word()
        _check_name(name, self._path)
        self._take(":")
        return self._parse_named(name, level + 1)

    def _peek(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        return match[0].strip().lower() if match else ""

    def _take(self, expected: str) -> None:
        if self._peek() != expected:
            raise self._problem(f"expected `{expected}`")
        self._advance()

    def _word(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        if not match or not (match[1] or match[2]):
            raise self._problem("expected a name")
        self._advance()
        return str(match[1] or match[2])

    def _number(self) -> int:
        match = _TOKEN.match(self._text, self._at)
        if not match or not match[3] or len(match[3]) > 3:
            raise self._problem("expected a small number")
        self._advance()
        return int(match[3])

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _problem(self, what: str, remedy: str = _TYPES) -> SchemaProblem:
        at = self._at + len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
        where = f"position {at + 1}" if at < len(self._text) else "the end"
        return SchemaProblem(self._path, f"cannot be read at {where}: {what}", remedy)


def join_path(parent: str, kind: Kind, field: Field) -> str:
    """The path of a field below `parent` in a schema to read by: the name of a column where that is at a path."""
    return field.name if field.path else path_below(parent, kind, field.name)


def path_below(parent: str, kind: Kind, name: str) -> str:
    """The path of a member below `parent`, as people write it: `lines[].sku`, `tags{}`."""
    match kind:
        case Kind.LIST:
            return parent + "[]"
        case Kind.MAP:
            return parent + "{}"
        case _:
            return f"{parent}.{name}" if parent else name


def quote_name(name: str) -> str:
    """The name as it stands in the text of a type."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else f"`{name}`"


def spell_path(path: Path) -> str:
    """The path as a feed file spells it: `repo.full_name`, `items[0]."unit.price"`."""
    first, *steps = path
    return _spell(str(first), _STEP) + "".join(
        f"[{step}]" if isinstance(step, int) else f".{_spell(step, _STEP)}" for step in steps
    )


def _spell(name: str, plain: re.Pattern[str]) -> str:
    return name if plain.fullmatch(name) else _quote(name)


def _quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


@lru_cache(maxsize=1024)
def arrow_type(t: Type) -> pa.DataType:
    """The Arrow type that a type lands as. All parts are nullable, because tombstones and missing structs are empty."""
    import pyarrow as pa

    match t.kind:
        case Kind.DECIMAL:
            return pa.decimal128(t.precision, t.scale)
        case Kind.TIMESTAMP | Kind.EPOCH:
            return pa.timestamp("ms" if t.unit == "s" else t.unit, "UTC")
        case Kind.LIST:
            return pa.list_(pa.field("element", arrow_type(t.fields[0].type)))
        case Kind.MAP:
            return pa.map_(pa.string(), arrow_type(t.fields[0].type))
        case Kind.STRUCT:
            return pa.struct([pa.field(f.name, arrow_type(f.type)) for f in t.fields])
        case kind:
            return getattr(pa, kind.arrow)()
