"""Typed rows as values again: JSON, or Avro or Protobuf by the feed's own schema, from their columns.

The result lands as the same row, but is not the original value. Of JSON, the order of fields is the schema's,
blanks are gone, numbers and times are spelled in one way, a field that was null is left out, and fields of `_extra`
come last in the object that they are in. Of Avro and Protobuf, fields that only the writer's schema had are lost.

For JSON, Arrow makes texts of whole columns, and a compiled loop weaves these into objects. Nested, binary and rare
values are written in Python.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date, timedelta
from decimal import Context, Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.rows.row_items import Written, at
from sluice.pipelines.records.rows.wire_format import WireFormat, prefix
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing.republish_plan import Wishes
from sluice.pipelines.schema.arrays import as_mask, fill_int64s, int64s
from sluice.pipelines.schema.schema import EXTRA, Encoding, Kind, Schema, Type
from sluice.pipelines.schema.wider import MOST_DIGITS
from sluice.pipelines.util.units import EPOCH, TICKS_PER_SECOND

_WIRES = (WireFormat.CONFLUENT, WireFormat.APICURIO, WireFormat.APICURIO3, WireFormat.BARE)
_DIGITS = Context(prec=MOST_DIGITS)
_JSON = json.JSONDecoder(parse_int=str, parse_float=str)
_NO_BYTES = np.empty(0, np.uint8)
_SPARE = 64 << 10  # bytes of room for texts that are longer with their escapes
Array = npt.NDArray[Any]
Texts = list[str | None]
"""The JSON text of each row; None where it is null."""


class _Member(NamedTuple):
    """A column as text: the text before a value, the mode in which `encode.loops` writes it, and the values."""

    before: bytes
    mode: int
    texts: pa.Array


def check_sendable(shape: Shape, feed: str) -> None:
    """Raises UsageError where typed values cannot be made again from their columns."""
    reader = shape.reader
    if shape.protected and (any(f.path for f in shape.columns.fields) if shape.columns else False):
        raise UsageError(
            f"{feed} protects columns and reads some at paths, so its rows do not show the values to send",
            remedy="send the rows in another way, such as from sluice.read",
        )
    if reader is None:
        return
    if not reader.format.startswith("json") and shape.landed_columns != shape.columns:
        raise UsageError(
            f"{feed} protects columns, and its schema has no room for what became of their values",
            remedy="send the rows in another way, such as from sluice.read",
        )
    if reader.wire not in _WIRES:
        raise UsageError(
            f"values of wire_format {reader.wire} are not made again from columns",
            remedy=f"those of {', '.join(_WIRES)} are; or send from a raw feed of the same topic",
        )


def check_schema(wishes: Wishes, shape: Shape, feed: str) -> None:
    """Raises Refused if values would be written by another schema than the plan's."""
    now = shape.reader.fingerprint if shape.reader else ""
    if wishes.kind is PartKind.LANDED and wishes.schema != now:
        raise Refused(
            f"{feed} has another schema than when this republish was planned",
            remedy="put its schema_file back as it was, or plan a new one with --id",
        )


def typed_values(rows: pa.RecordBatch, shape: Shape, schema_id: int) -> pa.Array:
    """The values of typed rows, as the feed's format and wire format have them; null for tombstones. `schema_id`: the
    number of the feed's own schema in its registry. Raises NotWritable for a row that its schema has no room for."""
    columns, reader = shape.landed_of_values, shape.reader
    if columns is None:
        raise ValueError("a raw feed has no typed rows")
    if reader is None:
        return json_values(rows, columns)
    before = prefix(reader.wire, schema_id)
    if isinstance(reader, AvroReader):
        from sluice.pipelines.records.avro.encode import encode_rows

        return _write_present(rows, partial(encode_rows, t=reader.type, wire=reader.wire), before)
    if isinstance(reader, ProtobufReader):
        from sluice.pipelines.records.protobuf import encode

        return _write_present(rows, partial(encode.encode_rows, message=reader.message), before + reader.naming)
    values = json_values(rows, columns)
    if not before or not len(values):
        return values
    texts = [None if v is None else before + v for v in values.to_pylist()]
    there = as_mask(values.is_valid())
    ends = np.cumsum([0, *(len(t or b"") for t in texts)]).astype(np.int32)
    return _binary(there, ends, pa.py_buffer(b"".join(filter(None, texts))))


def _write_present(rows: pa.RecordBatch, write: Callable[[pa.RecordBatch], Written], before: bytes) -> pa.Array:
    """Returns the encoded rows that are no tombstones, each after these bytes."""
    there = ~as_mask(rows.column("kafka_tombstone"))
    rows_present = np.flatnonzero(there)
    texts = at(rows_present, partial(write, rows if there.all() else take_rows(rows, rows_present)))
    lengths = np.zeros(rows.num_rows, np.int64)
    lengths[rows_present] = np.fromiter(map(len, texts), np.int64, len(texts)) + len(before)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    data = before + before.join(texts) if texts else b""
    return _binary(there, ends, pa.py_buffer(data))


