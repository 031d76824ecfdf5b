"""Any schema and any bytes: landed rows equal those of an independent reader, and the rest is in quarantine."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.json.counting import values_of_rows, values_of_texts
from sluice.pipelines.records.json.scan import BEYOND
from sluice.pipelines.records.json.unfit import OTHERS, escape_name
from sluice.pipelines.schema.schema import Encoding, Field, Kind, Schema, Type, parse_schema
from tests.examples import scale_examples
from tests.pipelines.records.json.oracle import Pairs, judge, list_unnamed_members, parse
from tests.pipelines.records.json.rows import FIRST, by_offset, convert, count_drift, parse_json

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
_ENCODED = st.one_of(
    st.builds(lambda t: replace(t, encoding=Encoding.TEXT), _DECIMALS | _EPOCHS | st.just(Type(Kind.UINT8))),
    st.builds(lambda t: replace(t, encoding=Encoding.TEXT), st.just(Type(Kind.INT64))),
    st.builds(lambda t: replace(t, encoding=Encoding.BASE64), _DECIMALS),
    st.just(Type(Kind.DATE, encoding=Encoding.DAYS)),
)
LEAVES = st.one_of(st.sampled_from(_PLAIN), _DECIMALS, _TIMES, _EPOCHS, _ENCODED)


def _generate_fields(types: st.SearchStrategy[Type]) -> st.SearchStrategy[tuple[Field, ...]]:
    field = st.builds(_make_field, NAMES.filter(str.isprintable), types, st.booleans(), st.none() | NAMES | ODD_NAMES)
    return st.lists(field, min_size=1, max_size=4, unique_by=(lambda f: f.name, lambda f: f.json_name)).map(tuple)


def _make_field(name: str, kind: Type, required: bool, source: str | None) -> Field:
    return Field(name, kind, required, None if source == name else source)


def _generate_element(types: st.SearchStrategy[Type]) -> st.SearchStrategy[tuple[Field, ...]]:
    return st.builds(lambda t, r: (Field("", t, r),), types, st.booleans())


TYPES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda f: Type(Kind.STRUCT, fields=f), _generate_fields(inner)),
        st.builds(lambda f: Type(Kind.LIST, fields=f), _generate_element(inner)),
        st.builds(lambda f: Type(Kind.MAP, fields=f), _generate_element(inner)),
    ),
    max_leaves=6,
)
SCHEMAS = st.builds(Schema, _generate_fields(TYPES))

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
def write_string(draw: st.DrawFn, text: str) -> str:
    """Generate JSON of a string, with some characters escaped."""
    style = draw(st.sampled_from(["plain", "ascii", "all", "slash"]))
    if style == "all":
        units = text.encode("utf-16-be", "surrogatepass")
        return '"' + "".join(f"\\u{units[i] << 8 | units[i + 1]:04X}" for i in range(0, len(units), 2)) + '"'
    encoded = json.dumps(text, ensure_ascii=style == "ascii")
    return encoded.replace("/", "\\/") if style == "slash" else encoded


@st.composite
def generate_json(draw: st.DrawFn, level: int = 0) -> str:
    """Generate any JSON."""
    kinds = ["number", "text", "literal"] + (["list", "object"] if level < 3 else [])
    match draw(st.sampled_from(kinds)):
        case "number":
            return draw(NUMBERS)
        case "text":
            return draw(write_string(draw(TEXTS)))
        case "list":
            return "[" + ",".join(draw(st.lists(generate_json(level + 1), max_size=3))) + "]"
        case "object":
            pairs = draw(st.lists(st.tuples(write_string("k"), generate_json(level + 1)), max_size=3))
            return "{" + ",".join(f"{draw(k) if not isinstance(k, str) else k}:{v}" for k, v in pairs) + "}"
    return draw(st.sampled_from(["true", "false", "null"]))


@st.composite
def generate_fitting(draw: st.DrawFn, t: Type) -> str:
    """Generate JSON that mostly fits the type."""
    if draw(st.integers(0, 30)) == 0:
        return draw(generate_json())
    if draw(st.integers(0, 12)) == 0:
        return "null"
    match t.encoding:
        case Encoding.TEXT:
            before = draw(st.sampled_from(["", "", "", "+", "0", "x"]))
            return draw(write_string(before + draw(NUMBERS)))
        case Encoding.BASE64:
            return draw(write_string(base64.b64encode(draw(st.binary(max_size=20))).decode()))
        case Encoding.DAYS:
            return draw(st.integers(-720_000, 3_000_000).map(str) | NUMBERS)
    match t.kind:
        case Kind.STRUCT:
            return draw(generate_object(t.fields))
        case Kind.LIST:
            return "[" + draw(SPACE) + ",".join(draw(st.lists(generate_fitting(t.fields[0].type), max_size=4))) + "]"
        case Kind.MAP:
            keys = draw(st.lists(st.text(max_size=4), max_size=draw(st.sampled_from([3, 3, 20]))))
            pairs = (f"{draw(write_string(k))}{draw(SPACE)}:{draw(generate_fitting(t.fields[0].type))}" for k in keys)
            return "{" + ",".join(pairs) + "}"
        case Kind.STRING:
            return draw(write_string(draw(st.text(max_size=30))))
        case Kind.BINARY:
            return draw(write_string(base64.b64encode(draw(st.binary(max_size=10))).decode()))
        case Kind.DATE | Kind.TIMESTAMP:
            return draw(write_string(draw(TIMES)))
        case Kind.BOOL:
            return draw(st.sampled_from(["true", "false"]))
        case Kind.JSON:
            return draw(generate_json())
    return draw(NUMBERS)


@st.composite
def generate_object(draw: st.DrawFn, fields: tuple[Field, ...]) -> str:
    """Generate an object with most of the fields, in any order, and sometimes others."""
    members = [(f.json_name, generate_fitting(f.type)) for f in fields if draw(st.integers(0, 9))]
    if draw(st.integers(0, 4)) == 0:
        members.append((draw(st.text(max_size=5)), generate_json()))
    if draw(st.integers(0, 20)) == 0 and members:
        members.append(draw(st.sampled_from(members)))
    if draw(st.booleans()):
        members = draw(st.permutations(members))
    texts = [
        f"{draw(SPACE)}{draw(write_string(n))}{draw(SPACE)}:{draw(SPACE)}{draw(v)}{draw(SPACE)}" for n, v in members
    ]
    return "{" + ",".join(texts) + "}"


SNIPPETS = st.sampled_from(b'" \\ { } [ , \xed\xa0\x80 \\ud800 \x00 e - :'.split(b" "))


@st.composite
def mutate(draw: st.DrawFn, value: bytes) -> bytes:
    """Generate a copy of the bytes with some removed, inserted or replaced."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(value)))
        to = draw(st.integers(at, min(len(value), at + 4)))
        value = value[:at] + draw(st.binary(max_size=3) | SNIPPETS) + value[to:]
    return value


