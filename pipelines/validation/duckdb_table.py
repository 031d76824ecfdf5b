"""The landed rows of a batch as one DuckDB table, and the questions asked of it.

The needed columns of the staged parts are read once, from whatever lake. Promise: memory is bounded by DuckDB's limit
and one row group, for any batch; the rest spills to a folder that is removed afterwards. Tombstones do not
count as rows; nulls and NaN do not count as values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.contract.literals import Value
from sluice.pipelines.lake import parquet
from sluice.pipelines.model.receipts import EXAMPLES, PartKind, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.schema import KAFKA, Kind, Type, TypeFamily
from sluice.pipelines.util import scratch

if TYPE_CHECKING:
    import duckdb

MEMORY = 512 << 20
"""Bytes that DuckDB may hold before it spills."""
ROWS_AT_ONCE = 1 << 16
"""How many rows are read from a part at once."""
_THREADS = min(os.cpu_count() or 1, 4)
_FLOATS = (Kind.FLOAT32, Kind.FLOAT64)
_AS_FLOAT = (*_FLOATS, Kind.DECIMAL)


class StagedTable:
    """The rows, with a column `c0`, `c1`, … for each name.

    Times are whole numbers of their unit and dates are whole days. For nested values the table only knows whether they
    are there. With `placed` it can name the records behind rows.
    """

    def __init__(self, db: duckdb.DuckDBPyConnection, types: Mapping[str, Type], *, typed: bool, placed: bool) -> None:
        self._db, self._types = db, types
        self._names = {name: f"c{i}" for i, name in enumerate(types)}
        self._tombstone = f"{KAFKA}tombstone" if typed else None
        self._offset = (f"{KAFKA}offset" if typed else "offset") if placed else None
        self._places: list[str] = []
        self._made = False
        self.rows = 0

    @classmethod
    @contextmanager
    def create(cls, types: Mapping[str, Type], *, typed: bool, placed: bool, memory: int = MEMORY) -> Iterator[Self]:
        """An empty table that is removed when the block ends. Raises Failed when there is no room to spill."""
        with scratch.open_duckdb(memory, _THREADS, "check the rows") as (db, _):
            yield cls(db, types, typed=typed, placed=placed)

    # -- filling it

    def add(self, receipts: Sequence[Receipt], lake: Lake) -> None:
        """Read the rows of the receipts' staged parts. Call it once. Raises PartUnreadable."""
        self._places = [str(r.offset_range.tp) for r in receipts]
        needed = [n for n in (*self._types, self._tombstone, self._offset) if n]
        for at, receipt in enumerate(receipts):
            for part in receipt.of(PartKind.LANDED):
                for batch in parquet.read_part(lake, part, part.staged, ROWS_AT_ONCE, list(dict.fromkeys(needed))):
                    self._insert(at, batch)
        if self._made:
            (self.rows,) = self._one("select count(*) from t")

    def _insert(self, at: int, batch: pa.RecordBatch) -> None:
        columns = {c: _to_duckdb(batch.column(n), self._types[n]) for n, c in self._names.items()}
        chosen = [_select_value(c, self._types[n]) for n, c in self._names.items()]
        if self._offset:
            columns["o"] = batch.column(self._offset)
            chosen += [f"{at}::int32 as r", "o"]
        if self._tombstone:
            columns["tombstone"] = batch.column(self._tombstone)
        rows = f"select {', '.join(chosen)} from batch" + (" where not tombstone" if self._tombstone else "")
        self._db.register("batch", pa.table(columns))
        self._db.execute(f"insert into t {rows}" if self._made else f"create temp table t as {rows}")
        self._db.unregister("batch")
        self._made = True

    # -- asking it

    def aggregates(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """The values of (function, column) pairs, in one query; None where there are no values.

        Functions are `min`, `max`, `count` (of values), `sum`, `avg` and `stddev_samp`.
        """
        import duckdb

        requested = list(dict.fromkeys(wanted))
        if not requested:
            return {}
        try:
            values = self._one(f"select {', '.join(self._aggregate(*one) for one in requested)} from t")
        except duckdb.OutOfRangeException:
            values = tuple(self._compute_alone(*one) for one in requested)
        return dict(zip(requested, values, strict=True))

    def _compute_alone(self, function: str, name: str) -> Any:
        """The value of one aggregate. DuckDB 1 raises an error for a deviation that is no number, or infinite."""
        import duckdb

        try:
            return self._one(f"select {self._aggregate(function, name)} from t")[0]
        except duckdb.OutOfRangeException:
            (has_infinite,) = self._one(f"select bool_or(isinf({self._names[name]}::double)) from t")
            return math.nan if has_infinite else math.inf

    def _aggregate(self, function: str, name: str) -> str:
        """The SQL of one aggregate. Sums of whole numbers are exact; other sums are floats."""
        floats = self._types[name].kind in _AS_FLOAT and function in ("sum", "avg", "stddev_samp")
        return f"{function}({self._names[name]}{'::double' if floats else ''})"

    def read_ranks(self, name: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The values at these ranks of the sorted column, by rank. Ranks count from 0; nulls are left out."""
        c = self._names[name]
        self._db.execute(f"create or replace temp table s as select {c} as v from t where {c} is not null order by {c}")
        rows = self._all(f"select rowid, v from s where rowid in ({', '.join(str(int(r)) for r in ranks)})")
        self._db.execute("drop table s")
        return dict(rows)

    @contextmanager
    def count_distinct(self, names: Sequence[str]) -> Iterator[Counted]:
        """The distinct rows of some columns, and how often each occurs. Open only one at a time."""
        chosen = [self._names[n] for n in names]
        self._db.execute(f"create temp table v as select {', '.join(chosen)}, count(*) as n from t group by all")
        try:
            yield Counted(self._db, chosen, self._places if self._offset else None)
        finally:
            self._db.execute("drop table v")

    def _one(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._all(query)[0]
        return row

    def _all(self, query: str) -> list[Any]:
        return self._db.execute(query).fetchall()


class Counted:
    """Distinct rows of some columns. Two conditions: `some` (not all columns are null), `full` (none is null)."""

    def __init__(self, db: duckdb.DuckDBPyConnection, columns: Sequence[str], positions: Sequence[str] | None) -> None:
        self._db, self._columns, self._places = db, columns, positions
        nulls = [f"{c} is null" for c in columns]
        self.some, self.full = f"not ({' and '.join(nulls)})", f"not ({' or '.join(nulls)})"
        self.all = "true"

    def count_repeated(self, which: str) -> tuple[int, int]:
        """How many rows meet the condition, and how many of them occur more than once."""
        query = f"select coalesce(sum(n), 0), coalesce(sum(n) filter (n > 1), 0) from v where {which}"
        checked, more = self._one(query)
        return int(checked), int(more)

    def first_repeated(self, which: str) -> tuple[str, ...]:
        """Where the first repeated rows are, as `topic:partition:offset`."""
        same = " and ".join(f"t.{c} is not distinct from v.{c}" for c in self._columns)
        query = f"select r, o from t where exists (select 1 from v where v.n > 1 and {which} and {same})"
        rows = self._db.execute(f"{query} order by r, o limit {EXAMPLES}").fetchall()
        return tuple(f"{self._places[r]}:{o}" for r, o in rows) if self._places else ()

    @property
    def distinct(self) -> int:
        """The number of distinct values of the one column."""
        return int(self._one(f"select count(*) from v where {self.full}")[0])

    def against(self, members: Sequence[Value]) -> tuple[int, int]:
        """How many distinct values of the one column are no members, and how many members do not occur."""
        self._members(members)
        c = self._columns[0]
        strange = self._one(f"select count(*) from v anti join m on v.{c} = m.x where {c} is not null")
        return int(strange[0]), int(self._one(f"select count(*) from m anti join v on v.{c} = m.x")[0])

    def most_common(self, members: Sequence[Value]) -> tuple[int, int, int]:
        """How many values are most common, how many of these are members, and how often each occurs."""
        self._members(members)
        c = self._columns[0]
        query = f"""select count(*), count(m.x), coalesce(max(n), 0) from v left join m on v.{c} = m.x
            where {c} is not null and n = (select max(n) from v where {c} is not null)"""
        modes, inside, often = self._one(query)
        return int(modes), int(inside), int(often)

    def _members(self, members: Sequence[Value]) -> None:
        """Load the members as the column's type: text exactly, numbers as the nearest that the type holds."""
        kind = self._one(f"select any_value(column_type) from (describe v) where column_name = '{self._columns[0]}'")[0]
        query = f"create or replace temp table m as select distinct unnest(?::varchar[])::{kind} as x"
        self._db.execute(query, [[str(m) for m in members]])

    def _one(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._db.execute(query).fetchone()
        return row or ()


def _to_duckdb(column: pa.Array, t: Type) -> pa.Array:
    """The column as DuckDB gets it: a plain array, without types that DuckDB would round."""
    match t.kind.family:
        case TypeFamily.TIME:
            return pc.cast(column, pa.int64())
        case TypeFamily.DAY:
            return pc.cast(column, pa.int32())
        case TypeFamily.NESTED:
            return pc.is_valid(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _select_value(c: str, t: Type) -> str:
    if t.kind in _FLOATS:
        return f"case when isnan({c}) then null else {c} end as {c}"
    return f"nullif({c}, false) as {c}" if t.kind.family is TypeFamily.NESTED else c
