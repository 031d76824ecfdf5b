"""Readers of landed rows. Each finds the numbers of the rows that match a query, with its own kind of filter."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from tests.readers import foreign, literals
from tests.readers.landed import LandedSet
from tests.readers.values import Query

Answer = list[int] | str | None
"""The sorted numbers of the rows; or the error; None if the reader cannot express the query."""
ReadColumns = dict[str, Any]
"""By column: the values by row number, or the error."""


class Reader:
    """One way to read one store. `nan_is_largest`: NaN equals itself, and is larger than all numbers."""

    name: str
    store: str
    nan_is_largest = False
    lacks = ""
    """The filters that the reader cannot express."""

    def open_set(self, landed_set: LandedSet) -> Any:
        raise NotImplementedError

    def find(self, handle: Any, query: Query) -> Iterable[int] | None:
        """Returns the numbers of the matching rows."""
        raise NotImplementedError

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        raise NotImplementedError

    def ask(self, landed_set: LandedSet, queries: Sequence[Query]) -> tuple[list[Answer], ReadColumns]:
        """Run all queries, and read all columns. Returns the answers and the columns."""
        handle = self.open_set(landed_set)
        answers = [_try_call(functools.partial(self._find_sorted, handle, q)) for q in queries]
        return answers, {
            c.name: _try_call(functools.partial(self._read_column, handle, c.name)) for c in landed_set.columns
        }

    def _find_sorted(self, handle: Any, query: Query) -> list[int] | None:
        numbers = self.find(handle, query)
        return None if numbers is None else sorted(numbers)

    def _read_column(self, handle: Any, name: str) -> dict[int, Any]:
        rows = self.read_rows(handle, ["n", name])
        return dict(zip(rows["n"].to_pylist(), literals.normalize_column(rows[name]), strict=True))


def _try_call(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - each engine raises its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _build_expression(query: Query) -> pc.Expression:
    field = pc.field(*query.leaf.path)
    if query.operation == "is null":
        return field.is_null()
    values = [literals.to_arrow(query.leaf.type, v) for v in query.values]
    if query.operation == "in":
        return field.isin(
            pa.array([v.as_py() for v in values], values[0].type) if "ns" not in query.leaf.type else values
        )
    compare = {"=": operator.eq, "<": operator.lt, ">=": operator.ge}[query.operation]
    return compare(field, values[0])


def _build_triple(query: Query) -> list[tuple[str, str, Any]] | None:
    """Returns the filter in the form of `filters=`, which has neither members of structs nor null."""
    if query.operation == "is null" or len(query.leaf.path) > 1:
        return None
    values = [literals.to_native(query.leaf.type, v) for v in query.values]
    return [(query.leaf.path[0], query.operation, values if query.operation == "in" else values[0])]


class Dataset(Reader):
    name = "pyarrow dataset"
    store = "folder"

    def open_set(self, landed_set: LandedSet) -> Any:
        return pyarrow.dataset.dataset(landed_set.folder, format="parquet", partitioning="hive")

    def find(self, handle: Any, query: Query) -> Iterable[int]:
        return handle.to_table(columns=["n"], filter=_build_expression(query))["n"].to_pylist()

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return handle.to_table(columns=list(columns))


_TRIPLES_LACK = "no filter on null, nor on members of structs"


class Pandas(Reader):
    name = "pandas"
    store = "folder"
    lacks = _TRIPLES_LACK

    def open_set(self, landed_set: LandedSet) -> Any:
        return landed_set.folder

    def find(self, handle: Any, query: Query) -> Iterable[int] | None:
        import pandas

        triple = _build_triple(query)
        return None if triple is None else pandas.read_parquet(handle, columns=["n"], filters=triple)["n"]

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        import pandas

        return pa.table(pandas.read_parquet(handle, columns=list(columns), dtype_backend="pyarrow"))


class DuckDB(Reader):
    name = "DuckDB"
    store = "folder"
    nan_is_largest = True

    def open_set(self, landed_set: LandedSet) -> Any:
        import duckdb

        connection = duckdb.connect()
        connection.execute("set timezone = 'UTC'")
        self.register(connection, landed_set)
        return connection

    def register(self, connection: Any, landed_set: LandedSet) -> None:
        files = landed_set.folder.replace("'", "''")
        connection.execute(f"create view t as select * from read_parquet('{files}/**/*.parquet')")

    def find(self, handle: Any, query: Query) -> Iterable[int]:
        condition = literals.build_where(query, literals.to_duckdb)
        return [n for (n,) in handle.execute(f"select n from t where {condition}").fetchall()]

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return handle.sql(f"select {', '.join(columns)} from t").to_arrow_table()


class Polars(Reader):
    name = "Polars"
    store = "folder"
    nan_is_largest = True

    def open_set(self, landed_set: LandedSet) -> Any:
        import polars

        return polars.scan_parquet(landed_set.folder)

    def find(self, handle: Any, query: Query) -> Iterable[int]:
        return handle.filter(self._build_expression(query)).select("n").collect()["n"].to_list()

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return handle.select(columns).collect().to_arrow()

    def _build_expression(self, query: Query) -> Any:
        import polars

        first, *members = query.leaf.path
        column = polars.col(first)
        for name in members:
            column = column.struct.field(name)
        if query.operation == "is null":
            return column.is_null()
        values = [self._build_literal(query.leaf.type, v) for v in query.values]
        if query.operation == "in":
            return functools.reduce(operator.or_, (column == v for v in values))
        return {"=": operator.eq, "<": operator.lt, ">=": operator.ge}[query.operation](column, values[0])

    def _build_literal(self, text: str, value: Any) -> Any:
        import polars

        if "ns" in text:
            return polars.lit(value).cast(polars.Datetime("ns", "UTC"))
        if text.startswith("decimal"):
            return polars.lit(value, dtype=polars.Decimal(*map(int, text[8:-1].split(","))))
        return polars.lit(literals.to_native(text, value))


class PyIceberg(Reader):
    name = "PyIceberg"
    store = "iceberg"

    def open_set(self, landed_set: LandedSet) -> Any:
        return _load_iceberg(landed_set)

    def find(self, handle: Any, query: Query) -> Iterable[int]:
        return handle.scan(self._build_filter(query), selected_fields=("n",)).to_arrow()["n"].to_pylist()

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return handle.scan(selected_fields=tuple(columns)).to_arrow()

    def _build_filter(self, query: Query) -> Any:
        from pyiceberg.expressions import EqualTo, GreaterThanOrEqual, In, IsNull, LessThan

        name = ".".join(query.leaf.path)
        if query.operation == "is null":
            return IsNull(name)
        values = [literals.to_native(query.leaf.type, v) for v in query.values]
        if query.operation == "in":
            return In(name, values)
        return {"=": EqualTo, "<": LessThan, ">=": GreaterThanOrEqual}[query.operation](name, values[0])


def _load_iceberg(landed_set: LandedSet) -> Any:
    from pyiceberg.catalog import load_catalog

    return load_catalog("sluice", type="sql", uri=f"sqlite:///{landed_set.catalog}").load_table(f"db.{landed_set.name}")


class PolarsIceberg(Polars):
    name = "Polars scan_iceberg"
    store = "iceberg"

    def open_set(self, landed_set: LandedSet) -> Any:
        import polars

        return polars.scan_iceberg(_load_iceberg(landed_set))


class DeltaTriples(Reader):
    name = "deltalake filters="
    store = "delta"
    lacks = _TRIPLES_LACK

    def open_set(self, landed_set: LandedSet) -> Any:
        return _load_delta(landed_set)

    def find(self, handle: Any, query: Query) -> Iterable[int] | None:
        triple = _build_triple(query)
        return None if triple is None else handle.to_pyarrow_table(columns=["n"], filters=triple)["n"].to_pylist()

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return handle.to_pyarrow_table(columns=list(columns))


def _load_delta(landed_set: LandedSet) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(landed_set.folder)


class DeltaPandas(DeltaTriples):
    name = "deltalake to_pandas"

    def find(self, handle: Any, query: Query) -> Iterable[int] | None:
        triple = _build_triple(query)
        return None if triple is None else handle.to_pandas(columns=["n"], filters=triple)["n"]


class DeltaDataset(Dataset):
    name = "deltalake dataset"
    store = "delta"

    def open_set(self, landed_set: LandedSet) -> Any:
        return _load_delta(landed_set).to_pyarrow_dataset()


class DeltaDuckDB(DuckDB):
    name = "DuckDB over the dataset"
    store = "delta"

    def register(self, connection: Any, landed_set: LandedSet) -> None:
        connection.register("t", _load_delta(landed_set).to_pyarrow_dataset())


class DeltaQuery(Reader):
    name = "deltalake QueryBuilder"
    store = "delta"
    nan_is_largest = True

    def open_set(self, landed_set: LandedSet) -> Any:
        from deltalake import QueryBuilder

        return QueryBuilder().register("t", _load_delta(landed_set))

    def find(self, handle: Any, query: Query) -> Iterable[int]:
        first, *members = query.leaf.path
        condition = literals.build_where(
            query, literals.to_datafusion, first + "".join(f"['{name}']" for name in members)
        )
        return pa.table(handle.execute(f"select n from t where {condition}").read_all())["n"].to_pylist()

    def read_rows(self, handle: Any, columns: Sequence[str]) -> pa.Table:
        return pa.table(handle.execute(f"select {', '.join(columns)} from t").read_all())


class PolarsDelta(Polars):
    name = "Polars scan_delta"
    store = "delta"

    def open_set(self, landed_set: LandedSet) -> Any:
        import polars

        return polars.scan_delta(landed_set.folder)


class Foreign(Reader):
    """An engine in another process, usually in another environment."""

    engine: str
    literal: literals.Literal
    variable = ""
    nan_is_largest = True

    @property
    def python(self) -> str | None:
        """Returns the Python of the engine's environment; None if its variable is unset."""
        return os.environ.get(self.variable)

    def get_source(self, landed_set: LandedSet) -> str:
        """Returns the table expression for FROM."""
        raise NotImplementedError

    def ask(self, landed_set: LandedSet, queries: Sequence[Query]) -> tuple[list[Answer], ReadColumns]:
        assert self.python is not None
        request = {
            "engine": self.engine,
            "kind": self.store,
            "place": str(landed_set.root / ".sluice"),
            "from": self.get_source(landed_set),
            "filters": [literals.build_where(q, type(self).literal) for q in queries],
            "columns": [c.name for c in landed_set.columns],
        }
        numbers, columns = foreign.ask(self.python, request, landed_set.root / self.engine)
        return [*numbers], {name: _by_number(rows, name) for name, rows in columns.items()}


