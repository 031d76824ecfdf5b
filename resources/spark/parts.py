"""Reads parts in Spark's tasks, by Arrow, with bounded memory for parts of any size.

For files that Spark's own Parquet reader cannot read, and for `spark.read.format("sluice")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.pipelines.lake import parquet
from sluice.pipelines.ports import Lake
from sluice.resources.spark.types import arrow_schema, conform

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sluice.pipelines.publishing.published_files import File

TASK_BYTES = 64 << 20
"""Bytes of Parquet in one Spark task: small files are read together, large ones by row group."""
BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one task: paths in the lake, each with the row groups to read of it (all, when None)."""

    parts: tuple[tuple[str, tuple[int, ...] | None], ...]


def shares(lake: Lake, files: Sequence[File]) -> list[Share]:
    """Return the files in order, each once, in shares of about `TASK_BYTES`."""
    from sluice.pipelines.publishing.published_files import one_each  # late: workers have no need of it

    out: list[Share] = []
    group: list[tuple[str, tuple[int, ...] | None]] = []
    total = 0
    sizes: dict[str, int] = {}
    for f in one_each(files):
        sizes[f.path] = 0
    for f in files:
        sizes[f.path] += f.bytes
    for path, size in sizes.items():
        large = size > TASK_BYTES
        if group and (large or total + size > TASK_BYTES):
            out.append(Share(tuple(group)))
            group, total = [], 0
        if large:
            out += [Share(((path, groups),)) for groups in _row_groups(lake, path)]
        else:
            group, total = [*group, (path, None)], total + size
    return [*out, Share(tuple(group))] if group else out


def _row_groups(lake: Lake, path: str) -> Iterator[tuple[int, ...]]:
    """Yield the row groups of a large file, in runs of about a task's size."""
    with parquet.open_parquet(lake, path) as file:
        metadata = file.metadata
    run: tuple[int, ...] = ()
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        if run and total + size > TASK_BYTES:
            yield run
            run, total = (), 0
        run, total = (*run, number), total + size
    yield run


def rows(lake: Lake, share: Share, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the share's rows, in Spark's types."""
    target = arrow_schema(schema)
    for path, groups in share.parts:
        for batch in parquet.batches(lake, path, BATCH_ROWS, groups=groups):
            yield conform(batch, target)


@dataclass(frozen=True, slots=True)
class ReadShares:
    """Yields the rows for positions in `shares`. Spark calls it in a Python worker (`mapInArrow`)."""

    lake: Lake
    shares: tuple[Share, ...]
    schema: StructType

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from rows(self.lake, self.shares[number], self.schema)
