"""Writes the rows of offset ranges, in offset order, into staged Parquet files that can be proven.

Promises: equal rows give equal bytes, because row groups and files are cut by rows alone. Offsets strictly increase
(invariant 6). A file appears in staging only when it is whole. Its own metadata names feed, topic id, range, batch,
plan hash and the bounds of its times. A range without rows, or one that fails, leaves no file. Size and SHA-256 are
taken while writing. Where a feed is laid out by record time, rows go to the folder of their own time. A range fills at
most `MAX_FOLDERS` of these, whatever its stamps, and one more for rows without a usable time. `PartWriter` makes files
for one range alone, `SharedWriter` one file for several.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.lake.parquet import TimeBounds, in_milliseconds
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind, SharedFile
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import get_offsets, time_column
from sluice.pipelines.schema.arrays import fill_int64s, fixed_width
from sluice.pipelines.util.units import CALENDAR_ENDS

# Limits of the choice of encodings, found by measuring.
PAGE_BYTES = 1 << 17
"""Bytes of values in a page, before compression. zstd is faster on pages this short."""
MESSAGE_PAGE_BYTES = 1 << 16
"""The same in files of undecoded messages, which are 1.2 % smaller for it. Typed ones would be 0.5 % larger."""
SAMPLE_ROWS = 4096
"""The number of rows that decide a column's encoding."""
FEW_ROWS = SAMPLE_ROWS // 4
"""With fewer rows, texts stay plain and numbers are deltas."""
REPEATS = 0.75
"""Up to this share of distinct values in the sample, a dictionary saves time and room. A sample of 5,000 customers,
drawn evenly, has a share of 0.68, and takes half the time."""
DICTIONARY_BYTES = 256 << 10
"""The most bytes of distinct values in a sample. With more, a row group's would exceed Parquet's 1 MiB dictionary."""
SAMPLE_BYTES = 1 << 20
"""The maximum bytes of a sample. Longer values are ignored."""
NEIGHBOURS = 64
BLOOM_FPP = 0.01
"""The share of row groups without a value that a Bloom filter does not exclude. Ten bits a value, rounded up."""
_HAS_BLOOM_FILTERS = "bloom_filter_options" in signature(pq.ParquetWriter).parameters
SHARED = 0.25
"""The least share of bytes that texts have in common with the one before, for writing only what differs."""
BOUNDED_BYTES = 64
"""Bytes of such a text on average, up to which it has statistics: each page repeats two."""


