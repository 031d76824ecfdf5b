"""Receipts as rows of an Arrow table, and those of old publish entries in files that most audits do not open.

A quick audit checks entries published or superseded since the last one, the newest entries, and one more of these files
in turn. For the others it relies on the cache, which has a row with the sums of each partition, and their folders. So
its duration does not grow with the age of the feed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.pipelines.lake import paths
from sluice.pipelines.lake.parquet import DAMAGE
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.arrays import boolean_array, fixed_width, int64s, text_array

COUNTS = tuple(name for name in Counts.__dataclass_fields__ if name not in ("elsewhere", "copies"))
PROOFS = ("looked", "hashed", "compared")
"""Times (seconds since the epoch, or NEVER) at which the receipt and its files were checked, their bytes hashed, and
their records compared with Kafka."""
SUMMED = (*COUNTS, "relanded", "mended", "rows", "bytes", "span", "files")
"""Columns that are added up for each partition. A receipt's own row has no `files`: several may share one."""
NEVER = -1
_NUMBERS = ("number", "start", "end", *SUMMED, *PROOFS)
_SCHEMA = pa.schema([("key", pa.string()), *((n, pa.int64()) for n in _NUMBERS), ("tags", pa.list_(pa.uint64()))])
_CONTENT = b"sluice"


class ReceiptRow(NamedTuple):
    """A receipt of the publish entry `number`: its offset range and the number of landed records."""

    number: int
    key: Key
    range: Range
    landed: int


