"""The port `Format`, which turns decoded records into rows, and the columns of these rows.

raw feeds      key, value, topic, partition, offset, timestamp, timestampType, headers (`RawFormat`)
typed feeds    the schema's fields, `_extra`, and the record's coordinates as kafka_key, kafka_topic, …
quarantine     the raw columns; the reason (`REFUSED`); batch, contract and withheld bytes (`QUARANTINED`)

A format gets the chunks of an offset range in order. It splits each into rows to land, rows to quarantine and records
to drop; every record ends in exactly one of the three. It works on whole columns and makes no Python object per record.

Header keys are bytes in Kafka and text in files. A key that is UTF-8 is its own text. Any other key, and a key that
begins with `sluice.hex:`, becomes `sluice.hex:` and its bytes in hex: `unescape_key` restores every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.kafka import Range, intersect
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, Tally
from sluice.pipelines.schema.arrays import fixed_width, int64s, text_array
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Schema, arrow_type

_OFFSETS = Range(0, (1 << 63) - 1)

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

TO_SEND = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("timestamp", pa.int64()), ("headers", HEADERS)])
"""Records to send. Times are in ms and never null (−1: none); null headers are none."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """A chunk, or a piece of one, split into rows that land, rows that are quarantined, and `dropped` records.

    Both batches keep offset order; `quarantined` is None when it would be empty. There is one tally per expectation,
    and one drift per kind and field. `typed` counts the records with a value that fits the schema: a missing field is
    missing in these. `validate_ns` is the time spent on the contract, `contract` its hash. `output` is that of a split
    feed: the name that its rows and drift have. `copies` counts landed rows whose records land in another output, too,
    where they are counted.
    """

    landed: pa.RecordBatch
    quarantined: pa.RecordBatch | None = None
    dropped: int = 0
    tallies: tuple[Tally, ...] = ()
    drift: tuple[Drift, ...] = ()
    typed: int = 0
    validate_ns: int = field(default=0, compare=False)
    contract: str = ""
    output: str = ""
    copies: int = 0

    @property
    def total(self) -> int:
        """How many records this accounts for."""
        quarantined = 0 if self.quarantined is None else self.quarantined.num_rows
        return int(self.landed.num_rows + quarantined) + self.dropped - self.copies


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

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """Turn decoded records of one offset range into rows.

        `chunk` has the columns `key, value, offset, timestamp, timestampType, headers`. Values of JSON without a prefix
        may be chosen from those of a larger chunk, as a dictionary array. Yields one piece, or several
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

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The chunk, with columns for its topic and partition. Copies nothing but chosen values."""
        columns = {
            **dict(zip(chunk.schema.names, chunk.columns, strict=True)),
            "topic": pa.DictionaryArray.from_arrays(
                fixed_width(pa.int8(), np.zeros(chunk.num_rows, np.int8)), _make_text(s.topic)
            ),
            "partition": fixed_width(pa.int32(), np.full(chunk.num_rows, s.partition, np.int32)),
        }
        if pa.types.is_dictionary((values := columns["value"]).type):
            columns["value"] = values.dictionary_decode()
        arrays = [columns[name] for name in self.schema.names]
        yield Formatted(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


@lru_cache(maxsize=64)
def _make_text(text: str) -> pa.StringArray:
    return text_array([text])


def inside(offsets: np.ndarray, ranges: Iterable[Range]) -> np.ndarray:
    """A boolean for each offset: whether it lies in one of the ranges."""
    bounds = np.array([bound for r in intersect(ranges, _OFFSETS) for bound in r], np.int64)
    is_inside: np.ndarray = np.searchsorted(bounds, offsets, side="right") % 2 == 1
    return is_inside


def without_offsets(rows: pa.RecordBatch, ranges: Iterable[Range]) -> pa.RecordBatch:
    """The rows whose offset lies in none of the ranges."""
    outside = ~inside(get_offsets(rows), ranges)
    return rows if outside.all() else rows.take(fixed_width(pa.int64(), np.flatnonzero(outside)))


def offset_column(schema: pa.Schema) -> str:
    """The column that holds the Kafka offset: `offset` in raw feeds, `kafka_offset` in typed ones."""
    return "kafka_offset" if "kafka_offset" in schema.names else "offset"


def get_offsets(rows: pa.RecordBatch) -> np.ndarray:
    """The rows' Kafka offsets, as int64."""
    return int64s(rows.column(rows.schema.get_field_index(offset_column(rows.schema))))


def time_column(schema: pa.Schema) -> str:
    """The column that holds the record's time: `timestamp` in raw feeds, `kafka_timestamp` in typed ones."""
    return "kafka_timestamp" if "kafka_timestamp" in schema.names else "timestamp"


_FEW = pa.dictionary(pa.int32(), pa.string())


class Stage(StrEnum):
    """The values of the column `stage`: which stage refused the record."""

    DECODE = "decode"
    SCHEMA = "schema"
    CONTRACT = "contract"
    SPLIT = "split"


COORDINATES = tuple(f for f in RawFormat.schema if f.name != "value")
"""The columns of a record that typed rows keep, besides the value."""

KAFKA_FIELDS = (
    *(f.with_name(KAFKA + f.name) for f in COORDINATES),
    pa.field(f"{KAFKA}tombstone", pa.bool_(), nullable=False),
)

