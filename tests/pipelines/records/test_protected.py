"""Protected rows against a model in plain Python: random records and rules, through the formats of a feed."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.rows.protected import hash_texts, spell_values
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.protection import (
    DROPPED,
    Action,
    Protection,
    Rule,
    find_unmatched,
    get_landed_columns,
    protect_schema,
)
from sluice.pipelines.schema.schema import parse_schema
from tests.examples import scale_examples

KEY = "k" * 32
HASHED, MASKED = Rule.of_key(SecretStr(KEY)), Rule(Action.KEEP_LAST, keep=3)
SCHEMA = parse_schema(
    {
        "id": "int64",
        "email": "string",
        "user": "struct<ip:string, name:string, deep:struct<ssn:string, n:int32>>",
        "lines": "list<struct<sku:string, ssn:string>>",
        "numbers": "list<int64>",
        "tags": "map<string, string>",
        "counts": "map<string, int64>",
        "nested": "map<string, struct<ssn:string, ok:string>>",
        "payload": "json",
        "mail": 'string from "e-mail"',
    }
)
Row = dict[str, Any]
RANGE = OffsetRange("t", 0, "id", 0, 1000, 0, 0)


def hash_text(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def build_protection(**rules: Rule) -> Protection:
    return Protection(tuple(rules.items()))


def build_chunk(values: list[bytes | None], keys: list[bytes | None], headers: list[Any]) -> pa.RecordBatch:
    n = len(values)
    columns = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(np.arange(n), pa.int64()),
        pa.array([0] * n, pa.timestamp("ms", "UTC")),
        pa.array([0] * n, pa.int32()),
        pa.array([[{"key": k, "value": v} for k, v in h] if h is not None else None for h in headers], HEADERS),
    ]
    return pa.RecordBatch.from_arrays(columns, ["key", "value", "offset", "timestamp", "timestampType", "headers"])


def convert(
    values: list[Any], protection: Protection | None, **more: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The landed and quarantined rows of these JSON values."""
    texts = [v if isinstance(v, bytes) or v is None else json.dumps(v).encode() for v in values]
    n = len(texts)
    chunk = build_chunk(texts, more.get("keys", [b"k"] * n), more.get("headers", [None] * n))
    pieces = list(Shape(SCHEMA, protection=protection).format().convert(RANGE, chunk))
    landed = [row for p in pieces for row in p.landed.to_pylist()]
    return landed, [row for p in pieces if p.quarantined is not None for row in p.quarantined.to_pylist()]


names = st.sampled_from(["ssn", "SSN", "ok", "token", "user.ssn", 'q"\\', "ünï"])
secret = st.just("secret")
leaves = st.one_of(secret, st.none(), st.booleans(), st.integers(-9, 9), st.floats(-2, 2))
documents = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)
records = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(0, 9),
        "email": secret,
        "user": st.fixed_dictionaries(
            {},
            optional={
                "ip": secret,
                "name": secret,
                "deep": st.fixed_dictionaries({"ssn": secret, "n": st.integers(0, 9)}),
                "ssn": documents,
                "more": documents,
            },
        ),
        "lines": st.lists(
            st.fixed_dictionaries({"sku": secret, "ssn": secret}, optional={"token": documents}), max_size=3
        ),
        "tags": st.dictionaries(names, secret, max_size=3),
        "counts": st.dictionaries(names, st.integers(10**15, 10**16), max_size=3),
        "nested": st.dictionaries(names, st.fixed_dictionaries({"ssn": secret, "ok": secret}), max_size=2),
        "payload": documents,
        "ssn": documents,
        "token": documents,
        "other": documents,
    },
)


def number_secrets(value: Any, numbers: Iterator[int]) -> Any:
    """Make each secret another one."""
    if isinstance(value, dict):
        return {name: number_secrets(inner, numbers) for name, inner in value.items()}
    if isinstance(value, list):
        return [number_secrets(inner, numbers) for inner in value]
    return f"secret{next(numbers)}x" if value == "secret" else value


