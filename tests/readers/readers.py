"""Readers of landed rows, each by its own way to filter: the numbers of the rows that a query finds."""

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
from tests.readers.landed import Landed
from tests.readers.values import Query

Answer = list[int] | str | None
"""The numbers of the rows, sorted; or the error; None where the reader has no way to ask this."""
Read = dict[str, Any]
"""By column: the rows' values by number, or the error."""


class Reader:
    """One way to read one store. `nan_is_largest`: NaN is equal to itself and above all numbers."""

    name: str
    store: str
    nan_is_largest = False
    lacks = ""
    """Filters that it has no way to ask."""

    def open(self, place: Landed) -> Any:
        raise NotImplementedError

    def find(self, opened: Any, query: Query) -> Iterable[int] | None:
        """The numbers of the rows."""
        raise NotImplementedError

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        raise NotImplementedError

    def ask(self, place: Landed, queries: Sequence[Query]) -> tuple[list[Answer], Read]:
        """The answer to each query, and each column as it is read."""
        opened = self.open(place)
        answers = [_tried(functools.partial(self._sorted, opened, q)) for q in queries]
        return answers, {c.name: _tried(functools.partial(self._column, opened, c.name)) for c in place.columns}

    def _sorted(self, opened: Any, query: Query) -> list[int] | None:
        numbers = self.find(opened, query)
        return None if numbers is None else sorted(numbers)

    def _column(self, opened: Any, name: str) -> dict[int, Any]:
        rows = self.rows(opened, ["n", name])
        return dict(zip(rows["n"].to_pylist(), literals.plain(rows[name]), strict=True))


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - each engine raises its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _expression(query: Query) -> pc.Expression:
    field = pc.field(*query.leaf.path)
    if query.operation == "is null":
        return field.is_null()
    values = [literals.arrow(query.leaf.type, v) for v in query.values]
    if query.operation == "in":
        return field.isin(
            pa.array([v.as_py() for v in values], values[0].type) if "ns" not in query.leaf.type else values
        )
    compare = {"=": operator.eq, "<": operator.lt, ">=": operator.ge}[query.operation]
    return compare(field, values[0])


def _triple(query: Query) -> list[tuple[str, str, Any]] | None:
    """As `filters=` has it: no members of structs, no null."""
    if query.operation == "is null" or len(query.leaf.path) > 1:
        return None
    values = [literals.native(query.leaf.type, v) for v in query.values]
    return [(query.leaf.path[0], query.operation, values if query.operation == "in" else values[0])]


class Dataset(Reader):
    name = "pyarrow dataset"
    store = "folder"

    def open(self, place: Landed) -> Any:
        return pyarrow.dataset.dataset(place.folder, format="parquet", partitioning="hive")

    def find(self, opened: Any, query: Query) -> Iterable[int]:
        return opened.to_table(columns=["n"], filter=_expression(query))["n"].to_pylist()

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return opened.to_table(columns=list(columns))


_TRIPLES_LACK = "no filter on null, nor on members of structs"


class Pandas(Reader):
    name = "pandas"
    store = "folder"
    lacks = _TRIPLES_LACK

    def open(self, place: Landed) -> Any:
        return place.folder

    def find(self, opened: Any, query: Query) -> Iterable[int] | None:
        import pandas

        triple = _triple(query)
        return None if triple is None else pandas.read_parquet(opened, columns=["n"], filters=triple)["n"]

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        import pandas

        return pa.table(pandas.read_parquet(opened, columns=list(columns), dtype_backend="pyarrow"))


class DuckDB(Reader):
    name = "DuckDB"
    store = "folder"
    nan_is_largest = True

    def open(self, place: Landed) -> Any:
        import duckdb

        connection = duckdb.connect()
        connection.execute("set timezone = 'UTC'")
        self.register(connection, place)
        return connection

    def register(self, connection: Any, place: Landed) -> None:
        files = place.folder.replace("'", "''")
        connection.execute(f"create view t as select * from read_parquet('{files}/**/*.parquet')")

    def find(self, opened: Any, query: Query) -> Iterable[int]:
        where = literals.where(query, literals.duckdb)
        return [n for (n,) in opened.execute(f"select n from t where {where}").fetchall()]

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return opened.sql(f"select {', '.join(columns)} from t").to_arrow_table()


class Polars(Reader):
    name = "Polars"
    store = "folder"
    nan_is_largest = True

    def open(self, place: Landed) -> Any:
        import polars

        return polars.scan_parquet(place.folder)

    def find(self, opened: Any, query: Query) -> Iterable[int]:
        return opened.filter(self._expression(query)).select("n").collect()["n"].to_list()

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return opened.select(columns).collect().to_arrow()

    def _expression(self, query: Query) -> Any:
        import polars

        first, *members = query.leaf.path
        column = polars.col(first)
        for name in members:
            column = column.struct.field(name)
        if query.operation == "is null":
            return column.is_null()
        values = [self._literal(query.leaf.type, v) for v in query.values]
        if query.operation == "in":
            return functools.reduce(operator.or_, (column == v for v in values))
        return {"=": operator.eq, "<": operator.lt, ">=": operator.ge}[query.operation](column, values[0])

    def _literal(self, text: str, value: Any) -> Any:
        import polars

        if "ns" in text:
            return polars.lit(value).cast(polars.Datetime("ns", "UTC"))
        if text.startswith("decimal"):
            return polars.lit(value, dtype=polars.Decimal(*map(int, text[8:-1].split(","))))
        return polars.lit(literals.native(text, value))


