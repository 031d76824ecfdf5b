"""A peer that lands anything other than the records sent fails the check, however its files are laid out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from bench.check import RAW, TYPED, Digest, check_landed, digest_of_sent
from bench.workloads import ESCAPES, NESTED, ORDERS, SMALL, TYPED_ORDERS, Workload
from sluice.pipelines.errors import ProofFailed, UsageError

WORKLOAD = ORDERS.of(1_000)
PARTITIONS = range(len(WORKLOAD.weights))
Spoil = Callable[[pa.Table], pa.Table]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture(scope="module")
def digests() -> dict[int, Digest]:
    return digest_workload()


def digest_workload(*schema: Any) -> dict[int, Digest]:
    return {p: digest_of_sent(p, chunk, *schema) for p in PARTITIONS for chunk in WORKLOAD.chunks(p)}


@cache
def make_rows(partition: int, unit: str = "ms", workload: Workload = WORKLOAD) -> pa.Table:
    """Return the rows that a faultless peer lands for a partition."""
    (rows,) = workload.chunks(partition)
    count = rows.num_rows
    traces = [[{"key": "trace", "value": t.encode()}] if t else None for t in rows.column("trace").to_pylist()]
    columns = {
        "key": rows.column("key").cast(pa.binary()),
        "value": rows.column("value").cast(pa.binary()),
        "topic": pa.array(["t"] * count),
        "partition": pa.array([partition] * count, pa.int32()),
        "offset": rows.column("offset"),
        "timestamp": rows.column("timestamp").cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp(unit, "UTC")),
        "timestampType": pa.array([0] * count, pa.int32()),
        "headers": pa.array(traces, HEADERS),
    }
    return pa.table(columns)


def write_tables(folder: Path, *tables: pa.Table) -> Path:
    for i, table in enumerate(tables):
        (folder / f"part={i}").mkdir()
        pq.write_table(table, folder / f"part={i}" / "rows.parquet")
    return folder


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_faultless_rows_pass_in_any_order_and_any_number_of_files(
    tmp_path: Path, unit: str, digests: dict[int, Digest]
) -> None:
    landed_rows = pa.concat_tables(make_rows(p, unit) for p in PARTITIONS)
    shuffled = landed_rows.take(pc.sort_indices(landed_rows, [("key", "ascending"), ("offset", "descending")]))
    files, size = check_landed(
        "peer", write_tables(tmp_path, shuffled.slice(0, 333), shuffled.slice(333)), "t", digests
    )
    assert files == 2
    assert size == sum(f.stat().st_size for f in tmp_path.rglob("*.parquet"))


def replace_column(table: pa.Table, column: str, change: Callable[[list[object]], list[object]]) -> pa.Table:
    i = table.schema.get_field_index(column)
    return table.set_column(i, column, pa.array(change(table.column(column).to_pylist()), table.schema.field(i).type))


def replace_first(column: str, value: object) -> Spoil:
    return lambda rows: replace_column(rows, column, lambda values: [value, *values[1:]])


def swap_first_two(column: str) -> Spoil:
    return lambda rows: replace_column(rows, column, lambda values: [values[1], values[0], *values[2:]])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows.slice(1),
        lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]),
        lambda rows: pa.concat_tables([rows.slice(1), rows.slice(1, 1)]),
        replace_first("value", b"{}"),
        replace_first("key", None),
        swap_first_two("value"),
        swap_first_two("offset"),
        swap_first_two("timestamp"),
        replace_first("headers", [{"key": "trace", "value": b"other"}]),
        replace_first("topic", "another"),
        replace_first("timestampType", 1),
        lambda rows: rows.slice(0, 0),
    ],
    ids=["less", "more", "twice", "value", "key", "values", "offsets", "times", "header", "topic", "type", "nothing"],
)
def test_any_fault_is_reported(tmp_path: Path, spoil: Spoil, digests: dict[int, Digest]) -> None:
    others = [make_rows(p) for p in PARTITIONS if p]
    with pytest.raises(ProofFailed, match=r"peer landed .* in t:0"):
        check_landed("peer", write_tables(tmp_path, spoil(make_rows(0)), *others), "t", digests)


def test_missing_files_are_a_fault(tmp_path: Path, digests: dict[int, Digest]) -> None:
    with pytest.raises(ProofFailed):
        check_landed("peer", tmp_path, "t", digests)


def test_rows_of_partition_without_records_are_a_fault(tmp_path: Path, digests: dict[int, Digest]) -> None:
    fewer = {p: d for p, d in digests.items() if p != 3} | {3: Digest()}
    with pytest.raises(ProofFailed, match="t:3"):
        check_landed("peer", write_tables(tmp_path, *(make_rows(p) for p in PARTITIONS)), "t", fewer)


def test_workload_is_deterministic_and_matches_its_counts(digests: dict[int, Digest]) -> None:
    assert digest_workload() == digests
    assert sum(d.rows for d in digests.values()) == WORKLOAD.records == sum(WORKLOAD.counts)
    assert len({d.sum for d in digests.values()}) == len(PARTITIONS)


def test_a_fingerprint_changes_with_the_workload() -> None:
    assert ORDERS.of(1_000).fingerprint == WORKLOAD.fingerprint != ORDERS.of(1_001).fingerprint


def test_fewer_records_than_partitions_are_refused() -> None:
    with pytest.raises(UsageError):
        ORDERS.of(3)


def make_typed_rows(partition: int) -> pa.Table:
    """Return the rows that a faultless peer lands for a partition of typed orders."""
    raw = make_rows(partition)
    orders = [json.loads(v, parse_float=Decimal) for v in raw.column("value").to_pylist()]
    columns = {name: pa.array([o[name] for o in orders]) for name, _ in TYPED_ORDERS.schema}
    columns["ts"] = columns["ts"].cast(pa.timestamp("us", "UTC"))
    columns["amount"] = columns["amount"].cast(pa.decimal128(12, 2))
    columns["items"] = columns["items"].cast(pa.int32())
    return pa.table(columns | {f"kafka_{n}": raw.column(n) for n in raw.column_names if n != "value"})


def test_typed_rows_are_compared_with_independent_json_reader(tmp_path: Path) -> None:
    schema = TYPED_ORDERS.schema
    digests = digest_workload(schema)
    good = [make_typed_rows(p) for p in PARTITIONS]
    (tmp_path / "good").mkdir()
    check_landed("peer", write_tables(tmp_path / "good", *good), "t", digests, schema)
    at = good[0].schema.get_field_index("amount")
    amounts = [good[0]["amount"][0].as_py() + 1, *good[0]["amount"].to_pylist()[1:]]
    wrong = good[0].set_column(at, "amount", pa.array(amounts, pa.decimal128(12, 2)))
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ProofFailed, match="other rows than were sent"):
        check_landed("peer", write_tables(tmp_path / "wrong", wrong, *good[1:]), "t", digests, schema)


def test_peer_without_headers_is_checked_on_all_other_columns(tmp_path: Path, digests: dict[int, Digest]) -> None:
    bare = [make_rows(p).drop_columns("headers") for p in PARTITIONS]
    without = replace(RAW, headers="", files="part=*/*.parquet")
    check_landed("peer", write_tables(tmp_path, *bare), "t", digests, layout=without)
    (tmp_path / "wrong").mkdir()
    wrong = write_tables(tmp_path / "wrong", replace_first("value", b"{}")(bare[0]), *bare[1:])
    with pytest.raises(ProofFailed, match="other rows than were sent"):
        check_landed("peer", wrong, "t", digests, layout=without)


def test_peer_without_key_column_is_checked_by_key_expression(tmp_path: Path) -> None:
    schema = TYPED_ORDERS.schema
    digests = digest_workload(schema)
    folder = write_tables(tmp_path, *(make_typed_rows(p).drop_columns("kafka_key") for p in PARTITIONS))
    layout = replace(TYPED, key="no_such_column", typed_key="encode(customer)")
    check_landed("peer", folder, "t", digests, schema, layout)
    with pytest.raises(ProofFailed, match="other rows than were sent"):
        check_landed("peer", folder, "t", digests, schema, replace(layout, typed_key="encode(country)"))


LINES = pa.list_(pa.struct([("sku", pa.string()), ("quantity", pa.int32()), ("price", pa.decimal128(9, 2))]))


def make_nested_rows(change: str = "", to: object = None) -> pa.Table:
    """Return the rows that a faultless peer lands for nested orders, with one field of the first order changed."""
    (rows,) = NESTED.of(400).chunks(0)
    orders = [json.loads(v, parse_float=Decimal) for v in rows.column("value").to_pylist()]
    if change:
        orders[0][change] = to
    raw = make_rows(0, workload=NESTED.of(400))
    columns = {
        "order_id": pa.array([o["order_id"] for o in orders]),
        "ts": pa.array([o["ts"] for o in orders]).cast(pa.timestamp("us", "UTC")),
        "customer": pa.array([o["customer"] for o in orders]),
        "lines": pa.array([o["lines"] for o in orders], LINES),
        "tags": pa.array([o["tags"] for o in orders], pa.list_(pa.string())),
        "status": pa.array([o["status"] for o in orders]),
    }
    return pa.table(columns | {f"kafka_{n}": raw.column(n) for n in raw.column_names if n != "value"})


def make_line(sku: str | None, quantity: int = 1) -> dict[str, object]:
    return {"sku": sku, "quantity": quantity, "price": Decimal("1.10")}


def test_nested_rows_are_compared_with_independent_json_reader(tmp_path: Path) -> None:
    (rows,) = NESTED.of(400).chunks(0)
    digests = {0: digest_of_sent(0, rows, NESTED.schema)}
    check_landed("peer", write_tables(tmp_path, make_nested_rows()), "t", digests, NESTED.schema)


@pytest.mark.parametrize(
    ("change", "to"),
    [
        ("customer", {"id": "c-000000", "country": "DE"}),
        ("customer", None),
        ("lines", [make_line("p-0000")]),
        ("lines", None),
        ("lines", [None]),
        ("tags", ["t-99"]),
        ("tags", [None]),
        ("tags", None),
    ],
)
def test_any_fault_in_nested_fields_is_reported(tmp_path: Path, change: str, to: object) -> None:
    (rows,) = NESTED.of(400).chunks(0)
    digests = {0: digest_of_sent(0, rows, NESTED.schema)}
    with pytest.raises(ProofFailed, match="other rows than were sent"):
        check_landed("peer", write_tables(tmp_path, make_nested_rows(change, to)), "t", digests, NESTED.schema)


def test_null_list_empty_list_and_list_of_null_differ(tmp_path: Path) -> None:
    schema = [("x", "list<int32>")]
    values = ['{"x":[]}', '{"x":null}', '{"x":[null]}', '{"x":[null,null]}', '{"x":[1]}']
    (rows,) = ORDERS.of(4).chunks(0)
    sums = {
        digest_of_sent(0, rows.set_column(rows.schema.get_field_index("value"), "value", pa.array([v])), schema).sum
        for v in values
    }
    assert len(sums) == len(values)


@pytest.mark.parametrize(("workload", "size"), [(SMALL, 50), (ORDERS, 190), (NESTED, 280), (ESCAPES, 205)])
def test_values_are_json_of_documented_size(workload: Workload, size: int) -> None:
    (rows,) = workload.of(400).chunks(0)
    values = rows.column("value").to_pylist()
    assert sum(map(len, values)) / len(values) == pytest.approx(size, rel=0.1)
    assert all({*json.loads(v)} >= {name for name, _ in workload.schema} for v in values)


def test_every_escapes_row_has_escapes_and_reordered_keys() -> None:
    (rows,) = ESCAPES.of(400).chunks(0)
    for value in rows.column("value").to_pylist():
        assert "\\" in value
        assert [*json.loads(value)] != [name for name, _ in ESCAPES.schema]
