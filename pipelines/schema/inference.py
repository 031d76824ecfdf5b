"""Infers types from a sample: the schema that these JSON values fit.

Pure functions. Nothing here decides about rows: a person reads the proposal, and records that do not fit it later go to
the quarantine, as with any schema.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from datetime import date
from decimal import MAX_PREC, Context, Decimal
from functools import cached_property
from math import isfinite
from typing import Any

from sluice.pipelines.schema.schema import (
    EXTRA,
    KAFKA,
    MOST_JSON_NAME,
    MOST_NAME,
    MOST_NODES,
    SchemaError,
    count_fields,
    parse_schema,
)

MOST_VALUE_BYTES = 1 << 20
"""A larger value is counted and not looked into."""
_DEPTH = 8
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_HOUR, _SIXTY = r"([01]\d|2[0-3])", r"[0-5]\d"
_TIME = re.compile(rf"[Tt ]{_HOUR}:{_SIXTY}(:{_SIXTY}(\.\d{{1,9}})?)?([Zz]|[+-]{_HOUR}(:?{_SIXTY})?)?", re.ASCII)
"""What follows the day in a text that lands as a time."""
_DECIMALS = Context(prec=MAX_PREC, traps=[])
_MOST_EXACT = 1 << 53
"""Up to here a float64 holds every integer."""
_INT64 = range(-(1 << 63), 1 << 63)
_TEXTS = {"date", "string", "timestamp"}
_ITEMS = 1000
"""Limit of inspected elements of a list."""
_MANY_KEYS = 20
_RARE = 0.5
"""An object has data for names if it has at least `_MANY_KEYS` names over the sample, none is in more than this share
of its objects, and most are in a tenth of that."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DATA = re.compile(
    r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\d{4}-\d\d(-\d\d.*)?|\d+|(?=.*\d)[0-9a-fA-F]{12,}"
    r"|[A-Za-z]+[-_:#/]?\d{3,}|[^@\s]+@[^@\s]+"
)
"""Names that are data: UUIDs, dates, numbers, hashes, words with a number of three digits, addresses."""
_MOST_DATA_NAMES = 20
"""More fields of records with such names get no columns."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TIME_WORDS = (
    "ts time times timestamp timestamps at date datetime epoch created updated modified deleted expires expiry"
    " expiration occurred when since until iat exp nbf started ended received sent published processed ms millis us"
    " micros ns nanos createdat updatedat createtime updatetime"
)
"""Words of names of fields that hold times."""
_TIMES = frozenset(_TIME_WORDS.split())
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_SECOND, _LAST_SECOND = 10**9, 4_102_444_800
"""Integers are taken for times from 2001-09-09 on, where seconds have ten digits, and before 2100."""


@dataclass(slots=True)
class GuessedField:
    """The values of one field in the sample's objects: their number, the nulls, and their types."""

    seen: int = 0
    nulls: int = 0
    words: set[str] = field(default_factory=set)
    items: GuessedField | None = None
    members: dict[str, GuessedField] = field(default_factory=dict)
    low: int | None = None
    high: int | None = None

    def get_type(self, name: str) -> str:
        """The smallest type that all values of the field `name` fit; `json` if no other does, or all were null.

        Integers are an `epoch` if the field's name and all values look like times. Numbers with more digits than a
        float64 holds are `json`.
        """
        match sorted(self.words):
            case ["list"]:
                return f"list<{self.items.get_type(name) if self.items else 'json'}>"
            case ["struct"] if (value := self._map_value(name)) is not None:
                return f"map<string, {value}>"
            case ["struct"] if names := name_columns(self.members):
                inner = (
                    f"{_quote(column)}:{spell_type(member, column, self.members[member].get_type(member))}"
                    for member, column in names.items()
                )
                return f"struct<{', '.join(inner)}>"
            case ["int64"] if unit := self._find_unit(name):
                return f"epoch({unit})"
            case ["bool" | "date" | "float64" | "int64" | "string" | "timestamp" as only]:
                return only
            case ["float64", "int64"] if max(abs(self.low or 0), abs(self.high or 0)) <= _MOST_EXACT:
                return "float64"
            case [*words] if words and set(words) <= _TEXTS:
                return "string"
        return "json"

    def _find_unit(self, name: str) -> str:
        """The unit of integers that are times since 1970 by the field's name and their range; empty for others."""
        if self.low is None or self.high is None or _TIMES.isdisjoint(w.lower() for w in _WORD.findall(name)):
            return ""
        return next(
            (u for u, n in _UNITS.items() if _FIRST_SECOND * n <= self.low and self.high < _LAST_SECOND * n), ""
        )

    def _map_value(self, name: str) -> str | None:
        """The type of the values of an object whose names are data, None for any other.

        Names are data if all look so, or if there are many and each is rare.
        """
        if not self.members:
            return None
        often = sorted(guess.seen for guess in self.members.values())
        objects = self.seen - self.nulls
        rare = often[-1] <= _RARE * objects and often[len(often) // 2] <= _RARE / 10 * objects
        if not (len(often) >= _MANY_KEYS and rare) and not all(map(_DATA.fullmatch, self.members)):
            return None
        merged = GuessedField()
        for guess in self.members.values():
            merged.add(guess)
        return merged.get_type(name)

    def add(self, other: GuessedField) -> None:
        """Take in what another place has held."""
        self.seen += other.seen
        self.nulls += other.nulls
        self.words |= other.words
        for number in (other.low, other.high):
            self._measure(number)
        if other.items:
            self.items = self.items or GuessedField()
            self.items.add(other.items)
        for name, inner in other.members.items():
            self.members.setdefault(name, GuessedField()).add(inner)

    def learn(self, value: Any, depth: int = _DEPTH) -> None:
        self.seen += 1
        match value:
            case None:
                self.nulls += 1
            case list() if depth:
                self.words.add("list")
                self.items = self.items or GuessedField()
                for inner in value[:_ITEMS]:
                    self.items.learn(inner, depth - 1)
            case dict() if depth:
                self.words.add("struct")
                for name, inner in value.items():
                    self.members.setdefault(name, GuessedField()).learn(inner, depth - 1)
            case _:
                self.words.add(word := _word(value))
                if word == "int64":
                    self._measure(value)

    def _measure(self, number: int | None) -> None:
        if number is not None:
            self.low = number if self.low is None else min(self.low, number)
            self.high = number if self.high is None else max(self.high, number)


@dataclass
class Sampled:
    """The content of a sample of values: counts of tombstones, JSON objects and others, and their fields.

    `encoded` counts those of the last kind that are JSON in another encoding than UTF-8, by its name; `constants` those
    that are objects with NaN or Infinity, which are no JSON and go to quarantine.
    """

    values: int = 0
    tombstones: int = 0
    objects: int = 0
    constants: int = 0
    encoded: Counter[str] = field(default_factory=Counter)
    fields: dict[str, GuessedField] = field(default_factory=dict)

    @property
    def other(self) -> int:
        return self.values - self.tombstones - self.objects

    @property
    def is_typed(self) -> bool:
        """Returns whether JSON is the format: nearly every value is an object, and most of these can land."""
        objects, values = self.objects + self.constants, self.values - self.tombstones
        return bool(self.columns) and objects >= 0.95 * values and self.objects >= 0.5 * values

    @cached_property
    def names(self) -> dict[str, str]:
        """The fields that have columns, with the names of these."""
        data = [name for name in self.fields if _DATA.fullmatch(name)]
        left_out = set(data) if len(data) > _MOST_DATA_NAMES else set()
        names = name_columns([name for name in self.fields if name not in left_out], top=True)
        nodes, out = 0, {}
        for name, column in names.items():
            try:
                nodes += count_fields(parse_schema({column: self.fields[name].get_type(name)}).fields)
            except SchemaError:
                continue
            if nodes > MOST_NODES:
                break
            out[name] = column
        return out

    @property
    def columns(self) -> dict[str, str]:
        """The columns with their types, as in a schema; a field that was always null is `json`."""
        return {c: spell_type(name, c, self.fields[name].get_type(name)) for name, c in self.names.items()}

    @property
    def left_out(self) -> list[str]:
        """The fields that have no column and land in `_extra`."""
        return [name for name in self.fields if name not in self.names]


def sample_values(values: Iterable[bytes | None]) -> Sampled:
    """Visits each value once."""
    out = Sampled()
    for value in values:
        out.values += 1
        if value is None:
            out.tombstones += 1
        elif (document := _object(value)) is not None:
            out.objects += 1
            for name, inner in document.items():
                out.fields.setdefault(name, GuessedField()).learn(inner)
        elif isinstance(_parse(value, "utf-8-sig", strict=False), dict):
            out.constants += 1
        elif encoding := _encoding(value):
            out.encoded[encoding] += 1
    return out


def _object(value: bytes) -> dict[str, Any] | None:
    document = _parse(value, "utf-8-sig")
    return document if isinstance(document, dict) else None


def _encoding(value: bytes) -> str:
    """The encoding of JSON that is not in UTF-8, such as `UTF-16`; empty for anything else."""
    encoding = json.detect_encoding(value)
    return encoding[:6].upper() if encoding[:6] in ("utf-16", "utf-32") and _parse(value, encoding) is not None else ""


def _parse(value: bytes, encoding: str, *, strict: bool = True) -> Any:
    """The JSON that it is; None where it is none, or too large to read here."""
    if len(value) > MOST_VALUE_BYTES:
        return None
    try:
        return json.loads(value.decode(encoding), parse_float=_read_float, parse_constant=_refuse if strict else None)
    except (ValueError, RecursionError):
        return None


def _read_float(text: str) -> float | Decimal:
    """The number as a float if that has all of its digits; otherwise a decimal."""
    number, exact = float(text), _DECIMALS.create_decimal(text)
    return number if isfinite(number) and Decimal(repr(number)) == exact else exact


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _word(value: Any) -> str:
    """The type of one value that holds no others; `json` for what no type holds."""
    match value:
        case bool():
            return "bool"
        case int() if value in _INT64:
            return "int64"
        case float():
            return "float64"
        case str():
            return _find_text_type(value)
    return "json"


def _find_text_type(text: str) -> str:
    day = _DAY.match(text)
    try:
        date.fromisoformat(day[0] if day else "")
    except ValueError:
        return "string"
    if len(text) == 10:
        return "date"
    return "timestamp" if _TIME.fullmatch(text, 10) else "string"


def name_columns(fields: Iterable[str], *, top: bool = False) -> dict[str, str]:
    """The fields, each with the name of its column: its own, or one that a column may have and no other has.

    `top`: of records, where some names are Sluice's own. Fields are left out that no schema can name.
    """
    columns: dict[str, str] = {}
    fields = [f for f in fields if _is_text(f)]
    taken: set[str] = set()
    for f in fields:
        if _nameable(f, top) and f.casefold() not in taken:
            columns[f] = f
            taken.add(f.casefold())
    for f in fields:
        if f not in columns:
            columns[f] = _make_name(f, top, taken)
            taken.add(columns[f].casefold())
    return {f: columns[f] for f in fields}


def _make_name(name: str, top: bool, taken: Container[str]) -> str:
    stem = re.sub(r"\W+", "_", name).strip("_")[: MOST_NAME // 2] or "field"
    stem = stem if _nameable(stem, top) else f"record_{stem}"
    names = (stem, *(f"{stem}_{n}" for n in range(2, MOST_NODES + 2)))
    return next(n for n in names if n.casefold() not in taken)


def spell_type(field_name: str, column: str, type_text: str) -> str:
    """The type of a column in a schema, with the field's name if that is another."""
    return type_text if field_name == column else f"{type_text} from {json.dumps(field_name, ensure_ascii=False)}"


def _is_text(name: str) -> bool:
    try:
        return len(name.encode()) <= MOST_JSON_NAME
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _nameable(name: str, top: bool) -> bool:
    own = top and (name.lower().startswith(KAFKA) or name.lower() == EXTRA)
    return not own and 0 < len(name) <= MOST_NAME and name.isprintable() and not set("`.") & set(name)


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name}`"
