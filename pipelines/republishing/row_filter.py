"""A condition in SQL over rows, as `sluice republish --where` takes it: DuckDB evaluates it.

Promises: it is one expression, and nothing but an expression; it reaches no file, no network, no extension and no
setting; it takes at most `MEMORY`, in which DuckDB does not count text that the expression makes, and, for rows that
are read at once, `SECONDS`. A row alone decides whether it meets the condition: aggregates and windows over other rows
are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import UsageError
from sluice.pipelines.landing.landed_rows import Rows
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.rows.row_format import QUARANTINED, landed_schema
from sluice.pipelines.republishing.republish_plan import Wishes
from sluice.pipelines.schema.arrays import fixed_width
from sluice.pipelines.schema.schema import Schema

if TYPE_CHECKING:
    import duckdb

MEMORY = 256 << 20
SECONDS = 30.0
_NUMBER = "sluice number"
_SEALED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",  # names of variables are no tables
    "memory_limit": f"{MEMORY >> 20}MiB",
    "temp_directory": "",
    "threads": "1",
}


class Condition:
    """Rows that meet it pass. Use it as a `with`. Columns of `schema` that a file lacks are null, as for readers."""

    def __init__(self, sql: str, schema: pa.Schema | None = None) -> None:
        import duckdb

        self._schema = schema or pa.schema([])
        self._sql, self._db = sql, duckdb.connect(":memory:", config=_SEALED)
        self._db.execute("set TimeZone = 'UTC'; set lock_configuration = true")

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError if it is no condition over rows of that schema."""
        with self._explain_errors():
            relation = self._relation(pa.RecordBatch.from_pylist([], schema=schema))
            kind = str(relation.select(self._expression).types[0])
        if kind != "BOOLEAN":
            raise UsageError(f"--where {self._sql}: it is {kind}, and no condition", remedy="such as: amount > 100")
        self._meeting(pa.RecordBatch.from_pylist([], schema=schema))

    def filter(self, rows: Rows) -> Rows:
        """The rows that meet it, in their order. Raises UsageError."""
        for batch in rows:
            met = self._meeting(batch)
            if len(met) == batch.num_rows:
                yield batch
            elif len(met):
                yield take_rows(batch, met)

    def _meeting(self, rows: pa.RecordBatch) -> np.ndarray:
        """The places of the rows that meet it, ascending."""
        with self._explain_errors(values=rows.num_rows > 0), self._in_time():
            matches = self._relation(rows).filter(self._expression).select(f'"{_NUMBER}"').to_arrow_table()
        return np.sort(matches.column(0).to_numpy())

    @property
    def _expression(self) -> duckdb.Expression:
        import duckdb

        return duckdb.SQLExpression(self._sql)

    def _relation(self, rows: pa.RecordBatch) -> duckdb.DuckDBPyRelation:
        for field in self._schema:
            if field.name not in rows.schema.names:
                rows = rows.append_column(field.with_nullable(True), pa.nulls(rows.num_rows, field.type))
        numbered = rows.append_column(_NUMBER, fixed_width(pa.int64(), np.arange(rows.num_rows)))
        return self._db.from_arrow(pa.Table.from_batches([numbered]))

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        timer = threading.Timer(SECONDS, self._db.interrupt)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _explain_errors(self, *, values: bool = False) -> Iterator[None]:
        """`values`: an error of DuckDB may contain a row's values, so only its kind is reported."""
        import duckdb

        try:
            yield
        except duckdb.InterruptException:
            reason = f"takes more than {SECONDS:.0f} s for the rows of one read"
            raise UsageError(f"--where {self._sql}: it {reason}", remedy="ask for less") from None
        except duckdb.Error as error:
            reason = str(error).splitlines()[0][:300]
            if values:
                reason = f"{type(error).__name__} for some row; `try(…)` and `try_cast(… as …)` give null instead"
            raise UsageError(
                f"--where {self._sql}: {reason}", remedy="it is a condition in DuckDB's SQL over one row's columns"
            ) from None


@contextmanager
def open_condition(wishes: Wishes, schema: Schema | None) -> Iterator[Condition | None]:
    """The condition that a plan says; None for none. `schema`: that of landed rows."""
    if not wishes.where:
        yield None
        return
    with Condition(wishes.where, _get_schema(wishes, schema)) as condition:
        yield condition


def check(wishes: Wishes, schema: Schema | None) -> None:
    """Raises UsageError if the plan's condition is none over the feed's rows. `schema`: that of landed rows."""
    with open_condition(wishes, schema) as condition:
        if condition is not None:
            condition.check(_get_schema(wishes, schema))


def _get_schema(wishes: Wishes, schema: Schema | None) -> pa.Schema:
    return QUARANTINED if wishes.kind is PartKind.QUARANTINED else landed_schema(schema)
