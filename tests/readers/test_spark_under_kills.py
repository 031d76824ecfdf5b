"""Spark reads a table while its publishers are killed: each filtered query returns rows that landed, each once."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from tests import spark_reader
from tests.faults.account import SEED
from tests.faults.publishers import Course, kill_at_exit
from tests.pipelines.landed_world import A, B, split_offsets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(spark_reader.PYTHON not in os.environ, reason="only `make readers` starts it"),
]

ROUNDS, STEP = 10, 50


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_spark_reads_each_row_once_while_publishers_are_killed(kind: str, tmp_path: Path) -> None:
    """Two publishers at a time, batches and merges under them; in the end Spark reads every snapshot."""
    chance, course = random.Random(SEED), Course(tmp_path, kind)
    course.grow(*split_offsets(A, 10, 0, STEP))
    course.bring_up()
    name = "sluice.db.orders" if kind == "iceberg" else f"delta.`{course.address}/data/orders`"
    with spark_reader.Session(kind, tmp_path) as spark:
        for number in range(1, ROUNDS):
            for key in (A, B):
                course.grow(*split_offsets(key, 10, number * STEP, (number + 1) * STEP))
            if number % 4 == 3:
                course.compact()
            rivals = [course.start_publisher().go() for _ in range(2)]
            with kill_at_exit(*rivals):
                time.sleep(chance.uniform(0.0, 1.0))
                _check(spark, course, name, chance.randrange(number * STEP))
            _check(spark, course, name, chance.randrange(number * STEP))
        course.bring_up(newest=1000)
        last = ROUNDS * STEP // 2
        rows = spark.read_rows(f"SELECT partition, offset FROM {name} WHERE offset >= {last}")
        assert sorted(rows) == sorted((p, o) for p, o in course.expected if o >= last)
        for snapshot in _list_snapshots(course):
            _check(spark, course, f"{name} VERSION AS OF {snapshot}", last)


def _list_snapshots(course: Course) -> list[int]:
    if course.kind == "iceberg":
        return [s.snapshot_id for s in course.load_iceberg().metadata.snapshots]
    return [c["version"] for c in course.load_delta().history()]


def _check(spark: spark_reader.Session, course: Course, source: str, above: int) -> None:
    rows = spark.read_rows(f"SELECT partition, offset FROM {source} WHERE offset > {above}")
    assert len(rows) == len({*rows}), "a row is there twice"
    assert {row for row in course.expected if row[1] > above}.issuperset(rows)
