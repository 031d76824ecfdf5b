"""Avro records that name their schema in other ways than Confluent's prefix of the value."""

from __future__ import annotations

import struct
import zlib
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.avro.format import AvroFormat
from sluice.pipelines.records.rows.wire_format import ID_HEADER, Named, WireFormat
from tests.pipelines.records.avro.rows import Schemas, convert, encode, make_reader
from tests.pipelines.records.json.rows import FIRST, make_chunk, with_headers

OLD: dict[str, Any] = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
NEW = OLD | {"fields": [*OLD["fields"], {"name": "note", "type": "string", "default": "-"}]}
FIRST_GUID, SECOND_GUID = (UUID(int=i) for i in (7, 8))


def encode_bare(i: int, *, new: bool) -> bytes:
    return encode(NEW, {"id": i, "note": f"n{i}"}, None) if new else encode(OLD, {"id": i}, None)


def convert_records(
    wire: WireFormat, records: pa.RecordBatch, schemas: dict[Named, Any]
) -> tuple[list[Any], list[Any]]:
    """Return landed rows, and the offset, reason and detail of the quarantined ones."""
    form = AvroFormat(make_reader(NEW, wire), Schemas(schemas))
    pieces = list(form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(records)), records))
    landed = [r for p in pieces for r in p.landed.select(["id", "note"]).to_pylist()]
    quarantined = [r for p in pieces if p.quarantined for r in p.quarantined.to_pylist()]
    return landed, [(r["offset"] - FIRST, r["reason"], r["detail"].rpartition("(")[2].strip(")")) for r in quarantined]


def test_apicurio_eight_byte_ids_select_the_schema() -> None:
    numbers = (1 << 41, 3, 1 << 41, 3)
    values = [b"\0" + struct.pack(">q", n) + encode_bare(i, new=n == 3) for i, n in enumerate(numbers)]
    values += [b"\0\0\0\0\3\x12", b"\0" + struct.pack(">q", 5) + encode_bare(9, new=True)]
    rows, refused = convert_records(WireFormat.APICURIO, make_chunk(values), {1 << 41: OLD, 3: NEW})
    assert rows == [{"id": i, "note": f"n{i}" if n == 3 else "-"} for i, n in enumerate(numbers)]
    assert [h[:2] for h in refused] == [(4, "not_avro"), (5, "unknown_schema")]
    assert refused[1][2] == "schema 5"


def test_values_of_apicurio_serializers_are_read() -> None:
    """A record with one string, as AvroKafkaSerializer 2.6.5 and, with its defaults, 3 write it for schema 7."""
    schema = {"type": "record", "name": "O", "fields": [{"name": "id", "type": "string"}]}
    for wire, value in ((WireFormat.APICURIO, "000000000000000007046f31"), (WireFormat.APICURIO3, "0000000007046f31")):
        form = AvroFormat(make_reader(schema, wire), Schemas({7: schema}))
        (piece,) = form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + 1), make_chunk([bytes.fromhex(value)]))
        assert piece.landed["id"].to_pylist() == ["o1"]


def test_confluent_header_ids_and_guids_select_the_schema() -> None:
    """Confluent's serializers add a header to those of a forwarded record: the last one counts."""
    number, guid = (ID_HEADER, b"\0" + struct.pack(">I", 3)), (ID_HEADER, b"\1" + FIRST_GUID.bytes)
    values: list[bytes | None] = [
        encode_bare(0, new=True),
        encode_bare(1, new=False),
        None,
        encode_bare(3, new=True),
        b"\2x",
    ]
    records = with_headers(make_chunk(values), [[("a", b"1"), guid, number], [number, guid], [], [], [guid]])
    rows, refused = convert_records(WireFormat.CONFLUENT_HEADERS, records, {3: NEW, str(FIRST_GUID): OLD})
    assert rows == [{"id": 0, "note": "n0"}, {"id": 1, "note": "-"}, {"id": None, "note": None}]
    assert [h[:2] for h in refused] == [(3, "not_avro"), (4, "not_avro")]
    assert refused[1][2] == f"schema {FIRST_GUID}"


def test_apicurio_header_ids_select_the_schema() -> None:
    """A record may have both ids, or a header twice: Apicurio's deserializers take the last one, and the content id."""
    content, global_ = (
        ("apicurio.value.contentId", struct.pack(">q", 3)),
        ("apicurio.value.globalId", struct.pack(">q", 3)),
    )
    other = ("apicurio.value.contentId", struct.pack(">q", 9))
    values: list[bytes | None] = [
        encode_bare(0, new=True),
        encode_bare(1, new=False),
        encode_bare(2, new=True),
        encode_bare(3, new=True),
        None,
    ]
    headers = [[("a", b"1"), content], [global_], [global_, content], [other, content], []]
    wrong = [[], [("apicurio.value.globalId", b"\0\0\0\3")], [("apicurio.value.contentId", b"\xff" * 8)], [other]]
    records = with_headers(make_chunk([*values, *[encode_bare(9, new=True)] * len(wrong)]), [*headers, *wrong])
    rows, refused = convert_records(WireFormat.APICURIO_HEADERS, records, {"contentId-3": NEW, "globalId-3": OLD})
    notes = ["n0", "-", "n2", "n3"]
    assert rows == [*({"id": i, "note": n} for i, n in enumerate(notes)), {"id": None, "note": None}]
    assert [h[:2] for h in refused] == [(5, "not_avro"), (6, "not_avro"), (7, "not_avro"), (8, "unknown_schema")]
    assert refused[3][2] == "schema contentId-9"


