"""Reads the rows of landed parts back in offset order, and compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.proof import hash_file
from sluice.pipelines.model.receipts import Part
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import get_offsets
from sluice.pipelines.schema.arrays import find_equal, fixed_width, has_floats

READ_BYTES, READ_ROWS = 2 << 20, 1 << 16
"""The most bytes and rows of one file that are decoded at once."""

Rows = Iterator[pa.RecordBatch]


def check_source(lake: Lake, feed: str, part: Part) -> None:
    """Raises ProofFailed if the part's file is not the one that the ledger names."""
    with suppress(FileNotFoundError), lake.open(part.path) as file:
        if hash_file(file) == part.sha256:
            return
    raise ProofFailed(
        f"{part.path} is not the file that the ledger names: nothing is made from it",
        remedy=paths.find_part_remedy(feed),
    )


def read_part_at(lake: Lake, part: Part, path: str) -> Rows:
    """The rows of a part whose file lies at `path`, in batches that take little memory. Raises PartUnreadable."""
    with parquet.wrap_read_errors(path), lake.open(path) as opened:
        yield from read_rows(opened, part)


def read_rows(opened: BinaryIO, part: Part, columns: Sequence[str] | None = None, max_rows: int = READ_ROWS) -> Rows:
    """The rows of a part in its open file, in batches of at most `max_rows`. `columns` None means all."""
    file = pq.ParquetFile(opened, page_checksum_verification=True)
    groups, before = parquet.find_row_groups(file.metadata, part)
    yield from parquet.own_rows(_read(file, groups, columns, max_rows), part, before)


def _read(file: pq.ParquetFile, groups: Sequence[int] | None, columns: Sequence[str] | None, max_rows: int) -> Rows:
    for index in range(file.num_row_groups) if groups is None else groups:
        group = file.metadata.row_group(index)
        at_once = max(READ_BYTES * group.num_rows // max(group.total_byte_size, 1), 1)
        yield from file.iter_batches(min(at_once, max_rows), [index], columns, use_threads=False)


def in_order(files: Sequence[Rows]) -> Rows:
    """Merge the rows of several files, each in offset order, into one offset order. Holds one batch of each."""
    heads = {file: rows for file in files if (rows := next(file, None)) is not None}
    while heads:
        horizon = min(get_offsets(rows)[-1] for rows in heads.values())
        ready = []
        for file, rows in list(heads.items()):
            count = int(np.searchsorted(get_offsets(rows), horizon, side="right"))
            ready.append(rows.slice(0, count))
            rest = rows.slice(count) if count < rows.num_rows else next(file, None)
            if rest is None:
                del heads[file]
            else:
                heads[file] = rest
        together = pa.concat_batches(ready)
        yield together.take(fixed_width(pa.int64(), np.argsort(get_offsets(together))))


def compare_rows(before: Rows, after: Rows) -> bool:
    """Returns whether both yield the same rows in the same order, however they are cut into batches. NaN is NaN."""
    left_rows, right = next(before, None), next(after, None)
    while left_rows is not None and right is not None:
        both = min(left_rows.num_rows, right.num_rows)
        if not _compare_batches(left_rows.slice(0, both), right.slice(0, both)):
            return False
        left_rows = left_rows.slice(both) if left_rows.num_rows > both else next(before, None)
        right = right.slice(both) if right.num_rows > both else next(after, None)
    return left_rows is None and right is None


def _compare_batches(a: pa.RecordBatch, b: pa.RecordBatch) -> bool:
    if a.equals(b):
        return True
    pairs = zip(a.columns, b.columns, strict=False)
    return a.schema.equals(b.schema) and all(
        x.equals(y) or (has_floats(x.type) and bool(find_equal(x, y).all())) for x, y in pairs
    )