def list_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from list_leaves(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from list_leaves(inner, path)
    else:
        yield path, value


@settings(max_examples=scale_examples(150))
@given(st.lists(records, min_size=1, max_size=5))
def test_no_value_at_a_protected_path_remains(values: list[dict[str, Any]]) -> None:
    """Values below `ssn` are gone, those below `token` hashed, and all others are where they were."""
    protection = build_protection(**{"*.ssn": DROPPED, "*.token": HASHED, "email": HASHED})
    values = number_secrets(values, count())
    landed, refused = convert(values, protection)
    assert len(landed) + len(refused) == len(values)
    text = repr(landed) + repr(refused)
    offsets = {row["kafka_offset"]: row for row in landed}
    for n, value in enumerate(values):
        for path, leaf in list_leaves(value):
            if not isinstance(leaf, str) or not leaf.startswith("secret"):
                continue
            segments = [s for name in path for s in name.lower().split(".")]
            if "ssn" in segments or "token" in segments or path == ("email",):
                assert leaf not in text, path
                in_map_of_structs = path[0] == "nested" and path[1].lower() == "token"  # such entries are dropped
                hashed = "ssn" not in segments and not in_map_of_structs and n in offsets
                assert not hashed or hash_text(leaf) in repr(offsets[n]), path
            elif n in offsets:
                assert leaf in repr(offsets[n]), path


@settings(max_examples=scale_examples(100))
@given(st.lists(records, min_size=1, max_size=4))
def test_rules_that_match_nothing_change_nothing(values: list[dict[str, Any]]) -> None:
    (with_rule, _), (without, _) = (convert(values, p) for p in (build_protection(**{"*.absent": DROPPED}), None))
    for row in (*with_rule, *without):  # blanks of JSON may go
        row |= {name: row[name] and json.loads(row[name]) for name in ("_extra", "payload")}
    assert with_rule == without


def test_rows_of_sliced_and_empty_batches_are_protected() -> None:
    value = {"lines": [{"sku": "a", "ssn": "s"}], "tags": {"ssn": "x", "b": "c"}, "numbers": [1, 2], "payload": [1]}
    protection = build_protection(**{"*.ssn": DROPPED, "numbers": HASHED, "payload": MASKED})
    bad, tombstone = b"no json", None
    landed, refused = convert([value, bad, tombstone, value, {}, bad, value], protection)
    full = [row for row in landed if row["lines"]]
    assert [row["kafka_offset"] for row in full] == [0, 3, 6]
    for row in full:
        assert row["lines"] == [{"sku": "a"}]
        assert row["tags"] == [("b", "c")]
        assert row["numbers"] == [hash_text("1"), hash_text("2")]
        assert row["payload"] == '["****"]'
    assert [(row["offset"], row["value"], row["withheld_bytes"]) for row in refused] == [(1, None, 7), (5, None, 7)]
    assert convert([bad], protection)[0] == []


def test_keys_and_headers_are_protected_in_rows_and_quarantine() -> None:
    protection = build_protection(**{"_key": HASHED, "_headers.auth": DROPPED, "_headers.x-*": HASHED})
    headers = [[("Auth", b"a"), ("X-User", b"ann"), ("t", b"1"), ("X-None", None)], None]
    landed, refused = convert([{}, b"?"], protection, keys=[b"ann", None], headers=headers)
    assert landed[0]["kafka_key"] == hash_text("ann").encode()
    assert [(h["key"], h["value"]) for h in landed[0]["kafka_headers"]] == [
        ("X-User", hash_text("ann").encode()),
        ("t", b"1"),
        ("X-None", None),
    ]
    assert (refused[0]["key"], refused[0]["headers"], refused[0]["withheld_bytes"]) == (None, None, 1)
    everything = build_protection(**{"_key": DROPPED, "_headers": DROPPED, "*": HASHED})
    landed, _ = convert([{"id": 7}], everything, keys=[b"ann"], headers=[[("a", b"b")]])
    assert (landed[0]["kafka_key"], landed[0]["kafka_headers"], landed[0]["id"]) == (None, [], hash_text("7"))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array(["é", ""]), ["é", ""]),
        (pa.array([b"\xff"]), [b"\xff"]),
        (pa.array([-5], pa.int8()), ["-5"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([Decimal("12.50"), Decimal("0.00"), Decimal("-0.01")], pa.decimal128(9, 2)), ["12.5", "0", "-0.01"]),
        (pa.array([Decimal("1E-30")], pa.decimal128(38, 38)), ["0." + "0" * 29 + "1"]),
        (pa.array([12.5, 1.0, -0.0, 1e22, 0.1, 1e-7]), ["12.5", "1", "0", "1" + "0" * 22, "0.1", "0.0000001"]),
        (pa.array([0.1, 16777216.0], pa.float32()), ["0.1", "16777216"]),
        (pa.array([float("nan"), float("-inf")]), ["nan", "-inf"]),
        (pa.array([date(2026, 1, 2)]), ["2026-01-02"]),
        (pa.array([0, 1500], pa.timestamp("ms", "UTC")), ["1970-01-01T00:00:00Z", "1970-01-01T00:00:01.5Z"]),
        (pa.array([1500 * 10**6], pa.timestamp("ns", "UTC")), ["1970-01-01T00:00:01.5Z"]),
        (pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")), ["2026-01-01T00:00:00Z"]),
    ],
)
def test_texts_of_values_are_the_documented_ones(values: pa.Array, texts: list[str | bytes]) -> None:
    assert spell_values(values) == [t.encode() if isinstance(t, str) else t for t in texts]