class PyIceberg(Reader):
    name = "PyIceberg"
    store = "iceberg"

    def open(self, place: Landed) -> Any:
        return _iceberg(place)

    def find(self, opened: Any, query: Query) -> Iterable[int]:
        return opened.scan(self._filter(query), selected_fields=("n",)).to_arrow()["n"].to_pylist()

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return opened.scan(selected_fields=tuple(columns)).to_arrow()

    def _filter(self, query: Query) -> Any:
        from pyiceberg.expressions import EqualTo, GreaterThanOrEqual, In, IsNull, LessThan

        name = ".".join(query.leaf.path)
        if query.operation == "is null":
            return IsNull(name)
        values = [literals.native(query.leaf.type, v) for v in query.values]
        if query.operation == "in":
            return In(name, values)
        return {"=": EqualTo, "<": LessThan, ">=": GreaterThanOrEqual}[query.operation](name, values[0])


def _iceberg(place: Landed) -> Any:
    from pyiceberg.catalog import load_catalog

    return load_catalog("sluice", type="sql", uri=f"sqlite:///{place.catalog}").load_table(f"db.{place.name}")


class PolarsIceberg(Polars):
    name = "Polars scan_iceberg"
    store = "iceberg"

    def open(self, place: Landed) -> Any:
        import polars

        return polars.scan_iceberg(_iceberg(place))


class DeltaTriples(Reader):
    name = "deltalake filters="
    store = "delta"
    lacks = _TRIPLES_LACK

    def open(self, place: Landed) -> Any:
        return _delta(place)

    def find(self, opened: Any, query: Query) -> Iterable[int] | None:
        triple = _triple(query)
        return None if triple is None else opened.to_pyarrow_table(columns=["n"], filters=triple)["n"].to_pylist()

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return opened.to_pyarrow_table(columns=list(columns))


def _delta(place: Landed) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(place.folder)


class DeltaPandas(DeltaTriples):
    name = "deltalake to_pandas"

    def find(self, opened: Any, query: Query) -> Iterable[int] | None:
        triple = _triple(query)
        return None if triple is None else opened.to_pandas(columns=["n"], filters=triple)["n"]


class DeltaDataset(Dataset):
    name = "deltalake dataset"
    store = "delta"

    def open(self, place: Landed) -> Any:
        return _delta(place).to_pyarrow_dataset()


class DeltaDuckDB(DuckDB):
    name = "DuckDB over the dataset"
    store = "delta"

    def register(self, connection: Any, place: Landed) -> None:
        connection.register("t", _delta(place).to_pyarrow_dataset())


class DeltaQuery(Reader):
    name = "deltalake QueryBuilder"
    store = "delta"
    nan_is_largest = True

    def open(self, place: Landed) -> Any:
        from deltalake import QueryBuilder

        return QueryBuilder().register("t", _delta(place))

    def find(self, opened: Any, query: Query) -> Iterable[int]:
        first, *members = query.leaf.path
        where = literals.where(query, literals.datafusion, first + "".join(f"['{name}']" for name in members))
        return pa.table(opened.execute(f"select n from t where {where}").read_all())["n"].to_pylist()

    def rows(self, opened: Any, columns: Sequence[str]) -> pa.Table:
        return pa.table(opened.execute(f"select {', '.join(columns)} from t").read_all())


class PolarsDelta(Polars):
    name = "Polars scan_delta"
    store = "delta"

    def open(self, place: Landed) -> Any:
        import polars

        return polars.scan_delta(place.folder)


class Foreign(Reader):
    """An engine in another process, and mostly in another environment."""

    engine: str
    literal: literals.Literal
    variable = ""
    nan_is_largest = True

    @property
    def python(self) -> str | None:
        """The Python of its environment; None where nobody names one."""
        return os.environ.get(self.variable)

    def source(self, place: Landed) -> str:
        """What stands behind FROM."""
        raise NotImplementedError

    def ask(self, place: Landed, queries: Sequence[Query]) -> tuple[list[Answer], Read]:
        assert self.python is not None
        request = {
            "engine": self.engine,
            "kind": self.store,
            "place": str(place.root / ".sluice"),
            "from": self.source(place),
            "filters": [literals.where(q, type(self).literal) for q in queries],
            "columns": [c.name for c in place.columns],
        }
        numbers, columns = foreign.ask(self.python, request, place.root / self.engine)
        return [*numbers], {name: _by_number(rows, name) for name, rows in columns.items()}


def _by_number(rows: pa.Table | str, name: str) -> dict[int, Any] | str:
    if isinstance(rows, str):
        return rows
    return dict(zip(rows["n"].to_pylist(), literals.plain(rows[name]), strict=True))


class Spark(Foreign):
    name = "Spark"
    store = "folder"
    engine = "spark"
    literal = literals.spark

    @property
    def python(self) -> str | None:
        return sys.executable

    def source(self, place: Landed) -> str:
        return place.folder


class SparkIceberg(Foreign):
    name = "Spark 4.1"
    store = "iceberg"
    engine = "spark"
    literal = literals.spark
    variable = foreign.SPARK

    def source(self, place: Landed) -> str:
        return f"sluice.db.{place.name}"


class SparkDelta(SparkIceberg):
    store = "delta"

    def source(self, place: Landed) -> str:
        return f"delta.`{place.folder}`"


class ClickHouse(Foreign):
    name = "ClickHouse"
    store = "folder"
    engine = "chdb"
    literal = literals.clickhouse
    variable = foreign.CHDB
    nan_is_largest = False

    def source(self, place: Landed) -> str:
        return f"file('{place.folder}/**/*.parquet', Parquet)"


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
"""What the project's own environment has."""


ELSEWHERE: tuple[Foreign, ...] = (
    Spark(),
    SparkIceberg(),
    SparkDelta(),
    ClickHouse(),
)
"""What runs in a process of its own."""
