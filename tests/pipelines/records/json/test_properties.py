"""Any schema, any bytes: what lands equals what an independent reader makes of them, the rest is in quarantine."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.json.counting import values_of_rows, values_of_texts
from sluice.pipelines.records.json.scan import BEYOND
from sluice.pipelines.records.json.unfit import OTHERS, escape_name
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, parse_schema
from tests.examples import examples
from tests.pipelines.records.json.oracle import Pairs, judge, parse, unnamed_members
from tests.pipelines.records.json.rows import FIRST, by_offset, convert, drift, parsed

NAMES = st.sampled_from(["a", "b", "id", "amount", "größe", "a long name with spaces in it", 'quo"te', "back\\slash"])
ODD_NAMES = st.sampled_from(["", "ID", "http.method", "`", "kafka_offset", "_extra", "a\nb", "\x7f"])
"""Fields that no column can be named after."""
_PLAIN = [
    Type(kind)
    for kind in Kind
    if kind not in (Kind.DECIMAL, Kind.TIMESTAMP, Kind.EPOCH, Kind.LIST, Kind.STRUCT, Kind.MAP)
]
_DECIMALS = st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: Type(Kind.DECIMAL, p, s)))
_TIMES = st.sampled_from([Type(Kind.TIMESTAMP, unit=u) for u in ("ms", "us", "ns")])
_EPOCHS = st.sampled_from([Type(Kind.EPOCH, unit=u) for u in ("s", "ms", "us", "ns")])
LEAVES = st.one_of(st.sampled_from(_PLAIN), _DECIMALS, _TIMES, _EPOCHS)


def _fields(types: st.SearchStrategy[Type]) -> st.SearchStrategy[tuple[Field, ...]]:
    field = st.builds(_make_field, NAMES.filter(str.isprintable), types, st.booleans(), st.none() | NAMES | ODD_NAMES)
    return st.lists(field, min_size=1, max_size=4, unique_by=(lambda f: f.name, lambda f: f.json_name)).map(tuple)


def _make_field(name: str, kind: Type, required: bool, source: str | None) -> Field:
    return Field(name, kind, required, None if source == name else source)


def _element(types: st.SearchStrategy[Type]) -> st.SearchStrategy[tuple[Field, ...]]:
    return st.builds(lambda t, r: (Field("", t, r),), types, st.booleans())


TYPES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda f: Type(Kind.STRUCT, fields=f), _fields(inner)),
        st.builds(lambda f: Type(Kind.LIST, fields=f), _element(inner)),
        st.builds(lambda f: Type(Kind.MAP, fields=f), _element(inner)),
    ),
    max_leaves=6,
)
SCHEMAS = st.builds(Schema, _fields(TYPES))

DIGITS = st.text("0123456789", min_size=1, max_size=45)
EDGES = [str(s * (1 << b) + d) for b in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1) for d in (-1, 0, 1)] + [
    "-0",
    "-0.0",
    "1e400",
    "-1e400",
    "1e-400",
    "1.0",
    "1e3",
    "0e99999999999",
    "1e99999999999999999999",
    "5e-324",
    "1e22",
    "1e23",
    "9007199254740993",
    "3.4028235677973366e38",
    "3.5e38",
    "1.17549435e-38",
    "16777217.0",
    "9223372036854775.807",
    "-9223372036854775809",
]
EXPONENTS = st.sampled_from(["", "e5", "E-7", "e+30", "e-310", "e308"])
NUMBERS = st.one_of(
    st.integers(-300, 300).map(str),
    st.integers(-(1 << 65), 1 << 65).map(str),
    st.sampled_from(EDGES),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.builds(lambda a, b, e: f"{int(a)}.{b}{e}", DIGITS, DIGITS, EXPONENTS),
)
ODD_TIMES = [
    "2024-02-29",
    "2023-02-29",
    "1900-02-29",
    "2000-02-29",
    "0000-01-01",
    "0001-01-01",
    "9999-12-31T23:59:59.999999999Z",
    "0001-01-01T00:00:00+00:01",
    "2262-04-11T23:47:16.854775807Z",
    "2262-04-11T23:47:16.854775808Z",
    "2262-04-11T23:47:16Z",
    "2262-04-11T23:47:17Z",
    "1677-09-21T00:12:43.145224192Z",
    "1677-09-21T00:12:43.145224191Z",
    "1677-09-21T00:12:42.999999999Z",
    "2024-01-01T24:00:00Z",
    "2024-01-01T23:59:60Z",
    "2024-01-01T1:00",
    "2024-01-01T10:00:00.",
    "2024-1-1",
    "20240101",
    "2024-01-01T10",
    " 2024-01-01",
]
ZONES = st.sampled_from(["", "Z", "-23:59", "+0000", "+24:00", "z"])
TIMES = st.one_of(
    st.datetimes().map(lambda t: t.isoformat()),
    st.datetimes().map(lambda t: t.isoformat(" ") + "Z"),
    st.datetimes().map(lambda t: t.isoformat(timespec="minutes") + "+05:30"),
    st.builds(lambda t, f, z: f"{t.isoformat(timespec='seconds')}.{f}{z}", st.datetimes(), DIGITS, ZONES),
    st.dates().map(str),
    st.sampled_from(ODD_TIMES),
)
TEXTS = st.one_of(st.text(max_size=20), TIMES, st.binary(max_size=9).map(lambda b: base64.b64encode(b).decode()))
SPACE = st.text(" \t\r\n", max_size=2)


@st.composite
def written(draw: st.DrawFn, text: str) -> str:
    """A string as JSON may write it: some characters escaped."""
    how = draw(st.sampled_from(["plain", "ascii", "all", "slash"]))
    if how == "all":
        units = text.encode("utf-16-be", "surrogatepass")
        return '"' + "".join(f"\\u{units[i] << 8 | units[i + 1]:04X}" for i in range(0, len(units), 2)) + '"'
    said = json.dumps(text, ensure_ascii=how == "ascii")
    return said.replace("/", "\\/") if how == "slash" else said


@st.composite
def jsons(draw: st.DrawFn, level: int = 0) -> str:
    """Any JSON."""
    kinds = ["number", "text", "literal"] + (["list", "object"] if level < 3 else [])
    match draw(st.sampled_from(kinds)):
        case "number":
            return draw(NUMBERS)
        case "text":
            return draw(written(draw(TEXTS)))
        case "list":
            return "[" + ",".join(draw(st.lists(jsons(level + 1), max_size=3))) + "]"
        case "object":
            pairs = draw(st.lists(st.tuples(written("k"), jsons(level + 1)), max_size=3))
            return "{" + ",".join(f"{draw(k) if not isinstance(k, str) else k}:{v}" for k, v in pairs) + "}"
    return draw(st.sampled_from(["true", "false", "null"]))


@st.composite
def fitting(draw: st.DrawFn, t: Type) -> str:
    """JSON that fits the type, more or less."""
    if draw(st.integers(0, 30)) == 0:
        return draw(jsons())
    if draw(st.integers(0, 12)) == 0:
        return "null"
    match t.kind:
        case Kind.STRUCT:
            return draw(objects(t.fields))
        case Kind.LIST:
            return "[" + draw(SPACE) + ",".join(draw(st.lists(fitting(t.fields[0].type), max_size=4))) + "]"
        case Kind.MAP:
            keys = draw(st.lists(st.text(max_size=4), max_size=draw(st.sampled_from([3, 3, 20]))))
            pairs = (f"{draw(written(k))}{draw(SPACE)}:{draw(fitting(t.fields[0].type))}" for k in keys)
            return "{" + ",".join(pairs) + "}"
        case Kind.STRING:
            return draw(written(draw(st.text(max_size=30))))
        case Kind.BINARY:
            return draw(written(base64.b64encode(draw(st.binary(max_size=10))).decode()))
        case Kind.DATE | Kind.TIMESTAMP:
            return draw(written(draw(TIMES)))
        case Kind.BOOL:
            return draw(st.sampled_from(["true", "false"]))
        case Kind.JSON:
            return draw(jsons())
    return draw(NUMBERS)


@st.composite
def objects(draw: st.DrawFn, fields: tuple[Field, ...]) -> str:
    """An object with most of the fields, in any order, and perhaps others."""
    members = [(f.json_name, fitting(f.type)) for f in fields if draw(st.integers(0, 9))]
    if draw(st.integers(0, 4)) == 0:
        members.append((draw(st.text(max_size=5)), jsons()))
    if draw(st.integers(0, 20)) == 0 and members:
        members.append(draw(st.sampled_from(members)))
    if draw(st.booleans()):
        members = draw(st.permutations(members))
    texts = [f"{draw(SPACE)}{draw(written(n))}{draw(SPACE)}:{draw(SPACE)}{draw(v)}{draw(SPACE)}" for n, v in members]
    return "{" + ",".join(texts) + "}"


SNIPPETS = st.sampled_from(b'" \\ { } [ , \xed\xa0\x80 \\ud800 \x00 e - :'.split(b" "))


@st.composite
def mutated(draw: st.DrawFn, value: bytes) -> bytes:
    """The bytes with some cut, doubled or replaced."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(value)))
        to = draw(st.integers(at, min(len(value), at + 4)))
        value = value[:at] + draw(st.binary(max_size=3) | SNIPPETS) + value[to:]
    return value


