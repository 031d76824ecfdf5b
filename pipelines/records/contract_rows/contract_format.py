"""A `Format` that checks another format's rows against a contract, and quarantines rows that break it.

Promises: landed rows are unchanged, and each record is in exactly one place. Both kinds of rows stay in offset order.
Checks take a few bits per row, and a few bytes per broken row. Reasons never contain a row's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.contract.catalogue import Scope, columns, demand, get_argument, rule_of
from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import EXAMPLES, Tally
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.contract_rows.check_arrays import places_of
from sluice.pipelines.records.contract_rows.row_checks import Check, check_of
from sluice.pipelines.records.rows.refusals import merge_refused
from sluice.pipelines.records.rows.row_format import (
    KAFKA_FIELDS,
    REFUSED,
    Format,
    Formatted,
    RawFormat,
    Stage,
    get_offsets,
    offset_column,
)
from sluice.pipelines.schema.arrays import fixed_width, int64s, text_array

_TOMBSTONE = KAFKA_FIELDS[-1].name


@dataclass(frozen=True, slots=True)
class Broken:
    """Rows that break a critical expectation, in order, and for each the first such expectation's place."""

    rows: Array
    expectations: Array


@dataclass(frozen=True, slots=True)
class RowResults:
    """How rows stood against the contract: which broke it, and one tally per row expectation."""

    broken: Broken
    tallies: tuple[Tally, ...]


class _RowCheck(NamedTuple):
    """A row expectation with its check. `columns` are indices into the columns that the contract needs."""

    expectation: Expectation
    columns: tuple[int, ...]
    check: Check


class RowChecks:
    """The row expectations of a contract, prepared for batch after batch of landed rows of one schema."""

    def __init__(self, contract: Contract) -> None:
        self._expectations = [e for e in contract.expectations if rule_of(e).scope is Scope.ROW]
        self._reasons = _ReasonColumns(contract)
        self._schema: pa.Schema | None = None
        self._rows: list[_RowCheck] = []
        self._looked_at: list[int] = []

    def check(self, rows: pa.RecordBatch) -> RowResults:
        """Check landed rows against the contract. Tombstones are left out."""
        if self._schema is None:
            self._prepare(rows.schema)
        offsets = get_offsets(rows)
        columns = [rows.column(i) for i in self._looked_at]
        alive = _alive(rows)
        if alive is None:
            return self._check(columns, offsets)
        chosen = fixed_width(pa.int64(), alive)
        results = self._check([c.take(chosen) for c in columns], offsets[alive])
        return RowResults(Broken(alive[results.broken.rows], results.broken.expectations), results.tallies)

    def reason_columns(self, broken: Broken) -> list[pa.Array]:
        """Columns of `REFUSED` for broken rows: stage, reason, expectation, field, detail, byte."""
        return self._reasons.of(broken.expectations)

    def _prepare(self, schema: pa.Schema) -> None:
        names = list(dict.fromkeys(name for e in self._expectations for name in columns(e)))
        for e in self._expectations:
            types = [schema.field(name).type for name in columns(e)]
            self._rows.append(_RowCheck(e, tuple(map(names.index, columns(e))), check_of(e, types)))
        self._looked_at, self._schema = [schema.get_field_index(name) for name in names], schema

    def _check(self, columns: Sequence[pa.Array], offsets: Array) -> RowResults:
        first = np.empty(0, np.int32)
        tallies = []
        for row in self._rows:
            check_result = row.check([columns[i] for i in row.columns])
            broken = _NONE if check_result.broken is None else places_of(check_result.broken)
            e = row.expectation
            examples = tuple(offsets[broken[:EXAMPLES]].tolist())
            tallies.append(Tally(e.place, check_result.checked, len(broken), examples))
            if len(broken) and is_refusing(e):
                first = first if len(first) else np.full(len(offsets), -1, np.int32)
                first[broken[first[broken] < 0]] = e.place
        rows = np.flatnonzero(first >= 0)
        return RowResults(Broken(rows, first[rows]), tuple(tallies))


