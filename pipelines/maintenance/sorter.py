"""Tries the quarantined records of one offset range by a shape, after a fix function if there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.landing.task import RowFindings
from sluice.pipelines.maintenance.fixers import Botched, Fixer, Record
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.quarantine.limit import QuarantineKind, kinds_of
from sluice.pipelines.quarantine.listing import without
from sluice.pipelines.records.rows.row_format import (
    QUARANTINED,
    WITHHELD,
    Formatted,
    RawFormat,
    get_offsets,
    has_bytes,
    quarantine_rows,
)
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.arrays import fixed_width, int64s, plain, recast

FIXED_BYTES = 24 << 20
"""Fixed values that are typed at once."""

_DECODED = pa.schema([f for f in RawFormat.schema if f.name not in ("topic", "partition")])

_AS_STORED = frozenset((*RawFormat.schema.names, "batch", WITHHELD.name))

NO_OFFSETS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Sorted:
    """A chunk of tried records, by output: the rows that fit, and, as the quarantine has them, those that do not and
    were not mended. `mended` are the offsets of fitting rows whose bytes are not the log's."""

    landed: Mapping[str, Sequence[pa.RecordBatch]]
    refused: Mapping[str, Sequence[pa.RecordBatch]]
    mended: Any

    @property
    def offsets(self) -> Any:
        """The offsets of the records that fit."""
        columns = [get_offsets(rows) for batches in self.landed.values() for rows in batches]
        return np.unique(np.concatenate(columns)) if columns else NO_OFFSETS


NONE = Sorted({}, {}, NO_OFFSETS)


