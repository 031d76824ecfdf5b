"""Infers types from a sample: the schema that these JSON values fit.

Pure functions. Nothing here decides about rows: a person reads the proposal, and records that do not fit it later go to
the quarantine, as with any schema.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.pipelines.schema.schema import SchemaError, parse_schema

MOST_VALUE_BYTES = 1 << 20
"""A larger value is counted and not looked into."""
_DEPTH = 8
_DAY = r"\d{4}-\d\d-\d\d"
_DATE, _TIME = re.compile(_DAY), re.compile(rf"{_DAY}[Tt ]\d\d:\d\d(:\d\d([.,]\d{{1,9}})?)?([Zz]|[+-]\d\d(:?\d\d)?)?")
_INT64 = range(-(1 << 63), 1 << 63)
_TEXTS = {"date", "string", "timestamp"}
_ITEMS = 1000
"""Limit of inspected elements of a list."""
_MANY_KEYS = 20
_RARE = 0.5
"""An object with so many names over the sample, of which none is in more of its objects than this share and most are in
a tenth of that, has data for names."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class GuessedField:
    """The values of one field in the sample's objects: their number, the nulls, and their types."""

    seen: int = 0
    nulls: int = 0
    words: set[str] = field(default_factory=set)
    items: GuessedField | None = None
    members: dict[str, GuessedField] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The smallest type that all of its values fit; `json` where only that does, or where all were null."""
        match sorted(self.words):
            case ["list"]:
                return f"list<{self.items.type if self.items else 'json'}>"
            case ["struct"] if (value := self._map_value()) is not None:
                return f"map<string, {value}>"
            case ["struct"] if self.members and all(map(_nameable, self.members)):
                inner = (f"{_quote(name)}:{guess.type}" for name, guess in self.members.items())
                return f"struct<{', '.join(inner)}>"
            case ["bool" | "date" | "float64" | "int64" | "string" | "timestamp" as only]:
                return only
            case ["float64", "int64"]:
                return "float64"
            case [*words] if words and set(words) <= _TEXTS:
                return "string"
        return "json"

    def _map_value(self) -> str | None:
        """The type of the values of an object whose names are data: many, each rare, and alike. None for any other."""
        often = sorted(guess.seen for guess in self.members.values())
        objects = self.seen - self.nulls
        if len(often) < _MANY_KEYS or often[-1] > _RARE * objects or often[len(often) // 2] > _RARE / 10 * objects:
            return None
        merged = GuessedField()
        for guess in self.members.values():
            merged.add(guess)
        alike = merged.type != "json" or all(guess.type == "json" for guess in self.members.values())
        return merged.type if alike else None

    def add(self, other: GuessedField) -> None:
        """Take in what another place has held."""
        self.seen += other.seen
        self.nulls += other.nulls
        self.words |= other.words
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
                self.words.add(_word(value))


@dataclass(slots=True)
class Sampled:
    """The content of a sample of values: counts of tombstones, JSON objects and others, and their fields.

    `encoded` counts those of the last kind that are JSON in another encoding than UTF-8, by its name.
    """

    values: int = 0
    tombstones: int = 0
    objects: int = 0
    encoded: Counter[str] = field(default_factory=Counter)
    fields: dict[str, GuessedField] = field(default_factory=dict)

    @property
    def other(self) -> int:
        return self.values - self.tombstones - self.objects

    @property
    def typed(self) -> bool:
        """Returns whether JSON is the format: nearly every value is an object with fields that a schema can name."""
        return bool(self.columns) and self.objects >= 0.95 * (self.values - self.tombstones)

    @property
    def columns(self) -> dict[str, str]:
        """The fields that a schema can name, with their types; a field that was always null is `json`."""
        columns: dict[str, str] = {}
        for name, guess in self.fields.items():
            try:
                parse_schema({**columns, name: guess.type})
            except SchemaError:
                continue  # it stays in _extra
            columns[name] = guess.type
        return columns


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


def _parse(value: bytes, encoding: str) -> Any:
    """The JSON that it is; None where it is none, or too large to read here."""
    if len(value) > MOST_VALUE_BYTES:
        return None
    try:
        return json.loads(value.decode(encoding), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


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
            return "timestamp" if _TIME.fullmatch(value) else "date" if _DATE.fullmatch(value) else "string"
    return "json"


def _nameable(name: str) -> bool:
    return bool(name) and name.isprintable() and not set("`.") & set(name)


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name}`"
