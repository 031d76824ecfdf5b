"""Workloads: named sets of records, the same byte for byte on every machine.

A workload is a shape (SQL that makes records out of their numbers), how many there are, how they lie over partitions
and how they are packed. Its records follow from partition and number alone, so that the content of a topic, and the
result of a peer must have landed, can be told without reading it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import duckdb
import pyarrow as pa

from bench.formats import FORMATS
from sluice.pipelines.errors import UsageError

EPOCH_MS = 1_735_689_600_000
"""The stamp of record 0 of each partition, 2025-01-01T00:00Z; one record a millisecond follows."""
CHUNK_RECORDS = 50_000
TRACE = "trace"
"""The key of the one header that some records carry."""

# `i` is the record's number in its partition; `r` and `s` are 64 bits each that follow from partition and number.
_ROLLED = """
    WITH rolled AS (
        SELECT range AS i, md5_number_lower($p || '/' || range) AS r, md5_number_upper($p || '/' || range) AS s
        FROM range($first, $last)
    )
    SELECT i AS "offset", key, value, $epoch + i AS timestamp, trace, bad FROM rolled,
        LATERAL (SELECT {key} AS key, {value} AS value, {trace} AS trace, {bad} AS bad)
"""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """SQL expressions over `i`, `r` and `s` for a record's key, value and header (NULL: none), and for whether it
    breaks the workload's contract.
    """

    key: str
    value: str
    trace: str = "NULL::VARCHAR"
    bad: str = "FALSE"


@dataclass(frozen=True, slots=True)
class Workload:
    """A topic to measure over. `weights` are the partitions' shares; `batch_bytes` is the size of a producer's batch.

    `schema`: names and types, as a feed says them, by which the values are to be typed; none: they land as they are.
    `contract`: the text of a contract that rows are checked against, by peers that validate. `format`: what values are
    sent as (`formats.FORMATS`), though the shape makes them as JSON; empty: as they are.
    """

    name: str
    about: str
    shape: RecordShape
    records: int = 3_000_000
    weights: tuple[int, ...] = (1, 1, 1, 1)
    codec: str = "lz4"
    batch_bytes: int = 40_000
    brokers: int = 1
    schema: tuple[tuple[str, str], ...] = ()
    contract: str = ""
    format: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Records by partition; they add up to `records`."""
        total, cuts = sum(self.weights), [0]
        for i in range(len(self.weights)):
            cuts.append(self.records * sum(self.weights[: i + 1]) // total)
        return tuple(end - start for start, end in pairwise(cuts))

    @property
    def fingerprint(self) -> str:
        """Ten hex digits that change with anything that changes a record or its packing."""
        fields = asdict(self)
        fields |= {"format": FORMATS[self.format].schema} if fields.pop("format") else {}
        return hashlib.sha256(repr((fields, _ROLLED, EPOCH_MS)).encode()).hexdigest()[:10]

    def of(self, records: int | None) -> Workload:
        """The same with another number of records; None: as it is. Raises UsageError below one a partition."""
        if records is not None and records < len(self.weights):
            raise UsageError(f"{records} records over {len(self.weights)} partitions", remedy="ask for more records")
        return replace(self, records=records or self.records)

    def chunks(self, partition: int) -> Iterator[pa.Table]:
        """The partition's records in order: `offset`, `key`, `value`, `timestamp` (ms), `trace`, `bad`; in chunks."""
        count = self.counts[partition]
        for first in range(0, count, CHUNK_RECORDS):
            yield _rows(self.shape, partition, first, min(first + CHUNK_RECORDS, count))


def _rows(shape: RecordShape, partition: int, first: int, last: int) -> pa.Table:
    parameters = {"p": str(partition), "first": first, "last": last, "epoch": EPOCH_MS}
    columns = _ROLLED.format(**asdict(shape))
    with duckdb.connect() as db:
        return db.sql(columns, params=parameters).to_arrow_table()


def _one_of(bits: str, *texts: str) -> str:
    """SQL for one of the texts (a power of two of them), chosen by the expression's low bits."""
    return f"{list(texts)}[(({bits}) & {len(texts) - 1})::INT + 1]"


def _pad_number(number: str, digits: int) -> str:
    return f"lpad(({number})::VARCHAR, {digits}, '0')"


def _fill_template(template: str, **holes: str) -> str:
    """SQL for the template with each `<name>` replaced by the text of that expression."""
    pieces = re.split(r"<(\w+)>", template)
    return " || ".join(f"({holes[piece]})::VARCHAR" if i % 2 else f"'{piece}'" for i, piece in enumerate(pieces))


_CUSTOMER = _fill_template("c-<number>", number=_pad_number("r % 5000", 6))
_FIELDS = {
    "order": _fill_template("o-<number>-<tag>", number=_pad_number("i", 10), tag="lower(substr(hex(s), 1, 6))"),
    "customer": _CUSTOMER,
    "time": f"strftime(make_timestamp_ms({EPOCH_MS} + i), '%Y-%m-%dT%H:%M:%S.%gZ')",
    "whole": "(r >> 13) % 1000",
    "cents": _pad_number("(r >> 23) % 100", 2),
    "currency": _one_of("r >> 30", "EUR", "EUR", "EUR", "USD", "USD", "GBP", "CHF", "SEK"),
    "items": "1 + ((r >> 33) & 7)",
    "country": _one_of("r >> 36", "DE", "FR", "US", "GB", "CH", "SE", "NL", "IT"),
    "channel": _one_of("r >> 44", "web", "app", "store", "phone"),
    "status": _one_of("r >> 46", "placed", "paid", "shipped", "returned"),
}


def _order(**fields: str) -> str:
    """SQL for an order; fields by SQL of their own replace the usual ones."""
    return _fill_template(
        '{"order_id":"<order>","customer":"<customer>","ts":"<time>","amount":<whole>.<cents>,"currency":"<currency>",'
        '"items":<items>,"country":"<country>","channel":"<channel>","status":"<status>"}',
        **_FIELDS | fields,
    )


ORDERS = Workload(
    name="orders",
    about="JSON orders of about 190 bytes, keyed by customer, every tenth with a header",
    shape=RecordShape(_CUSTOMER, _order(), trace="CASE WHEN s % 10 = 0 THEN lower(hex(s)) END"),
)
FEW_ORDERS = replace(ORDERS, name="few-orders", records=200_000)
TYPED_ORDERS = replace(
    ORDERS,
    name="typed-orders",
    schema=(
        ("order_id", "string"),
        ("customer", "string"),
        ("ts", "timestamp"),
        ("amount", "decimal(12,2)"),
        ("currency", "string"),
        ("items", "int32"),
        ("country", "string"),
        ("channel", "string"),
        ("status", "string"),
    ),
)
AVRO_ORDERS, PROTOBUF_ORDERS, JSON_SCHEMA_ORDERS = (
    replace(TYPED_ORDERS, name=f"{name}-orders", format=name, about=f"{text} behind the number of their schema")
    for name, text in (
        ("avro", "orders of about 75 bytes of Avro"),
        ("protobuf", "orders of about 95 bytes of Protobuf"),
        ("json_schema", ORDERS.about),
    )
)


def _spoiled_field(field: str, kind: int, otherwise: str) -> str:
    """SQL for the field, which in one of 1,000 records is otherwise."""
    return f"CASE WHEN {_LUCK} = {kind} THEN {otherwise} ELSE {_FIELDS[field]} END"


_LUCK = "(s >> 24) % 1000"
_SPOILED = {
    "currency": _spoiled_field("currency", 0, "'XXX'"),
    "whole": _spoiled_field("whole", 1, "-1 - (r >> 13) % 1000"),
    "items": _spoiled_field("items", 2, "0"),
    "order": _spoiled_field("order", 3, "upper('o-' || hex(s))"),
}
_CONTRACT: tuple[tuple[str, dict[str, object]], ...] = (
    ("expect_column_values_to_not_be_null", {"column": "order_id"}),
    ("expect_column_values_to_not_be_null", {"column": "customer"}),
    ("expect_column_values_to_match_regex", {"column": "order_id", "regex": "^o-[0-9]{10}-[0-9a-f]{6}$"}),
    ("expect_column_value_lengths_to_equal", {"column": "customer", "value": 8}),
    ("expect_column_values_to_be_between", {"column": "ts", "min_value": "2025-01-01", "max_value": "2026-01-01"}),
    ("expect_column_values_to_be_between", {"column": "amount", "min_value": 0, "max_value": "999.99"}),
    ("expect_column_values_to_be_between", {"column": "items", "min_value": 1, "max_value": 8}),
    ("expect_column_values_to_be_in_set", {"column": "currency", "value_set": ["EUR", "USD", "GBP", "CHF", "SEK"]}),
    ("expect_column_values_to_be_in_set", {"column": "channel", "value_set": ["web", "app", "store", "phone"]}),
    ("expect_column_values_to_not_be_in_set", {"column": "country", "value_set": ["XX", "ZZ"]}),
)
CHECKED_ORDERS = replace(
    TYPED_ORDERS,
    name="checked-orders",
    about=f"{ORDERS.about}, 4 of 1,000 of which break the contract",
    shape=replace(ORDERS.shape, value=_order(**_SPOILED), bad=f"{_LUCK} < {len(_SPOILED)}"),
    contract=json.dumps({"name": "orders", "expectations": [{"type": t, "kwargs": k} for t, k in _CONTRACT]}),
)

OTHER_RECORDS = 1_000_000
"""Workloads that show one thing each."""
UNCOMPRESSED, GZIP, SNAPPY, ZSTD = (
    replace(TYPED_ORDERS, name=f"typed-orders-{codec}", codec=codec, records=OTHER_RECORDS)
    for codec in ("none", "gzip", "snappy", "zstd")
)
PARTITIONS = replace(
    TYPED_ORDERS,
    name="many-partitions",
    about=f"{ORDERS.about}, in many partitions",
    records=OTHER_RECORDS,
    weights=(1,) * 200,
)
SKEWED = replace(
    TYPED_ORDERS,
    name="skewed-partitions",
    about=f"{ORDERS.about}, 90 % of them in one partition",
    records=OTHER_RECORDS,
    weights=(27, 1, 1, 1),
)
BROKERS = replace(
    TYPED_ORDERS,
    name="three-brokers",
    about=f"{ORDERS.about}, on three brokers",
    records=OTHER_RECORDS,
    weights=(1,) * 6,
    brokers=3,
)
SMALL = Workload(
    name="small-records",
    about="JSON readings of 50 bytes",
    shape=RecordShape(
        _fill_template("s-<n>", n=_pad_number("r % 5000", 4)),
        _fill_template(
            '{"sensor":"s-<n>","seq":<i>,"celsius":<whole>.<cents>}',
            n=_pad_number("r % 5000", 4),
            i="1000000 + i",
            whole=_pad_number("10 + (r >> 13) % 90", 2),
            cents=_FIELDS["cents"],
        ),
    ),
    records=OTHER_RECORDS,
    schema=(("sensor", "string"), ("seq", "int64"), ("celsius", "decimal(6,2)")),
)
_WORDS = (
    "parcel",
    "weight",
    "invoice",
    "carrier",
    "harbour",
    "window",
    "silver",
    "return",
    "credit",
    "branch",
    "letter",
)
_WORD = f"((((r >> (x % 43)) & 1048575) * (x * x + 7) // 32) % {len(_WORDS)})::INT + 1"
_TEXT_WORDS = 1_350
LARGE = Workload(
    name="large-records",
    about="JSON orders of about 10 KB, most of it one text",
    shape=RecordShape(
        _CUSTOMER,
        _fill_template(
            '{"order_id":"<order>","customer":"<customer>","ts":"<time>","amount":<whole>.<cents>,"note":"<note>"}',
            **_FIELDS | {"note": f"array_to_string([{list(_WORDS)}[{_WORD}] FOR x IN range({_TEXT_WORDS})], ' ')"},
        ),
    ),
    records=100_000,
    batch_bytes=100_000,
    schema=(
        ("order_id", "string"),
        ("customer", "string"),
        ("ts", "timestamp"),
        ("amount", "decimal(12,2)"),
        ("note", "string"),
    ),
)
_LINE = _fill_template(
    '{"sku":"p-<sku>","quantity":<quantity>,"price":<price>.<cents>}',
    sku=_pad_number("(r >> (x * 7)) % 9000", 4),
    quantity="1 + ((s >> (x * 3)) & 7)",
    price="(s >> (x * 5)) % 300",
    cents=_pad_number("(r >> (x * 9)) % 100", 2),
)
_TAG = _fill_template('"t-<tag>"', tag="(r >> (x * 11)) & 31")
NESTED = Workload(
    name="nested",
    about="JSON orders of about 300 bytes with a struct, a list of structs and a list of strings",
    shape=RecordShape(
        _CUSTOMER,
        _fill_template(
            '{"order_id":"<order>","ts":"<time>","customer":{"id":"<customer>","country":"<country>"},'
            '"lines":[<lines>],"tags":[<tags>],"status":"<status>"}',
            **_FIELDS
            | {
                "lines": f"array_to_string([{_LINE} FOR x IN range(1 + (((s >> 40) & 3)::INT))], ',')",
                "tags": f"array_to_string([{_TAG} FOR x IN range(((s >> 50) & 3)::INT)], ',')",
            },
        ),
    ),
    records=OTHER_RECORDS,
    schema=(
        ("order_id", "string"),
        ("ts", "timestamp"),
        ("customer", "struct<id:string, country:string>"),
        ("lines", "list<struct<sku:string, quantity:int32, price:decimal(9,2)>>"),
        ("tags", "list<string>"),
        ("status", "string"),
    ),
)
ROWS_ORDERS = replace(TYPED_ORDERS, name="rows-orders", records=OTHER_RECORDS)
OF_ALL_KINDS = {"kind": "string", "order_id": "string", "ts": "timestamp"}
KINDS = {
    "order": {"customer": "string", "amount": "decimal(12,2)", "items": "int32"},
    "payment": {"currency": "string", "paid": "decimal(12,2)", "channel": "string"},
    "shipment": {"country": "string", "boxes": "int32", "status": "string"},
}
"""Events of a mixed topic, by the value of their field `kind`, and the columns that no other kind has."""
_EVENT = '{"kind":"%s","order_id":"<order>","ts":"<time>",%s}'
_EVENTS = (
    _EVENT % ("order", '"customer":"<customer>","amount":<whole>.<cents>,"items":<items>'),
    _EVENT % ("payment", '"currency":"<currency>","paid":<whole>.<cents>,"channel":"<channel>"'),
    _EVENT % ("shipment", '"country":"<country>","boxes":<items>,"status":"<status>"'),
)
MIXED_EVENTS = Workload(
    name="mixed-events",
    about="JSON events of three kinds, in any order, of about 130 bytes",
    shape=RecordShape(
        _CUSTOMER,
        "CASE (r >> 50) % 3 {} END".format(
            " ".join(f"WHEN {n} THEN {_fill_template(event, **_FIELDS)}" for n, event in enumerate(_EVENTS))
        ),
    ),
    records=OTHER_RECORDS,
    schema=tuple((OF_ALL_KINDS | KINDS["order"] | KINDS["payment"] | KINDS["shipment"]).items()),
)
ESCAPES = replace(
    TYPED_ORDERS,
    name="escapes",
    about="JSON orders of about 220 bytes, each with escapes and with its keys in another order than the schema's",
    records=OTHER_RECORDS,
    shape=replace(
        ORDERS.shape,
        value=_fill_template(
            '{"status":"<status>","channel":"<channel>","items":<items>,"currency":"<currency>",'
            '"amount":<whole>.<cents>,"country":"<country>","ts":"<time>",'
            r'"order_id":"o\/<tag>\u002d<number>","customer":"\"<customer>\" M\u00fcller"}',
            **_FIELDS | {"number": _pad_number("i", 10), "tag": "lower(substr(hex(s), 1, 6))"},
        ),
    ),
)
