"""Finds the schema that each record names, and the record's own bytes, for whole columns (`wire.WireFormat`).

Schemas get numbers: the registry's own, or for GUIDs and Apicurio's headers one that counts up. Promise: as many values
as records, in their order, whose places are those of the records' own bytes unless zlib made them; no Python object for
a record that is not compressed; a compressed one takes at most MOST_INFLATED bytes.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.wire_format import (
    APICURIO_IDS,
    APICURIO_MESSAGE,
    ID_HEADER,
    NO_HEADER,
    NOT_INFLATED,
    PREFIX,
    Named,
    WireFormat,
)
from sluice.pipelines.schema.arrays import as_mask, buffers_of, indices, text_array
from sluice.pipelines.schema.schema import Kind, Schema

MOST_INFLATED = 64 << 20
"""Bytes of a compressed record; of several that are opened at once, too, but for the last."""
MOST_GUIDS = 10_000
"""How many GUIDs are kept from one chunk to the next. Beyond that all are forgotten, and counted on."""
_FIRST_GUID = 1 << 40
_MAGIC = {WireFormat.CONFLUENT: 0, WireFormat.APICURIO: 0, WireFormat.APICURIO3: 0, WireFormat.GLUE: 3}
_COMPRESSED = 5
_LONG = 17
"""The bytes of a header with a GUID."""
_NUMBER = 8
"""The bytes of one of Apicurio's numbers in a header."""
_MOST_BEHIND = 64
"""Bytes behind it that are read at most."""
_MOST_NAME = 1024
"""Bytes of a message's name that are read at most."""
_SPACE = 0x20
_WRAPPER, _PAYLOAD = b'{"schema"', re.compile(r'\s*,\s*"payload"\s*:')
_BOM = np.frombuffer(b"\xef\xbb\xbf", np.uint8)


@dataclass(frozen=True, slots=True)
class Opened:
    """Values to decode, as many as the records that they came from.

    `schemas` has for each the number of its schema, or below 0 the code for which it is refused; None where the decoder
    looks itself, or where no record names any. `skip` bytes are before the record's own. `paths` has for each which
    message of its schema it is, where a format asks for that. `cut` has the bytes of each that were before its value.
    """

    values: pa.Array
    schemas: Array | None = None
    skip: int = 0
    paths: Array | None = None
    cut: Array | None = None