_NONE = np.empty(0, np.int64)


def is_refusing(expectation: Expectation) -> bool:
    """Returns whether rows that break this expectation are quarantined. With `mostly`, no single row can be blamed."""
    return expectation.severity is Severity.CRITICAL and get_argument(expectation, "mostly") == 1


def _alive(rows: pa.RecordBatch) -> Array | None:
    """The indices of rows that are not tombstones; None when there are no tombstones."""
    index = rows.schema.get_field_index(_TOMBSTONE)
    if index < 0 or not (tombstones := rows.column(index)).true_count:
        return None
    return places_of(pa.compute.invert(tombstones))


class _ReasonColumns:
    """Makes the columns that give the reasons: one text per expectation, and for each row an index."""

    def __init__(self, contract: Contract) -> None:
        rows = contract.expectations
        self._texts = [
            _encode_texts([str(Stage.CONTRACT)] * len(rows)),
            _encode_texts([rule_of(e).reason for e in rows]),
            _encode_texts([e.type for e in rows]),
            _encode_texts([", ".join(columns(e)) for e in rows]),
            _encode_texts([demand(e) for e in rows]),
        ]

    def of(self, expectations: Array) -> list[pa.Array]:
        """The columns of `REFUSED` that follow the record, for rows that broke these expectations."""
        n = len(expectations)
        texts = [
            pa.DictionaryArray.from_arrays(fixed_width(pa.int32(), positions[expectations]), words)
            for positions, words in self._texts
        ]
        nowhere = pa.Array.from_buffers(pa.int32(), n, [pa.py_buffer(bytes((n + 7) // 8)), pa.py_buffer(bytes(4 * n))])
        return [*texts, nowhere]


def _encode_texts(texts: Sequence[str]) -> tuple[Array, pa.Array]:
    """For each text its index among the distinct texts, and these."""
    order = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return np.array([order[t] for t in texts], np.int32), text_array([*order])


class ContractFormat:
    """Checks the rows of the format `behind` it.

    With `dropping`, rows that break a critical expectation are counted and left out instead of quarantined.
    """

    def __init__(self, behind: Format, contract: Contract, *, dropping: bool = False) -> None:
        self.schema, self.contract = behind.schema, contract.hash
        self._behind, self._checks, self._raw = behind, RowChecks(contract), RawFormat()
        self._dropping = dropping
        self._offsets = self.schema.get_field_index(offset_column(self.schema))

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The other format's pieces, without the rows that break a critical expectation."""
        for piece in self._behind.convert(s, chunk):
            began = perf_counter_ns()
            results = self._checks.check(piece.landed)
            if len(results.broken.rows):
                piece = self._without(s, chunk, piece, results.broken)
            spent = perf_counter_ns() - began
            yield replace(piece, tallies=results.tallies, validate_ns=spent, contract=self.contract)

    def _without(self, s: OffsetRange, chunk: pa.RecordBatch, piece: Formatted, broken: Broken) -> Formatted:
        landed = take_rows(piece.landed, np.delete(np.arange(piece.landed.num_rows), broken.rows))
        if self._dropping:
            return replace(piece, landed=landed, dropped=piece.dropped + len(broken.rows))
        offsets = int64s(piece.landed.column(self._offsets))[broken.rows]
        # The refused records as they came, and the expectation that each broke.
        all_ = int64s(chunk.column(chunk.schema.get_field_index("offset")))
        records = chunk.take(fixed_width(pa.int32(), np.searchsorted(all_, offsets).astype(np.int32)))
        (raw,) = self._raw.convert(s, records)
        refused = merge_refused(
            piece.quarantined,
            pa.RecordBatch.from_arrays([*raw.landed.columns, *self._checks.reason_columns(broken)], schema=REFUSED),
        )
        return replace(piece, landed=landed, quarantined=refused)
