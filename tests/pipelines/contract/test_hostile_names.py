"""Names of columns and values of a contract never become SQL."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import parse_schema
from sluice.pipelines.validation.batch_expectations import hold_whole
from sluice.testing.lake import MemoryLake

SQL = ['x"; drop table t; --', "'); drop table t; --", "c0", "select", "$folder", "?", "{0}", "a b", "-- x", "/*"]


@pytest.mark.parametrize("name", SQL)
def test_batch_expectations_accept_any_column_name_and_value(name: str) -> None:
    schema = parse_schema({name: "string", "other": "int32"})
    values = [*SQL, SQL[0]]
    columns = {name: values, "other": pa.array(range(len(values)), pa.int32())}
    columns |= {"kafka_offset": pa.array(range(len(values)), pa.int64()), "kafka_tombstone": [False] * len(values)}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    lake = MemoryLake()
    lake.put("x", sink.getvalue())
    expectations = [
        ("expect_column_values_to_be_unique", {"column": name}),
        ("expect_column_distinct_values_to_equal_set", {"column": name, "value_set": SQL}),
        ("expect_column_most_common_value_to_be_in_set", {"column": name, "value_set": SQL[:1]}),
        ("expect_column_max_to_be_between", {"column": "other", "max_value": len(SQL)}),
    ]
    suite = {"name": "x", "expectations": [{"type": t, "kwargs": kwargs} for t, kwargs in expectations]}
    part = Part("x", PartKind.LANDED, "x", "x", len(values), 1, "")
    one = Receipt(OffsetRange("o", 0, "i", 0, len(values)), len(values), Counts(landed=len(values)), (part,), "a")
    shape = Shape(schema, parse_contract(json.dumps(suite).encode(), schema))
    results = hold_whole(shape, [one], lake)  # type: ignore[arg-type]
    assert [r.passed for r in results] == [False, True, True, True]
    assert results[0].first == ("o:0:0", f"o:0:{len(SQL)}")