class Opener:
    """Opens the records of one feed, batch after batch. Not safe for two threads at once."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self._skip = PREFIX.get(wire, 0)
        self._guids: dict[bytes, int] = {}
        self._named: dict[int, str] = {}
        self._next = _FIRST_GUID

    def open(self, records: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        """The records with their values; in several parts where inflated ones take much room."""
        if len(self._guids) > MOST_GUIDS:
            self._guids.clear()
            self._named.clear()
        values = records.column(records.schema.get_field_index("value"))
        schemas = self.schemas(records)
        if self._wire is not WireFormat.GLUE:
            yield records, Opened(values, schemas, self._skip)
            return
        data, ends, _ = buffers_of(values)
        begins = ends[:-1].astype(np.int64)
        packed = np.flatnonzero((schemas >= 0) & (np.diff(ends) >= self._skip))
        packed = packed[data[begins[packed] + 1] == _COMPRESSED]
        start = 0
        while start < len(values):
            inflated, stop = _inflate_values(data, ends, packed[packed >= start], self._skip, len(values))
            for row, inflated_value in inflated.items():
                if inflated_value is None:
                    schemas[row] = -NOT_INFLATED
            if (start, stop) == (0, len(values)):
                yield records, Opened(_rebuild(values, inflated, self._skip), schemas, self._skip)
                return
            part = records.take(indices(np.arange(start, stop, dtype=np.int32)))
            own = part.column(part.schema.get_field_index("value"))
            here = {row - start: inflated_value for row, inflated_value in inflated.items()}
            yield part, Opened(_rebuild(own, here, self._skip), schemas[start:stop], self._skip)
            start = stop

    def schemas(self, records: pa.RecordBatch) -> Array:
        """The number of each record's schema, or below 0 the code for which it is refused."""
        if self._wire is WireFormat.BARE:
            return np.full(records.num_rows, -NO_HEADER, np.int64)
        if self._wire is WireFormat.CONFLUENT_HEADERS:
            return self._of_headers(_get_headers(records))
        if self._wire is WireFormat.APICURIO_HEADERS:
            return self._of_apicurio(_get_headers(records))
        data, ends, _ = buffers_of(records.column(records.schema.get_field_index("value")))
        schemas = np.full(records.num_rows, -NO_HEADER, np.int64)
        begins = ends[:-1].astype(np.int64)
        complete = np.flatnonzero(np.diff(ends) >= self._skip)
        complete = complete[data[begins[complete]] == _MAGIC[self._wire]]
        if self._wire is WireFormat.GLUE:
            complete = complete[np.isin(data[begins[complete] + 1], (0, _COMPRESSED))]
            schemas[complete] = self._number_guids(_take_bytes(data, begins[complete] + 2, 16))
        else:
            numbers = _read_integers(_take_bytes(data, begins[complete] + 1, self._skip - 1))
            schemas[complete] = np.where(numbers < 0, -NO_HEADER, numbers)
        return schemas

    def name(self, schema: int) -> Named:
        """Returns the registry's name of the schema with that number."""
        return self._named.get(schema, schema) if schema >= _FIRST_GUID else schema

    def behind(self, records: pa.RecordBatch) -> tuple[list[bytes], Array]:
        """The bytes behind the schema's number or GUID, which name a message: distinct values, and the index of each
        record's. Of Confluent's wire formats alone."""
        if self._wire is WireFormat.CONFLUENT:
            data, ends, _ = buffers_of(records.column(records.schema.get_field_index("value")))
            begins, stops = ends[:-1].astype(np.int64) + self._skip, ends[1:].astype(np.int64)
            rows = np.flatnonzero(begins < stops)
            sizes = _measure_indexes(data, begins[rows], stops[rows])
            return _index_values(records.num_rows, rows, data, begins[rows], sizes)
        rows, data, begins, sizes = _in_headers(_get_headers(records), ID_HEADER)
        marks = data[begins] if len(rows) else np.empty(0, np.uint8)
        own = np.where(marks == 0, PREFIX[WireFormat.CONFLUENT], _LONG)
        more = np.minimum(sizes - own, _MOST_BEHIND)
        return _index_values(records.num_rows, rows, data, begins + own, more)

    def messages(self, records: pa.RecordBatch) -> tuple[list[bytes], Array]:
        """The names of messages in records' headers, empty for none: each once, and which is whose."""
        rows, data, begins, sizes = _in_headers(_get_headers(records), APICURIO_MESSAGE)
        return _index_values(records.num_rows, rows, data, begins, np.minimum(sizes, _MOST_NAME))

    def _of_headers(self, headers: pa.Array) -> Array:
        schemas = np.full(len(headers), -NO_HEADER, np.int64)
        rows, data, begins, sizes = _in_headers(headers, ID_HEADER)
        if not len(rows):
            return schemas
        short = np.flatnonzero(sizes >= PREFIX[WireFormat.CONFLUENT])
        short = short[data[begins[short]] == 0]
        schemas[rows[short]] = _read_integers(_take_bytes(data, begins[short] + 1, 4))
        long = np.flatnonzero(sizes >= _LONG)
        long = long[data[begins[long]] == 1]
        schemas[rows[long]] = self._number_guids(_take_bytes(data, begins[long] + 1, _LONG - 1))
        return schemas

    def _of_apicurio(self, headers: pa.Array) -> Array:
        schemas = np.full(len(headers), -NO_HEADER, np.int64)
        for kind, name in reversed([*enumerate(APICURIO_IDS.values())]):
            rows, data, begins, sizes = _in_headers(headers, name)
            right = np.flatnonzero(sizes == _NUMBER)
            right = right[data[begins[right]] < 0x80]  # no number is below 0
            both = np.zeros((len(right), 2 * _NUMBER), np.uint8)
            both[:, 0], both[:, _NUMBER:] = kind, _take_bytes(data, begins[right], _NUMBER)
            schemas[rows[right]] = self._number_guids(both)
        return schemas

    def _number_guids(self, guids: Array) -> Array:
        """The numbers of GUIDs, 16 bytes each. Runs of the same GUID are looked up once."""
        if not len(guids):
            return np.empty(0, np.int64)
        halves = np.ascontiguousarray(guids).view(np.uint64)
        starts = np.flatnonzero(np.concatenate([[True], (halves[1:] != halves[:-1]).any(axis=1)]))
        kinds, positions = np.unique(halves[starts], axis=0, return_inverse=True)
        numbers = np.array([self._number(kind.tobytes()) for kind in kinds], np.int64)
        schemas: Array = np.repeat(numbers[positions.reshape(-1)], np.diff(np.append(starts, len(guids))))
        return schemas

    def _number(self, guid: bytes) -> int:
        if guid not in self._guids:
            self._guids[guid] = self._next
            self._named[self._next] = (
                str(UUID(bytes=guid))
                if self._wire is not WireFormat.APICURIO_HEADERS
                else f"{[*APICURIO_IDS][guid[0]]}-{int.from_bytes(guid[_NUMBER:], 'big')}"
            )
            self._next += 1
        return self._guids[guid]