@st.composite
def records(draw: st.DrawFn, schema: Schema) -> bytes | None:
    """A tombstone, a record that fits, one that nearly does, or anything."""
    how = draw(st.integers(0, 12))
    if how == 0:
        return None
    if how == 1:
        return draw(st.binary(max_size=30))
    if how == 2:
        return draw(jsons()).encode("utf-8", "surrogatepass")
    text = draw(SPACE) + draw(objects(schema.fields)) + draw(SPACE)
    value = text.encode("utf-8", "surrogatepass")
    return draw(mutated(value)) if how < 6 else value


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schema, list[bytes | None]]:
    schema = draw(SCHEMAS)
    return schema, draw(st.lists(records(schema), min_size=1, max_size=12))


@st.composite
def layouts(draw: st.DrawFn, fields: tuple[Field, ...]) -> list[str | Type]:
    """An object whose names and white space are settled, and whose values are not."""
    chosen = draw(st.permutations([f for f in fields if draw(st.integers(0, 9))]))
    pieces: list[str | Type] = ["{"]
    for place, f in enumerate(chosen):
        pieces.append(f"{',' if place else ''}{draw(SPACE)}{draw(written(f.json_name))}{draw(SPACE)}:{draw(SPACE)}")
        nested = f.type.kind is Kind.STRUCT and draw(st.booleans())
        pieces += draw(layouts(f.type.fields)) if nested else [f.type]
        pieces.append(draw(SPACE))
    return [*pieces, "}"]