@st.composite
def generate_record(draw: st.DrawFn, schema: Schema) -> bytes | None:
    """Generate a tombstone, a record that fits or nearly fits the schema, or any bytes."""
    how = draw(st.integers(0, 12))
    if how == 0:
        return None
    if how == 1:
        return draw(st.binary(max_size=30))
    if how == 2:
        return draw(generate_json()).encode("utf-8", "surrogatepass")
    text = draw(SPACE) + draw(generate_object(schema.fields)) + draw(SPACE)
    value = text.encode("utf-8", "surrogatepass")
    return draw(mutate(value)) if how < 6 else value


@st.composite
def generate_case(draw: st.DrawFn) -> tuple[Schema, list[bytes | None]]:
    schema = draw(SCHEMAS)
    return schema, draw(st.lists(generate_record(schema), min_size=1, max_size=12))


@st.composite
def generate_layout(draw: st.DrawFn, fields: tuple[Field, ...]) -> list[str | Type]:
    """Generate an object with fixed names and white space, and with the type in place of each value. It may have
    members that the schema does not name."""
    unknown = [
        Field(draw(st.text(max_size=5)), Type(Kind.JSON)) for _ in range(draw(st.sampled_from((0, 0, 1, 2, 20))))
    ]
    chosen = draw(st.permutations([*(f for f in fields if draw(st.integers(0, 9))), *unknown]))
    pieces: list[str | Type] = ["{"]
    for index, f in enumerate(chosen):
        pieces.append(
            f"{',' if index else ''}{draw(SPACE)}{draw(write_string(f.json_name))}{draw(SPACE)}:{draw(SPACE)}"
        )
        nested = f.type.kind is Kind.STRUCT and draw(st.booleans())
        pieces += draw(generate_layout(f.type.fields)) if nested else [f.type]
        pieces.append(draw(SPACE))
    return [*pieces, "}"]