def _binary(there: Array, ends: Array, data: pa.Buffer) -> pa.Array:
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(there), [valid, pa.py_buffer(ends), data])


def json_values(rows: pa.RecordBatch, schema: Schema) -> pa.Array:
    """The values of typed rows as JSON objects in UTF-8; null for tombstones."""
    from sluice.pipelines.records.columns.placed_format import restore_rows
    from sluice.pipelines.records.kafka_batches.encode import loops  # late: it takes numba, and a second

    rows, schema = restore_rows(rows, schema)
    extra, inner = _extra(rows, schema)
    members = [
        _Member(f"{_text(f.json_name)}:".encode(), *_spell_column(rows.column(at), f.type, inner.get(f.json_name)))
        for f in schema.fields
        if (at := rows.schema.get_field_index(f.name)) >= 0
    ]
    if extra is not None:
        members.append(_Member(b"", loops.MEMBERS, extra))
    ends, data = _weave(members, rows.num_rows)
    there = ~as_mask(rows.column("kafka_tombstone"))
    return _binary(there, ends, pa.py_buffer(data))


def _extra(rows: pa.RecordBatch, schema: Schema) -> tuple[pa.Array | None, dict[str, Texts]]:
    """The column `_extra` without what belongs inside columns; and that, by column."""
    if (at := rows.schema.get_field_index(EXTRA)) < 0:
        return None, {}
    column = rows.column(at)
    holders = {f.json_name: f.type for f in schema.fields if _has_struct(f.type)}
    if not holders or column.null_count == len(column):
        return column, {}
    odd = as_mask(pc.match_substring(column, "\\"))  # a name with escapes may be any
    for name in holders:
        odd |= as_mask(pc.match_substring(column, _text(name)))
    if not odd.any():
        return column, {}
    texts: Texts = [text if there else None for text, there in zip(column.to_pylist(), odd, strict=True)]
    own, inner = _split_extra(texts, holders)
    objects = [f"{{{','.join(mine)}}}" if mine else None for mine in own]
    rest = pa.array([k if there else text for k, text, there in zip(objects, column.to_pylist(), odd, strict=True)])
    return rest.cast(pa.string()), inner


def _has_struct(kind: Type) -> bool:
    return kind.kind is Kind.STRUCT or any(_has_struct(f.type) for f in kind.fields)


def _split_extra(texts: Texts, holders: Collection[str]) -> tuple[list[list[str]], dict[str, Texts]]:
    """Objects' members: those that stand by themselves, as text, and the values of those that belong in `holders`."""
    own: list[list[str]] = [[] for _ in texts]
    inner: dict[str, Texts] = {}
    for row, text in enumerate(texts):
        for name, written, value in _members(text) if text else ():
            if name in holders and value[0] in "{[":
                inner.setdefault(name, [None] * len(texts))[row] = value
            else:
                own[row].append(f"{written}:{value}")
    return own, inner


def _members(text: str) -> Iterator[tuple[str, str, str]]:
    """The members of an object: the name, the name as it is written, and the value as it is written."""
    at = _next(text, text.index("{") + 1)
    while text[at] != "}":
        name, end = _JSON.raw_decode(text, at)
        begin = _next(text, _next(text, end) + 1)
        _, stop = _JSON.raw_decode(text, begin)
        yield name, text[at:end], text[begin:stop]
        at = _after(text, stop)


def _items(text: str) -> Iterator[str]:
    """The elements of an array, as they are written."""
    at = _next(text, text.index("[") + 1)
    while text[at] != "]":
        _, stop = _JSON.raw_decode(text, at)
        yield text[at:stop]
        at = _after(text, stop)