LAST = b"-" * BEYOND
"""No JSON. Records are read by their template only where a chunk has this number of bytes more."""


@st.composite
def alike(draw: st.DrawFn) -> tuple[Schema, list[bytes | None]]:
    """Records of one or two producers, each of which writes all of its records in the same way."""
    schema = draw(SCHEMAS)
    producers = draw(st.lists(layouts(schema.fields), min_size=1, max_size=2))
    values: list[bytes | None] = []
    for producer in draw(st.lists(st.sampled_from(producers), min_size=4, max_size=16)):
        text = "".join(piece if isinstance(piece, str) else draw(fitting(piece)) for piece in producer)
        value = text.encode("utf-8", "surrogatepass")
        values.append(draw(mutated(value)) if draw(st.integers(0, 9)) == 0 else value)
    return schema, [*values, *draw(st.sampled_from([[], [LAST]]))]


def same(t: Type, ours: Any, theirs: Any) -> bool:
    """Equal as the type has it: floats by their bits, JSON by what it says."""
    if ours is None or theirs is None:
        return ours is None and (theirs is None)
    match t.kind:
        case Kind.FLOAT32 | Kind.FLOAT64:
            return bool(ours == theirs and math.copysign(1, ours) == math.copysign(1, theirs))
        case Kind.JSON:
            return bool(parsed(ours) == theirs)
        case Kind.LIST:
            return len(ours) == len(theirs) and all(same(t.fields[0].type, *p) for p in zip(ours, theirs, strict=True))
        case Kind.MAP:
            return [k for k, _ in ours] == [k for k, _ in theirs] and all(
                same(t.fields[0].type, a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True)
            )
        case Kind.STRUCT:
            return all(same(f.type, ours[f.name], theirs[f.name]) for f in t.fields)
    return bool(ours == theirs and type(ours) is type(theirs))


