"""Rows read piece by piece, with their headers and their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import Refused
from sluice.pipelines.model.kafka import CommittedOffset, Range
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.pipelines.republishing.republish_plan import PIECE, Republish, Source, Wishes, pieces
from sluice.pipelines.republishing.republish_rows import RowCursor, with_coordinates
from sluice.pipelines.republishing.send_lane import LaneProgress
from sluice.pipelines.schema.arrays import int64s
from tests.examples import scale_examples

SOURCE = Source("orders", 3, "id", (Range(0, 100),))


def make_batches(offsets: list[int], size: int) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(offsets), size):
        yield pa.RecordBatch.from_pydict({"offset": pa.array(offsets[at : at + size], pa.int64())})


@settings(max_examples=scale_examples(200))
@given(
    st.sets(st.integers(0, 60)).map(sorted),
    st.integers(1, 20),
    st.sets(st.integers(0, 60), min_size=2).map(sorted),
    st.integers(1, 9),
)
def test_cursor_returns_rows_of_each_piece_within_limit(
    offsets: list[int], size: int, ports: list[int], limit: int
) -> None:
    cursor = RowCursor(make_batches(offsets, size))
    pieces_read: list[list[int]] = []
    for a, b in pairwise(ports):
        chunks = [int64s(rows.column("offset")).tolist() for rows in cursor.read_between(a, b, lambda: limit)]
        assert all(0 < len(c) <= limit for c in chunks)
        pieces_read.append([o for c in chunks for o in c])
    assert pieces_read == [[o for o in offsets if a <= o < b] for a, b in pairwise(ports)]


def test_cursor_resumes_within_a_piece() -> None:
    cursor = RowCursor(make_batches([*range(30)], 20))
    assert next(cursor.read_between(0, 30, lambda: 7)).num_rows == 7
    rest = [o for rows in cursor.read_between(7, 30, lambda: 7) for o in int64s(rows.column("offset")).tolist()]
    assert rest == [*range(7, 30)]


entries = st.fixed_dictionaries({"key": st.text(max_size=3), "value": st.one_of(st.none(), st.binary(max_size=3))})


@settings(max_examples=scale_examples(100))
@given(st.lists(st.one_of(st.none(), st.lists(entries, max_size=3)), min_size=2, max_size=8), st.integers(0, 1))
def test_source_coordinates_follow_original_headers(rows: list[list[dict] | None], first: int) -> None:
    headers = pa.array(rows, HEADERS).slice(first)
    offsets = pa.array(range(first, len(rows)), pa.int64())
    extended = with_coordinates(headers, SOURCE, int64s(offsets))
    extended.validate(full=True)
    assert extended.to_pylist() == [
        [
            *(own or ()),
            {"key": "sluice.topic", "value": b"orders"},
            {"key": "sluice.partition", "value": b"3"},
            {"key": "sluice.offset", "value": b"%d" % n},
        ]
        for n, own in enumerate(rows)
        if n >= first
    ]


def test_sources_alternate_and_pieces_cover_the_plan() -> None:
    long = Source("orders", 0, "id", (Range(5, 2 * PIECE + 6), Range(3 * PIECE, 3 * PIECE + 2)))
    plan = Republish("", "orders", "", Wishes("to", 1), (long, SOURCE))
    plan_pieces = pieces(plan)
    assert [p.source for p in plan_pieces] == [0, 1, 0, 0, 0]
    assert [(p.start, p.end) for p in plan_pieces if p.source == 0] == [
        (5, PIECE + 5),
        (PIECE + 5, 2 * PIECE + 5),
        (2 * PIECE + 5, 2 * PIECE + 6),
        (3 * PIECE, 3 * PIECE + 2),
    ]
    assert sum(p.end - p.start for p in plan_pieces) == plan.offsets


def test_plan_digest_does_not_depend_on_name() -> None:
    one = Republish("a", "orders", "", Wishes("to", 1), (SOURCE,), 1)
    other = Republish("b", "orders", "", Wishes("to", 1), (SOURCE,), 2)
    assert one.digest == other.digest != Republish("a", "orders", "x", Wishes("to", 1), (SOURCE,), 1).digest


@pytest.mark.parametrize("metadata", ["", "7", "[" * 4000, '{"at": Infinity, "file": "", "records": 1}', '{"at": 1}'])
def test_commit_metadata_of_other_program_is_refused(metadata: str) -> None:
    plan = Republish("a", "orders", "", Wishes("to", 1), (SOURCE,))
    with pytest.raises(Refused, match="a commit that does not belong to this republish"):
        LaneProgress.read(CommittedOffset(3, metadata=metadata), plan, 0)
