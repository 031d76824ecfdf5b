"""Single records shown: bytes from outside are made harmless for people and kept whole, as base64, for programs."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.terminal.output import facts, safe, table
from sluice.cli.terminal.text_layout import count
from sluice.pipelines.util.units import CALENDAR_ENDS, DAY, TICKS_PER_SECOND, many, show_instant

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_BYTES = 240
"""Of a key or value, for people."""
_YEAR_1 = -62_135_596_800_000


def rows(table: pa.Table) -> list[dict[str, Any]]:
    """Records of a table with Spark's Kafka columns; timestamps in ms, since a calendar may not reach them."""
    import pyarrow as pa

    at = table.schema.get_field_index("timestamp")
    records: list[dict[str, Any]] = table.set_column(at, "timestamp", table.column(at).cast(pa.int64())).to_pylist()
    return records


def typed_fields(table: pa.Table) -> dict[str, Any] | None:
    """The one row of a typed feed's table for programs: its fields and coordinates as JSON has them; None for others.

    Times and decimals as text, bytes in base64, the Kafka timestamp in ms.
    """
    if "kafka_offset" not in table.schema.names:
        return None
    cells = {name: column[0] for name, column in zip(table.column_names, table.columns, strict=True)}
    kafka = {name: cells.pop(name) for name in [*cells] if name.startswith("kafka_")}
    stamp = kafka["kafka_timestamp"]
    plain = {name: _to_plain(cell) for name, cell in kafka.items()}
    return {name: _to_plain(cell) for name, cell in cells.items()} | plain | {"kafka_timestamp": stamp.value}


def typed_view(row: Mapping[str, Any]) -> RenderableType:
    """Format a row of `typed_fields`, one field per line, without nulls. Keys in UTF-8 are text, and the timestamp is
    a time."""
    row = {**row, "kafka_key": _to_readable(row["kafka_key"]), "kafka_timestamp": _time(row["kafka_timestamp"])}
    pairs = ((name, json.dumps(value, ensure_ascii=False)) for name, value in row.items() if value is not None)
    return facts(*((name, text if len(text) < SHOWN_BYTES else text[:SHOWN_BYTES] + " …") for name, text in pairs))


def _to_readable(data: str | None) -> str | None:
    """The text behind the base64, if it is text."""
    try:
        return None if data is None else base64.b64decode(data).decode()
    except UnicodeDecodeError:
        return data


def _to_plain(cell: pa.Scalar) -> Any:
    """A value as JSON has it."""
    import pyarrow as pa

    kind = cell.type
    if not cell.is_valid:
        return None
    if pa.types.is_struct(kind):
        return {f.name: _to_plain(cell[i]) for i, f in enumerate(kind)}
    if pa.types.is_map(kind):
        return {str(_to_plain(entry["key"])): _to_plain(entry["value"]) for entry in cell.values}
    if pa.types.is_list(kind):
        return [_to_plain(item) for item in cell.values]
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return time_text(cell)
    if pa.types.is_decimal(kind):
        return str(cell.as_py())
    return _base64(cell.as_py()) if pa.types.is_binary(kind) else cell.as_py()


def time_text(cell: pa.Scalar) -> str:
    """A time or day as text. Where the calendar ends, the number itself: its text would be another time's."""
    import numpy as np
    import pyarrow as pa

    unit, number = "days" if pa.types.is_date(cell.type) else cell.type.unit, int(cell.value)
    ms = number * DAY if unit == "days" else number * 1000 // TICKS_PER_SECOND[unit]
    if not _YEAR_1 <= ms < CALENDAR_ENDS:
        return f"{number} {unit}"
    # as Arrow casts it to text, which takes 40 ms to import
    text = str(np.array(number).astype(f"M8[{'D' if unit == 'days' else unit}]")).replace("T", " ")
    return f"{text}Z" if getattr(cell.type, "tz", None) else text


def view(records: Sequence[Mapping[str, Any]], states: Sequence[str] | None = None) -> RenderableType:
    """Returns a table of records with Spark's Kafka columns. `states` describes each."""
    columns: dict[str, list[str | Text]] = {
        "offset": [count(r["offset"]) for r in records],
        "timestamp": [_time(r["timestamp"]) for r in records],
        "key": [_format_bytes(r["key"]) for r in records],
        "value": [_format_value(r["value"], r.get("withheld_bytes")) for r in records],
    }
    if any(r["headers"] for r in records):
        columns["headers"] = [", ".join(h["key"] for h in r["headers"] or ()) for r in records]
    if states:
        columns["state"] = [Text(s, style="yellow") for s in states]
    return table(list(columns), list(zip(*columns.values(), strict=True)), right="offset")


def build_document(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record for programs: key, value and header values in base64, the timestamp in ms."""
    return {
        "topic": record["topic"],
        "partition": record["partition"],
        "offset": record["offset"],
        "timestamp": record["timestamp"],
        "timestamp_type": record["timestampType"],
        "key": _base64(record["key"]),
        "value": _base64(record["value"]),
        "headers": [{"key": h["key"], "value": _base64(h["value"])} for h in record["headers"] or ()],
    }


def _time(ms: int | None) -> str:
    return "–" if ms is None else show_instant(ms)


def _format_value(value: bytes | None, withheld: int | None) -> Text:
    if withheld is not None:
        return Text(f"{many(withheld, 'byte')}, {'encrypted' if value else 'withheld'}", style="dim")
    return Text("tombstone", style="dim") if value is None else _format_bytes(value)


def _format_bytes(value: bytes | None) -> Text:
    """Format bytes as shortened text. Bytes that are no UTF-8, and control characters, are escaped."""
    if value is None:
        return Text("null", style="dim")
    text = safe(value[:SHOWN_BYTES].decode("utf-8", "backslashreplace")).replace("\n", "\\n")
    more = len(value) - SHOWN_BYTES
    return Text(text).append(f" … {more:,} bytes more", style="dim") if more > 0 else Text(text)


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")
