"""Values of typed feeds, several in one input: the loops over guarded memory, and what an independent reader says.

The first byte of an input chooses the schema and the side of the guarded page, the rest are values between BETWEEN.
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

from sluice.pipelines.records.json import columns, typer
from sluice.pipelines.records.json.columns import get_detail, get_reason
from sluice.pipelines.records.json.typer import TypedPiece, Typer
from sluice.pipelines.schema.schema import Schema, parse_schema
from tests.fuzz.mutation import mutated, mutated_json
from tests.fuzz.target import Target
from tests.guarded import Guarded
from tests.pipelines.records.json.oracle import judge
from tests.pipelines.records.json.rows import FIRST, by_offset, convert, parsed
from tests.pipelines.records.json.test_bounds import RECORD, SCHEMA
from tests.pipelines.records.json.test_properties import EDGES, ODD_TIMES, same

BETWEEN = b"\x1e"
"""No JSON holds it, and as good as any other byte that none holds."""
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
)


# -- seeds


def _seeds() -> list[bytes]:
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
    said = [
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
    values = [
        t.encode("utf-8", "surrogatepass")
        for t in (*numbers, *times, *said, *deep, *nested, *crowded, *binaries, *missing, *escapes, *odd)
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
    # Alike but for their values, and some that are not: the first are read by a template.
    alike = [f'{{"b": "x{i}", "a": {i}, "ab": {i}.5}}' for i in range(12)]
    nested_alike = [f'{{"e":{i},"s":{{"a":{{"b":"x{i}","c":[{i}]}},"d":"aGVs"}}}}' for i in range(12)]
    for some in (alike, nested_alike):
        unlike = [text[: 3 * i] + text[3 * i + 1 :] for i, text in enumerate(some)]
        mixed = [text for pair in zip(some, some, unlike, strict=True) for text in pair]
        joined += [BETWEEN.join(text.encode() for text in texts) for texts in (some, mixed)]
    joined += [RECORD, BETWEEN.join([b'{"id":1,"a":"x"}'] * 3000)]
    return [bytes([kind]) + some for some in joined for kind in (0, 1, 2)]


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
"""UTF-8, whole, cut, overlong and too high."""
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


def _mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
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
                values[at] = mutated_json(random, values[at], others)
            case _:
                values[at] = (
                    _replaced(random, values[at]) if random.randrange(2) else mutated(random, values[at], others)
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


def _replaced(random: Random, value: bytes) -> bytes:
    """A piece of it by something that JSON is made of."""
    at = random.randrange(len(value) + 1)
    if random.randrange(2) and (colon := value.find(b":", at)) >= 0:
        ends = [e for e in (value.find(c, colon) for c in (b",", b"}", b"]")) if e >= 0]
        return value[: colon + 1] + random.choice(_PIECES) + value[min(ends, default=len(value)) :]
    return value[:at] + random.choice(_PIECES) + value[min(len(value), at + random.choice((0, 1, 2, 5))) :]


# -- what is promised


def guard() -> None:
    """From here on columns grow in memory that ends where nobody may write."""
    columns.allocate = _GUARDED.buffer
    vars(typer)["allocate"] = _GUARDED.buffer


def _values(data: bytes) -> tuple[Schema, list[bytes], bool]:
    kind = data[0] if data else 0
    return SCHEMAS[kind % 3], data[1:].split(BETWEEN), not kind & 128


def _run(data: bytes) -> str:
    schema, values, at_end = _values(data)
    room = _GUARDED.filled(b"".join(values), at_end=at_end)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    made = Typer(schema)
    try:
        return " ".join(sorted({word for piece in made.pieces(array) for word in _sound(made, piece)}))
    finally:
        _GUARDED.free()


def _sound(made: Typer, piece: TypedPiece) -> list[str]:
    """Each record typed or refused, once; each refusal with a reason, a field and a byte that are there."""
    both = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
    assert both.tolist() == list(range(piece.start, piece.stop))
    for array in piece.arrays:
        array.validate(full=True)
        assert len(array) == len(piece.rows)
    codes, nodes = piece.refused.codes.tolist(), piece.refused.nodes.tolist()
    for code, node in zip(codes, nodes, strict=True):
        assert -1 <= node < len(made.nodes)
        assert get_detail(code, made.nodes[node] if node >= 0 else None)
    return [str(get_reason(code)) for code in codes]


def _compared(data: bytes) -> str:
    """The rows that land are what Python's own reader makes of the values."""
    schema, values, _ = _values(data)
    try:
        landed, quarantined = convert(schema, values)
        with _numbers_of_any_length():
            return _agreed(schema, values, landed, quarantined)
    finally:
        _GUARDED.free()


@contextmanager
def _numbers_of_any_length() -> Iterator[None]:
    """Python's reader must read them, where ours needs no limit."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


def _agreed(schema: Schema, values: list[bytes], landed: pa.Table, quarantined: pa.Table | None) -> str:
    rows, held = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    for offset, value in enumerate(values, FIRST):
        said = judge(schema, value)
        if said.row is None:
            assert held[offset]["reason"] in said.reasons, (value, held[offset], said)
            assert held[offset]["value"] == value
            continue
        assert offset in rows, (value, held[offset])
        row: dict[str, Any] = rows[offset]
        assert all(same(f.type, row[f.name], said.row[f.name]) for f in schema.fields), (value, row, said.row)
        assert parsed(row["_extra"]) == said.row["_extra"], value
    return f"{bool(rows)} {bool(held)}"


TYPED = Target("typed", _seeds, _run, _mutated)
TYPED_VALUES = Target("typed-values", _seeds, _compared, _mutated)