def _next(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _after(text: str, at: int) -> int:
    """The place of the next member or element, or of the end."""
    at = _next(text, at)
    return _next(text, at + 1) if text[at] == "," else at


def _weave(members: Sequence[_Member], rows: int) -> tuple[Array, Array]:
    """Objects of these members: where each begins and the last one ends, and their bytes."""
    from sluice.pipelines.records.kafka_batches.encode import loops
    from sluice.pipelines.records.kafka_batches.encode.accumulator import get_binary

    # The texts of all members lie one after the other; offsets of each member are moved to where its own begin.
    offsets = np.zeros((len(members), rows + 1), np.int64)
    valid = np.ones((len(members), rows), np.uint8)
    data, size = list[Array](), 0
    for c, member in enumerate(members):
        mine, starts, there = get_binary(member.texts)
        first, stop = int(starts[0]), int(starts[-1])
        data.append(mine[first:stop])
        offsets[c] = starts
        offsets[c] += size - first
        size += stop - first
        if len(there):
            valid[c] = there
    before = [np.frombuffer(m.before, np.uint8) for m in members]
    texts = loops.TextColumns(
        np.concatenate([*before, _NO_BYTES]),
        np.cumsum([0, *map(len, before)]),
        np.array([m.mode for m in members], np.int64),
        np.concatenate([*data, _NO_BYTES]),
        offsets,
        valid,
    )
    for array in texts:
        array.flags.writeable = False
    ends = np.zeros(rows + 1, np.int32)
    # Room for braces, names and nulls; escapes may need more, then the buffer doubles and weaving goes on.
    out = np.empty(size + rows * (3 + len(texts.members) + 3 * len(members)) + _SPARE, np.uint8)
    at = 0
    # The loop stops before the row that does not fit, and rows before it stay where they are.
    while (at := int(loops.weave(texts, at, out, ends))) < rows:
        grown = np.empty(2 * len(out), np.uint8)
        grown[: ends[at]] = out[: ends[at]]
        out = grown
    return ends, out[: ends[rows]]


def _spell_column(column: pa.Array, kind: Type, extra: Texts | None = None) -> tuple[int, pa.Array]:
    """A column as text, with what `_extra` has for it, and how it is to be written."""
    from sluice.pipelines.records.kafka_batches.encode import loops

    if extra is not None:
        return loops.BARE, _text_column(_texts(column, kind, extra))
    if kind.encoding is Encoding.TEXT:
        return loops.QUOTED, _spell_column(column, replace(kind, encoding=None))[1]
    if kind.encoding:
        return loops.BARE, _text_column(_texts(column, kind))
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    match kind.kind:
        case Kind.STRING:
            return loops.TEXT, column
        case Kind.DATE:
            return loops.QUOTED, column.cast(pa.string())
        case Kind.TIMESTAMP:
            return loops.QUOTED, _instants(column)
        case Kind.EPOCH if (numbers := _whole(column, kind.unit)) is not None:
            return loops.BARE, numbers.cast(pa.string())
        case Kind.STRUCT | Kind.LIST | Kind.MAP | Kind.BINARY | Kind.EPOCH:
            return loops.BARE, _text_column(_texts(column, kind))
    return loops.BARE, column.cast(pa.string())


def _text_column(texts: Texts) -> pa.Array:
    data = [(text or "").encode() for text in texts]
    ends = np.cumsum([0, *map(len, data)]).astype(np.int32)
    there = np.array([text is not None for text in texts], bool)
    return _binary(there, ends, pa.py_buffer(b"".join(data))).cast(pa.string())


def _instants(column: pa.Array) -> pa.Array:
    """Times as ISO 8601 has them. Arrow's texts are all of one length, and lack a T and a Z."""
    rows = len(column)
    if not rows:
        return column.cast(pa.string())
    naive = pc.fill_null(column.cast(pa.int64()), 0).cast(pa.timestamp(column.type.unit)).cast(pa.string())
    ends = np.frombuffer(naive.buffers()[1], np.int32, rows + 1)
    length = int(ends[1] - ends[0])
    text = np.full((rows, length + 1), ord("Z"), np.uint8)
    text[:, :-1] = np.frombuffer(naive.buffers()[2], np.uint8, rows * length).reshape(rows, length)
    text[:, len("2024-02-29")] = ord("T")
    text_ends = np.arange(rows + 1, dtype=np.int32) * np.int32(length + 1)
    valid = np.packbits(as_mask(column.is_valid()), bitorder="little")
    return pa.StringArray.from_buffers(rows, pa.py_buffer(text_ends), pa.py_buffer(text), pa.py_buffer(valid))


def _whole(column: pa.Array, unit: str) -> pa.Array | None:
    """The ticks of a column of times in another unit; None where these are no whole numbers."""
    ticks, finer = column.cast(pa.int64()), TICKS_PER_SECOND[column.type.unit] // TICKS_PER_SECOND[unit]
    if finer == 1:
        return ticks
    if not finer:
        return None
    seconds = pc.divide(pc.fill_null(ticks, 0), finer)
    if not np.array_equal(int64s(seconds) * finer, fill_int64s(ticks, 0)):
        return None
    return pc.if_else(column.is_valid(), seconds, None)


def _texts(column: pa.Array, kind: Type, extra: Texts | None = None) -> Texts:
    """Each item as JSON, with the members that `extra` has for it."""
    match kind.encoding:
        case Encoding.TEXT:
            return [text and f'"{text}"' for text in _texts(column, replace(kind, encoding=None))]
        case Encoding.DAYS:
            return [None if days is None else str(days) for days in column.cast(pa.int32()).to_pylist()]
        case Encoding.BASE64:
            return [None if value is None else _spell_unscaled(value, kind.scale) for value in column.to_pylist()]
    match kind.kind:
        case Kind.STRUCT:
            return _structs(column, kind, extra)
        case Kind.LIST:
            bounds = _bounds(column)
            inner = None
            if extra is not None:
                inner = _spread(len(column.values), bounds, ([*enumerate(_items(t))] if t else () for t in extra))
            elements = [text or "null" for text in _texts(column.values, kind.fields[0].type, inner)]
            return [None if span is None else f"[{','.join(elements[slice(*span)])}]" for span in bounds]
        case Kind.MAP:
            return _maps(column, kind, extra)
        case Kind.TIMESTAMP | Kind.EPOCH:
            ticks = column.cast(pa.int64()).to_pylist()
            per_second = TICKS_PER_SECOND[column.type.unit]
            spell = _instant if kind.kind is Kind.TIMESTAMP else _number_of(kind.unit)
            return [None if t is None else spell(t, per_second) for t in ticks]
        case _:
            spelling = _SPELLED.get(kind.kind, str)
            return [None if v is None else spelling(v) for v in column.to_pylist()]


def _structs(column: pa.Array, kind: Type, extra: Texts | None) -> Texts:
    own, inner = _split_extra(extra or [], {f.json_name for f in kind.fields if _has_struct(f.type)})
    field_members = [
        (_text(f.json_name), _texts(column.field(f.name), f.type, inner.get(f.json_name)))
        for f in kind.fields
        if column.type.get_field_index(f.name) >= 0
    ]
    structs: Texts = []
    for n, there in enumerate(column.is_valid().to_pylist()):
        members = [f"{name}:{texts[n]}" for name, texts in field_members if texts[n] is not None] + (
            own[n] if own else []
        )
        structs.append(f"{{{','.join(members)}}}" if there else None)
    return structs


def _maps(column: pa.Array, kind: Type, extra: Texts | None) -> Texts:
    bounds, keys = _bounds(column), column.keys.to_pylist()
    inner = None
    if extra is not None:
        positions = ({key: n for n, key in enumerate(keys[slice(*span)])} if span else {} for span in bounds)
        pairs = (
            [(at[name], v) for name, _, v in _members(t)] if t else () for t, at in zip(extra, positions, strict=True)
        )
        inner = _spread(len(keys), bounds, pairs)
    values = [text or "null" for text in _texts(column.items, kind.fields[0].type, inner)]
    members = [f"{_text(key)}:{value}" for key, value in zip(keys, values, strict=True)]
    return [None if span is None else f"{{{','.join(members[slice(*span)])}}}" for span in bounds]


def _spread(
    items: int, bounds: Sequence[tuple[int, int] | None], extra: Iterable[Collection[tuple[int, str]]]
) -> Texts:
    """Returns the content of `_extra` for each element of all lists, by the places that it names in each."""
    texts: Texts = [None] * items
    for span, pairs in zip(bounds, extra, strict=True):
        begin = span[0] if span else 0
        for index, text in pairs:
            texts[begin + index] = text
    return texts


def _bounds(column: pa.Array) -> Sequence[tuple[int, int] | None]:
    """Where each row's elements lie; None for a null."""
    ends = column.offsets.to_pylist()
    there = column.is_valid().to_pylist()
    return [(ends[n], ends[n + 1]) if valid else None for n, valid in enumerate(there)]


def _instant(ticks: int, per_second: int) -> str:
    seconds, rest = divmod(ticks, per_second)
    digits = len(str(per_second)) - 1
    fraction = f".{rest:0{digits}}" if rest else ""
    moment = (EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None)
    return f'"{moment.isoformat()}{fraction}Z"'


def _number_of(unit: str) -> Callable[[int, int], str]:
    def spell(ticks: int, per_second: int) -> str:
        text = f"{(Decimal(ticks) * TICKS_PER_SECOND[unit] / per_second):f}"
        return text.rstrip("0").rstrip(".") if "." in text else text

    return spell


def _float32(value: float) -> str:
    return str(np.float32(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spell_unscaled(value: Decimal, scale: int) -> str:
    """The decimal's unscaled number as Java's `BigInteger.toByteArray` has it, in Base64."""
    number = int(value.scaleb(scale, _DIGITS))
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return f'"{base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()}"'


def _date(value: date) -> str:
    return f'"{value.isoformat()}"'


_SPELLED: dict[Kind, Callable[[Any], str]] = {
    Kind.BOOL: lambda value: "true" if value else "false",
    Kind.STRING: _text,
    Kind.BINARY: lambda value: f'"{base64.b64encode(value).decode()}"',
    Kind.DATE: _date,
    Kind.JSON: str,
    Kind.DECIMAL: lambda value: f"{value:f}",
    Kind.FLOAT32: _float32,
    Kind.FLOAT64: repr,
}