@dataclass(frozen=True, slots=True)
class Rows:
    """A row for each receipt of the publish entry `number`, or the sums of several for a partition.

    `key` has a partition's topic, number and incarnation; `tags` identify the receipt's parts, and those of sums are
    null.
    """

    table: pa.Table

    @classmethod
    def of(cls, receipts: Iterable[tuple[int, Receipt]], tag: Callable[[str], int], proofs: Sequence[int]) -> Rows:
        """Build rows from receipts, each with its entry number. `tag` maps a part's path to its tag."""
        keys, numbers, tags = list[Key](), list[tuple[int, ...]](), list[list[int]]()
        for number, r in receipts:
            s, counts = r.offset_range, (getattr(r.counts, name) for name in COUNTS)
            again = sum(x.span for x in r.relanded), sum(x.span for x in r.mended)
            sums = *counts, *again, sum(p.rows for p in r.parts), sum(p.bytes for p in r.parts), s.span, 0
            keys.append(s.key)
            numbers.append((number, s.start, s.end, *sums, *proofs))
            tags.append([tag(p.path) for p in r.parts])
        ends = np.cumsum([0, *map(len, tags)], dtype=np.int32)
        flat = fixed_width(pa.uint64(), np.array([*chain.from_iterable(tags)], np.uint64))
        lists = pa.ListArray.from_arrays(fixed_width(pa.int32(), ends), flat)
        columns = np.array(numbers, np.int64).reshape(-1, len(_NUMBERS)).T.copy()
        return cls(_make_table(keys, columns, lists))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> Any:
        return _to_numpy(self.table.column(name))

    def by_key(self) -> tuple[list[Key], Any]:
        """Returns the partitions in order, and the index of each row's."""
        if not len(self):
            return [], np.empty(0, np.int64)
        encoded = self.table.column("key").combine_chunks().dictionary_encode()
        keys = [_parse_key(text) for text in encoded.dictionary.to_pylist()]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return [keys[i] for i in order], np.argsort(order)[_to_numpy(encoded.indices.cast(pa.int64()))]

    @property
    def tags(self) -> Any:
        return _to_numpy(pc.list_flatten(self.table.column("tags"))).view(np.uint64)

    @property
    def owners(self) -> Any:
        """The row of each tag."""
        return _to_numpy(pc.list_parent_indices(self.table.column("tags")))

    def where(self, mask: Any) -> Rows:
        """Returns the rows that the mask selects."""
        return Rows(self.table.filter(boolean_array(mask)))

    def plus(self, *others: Rows) -> Rows:
        return Rows(pa.concat_tables([self.table, *(o.table for o in others)]))

    def to_rows(self) -> list[ReceiptRow]:
        keys, indexes = self.by_key()
        columns = (self.column(n).tolist() for n in ("number", "start", "end", "landed"))
        rows = zip(indexes.tolist(), *columns, strict=True)
        return [ReceiptRow(n, keys[i], Range(a, b), landed) for i, n, a, b, landed in rows]

    def mark(self, proof: str, rows: Iterable[ReceiptRow], at: int) -> Rows:
        """Returns a copy in which `rows` have the proof at time `at`."""
        marked = set(rows)
        near = np.isin(self.column("number"), [*{r.number for r in marked}])
        times = self.column(proof).copy()
        times[np.flatnonzero(near)[[r in marked for r in self.where(near).to_rows()]]] = at
        return self._with_times({proof: times})

    def also(self, before: Rows, at: int) -> Rows:
        """Returns a copy with earlier proofs of unchanged rows that were checked again at `at`."""
        again = self.column("looked") == at
        old = before.where(np.isin(before.column("number"), self.column("number")[again]))
        times_of = dict(zip(old._whole(), zip(*(old.column(p).tolist() for p in PROOFS), strict=True), strict=True))
        times = {proof: self.column(proof).copy() for proof in PROOFS}
        for i, receipt in zip(np.flatnonzero(again), self.where(again)._whole(), strict=True):
            for proof, time in zip(PROOFS, times_of.get(receipt, ()), strict=False):
                times[proof][i] = max(times[proof][i], time)
        return self._with_times(times)

    def _with_times(self, columns: Mapping[str, Any]) -> Rows:
        table = self.table
        for name, times in columns.items():
            table = table.set_column(table.column_names.index(name), name, fixed_width(pa.int64(), times))
        return Rows(table)

    def _whole(self) -> list[tuple[ReceiptRow, tuple[int, ...]]]:
        return list(zip(self.to_rows(), map(tuple, self.table.column("tags").to_pylist()), strict=True))

    def sum_up(self, number: int = 0) -> Rows:
        """Returns a row of sums for each partition, from its first offset to its end. A file counts once in each."""
        keys, indexes = self.by_key()
        sums = {name: np.zeros(len(keys), np.int64) for name in _NUMBERS} | {"number": np.full(len(keys), number)}
        for name in SUMMED:
            np.add.at(sums[name], indexes, self.column(name))
        files = np.unique(np.stack([indexes[self.owners].astype(np.uint64), self.tags]), axis=1)
        np.add.at(sums["files"], files[0].astype(np.int64), 1)
        sums["start"] += np.iinfo(np.int64).max
        np.minimum.at(sums["start"], indexes, self.column("start"))
        np.maximum.at(sums["end"], indexes, self.column("end"))
        return Rows(_make_table(keys, sums.values(), pa.nulls(len(keys), _SCHEMA.field("tags").type)))

    def by_partition(self) -> dict[Key, dict[str, int]]:
        """Returns the figures of each partition by name."""
        return {_parse_key(row["key"]): row for row in self.sum_up().table.to_pylist()}

    def dump(self, content: bytes = b"") -> bytes:
        """Returns a Parquet file of the rows, with this content next to them."""
        sink = pa.BufferOutputStream()
        # Neighbours in this order differ little, which compresses best.
        table = self.table.sort_by([(name, "ascending") for name in ("key", "start", "number")])
        deltas = dict.fromkeys(_NUMBERS, "DELTA_BINARY_PACKED")
        pq.write_table(
            table.replace_schema_metadata({_CONTENT: content}),
            sink,
            compression="zstd",
            use_dictionary=["key"],
            column_encoding=deltas,
            write_page_checksum=True,
        )
        return bytes(sink.getvalue())


