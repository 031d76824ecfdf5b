"""A feed's section `changes`: records that are changes of rows by key, and the columns that their envelope lands as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from sluice.pipelines.feed.sections import Settings, Text
from sluice.pipelines.schema.protection import RAW_KEY, Action, Rule
from sluice.pipelines.schema.schema import KAFKA, Kind, Schema, Type
from sluice.pipelines.schema.wider import RAW_TYPES, parse_type
from sluice.pipelines.util.units import sanitize


class ChangeFormat(StrEnum):
    """How a record describes a change: by Debezium's envelope, or as the new row of its key (null: none)."""

    DEBEZIUM = "debezium"
    UPSERT = "upsert"


def _list_names(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ChangesSettings(Settings):
    """Records are changes of rows. `key` names the fields that identify a row; without it, Kafka's key does.

    Changes of a key are ordered by the values at the paths `order_by`, and then by topic, partition and offset. Without
    them, all changes of a key have to be in one partition.
    """

    format: ChangeFormat
    key: Annotated[tuple[Text, ...], BeforeValidator(_list_names)] = ()
    order_by: Annotated[tuple[Text, ...], BeforeValidator(_list_names)] = ()
    deletes: Literal["remove"] = "remove"


BEFORE, AFTER, OPERATION = "before", "after", "op"
_ENVELOPE = {"source": "json", "transaction": "json", "ts_ms": "epoch(ms)", "ts_us": "int64", "ts_ns": "int64"}
ORDER = "change_order"
"""The column of a current table with the values of `order_by`, as a text that sorts like them."""
KEY_KINDS = frozenset(k for k in Kind if "int" in k) | {Kind.STRING, Kind.BINARY, Kind.DECIMAL, Kind.DATE, Kind.BOOL}


class UnusableChanges(ValueError):
    """Changes by which no row can be identified."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def build_envelope(row: Mapping[str, Any], key: object) -> dict[str, Any]:
    """Returns the schema of Debezium's envelope around rows with these columns.

    A row without its key is quarantined. Of a row before a change, sources may record the key alone.
    """
    names = _list_names(key)
    keys = {name: text for name, text in row.items() if isinstance(names, (list, tuple)) and name in names}
    required = {n: f"{t} not null" if isinstance(t, str) and "not null" not in t else t for n, t in keys.items()}
    optional = {n: t.replace(" not null", "") if isinstance(t, str) and ">" not in t else t for n, t in row.items()}
    return {OPERATION: "string not null", BEFORE: optional | required, AFTER: {**row, **required}, **_ENVELOPE}


def get_row_columns(changes: ChangesSettings, columns: Mapping[str, Type]) -> dict[str, Type]:
    """Returns the columns of the rows that change, from those of the changes as they land."""
    if changes.format is ChangeFormat.UPSERT:
        return dict(columns)
    return {f.name: f.type for f in columns[AFTER].fields}


def check_changes(changes: ChangesSettings, columns: Schema | None) -> None:
    """Raises UnusableChanges for changes that cannot be folded. `columns` are those of landed rows."""
    types = {f.name: f.type for f in columns.fields} if columns else {}
    if changes.format is ChangeFormat.DEBEZIUM:
        if not types:
            raise UnusableChanges("needs the columns of the row", "give the feed a `schema`: {id: int64, name: string}")
        if any(
            n not in types or (n != OPERATION and types[n].kind is not Kind.STRUCT) for n in (BEFORE, AFTER, OPERATION)
        ):
            raise UnusableChanges("has no envelope with before, after and op", "use `format: upsert` for plain rows")
        if not changes.key:
            raise UnusableChanges("names no key", "write the fields of the primary key, such as `key: [id]`")
    rows = get_row_columns(changes, types)
    for name in changes.key:
        if name not in rows:
            names = ", ".join(rows) or "Kafka's own, which is the default"
            raise UnusableChanges(f"has {sanitize(name)} in its key, which is no column", f"columns: {names}")
        if rows[name].kind not in KEY_KINDS:
            what = f"has {sanitize(name)} in its key, which is {rows[name]}"
            raise UnusableChanges(what, "a key has whole numbers, texts, bytes, decimals, dates and booleans")
    kafka = {KAFKA + name if types else name: parse_type(text) for name, text in RAW_TYPES.items()}
    for path in changes.order_by:
        if not _has_values(path.split("."), types | kafka):
            what = f"orders by {sanitize(path)}, where no column has a value"
            raise UnusableChanges(what, "write such as source.lsn or kafka_timestamp")
    own = (ORDER, KAFKA) if changes.format is ChangeFormat.DEBEZIUM else (ORDER,)
    if clash := next((n for n in rows if n.casefold().startswith(own)), ""):
        raise UnusableChanges(f"has the column {sanitize(clash)}, a name of Sluice's own", "give it another name")


def _has_values(path: Sequence[str], types: Mapping[str, Type]) -> bool:
    """Returns whether a column or a member of one, which may be JSON, is at the path."""
    name, *steps = path
    if name not in types or not steps:
        return name in types and not types[name].fields
    kind = types[name].kind
    return kind is Kind.JSON or (
        kind is Kind.STRUCT and _has_values(steps, {f.name: f.type for f in types[name].fields})
    )


def check_protection(changes: ChangesSettings, rules: Mapping[str, Rule]) -> None:
    """Raises UnusableChanges for rules that change keys: Kafka's key would not name the same row, or name several."""
    for path, rule in rules.items():
        of_key = {f"{above}{name}" for name in changes.key for above in ("", "*.", f"{BEFORE}.", f"{AFTER}.")}
        if path in of_key or (path == RAW_KEY and not changes.key and rule.action is not Action.HMAC):
            what = f"has {sanitize(path)}, which names a row, under a rule of `protect`"
            raise UnusableChanges(what, "use Kafka's key, under {hmac: …}, or leave the field as it is")
