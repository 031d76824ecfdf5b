"""Infers types from a sample: the schema that these JSON values fit, but for a few strays.

Pure functions. Nothing here decides about rows: a person reads the proposal, and records that do not fit it later go to
the quarantine, as with any schema.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
    Field,
    Kind,
    SchemaError,
    Type,
    count_fields,
    parse_schema,
    quote_name,
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
_KINDS = {"bool": "boolean", "list": "array", "struct": "object", "json": "deep value"}
_KINDS |= dict.fromkeys(("int64", "float64", "number"), "number")
_KINDS |= dict.fromkeys(("date", "timestamp", "string"), "text")
"""The kinds of JSON values by the words of types; `number` is one with more digits than a type has."""
MOST_FIELDS = 50
"""A column with more fields within it is proposed as `json`."""
RARE, _LONG_TYPE = 0.005, 80
"""A field of a smaller share of the objects gets no column if its type has more characters."""
MOST_STRAYS = 0.01
"""The share of values that may differ from the type of the others. Feeds allow this share of quarantined records."""
_DECIMAL_TEXT = re.compile(r"-?\d{1,28}\.(\d{1,10})", re.ASCII)
_DAY_WORDS = frozenset(["date", "day", "birthday", "birthdate", "dob"])
_DAYS_SINCE_1970 = range(1_000, 60_000)
_ITEMS = 1000
"""Limit of inspected elements of a list."""
_MANY_KEYS = 20
_RARE = 0.5
"""An object has data for names if it has at least `_MANY_KEYS` names over the sample, none is in more than this share
of its objects, and most are in a tenth of that."""
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
    """The values of one field in the sample's objects: their number, the nulls, and their types.

    `scales` are the digits behind the point of texts that are decimal numbers, and −1 for any other text.
    """

    seen: int = 0
    nulls: int = 0
    words: Counter[str] = field(default_factory=Counter)
    items: GuessedField | None = None
    members: defaultdict[str, GuessedField] = field(default_factory=lambda: defaultdict(GuessedField))
    low: int | None = None
    high: int | None = None
    scales: set[int] = field(default_factory=set)

    def choose_word(self, share: float = MOST_STRAYS) -> tuple[str, int]:
        """Returns the word of the type that most values fit, and the number of the others.

        It is `json`, which all fit, if more than `share` of the values are others, and for numbers of which a float64
        would lose digits: these are not quarantined.
        """
        texts = {w for w in self.words if _KINDS[w] == "text"}
        options = {w: {w} for w in ("list", "struct", "bool", "int64")}
        options[next(iter(texts)) if len(texts) == 1 else "string"] = texts
        if not self.words["number"] and max(abs(self.low or 0), abs(self.high or 0)) <= _MOST_EXACT:
            options["float64"] = {"int64", "float64"}
        total, fitting = self.words.total(), {w: sum(self.words[v] for v in of) for w, of in options.items()}
        best = max(fitting, key=fitting.__getitem__)
        others = total - fitting[best]
        return (best, others) if total and others <= share * total else ("json", 0)

    def get_type(self, name: str, share: float = MOST_STRAYS) -> str:
        """The smallest type that the values of the field `name` fit; `json` if no other does, or all were null.

        Up to `share` of them may be of another type, outside of lists and maps. Integers are an `epoch` if the field's
        name and all values look like times. Numbers with more digits than a float64 holds are `json`.
        """
        match self.choose_word(share)[0]:
            case "list":
                return f"list<{self.items.get_type(name, 0) if self.items else 'json'}>"
            case "struct" if (value := self._map_value(name)) is not None:
                return f"map<string, {value}>"
            case "struct":
                inner = [
                    f"{quote_name(n)}:{spell_type(self.members[member].get_type(member, share), n, (member,))}"
                    for member, n in name_columns(self.members).items()
                ]
                return f"struct<{', '.join(inner)}>" if inner else "json"
            case "int64" if unit := self._find_unit(name):
                return f"epoch({unit})"
            case word:
                return word

    def get_sent_type(self, name: str) -> str:
        """The type of a database's column as change events send it: with decimals as text, and dates as days."""
        word, _ = self.choose_word()
        if word == "string" and len(self.scales) == 1 and (scale := max(self.scales)) > 0:
            return f"decimal(38,{scale}) from text"
        days = word == "int64" and self.low in _DAYS_SINCE_1970 and self.high in _DAYS_SINCE_1970
        return "date from days" if days and not _DAY_WORDS.isdisjoint(list_words(name)) else self.get_type(name)

    def list_mixes(self, path: str = "", share: float = MOST_STRAYS) -> Iterator[str]:
        """The types of the values where they differ, here and in members: `911 text, 6 number`, and the consequence."""
        kinds: Counter[str] = Counter()
        is_text = {_KINDS[w] for w in self.words} == {"text"}
        for word, number in self.words.items():
            kinds[("other text" if word == "string" else word) if is_text else _KINDS[word]] += number
        best, others = self.choose_word(share)
        if len(kinds) > 1 or others:
            mix = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
            ends = f": {others:,} record{'s'[: others > 1]} would be quarantined" if others else ""
            yield (f"{path}: " if path else "") + mix + (": json has all" if best == "json" else ends)
        if best == "list" and self.items:
            yield from self.items.list_mixes(f"{path}[]", 0)
        if best == "struct" and self._map_value("") is None:
            for name, member in self.members.items():
                yield from member.list_mixes(f"{path}.{name}", share)

    def _find_unit(self, name: str) -> str:
        """The unit of integers that are times since 1970 by the field's name and their range; empty for others."""
        if self.low is None or self.high is None or _TIMES.isdisjoint(list_words(name)):
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
        return merged.get_type(name, 0)

    def add(self, other: GuessedField) -> None:
        """Take in what another place has held."""
        self.seen += other.seen
        self.nulls += other.nulls
        self.words += other.words
        self.scales |= other.scales
        for number in (other.low, other.high):
            self._measure(number)
        if other.items:
            self.items = self.items or GuessedField()
            self.items.add(other.items)
        for name, inner in other.members.items():
            self.members[name].add(inner)

    def learn(self, value: Any, depth: int = _DEPTH) -> None:
        self.seen += 1
        match value:
            case None:
                self.nulls += 1
            case list() if depth:
                self.words["list"] += 1
                self.items = self.items or GuessedField()
                for inner in value[:_ITEMS]:
                    self.items.learn(inner, depth - 1)
            case dict() if depth:
                self.words["struct"] += 1
                for name, inner in value.items():
                    self.members[name].learn(inner, depth - 1)
            case _:
                self.words[word := _word(value)] += 1
                if word == "int64":
                    self._measure(value)
                elif word == "string":
                    number = _DECIMAL_TEXT.fullmatch(value)
                    self.scales.add(len(number[1]) if number else -1)

    def _measure(self, number: int | None) -> None:
        if number is not None:
            self.low = number if self.low is None else min(self.low, number)
            self.high = number if self.high is None else max(self.high, number)