def _measure_indexes(data: Array, begins: Array, stops: Array) -> Array:
    """Returns the bytes that a count and its indexes take, varints of Protobuf, at each place up to its stop."""
    sizes: Array = np.minimum(1 + (data[begins] >> 1).astype(np.int64), np.minimum(stops - begins, _MOST_BEHIND))
    short = begins[:, None] + np.minimum(np.arange(max(sizes, default=1)), sizes[:, None] - 1)
    for row in np.flatnonzero((data[short] >= 0x80).any(axis=1)).tolist():
        own = data[begins[row] : min(stops[row], begins[row] + _MOST_BEHIND)]
        ends = np.flatnonzero(own < 0x80)
        sizes[row] = ends[min(1 + (int(own[0]) >> 1), len(ends)) - 1] + 1 if len(ends) else len(own)
    return sizes


def without_prefix(opened: Opened) -> pa.Array:
    """The values with their prefixes, and byte order marks, overwritten by white space, for formats that allow it.

    A refused record begins with a byte that no text has. Positions in the values do not change.
    """
    refused = opened.schemas < 0 if opened.schemas is not None else np.zeros(0, np.bool_)
    if not opened.skip and not refused.any():
        return opened.values
    data, ends, _ = buffers_of(opened.values)
    begins, sizes = ends[:-1].astype(np.int64), np.diff(ends)
    own = data.copy()
    prefixed = np.flatnonzero(~refused & (sizes >= opened.skip))
    own[begins[prefixed][:, None] + np.arange(opened.skip)] = _SPACE
    firsts = begins[prefixed[sizes[prefixed] >= opened.skip + len(_BOM)]] + opened.skip
    own[firsts[(_take_bytes(data, firsts, len(_BOM)) == _BOM).all(axis=1)][:, None] + np.arange(len(_BOM))] = _SPACE
    own[begins[refused & (sizes > 0)]] = 0
    buffers = opened.values.buffers()
    return pa.Array.from_buffers(opened.values.type, len(sizes), [buffers[0], buffers[1], pa.py_buffer(own)])


def without_wrapper(opened: Opened, columns: Schema) -> Opened:
    """Returns the payloads of JSON in Kafka Connect's wrapper, if the columns are those of Debezium's changes.

    A record of `schema` and `payload` alone lacks the required `op`, so it means nothing else. Most records have the
    same schema, which is parsed once.
    """
    kinds = {f.name: f.type.kind for f in columns.fields if f.required or f.type.kind is Kind.STRUCT}
    if "op" not in kinds or not kinds.get("before") is kinds.get("after") is Kind.STRUCT:
        return opened
    rows = np.flatnonzero(as_mask(pc.fill_null(pc.starts_with(opened.values, _WRAPPER), False)))
    if not len(rows):
        return opened
    data, ends, _ = buffers_of(opened.values)
    view, wrappers, cut = data.data, list[bytes](), np.zeros(len(opened.values), np.int32)
    begins, stops = ends[:-1].copy(), ends[1:].copy()
    for row, begin, end in zip(rows.tolist(), ends[rows].tolist(), ends[rows + 1].tolist(), strict=True):
        wrapper = next((w for w in wrappers if view[begin : begin + len(w)].tobytes() == w), b"")
        if not wrapper and (wrapper := _read_wrapper(view[begin:end].tobytes())):
            wrappers = [wrapper, *wrappers[:15]]
        payload = view[begin + len(wrapper) : end].tobytes()
        if wrapper and (size := payload.rfind(b"}")) >= 0 and not payload[size + 1 :].strip():
            cut[row], stops[row] = len(wrapper), begin + len(wrapper) + size
    begins += cut
    own = b"".join([view[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)])
    sums = np.concatenate([[0], np.cumsum(stops - begins)]).astype(np.int32)
    buffers = [opened.values.buffers()[0], pa.py_buffer(sums), pa.py_buffer(own)]
    return replace(opened, values=pa.Array.from_buffers(opened.values.type, len(cut), buffers), cut=cut)


def _read_wrapper(value: bytes) -> bytes:
    """Returns the bytes of a record up to its payload; empty if it is in no wrapper."""
    try:
        text = value.decode()
        begin = text.index(":") + 1
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        _, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return b""
    payload = _PAYLOAD.match(text, end)
    return text[: payload.end()].encode() if payload else b""


