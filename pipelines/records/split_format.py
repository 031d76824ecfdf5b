"""A `Format` that splits a feed's records into outputs, each with a format of its own.

Promises: every record goes to the format of one output, or is quarantined, dropped or landed raw as the rule's
`otherwise` has it; rows of an output stay in offset order. Where the rule leads tombstones to all outputs, one without
a value that chooses lands in each of them, or in none if one refuses it. Values that lead to no output are reported as
drift, and never become a path or a name. Makes Python objects per distinct value of a chunk, none per record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.records.columns.placed_format import read_header
from sluice.pipelines.records.columns.typed_format import encode_texts
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.protected import protect_records
from sluice.pipelines.records.rows.refusals import merge_refused
from sluice.pipelines.records.rows.row_format import (
    REFUSED,
    Format,
    Formatted,
    RawFormat,
    Stage,
    get_offsets,
)
from sluice.pipelines.records.rows.split_rule import OTHERWISE, Otherwise, SplitRule, Tombstones
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.arrays import as_mask, fixed_width, int64s
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, parse_schema
from sluice.pipelines.util.units import sanitize

if TYPE_CHECKING:
    from sluice.pipelines.records.message_names import MessageNames, NamedRecords

UNROUTED = "no output"
"""The reason of quarantined records that no output takes."""
NAMELESS = "no message name"
"""The reason of quarantined records whose message has no name."""
_MOST_VALUES = 64
"""The number of distinct values of a chunk that are named."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The outputs of a chunk's records: `outputs` has for each the index of its output, −1 for none, −3 for a tombstone
    of all outputs, and −2 for a record that is refused, which `rows` holds as rows of `REFUSED`. `values` are the
    distinct values of the others, None for a missing one, and `codes` has for each record the index of its value.
    """

    outputs: Array
    values: list[str | None]
    codes: Array
    rows: pa.RecordBatch | None = None


_REFUSED, _ALL = -2, -3


@dataclass(frozen=True, slots=True)
class Output:
    """The format of an output's records, and the place of its first expectation among those of all outputs. With
    `chooses`, it reads chosen values of a chunk, which are then not copied."""

    format: Format
    first: int
    chooses: bool = False


class SplitFormat:
    """Splits records by the rule, and gives each output's to the format of its shape.

    `rest` makes raw rows of records that no output takes. With `conceals`, the value that chooses an output is
    protected: no reason quotes it.
    """

    contract = ""

    def __init__(
        self, rule: SplitRule, outputs: Mapping[str, Output], router: Router, rest: Format, conceals: bool
    ) -> None:
        self._rule, self.outputs, self.rest, self._conceals = rule, outputs, rest, conceals
        self._router = router

    @property
    def schema(self) -> pa.Schema:
        """The schema of rows that no output takes. Each piece has that of its output."""
        return self.rest.schema

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The pieces of all outputs, each with its name."""
        routed = self._route(s, chunk)
        everywhere = np.flatnonzero(routed.outputs == _ALL)
        shared = get_offsets(chunk)[everywhere]
        for index, (name, output) in enumerate(self.outputs.items()):
            mine = np.flatnonzero(routed.outputs == index)
            mine = np.union1d(mine, everywhere) if len(everywhere) else mine
            if not len(mine):
                continue
            records = _take(chunk, mine, copies_values=not output.chooses)
            for piece in output.format.convert(s, records):
                tallies = tuple(replace(t, expectation=output.first + t.expectation) for t in piece.tallies)
                drift = tuple(replace(d, field=f"{name}/{d.field}") for d in piece.drift)
                copies = int(np.isin(get_offsets(piece.landed), shared).sum()) if index and len(shared) else 0
                yield replace(piece, output=name, tallies=tallies, drift=drift, copies=copies)
        yield from self._finish(s, chunk, routed)

    def distribute(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The records of each output that has any; under the empty name those that are quarantined or dropped.

        A tombstone of all outputs is one of each.
        """
        outputs = self._route(s, chunk).outputs
        rest = OTHERWISE if self._rule.otherwise is Otherwise.RAW else ""
        names = {**dict(enumerate(self.outputs)), _REFUSED: "", -1: rest}
        for name in dict.fromkeys(names.values()):
            own = [index for index, of in names.items() if of == name] + ([_ALL] if name in self.outputs else [])
            mine = np.flatnonzero(np.isin(outputs, own))
            if len(mine):
                yield name, _take(chunk, mine)

    def _route(self, s: OffsetRange, chunk: pa.RecordBatch) -> Routed:
        """The outputs of a chunk's records. Those of all outputs have been tried in each: a tombstone that one of them
        refuses, by its key or a header, is quarantined once, so that a replay lands it in all.
        """
        routed = self._router.route(s, chunk)
        trial = np.flatnonzero(routed.outputs == _ALL)
        if not len(trial):
            return routed
        records = _take(chunk, trial)
        refusing = np.full(len(trial), -1)
        for index, output in enumerate(self.outputs.values()):
            landed = [get_offsets(piece.landed) for piece in output.format.convert(s, records)]
            refusing[~np.isin(get_offsets(records), np.concatenate(landed))] = index
        if not len(refused := np.flatnonzero(refusing >= 0)):
            return routed
        routed.outputs[trial[refused]] = _REFUSED
        (raw,) = RawFormat().convert(s, _take(records, refused))
        sentences = [f"output {name} refuses this tombstone, which is for all" for name in self.outputs]
        rows = refuse_raw(raw.landed, UNROUTED, sentences, refusing[refused])
        return replace(routed, rows=merge_refused(routed.rows, rows))

    def _finish(self, s: OffsetRange, chunk: pa.RecordBatch, routed: Routed) -> Iterator[Formatted]:
        """The records that no output takes, and those whose value cannot be read."""
        rest = np.flatnonzero(routed.outputs == -1)
        if not len(rest) and routed.rows is None:
            return
        records = _take(chunk, rest)
        (raw,) = RawFormat().convert(s, records)
        drift, refused = tuple(self._describe_values(routed, rest, records)), routed.rows
        match self._rule.otherwise:
            case Otherwise.RAW:
                yield from (replace(p, output=OTHERWISE, drift=drift) for p in self.rest.convert(s, records))
                drift, dropped = (), 0
            case Otherwise.DROP:
                dropped = len(rest)
            case Otherwise.QUARANTINE:
                refused, dropped = merge_refused(refused, self._quarantine(raw.landed, routed, rest)), 0
        if refused is not None:
            refused = protect_records(self.rest, refused)
        yield Formatted(raw.landed.slice(0, 0), refused, dropped, drift=drift)

    def _describe_values(self, routed: Routed, rest: Array, records: pa.RecordBatch) -> Iterator[Drift]:
        """Drift for each value that leads to no output."""
        offsets = get_offsets(records)
        distinct, firsts, counts = np.unique(routed.codes[rest], return_index=True, return_counts=True)
        for code, first, count in zip(distinct.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            field = f"/{self._describe(routed.values[code])}"
            yield Drift(DriftKind.UNROUTED, field, count, int(offsets[first]))

    def _describe(self, value: str | None) -> str:
        source = self._rule.source
        if value is None:
            return f"{source} is missing"
        return f"{source} has another value" if self._conceals else f"{source} = {sanitize(value)}"

    def _quarantine(self, raw: pa.RecordBatch, routed: Routed, rest: Array) -> pa.RecordBatch:
        """Raw rows, completed to rows of `REFUSED`."""
        distinct, codes = np.unique(routed.codes[rest], return_inverse=True)
        sentences = [self._describe(routed.values[code]) for code in distinct[:_MOST_VALUES].tolist()]
        sentences.append(f"{self._rule.source} has another value")
        return refuse_raw(raw, UNROUTED, sentences, np.minimum(codes, len(sentences) - 1))


def refuse_raw(raw: pa.RecordBatch, reason: str, sentences: list[str], codes: Array) -> pa.RecordBatch:
    """Raw rows, completed to rows of `REFUSED`, each with the sentence of its code."""
    all_ = np.zeros(raw.num_rows, np.int32)
    texts = {
        "stage": encode_texts([str(Stage.SPLIT)], all_),
        "reason": encode_texts([reason], all_),
        "detail": encode_texts(sentences, codes.astype(np.int32)),
    }
    why = [f for f in REFUSED if f.name not in raw.schema.names]
    columns = [texts[f.name] if f.name in texts else pa.nulls(raw.num_rows, f.type) for f in why]
    return pa.RecordBatch.from_arrays([*raw.columns, *columns], schema=REFUSED)


class Router:
    """Finds the outputs of records by a rule. `outputs` are their names, in order; `names` reads those of messages."""

    def __init__(
        self,
        rule: SplitRule,
        outputs: list[str],
        wire: WireFormat = WireFormat.BARE,
        names: MessageNames | None = None,
    ) -> None:
        self._rule, self._names = rule, names
        self._indices: Mapping[str, int] = {value: outputs.index(name) for value, name in rule.outputs.items()}
        self._header = Field("value", Type(Kind.BINARY), header=rule.header)
        self._wire = wire
        self._format: Format | None = None
        if rule.path:
            from sluice.pipelines.records.json.format import JsonFormat

            self._format = JsonFormat(build_schema(rule.path), wire, finds_new=False)

    def route(self, s: OffsetRange, chunk: pa.RecordBatch) -> Routed:
        """The outputs of a chunk's records. Raises a SluiceError when a registry is needed and out of reach."""
        routed = self._find_outputs(s, chunk)
        values = chunk.column(chunk.schema.get_field_index("value"))
        if self._rule.tombstones is Tombstones.ALL and values.null_count:
            missing = np.array([value is None for value in routed.values])[routed.codes]
            routed.outputs[(routed.outputs == -1) & missing & as_mask(values.is_null())] = _ALL
        return routed

    def _find_outputs(self, s: OffsetRange, chunk: pa.RecordBatch) -> Routed:
        """The outputs by the values that choose."""
        if self._names is not None:
            return self._route_by_name(s, chunk, self._names.read(chunk))
        if self._format is None:
            values, _ = read_header(chunk.column(chunk.schema.get_field_index("headers")), self._header)
            return self._choose(values, np.arange(chunk.num_rows), chunk.num_rows)
        if self._wire is not WireFormat.BARE:
            return self._route_by_value(s, chunk, self._format)
        from sluice.pipelines.records.json.member_values import NO_VALUE, number_values

        codes, values = number_values(chunk.column(chunk.schema.get_field_index("value")), self._rule.path)
        routed = self._match([_read(value) for value in values], codes)
        rest = np.flatnonzero(codes == NO_VALUE)
        if not len(rest):
            return routed
        # The others are read to their ends: broken JSON goes to the quarantine under any rule.
        other = self._route_by_value(s, _take(chunk, rest), self._format)
        routed.outputs[rest], routed.codes[rest] = other.outputs, other.codes + len(routed.values)
        return replace(routed, values=[*routed.values, *other.values], rows=other.rows)

    def _route_by_value(self, s: OffsetRange, chunk: pa.RecordBatch, format: Format) -> Routed:
        """The outputs of records whose values `format` reads as rows with the value at the rule's path."""
        pieces = list(format.convert(s, chunk))
        offsets = get_offsets(chunk)
        landed = pa.Table.from_batches([p.landed for p in pieces], format.schema)
        refused = [p.quarantined for p in pieces if p.quarantined is not None]
        column = landed.column(0).combine_chunks()
        for _ in self._rule.path[1:]:
            column = pc.struct_field(column, [0])
        rows = np.searchsorted(offsets, int64s(landed.column("kafka_offset").combine_chunks()))
        routed = self._choose(column, rows, chunk.num_rows)
        return (
            replace(routed, rows=pa.Table.from_batches(refused).combine_chunks().to_batches()[0]) if refused else routed
        )

    def _route_by_name(self, s: OffsetRange, chunk: pa.RecordBatch, records: NamedRecords) -> Routed:
        rows, refused = np.flatnonzero(records.codes >= 0), np.flatnonzero(records.codes < 0)
        codes = records.codes[rows].astype(np.int32)
        names = encode_texts([name or "" for name in records.names], codes, codes > 0).dictionary_decode()
        routed = self._choose(names, rows, chunk.num_rows)
        if not len(refused):
            return routed
        (raw,) = RawFormat().convert(s, _take(chunk, refused))
        return replace(routed, rows=refuse_raw(raw.landed, NAMELESS, records.problems, -1 - records.codes[refused]))

    def _choose(self, values: pa.Array, rows: Array, count: int) -> Routed:
        """The outputs by values of the records at `rows`; of `count` records, the others are refused."""
        encoded = values.dictionary_encode("encode")
        distinct = encoded.dictionary.to_pylist()
        texts = distinct if self._names else [None if v is None else _read(v) for v in distinct]
        missing = len(texts)
        codes = np.asarray(encoded.indices.fill_null(missing) if encoded.indices.null_count else encoded.indices)
        routed = self._match(texts, codes)
        outputs, at = np.full(count, _REFUSED, np.int64), np.zeros(count, np.int64)
        outputs[rows], at[rows] = routed.outputs, routed.codes
        return replace(routed, outputs=outputs, codes=at)

    def _match(self, texts: list[str | None], codes: Array) -> Routed:
        """The outputs of values by their numbers among the distinct texts; of other numbers, no value is there."""
        missing = len(texts)
        own = [-1 if text is None else self._indices.get(text, -1) for text in texts]
        same = np.array([missing if text is None else code for code, text in enumerate(texts)] + [missing])
        return Routed(np.array([*own, -1], np.int64)[codes], [*texts, None], same[codes])


def _read(value: bytes | str) -> str | None:
    """The text of a header or of a JSON value; None for null. Bytes that are not UTF-8 get one that no output has."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"{_NOT_TEXT}{value.decode(errors='backslashreplace')}"
    parsed = json.loads(value)
    return parsed if isinstance(parsed, str) else None if parsed is None else value


_NOT_TEXT = "\ufffd"
"""Begins the text of bytes that are not UTF-8. Feed files are refused with it."""


def build_schema(path: tuple[str, ...]) -> Schema:
    """A schema whose only column is the JSON value at the path, in structs of one field. Raises SchemaError."""
    text = "json"
    for name in reversed(path):
        text = f"struct<value:{text} from {json.dumps(name, ensure_ascii=False)}>"
    return parse_schema({"value": text.removeprefix("struct<value:").removesuffix(">")})


def _take(chunk: pa.RecordBatch, rows: Array, *, copies_values: bool = True) -> pa.RecordBatch:
    """Some records of a chunk, column by column: a third of the time that Arrow takes for the batch. Without
    `copies_values`, their values are indices of those of the chunk."""
    if len(rows) == chunk.num_rows:
        return chunk
    chosen = fixed_width(pa.int32(), rows.astype(np.int32))
    columns = dict(zip(chunk.schema.names, chunk.columns, strict=True))
    values = columns.pop("value")
    taken = {name: column.take(chosen) for name, column in columns.items()}
    if copies_values:
        taken["value"] = values.take(chosen)
    else:
        chosen_values = pc.if_else(values.is_valid().take(chosen), chosen, None) if values.null_count else chosen
        taken["value"] = pa.DictionaryArray.from_arrays(chosen_values, values)
    return pa.RecordBatch.from_arrays([taken[name] for name in chunk.schema.names], chunk.schema.names)
