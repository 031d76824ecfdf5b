"""Envelopes of records: change events of Debezium, Kafka Connect's JSON with schemas, and CloudEvents.

Pure functions over a sample. An envelope says where the row's fields lie in a record, and which of the others have
columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from sluice.pipelines.schema.inference import GuessedField

Path = tuple[str, ...]
MOST_OTHERS = 0.05
"""The share of JSON objects that may lack the envelope."""
_CHANGE = {"c", "r", "u", "d", "t", "m"}
_OF_CHANGES = [("op",), ("ts_ms",), *(("source", name) for name in ("ts_ms", "schema", "table")), ("before",)]


@dataclass(frozen=True, slots=True)
class SampledRecord:
    """A record: its coordinates, the texts of its last headers of each name, its value as `parse_value` has it, and its
    key: a JSON object, or else its text."""

    partition: int
    offset: int
    headers: Mapping[str, str]
    value: dict[str, Any] | str
    key: dict[str, Any] | str = ""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The place of the row's fields in records.

    The row is the first object at one of the paths `rows`; its columns are read `at` a path. `attributes` are further
    columns, by name, with the paths or headers that they are read from. Values of a `database` are sent in other forms.
    `title` is empty for records that are the row. With a `key`, records are changes of rows, and columns are the row's.
    """

    title: str = ""
    at: Path = ()
    rows: tuple[Path, ...] = ((),)
    attributes: Mapping[str, Path | str] = field(default_factory=dict)
    database: bool = False
    has_schema: bool = False
    key: tuple[str, ...] = ()

    def get_row(self, value: dict[str, Any] | str) -> dict[str, Any] | None:
        """The object with the row's fields; None for records without one."""
        rows = (get_value(value, path) for path in self.rows)
        return next((row for row in rows if isinstance(row, dict)), None)

    def list_attributes(self, record: SampledRecord) -> Iterator[tuple[str, Any]]:
        """The values that attributes have in the record."""
        for name, path in self.attributes.items():
            of, path = (record.headers, (path,)) if isinstance(path, str) else (record.value, path)
            if (holder := get_value(of, path[:-1])) is not None and path[-1] in holder:
                yield name, holder[path[-1]]

    def find_types(self, records: Iterable[SampledRecord], fields: Mapping[str, GuessedField]) -> dict[str, str]:
        """The types of the row's columns by the schemas that records carry, or as a database sends values."""
        types = {name: guess.get_sent_type(name) for name, guess in fields.items()} if self.database else {}
        types |= {name: "json" for name, path in self.attributes.items() if path[-1] == "before"}
        types |= {name: "string" for name, path in self.attributes.items() if isinstance(path, str)}
        schemas = [r.value.get("schema") for r in records if isinstance(r.value, dict)] if self.has_schema else []
        for schema in schemas:
            for name in self.at[1:]:
                schema = next((s for s in _list_fields(schema) if s.get("field") == name), None)
            nodes = [node for node in _list_fields(schema) if node.get("field") in fields]
            types |= {node["field"]: _spell_type(node, fields[node["field"]]) for node in nodes}
        return types


