"""A batch's quarantine: records by reason, with the position and samples of the first ones.

Raw records are read only for the few that are shown. Memory is bounded by one row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.lake import parquet
from sluice.pipelines.model.receipts import Part, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import Fault, QuarantineKind, faults_of, rank_faults

MOST_FILES = 200
"""Files in quarantine that are read; of the others only the number of rows is known."""
SHOWN = 12
"""The number of reasons that are shown with records."""
SAMPLES = 2
ROWS_AT_ONCE = 1 << 10
SAMPLE_BYTES = 1 << 10
"""Bytes that are kept of a key, and of a value around the byte at fault."""
_COLUMNS = (*QuarantineKind._fields, "offset", "timestamp", "key", "value", "byte")


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """One refused record, as it came. `byte`: where in what is kept of the value the trouble is; `size`: of all of it;
    `cut`: whether something stands before what is kept.
    """

    position: str
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    size: int
    byte: int | None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Records that are wrong in the same way, and the first of them."""

    fault: Fault
    samples: tuple[RejectedRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejects:
    """The most frequent first. `unread`: rows in files that were not read, `files` of them."""

    kinds: tuple[Reject, ...] = ()
    unread: int = 0
    files: int = 0


Placed = tuple[Receipt, Part]


def rejects(parts: Sequence[Placed], lake: Lake, *, published: bool) -> Rejects:
    """Returns the rejects in the quarantined parts. Missing (replaced, retired) or damaged files count as unread."""
    faults: list[Fault] = []
    files: dict[str, int] = {}
    for _, part in parts:
        files[_path(part, published)] = files.get(_path(part, published), 0) + part.rows
    unread = [*files][MOST_FILES:]
    for path in [*files][:MOST_FILES]:
        try:
            faults += faults_of([path], lake)
        except PartUnreadable:
            unread.append(path)
    faults_by_size = sorted(rank_faults(faults), key=lambda f: (-f.records, f.first))
    kinds = [Reject(f, _samples(f, parts, lake, published) if i < SHOWN else ()) for i, f in enumerate(faults_by_size)]
    return Rejects(tuple(kinds), sum(files[path] for path in unread), len(unread))


def _path(part: Part, published: bool) -> str:
    return part.path if published else part.staged


def _samples(fault: Fault, parts: Sequence[Placed], lake: Lake, published: bool) -> tuple[RejectedRecord, ...]:
    """The first record of a kind, and the next one that is like it nearby."""
    partition, _, offset = fault.first.rpartition(":")
    for receipt, part in parts:
        s = receipt.offset_range
        if str(s.tp) == partition and s.start <= int(offset) < s.end:
            with suppress(PartUnreadable):
                if samples := _search(int(offset), partition, part, lake, published):
                    return samples
    return ()


def _search(offset: int, partition: str, part: Part, lake: Lake, published: bool) -> tuple[RejectedRecord, ...]:
    for batch in _batches(part, lake, published):
        offsets = batch.column("offset").to_pylist()
        if offsets and offsets[0] <= offset <= offsets[-1]:
            if offset not in offsets:
                return ()
            first = offsets.index(offset)
            values = _kind_values(batch, first)
            like = [row for row in range(first, batch.num_rows) if _kind_values(batch, row) == values]
            return tuple(_sample(batch, row, partition) for row in like[:SAMPLES])
    return ()


def _batches(part: Part, lake: Lake, published: bool) -> Iterator[pa.RecordBatch]:
    """The rows, one row group after the other. In a file that several windows share, they are in offset order, too."""
    return parquet.read_part(lake, part, _path(part, published), ROWS_AT_ONCE, list(_COLUMNS))


def _kind_values(batch: pa.RecordBatch, row: int) -> list[str | None]:
    return [batch.column(name)[row].as_py() for name in QuarantineKind._fields]


def _sample(batch: pa.RecordBatch, row: int, partition: str) -> RejectedRecord:
    cell = {name: batch.column(name)[row] for name in ("offset", "timestamp", "key", "value", "byte")}
    stamp, key, value, byte = (cell[n] for n in ("timestamp", "key", "value", "byte"))
    buffer = value.as_buffer() if value.is_valid else None
    at = byte.as_py() if byte.is_valid else None
    start = max(0, (at or 0) - SAMPLE_BYTES // 4)
    return RejectedRecord(
        position=f"{partition}:{cell['offset'].as_py()}",
        timestamp=stamp.value if stamp.is_valid else None,
        key=_first(key.as_buffer()) if key.is_valid else None,
        value=None if buffer is None else _first(buffer.slice(min(start, buffer.size))),
        size=0 if buffer is None else buffer.size,
        byte=None if at is None else at - start,
        cut=start > 0,
    )


def _first(data: pa.Buffer) -> bytes:
    head: bytes = data.slice(0, min(SAMPLE_BYTES, data.size)).to_pybytes()
    return head
