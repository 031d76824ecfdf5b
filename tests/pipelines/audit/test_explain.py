"""The class and the place of a record at an offset: each class is named."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.ledger.entries import (
    Entry,
    KeyRange,
    LossEntry,
    OriginEntry,
    OriginItem,
    PlanEntry,
    PublishEntry,
    SkipEntry,
)
from sluice.pipelines.model.kafka import Isolation, Key, Range, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.pipelines.landed_world import A, B, World

KEY = Key("orders", 0, "id-1")
ORIGIN = 5


class Book:
    """A ledger with one partition, whose origin is offset 5."""

    def __init__(self) -> None:
        self.lake = MemoryLake()
        self.ledger = Ledger(self.lake, "orders", lambda: 0)
        self.put(OriginEntry(items=(OriginItem(key=KEY, offset=ORIGIN, committed=None, why="test", opens=0),)))

    def put(self, entry: Entry) -> int:
        appended = self.ledger.append(lambda state: entry)
        assert appended is not None
        return appended.number

    def plan(self, start: int, end: int) -> tuple[int, OffsetRange]:
        s = OffsetRange(*KEY, start, end, window=0)
        plan = Plan("orders", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (s,)),))
        return self.put(PlanEntry(plan=plan, hash=plan.hash, owner=owner())), s

    def publish(self, start: int, end: int, landed: list[int], bad: list[int], **others: int) -> None:
        batch, s = self.plan(start, end)
        parts = tuple(
            self.write_part(kind, offsets)
            for kind, offsets in ((PartKind.LANDED, landed), (PartKind.QUARANTINED, bad))
            if offsets
        )
        receipt = Receipt(s, end, Counts(landed=len(landed), quarantined=len(bad), **others), parts, "a")
        self.put(PublishEntry(batch=batch, token=owner().token, receipts=(receipt,)))

    def write_part(self, kind: PartKind, offsets: list[int]) -> Part:
        path = f"{kind}/{offsets[0]}.parquet"
        few = pa.array(["bad"] * len(offsets))
        columns = {"offset": pa.array(offsets), "reason": few, "field": few, "detail": few}
        sink = io.BytesIO()
        pq.write_table(pa.table(columns | {"byte": pa.nulls(len(offsets), pa.int32())}), sink, row_group_size=2)
        self.lake.files[path] = sink.getvalue()
        return Part(path, kind, path, path, len(offsets), 1, "0" * 64)

    def explain_offset(self, offset: int) -> tuple[OffsetClass, str]:
        explanation = explain(Ledger(self.lake, "orders", lambda: 0), self.lake, KEY.tp, offset)
        return explanation.class_, explanation.text


@pytest.fixture
def book() -> Book:
    book = Book()
    book.publish(5, 12, landed=[5, 6, 8, 11], bad=[7], control=1, aborted=1)
    book.publish(12, 15, landed=[12, 14], bad=[], dropped=1)
    book.put(LossEntry(ranges=(KeyRange(key=KEY, range=Range(15, 18)),), reason="retention"))
    book.put(SkipEntry(ranges=(KeyRange(key=KEY, range=Range(18, 20)),), reason="poison"))
    book.plan(20, 25)
    return book


@pytest.mark.parametrize(
    ("offset", "expected", "says"),
    [
        (8, OffsetClass.LANDED, "row 0 of row group 1 in memory://landed/5.parquet"),
        (7, OffsetClass.QUARANTINED, "memory://quarantined/7.parquet; bad: bad: bad"),
        (
            9,
            OffsetClass.NO_RECORD,
            "a control record or in an aborted transaction (offset range orders:0:5-12 has 1 control, 1 aborted)",
        ),
        (13, OffsetClass.DROPPED, "dropped by the feed's on_undecodable"),
        (16, OffsetClass.LOST, "[15, 18)"),
        (19, OffsetClass.SKIPPED, "[18, 20)"),
        (22, OffsetClass.RESERVED, "run run-1"),
        (25, OffsetClass.PENDING, "the frontier is 20"),
        (4, OffsetClass.BELOW_ORIGIN, "origin 5"),
    ],
)
def test_each_class_is_shown_by_name(book: Book, offset: int, expected: OffsetClass, says: str) -> None:
    kind, text = book.explain_offset(offset)
    assert kind is expected
    assert says in text


@pytest.mark.parametrize("offset", [6, 9, 13, 14])
def test_swapped_files_are_reported(book: Book, offset: int) -> None:
    files = book.lake.files
    files["landed/5.parquet"], files["landed/12.parquet"] = files["landed/12.parquet"], files["landed/5.parquet"]
    with pytest.raises(PartUnreadable, match=r"the file was replaced") as caught:
        book.explain_offset(offset)
    assert "sluice audit orders --all --hashes" in caught.value.remedy


def test_a_file_of_another_partition_with_the_same_offsets_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land((A, 0, 100), (B, 0, 100))
    one, other = (p for p in sorted(world.list_files()) if p.startswith("data"))
    files = world.lake.files
    files[one], files[other] = files[other], files[one]
    with pytest.raises(PartUnreadable, match=r"is not the file of orders:1:0-100: it has .* orders:0:0-100"):
        explain(world.ledger, world.lake, B.tp, 7)


def test_unknown_partition(book: Book) -> None:
    explanation = explain(book.ledger, book.lake, TopicPartition("orders", 9), 1)
    assert explanation.class_ is OffsetClass.UNKNOWN_PARTITION