REFUSED = pa.schema(
    [
        *RawFormat.schema,
        pa.field("stage", _FEW, nullable=False),
        pa.field("reason", _FEW, nullable=False),
        pa.field("expectation", _FEW),
        pa.field("field", _FEW),
        pa.field("detail", _FEW, nullable=False),
        pa.field("byte", pa.int32()),
    ]
)
"""The record as it came, and why it does not land: the stage that refused it, the reason in one word, the expectation
that it broke, the field's path, a sentence, and the byte of the value.
"""

WITHHELD = pa.field("withheld_bytes", pa.int32())
"""The bytes of a value that is not stored because the feed protects fields; null if it is stored as it came."""

QUARANTINED = pa.schema([*REFUSED, pa.field("batch", pa.int64(), nullable=False), pa.field("contract", _FEW), WITHHELD])
"""The same, with the batch that read the record, the hash of the contract that it was checked against, and the bytes
that are not stored."""


OVERSIZED = "oversized"
"""The reason of records whose batch takes more memory than a task may: key, value and headers are only in Kafka."""


def refuse_oversized(raw: pa.RecordBatch, detail: str) -> pa.RecordBatch:
    """Raw rows that stand for the records of an oversized batch, completed to rows of `REFUSED`."""
    n = raw.num_rows
    texts = {"stage": Stage.DECODE, "reason": OVERSIZED, "detail": detail}
    columns = [
        pa.DictionaryArray.from_arrays(fixed_width(pa.int32(), np.zeros(n, np.int32)), text_array([texts[f.name]]))
        if f.name in texts
        else pa.nulls(n, f.type)
        for f in REFUSED
    ][len(raw.schema) :]
    return pa.RecordBatch.from_arrays([*raw.columns, *columns], schema=REFUSED)


def has_bytes(rows: pa.RecordBatch) -> pa.Array:
    """A mask of the quarantined rows that are records as they came: neither oversized nor without their value."""
    import pyarrow.compute as pc  # late: it takes 40 ms

    stored = pc.not_equal(rows.column(rows.schema.get_field_index("reason")).cast(pa.string()), OVERSIZED)
    at = rows.schema.get_field_index(WITHHELD.name)
    return stored if at < 0 else pc.and_(stored, rows.column(at).is_null())


def quarantine_rows(refused: pa.RecordBatch, batch: int, contract: str) -> pa.RecordBatch:
    """Rows of `REFUSED`, completed to rows of `QUARANTINED` by the batch and the hash of its contract (empty: none).

    Rows of a protecting format have `WITHHELD` already.
    """
    n, columns = refused.num_rows, refused.columns
    withheld = columns[len(REFUSED) :] or [pa.nulls(n, WITHHELD.type)]
    valid = None if contract else pa.py_buffer(bytes((n + 7) // 8))
    indices = pa.Array.from_buffers(pa.int32(), n, [valid, pa.py_buffer(bytes(4 * n))])
    hashes = pa.DictionaryArray.from_arrays(indices, text_array([contract]))
    return pa.RecordBatch.from_arrays(
        [*columns[: len(REFUSED)], fixed_width(pa.int64(), np.full(n, batch, np.int64)), hashes, *withheld],
        schema=QUARANTINED,
    )


def landed_schema(schema: Schema | None) -> pa.Schema:
    """The Arrow schema of landed rows. `schema` None means a raw feed.

    Typed rows have the schema's fields, the unknown fields as JSON, and the record's coordinates.
    """
    if schema is None:
        return RawFormat.schema
    fields = [pa.field(f.name, arrow_type(f.type)) for f in schema.fields]
    return pa.schema([*fields, pa.field(EXTRA, pa.string()), *KAFKA_FIELDS])


MARK = "sluice.hex:"

_ESCAPED = re.compile(rf"{re.escape(MARK)}((?:[0-9a-f]{{2}})+)")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def escape_key(key: bytes) -> str:
    """The text of a header's key."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return MARK + key.hex()
    return MARK + key.hex() if text.startswith(MARK) else text


def unescape_key(text: str) -> bytes:
    """The key of which this is the text."""
    escaped = _ESCAPED.fullmatch(text)
    return bytes.fromhex(escaped[1]) if escaped else text.encode()


def get_former_text(text: str) -> str:
    """The text of a key in files from before keys were escaped: U+FFFD for bytes that are not UTF-8."""
    escaped = _ESCAPED.fullmatch(text)
    return as_java_reads(bytes.fromhex(escaped[1])) if escaped else text


def as_java_reads(key: bytes) -> str:
    """Decode UTF-8 as Java does: one U+FFFD for each maximal part of a bad sequence, and one for a surrogate.

    Python puts one for each byte of a surrogate.
    """
    return _SURROGATE.sub(b"\xef\xbf\xbd", key).decode("utf-8", "replace")


def escape_keys(keys: pa.Array) -> pa.Array:
    """The text of binary keys, without a copy where each of them is its own text."""
    text = keys.view(pa.string())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array(map(escape_key, keys.to_pylist()), pa.string())
    data = keys.buffers()[2]
    if data is None or MARK.encode() not in data.to_pybytes():
        return text
    return pa.array(map(escape_key, keys.to_pylist()), pa.string())


def unescape_keys(keys: pa.Array) -> pa.Array:
    """The bytes of keys whose text this is, without a copy where none is escaped."""
    import pyarrow.compute as pc  # late: it takes 40 ms

    if not pc.any(pc.starts_with(keys, MARK)).as_py():
        return keys.cast(pa.binary())
    return pa.array(map(unescape_key, keys.to_pylist()), pa.binary())