@given(st.lists(st.text(), max_size=5))
def test_hashes_are_those_of_hmac(texts: list[str]) -> None:
    data = [t.encode("utf-8", "surrogatepass") for t in texts]
    expected = [hmac.new(KEY.encode(), d, hashlib.sha256).hexdigest() for d in data]
    assert hash_texts(HASHED, data).to_pylist() == expected


def test_a_mask_never_shows_more_than_half_of_a_value() -> None:
    landed, _ = convert(
        [{"email": t} for t in ("", "abc", "abcde", "abcdef", "üöäüöä")], build_protection(email=MASKED)
    )
    assert [row["email"] for row in landed] == ["****", "****", "****", "****def", "****üöä"]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.ssn", "ssn", True),
        ("*.ssn", "a.b.ssn", True),
        ("*.ssn", "ssn.a", False),
        ("*.ssn", "assn", False),
        ("user.*", "user", False),
        ("user.*", "user.a.b", True),
        ("*_token", "api_token", True),
        ("*_token", "a.api_token", False),
        ("a.*.c", "a.c", True),
        ("Lines[].SKU", "lines.sku", True),
        ("tags{}", "tags.any", True),
        ("a.b", "a\nb", False),
    ],
)
def test_patterns_match_paths(pattern: str, path: str, matches: bool) -> None:
    assert (Protection(((pattern, DROPPED),)).find(path) is not None) is matches


def test_schema_of_protected_columns() -> None:
    protection = build_protection(
        **{"id": HASHED, "user": MASKED, "user.ip": DROPPED, "user.deep.*": DROPPED, "mail": DROPPED, "counts": HASHED}
    )
    protected = protect_schema(SCHEMA, protection)
    assert get_landed_columns(protected).texts() == {
        "id": "string",
        "email": "string",
        "user": "struct<name:string>",
        "lines": "list<struct<sku:string, ssn:string>>",
        "numbers": "list<int64>",
        "tags": "map<string, string>",
        "counts": "map<string, string>",
        "nested": "map<string, struct<ssn:string, ok:string>>",
        "payload": "json",
    }
    wrong = build_protection(
        **{"emial": DROPPED, "user.x": DROPPED, "tags.x": DROPPED, "payload.a.b": DROPPED, "*.z": DROPPED}
    )
    assert [*find_unmatched(protect_schema(SCHEMA, wrong), wrong)] == ["emial", "user.x"]


def test_a_key_appears_in_no_text_of_rules() -> None:
    protection = build_protection(email=HASHED)
    assert KEY not in repr(protection) + repr(protection.to_texts()) + repr(Shape(SCHEMA, protection=protection))
    read_back = Protection.parse(protection.to_texts())
    assert read_back == protection
    assert read_back.lacks_keys
    assert not read_back.with_keys(protection).lacks_keys
    assert read_back.fingerprint == protection.fingerprint
    other = build_protection(email=Rule.of_key(SecretStr("x" * 32)))
    assert other.fingerprint != protection.fingerprint
    assert read_back.with_keys(other).lacks_keys
