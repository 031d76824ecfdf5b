"""Folds changes by key: of each key, the last change decides.

DuckDB, which spills, decides by keys and positions alone. Arrow takes the rows of the files as they are, so that no
value passes through SQL. The result is a bucket at a time: rows by key, and the keys that are deleted.

A *position* orders the changes of a key: by the texts of `changes.order_by`, then topic, partition and offset. Without
`order_by`, a key whose changes are in two partitions has no order, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.errors import TableRefused
from sluice.pipelines.feed.changes_section import (
    AFTER,
    BEFORE,
    OPERATION,
    ORDER,
    ChangeFormat,
    ChangesSettings,
    get_row_columns,
)
from sluice.pipelines.lake.parquet import open_parquet
from sluice.pipelines.model.kafka import Range
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.schema import KAFKA, Kind, Type, arrow_type
from sluice.pipelines.schema.wider import RAW_TYPES, parse_type
from sluice.pipelines.util import scratch
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    import duckdb

MEMORY = 512 << 20
"""What DuckDB may take, in bytes; beyond, it spills."""
_AT_ONCE = 1 << 16
BUCKET_ROWS, BUCKET_BYTES = 250_000, 128 << 20
"""The most rows and bytes of a bucket on average, uncompressed. With more, there are twice as many buckets."""
_COMPRESSION = 3
"""Estimated bytes of rows in a byte of a file."""
_SPILLED = 1 << 18
"""Rows that are taken from files before they are written to their buckets' spill files."""
_BUCKET = f"{KAFKA}bucket"
"""Added to rows; no feed has a column of such a name."""
_ROW, _DELETE, _TRUNCATE = 0, 1, 2
LATEST = "r desc, t desc, p desc, o desc"
"""The order of changes in SQL, the last one first."""
_PLACE = ("topic", "partition", "offset", "timestamp")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of changes as they land, and of the rows that they change.

    `rows` are the columns of a current table: those of the row, where the change that made it is in Kafka, and its
    order. `keys` name a row. `prefix` is that of Kafka's columns.
    """

    changes: ChangesSettings
    landed: Mapping[str, Type]
    rows: Mapping[str, Type]
    keys: tuple[str, ...]
    prefix: str

    @classmethod
    def of(cls, changes: ChangesSettings, landed: Mapping[str, str]) -> Self:
        """`landed`: the types of landed columns, as a schema spells them."""
        prefix = "" if dict(landed) == RAW_TYPES else KAFKA
        types = {name: parse_type(text.removesuffix(" not null")) for name, text in landed.items()}
        rows = {n: t for n, t in get_row_columns(changes, types).items() if n != f"{KAFKA}tombstone"}
        rows |= {prefix + name: types[prefix + name] for name in _PLACE}
        if changes.order_by:
            rows[ORDER] = Type(Kind.STRING)
        return cls(changes, types, rows, changes.key or (f"{prefix}key",), prefix)

    @property
    def texts(self) -> dict[str, str]:
        return {name: str(t) for name, t in self.rows.items()}

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, arrow_type(t)) for name, t in self.rows.items()])

    @property
    def deletion_schema(self) -> pa.Schema:
        """The columns of deleted keys. A row without a key stands for a truncation."""
        names = [
            *self.keys,
            *(f"{self.prefix}{name}" for name in _PLACE[:3]),
            *([ORDER] if self.changes.order_by else []),
        ]
        return pa.schema([(name, arrow_type(self.rows[name])) for name in dict.fromkeys(names)])

    @property
    def is_enveloped(self) -> bool:
        return self.changes.format is ChangeFormat.DEBEZIUM

    @property
    def _ordering(self) -> dict[str, pa.DataType]:
        """The columns by which changes are ordered, with the members of the rows before and after."""
        names = [self.prefix + name for name in ("key", *_PLACE[:3])]
        names += [f"{KAFKA}tombstone"] if self.prefix else ["value"]
        names += [path.partition(".")[0] for path in self.changes.order_by]
        types = {name: arrow_type(self.landed[name]) for name in names if name in self.landed}
        keys = pa.struct([(name, arrow_type(self.rows[name])) for name in self.keys])
        if self.is_enveloped:
            return types | {OPERATION: pa.string(), BEFORE: keys, AFTER: keys}
        return types | {field.name: field.type for field in keys}

    @property
    def source_columns(self) -> list[str]:
        """The columns and members to read from a landed file for `align`."""
        rows = (BEFORE, AFTER) if self.is_enveloped else ()
        return [*(n for n in self._ordering if n not in rows), *(f"{row}.{key}" for row in rows for key in self.keys)]

    def align(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Returns the columns that order the changes, with nulls for those that the file lacks."""
        return {name: _fetch_column(batch, name, t) for name, t in self._ordering.items()}

    def take(self, lake: Lake, path: str, chosen: pa.Table) -> pa.Table:
        """Returns rows of a landed file as those of a current table, with the bucket of each. `chosen` has the
        rows' numbers, ascending, buckets, and orders. Raises PartUnreadable."""
        of_row = [AFTER] if self.is_enveloped else [n for n in self.rows if n != ORDER]
        numbers, first, out = chosen["row"].to_numpy(), 0, []
        with open_parquet(lake, path) as file:
            for batch in file.iter_batches(_AT_ONCE, columns=[*of_row, *(self.prefix + name for name in _PLACE)]):
                within = numbers[slice(*np.searchsorted(numbers, [first, first + batch.num_rows]))] - first
                out += [self._convert(batch.take(pa.array(within)))] if len(within) else []
                first += batch.num_rows
        rows = pa.concat_tables(out)
        if self.changes.order_by:
            rows = rows.append_column(ORDER, chosen["r"].cast(pa.string()))
        return rows.select(self.schema.names).append_column(_BUCKET, chosen["b"])

    def _convert(self, batch: pa.RecordBatch) -> pa.Table:
        if self.is_enveloped:
            row = batch.column(AFTER)
            members = dict(zip([f.name for f in row.type], row.flatten(), strict=True))
            rest = {n: batch.column(n) for n in batch.schema.names if n != AFTER}
            batch = pa.RecordBatch.from_pydict(members | rest)
        types = {f.name: f.type for f in self.schema if f.name != ORDER}
        return pa.table({name: _fetch_column(batch, name, t) for name, t in types.items()})