@dataclass
class Sampled:
    """The content of a sample of values: counts of tombstones, JSON objects and others, and their fields.

    `encoded` counts those of the last kind that are JSON in another encoding than UTF-8, by its name; `constants` those
    that are objects with NaN or Infinity, which are no JSON and go to quarantine. `paths` are those of fields that are
    not the record's own (a text is a header), and `types` those that are known without values; `large` fields
    have too many others within them.
    """

    values: int = 0
    tombstones: int = 0
    objects: int = 0
    constants: int = 0
    encoded: Counter[str] = field(default_factory=Counter)
    fields: defaultdict[str, GuessedField] = field(default_factory=lambda: defaultdict(GuessedField))
    paths: dict[str, tuple[str, ...] | str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)

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
                fields = count_fields(parse_schema({column: self.get_type(name)}).fields)
            except SchemaError:
                continue
            if fields > MOST_FIELDS:
                self.large.add(name)
            nodes += min(fields, MOST_FIELDS)
            if nodes > MOST_NODES:
                break
            # A field of a handful of records that needs a long type stays in `_extra`.
            if self.fields[name].seen >= RARE * self.objects or len(self.get_type(name)) <= _LONG_TYPE:
                out[name] = column
        return out

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns with their types, as in a schema; a field that was always null is `json`."""
        return {c: spell_type(self.get_type(f), c, self.paths.get(f, (f,))) for f, c in self.names.items()}

    @property
    def left_out(self) -> list[str]:
        """The fields that have no column and land in `_extra`."""
        return [name for name in self.fields if name not in self.names]

    def get_type(self, name: str) -> str:
        return "json" if name in self.large else self.types.get(name) or self.fields[name].get_type(name)

    def count(self, value: dict[str, Any] | str) -> None:
        """Count a value as `parse_value` returns it."""
        self.values += 1
        match value:
            case dict():
                self.objects += 1
            case "tombstone":
                self.tombstones += 1
            case "constants":
                self.constants += 1
            case str() if value:
                self.encoded[value] += 1

    def learn(self, fields: Iterable[tuple[str, Any]]) -> None:
        for name, value in fields:
            self.fields[name].learn(value)


def parse_value(value: bytes | None) -> dict[str, Any] | str:
    """The JSON object; for others a word: `tombstone`, `constants`, an encoding such as `UTF-16`, or an empty text."""
    if value is None:
        return "tombstone"
    document = _parse(value, "utf-8-sig")
    if isinstance(document, dict):
        return document
    has_constants = isinstance(_parse(value, "utf-8-sig", strict=False), dict)
    return "constants" if has_constants else _encoding(value)


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


def is_data_text(text: str) -> bool:
    """Returns whether a text is a time, an identifier or a number, and not the name of a kind."""
    return len(text) > 2 and (_DATA.fullmatch(text) is not None or "://" in text or _find_text_type(text) != "string")


def list_words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _word(value: Any) -> str:
    """The type of one value that holds no others; `json` for what no type holds."""
    match value:
        case bool():
            return "bool"
        case int():
            return "int64" if value in _INT64 else "number"
        case Decimal():
            return "number"
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
            stem = re.sub(r"\W+", "_", f).strip("_")[: MOST_NAME // 2] or "field"
            stem = stem if _nameable(stem, top) else f"record_{stem}"
            names = (stem, *(f"{stem}_{n}" for n in range(2, MOST_NODES + 2)))
            columns[f] = next(n for n in names if n.casefold() not in taken)
            taken.add(columns[f].casefold())
    return {f: columns[f] for f in fields}


def spell_type(type_text: str, column: str, path: tuple[str, ...] | str) -> str:
    """The type of a column, with the path, the header (a text) or another name of its field."""
    any_type = Type(Kind.JSON)
    if isinstance(path, str):
        f = Field(column, any_type, header=path)
    else:
        f = Field(column, any_type, path=path) if path[1:] else Field(column, any_type, source=path[0])
    return type_text if path == (column,) else f"{type_text} {f.place}"


def _is_text(name: str) -> bool:
    try:
        return len(name.encode()) <= MOST_JSON_NAME
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _nameable(name: str, top: bool) -> bool:
    own = top and (name.lower().startswith(KAFKA) or name.lower() == EXTRA)
    return not own and 0 < len(name) <= MOST_NAME and name.isprintable() and not set("`.") & set(name)
