"""What every event's metadata is made of: numbers that Dagster plots, and bounded tables.

No setting of a client goes in, and of records no more than the names of fields. A table shows the first
`MAX_ROWS` rows, and one row with the number of others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from sluice.pipelines.schema.schema import EXTRA, KAFKA

_MARKUP = re.compile(
    r"""[<`*]                                           # HTML, code, emphasis
    |(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|~(?=~)         # emphasis
    |\](?=[(\[:])                                      # what makes links and images of brackets
    |(?<=:)/(?=/)|(?<=www)\.|@                         # addresses, which become links by themselves
    |\\(?=[!-/:-@\[-`{-~])|&(?=\#?[0-9A-Za-z]+;)       # an escape, an entity
    |^[-#>+=]                                          # a list, a heading, a quotation
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBERED = re.compile(r"^([0-9]+)(?=[.)])")


def plain(text: str) -> str:
    """One line of text as Markdown that shows exactly this text: no image, no link, no emphasis.

    Usual text stays as it is, for the places where the UI shows a description without rendering it.
    """
    return _NUMBERED.sub(r"\1\\", _MARKUP.sub(r"\\\g<0>", text))


Metadata = dict[str, Any]

MAX_ROWS = 200
"""Rows of a table: an event is read whole by every page that shows it."""


_OWN = {
    "key": "the record's key",
    "value": "the record's value, as it is in Kafka",
    "topic": "the topic that the record is in",
    "partition": "the topic's partition",
    "offset": "the record's offset in its partition",
    "timestamp": "the record's time",
    "timestampType": "0: the producer stamped it, 1: the broker did",
    "headers": "the record's headers, in their order",
    "tombstone": "whether the record has no value",
    "_extra": "the fields that the schema does not name, as JSON",
    "stage": "what refused the record: decode, schema or contract",
    "reason": "why, in one word",
    "expectation": "the contract's expectation that it broke",
    "field": "the field's path",
    "detail": "why, in a sentence",
    "byte": "where in the value",
    "batch": "the batch that read the record",
    "contract": "the hash of the contract that it was checked against",
}
"""Descriptions of Sluice's own columns."""


def columns_of(schema: pa.Schema, described: Mapping[str, str] | None = None, own: bool = False) -> dg.TableSchema:
    """Returns an Arrow schema as Dagster's columns. `described`: their descriptions. `own`: all are Sluice's own."""
    descriptions = described or {}
    kinds = ((f, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema)
    return dg.TableSchema(
        [
            dg.TableColumn(
                f.name,
                str(kind),
                description=descriptions.get(f.name) or _find_description(f.name, own),
                constraints=dg.TableColumnConstraints(nullable=f.nullable),
            )
            for f, kind in kinds
        ]
    )


def _find_description(name: str, own: bool) -> str | None:
    plain = name.removeprefix(KAFKA)
    return _OWN.get(plain) if own or plain != name or name == EXTRA else None


def table(rows: Sequence[Mapping[str, str | int | float]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """A bounded table; `columns` maps name to Dagster's type (`string`, `int`, `float`)."""
    records = [dg.TableRecord(dict(r)) for r in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest = {c: f"… and {len(rows) - MAX_ROWS} more" if i == 0 else "" for i, c in enumerate(columns)}
        records.append(dg.TableRecord(rest))
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(n, t) for n, t in columns.items()]))