def _by_number(rows: pa.Table | str, name: str) -> dict[int, Any] | str:
    if isinstance(rows, str):
        return rows
    return dict(zip(rows["n"].to_pylist(), literals.normalize_column(rows[name]), strict=True))


class Spark(Foreign):
    name = "Spark"
    store = "folder"
    engine = "spark"
    literal = literals.to_spark

    @property
    def python(self) -> str | None:
        return sys.executable

    def get_source(self, landed_set: LandedSet) -> str:
        return landed_set.folder


class SparkIceberg(Foreign):
    name = "Spark 4.1"
    store = "iceberg"
    engine = "spark"
    literal = literals.to_spark
    variable = foreign.SPARK

    def get_source(self, landed_set: LandedSet) -> str:
        return f"sluice.db.{landed_set.name}"


class SparkDelta(SparkIceberg):
    store = "delta"

    def get_source(self, landed_set: LandedSet) -> str:
        return f"delta.`{landed_set.folder}`"


class ClickHouse(Foreign):
    name = "ClickHouse"
    store = "folder"
    engine = "chdb"
    literal = literals.to_clickhouse
    variable = foreign.CHDB
    nan_is_largest = False

    def get_source(self, landed_set: LandedSet) -> str:
        return f"file('{landed_set.folder}/**/*.parquet', Parquet)"


HERE: tuple[Reader, ...] = (
    Dataset(),
    Pandas(),
    DuckDB(),
    Polars(),
    PyIceberg(),
    PolarsIceberg(),
    DeltaTriples(),
    DeltaPandas(),
    DeltaDataset(),
    DeltaDuckDB(),
    DeltaQuery(),
    PolarsDelta(),
)
"""Readers in the project's own environment."""


ELSEWHERE: tuple[Foreign, ...] = (
    Spark(),
    SparkIceberg(),
    SparkDelta(),
    ClickHouse(),
)
"""Readers in separate processes."""
