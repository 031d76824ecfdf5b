"""What a feed makes of decoded records: the port `Format`, and `RawFormat`, which keeps them as they are.

A format is given one chunk of a slice after the other, in offset order, and splits each into rows to land,
rows to quarantine and records to drop; every record of a chunk ends in exactly one of the three. Whole
columns at a time: no Python object is made for a record. `records.typed` has the format of typed feeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.pipelines.vocabulary.plans import Slice
from sluice.pipelines.vocabulary.ranges import Range, intersect
from sluice.pipelines.vocabulary.receipts import Drift, Tally

_OFFSETS = Range(0, (1 << 63) - 1)

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


@dataclass(frozen=True, slots=True)
class Formatted:
    """A chunk or a part of one, sorted out. Both batches keep offset order; `quarantined` is None when nothing is.

    `tallies` and `drift` are what was seen of these records, one for each expectation, and for each kind and field;
    `typed` are the records with a value that fits the schema: what a missing field is missing in. `validate_ns` is the
    time that went into holding them against the contract.
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
        """Records accounted for."""
        quarantined = 0 if self.quarantined is None else self.quarantined.num_rows
        return int(self.landed.num_rows + quarantined) + self.dropped


class Format(Protocol):
    """How records become rows."""

    @property
    def contract(self) -> str:
        """The hash of the contract that rows are held against; empty without one."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Of landed rows. Dictionary types say that a column has few values; files hold the plain type."""
        ...

    def convert(self, s: Slice, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """Sort out decoded records (`key, value, offset, timestamp, timestampType, headers`) of one slice.

        In one piece, or in several where what comes of them takes much more memory than they do. A record that does
        not fit is a quarantined row, never an exception.
        """
        ...


class RawFormat:
    """Exactly the columns of Spark's Kafka source, in its order and types; everything lands."""

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
        """The chunk with its topic and partition beside it; copies nothing."""
        columns = {
            **dict(zip(chunk.schema.names, chunk.columns, strict=True)),
            "topic": _constant_text(s.topic, chunk.num_rows),
            "partition": fixed_width(pa.int32(), np.full(chunk.num_rows, s.partition, np.int32)),
        }
        arrays = [columns[name] for name in self.schema.names]
        yield Formatted(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


def _constant_text(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(fixed_width(pa.int8(), np.zeros(rows, np.int8)), text_array([text]))


def inside(offsets: np.ndarray, ranges: Iterable[Range]) -> np.ndarray:
    """Which of the offsets lie in one of the ranges."""
    edges = np.array([edge for r in intersect(ranges, _OFFSETS) for edge in r], np.int64)
    found: np.ndarray = np.searchsorted(edges, offsets, side="right") % 2 == 1
    return found
