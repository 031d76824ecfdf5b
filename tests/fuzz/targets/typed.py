"""Values of typed feeds, several in one input: loops over guarded memory, compared with an independent reader.

The first byte of an input selects the schema and the side of the guarded page. BETWEEN separates the values after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns import builders
from sluice.pipelines.records.columns.pieces import TypedPiece
from sluice.pipelines.records.json import typer
from sluice.pipelines.records.json.columns import REASONS
from sluice.pipelines.records.json.member_values import NO_VALUE, number_values
from sluice.pipelines.records.json.typer import Typer
from sluice.pipelines.schema.layout import make_layout
from sluice.pipelines.schema.schema import Schema, parse_schema
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.target import Target
from tests.guarded import Guarded
from tests.pipelines.records.json.oracle import Pairs, judge, measure_depth, parse
from tests.pipelines.records.json.rows import FIRST, by_offset, convert, parse_json
from tests.pipelines.records.json.test_bounds import RECORD, SCHEMA
from tests.pipelines.records.json.test_properties import EDGES, ODD_TIMES, is_same

BETWEEN = b"\x1e"
"""A byte that occurs in no JSON document."""
_MOST = 32
_GUARDED = Guarded()
SCHEMAS = (
    SCHEMA,
    parse_schema({"a": "int64", "b": "string not null", "ab": "float32", "größe": "uint8", 'quo"te': "decimal(5,2)"}),
    parse_schema(
        {
            "l": "list<list<int32>>",
            "m": "map<string, struct<x:timestamp(ns), y:list<bool not null>>>",
            "e": "epoch(ms)",
            "s": "struct<a:struct<b:string not null, c:json>, d:binary>",
        }
    ),
    make_layout(
        parse_schema(
            {
                "d": "decimal(5,2) from text",
                "b": "decimal(38,3) from base64 at s.b",
                "c": "int64 from text not null at s.a.b",
                "day": "date from days at s.d",
                "e": "list<epoch(ns) from text>",
                "o": "struct<x:int8> at s.o",
            }
        )
    ).reading,
)

PATHS = (("a",), ("größe",), ("zz",), ('quo"te',), ("s", "a", "b"), ("m", "k", "x"))
"""Members by which records are split, some of them in none of the schemas."""


# -- seeds


def _make_seeds() -> list[bytes]:
    texts = ["", "h\u00e9llo", "\ud83d\ude00", '"\\/\b\f\n\r\t\u0000', "x" * 100, "aGVsbG8=", "2024-02-29T12:00:00Z"]
    more = [
        *EDGES,
        "1234567.891",
        "-12345678901234567.891",
        "99999999999999999.9995",
        "0.1",
        "1.5e-3",
        "123456789012345678901.5e-5",
    ]
    numbers = [f'{{"id":{n},"f":{n},"d":{n},"a":"x"}}' for n in more]
    numbers += [f'{{"b":"x","a":{n},"ab":{n},"quo\\"te":{n},"größe":{n}}}' for n in more] + [
        f'{{"e":{n}}}' for n in more
    ]
    times = [json.dumps({"t": t, "day": t, "m": {"k": {"x": t}}}) for t in ODD_TIMES]
    text_values = [
        json.dumps({"a": t, "b": t, "m": {t: t}, "zz": t, "größe": 1}, ensure_ascii=i % 2 == 0)
        for t in texts
        for i in (0, 1)
    ]
    deep = [d * n + "1" * (d == "[") + e * n for d, e in (("[", "]"), ('{"j":', "}")) for n in (5, 99, 101, 3000)]
    nested = [
        '{"l":[[1,2],[],null,[3]],"m":{"a":{"x":"2024-01-01T00:00:00.123456789Z","y":[true,false]},"b":null},"e":1.7e12}',
        '{"s":{"a":{"b":"x","c":[1,{"z":[]}]},"d":"aGVs"},"l":null}',
        '{"s":{"a":{"c":1}},"s":{},"\\u006c":[[]]}',
        '{"s":{"a":{"b":"x","z":[{"c":1}]},"z":1,"d":null},"m":{"k":{"\\ud800":2},"\\u006b2":{"y":[true],"w":{}}},"z":0}',
        '{"l":[{"q":1},null,{"s":"x","y":[]},{"zz":{}}],"n":{"x":1,"y":2,"y":3},"a":"x"}',
        "{" + ",".join(f'"k{i}":{i}' for i in range(40)) + ',"m":{' + ",".join(f'"{i}":"v"' for i in range(40)) + "}}",
    ]
    ends = ("QQ==", "QR==", "QUI=", "QUJ=", "QUJD\\n", "Q", "Q===", "QQ=A", "-_8=")
    binaries = [f'{{"b":"{t}","s":{{"a":{{"b":"x"}},"d":"{t}"}}}}' for t in ends]
    crowded = [
        '{"l":[' + ",".join(["[1,2]"] * 3000) + "]}",
        '{"l":[' + ",".join(['{"s":"x"}'] * 3000) + "]}",
        '{"m":{' + ",".join(f'"k{i % 20}":"v"' for i in range(21)) + "}}",
        '{"m":{"a":"1","\\u0061":"2"}}',
    ]
    missing = [
        '{"n":{"x":null}}',
        '{"n":{}}',
        '{"l":[{"q":300},{"q":null}],"ok":tru}',
        '{"s":{"a":{"b":null}}}',
        '{"m":{"k":{"y":[null]}}}',
    ]
    escapes = [
        '{"a":"\\u20ac\\ud83d\\ude00\\u00e9\\u0041","b":"\\ud83d"}',
        '{"a":"\\ud83dx"}',
        '{"a":"\\u12"}',
        '{"a":"\\x"}',
        '{"\\ud800":1}',
    ]
    odd = [
        "",
        "null",
        "[]",
        "1",
        '"x"',
        "{}",
        "\ufeff{}",
        " {} ",
        "{} {}",
        '{"a":1,}',
        '{"a" 1}',
        "{'a':1}",
        '{"j":NaN}',
    ]
    encoded = [
        json.dumps({"d": n, "s": {"a": {"b": n}, "b": b, "d": 19782, "z": n, "o": {"x": 1, "y": n}}, "e": [n, None]})
        for n in ("12.3", "+1e2", ".5", "5.", "007", "-", "NaN", "1.234", "9" * 40, "1e-400")
        for b in ("/w==", "AYaf", "gAAAAAAAAAAAAAAAAAAAAA==", "AA=", "", "/////////////////////////////w==")
    ]
    values = [
        t.encode("utf-8", "surrogatepass")
        for t in (
            *encoded,
            *numbers,
            *times,
            *text_values,
            *deep,
            *nested,
            *crowded,
            *binaries,
            *missing,
            *escapes,
            *odd,
        )
    ]
    values += [
        RECORD,
        RECORD[:-1],
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xc0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xf4\x90\x80\x80"}',
    ]
    values += [b'{"a":"' + t + end for t in _SEQUENCES for end in (b'"}', b"")]
    values += [b'{"t":"2024-01-01T00:00:00' + t + b'"}' for t in _ZONES]
    values += [RECORD[:n] for n in (1, 4, 5, 9, 40, 41, 42, 43, 150, 190)]
    joined = [BETWEEN.join(values[i : i + 8]) for i in range(0, len(values), 8)]
    # Records that differ in their values alone, which are read by a template, and some that differ in more.
    alike = [f'{{"b": "x{i}", "a": {i}, "ab": {i}.5}}' for i in range(12)]
    nested_alike = [f'{{"e":{i},"s":{{"a":{{"b":"x{i}","c":[{i}]}},"d":"aGVs"}}}}' for i in range(12)]
    strange = [f'{{"zz":[{i}],"b":"x{i}","yy":"t{i}","a":{i},"s":{{"q":{i},"d":"aGVs"}}}}' for i in range(12)]
    for records in (alike, nested_alike, strange):
        unlike = [text[: 3 * i] + text[3 * i + 1 :] for i, text in enumerate(records)]
        mixed = [text for pair in zip(records, records, unlike, strict=True) for text in pair]
        joined += [BETWEEN.join(text.encode() for text in texts) for texts in (records, mixed)]
    joined += [RECORD, BETWEEN.join([b'{"id":1,"a":"x"}'] * 3000)]
    return [bytes([kind]) + body for body in joined for kind in (0, 1, 2, 64)]


_SEQUENCES = (
    *(c.encode() for c in "ß€\U0001f600\U0010ffff"),
    *(
        b"\xc3",
        b"\xe2\x82",
        b"\xe0\x80\x80",
        b"\xf0\x9f\x98",
        b"\xf0\x80\x80\x80",
        b"\xf5\x80\x80\x80",
        b"\xf0\x9fA\x80",
        b"\\",
    ),
)
"""UTF-8: complete, cut, overlong and out of range."""
_ZONES = (
    b"",
    b"z",
    b"Zx",
    b"x",
    b"+1",
    b"+01",
    b"+0130",
    b"+01:30",
    b"+01x30",
    b"+24",
    b"-01:60",
    b"\\u005a",
    b"\\u0030" * 90,
)


# -- mutation


def _mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    kind, values = data[:1] or b"\0", data[1:].split(BETWEEN)
    if random.randrange(10) == 0:
        kind = bytes([random.randrange(256)])
    for _ in range(1 << random.randrange(5)):
        at = random.randrange(len(values))
        match random.randrange(8):
            case 0:
                values[at : at + 1] = random.choice(others)[1:].split(BETWEEN)
            case 1:
                values[at:at] = [values[at]]
            case 2:
                values[at] = mutate_json(random, values[at], others)
            case _:
                values[at] = (
                    _replace_piece(random, values[at])
                    if random.randrange(2)
                    else mutate_bytes(random, values[at], others)
                )
    random.shuffle(values)
    return kind + BETWEEN.join(values[:_MOST])


_PIECES = [
    *b'" \\ { } [ ] , : \xed\xa0\x80 \\ud800 \\udc00 \\u00e9 \\u0000 \x00'.split(b" "),
    *b"e - . true false null 1e400 -0 \xff \\ \\\\".split(b" "),
    *[e.encode() for e in EDGES],
    *[f'"{t}"'.encode() for t in ODD_TIMES],
    b" " * 70,
    b'"' + b"\\n" * 40 + b'"',
]


def _replace_piece(random: Random, value: bytes) -> bytes:
    """Replace a piece of the value by a token of JSON."""
    at = random.randrange(len(value) + 1)
    if random.randrange(2) and (colon := value.find(b":", at)) >= 0:
        ends = [e for e in (value.find(c, colon) for c in (b",", b"}", b"]")) if e >= 0]
        return value[: colon + 1] + random.choice(_PIECES) + value[min(ends, default=len(value)) :]
    return value[:at] + random.choice(_PIECES) + value[min(len(value), at + random.choice((0, 1, 2, 5))) :]


# -- guarantees


def guard() -> None:
    """Make columns grow in memory that ends at a guarded page, from here on."""
    for module in (builders, typer):
        vars(module)["allocate"] = _GUARDED.allocate_items


def _split_values(data: bytes) -> tuple[Schema, list[bytes], bool]:
    kind = data[0] if data else 0
    return SCHEMAS[3 if kind & 64 else kind % 3], data[1:].split(BETWEEN), not kind & 128


def _run(data: bytes) -> str:
    schema, values, at_end = _split_values(data)
    room = _GUARDED.fill(b"".join(values), at_end=at_end)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    schema_typer = Typer(schema)
    try:
        for path in PATHS:
            number_values(array, path)
        return " ".join(
            sorted({word for piece in schema_typer.pieces(array) for word in _check_piece(schema_typer, piece)})
        )
    finally:
        _GUARDED.free()


def _check_piece(schema_typer: Typer, piece: TypedPiece) -> list[str]:
    """Check that each record is typed or refused, once, and that each refusal has a valid reason and field."""
    rows = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
    assert rows.tolist() == list(range(piece.start, piece.stop))
    for array in piece.arrays:
        array.validate(full=True)
        assert len(array) == len(piece.rows)
    codes, nodes = piece.refused.codes.tolist(), piece.refused.nodes.tolist()
    for code, node in zip(codes, nodes, strict=True):
        assert -1 <= node < len(schema_typer.nodes)
        assert REASONS.describe(code, schema_typer.nodes[node] if node >= 0 else None)
    return [str(REASONS.get_reason(code)) for code in codes]


def _compare(data: bytes) -> str:
    """Compare the landed rows with the values as Python's own reader returns them."""
    schema, values, _ = _split_values(data)
    try:
        landed, quarantined = convert(schema, values)
        with _allow_long_numbers():
            return _compare_rows(schema, values, landed, quarantined)
    finally:
        _GUARDED.free()