def _get_headers(records: pa.RecordBatch) -> pa.Array:
    return records.column(records.schema.get_field_index("headers"))


def _index_values(records: int, rows: Array, data: Array, begins: Array, sizes: Array) -> tuple[list[bytes], Array]:
    """The distinct texts of these sizes at these positions, the empty one first, and the index of each record's."""
    kinds, which = {b"": 0}, np.zeros(records, np.int64)
    for size in np.unique(sizes[sizes > 0]).tolist():
        chosen = np.flatnonzero(sizes == size)
        distinct, positions = np.unique(_take_bytes(data, begins[chosen], size), axis=0, return_inverse=True)
        numbers = np.array([kinds.setdefault(kind.tobytes(), len(kinds)) for kind in distinct], np.int64)
        which[rows[chosen]] = numbers[positions.reshape(-1)]
    return list(kinds), which


def _in_headers(headers: pa.Array, name: str) -> tuple[Array, Array, Array, Array]:
    """The rows that have a header of this name; the data of such headers, their places and sizes in it.

    Of several in a row the last counts: serializers add theirs behind those of a record that was forwarded.
    """
    none = (np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
    if headers.values is None or not len(headers.values):
        return none
    matching = pc.indices_nonzero(pc.equal(headers.values.field(0), text_array([name])[0]))
    at = np.frombuffer(matching.buffers()[1], np.uint64, len(matching), matching.offset * 8).astype(np.int64)
    ends = np.frombuffer(headers.buffers()[1], np.int32, len(headers) + 1, headers.offset * 4)
    at = at[(at >= ends[0]) & (at < ends[-1])]
    if not len(at):
        return none
    at = at[::-1]
    rows, lasts = np.unique(np.searchsorted(ends[1:], at, side="right"), return_index=True)
    data, begins, sizes = _find_spans(headers.values.field(1), at[lasts])
    nonempty = np.flatnonzero(sizes > 0)
    return rows[nonempty], data, begins[nonempty], sizes[nonempty]


def _take_bytes(data: Array, begins: Array, size: int) -> Array:
    """`size` bytes from each place on: a row for each."""
    rows: Array = data[begins[:, None] + np.arange(size)]
    return rows


def _read_integers(digits: Array) -> Array:
    """Big-endian numbers of four or eight bytes, a row each."""
    numbers: Array = np.ascontiguousarray(digits).view(f">i{digits.shape[1]}" if digits.shape[1] == 8 else ">u4")[:, 0]
    return numbers.astype(np.int64)


def _find_spans(values: pa.Array, chosen: Array) -> tuple[Array, Array, Array]:
    """The data of a binary array; where the chosen values begin in it, and their sizes."""
    ends = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4)
    buffer = values.buffers()[2]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)
    begins = ends[chosen].astype(np.int64)
    return data, begins, ends[chosen + 1] - begins


def _inflate_values(
    data: Array, ends: Array, packed: Array, skip: int, last: int
) -> tuple[dict[int, bytes | None], int]:
    """Inflate compressed records up to a size. Returns values by row (None: damaged or too large) and the next row."""
    inflated, total = dict[int, bytes | None](), 0
    for row in packed.tolist():
        inflater = zlib.decompressobj()
        try:
            own = inflater.decompress(data[ends[row] + skip : ends[row + 1]].tobytes(), MOST_INFLATED + 1)
        except zlib.error:
            own = b""
        is_complete = inflater.eof and not inflater.unused_data and len(own) <= MOST_INFLATED
        inflated[row] = own if is_complete else None
        total += len(own) if is_complete else 0
        if total >= MOST_INFLATED:
            return inflated, row + 1
    return inflated, last


def _rebuild(values: pa.Array, inflated: dict[int, bytes | None], skip: int) -> pa.Array:
    """The values with inflated bytes in place of compressed ones, behind their prefix."""
    changed = {row: value for row, value in inflated.items() if value is not None}
    if not changed:
        return values
    data, ends, _ = buffers_of(values)
    sizes = np.diff(ends).astype(np.int64)
    pieces, done = list[bytes](), int(ends[0])
    for row, value in changed.items():
        stop = int(ends[row]) + skip
        pieces += [data[done:stop].tobytes(), value]
        sizes[row], done = skip + len(value), int(ends[row + 1])
    pieces.append(data[done : int(ends[-1])].tobytes())
    new_ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
    return pa.Array.from_buffers(
        values.type, len(values), [values.buffers()[0], pa.py_buffer(new_ends), pa.py_buffer(b"".join(pieces))]
    )