def test_glue_values_are_read_compressed_and_uncompressed() -> None:
    def make_value(i: int, guid: UUID, *, packed: bool) -> bytes:
        own = encode_bare(i, new=guid == SECOND_GUID)
        return b"\3" + (b"\5" + guid.bytes + zlib.compress(own) if packed else b"\0" + guid.bytes + own)

    guids = [FIRST_GUID, SECOND_GUID, FIRST_GUID, SECOND_GUID, SECOND_GUID]
    values: list[bytes | None] = [make_value(i, g, packed=bool(i % 2)) for i, g in enumerate(guids)]
    values += [b"\3\5" + FIRST_GUID.bytes + b"no zlib", b"\3\0" + UUID(int=9).bytes + b"x", b"\3", None]
    rows, refused = convert_records(WireFormat.GLUE, make_chunk(values), {str(FIRST_GUID): OLD, str(SECOND_GUID): NEW})
    expected = [{"id": i, "note": f"n{i}" if g == SECOND_GUID else "-"} for i, g in enumerate(guids)]
    assert rows == [*expected, {"id": None, "note": None}]
    assert [h[:2] for h in refused] == [(5, "not_avro"), (6, "unknown_schema"), (7, "not_avro")]
    assert refused[1][2] == f"schema {UUID(int=9)}"


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
WHOLE: list[bytes] = [b"", b"\x04ab", b"abc", b"\xff" * 70, b"\0"]


@pytest.mark.parametrize("writer", ["bytes", {"type": "bytes"}, {"type": {"type": "bytes", "doc": "x"}}])
@pytest.mark.parametrize("reader", ["bytes", ["null", "bytes"], ["string", "bytes"]])
def test_top_level_bytes_have_no_length_in_confluent_format(writer: Any, reader: Any) -> None:
    """Confluent's serializers write such values without Avro's encoding; a union with bytes is encoded."""
    others = [encode("string", "é", 2), encode(["null", "bytes"], b"xy", 3)]
    schemas = Schemas({1: writer, 2: "string", 3: ["null", "bytes"]})
    values = [*(b"\0\0\0\0\1" + v for v in WHOLE), *others]
    landed, refused, _ = convert(make_reader(reader), [*values, None], schemas)
    assert refused is None
    rows = landed["value"].to_pylist()
    if reader == ["string", "bytes"]:
        assert [r["bytes"] for r in rows[:-3]] == WHOLE
        assert rows[-3:] == [{"string": "é", "bytes": None}, {"string": None, "bytes": b"xy"}, None]
    else:
        assert rows == [*WHOLE, "é".encode(), b"xy", None]


def test_top_level_bytes_become_text_or_decimals() -> None:
    landed, refused, _ = convert(
        make_reader("string"), [b"\0\0\0\0\1\x04ab", b"\0\0\0\0\1a\xff"], Schemas({1: "bytes"})
    )
    assert landed["value"].to_pylist() == ["\x04ab"]
    assert refused is not None
    assert refused.select(["reason", "byte"]).to_pylist() == [{"reason": "invalid_utf8", "byte": 6}]
    landed, refused, _ = convert(make_reader(DECIMAL), [b"\0\0\0\0\1\x01\x00"], Schemas({1: DECIMAL}))
    assert (landed["value"].to_pylist(), refused) == ([Decimal("2.56")], None)


def test_top_level_bytes_are_read_with_schema_id_in_a_header() -> None:
    form = AvroFormat(
        make_reader("bytes", WireFormat.CONFLUENT_HEADERS), Schemas({3: "bytes", str(FIRST_GUID): "bytes"})
    )
    ids = [(ID_HEADER, b"\0" + struct.pack(">I", 3)), (ID_HEADER, b"\1" + FIRST_GUID.bytes)]
    records = with_headers(make_chunk([*WHOLE, *WHOLE]), [[ids[i // len(WHOLE)]] for i in range(2 * len(WHOLE))])
    (piece,) = form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(records)), records)
    assert (piece.landed["value"].to_pylist(), piece.quarantined) == ([*WHOLE, *WHOLE], None)


@pytest.mark.parametrize(
    ("wire", "before"),
    [
        (WireFormat.APICURIO, b"\0" + bytes(7) + b"\1"),
        (WireFormat.APICURIO3, b"\0\0\0\0\1"),
        (WireFormat.GLUE, b"\3\0" + FIRST_GUID.bytes),
        (WireFormat.BARE, b""),
    ],
)
def test_top_level_bytes_have_a_length_in_other_formats(wire: WireFormat, before: bytes) -> None:
    schemas = Schemas({1: "bytes", str(FIRST_GUID): "bytes"})
    landed, refused, _ = convert(
        make_reader("bytes", wire), [before + encode("bytes", v, None) for v in WHOLE], schemas
    )
    assert (landed["value"].to_pylist(), refused) == (WHOLE, None)