def get_value(value: Any, path: Iterable[str]) -> Any:
    """The value at a path; None without one."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def find_envelope(records: Sequence[SampledRecord]) -> Envelope:
    """The envelope of nearly all JSON objects; the plain one if there is none."""
    objects = [r for r in records if isinstance(r.value, dict)]
    # A few records of another kind do not hide the envelope of the others.
    enough = (1 - MOST_OTHERS) * len(objects)
    wrapped = sum(r.value.keys() == {"schema", "payload"} for r in objects if isinstance(r.value, dict))
    prefix: Path = ("payload",) if objects and wrapped >= enough else ()
    # The kinds nest: Connect's envelope may have a change event as its payload. So it is opened first.
    contents = [c for r in objects if isinstance(c := get_value(r.value, prefix), dict)]
    changes = [c for c in contents if "source" in c and c.get("op") in _CHANGE and ("after" in c or "before" in c)]
    if len(changes) >= max(1, enough):
        paths = [path for path in _OF_CHANGES if any(get_value(c, path) is not None for c in contents)]
        return Envelope(
            "change events of Debezium: columns have the row after a change; of deletes, __before has it",
            (*prefix, "after"),
            ((*prefix, "after"), (*prefix, "before")),
            {f"__{'_'.join(path)}": (*prefix, *path) for path in paths},
            database=True,
            has_schema=bool(prefix),
        )
    if prefix:
        return Envelope("JSON of Kafka Connect with its schema", prefix, (prefix,), database=True, has_schema=True)
    if sum({"specversion", "id", "source", "type"} <= c.keys() for c in contents) >= max(1, enough):
        # Without an object in `data`, it is a column of its own.
        names = dict.fromkeys(chain.from_iterable(contents))
        has_row = any(isinstance(c.get("data"), dict) for c in contents)
        attributes = {f"ce_{name}": (name,) for name in names if name != "data" or not has_row}
        return Envelope(
            "CloudEvents: the columns of `data`, and the event's attributes", ("data",), (("data",),), attributes
        )
    if objects and sum({"ce_specversion", "ce_type"} <= r.headers.keys() for r in objects) >= enough:
        names = dict.fromkeys(name for r in objects for name in r.headers if name.startswith("ce_"))
        title = "CloudEvents in binary mode: the columns of the value, and the event's attributes from headers"
        return Envelope(title, attributes={name: name for name in names})
    return Envelope()


def identify_rows(envelope: Envelope, records: Sequence[SampledRecord]) -> Envelope:
    """Returns the envelope with the key of rows, if records are changes. Keys are JSON objects with the same fields, or
    the text of one field."""
    if not envelope.database or envelope.at[-1:] != ("after",):
        return envelope
    keys = [key for r in records if isinstance(key := r.key, dict)]
    keys = [key["payload"] if key.keys() == {"schema", "payload"} else key for key in keys]
    names = {tuple(key) for key in keys if isinstance(key, dict)}
    rows = [(r.key, row) for r in records if isinstance(r.key, str) and (row := envelope.get_row(r.value))]
    if not keys and len({key for key, _ in rows}) > 1:
        alike = (name for name in rows[0][1] if all(str(row.get(name)) == key for key, row in rows))
        names = {(name,) for name in islice(alike, 1)}
    if len(names) != 1:
        return envelope
    title = "change events of Debezium: columns are those of the rows that change"
    return replace(envelope, title=title, attributes={}, key=names.pop())


def _list_fields(schema: Any) -> list[dict[str, Any]]:
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return [f for f in fields if isinstance(f, dict)] if isinstance(fields, list) else []


_TYPES = {"boolean": "bool", "float": "float32", "double": "float64", "bytes": "binary"}
_SEMANTIC = {
    "org.apache.kafka.connect.data.Date": "date from days",
    "org.apache.kafka.connect.data.Timestamp": "epoch(ms)",
    "io.debezium.time.Date": "date from days",
    "io.debezium.time.Timestamp": "epoch(ms)",
    "io.debezium.time.MicroTimestamp": "epoch(us)",
    "io.debezium.time.NanoTimestamp": "epoch(ns)",
    "io.debezium.time.ZonedTimestamp": "timestamp",
}
"""Types by the names that schemas of Kafka Connect give them."""


def _spell_type(node: Mapping[str, Any], guess: GuessedField) -> str:
    """The type of a schema of Kafka Connect. `guess` has the values: a converter may send decimals as numbers."""
    kind, name = node.get("type"), node.get("name")
    if name == "org.apache.kafka.connect.data.Decimal":
        parameters = node.get("parameters") or {}
        precision, scale = parameters.get("connect.decimal.precision", "38"), parameters.get("scale", "0")
        is_number = not {"int64", "float64", "number"}.isdisjoint(guess.words)
        return f"decimal({precision},{scale})" + ("" if is_number else " from base64")
    if name in _SEMANTIC:
        return _SEMANTIC[name]
    if kind in ("array", "map", "struct") or (kind == "string" and guess.scales):
        return guess.get_sent_type("")
    return _TYPES.get(str(kind), str(kind))
