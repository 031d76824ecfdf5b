"""A `Format` that checks another format's rows against a contract, and quarantines rows that break it.

Promise: rows that land are unchanged. Each record is still in exactly one place. Both kinds of rows stay in offset
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
import pyarrow as pa

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.contract_rows.row_expectations import Broken, RowChecks
from sluice.pipelines.records.rows import landed_columns
from sluice.pipelines.records.rows.landed_columns import REFUSED
from sluice.pipelines.records.rows.row_format import Format, Formatted, RawFormat
from sluice.pipelines.schema.arrays import fixed_width, int64s


class ContractFormat:
    """Checks the rows of the format `behind` it.

    With `dropping`, rows that break a critical expectation are counted and left out instead of quarantined.
    """

    def __init__(self, behind: Format, contract: Contract, *, dropping: bool = False) -> None:
        self.schema, self.contract = behind.schema, contract.hash
        self._behind, self._checks, self._raw = behind, RowChecks(contract), RawFormat()
        self._dropping = dropping
        self._offsets = self.schema.get_field_index(landed_columns.offset_column(self.schema))

    def convert(self, s: Slice, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The other format's pieces, without the rows that break a critical expectation."""
        for piece in self._behind.convert(s, chunk):
            began = perf_counter_ns()
            results = self._checks.hold(piece.landed)
            if len(results.broken.rows):
                piece = self._without(s, chunk, piece, results.broken)
            yield replace(piece, tallies=results.tallies, validate_ns=perf_counter_ns() - began)

    def _without(self, s: Slice, chunk: pa.RecordBatch, piece: Formatted, broken: Broken) -> Formatted:
        landed = take_rows(piece.landed, np.delete(np.arange(piece.landed.num_rows), broken.rows))
        if self._dropping:
            return replace(piece, landed=landed, dropped=piece.dropped + len(broken.rows))
        offsets = int64s(piece.landed.column(self._offsets))[broken.rows]
        refused = self._quarantine(s, chunk, offsets, broken)
        if piece.quarantined is not None:
            refused = _in_order(pa.Table.from_batches([piece.quarantined, refused]))
        return replace(piece, landed=landed, quarantined=refused)

    def _quarantine(self, s: Slice, chunk: pa.RecordBatch, offsets: Array, broken: Broken) -> pa.RecordBatch:
        """The refused records as they came, and the expectation that each broke."""
        all_ = int64s(chunk.column(chunk.schema.get_field_index("offset")))
        records = chunk.take(fixed_width(pa.int32(), np.searchsorted(all_, offsets).astype(np.int32)))
        (raw,) = self._raw.convert(s, records)
        return pa.RecordBatch.from_arrays([*raw.landed.columns, *self._checks.reason_columns(broken)], schema=REFUSED)


def _in_order(refused: pa.Table) -> pa.RecordBatch:
    column = refused.column("offset").combine_chunks()
    return refused.take(fixed_width(pa.int64(), np.argsort(int64s(column)))).combine_chunks().to_batches()[0]