def load(data: bytes) -> tuple[Rows, bytes]:
    """Returns the rows of a file and the content next to them. Raises one of DAMAGE for anything else."""
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    content = (table.schema.metadata or {})[_CONTENT]
    table = table.select(_SCHEMA.names).cast(_SCHEMA)
    if any(table.column(name).null_count for name in ("key", *_NUMBERS)):
        raise ValueError("not one value for each receipt")
    return Rows(table), content


def _make_table(keys: Iterable[Key], numbers: Iterable[Any], tags: pa.Array) -> pa.Table:
    """Build a table from columns, those of numbers in the schema's order."""
    texts = text_array([f"{k.topic}:{k.partition}:{k.incarnation}" for k in keys])
    return pa.Table.from_arrays([texts, *(fixed_width(pa.int64(), n) for n in numbers), tags], schema=_SCHEMA)


def _to_numpy(column: pa.Array | pa.ChunkedArray) -> Any:
    """Returns a column of 64-bit numbers, which may be in chunks."""
    if not len(column):  # empty ones may lack a chunk, or a buffer
        return np.empty(0, np.int64)
    return int64s(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)


def _parse_key(text: str) -> Key:
    topic, partition, incarnation = text.split(":", 2)
    return Key(topic, int(partition), incarnation)


ENTRIES = 10_000
"""Ledger numbers in a file: about two months of hourly batches."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The rows of publish entries from number `first` on, `ENTRIES` of them; `digest` is that of their file.

    `batches`, `parts` and `rows` are counts. Its receipts were checked between the times `looked` (seconds). A listing
    at `seen` (seconds) had all its files and entries; the files lie in the folders `places`.
    """

    first: int
    digest: str
    batches: int
    parts: int
    rows: int
    looked: tuple[int, int]
    seen: int
    places: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.first + ENTRIES

    @classmethod
    def put(cls, lake: Lake, feed: str, first: int, rows: Rows, folders: Iterable[str], at: int) -> Settled:
        """Write the file of the rows, which were listed at that time."""
        data, looked = rows.dump(), rows.column("looked")
        lake.put(paths.settled_path(feed, first), data)
        counts = len(np.unique(rows.column("number"))), len(np.unique(rows.tags)), int(rows.column("rows").sum())
        times = int(looked.min()), int(looked.max())
        return cls(first, _digest(data), *counts, times, at, tuple(sorted(folders)))

    def load(self, lake: Lake, feed: str) -> Rows | None:
        """Returns the rows; None if the file does not match its digest."""
        data = lake.get(paths.settled_path(feed, self.first)) or b""
        try:
            return load(data)[0] if _digest(data) == self.digest else None
        except DAMAGE:
            return None


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def split(rows: Rows, number: int, folders: Mapping[int, str]) -> tuple[Rows, dict[int, tuple[Rows, set[str]]]]:
    """Returns the recent rows, and by first number the rows to be settled, each with its folders.

    Rows are settled in complete files of entries below `number`, if the folders of all their parts are known by tag.
    """
    block = rows.column("number") // ENTRIES
    out: dict[int, tuple[Rows, set[str]]] = {}
    recent = np.ones(len(rows), bool)
    for b in np.unique(block[(block + 1) * ENTRIES <= number]).tolist():
        mine = rows.where(block == b)
        lie_in = {folders.get(tag, "") for tag in mine.tags.tolist()}
        if "" not in lie_in:
            out[b * ENTRIES] = mine, lie_in
            recent[block == b] = False
    return rows.where(recent), out


# -- folders


def place_of(path: str) -> str:
    """Returns the first folder below the feed's visible root, usually a day; empty for a file directly below it."""
    return "/".join(path.split("/")[2:-1]).partition("/")[0]


def runs(wanted: Collection[str], known_folders: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the wanted folders as runs (first, last) in path order, with no other known folder in between.

    Unknown folders within a run are listed, too.
    """
    in_order = sorted({*wanted, *known_folders}, key=lambda folder: f"{folder}/")
    for mine, run in groupby(in_order, key=lambda folder: folder in wanted):
        if mine:
            run_folders = list(run)
            yield run_folders[0], run_folders[-1]