def check(schema: Schema, values: list[bytes | None]) -> None:
    """What lands of these records, and what does not, is what the independent reader says."""
    landed, quarantined = convert(schema, values)
    rows, held = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    for offset, value in enumerate(values, FIRST):
        said = judge(schema, value)
        if said.row is None:
            assert offset in held, (value, said)
            assert held[offset]["reason"] in said.reasons, (value, held[offset], said)
            assert held[offset]["value"] == value
            assert held[offset]["key"] == b"k%d" % (offset - FIRST)
            continue
        assert offset in rows, (value, held[offset])
        row = rows[offset]
        assert all(same(f.type, row[f.name], said.row[f.name]) for f in schema.fields), (value, row, said.row)
        assert parsed(row["_extra"]) == said.row["_extra"]
        assert row["kafka_tombstone"] is (value is None)
        assert row["kafka_key"] == b"k%d" % (offset - FIRST)


@settings(max_examples=examples(150))
@given(cases() | alike())
def test_what_lands_is_what_an_independent_reader_says(case: tuple[Schema, list[bytes | None]]) -> None:
    check(*case)


@settings(max_examples=examples(100))
@given(cases())
def test_fields_that_no_schema_names_are_counted_by_path_and_refused_where_closed(
    case: tuple[Schema, list[bytes | None]],
) -> None:
    schema, values = case
    judged = [judge(schema, value) for value in values]
    whole = Type(Kind.STRUCT, fields=schema.fields)
    new = [{*unnamed_members(whole, parse(v))} if v and s.row else set() for v, s in zip(values, judged, strict=True)]
    paths = [{_spelled(schema, *member) for member in members} for members in new]
    expected = Counter(path for found in paths for path in found if path is not None)
    counts = {path: n for (kind, path), n in drift(schema, values).items() if kind == "new" and path != OTHERS}
    assert counts == expected
    landed, held = convert(schema, values, closed=None)
    there = [o for o, (s, found) in enumerate(zip(judged, new, strict=True), FIRST) if s.row and not found]
    assert landed["kafka_offset"].to_pylist() == there
    for offset, row in by_offset(held, "offset").items():
        if row["reason"] == "unknown_field":
            assert row["field"] is None or row["field"] in paths[offset - FIRST]


def _spelled(schema: Schema, path: str, name: str) -> str | None:
    """The path of a member as drift has it; None where its name is no text."""
    try:
        shown = escape_name(name.encode())
    except UnicodeEncodeError:
        return None
    shown = shown.replace(".", "\\.") if "struct<" in str([f.text for f in schema.fields]) else shown
    return f"{path}.{shown}" if path else shown


