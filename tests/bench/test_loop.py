"""The rows that a plain consumer loop lands, compared with the records sent like those of any peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import loop
from bench.check import check_landed, digest_of_sent
from bench.stand import PeerTask
from bench.types import fields, spark_type
from bench.workloads import ESCAPES, NESTED, ORDERS, SMALL, TYPED_ORDERS, Workload


def _make_lot(workload: Workload, partition: int) -> loop.Lot:
    (rows,) = workload.chunks(partition)
    columns = rows.to_pydict()
    return {
        "key": [k.encode() for k in columns["key"]],
        "value": [v.encode() for v in columns["value"]],
        "topic": ["t"] * rows.num_rows,
        "partition": [partition] * rows.num_rows,
        "offset": columns["offset"],
        "timestamp": columns["timestamp"],
        "timestampType": [0] * rows.num_rows,
        "headers": [[("trace", t.encode())] if t else None for t in columns["trace"]],
    }


@pytest.mark.parametrize("workload", [ORDERS, TYPED_ORDERS, NESTED, ESCAPES, SMALL], ids=lambda w: w.name)
def test_loop_lands_all_sent_records(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", json)  # installed for peers only; `json` reads the same
    few = workload.of(400)
    partitions = range(len(few.counts))
    expected = {p: digest_of_sent(p, chunk, few.schema) for p in partitions for chunk in few.chunks(p)}
    task = PeerTask("", "t", dict(enumerate(few.counts)), 1, schema=dict(few.schema))
    loop.write((_make_lot(few, p) for p in partitions), task, tmp_path / "out")
    files, _ = check_landed("loop", tmp_path / "out", "t", expected, few.schema)
    assert files == 1


def test_types_are_written_in_spark_syntax() -> None:
    types = {f.name: spark_type(f.type) for f in fields(NESTED.schema + SMALL.schema)}
    assert types["lines"] == "array<struct<`sku`:string, `quantity`:int, `price`:decimal(9,2)>>"
    assert (types["customer"], types["tags"]) == ("struct<`id`:string, `country`:string>", "array<string>")
    assert (types["seq"], types["ts"], types["celsius"]) == ("bigint", "timestamp", "decimal(6,2)")
