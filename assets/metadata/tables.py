"""What every event's metadata is made of: numbers that Dagster plots, and bounded tables.

No setting of a client goes in, and of records no more than the names of fields. A table shows the first
`MAX_ROWS` rows, and one row that says how many more there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

Metadata = dict[str, Any]

MAX_ROWS = 200
"""Rows of a table: an event is read whole by every page that shows it."""


def columns_of(schema: pa.Schema) -> dg.TableSchema:
    """An Arrow schema as Dagster shows columns."""
    kinds = ((f, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema)
    return dg.TableSchema(
        [
            dg.TableColumn(f.name, str(kind), constraints=dg.TableColumnConstraints(nullable=f.nullable))
            for f, kind in kinds
        ]
    )


def table(rows: Sequence[Mapping[str, str | int | float]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """A bounded table; `columns` maps name to Dagster's type (`string`, `int`, `float`)."""
    shown = [dg.TableRecord(dict(r)) for r in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest = {c: f"… and {len(rows) - MAX_ROWS} more" if i == 0 else "" for i, c in enumerate(columns)}
        shown.append(dg.TableRecord(rest))
    return dg.MetadataValue.table(shown, dg.TableSchema([dg.TableColumn(n, t) for n, t in columns.items()]))