def _fetch_column(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """A column as that type; nulls if the file lacks it."""
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, kind)
    column = batch.column(name)
    return column if column.type == kind else column.cast(kind)


class Fold:
    """The last changes of all keys in some files, to be merged into the buckets of a current table. Use `create`.

    Call `add` and `exclude`, then `decide`, then `take`, then `merge` for each bucket.
    """

    def __init__(self, db: duckdb.DuckDBPyConnection, columns: Columns, folder: Path) -> None:
        self._db, self._columns, self._folder, self._files = db, columns, folder, list[str]()
        self._keys = [f"k{n}" for n, _ in enumerate(columns.keys)]
        kinds = [columns.schema.field(name).type for name in columns.keys]
        self._types = [*map(str, db.from_arrow(pa.table([pa.array([], t) for t in kinds], self._keys)).types)]
        typed = ", ".join(f"{k} {t}" for k, t in zip(self._keys, self._types, strict=True))
        db.execute(f"create temp table c ({typed}, t text, p int, o bigint, r text, kind int, file int, row int)")
        db.execute("create temp table void (t text, p int, a bigint, z bigint)")
        self.buckets, self._resized, self._parts = 1, False, 0
        self._bytes, self._rows = 0, 0

    @classmethod
    @contextmanager
    def create(cls, columns: Columns, memory: int = MEMORY) -> Iterator[Self]:
        """An empty fold. Its files on disk are removed when the block ends. Raises Failed when there is no room."""
        with scratch.open_duckdb(memory, 2, "fold changes") as (db, folder):
            db.execute("set TimeZone = 'UTC'; set preserve_insertion_order = false")
            yield cls(db, columns, folder)

    def add(self, lake: Lake, files: Iterable[str]) -> None:
        """Read keys and positions of the changes in these files, by lake path. Raises PartUnreadable."""
        for path in files:
            self._files.append(path)
            row = 0
            with open_parquet(lake, path) as file:
                footer = file.metadata
                self._bytes += sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
                self._rows += footer.num_rows
                for batch in file.iter_batches(_AT_ONCE, columns=self._columns.source_columns):
                    self._insert(batch, row)
                    row += batch.num_rows

    def exclude(self, topic: str, partition: int, r: Range) -> None:
        """Ignore rows of the current table that these offsets made."""
        self._db.execute("insert into void values (?, ?, ?, ?)", [topic, partition, r.start, r.end])

    def _insert(self, batch: pa.RecordBatch, first: int) -> None:
        of, prefix = self._columns, self._columns.prefix
        columns = of.align(batch)
        is_null = columns[f"{KAFKA}tombstone"] if prefix else pc.is_null(columns["value"])
        columns |= {
            "kafka_is_null": is_null,
            "kafka_row": pa.array(np.arange(first, first + batch.num_rows, dtype=np.int32)),
        }
        if of.changes.key:  # a record without a value names its row by Kafka's key alone
            columns["kafka_key_text"] = _decode(columns[f"{prefix}key"], is_null)
        kind = f"case when kafka_is_null then {_DELETE} else {_ROW} end"
        if of.is_enveloped:
            kind = f"""case when kafka_is_null or op = 'd' then {_DELETE} when op = 't' then {_TRUNCATE}
                when op in ('c', 'u', 'r') then {_ROW} end"""
        order = ", ".join(_order_sql(path, of.landed) for path in of.changes.order_by)
        keys = ", ".join(f"{self._build_key_sql(n)} {k}" for n, k in enumerate(self._keys))
        topic, partition, offset = (_quote(prefix + name) for name in _PLACE[:3])
        self._db.register("batch", pa.table(columns))
        self._db.execute(
            f"""insert into c select * from (select {keys}, {topic} t, {partition} p, {offset} o,
                {f"concat_ws('/', {order})" if order else "''"} r, {kind} kind, {len(self._files) - 1} file, kafka_row
                from batch) where kind is not null"""
        )
        self._db.unregister("batch")

    def _build_key_sql(self, n: int) -> str:
        of, name, kind = self._columns, self._columns.keys[n], self._types[n]
        column = _quote(name)
        if not of.changes.key:
            return column
        paths = (_quote_text(f"$.{above}{_quote(name)}") for above in ('"payload".', ""))
        in_key = f"coalesce({', '.join(f'json_extract_string(kafka_key_text, {path})' for path in paths)})"
        plain = "kafka_key_text" if len(of.keys) == 1 else "null"
        is_object = "json_valid(kafka_key_text) and json_type(kafka_key_text) = 'OBJECT'"
        parsed = f"case when {is_object} then {in_key} else {plain} end"
        own = f"{AFTER}.{column}, {BEFORE}.{column}" if of.is_enveloped else column
        return f"coalesce({own}, case when kafka_is_null then try_cast({parsed} as {kind}) end)"

    def decide(self, buckets: int, rows: int, size: int) -> None:
        """Find the last change of each key, and the number of buckets that these need.

        The table has `rows` rows and `size` bytes, compressed, in `buckets` buckets (0: none).

        Raises TableRefused for changes without a key, and for keys without an order.
        """
        keys, no_key = ", ".join(self._keys), " or ".join(f"{k} is null" for k in self._keys)
        if self._columns.is_enveloped:  # a tombstone repeats the deletion before it
            self._db.execute(f"delete from c where kind = {_DELETE} and ({no_key})")
        lacking, *first = self._ask(
            f"select count(*), arg_min(t, o), arg_min(p, o), min(o) from c where kind <> {_TRUNCATE} and ({no_key})"
        )[0]
        if lacking:
            raise TableRefused(
                f"{many(lacking, 'change')} {'has' if lacking == 1 else 'have'} no key, such as"
                f" {':'.join(map(str, first))}",
                remedy="name fields that each record has in `changes.key`, or leave it out to use Kafka's key",
            )
        self._check_order("c", f"(from c where kind = {_TRUNCATE})")
        text = ", ".join(
            f"hex({k})" if t == "BLOB" else f"{k}::text" for k, t in zip(self._keys, self._types, strict=True)
        )
        # The bucket of a key must be the same in every later sync: the hash is of its text, not of DuckDB's value.
        self._hash = f"md5_number_lower(concat_ws(chr(31), {text}))"
        self._db.execute(
            f"""create temp table won as select *, {self._hash} h from c where kind <> {_TRUNCATE}
                qualify row_number() over (partition by {keys} order by {LATEST}) = 1"""
        )
        self._db.execute(
            f"create temp table cut as select t, p, o, r from c where kind = {_TRUNCATE} order by {LATEST} limit 1"
        )
        # From here on only the last change of a key counts. All others would take the room that merging needs.
        self._db.execute("drop table c")
        (more,) = self._ask(f"select count(*) from won where kind = {_ROW}")[0]
        self.buckets = max(buckets, 1)
        size = size * _COMPRESSION + more * self._bytes // max(self._rows, 1)
        # Never fewer buckets than before: with another number, all files are written again.
        while rows + more > self.buckets * BUCKET_ROWS or size > self.buckets * BUCKET_BYTES:
            self.buckets *= 2
        self._resized = 0 < buckets < self.buckets
        # A truncation, or an offset whose row no longer counts, may concern keys of any bucket.
        self.touches_all = self._resized or bool(self._ask("from cut union all select t, p, a, '' from void"))

    def compare(self, rows: pa.Table) -> tuple[int, list[str]]:
        """Returns the number of keys that have rows, and the keys that have other rows in a table.

        `rows` are keys and positions of the table. Call it in place of `decide`.
        """
        keys = ", ".join(self._keys)
        self._check_order("c", f"(from c where kind = {_TRUNCATE})")
        self._db.register("live", self._place(rows))
        change = "{'r': r, 't': t, 'p': p, 'o': o, 'kind': kind}"
        self._db.execute(
            f"""create temp table expected as select {keys}, unnest(last) from (
                    select {keys}, max({change}) last, any_value(cut) cut
                    from c, (select max({change}) cut from c where kind = {_TRUNCATE})
                    where kind <> {_TRUNCATE} group by {keys})
                where last.kind = {_ROW} and (cut is null or last > cut)"""
        )
        texts = ", ".join(f"coalesce(x.{k}, live.{k})::text" for k in self._keys)
        same_key = " and ".join(f"x.{k} = live.{k}" for k in self._keys)
        differing = self._ask(
            f"""select concat_ws(', ', {texts}) key from expected x full join live on {same_key}
                where (x.t, x.p, x.o) is distinct from (live.t, live.p, live.o) and not (x.o is null
                    and exists (from void where void.t = live.t and void.p = live.p and live.o >= a and live.o < z))
                order by key"""
        )
        return self._ask("select count(*) from expected")[0][0], [key for (key,) in differing]

    @property
    def changed_buckets(self) -> list[int]:
        """The buckets with changes."""
        if self.touches_all:
            return [*range(self.buckets)]
        return [b for (b,) in self._ask(f"select distinct (h % {self.buckets})::int b from won order by b")]

    def take(self, lake: Lake) -> None:
        """Read the rows of the last changes. Raises PartUnreadable."""
        waiting, count = list[pa.Table](), 0
        for number, path in enumerate(self._files):
            of_file = self._db.sql(
                f"""select row, (h % {self.buckets})::int b, r from won where file = {number} and kind = {_ROW}
                    order by row"""
            ).to_arrow_table()
            if of_file.num_rows:
                waiting.append(self._columns.take(lake, path, of_file))
                count += of_file.num_rows
            if count >= _SPILLED:
                self._spill(waiting)
                waiting, count = [], 0
        if waiting:
            self._spill(waiting)

    def _spill(self, waiting: Sequence[pa.Table]) -> None:
        rows = pa.concat_tables(waiting)
        buckets = rows[_BUCKET].to_numpy()
        order = np.argsort(buckets, kind="stable")
        rows, buckets = rows.drop_columns(_BUCKET).take(order), buckets[order]
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for first, end in zip(starts, [*starts[1:], len(buckets)], strict=True):
            path = self._folder / f"{buckets[first]}-{self._parts}.arrow"
            with pa.ipc.new_file(str(path), rows.schema) as out:
                out.write_table(rows.slice(first, end - first))
        self._parts += 1

    def merge(self, bucket: int, rows: pa.Table, deleted: pa.Table) -> tuple[pa.Table, pa.Table] | None:
        """Returns the rows and deleted keys of a bucket after the changes. None if they stay the same.

        Raises TableRefused for keys without an order."""
        keys, position, n = ", ".join(self._keys), ", ".join(self._names), rows.num_rows
        spilled = [pa.ipc.open_file(str(p)).read_all() for p in sorted(self._folder.glob(f"{bucket}-*.arrow"))]
        live = pa.concat_tables([rows, *spilled])
        numbers = pa.array(np.arange(live.num_rows, dtype=np.int32))
        self._db.register("live", self._place(live).append_column("row", numbers))
        self._db.register("gone", self._place(deleted))
        # A row of the table counts unless its offset landed again, or its key has moved to another bucket. Rows of this
        # fold lie behind those of the table, from number `n` on.
        counts = "not exists (from void where void.t = x.t and void.p = x.p and x.o >= a and x.o < z)"
        counts += f" and {self._hash} % {self.buckets} = {bucket}" if self._resized else ""
        self._db.execute(
            f"""create or replace temp table x as
                select {position}, {_ROW} kind, row, row < {n} old from live x where row >= {n} or ({counts})
                union all select {position}, {_DELETE}, -1, true from gone x where k0 is not null and {counts}
                union all select {position}, {_DELETE}, -1, false from won
                    where kind = {_DELETE} and h % {self.buckets} = {bucket}"""
        )
        # The last truncation decides, of this fold or before: a change before it that lands later is void, too.
        self._db.execute(
            """create or replace temp table cuts as select t, p, o, r, false old from cut
                union all select t, p, o, r, true from gone where k0 is null"""
        )
        self._check_order("x", "cuts")
        self._db.execute(f"create or replace temp table cuts as from cuts order by {LATEST}, old desc limit 1")
        # `old desc`: of a change that is in the table and is folded again, the table's row stays. So if nothing is new,
        # the bucket is as it was, and no file is written.
        last = self._db.sql(
            f"""select * from x
                where not exists (from cuts where (x.r, x.t, x.p, x.o) < (cuts.r, cuts.t, cuts.p, cuts.o))
                qualify row_number() over (partition by {keys} order by {LATEST}, old desc) = 1 order by {keys}"""
        ).to_arrow_table()
        no_keys = ", ".join(f"null::{t} {k}" for k, t in zip(self._keys, self._types, strict=True))
        cut = self._db.sql(f"select {no_keys}, * from cuts").to_arrow_table()
        is_row = pc.equal(last["kind"], _ROW)
        rows_after, deletions = last.filter(is_row), last.filter(pc.invert(is_row))
        after = pa.concat_tables([cut.select(self._names), deletions.select(self._names)], promote_options="permissive")
        counts_after = rows_after.num_rows, after.num_rows
        is_old = [old for table in (last, cut) for old in table["old"].unique().to_pylist()]
        if all(is_old) and counts_after == (n, deleted.num_rows):
            return None
        of = self._columns
        names = [*of.keys, *(of.prefix + name for name in _PLACE[:3]), ORDER]
        return live.take(rows_after["row"]), after.rename_columns(names).select(of.deletion_schema.names).cast(
            of.deletion_schema
        )

    @property
    def _names(self) -> list[str]:
        return [*self._keys, "t", "p", "o", "r"]

    def _place(self, rows: pa.Table) -> pa.Table:
        """Keys and positions of rows of a current table, or of deleted keys, by their names in SQL."""
        of = self._columns
        order = rows[ORDER] if of.changes.order_by else pa.chunked_array([pa.repeat("", rows.num_rows)])
        columns = [*(rows[name] for name in (*of.keys, *(of.prefix + name for name in _PLACE[:3]))), order]
        return pa.table(columns, self._names)

    def _check_order(self, changes: str, cuts: str) -> None:
        """Raises TableRefused for changes of one row in several partitions, unless a field orders them."""
        if self._columns.changes.order_by:
            return
        keys, first = ", ".join(self._keys), f"(select t, p from {cuts} limit 1)"
        several = self._ask(
            f"""select min(t), min(p), max(p) from {changes} where kind <> {_TRUNCATE} group by {keys}
                having min(t) <> max(t) or min(p) <> max(p) limit 1"""
        ) or self._ask(
            f"""select x.t, x.p, cut.p from (select t, p from {changes} union all select t, p from {cuts}) x,
                {first} cut where (x.t, x.p) <> (cut.t, cut.p) limit 1"""
        )
        if several:
            topic, one, other = several[0]
            raise TableRefused(
                f"changes of one row are in partitions {one} and {other} of {topic}, which have no common order",
                remedy="name a field that orders them: changes: {order_by: source.lsn}, or kafka_timestamp",
            )

    def _ask(self, query: str) -> list[Any]:
        return self._db.execute(query).fetchall()


def _order_sql(path: str, landed: Mapping[str, Type]) -> str:
    """The value at the path as a text that sorts like it: whole numbers by 38 digits."""
    name, _, steps = path.partition(".")
    column, kind = _quote(name), landed[name].kind
    if kind in (Kind.TIMESTAMP, Kind.EPOCH):
        value = f"epoch_us({column})::text"
    elif steps and kind is Kind.STRUCT:
        value = f"{'.'.join(map(_quote, path.split('.')))}::text"
    elif steps:
        value = f"json_extract_string({column}, {_quote_text('$.' + '.'.join(map(_quote, steps.split('.'))))})"
    else:
        value = f"{column}::text"
    padded = f"case when regexp_full_match({value}, '[0-9]{{1,38}}') then lpad({value}, 38, '0') else {value} end"
    return f"coalesce({padded}, '')"


def _decode(keys: pa.Array, needed: pa.Array) -> pa.Array:
    """The texts of Kafka's keys where they are needed; null elsewhere."""
    chosen = pc.if_else(needed, keys, pa.scalar(None, keys.type))
    try:
        return chosen.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if k is None else k.decode(errors="replace") for k in chosen.to_pylist()], pa.string())


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