def choose_options(rows: pa.Table, settings: LandingSettings) -> dict[str, Any]:
    """The options of `pyarrow.parquet.ParquetWriter` for a file that begins with these rows (at least one).

    The choice follows from the schema, the settings and the rows alone: equal rows give equal bytes. Numbers and times
    get statistics, except times in milliseconds (`lake.parquet.Bounds`), and short texts that begin like the one
    before. Numbers are written as deltas, or plain if they stay the same, as a partition does. Texts and bytes are
    written by dictionary if they repeat, as differences from the value before if these are small, and plain otherwise.
    Of few rows, the schema decides alone.
    """
    schema, row_bytes = rows.schema, rows.nbytes // rows.num_rows
    options = _choose_by_schema(schema, settings)
    page_bytes, numbers = options["data_page_size"], options["column_encoding"]
    # A page's size is checked once per batch of rows: with large rows it would take the complete row group.
    options = options | {"write_batch_size": min(max(page_bytes // max(row_bytes, 1), 1), 4096)}
    if rows.num_rows >= FEW_ROWS:
        repeating = [f.name for f in schema if _is_repetitive(rows.column(f.name))]
        deltas = {name: encoding for name, encoding in numbers.items() if _has_changes(rows.column(name))}
        texts = [f.name for f in schema if _is_text(f.type) and f.name not in repeating]
        fronts = {name: "DELTA_BYTE_ARRAY" for name in texts if _shares_beginnings(rows.column(name))}
        # Such names are mostly in order, so that the bounds of a row group exclude others.
        bounded = [name for name in fronts if rows.column(name).nbytes <= BOUNDED_BYTES * rows.num_rows]
        bounded += options["write_statistics"]
        options |= {"use_dictionary": repeating, "column_encoding": deltas | fronts, "write_statistics": bounded}
    blooms = {path: {"ndv": rows.num_rows, "fpp": BLOOM_FPP} for path in _list_paths(schema, settings.bloom_filters)}
    return options | ({"bloom_filter_options": blooms} if blooms and _HAS_BLOOM_FILTERS else {})


@lru_cache(maxsize=64)
def _choose_by_schema(schema: pa.Schema, settings: LandingSettings) -> dict[str, Any]:
    """The options of a file of few rows, and for others those that do not depend on rows."""
    unbounded = in_milliseconds(schema)
    numbers = [f.name for f in schema if _is_number(f.type)]
    message = schema.field("value").type if "value" in schema.names else None
    return {
        "compression": settings.compression.value,
        "compression_level": settings.compression_level,
        "use_dictionary": [f.name for f in schema if pa.types.is_dictionary(f.type)],
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        "write_statistics": [name for name in numbers if name not in unbounded],
        "data_page_size": MESSAGE_PAGE_BYTES if message == pa.binary() else PAGE_BYTES,
        # Readers that check it notice a changed bit in a page: the file's hash is for audits.
        "write_page_checksum": True,
        # Readers that filter by offset or time skip pages. Costs 0.1 % of the size, and no time.
        "write_page_index": True,
        # As Spark writes them: a third of the time of fixed-length bytes.
        "store_decimal_as_integer": True,
        # The Arrow schema would bring the dictionary type back for some readers and not for others.
        "store_schema": False,
    }


def _list_paths(fields: Iterable[pa.Field], chosen: Sequence[str], above: str = "") -> Iterator[str]:
    """Yields the chosen paths of values that may have Bloom filters: of columns, and of members of structs."""
    for f in fields if chosen else ():
        if pa.types.is_struct(f.type):
            yield from _list_paths(f.type, chosen, f"{above}{f.name}.")
        elif above + f.name in chosen and not pa.types.is_boolean(f.type) and not pa.types.is_nested(f.type):
            yield above + f.name


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Returns whether a dictionary pays, by the column's type or its first rows."""
    if not _is_text(column.type):
        return bool(pa.types.is_dictionary(column.type))
    sample = column.slice(0, SAMPLE_ROWS)
    if sample.nbytes > SAMPLE_BYTES:
        return False
    different = len(sample.unique())
    return different <= REPEATS * len(sample) and different * sample.nbytes <= DICTIONARY_BYTES * len(sample)


def _shares_beginnings(column: pa.ChunkedArray) -> bool:
    """Returns whether texts share their beginnings with the ones before, as numbered names do."""
    sample = column.slice(0, NEIGHBOURS)
    if sample.nbytes > SAMPLE_BYTES:
        return False
    texts = [text for text in sample.combine_chunks().view(pa.binary()).to_pylist() if text]
    if not texts:
        return False
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    padded = np.array(texts, np.bytes_).view(np.uint8).reshape(len(texts), lengths.max())
    differs = padded[1:] != padded[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), lengths.max())
    shared = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    return bool(shared.sum() > SHARED * lengths.sum())


def _has_changes(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc  # late: it takes 40 ms

    ends = pc.min_max(column.slice(0, SAMPLE_ROWS))
    return bool(ends["min"] != ends["max"])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _is_number(kind: pa.DataType) -> bool:
    """Returns whether Parquet stores the type as an integer of 32 or 64 bits."""
    of_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return bool(of_time or pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.precision <= 18))


FORMAT_VERSION = "1"
ROW_GROUP_BYTES = 16 << 20
"""The most bytes of rows in memory that become one row group."""
MAX_FOLDERS = 48
BUFFER_BYTES = 256 << 10
"""Bytes of a file that are written and hashed at once."""


class PartRole(NamedTuple):
    """The kind of rows, and the output of a split feed that they belong to."""

    kind: PartKind
    output: str = ""


@dataclass(frozen=True, slots=True)
class PartTarget:
    """Where rows of one offset range go: feed, batch, attempt, range, kind of part, and output of a split feed."""

    feed: str
    batch: int
    plan_hash: str
    attempt: str
    offset_range: OffsetRange
    kind: PartKind = PartKind.LANDED
    output: str = ""


def build_metadata(feed: str, batch: int, plan_hash: str, s: OffsetRange) -> dict[str, str]:
    """Returns the metadata in a part's footer, under keys that begin with `sluice.`."""
    return _describe(feed, batch, plan_hash, s) | {"sluice.range": str(s)}


def build_shared_metadata(
    feed: str, batch: int, plan_hash: str, ranges: Sequence[tuple[OffsetRange, int]]
) -> dict[str, str]:
    """Returns the footer of a shared file: its offset ranges in order with their numbers of rows, of one life of a
    topic.
    """
    ranges_json = json.dumps([[str(s), rows] for s, rows in ranges])
    return _describe(feed, batch, plan_hash, ranges[0][0]) | {"sluice.slices": ranges_json}


def _describe(feed: str, batch: int, plan_hash: str, s: OffsetRange) -> dict[str, str]:
    return {
        "sluice.format_version": FORMAT_VERSION,
        "sluice.feed": feed,
        "sluice.topic_id": s.incarnation,
        "sluice.batch": str(batch),
        "sluice.plan_hash": plan_hash,
    }


class PartWriter:
    """Writes one offset range's rows of one kind. End it with `close` or `abandon`.

    A row group is full at `settings.row_group_rows` rows or `row_group_bytes` in memory, and a file at
    `settings.target_file_bytes`. The last files appear with `close`. `pending_bytes` of rows wait for a row group.
    `encode_ns` is the time spent in Parquet, `write_ns` the time spent on hashing and writing the bytes.
    """

    def __init__(
        self, lake: Lake, target: PartTarget, schema: pa.Schema, settings: LandingSettings, row_group_bytes: int
    ) -> None:
        self._lake, self._target, self._schema, self._settings = lake, target, schema, settings
        self._row_group_bytes = row_group_bytes
        self._last = target.offset_range.start - 1
        self._times = schema.get_field_index(time_column(schema))
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self.pending_bytes = 0
        self._folders: set[int] = set()
        self._files: dict[str, _PartFile] = {}
        self._opened = 0
        self._parts: dict[int, Part] = {}
        self._ns = 0
        self._write_ns = 0

    @property
    def encode_ns(self) -> int:
        return self._ns - self.write_ns

    @property
    def write_ns(self) -> int:
        return self._write_ns + sum(f.sink.ns for f in self._files.values())

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows. Raises ProofFailed if their offsets do not increase from the last one or leave the offset range."""
        if not rows.num_rows:
            return
        self._last = check_increasing(self._target.offset_range, rows, self._last)
        self._pending.append(rows)
        self._pending_rows, self.pending_bytes = self._pending_rows + rows.num_rows, self.pending_bytes + rows.nbytes
        if self._pending_rows >= self._settings.row_group_rows or self.pending_bytes >= self._row_group_bytes:
            self.flush()

    def close(self) -> tuple[Part, ...]:
        """Finish the staged files. Returns their parts; none when there were no rows."""
        self.flush()
        for folder in list(self._files):
            self._finish_file(folder)
        return tuple(part for _, part in sorted(self._parts.items()))

    def abandon(self) -> None:
        """Remove everything that was written."""
        for file in self._files.values():
            file.discard()
        for part in self._parts.values():
            self._lake.remove(part.staged)
        self._files, self._pending, self._parts = {}, [], {}

    def flush(self) -> None:
        """Write the rows that wait for a row group."""
        if not self._pending:
            return
        begun = time.perf_counter_ns()
        rows, size = pa.Table.from_batches(self._pending, self._schema), self.pending_bytes
        self._pending, self._pending_rows, self.pending_bytes = [], 0, 0
        for folder, folder_rows in self._by_folder(rows):
            self._add(folder, folder_rows)
        if size > 2 * self._row_group_bytes:
            # The memory of a huge value is not retained for the next one: there may be none.
            pa.default_memory_pool().release_unused()
        self._ns += time.perf_counter_ns() - begun
        for folder in [f for f, file in self._files.items() if file.sink.bytes >= self._settings.target_file_bytes]:
            self._finish_file(folder)

    def _add(self, folder: str, rows: pa.Table) -> None:
        if folder not in self._files:
            chosen = choose_options(rows, self._settings)
            self._files[folder] = self._open(folder, chosen)
            self._opened += 1
        self._files[folder].add(rows)

    def _open(self, folder: str, chosen: dict[str, Any]) -> _PartFile:
        target, sequence = self._target, self._opened
        name = paths.part_name(target.offset_range, target.batch, sequence)
        file = _PartFile(self._lake, target, _PartName(folder, name, sequence), self._schema, chosen)
        file.about(build_metadata(target.feed, target.batch, target.plan_hash, target.offset_range))
        return file

    def _by_folder(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """The rows, split by the folder that they go to. Each share keeps offset order."""
        s = self._target.offset_range
        if not s.by_time:
            yield s.folder, rows
            return
        # The start of each row's window; `_NO_TIME` if the record has no time, or one beyond the calendar.
        times = rows.column(self._times)
        stamps = np.concatenate([fill_int64s(c.cast(pa.int64()), _NO_TIME) for c in times.chunks])
        usable = (stamps >= 0) & (stamps < CALENDAR_ENDS)
        windows = np.where(usable, stamps - stamps % s.by_time, _NO_TIME)
        for window in np.unique(windows).tolist():
            if window not in self._folders and len(self._folders) >= MAX_FOLDERS:
                windows[windows == window] = _NO_TIME
            elif window != _NO_TIME:
                self._folders.add(window)
        for window in np.unique(windows).tolist():
            folder = paths.window_folder(None if window == _NO_TIME else window, s.by_time, paths.prefix_of(s.folder))
            yield folder, rows.take(fixed_width(pa.int64(), np.flatnonzero(windows == window)))

    def _finish_file(self, folder: str) -> None:
        begun = time.perf_counter_ns()
        file = self._files.pop(folder)
        self._parts[file.sequence] = file.finish()
        self._write_ns += file.sink.ns
        self._ns += time.perf_counter_ns() - begun


SHARED_ROWS = 1 << 16
"""The number of rows from which a row group of a shared file ends, with an offset range. Fewer take longer to write;
more make readers of one partition skip more (docs/developers/performance.md).
"""


class SharedWriter:
    """Writes the rows of one kind of several offset ranges, one range after the other, into one file. End it with
    `close` or `abandon`.

    The file has the name of its first range. Row groups hold whole ranges. `encode_ns` and `write_ns` as `PartWriter`.
    """

    def __init__(self, lake: Lake, first: PartTarget, schema: pa.Schema, settings: LandingSettings) -> None:
        self._lake, self._first, self._schema, self._settings = lake, first, schema, settings
        self._held: list[tuple[OffsetRange, int]] = []
        self._pending: list[pa.RecordBatch] = []
        self._rows = self._most = 0
        self._file: _PartFile | None = None
        self._ns = 0

    @property
    def bytes(self) -> int:
        """The offset ranges already in the file."""
        return self._file.sink.bytes if self._file else 0

    @property
    def encode_ns(self) -> int:
        return self._ns - self.write_ns

    @property
    def write_ns(self) -> int:
        return self._file.sink.ns if self._file else 0

    def add(self, s: OffsetRange, batches: Sequence[pa.RecordBatch]) -> None:
        """Add all rows of an offset range. Raises ProofFailed if their offsets do not increase, or leave the range."""
        last, rows = s.start - 1, 0
        for batch in batches:
            if batch.num_rows:
                last = check_increasing(s, batch, last)
                rows += batch.num_rows
        if self._rows + rows > self._settings.row_group_rows:
            self._flush()
        self._held.append((s, rows))
        self._pending += batches
        self._rows += rows
        # Whole buffers are counted first: what rows take of them is never more, and takes long to find.
        self._most += sum(batch.get_total_buffer_size() for batch in batches)
        if self._most >= ROW_GROUP_BYTES:
            self._most = sum(batch.nbytes for batch in self._pending)
        if self._rows >= min(SHARED_ROWS, self._settings.row_group_rows) or self._most >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> dict[OffsetRange, Part]:
        """Finish the staged file. Returns the part of each offset range."""
        self._flush()
        begun = time.perf_counter_ns()
        if (file := self._file) is None:
            return {}
        first = self._first
        file.about(build_shared_metadata(first.feed, first.batch, first.plan_hash, self._held))
        part = file.finish()
        self._ns += time.perf_counter_ns() - begun
        return split_shared_part(part, self._held)

    def abandon(self) -> None:
        """Remove everything that was written."""
        if self._file is not None:
            self._file.discard()
            self._lake.remove(self._file.staged)

    def _flush(self) -> None:
        if not self._pending:
            return
        begun = time.perf_counter_ns()
        rows = pa.Table.from_batches(self._pending, self._schema).unify_dictionaries()
        self._pending, self._rows, self._most = [], 0, 0
        if self._file is None:
            first, name = self._first, paths.shared_name(self._first.offset_range, self._first.batch)
            chosen = choose_options(rows, self._settings)
            self._file = _PartFile(self._lake, first, _PartName(first.offset_range.folder, name), self._schema, chosen)
        self._file.add(rows)
        self._ns += time.perf_counter_ns() - begun


def split_shared_part(file: Part, ranges: Sequence[tuple[OffsetRange, int]]) -> dict[OffsetRange, Part]:
    """The parts of a shared file, by the offset ranges in it and their rows. Its bytes are shared out by rows."""
    out, at = dict[OffsetRange, Part](), 0
    for s, rows in ranges:
        start, end = (file.bytes * n // file.rows for n in (at, at + rows))
        out[s] = replace(file, rows=rows, bytes=end - start, shared=SharedFile(at, file.rows, file.bytes))
        at += rows
    return out


def check_increasing(s: OffsetRange, rows: pa.RecordBatch, after: int) -> int:
    """The last offset of the rows. Raises ProofFailed if they do not increase from `after`, or leave the offset
    range.
    """
    offsets = get_offsets(rows)
    first, last = int(offsets[0]), int(offsets[-1])
    if first <= after or last >= s.end or not bool(np.all(offsets[1:] > offsets[:-1])):
        raise ProofFailed(
            f"{s}: offsets {first}..{last} do not strictly increase from {after} within the offset range",
            remedy="this is a bug in decoding or in the format; nothing of this offset range was landed",
            topic=s.topic,
            partition=s.partition,
            start=s.start,
            end=s.end,
        )
    return last


_NO_TIME = -1


class _Abandoned(Exception):
    """Raised inside a file's block, to make the lake discard the file."""


class _PartName(NamedTuple):
    """The folder and file name of a part, and its number among the offset range's parts."""

    folder: str
    file: str
    sequence: int = 0


class _PartFile:
    """One part on its way into staging."""

    def __init__(
        self, lake: Lake, target: PartTarget, part: _PartName, schema: pa.Schema, options: dict[str, Any]
    ) -> None:
        folder, name, self.sequence = part
        self._name, self._kind, self._rows = name, target.kind, 0
        feed, batch, kind, folder = target.feed, target.batch, target.kind, paths.join(target.output, folder)
        self.staged = paths.staged_path(feed, batch, target.attempt, kind, folder, name)
        self._path = paths.part_path(feed, kind, folder, name)
        self._block: AbstractContextManager[BinaryIO] = lake.create(self.staged)
        self.sink, self._open, self._times = _HashingSink(self._block.__enter__()), True, TimeBounds(schema)
        with self._whole_or_nothing():
            # Parquet writes each page by itself, and each write of a few bytes takes as long as one of many.
            self._buffer = pa.BufferedOutputStream(pa.PythonFile(self.sink, "w"), BUFFER_BYTES)
            self._writer = pq.ParquetWriter(self._buffer, schema, **options)

    def about(self, metadata: dict[str, str]) -> None:
        """Set the metadata of the file's footer. Call it before `finish`."""
        with self._whole_or_nothing():
            self._writer.add_key_value_metadata(metadata)

    def add(self, rows: pa.Table) -> None:
        with self._whole_or_nothing():
            self._writer.write_table(rows, row_group_size=rows.num_rows)
            self._buffer.flush()
            self._times.add(rows)
        self._rows += rows.num_rows

    def finish(self) -> Part:
        self.about(self._times.metadata())
        with self._whole_or_nothing():
            self._writer.close()
            self._buffer.flush()
        self._open = False
        self._block.__exit__(None, None, None)
        sink = self.sink
        return Part(self._name, self._kind, self.staged, self._path, self._rows, sink.bytes, sink.sha256)

    def discard(self) -> None:
        with suppress(_Abandoned), self._whole_or_nothing():
            raise _Abandoned

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Pass an error on to the lake, which discards the file and may raise a more exact error."""
        try:
            yield
        except BaseException as error:
            if self._open:
                self._open = False
                # A Parquet writer that is closed or collected ends its file as if it were whole: not this one.
                self.sink.muted = True
                with suppress(Exception):
                    self._writer.close()
                self._block.__exit__(type(error), error, error.__traceback__)
            raise


class _HashingSink:
    """The file that pyarrow writes to. It keeps the size and SHA-256 of what passed, and the time (`ns`) it took."""

    closed = False
    muted = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.bytes = 0
        self.ns = 0

    def write(self, data: Any) -> int:
        if self.muted:
            return len(data)
        begun = time.perf_counter_ns()
        self._hash.update(data)
        self._file.write(data)
        self.bytes += len(data)
        self.ns += time.perf_counter_ns() - begun
        return len(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None: ...

    def close(self) -> None: ...