LAST = b"-" * BEYOND
"""Not JSON. Records are read by their template only if this number of bytes follows them in the chunk."""


@st.composite
def generate_alike(draw: st.DrawFn) -> tuple[Schema, list[bytes | None]]:
    """Generate records of one or two producers, each of which writes all its records in the same way."""
    schema = draw(SCHEMAS)
    producers = draw(st.lists(generate_layout(schema.fields), min_size=1, max_size=2))
    values: list[bytes | None] = []
    for producer in draw(st.lists(st.sampled_from(producers), min_size=4, max_size=16)):
        text = "".join(piece if isinstance(piece, str) else draw(generate_fitting(piece)) for piece in producer)
        value = text.encode("utf-8", "surrogatepass")
        values.append(draw(mutate(value)) if draw(st.integers(0, 9)) == 0 else value)
    return schema, [*values, *draw(st.sampled_from([[], [LAST]]))]


def is_same(t: Type, ours: Any, theirs: Any) -> bool:
    """Return true if the values are equal for the type: floats with their sign, JSON after parsing."""
    if ours is None or theirs is None:
        return ours is None and (theirs is None)
    match t.kind:
        case Kind.FLOAT32 | Kind.FLOAT64:
            return bool(ours == theirs and math.copysign(1, ours) == math.copysign(1, theirs))
        case Kind.JSON:
            return bool(parse_json(ours) == theirs)
        case Kind.LIST:
            return len(ours) == len(theirs) and all(
                is_same(t.fields[0].type, *p) for p in zip(ours, theirs, strict=True)
            )
        case Kind.MAP:
            return [k for k, _ in ours] == [k for k, _ in theirs] and all(
                is_same(t.fields[0].type, a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True)
            )
        case Kind.STRUCT:
            return all(is_same(f.type, ours[f.name], theirs[f.name]) for f in t.fields)
    return bool(ours == theirs and type(ours) is type(theirs))


def check(schema: Schema, values: list[bytes | None]) -> None:
    """Check that landed and quarantined rows are those of the independent reader."""
    landed, quarantined = convert(schema, values)
    rows, refused = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    for offset, value in enumerate(values, FIRST):
        verdict = judge(schema, value)
        if verdict.row is None:
            assert offset in refused, (value, verdict)
            assert refused[offset]["reason"] in verdict.reasons, (value, refused[offset], verdict)
            assert refused[offset]["value"] == value
            assert refused[offset]["key"] == b"k%d" % (offset - FIRST)
            continue
        assert offset in rows, (value, refused[offset])
        row = rows[offset]
        assert all(is_same(f.type, row[f.name], verdict.row[f.name]) for f in schema.fields), (value, row, verdict.row)
        assert parse_json(row["_extra"]) == verdict.row["_extra"]
        assert row["kafka_tombstone"] is (value is None)
        assert row["kafka_key"] == b"k%d" % (offset - FIRST)


@settings(max_examples=scale_examples(150))
@given(generate_case() | generate_alike())
def test_landed_rows_match_an_independent_reader(case: tuple[Schema, list[bytes | None]]) -> None:
    check(*case)


@settings(max_examples=scale_examples(100))
@given(generate_case())
def test_values_are_counted_and_fields_not_in_schema_by_path_and_refused_if_closed(
    case: tuple[Schema, list[bytes | None]],
) -> None:
    schema, values = case
    check_counts_of_values(schema, values)
    judged = [judge(schema, value) for value in values]
    record_type = Type(Kind.STRUCT, fields=schema.fields)
    new = [
        {*list_unnamed_members(record_type, parse(v))} if v and s.row else set()
        for v, s in zip(values, judged, strict=True)
    ]
    paths = [{_spell_path(schema, *member) for member in members} for members in new]
    expected = Counter(path for unnamed in paths for path in unnamed if path is not None)
    counts = {path: n for (kind, path), n in count_drift(schema, values).items() if kind == "new" and path != OTHERS}
    assert counts == expected
    landed, refused = convert(schema, values, closed=None)
    expected_offsets = [
        o for o, (s, unnamed) in enumerate(zip(judged, new, strict=True), FIRST) if s.row and not unnamed
    ]
    assert landed["kafka_offset"].to_pylist() == expected_offsets
    for offset, row in by_offset(refused, "offset").items():
        if row["reason"] == "unknown_field":
            assert row["field"] is None or row["field"] in paths[offset - FIRST]


