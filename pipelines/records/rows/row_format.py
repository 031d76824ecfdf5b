"""How decoded records become rows: the port `Format`, and `RawFormat`, which keeps records as they are.

A format gets the chunks of a slice one by one, in offset order. It splits each chunk into rows to land, rows to
quarantine and records to drop; every record ends in exactly one of the three. It works on whole columns and makes no
Python object per record. `records.json` has the format of typed feeds, `records.contract_rows` the one of feeds with a
contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.ranges import Range, intersect
from sluice.pipelines.model.receipts import Drift, Tally
from sluice.pipelines.schema.arrays import fixed_width, text_array

_OFFSETS = Range(0, (1 << 63) - 1)

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

TO_SEND = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("timestamp", pa.int64()), ("headers", HEADERS)])
"""Records to send. Times are in ms and never null (−1: none); null headers are none."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """A chunk, or a piece of one, split into rows that land, rows that are quarantined, and `dropped` records.

    Both batches keep offset order; `quarantined` is None when it would be empty. There is one tally per expectation,
    and one drift per kind and field. `typed` counts the records with a value that fits the schema: a missing field is
    missing in these. `validate_ns` is the time spent on the contract.
    """

    landed: pa.RecordBatch
    quarantined: pa.RecordBatch | None = None
    dropped: int = 0
    tallies: tuple[Tally, ...] = ()
    drift: tuple[Drift, ...] = ()
    typed: int = 0
    validate_ns: int = field(default=0, compare=False)

    @property
    def total(self) -> int:
        """How many records this accounts for."""
        quarantined = 0 if self.quarantined is None else self.quarantined.num_rows
        return int(self.landed.num_rows + quarantined) + self.dropped


class Format(Protocol):
    """Turns decoded records into rows."""

    @property
    def contract(self) -> str:
        """The hash of the contract that rows are checked against; empty without one."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of landed rows. A dictionary type marks columns of few values; files hold plain types."""
        ...

    def convert(self, s: Slice, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """Turn decoded records of one slice into rows.

        `chunk` has the columns `key, value, offset, timestamp, timestampType, headers`. Yields one piece, or several
        when the rows take much more memory than the records. A record that does not fit becomes a quarantined row,
        never an exception.
        """
        ...


class RawFormat:
    """Lands every record, with exactly the columns of Spark's Kafka source, in its order and types."""

    contract = ""
    schema = pa.schema(
        [
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("topic", pa.dictionary(pa.int8(), pa.string()), nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("ms", "UTC")),
            pa.field("timestampType", pa.int32(), nullable=False),
            pa.field("headers", HEADERS),
        ]
    )

    def convert(self, s: Slice, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The chunk, with columns for its topic and partition. Copies nothing."""
        columns = {
            **dict(zip(chunk.schema.names, chunk.columns, strict=True)),
            "topic": _constant_text(s.topic, chunk.num_rows),
            "partition": fixed_width(pa.int32(), np.full(chunk.num_rows, s.partition, np.int32)),
        }
        arrays = [columns[name] for name in self.schema.names]
        yield Formatted(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


def _constant_text(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(fixed_width(pa.int8(), np.zeros(rows, np.int8)), _only(text))


@lru_cache(maxsize=64)
def _only(text: str) -> pa.StringArray:
    return text_array([text])


def inside(offsets: np.ndarray, ranges: Iterable[Range]) -> np.ndarray:
    """A boolean for each offset: whether it lies in one of the ranges."""
    edges = np.array([edge for r in intersect(ranges, _OFFSETS) for edge in r], np.int64)
    is_inside: np.ndarray = np.searchsorted(edges, offsets, side="right") % 2 == 1
    return is_inside