@contextmanager
def _allow_long_numbers() -> Iterator[None]:
    """Lift Python's limit on digits, which ours does not have."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


def _compare_rows(schema: Schema, values: list[bytes], landed: pa.Table, quarantined: pa.Table | None) -> str:
    rows, refused = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    for offset, value in enumerate(values, FIRST):
        verdict = judge(schema, value)
        if verdict.row is None:
            assert refused[offset]["reason"] in verdict.reasons, (value, refused[offset], verdict)
            assert refused[offset]["value"] == value
            continue
        assert offset in rows, (value, refused[offset])
        row: dict[str, Any] = rows[offset]
        assert all(is_same(f.type, row[f.name], verdict.row[f.name]) for f in schema.fields), (value, row, verdict.row)
        assert parse_json(row["_extra"]) == verdict.row["_extra"], value
    for path in PATHS:
        codes, texts = number_values(pa.array(values, pa.binary()), path)
        for value, code in zip(values, codes.tolist(), strict=True):
            text = None if code == NO_VALUE else texts[code]
            _compare_member(value, path, text)
            _, alone = number_values(pa.array([value], pa.binary()), path)
            assert alone == ([] if text is None else [text]), (value, text, alone)
    return f"{bool(rows)} {bool(refused)}"


def _compare_member(value: bytes, path: tuple[str, ...], text: str | None) -> None:
    """Compare the text of a member with the first one of its name as Python's own reader returns it."""
    try:
        member = parse(value)
    except (ValueError, RecursionError):
        return  # what follows the member may be no JSON
    for name in path:
        members = [v for k, v in member if k == name] if isinstance(member, Pairs) else []
        if not members:
            assert text is None, (value, path, text)
            return
        member = members[0]
    if text is not None:
        assert parse(text.encode()) == member, (value, path, text)
    else:
        is_lone = isinstance(member, str) and not member.isascii() and "\\u" in ascii(member)
        assert is_lone or measure_depth(parse(value)) > 90, (value, path)


TYPED = Target("typed", _make_seeds, _run, _mutate)
TYPED_VALUES = Target("typed-values", _make_seeds, _compare, _mutate)