@settings(max_examples=examples(100))
@given(cases())
def test_a_row_has_as_many_values_as_its_record(case: tuple[Schema, list[bytes | None]]) -> None:
    schema, values = case
    landed, _ = convert(schema, values)
    records = [values[offset - FIRST] for offset in landed["kafka_offset"].to_pylist()]
    expected = [_scalars(parse(value)) if value else 0 for value in records]
    assert values_of_texts(pa.array(records, pa.binary())).tolist() == expected
    assert values_of_rows(landed, schema).tolist() == expected


def _scalars(value: Any) -> int:
    inside = [v for _, v in value] if isinstance(value, Pairs) else value
    return sum(map(_scalars, inside)) if isinstance(inside, list) else value is not None


USUAL = b'{"n":1,"s":{"t":"a","j":[1]},"b":true}'


@pytest.mark.parametrize(
    "unlike",
    [
        USUAL.replace(b"[1]", b"null"),
        USUAL.replace(b"[1]", b"nul"),
        USUAL.replace(b"[1]", b"[[[{}]]]"),
        USUAL.replace(b"[1]", b"[" * 99 + b"]" * 99),
        USUAL.replace(b"[1]", b"[" * 97 + b"]" * 97),
        USUAL.replace(b"[1]", b"]"),
        USUAL.replace(b"1,", b"null,"),
        USUAL.replace(b"1,", b'"1",'),
        USUAL.replace(b"1,", b"-,"),
        USUAL.replace(b"1,", b"01,"),
        USUAL.replace(b"1,", b"1.5,"),
        USUAL.replace(b'"a"', b"null"),
        USUAL.replace(b'"a"', b'"\\u00e4"'),
        USUAL.replace(b'"a"', b'"\\ud800"'),
        USUAL.replace(b'"a"', b'"a'),
        USUAL.replace(b'"a"', b'"\xff"'),
        USUAL.replace(b"true", b"null"),
        USUAL.replace(b"true", b"truth"),
        USUAL.replace(b"true", b"false"),
        USUAL.replace(b'{"t":"a","j":[1]}', b"null"),
        USUAL.replace(b'"n":', b'"m":'),
        USUAL.replace(b'"n":', b'"n" :'),
        USUAL.replace(b'"b":', b'"n":'),
        *(USUAL[:i] for i in range(len(USUAL))),
        USUAL + b" ",
        USUAL + b"}",
        USUAL + USUAL,
        b" " + USUAL,
        b"\xef\xbb\xbf" + USUAL,
        b"",
    ],
)
def test_one_that_is_unlike_the_others(unlike: bytes) -> None:
    schema = parse_schema({"n": "int32 not null", "s": "struct<t:string, j:json not null>", "b": "bool"})
    check(schema, [USUAL, USUAL, USUAL, unlike, USUAL, unlike, unlike, USUAL, unlike, LAST])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 200])
def test_texts_names_and_numbers_of_any_length(size: int) -> None:
    name, text, digits = "n" * min(size + 1, 128), "t" * size, ("1234567890" * 20)[: size + 1]
    schema = parse_schema({name: "string", "d": "decimal(38,2)", "i": "int64", "t": "timestamp", "f": "float64"})
    numbers = [
        digits,
        f"-{digits}",
        f"{digits}.5",
        f"-{digits}.25",
        f"0.{digits}",
        "0",
        "-0.0",
        f"{digits}e0",
        f"0{digits}",
    ]
    values = [
        f'{{"{name}":"{text}{more}","d":{number},"i":{digits},"t":"2024-02-29T23:59:{second}Z","f":{number}}}'.encode()
        for more in ("", "\\n", "é", '"', "\x1f")
        for number in numbers
        for second in ("59.123", "60.000", "0a.000", "59.99", "00.1234567", "5:.000", "00,000")
    ]
    check(schema, [*values, LAST])


@settings(max_examples=examples(100))
@given(SCHEMAS)
def test_a_schema_reads_what_it_writes(schema: Schema) -> None:
    if all(f.name.isprintable() for f in schema.fields):
        assert parse_schema(schema.texts()) == schema