def _spell_path(schema: Schema, path: str, name: str) -> str | None:
    """Return the path of a member as in drift, or None if its name cannot be encoded."""
    try:
        spelled = escape_name(name.encode())
    except UnicodeEncodeError:
        return None
    spelled = spelled.replace(".", "\\.") if "struct<" in str([f.text for f in schema.fields]) else spelled
    return f"{path}.{spelled}" if path else spelled


def check_counts_of_values(schema: Schema, values: list[bytes | None]) -> None:
    """Check that a row has as many values as its record."""
    landed, _ = convert(schema, values)
    landed_values = [values[offset - FIRST] for offset in landed["kafka_offset"].to_pylist()]
    expected = [_count_scalars(parse(value)) if value else 0 for value in landed_values]
    assert values_of_texts(pa.array(landed_values, pa.binary())).tolist() == expected
    assert values_of_rows(landed, schema).tolist() == expected


def _count_scalars(value: Any) -> int:
    inside = [v for _, v in value] if isinstance(value, Pairs) else value
    return sum(map(_count_scalars, inside)) if isinstance(inside, list) else value is not None


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
def test_record_unlike_its_neighbours_matches_an_independent_reader(unlike: bytes) -> None:
    schema = parse_schema({"n": "int32 not null", "s": "struct<t:string, j:json not null>", "b": "bool"})
    check(schema, [USUAL, USUAL, USUAL, unlike, USUAL, unlike, unlike, USUAL, unlike, LAST])


STRANGE = b'{"x":"a","n":1,"y" : [{"z":1}],"s":{"u":1,"t":"a","j":[1],"v":{}},"b":true,"n2":-1.5}'


@pytest.mark.parametrize(
    "unlike",
    [
        STRANGE.replace(b'"a",', b'"a\\u00e4\xc3\xa4",', 1),
        STRANGE.replace(b'"a",', b'"\\ud800",', 1),
        STRANGE.replace(b'"a",', b"null,", 1),
        STRANGE.replace(b'[{"z":1}]', b"[" * 99 + b"]" * 99),
        STRANGE.replace(b'[{"z":1}]', b"[" * 98 + b"]" * 98),
        STRANGE.replace(b'[{"z":1}]', b"[{]"),
        STRANGE.replace(b"-1.5", b"-1.5.5"),
        STRANGE.replace(b"-1.5", b"x"),
        STRANGE.replace(b'"u":1', b'"u":"' + b"w" * 100 + b'"'),
        STRANGE.replace(b'"u":1', b'"u":tru'),
        STRANGE.replace(b'"v":{}', b'"v":{"w":[]}'),
        STRANGE.replace(b'"v":{}', b'"w":{}'),
        STRANGE.replace(b'"x"', b'"y"'),
        STRANGE.replace(b'"n":1', b'"n":"1"'),
        STRANGE.replace(b'"n":1', b'"n":null'),
        STRANGE.replace(b'{"x":"a",', b"{"),
        *(STRANGE[:i] for i in range(len(STRANGE))),
    ],
)
def test_unknown_members_of_records_alike_match_an_independent_reader(unlike: bytes) -> None:
    schema = parse_schema({"n": "int32 not null", "s": "struct<t:string, j:json not null>", "b": "bool"})
    other = STRANGE.replace(b":1", b":22").replace(b'"a"', b'"' + b"long " * 20 + b'"')
    check(schema, [STRANGE, STRANGE, other, unlike, STRANGE, unlike, unlike, other, unlike, LAST])
    flat = parse_schema({"n": "int32 not null"})
    check(flat, [STRANGE, STRANGE, other, unlike, STRANGE, unlike, unlike, other, unlike, LAST])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 200])
def test_texts_names_and_numbers_of_any_length_match_independent_reader(size: int) -> None:
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


@settings(max_examples=scale_examples(100))
@given(SCHEMAS)
def test_schema_texts_round_trip(schema: Schema) -> None:
    if all(f.name.isprintable() for f in schema.fields):
        assert parse_schema(schema.texts()) == schema