class Sorter:
    """Tries the quarantined records of one offset range by a shape, after a fix function if there is one.

    `trial`, `seen` and `missing` grow with it.
    """

    def __init__(self, s: OffsetRange, shape: Shape, fixer: Fixer | None, writers: WriterSchemas | None = None) -> None:
        self.trial, self.seen = Trial(), RowFindings()
        self.missing: dict[str, Drift] = {}
        """The fields of refused values that no re-landed record has yet."""
        self._range, self._fixer = s, fixer
        self._alone: list[int] = []
        """The rows at hand that the fix function gave no value for."""
        self._format = replace(shape, dropping=False).format(writers)
        self._seal = shape.protection.seal if shape.protection else None

    def sort_out(self, rows: pa.RecordBatch) -> Sorted:
        """Try quarantined rows. Those that do not fit are returned with today's reason.

        Records whose bytes are only in Kafka stay as they are: oversized ones, and those of feeds that protect fields
        and do not encrypt them. Refused rows are returned as they are stored.
        """
        tried = self._reveal(rows)
        stored = has_bytes(tried)
        for kind, records, _ in kinds_of(rows):
            self.trial.tried[kind] += records
        # Rows without bytes cannot be tried: records that were too large, and values of protected fields.
        for kind, records, first in kinds_of(rows.filter(pc.invert(stored))):
            count_first(self.trial.why, kind, records, f"{self._range.tp}:{first}")
            self.trial.unread[self._range] = None
            self.trial.withheld += 0 if kind.is_oversized else records
        rows, tried = rows.filter(stored), tried.filter(stored)
        if not rows.num_rows:
            return NONE
        landed: dict[str, list[pa.RecordBatch]] = {}
        refused: dict[str, list[pa.RecordBatch]] = {}
        mended: list[Any] = [NO_OFFSETS]
        for records, changed in self._records(tried):
            for piece in self._format.convert(self._range, records):
                self.seen.add(piece)
                for d in piece.drift:
                    if d.kind is DriftKind.MISSING:
                        self.missing[d.field] = self.missing[d.field] + d if d.field in self.missing else d
                if piece.landed.num_rows:
                    landed.setdefault(piece.output, []).append(piece.landed)
                    mended.append(np.intersect1d(get_offsets(piece.landed), changed))
                if piece.quarantined is not None:
                    refused.setdefault(piece.output, []).append(self._replace_values(rows, piece, changed))
        # Rows for which the fixer gave no value stay, with the reason of today.
        for output, rest in self._left_alone(rows, tried) if self._alone else ():
            refused.setdefault(output, []).append(rest)
        result = Sorted(landed, refused, np.unique(np.concatenate(mended)))
        # By the reason for which the rows that fit now were refused before.
        for kind, n, _ in kinds_of(with_offsets(rows, result.offsets)):
            self.trial.fit[kind] += n
        self.trial.mended += len(result.mended)
        return result

    def _reveal(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with the records that the feed's key decrypts."""
        if self._seal is None:
            return rows
        from sluice.pipelines.records.rows.sealed import reveal_records

        return reveal_records(self._seal, rows)

    def _left_alone(self, rows: pa.RecordBatch, tried: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows for which the function gave no value, with their output: they stay, with the reason why they do not
        fit today."""
        alone = tried.take(fixed_width(pa.int64(), np.array(self._alone, np.int64)))
        for piece in self._format.convert(self._range, _records(alone)):
            self.seen.add(piece)
            self.trial.left_fit += piece.landed.num_rows - piece.copies
            if piece.quarantined is not None:
                yield piece.output, self._replace_values(rows, piece, NO_OFFSETS)

    def look_at(self, rows: pa.RecordBatch) -> None:
        """Show the contract rows that stay in quarantine."""
        tried = self._reveal(rows)
        rows = tried.filter(has_bytes(tried))
        for piece in self._format.convert(self._range, _records(rows)) if rows.num_rows else ():
            self.seen.add(piece)

    def _replace_values(self, rows: pa.RecordBatch, piece: Formatted, changed: Any) -> pa.RecordBatch:
        """Today's reasons, with the batch that read the records and their bytes; without records whose fix failed."""
        now = recast(quarantine_rows(piece.quarantined, 0, piece.contract), plain(QUARANTINED))
        for kind, records, first in kinds_of(now):
            count_first(self.trial.why, kind, records, f"{self._range.tp}:{first}")
        now = without(now, changed)
        stored = recast(with_offsets(rows, get_offsets(now)), plain(QUARANTINED))
        columns = [(stored if f.name in _AS_STORED else now).column(f.name) for f in now.schema]
        return pa.RecordBatch.from_arrays(columns, schema=now.schema)

    def _records(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Any]]:
        """The records to try, a bounded amount at a time, with the offsets of those whose bytes differ."""
        if self._fixer is None:
            yield _records(rows), NO_OFFSETS
            return
        records: list[tuple[int, bytes]] = []
        for row, value in self._fix_rows(rows):
            records.append((row, value))
            if sum(len(v) for _, v in records[-1024:]) > FIXED_BYTES or len(records) >= 1024:
                yield _with_values(rows, records)
                records = []
        if records:
            yield _with_values(rows, records)

    def _fix_rows(self, rows: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
        self._alone = []
        for at, record in enumerate(_as_given(rows)):
            try:
                value = self._fixer.fix(record) if self._fixer else None
            except Botched as what:
                count_first(self.trial.botched, str(what), 1, f"{self._range.tp}:{record.offset}")
                continue
            if value is None:
                self.trial.left += 1
                self._alone.append(at)
            else:
                yield at, value


def _records(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the quarantine as the decoder made them, in buffers of their own."""
    fresh = rows.take(fixed_width(pa.int64(), np.arange(rows.num_rows, dtype=np.int64)))
    return recast(fresh, _DECODED)


def _with_values(rows: pa.RecordBatch, fixed_values: Sequence[tuple[int, bytes]]) -> tuple[pa.RecordBatch, Any]:
    """The chosen rows as the decoder would have made them with these values, and the offsets that differ."""
    records = _records(rows.take(fixed_width(pa.int64(), np.array([at for at, _ in fixed_values], np.int64))))
    values = _binary([value for _, value in fixed_values])
    column = records.schema.get_field_index("value")
    before = records.column(column)
    differs = [
        not v.is_valid or v.as_buffer() != pa.py_buffer(new) for v, (_, new) in zip(before, fixed_values, strict=True)
    ]
    offsets = get_offsets(records)[np.array(differs, np.bool_)]
    return records.set_column(column, _DECODED.field(column), values), offsets


def _binary(values: Sequence[bytes]) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    )


_GIVEN = ("key", "value", "headers", "topic", "partition", "offset", "timestamp", *QuarantineKind._fields)


def _as_given(rows: pa.RecordBatch) -> Iterator[Record]:
    """Rows of the quarantine as a fix function gets them."""
    at = rows.schema.get_field_index("timestamp")
    rows = rows.set_column(at, "timestamp", rows.column(at).cast(pa.int64()))
    for row in rows.select(list(_GIVEN)).to_pylist():
        row["headers"] = tuple((h["key"], h["value"]) for h in row["headers"] or ())
        yield Record(**row)


def with_offsets(rows: pa.RecordBatch, offsets: Any) -> pa.RecordBatch:
    """The rows of these offsets, in order."""
    mine = int64s(rows.column(rows.schema.get_field_index("offset")))
    return rows.take(fixed_width(pa.int64(), np.flatnonzero(np.isin(mine, offsets))))


@dataclass(slots=True)
class Trial:
    """The outcome of trying records. By the kind they were refused as: how many were tried and how many fit. Then why
    the others do not, with the first of each; how many the fix function left alone, how many of these fit as they
    are, and what went wrong in it. `withheld` counts records whose values are not stored. Bytes of records in the
    `unread` offset ranges are in Kafka alone.
    """

    tried: Counter[QuarantineKind] = field(default_factory=Counter)
    fit: Counter[QuarantineKind] = field(default_factory=Counter)
    why: dict[QuarantineKind, tuple[int, str]] = field(default_factory=dict)
    mended: int = 0
    left: int = 0
    left_fit: int = 0
    botched: dict[str, tuple[int, str]] = field(default_factory=dict)
    withheld: int = 0
    unread: dict[OffsetRange, None] = field(default_factory=dict)

    def add(self, other: Trial) -> None:
        self.tried += other.tried
        self.fit += other.fit
        for mine, more in ((self.why, other.why), (self.botched, other.botched)):
            for key, (records, first) in more.items():
                count_first(mine, key, records, first)
        self.mended += other.mended
        self.left += other.left
        self.left_fit += other.left_fit
        self.withheld += other.withheld
        self.unread |= other.unread


@dataclass(frozen=True, slots=True)
class FixerError:
    """An error of the fix function: how many records had it, and the first."""

    what: str
    records: int
    first: str


def count_first(into: dict[Any, tuple[int, str]], key: Any, records: int, first: str) -> None:
    entry = into.get(key, (0, first))
    into[key] = (entry[0] + records, entry[1])


def total(trials: Iterable[Trial]) -> Trial:
    out = Trial()
    for trial in trials:
        out.add(trial)
    return out
