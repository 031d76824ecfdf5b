"""The parts of Sluice's work, each measured alone, on batches that were never in Kafka."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.batches import batches
from bench.budget import MOST_RECORDS, BufferedRange, first, measure_parts
from bench.peer_sluice import feed_of
from bench.stand import PeerTask
from bench.workloads import CHECKED_ORDERS, NESTED, ORDERS, Workload
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.ports import Fetched


def load_partition(workload: Workload) -> BufferedRange:
    """Return the first partition in one response, as a broker would have stored it."""
    (rows,) = workload.chunks(0)
    stored = b"".join(
        struct.pack(">q", b.base) + b.data[8:] for b in batches(rows, workload.codec, workload.batch_bytes)
    )
    s = OffsetRange("t", 0, "t-id", 0, rows.num_rows)
    return BufferedRange(s, (Fetched(0, stored, (), rows.num_rows, True),), 1 << 20)


@pytest.mark.parametrize(
    ("workload", "more"), [(ORDERS, []), (NESTED, ["type"]), (CHECKED_ORDERS, ["type", "validate"])]
)
def test_every_measured_part_takes_time(workload: Workload, more: list[str], tmp_path: Path) -> None:
    few = workload.of(8_000)
    task = PeerTask("127.0.0.1:1", "t", {0: 2_000}, 1, schema=dict(few.schema), contract=few.contract)
    records, spent = measure_parts(feed_of(task, tmp_path / "out"), [load_partition(few)])
    assert records == 2_000
    assert [*spent] == ["crc", "decompress", "decode", *more, "encode"]
    assert all(ns > 0 for ns in spent.values())
    assert not (tmp_path / "out").exists()


def test_buffered_ranges_are_bounded_by_records_and_bytes() -> None:
    many, large = (
        OffsetRange("t", 0, "", 0, 400_000, estimated_bytes=1),
        OffsetRange("t", 1, "", 5, 105, estimated_bytes=1 << 30),
    )
    assert [(s.partition, s.span) for s in first([many, many, many])] == [(0, 400_000), (0, MOST_RECORDS - 400_000)]
    assert [(s.start, s.end) for s in first([large, many])] == [(5, 9), (0, 400_000)]
